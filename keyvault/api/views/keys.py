"""Keys and credentials on the service plane: read their state, never their material, and revoke keys."""

from typing import Any

from rest_framework.request import Request
from rest_framework.response import Response

from keyvault.access.decision import Denial, decide
from keyvault.access.permissions import Permission
from keyvault.access.rules import Target, operation
from keyvault.api.enforcement import ServiceView
from keyvault.api.exceptions import DeniedError
from keyvault.api.openapi import PREFER_WAIT, documented, in_path
from keyvault.api.schemas import CREDENTIALS_BODY, KEY_BODY, REVOKED_BODY
from keyvault.api.serializers import CredentialQuery, RevokeRequest, credential_as_json
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode, NotFoundError
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Credential, Key
from keyvault.services.change_feed.receipts import describe_receipt, wait_for_receipt
from keyvault.services.keys.lifecycle import describe_key, get_key, last_sequence, revoke_key
from keyvault.wire.headers import PREFERENCE_APPLIED, read_preference_wait

_KEY_ID = in_path("key_id", "^[0-9A-Za-z]{16}$")


class KeyView(ServiceView):
    permission = Permission.KEYS_READ

    @documented("keys_read", summary="Read a key's state.", answers={200: KEY_BODY}, parameters=[_KEY_ID])
    def get(self, request: Request, key_id: str) -> Response:
        return Response(describe_key(_visible_key(self, key_id)))


class RevokeView(ServiceView):
    permission = Permission.KEYS_REVOKE

    @documented(
        "keys_revoke",
        summary="Revoke a key permanently; repeatable.",
        description="The response means that the key is revoked. The receipt lists the verifiers that have confirmed "
        "it so far.",
        takes=RevokeRequest,
        answers={202: REVOKED_BODY},
        codes=[ErrorCode.STATE_CONFLICT],
        parameters=[_KEY_ID, PREFER_WAIT],
    )
    def post(self, request: Request, key_id: str) -> Response:
        form = RevokeRequest(data=request.data)
        form.is_valid(raise_exception=True)
        key = _visible_key(self, key_id)
        record = revoke_key(
            self.grant_for(key.credential.account), key, RevocationReason(form.validated_data["reason"])
        )
        sequence = record.sequence or last_sequence(key)
        answer = {"key_id": key.key_id, "state": key.state, "sequence": sequence}
        wait_seconds = read_preference_wait(request.headers.get("Prefer"))
        if wait_seconds is None:
            return Response(answer, status=202)
        receipt, waited_seconds = wait_for_receipt(sequence, wait_seconds)
        applied = {PREFERENCE_APPLIED: f"wait={waited_seconds}"}
        return Response({**answer, "receipt": describe_receipt(receipt)}, status=202, headers=applied)


class CredentialsView(ServiceView):
    permission = Permission.KEYS_READ

    @documented(
        "credentials_list",
        summary="List credentials with their keys, paginated.",
        answers={200: CREDENTIALS_BODY},
        parameters=[CredentialQuery],
    )
    def get(self, request: Request) -> Response:
        form = CredentialQuery(data=request.query_params)
        form.is_valid(raise_exception=True)
        query = form.validated_data
        rows = list(self._rows(query)[: query["limit"] + 1])
        page = rows[: query["limit"]]
        return Response(
            {
                "credentials": [credential_as_json(row) for row in page],
                "next_cursor": page[-1].credential_id if len(rows) > len(page) else None,
            }
        )

    def _rows(self, query: dict[str, Any]) -> Any:
        """Return the credentials in the token's scope. Raises DeniedError for an environment outside it."""
        environments = self.service.environments
        if "environment" in query:
            environment = Environment(query["environment"])
            verdict = decide(operation(self.permission), self.service, Target(environment=environment), self.now)
            if isinstance(verdict, Denial):
                raise DeniedError(verdict)
            environments = frozenset({environment})
        rows = Credential.objects.select_related("account").prefetch_related("keys__credential__account")
        rows = rows.filter(account__environment__in=environments).order_by("credential_id")
        if self.service.merchants is not None:
            rows = rows.filter(account__merchant__in=self.service.merchants)
        if "merchant" in query:
            rows = rows.filter(account__merchant=query["merchant"])
        if "kind" in query:
            rows = rows.filter(kind=query["kind"])
        if "cursor" in query:
            rows = rows.filter(credential_id__gt=query["cursor"])
        return rows


def _visible_key(view: ServiceView, key_id: str) -> Key:
    key = get_key(key_id)
    if key is None:
        raise NotFoundError
    view.grant_for(key.credential.account)
    return key
