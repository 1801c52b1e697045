"""Issuance requests of services: create, read, and collect the key once."""

from typing import Any

from rest_framework.request import Request
from rest_framework.response import Response

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.api.enforcement import ServiceView
from keyvault.api.idempotency import answer_once
from keyvault.api.openapi import NEEDED, documented, in_path
from keyvault.api.pages import read_page
from keyvault.api.schemas import COLLECTED_BODY, ISSUANCE_REQUEST_BODY, ISSUANCE_REQUESTS_BODY
from keyvault.api.serializers import CollectRequest, CredentialRequest, IssuanceQuery
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode, NotFoundError
from keyvault.domain.issuance import Delivery
from keyvault.domain.keys import KeyKind
from keyvault.domain.recipient_keys import SUITE
from keyvault.models import Account, IssuanceRequest, Key
from keyvault.services.idempotency import Effect, StoredResponse
from keyvault.services.issuance.collection import Handover, is_requested_by, read_handover, record_collection
from keyvault.services.issuance.requests import describe_request, get_request, request_issuance, select_requests
from keyvault.services.merchants.merchants import find_account

_ISSUANCE_REQUEST_ID = in_path("issuance_request_id", "^req_[0-9A-Za-z]{20}$")


class IssuanceRequestsView(ServiceView):
    permission = Permission.ISSUANCE_REQUEST

    @documented(
        "issuance_requests_list",
        summary="List issuance requests, paginated.",
        description="The requests of the merchants and environments that the token names, also those of other tokens "
        "and of operators, the newest first. To read on, send `next_cursor` as `cursor` with the same "
        "filters; it is null on the last page.",
        permission=Permission.ISSUANCE_REQUEST,
        answers={200: ISSUANCE_REQUESTS_BODY},
        parameters=[IssuanceQuery],
    )
    def get(self, request: Request) -> Response:
        form = IssuanceQuery(data=request.query_params)
        form.is_valid(raise_exception=True)
        query = form.validated_data
        page = read_page(self, select_requests(), query, [{"state": query["state"]} if "state" in query else {}])
        return Response({"issuance_requests": [*map(describe_request, page.rows)], "next_cursor": page.next_cursor})

    @documented(
        "issuance_requests_create",
        summary="Request a new credential.",
        description="Requests a credential with its first key. Operators approve it where the environment's policy "
        "requires that; then a worker issues the key. With a `recipient_public_key` (X25519, base64url) "
        "the key is only ever sent sealed to it. If the response is lost, repeat the request with the same "
        "`Idempotency-Key`.",
        permission=Permission.ISSUANCE_REQUEST,
        takes=CredentialRequest,
        answers={201: ISSUANCE_REQUEST_BODY},
        idempotency_key=NEEDED,
    )
    def post(self, request: Request) -> Response:
        return answer_once(
            request,
            holder=self.service.lineage,
            endpoint="issuance_requests.create",
            environment=None,  # no secret in the response
            prepare=lambda: self._prepare(request),
            now=self.now,
        )

    def _prepare(self, request: Request) -> Effect:
        form = CredentialRequest(data=request.data)
        form.is_valid(raise_exception=True)
        fields = form.validated_data
        account = self._account(fields["merchant"], Environment(fields["environment"]))
        return _create_effect(self.grant_for(account), account, fields, self.service.name)

    def _account(self, merchant_id: str, environment: Environment) -> Account:
        self.require_scope(environment, merchant_id)
        try:
            return find_account(merchant_id, environment)
        except NotFoundError as error:
            raise NotFoundError from error


class IssuanceRequestView(ServiceView):
    permission = Permission.ISSUANCE_REQUEST

    @documented(
        "issuance_requests_read",
        summary="Read an issuance request.",
        description="The state of the request, and the ids of its credential and key once they exist. Poll it until "
        "the state is `issued`, then collect the key.",
        permission=Permission.ISSUANCE_REQUEST,
        answers={200: ISSUANCE_REQUEST_BODY},
        parameters=[_ISSUANCE_REQUEST_ID],
    )
    def get(self, request: Request, issuance_request_id: str) -> Response:
        found = _find(issuance_request_id)
        self.grant_for(found.account)
        return Response(describe_request(found))


class CollectionView(ServiceView):
    permission = Permission.ISSUANCE_COLLECT

    @documented(
        "issuance_requests_collect",
        summary="Collect the issued key, once, with the token that requested it.",
        description="Hands over the key of an issued request, within 72 hours of its issue. Only the requesting "
        "token, or its successor after a rotation, may collect it. A repetition with the same "
        "`Idempotency-Key` gets the same response for 15 minutes; a production key is only sent sealed.",
        permission=Permission.ISSUANCE_COLLECT,
        takes=CollectRequest,
        answers={200: COLLECTED_BODY},
        codes=[ErrorCode.STATE_CONFLICT],
        parameters=[_ISSUANCE_REQUEST_ID],
        idempotency_key=NEEDED,
    )
    def post(self, request: Request, issuance_request_id: str) -> Response:
        found = _find(issuance_request_id)
        if not is_requested_by(found, self.service):
            raise NotFoundError
        grant = self.grant_for(found.account)

        def prepare() -> Effect:
            CollectRequest(data=request.data).is_valid(raise_exception=True)
            return _collect_effect(grant, found)

        return answer_once(
            request,
            holder=self.service.lineage,
            endpoint="issuance_requests.collect",
            environment=Environment(found.account.environment),
            prepare=prepare,
            now=self.now,
        )


def _find(issuance_request_id: str) -> IssuanceRequest:
    found = get_request(issuance_request_id)
    if found is None:
        raise NotFoundError
    return found


def _create_effect(grant: Grant, account: Account, fields: dict[str, Any], name: str) -> Effect:
    recipient = fields.get("recipient_public_key", "")
    default = Delivery.SEALED if recipient else Delivery.SECRET_BACKEND

    def effect() -> StoredResponse:
        created = request_issuance(
            grant,
            account,
            kind=KeyKind(fields["kind"]),
            label=fields.get("label", name),
            delivery=Delivery(fields.get("delivery", default)),
            expires_in_days=fields.get("expires_in_days"),
            recipient_public_key=recipient,
        )
        return StoredResponse(201, describe_request(created))

    return effect


def _collect_effect(grant: Grant, request: IssuanceRequest) -> Effect:
    handover = read_handover(grant, request)

    def effect() -> StoredResponse:
        with record_collection(grant, request):
            return _collected_response(request, handover)

    return effect


def _identify(request: IssuanceRequest, key: Key) -> dict[str, Any]:
    return {
        "issuance_request_id": request.issuance_request_id,
        "credential_id": key.credential_id,
        "key_id": key.key_id,
    }


def _collected_response(request: IssuanceRequest, handover: Handover) -> StoredResponse:
    key = handover.key
    body = _identify(request, key)
    if handover.sealed is None:
        return StoredResponse(200, {**body, "key": None}, "key", handover.text, key.key_id)
    sealed = {"suite": SUITE, "enc": handover.sealed.enc, "ciphertext": handover.sealed.ciphertext}
    return StoredResponse(200, {**body, "sealed": sealed})
