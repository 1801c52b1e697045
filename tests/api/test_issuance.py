"""Credentials over REST: requested by a service, read, and collected exactly once by the requester only."""

import base64
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from itertools import count
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.backends.base import BackendUnavailableError
from keyvault.domain.environments import Environment
from keyvault.domain.issuance import COLLECT_WITHIN, REQUEST_LIFETIME
from keyvault.domain.keystring import StringScope
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import AuditEntry, IssuanceRequest, Key, Material, ServiceToken
from keyvault.models.idempotency import IdempotentRequest
from keyvault.services import maintenance
from keyvault.services.idempotency import SEALED_FOR
from keyvault.services.issuance.requests import get_request
from keyvault.services.merchants.merchants import find_account
from keyvault.services.secrets.backend import secret_backend
from keyvault.services.tokens.service_tokens import revoke_service_token, rotate_service_token
from tests.factories import approve, grant, issue_request, make_token, now, request_key
from tests.services.racing import race

from .conftest import Call

pytestmark = pytest.mark.django_db

REQUESTS = "/v1/issuance-requests"
RECIPIENT = X25519PrivateKey.from_private_bytes(bytes(range(32)))
ASKED = {"merchant": "acme", "environment": "sandbox", "kind": "private"}

_numbers: Iterator[int] = count()


def spelled(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


PUBLIC = spelled(RECIPIENT.public_key().public_bytes_raw())


def ask(call: Call, key: str | None = None, **changed: Any) -> Any:
    """Request an issuance; `None` removes a field."""
    body = {name: value for name, value in {**ASKED, **changed}.items() if value is not None}
    return call("POST", REQUESTS, body, HTTP_IDEMPOTENCY_KEY=key or f"ask-{next(_numbers)}")


def collect(call: Call, issuance_request_id: str, key: str | None = None, **headers: str) -> Any:
    return call(
        "POST",
        f"{REQUESTS}/{issuance_request_id}/collect",
        HTTP_IDEMPOTENCY_KEY=key or f"collect-{next(_numbers)}",
        **headers,
    )


def issued(call: Call, *, at: datetime | None = None, **changed: Any) -> IssuanceRequest:
    """Request over REST, approve where necessary, and issue as the worker does."""
    answer = ask(call, **changed)
    assert answer.status_code == 201, answer.body
    request = fresh(answer.body["issuance_request_id"])
    if request.approvals_needed:
        approve(request)
    issue_request(request, at=at)
    return request


def fresh(request_id: str) -> IssuanceRequest:
    found = get_request(request_id)
    assert found is not None
    return found


def bearer(*permissions: P, **options: Any) -> dict[str, str]:
    return {"HTTP_AUTHORIZATION": f"Bearer {make_token(*permissions, **options)[1].reveal()}"}


def unsealed(sealed: dict[str, str]) -> str:
    enc, ciphertext = (base64.urlsafe_b64decode(sealed[part] + "==") for part in ("enc", "ciphertext"))
    suite = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)
    return suite.decrypt(enc + ciphertext, RECIPIENT).decode()


def is_good(call: Call, key: str, environment: str = "sandbox") -> bool:
    verify = {"key": key, "environment": environment, "endpoint": "orders.create", "dry_run": True}
    allowed: bool = call("POST", "/v1/keys/verify", verify).body["allowed"]
    return allowed


# ---------------------------------------------------------------------------------------------------- requests


def test_issuance_requested_answers_with_the_request(call: Call) -> None:
    answer = ask(call, label="checkout-backend", expires_in_days=30)
    assert answer.status_code == 201
    request = IssuanceRequest.objects.get()
    assert request.expires_in_days == 30
    assert answer.body == {
        "issuance_request_id": request.issuance_request_id,
        "state": "pending",
        "merchant_id": "acme",
        "environment": "sandbox",
        "kind": "private",
        "label": "checkout-backend",
        "delivery": "secret_backend",
        "created_at": format_timestamp(request.created_at),
        "expires_at": format_timestamp(request.created_at + REQUEST_LIFETIME),
        "approvals_needed": 1,
        "credential_id": None,
        "key_id": None,
    }
    entry = AuditEntry.objects.get(event="issuance.requested")
    assert f"service:{ServiceToken.objects.get().token_id}".encode() in bytes(entry.body)


def test_issuance_requested_in_production_awaits_approval(call: Call) -> None:
    """No service gets a production key without a person's approval."""
    answer = ask(call, environment="production", recipient_public_key=PUBLIC)
    assert (answer.body["state"], answer.body["approvals_needed"]) == ("pending", 1)
    assert answer.body["recipient_public_key"] == PUBLIC
    assert answer.body["delivery"] == "sealed", "a recipient implies sealed delivery"


def test_issuance_label_defaults_to_the_tokens_name(call: Call) -> None:
    assert ask(call).body["label"] == "gateway"


LOW_ORDER = spelled(bytes(32))


@pytest.mark.parametrize(
    ("changed", "pointer"),
    [
        ({"merchant": None}, "/merchant"),
        ({"merchant": 7}, "/merchant"),
        ({"merchant": "a\x00b"}, "/merchant"),
        ({"merchant": "\ud800"}, "/merchant"),
        ({"environment": "moon"}, "/environment"),
        ({"environment": None}, "/environment"),
        ({"kind": "secret"}, "/kind"),
        ({"kind": ["private"]}, "/kind"),
        ({"label": ""}, "/label"),
        ({"label": 7}, "/label"),
        ({"label": "x" * 101}, "/label"),
        ({"label": "two\nlines"}, "/label"),
        ({"delivery": "pigeon"}, "/delivery"),
        ({"delivery": "sealed"}, "/recipient_public_key"),
        ({"delivery": "show_once", "recipient_public_key": PUBLIC}, "/delivery"),
        ({"delivery": "secret_backend", "recipient_public_key": PUBLIC}, "/delivery"),
        ({"delivery": "show_once", "environment": "production"}, "/delivery"),
        ({"recipient_public_key": LOW_ORDER}, "/recipient_public_key"),
        ({"recipient_public_key": PUBLIC + "="}, "/recipient_public_key"),
        ({"recipient_public_key": PUBLIC[:-1]}, "/recipient_public_key"),
        ({"recipient_public_key": 7}, "/recipient_public_key"),
        ({"expires_in_days": 0}, "/expires_in_days"),
        ({"expires_in_days": 3651}, "/expires_in_days"),
        ({"expires_in_days": "30"}, "/expires_in_days"),
        ({"expires_in_days": True}, "/expires_in_days"),
        ({"approvals_needed": 0}, "/approvals_needed"),
    ],
)
def test_issuance_requested_with_an_invalid_field_names_it(call: Call, changed: dict[str, Any], pointer: str) -> None:
    answer = ask(call, **changed)
    assert (answer.status_code, answer.body["code"]) == (400, "request_invalid")
    assert [error["pointer"] for error in answer.body["errors"]] == [pointer]
    assert not IssuanceRequest.objects.exists()


def test_issuance_requested_without_an_idempotency_key_is_refused(call: Call) -> None:
    answer = call("POST", REQUESTS, ASKED)
    assert (answer.status_code, answer.body["code"]) == (400, "idempotency_key_missing")
    assert not IssuanceRequest.objects.exists()


def test_issuance_requested_twice_with_one_key_is_created_once(call: Call) -> None:
    first, again, other = ask(call, "one"), ask(call, "one"), ask(call, "one", label="else")
    assert first.content == again.content
    assert (again.status_code, again["Idempotent-Replayed"]) == (201, "true")
    assert (other.status_code, other.body["code"]) == (422, "idempotency_body_mismatch")
    assert IssuanceRequest.objects.count() == 1


BAD_BODIES = [b"not json", b"[]", b'{"merchant": "nobody"}', b'{"unknown": 1}']


@pytest.mark.parametrize("body", BAD_BODIES)
def test_issuance_request_checks_the_idempotency_key_before_the_body(call: Call, body: bytes) -> None:
    """A retry with another body gets a mismatch, however invalid the body; a request without a key gets key_missing."""
    ask(call, "one")
    retried, keyless = call("POST", REQUESTS, body, HTTP_IDEMPOTENCY_KEY="one"), call("POST", REQUESTS, body)
    assert (retried.status_code, retried.body["code"]) == (422, "idempotency_body_mismatch")
    assert (keyless.status_code, keyless.body["code"]) == (400, "idempotency_key_missing")
    assert IssuanceRequest.objects.count() == 1


def test_issuance_retried_for_a_merchant_outside_the_token_is_a_mismatch(call: Call) -> None:
    """The Idempotency-Key is compared before the body's merchant is checked against the token."""
    acme_only = bearer(P.ISSUANCE_REQUEST, merchants=["acme"])
    assert call("POST", REQUESTS, ASKED, HTTP_IDEMPOTENCY_KEY="one", **acme_only).status_code == 201
    foreign = {**ASKED, "merchant": "globex"}
    answers = [call("POST", REQUESTS, foreign, HTTP_IDEMPOTENCY_KEY=key, **acme_only) for key in ("one", "two")]
    assert [answer.body["code"] for answer in answers] == ["idempotency_body_mismatch", "not_found"]
    assert IssuanceRequest.objects.count() == 1


def test_issuance_outside_the_tokens_environments_is_permission_missing(call: Call) -> None:
    sandbox_only = bearer(P.ISSUANCE_REQUEST, scope=StringScope.SANDBOX)
    body = {**ASKED, "environment": "production"}
    answers = [
        call("POST", REQUESTS, {**body, "merchant": merchant}, HTTP_IDEMPOTENCY_KEY="k", **sandbox_only)
        for merchant in ("acme", "nobody")
    ]
    assert [(each.status_code, each.body["code"]) for each in answers] == [(403, "permission_missing")] * 2
    there = issued(call, environment="production")
    assert call("GET", f"{REQUESTS}/{there.pk}", **sandbox_only).status_code == 403


def test_issuance_for_a_foreign_merchant_answers_as_for_an_unknown_one(call: Call) -> None:
    """A token learns nothing about foreign merchants: the answers are byte-identical."""
    globex_only = bearer(P.ISSUANCE_REQUEST, merchants=["globex"])
    foreign, absent = (
        call("POST", REQUESTS, {**ASKED, "merchant": merchant}, HTTP_IDEMPOTENCY_KEY="k", **headers)
        for merchant, headers in (("acme", globex_only), ("nobody", {}))
    )
    _expect_same_404(foreign, absent)
    there = issued(call)
    _expect_same_404(*(call("GET", f"{REQUESTS}/{name}", **globex_only) for name in (there.pk, "req_" + "0" * 20)))


def _expect_same_404(first: Any, second: Any) -> None:
    assert first.status_code == second.status_code == 404
    ids = [answer.body["request_id"].encode() for answer in (first, second)]
    assert first.content.replace(ids[0], b"") == second.content.replace(ids[1], b"")
    assert {name for name, _ in first.items()} == {name for name, _ in second.items()}


@pytest.mark.parametrize(
    ("method", "path", "needed"),
    [
        ("POST", REQUESTS, P.ISSUANCE_REQUEST),
        ("GET", f"{REQUESTS}/req_{'0' * 20}", P.ISSUANCE_REQUEST),
        ("POST", f"{REQUESTS}/req_{'0' * 20}/collect", P.ISSUANCE_COLLECT),
    ],
)
def test_issuance_without_the_permission_is_refused_before_the_body_is_read(
    call: Call, method: str, path: str, needed: P
) -> None:
    """A token without the permission learns only that, nothing about the body or the named request."""
    others = bearer(*({P.KEYS_READ, P.ISSUANCE_REQUEST, P.ISSUANCE_COLLECT} - {needed}))
    answer = call(method, path, b"not json" if method == "POST" else None, **others)
    assert (answer.status_code, answer.body["code"]) == (403, "permission_missing")


@pytest.mark.parametrize("name", ["req_0", "req_" + "0" * 20, "%00", "req_" + "a" * 5000, "rot_" + "0" * 20])
def test_issuance_request_with_an_unknown_id_is_not_found(call: Call, name: str) -> None:
    for answer in (call("GET", f"{REQUESTS}/{name}"), collect(call, name)):
        assert (answer.status_code, answer.body["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("method", "tail", "allow"),
    [
        ("PUT", "", "GET, HEAD, POST"),
        ("POST", "/req_00000000000000000000", "GET, HEAD"),
        ("GET", "/req_00000000000000000000/collect", "POST"),
    ],
)
def test_issuance_other_methods_are_not_allowed(call: Call, method: str, tail: str, allow: str) -> None:
    answer = call(method, f"{REQUESTS}{tail}")
    assert answer.status_code == 405
    assert set(allow.split(", ")) <= set(answer["Allow"].split(", "))


# ----------------------------------------------------------------------------------------------------- reading


def test_issuance_read_shows_the_state_and_never_the_key(call: Call) -> None:
    """The answer shows state, credential and key once they exist; never the key string."""
    asked = ask(call, recipient_public_key=PUBLIC).body
    assert call("GET", f"{REQUESTS}/{asked['issuance_request_id']}").body == asked
    key = issue_request(approve(fresh(asked["issuance_request_id"])))
    seen = call("GET", f"{REQUESTS}/{asked['issuance_request_id']}")
    assert seen.body == {**asked, "state": "issued", "credential_id": key.credential_id, "key_id": key.key_id}
    text = unsealed(collect(call, asked["issuance_request_id"]).body["sealed"])
    seen = call("GET", f"{REQUESTS}/{asked['issuance_request_id']}")
    assert seen.body["state"] == "collected"
    assert text.encode() not in seen.content


# -------------------------------------------------------------------------------------------------- collection


@pytest.mark.parametrize("environment", list(Environment))
def test_issuance_sealed_key_is_collected_unsealed_and_valid(call: Call, environment: Environment) -> None:
    """Only the recipient can read the key: not a gateway, not the stored answer, not a database dump."""
    request = issued(call, environment=environment.value, recipient_public_key=PUBLIC)
    answer = collect(call, request.pk, "once")
    assert answer.status_code == 200
    assert answer["Cache-Control"] == "no-store"
    body = answer.body
    assert set(body) == {"issuance_request_id", "credential_id", "key_id", "sealed"}
    assert body["sealed"]["suite"] == "DHKEM(X25519, HKDF-SHA256), HKDF-SHA256, AES-256-GCM"
    text = unsealed(body["sealed"])
    assert text[11:27] == body["key_id"]
    assert is_good(call, text, environment.value)
    assert collect(call, request.pk, "once").content == answer.content, "the same ciphertext is replayed"
    maintenance.destroy_due()
    assert Key.objects.get().material == Material.DESTROYED


def test_issuance_plain_key_is_collected_once(call: Call) -> None:
    request = issued(call, delivery="show_once")
    answer = collect(call, request.pk)
    assert set(answer.body) == {"issuance_request_id", "credential_id", "key_id", "key"}
    assert is_good(call, answer.body["key"])
    again = collect(call, request.pk)
    assert (again.status_code, again.body["code"]) == (409, "state_conflict")
    assert "collected already" in again.body["detail"]


def test_issuance_collection_replayed_in_time_returns_the_key(call: Call) -> None:
    """A lost answer loses no key: the same Idempotency-Key gets it again until it is shredded."""
    request = issued(call, delivery="show_once")
    first = collect(call, request.pk, "mine")
    again = collect(call, request.pk, "mine")
    assert (again.status_code, again.content) == (first.status_code, first.content)
    assert again["Idempotent-Replayed"] == "true"
    key = first.body["key"].encode()
    assert key not in IdempotentRequest.objects.get(endpoint="issuance_requests.collect").body.encode()
    IdempotentRequest.objects.update(sealed_until=now() - SEALED_FOR)
    late = collect(call, request.pk, "mine")
    assert late.status_code == 200
    assert (late.body["key"], late.body["secret_available"]) == (None, False)
    assert key not in late.content


def test_issuance_collected_under_the_key_of_another_request_is_a_mismatch(call: Call) -> None:
    """One Idempotency-Key belongs to one request and never returns another request's key."""
    first, second = issued(call, delivery="show_once"), issued(call, delivery="show_once")
    collect(call, first.pk, "same")
    answer = collect(call, second.pk, "same")
    assert (answer.status_code, answer.body["code"]) == (422, "idempotency_body_mismatch")
    assert fresh(second.pk).state == "issued"


def test_issuance_collected_without_an_idempotency_key_is_refused(call: Call) -> None:
    request = issued(call, delivery="show_once")
    answer = call("POST", f"{REQUESTS}/{request.pk}/collect")
    assert (answer.status_code, answer.body["code"]) == (400, "idempotency_key_missing")
    assert fresh(request.pk).state == "issued"


def test_issuance_collected_with_a_body_is_refused(call: Call) -> None:
    request = issued(call, delivery="show_once")
    path = f"{REQUESTS}/{request.pk}/collect"
    answer = call("POST", path, {"reveal": True}, HTTP_IDEMPOTENCY_KEY="k")
    assert (answer.status_code, answer.body["errors"][0]["pointer"]) == (400, "/reveal")
    assert call("POST", path, {}, HTTP_IDEMPOTENCY_KEY="k").status_code == 200


@pytest.mark.parametrize("body", [b"not json", b"[]", b'{"reveal": true}'])
def test_issuance_collection_checks_the_idempotency_key_before_the_body(call: Call, body: bytes) -> None:
    request = issued(call, delivery="show_once")
    path = f"{REQUESTS}/{request.pk}/collect"
    assert call("POST", path, {}, HTTP_IDEMPOTENCY_KEY="k").status_code == 200
    retried, keyless = call("POST", path, body, HTTP_IDEMPOTENCY_KEY="k"), call("POST", path, body)
    assert (retried.status_code, retried.body["code"]) == (422, "idempotency_body_mismatch")
    assert (keyless.status_code, keyless.body["code"]) == (400, "idempotency_key_missing")


def test_issuance_collected_before_it_is_issued_is_a_conflict(call: Call) -> None:
    asked = ask(call, delivery="show_once").body
    answer = collect(call, asked["issuance_request_id"], "k")
    assert (answer.status_code, answer.body["code"]) == (409, "state_conflict")
    issue_request(approve(fresh(asked["issuance_request_id"])))
    assert collect(call, asked["issuance_request_id"], "k").status_code == 200, "a refusal is not stored"


def test_issuance_unsealed_in_production_is_not_collectable(call: Call) -> None:
    """A production key is either read from the secret backend or sealed."""
    request = issued(call, environment="production")
    answer = collect(call, request.pk)
    assert (answer.status_code, answer.body["code"]) == (409, "state_conflict")
    assert "secret backend" in answer.body["detail"]


def test_issuance_collected_by_another_token_is_not_found(call: Call) -> None:
    """Any other token, whatever its permissions, does not even learn that the request exists."""
    request = issued(call, delivery="show_once")
    other = bearer(P.ISSUANCE_REQUEST, P.ISSUANCE_COLLECT)
    elsewhere = bearer(P.ISSUANCE_REQUEST, P.ISSUANCE_COLLECT, scope=StringScope.PRODUCTION)
    for headers in (other, elsewhere):
        _expect_same_404(*(collect(call, name, **headers) for name in (request.pk, "req_" + "0" * 20)))
    operators = request_key(find_account("acme", Environment.SANDBOX))
    issue_request(operators)
    assert collect(call, operators.pk).status_code == 404
    assert fresh(request.pk).state == "issued"


def test_issuance_requested_by_a_predecessor_token_is_collected_by_its_successor(call: Call) -> None:
    """A token rotation in between loses nothing: requests and retries belong to the whole token lineage."""
    request = issued(call, delivery="show_once")
    predecessor = ServiceToken.objects.get()
    _, text = rotate_service_token(grant(HOST, P.TOKENS_WRITE), predecessor, 1)
    successor = {"HTTP_AUTHORIZATION": f"Bearer {text.reveal()}"}
    first = collect(call, request.pk, "k", **successor)
    assert first.status_code == 200
    assert collect(call, request.pk, "k").content == first.content


def test_issuance_replay_with_a_revoked_token_is_refused(call: Call) -> None:
    """The credential is checked before any replay: a revoked token gets no stored answer."""
    request = issued(call, delivery="show_once")
    collect(call, request.pk, "k")
    revoke_service_token(grant(HOST, P.TOKENS_WRITE), ServiceToken.objects.get())
    assert collect(call, request.pk, "k").status_code == 401


def test_issuance_of_a_revoked_or_discarded_key_is_not_collectable(call: Call) -> None:
    ended = issued(call, delivery="show_once")
    assert ended.key is not None
    call("POST", f"/v1/keys/{ended.key.key_id}/revoke", {"reason": "superseded"})
    discarded = issued(call, recipient_public_key=PUBLIC, at=now() - COLLECT_WITHIN)
    unswept = collect(call, discarded.pk)
    maintenance.discard_due()
    for answer in (collect(call, ended.pk), unswept, collect(call, discarded.pk)):
        assert (answer.status_code, answer.body["code"]) == (409, "state_conflict")
    assert call("GET", f"{REQUESTS}/{discarded.pk}").body["state"] == "burned"


def test_issuance_collected_during_a_backend_outage_is_retryable(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """An outage of the secret backend only delays the collection."""
    request = issued(call, delivery="show_once")

    def unavailable(*_: object, **__: object) -> None:
        raise BackendUnavailableError("The secret backend does not answer.")

    with monkeypatch.context() as patch:
        patch.setattr(secret_backend(), "read", unavailable)
        answer = collect(call, request.pk, "k")
    assert (answer.status_code, answer.body["code"]) == (503, "dependency_unavailable")
    assert int(answer["Retry-After"]) >= 1
    assert collect(call, request.pk, "k").status_code == 200


@pytest.mark.database
@pytest.mark.django_db(transaction=True)
def test_issuance_collected_concurrently_with_many_keys_is_returned_to_one(call: Call) -> None:
    """Different Idempotency-Keys are different attempts: one gets the key, every other one a conflict."""
    for request in (issued(call, delivery="show_once"), issued(call, recipient_public_key=PUBLIC)):
        answers = race(*[partial(collect, call, request.pk) for _ in range(6)])
        assert sorted(answer.status_code for answer in answers) == [200] + [409] * 5
        assert {answer.body["code"] for answer in answers if answer.status_code == 409} == {"state_conflict"}
    assert AuditEntry.objects.filter(event="issuance.collected").count() == 2


@pytest.mark.database
@pytest.mark.django_db(transaction=True)
def test_issuance_collected_concurrently_with_one_key_is_one_answer(call: Call) -> None:
    """Parallel retries have one effect: each gets the same key, or learns that the request is in progress."""
    request = issued(call, delivery="show_once")
    answers = race(*[partial(collect, call, request.pk, "one") for _ in range(6)])
    assert {answer.status_code for answer in answers} <= {200, 409}
    assert {answer.body["code"] for answer in answers if answer.status_code == 409} <= {"idempotency_in_progress"}
    assert len({answer.content for answer in answers if answer.status_code == 200}) == 1
    assert collect(call, request.pk, "one").status_code == 200
    assert AuditEntry.objects.filter(event="issuance.collected").count() == 1
