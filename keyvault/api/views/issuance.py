"""Credentials for services: asked for, looked at, and collected once by whoever asked."""

from typing import Any

from rest_framework.request import Request
from rest_framework.response import Response

from keyvault.access.decision import Denial, Grant, decide
from keyvault.access.permissions import Permission
from keyvault.access.rules import Target, operation
from keyvault.api.enforcement import ServiceView
from keyvault.api.exceptions import DeniedError
from keyvault.api.idempotency import answer_once
from keyvault.api.openapi import NEEDED, documented, in_path
from keyvault.api.schemas import CollectedBody, IssuanceRequestBody
from keyvault.api.serializers import CollectRequest, CredentialRequest
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode, NotFoundError
from keyvault.domain.issuance import Delivery
from keyvault.domain.keys import KeyKind
from keyvault.domain.recipients import SUITE
from keyvault.models import Account, IssuanceRequest, Key
from keyvault.services.idempotency import Effect, StoredResponse
from keyvault.services.issuance.collection import Handover, is_requested_by, read_handover, record_collection
from keyvault.services.issuance.requests import describe_request, get_request, request_issuance
from keyvault.services.merchants.merchants import find_account

_REQUEST_ID = in_path("request_id", "^req_[0-9A-Za-z]{20}$")


class IssuanceRequestsView(ServiceView):
    permission = Permission.ISSUANCE_REQUEST

    @documented(
        "issuance_requests_create",
        summary="Asks for a new credential.",
        takes=CredentialRequest,
        answers={201: IssuanceRequestBody},
        idempotency_key=NEEDED,
    )
    def post(self, request: Request) -> Response:
        return answer_once(
            request,
            holder=self.service.lineage,
            endpoint="issuance_requests.create",
            environment=None,  # no secret in the answer
            prepare=lambda: self._prepare(request),
            now=self.now,
        )

    def _prepare(self, request: Request) -> Effect:
        form = CredentialRequest(data=request.data)
        form.is_valid(raise_exception=True)
        asked = form.validated_data
        account = self._account(asked["merchant"], Environment(asked["environment"]))
        return _asking(self.grant_for(account), account, asked, self.service.name)

    def _account(self, merchant_id: str, environment: Environment) -> Account:
        """Judged before it is looked for, so that a foreign merchant and none at all are the same."""
        verdict = decide(operation(self.permission), self.service, Target(environment, merchant_id), self.now)
        if isinstance(verdict, Denial):
            raise DeniedError(verdict)
        try:
            return find_account(merchant_id, environment)
        except NotFoundError as error:
            raise NotFoundError from error


class IssuanceRequestView(ServiceView):
    permission = Permission.ISSUANCE_REQUEST

    @documented(
        "issuance_requests_read",
        summary="What became of a request.",
        answers={200: IssuanceRequestBody},
        parameters=[_REQUEST_ID],
    )
    def get(self, request: Request, request_id: str) -> Response:
        found = _find(request_id)
        self.grant_for(found.account)
        return Response(describe_request(found))


class CollectionView(ServiceView):
    permission = Permission.ISSUANCE_COLLECT

    @documented(
        "issuance_requests_collect",
        summary="The issued key, once, for the token that asked.",
        takes=CollectRequest,
        answers={200: CollectedBody},
        codes=[ErrorCode.STATE_CONFLICT],
        parameters=[_REQUEST_ID],
        idempotency_key=NEEDED,
    )
    def post(self, request: Request, request_id: str) -> Response:
        found = _find(request_id)
        if not is_requested_by(found, self.service):
            raise NotFoundError
        grant = self.grant_for(found.account)

        def prepare() -> Effect:
            CollectRequest(data=request.data).is_valid(raise_exception=True)
            return _collecting(grant, found)

        return answer_once(
            request,
            holder=self.service.lineage,
            endpoint="issuance_requests.collect",
            environment=Environment(found.account.environment),
            prepare=prepare,
            now=self.now,
        )


def _find(request_id: str) -> IssuanceRequest:
    found = get_request(request_id)
    if found is None:
        raise NotFoundError
    return found


def _asking(grant: Grant, account: Account, asked: dict[str, Any], name: str) -> Effect:
    recipient = asked.get("recipient_public_key", "")
    default = Delivery.SEALED if recipient else Delivery.SECRET_BACKEND

    def effect() -> StoredResponse:
        made = request_issuance(
            grant,
            account,
            kind=KeyKind(asked["kind"]),
            label=asked.get("label", name),
            delivery=Delivery(asked.get("delivery", default)),
            expires_in_days=asked.get("expires_in_days"),
            recipient_public_key=recipient,
        )
        return StoredResponse(201, describe_request(made))

    return effect


def _collecting(grant: Grant, request: IssuanceRequest) -> Effect:
    handover = read_handover(grant, request)

    def effect() -> StoredResponse:
        with record_collection(grant, request):
            return _handed_over(request, handover)

    return effect


def _about(request: IssuanceRequest, key: Key) -> dict[str, Any]:
    return {"request_id": request.request_id, "credential_id": key.credential_id, "key_id": key.key_id}


def _handed_over(request: IssuanceRequest, handover: Handover) -> StoredResponse:
    key = handover.key
    body = _about(request, key)
    if handover.sealed is None:
        return StoredResponse(200, {**body, "key": None}, "key", handover.text, key.key_id)
    sealed = {"suite": SUITE, "enc": handover.sealed.enc, "ciphertext": handover.sealed.ciphertext}
    return StoredResponse(200, {**body, "sealed": sealed})
