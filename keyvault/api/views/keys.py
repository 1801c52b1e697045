"""Keys and credentials on the service plane: read their state, never their material, and revoke keys."""

from django.db.models import Prefetch, QuerySet
from rest_framework.request import Request
from rest_framework.response import Response

from keyvault.access.permissions import Permission
from keyvault.api.enforcement import ServiceView
from keyvault.api.openapi import PREFER_WAIT, documented, in_path
from keyvault.api.pages import read_page
from keyvault.api.schemas import CREDENTIAL_BODY, CREDENTIALS_BODY, KEY_BODY, REVOKED_BODY
from keyvault.api.serializers import CredentialQuery, RevokeRequest, credential_as_json
from keyvault.domain.errors import ErrorCode, NotFoundError
from keyvault.domain.keys import KeyKind
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Credential, Key
from keyvault.services.change_feed.receipts import describe_receipt, wait_for_receipt
from keyvault.services.keys.lifecycle import describe_key, get_key, last_sequence, revoke_key
from keyvault.wire.headers import PREFERENCE_APPLIED, read_preference_wait

_KEY_ID = in_path("key_id", "^[0-9A-Za-z]{16}$")


class KeyView(ServiceView):
    permission = Permission.KEYS_READ

    @documented(
        "keys_read",
        summary="Read a key's state.",
        description="The key's state, its credential, and when it was issued, first used and last used; never its "
        "material. A key outside the token's merchants is 404.",
        permission=Permission.KEYS_READ,
        answers={200: KEY_BODY},
        parameters=[_KEY_ID],
    )
    def get(self, request: Request, key_id: str) -> Response:
        return Response(describe_key(_visible_key(self, key_id)))


class RevokeView(ServiceView):
    permission = Permission.KEYS_REVOKE

    @documented(
        "keys_revoke",
        summary="Revoke a key permanently; repeatable.",
        description="The response means that the key is revoked. The receipt lists the verifiers that have confirmed "
        "it so far. No approval is needed: approval gates issuing, never revoking.",
        permission=Permission.KEYS_REVOKE,
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
        description="The credentials of the merchants and environments that the token names, the newest first, each "
        "with its keys. To read on, send `next_cursor` as `cursor` with the same filters; it is null on "
        "the last page.",
        permission=Permission.KEYS_READ,
        answers={200: CREDENTIALS_BODY},
        parameters=[CredentialQuery],
    )
    def get(self, request: Request) -> Response:
        form = CredentialQuery(data=request.query_params)
        form.is_valid(raise_exception=True)
        query = form.validated_data
        kinds = [query["kind"]] if "kind" in query else list(KeyKind)
        page = read_page(self, _credentials(), query, [{"kind": kind} for kind in kinds])
        return Response({"credentials": [*map(credential_as_json, page.rows)], "next_cursor": page.next_cursor})


class CredentialView(ServiceView):
    permission = Permission.KEYS_READ

    @documented(
        "credentials_read",
        summary="Read a credential with its keys.",
        description="A credential's id never changes; a rotation adds a key and retires another. The response has "
        "the state of each key and never its material. A credential outside the token's merchants is 404.",
        permission=Permission.KEYS_READ,
        answers={200: CREDENTIAL_BODY},
        parameters=[in_path("credential_id", "^crd_[0-9A-Za-z]{20}$")],
    )
    def get(self, request: Request, credential_id: str) -> Response:
        credential = _credentials().filter(pk=credential_id).first()
        if credential is None:
            raise NotFoundError
        self.grant_for(credential.account)
        return Response(credential_as_json(credential))


def _credentials() -> QuerySet[Credential]:
    keys = Key.objects.select_related("credential__account", "use")
    return Credential.objects.select_related("account").prefetch_related(Prefetch("keys", keys))


def _visible_key(view: ServiceView, key_id: str) -> Key:
    key = get_key(key_id)
    if key is None:
        raise NotFoundError
    view.grant_for(key.credential.account)
    return key
