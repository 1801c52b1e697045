"""POST /v1/keys/verify, row by row of the contract's table of verdicts."""

from typing import Any

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.access.roles import Role
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind
from keyvault.domain.keystring import StringKind, StringScope, mint_keystring
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Key, KeyUse, Merchant, UseBucket
from keyvault.services.keys import get_key, report_compromise, revoke_key, suspend_key
from keyvault.services.merchants import find_account, suspend_account, suspend_merchant
from keyvault.services.usage import UsageLog
from tests.factories import grant, issue, make_token, the_operator

from .conftest import Call

pytestmark = [pytest.mark.database, pytest.mark.django_db]

SANDBOX = Environment.SANDBOX


@pytest.fixture
def key(token: str) -> tuple[Key, str]:
    issued, text = issue(find_account("acme", SANDBOX))
    return issued, text.reveal()


def ask(call: Call, key: str | None, /, **more: Any) -> Any:
    body = {"key": key, "environment": "sandbox", "endpoint": "orders.create", **more}
    return call("POST", "/v1/keys/verify", body).body


def outcome(answer: Any) -> tuple[int, str | None, int | None]:
    return answer["status"], answer["code"], answer["check"]


def fresh(key: Key) -> Key:
    found = get_key(key.key_id)
    assert found is not None
    return found


def may(permission: P, key: Key) -> Any:
    return grant(the_operator("admin", Role.KEY_ADMINISTRATOR), permission, key.credential.account)


# --- yes --------------------------------------------------------------------------------------------------


def test_verify_good_key_is_allowed_and_named(call: Call, key: tuple[Key, str]) -> None:
    answer = ask(call, key[1])
    assert answer["allowed"] is True
    assert outcome(answer) == (200, None, None)
    assert "problem" not in answer
    assert {name: answer[name] for name in ("key_id", "kind", "merchant_id", "environment", "customer_id")} == {
        "key_id": key[0].key_id,
        "kind": "private",
        "merchant_id": "acme",
        "environment": "sandbox",
        "customer_id": None,
    }
    assert key[1] not in str(answer)


@pytest.mark.parametrize(
    "path", ["/merchants/orders/abc", "/sandbox/merchants/orders/abc", "/merchants/orders/abc?a=1"]
)
def test_verify_by_method_and_path_finds_the_endpoint(call: Call, key: tuple[Key, str], path: str) -> None:
    body = {"key": key[1], "environment": "sandbox", "method": "GET", "path": path}
    assert call("POST", "/v1/keys/verify", body).body["allowed"] is True


# --- no ---------------------------------------------------------------------------------------------------


def test_verify_without_a_key_is_credential_missing(call: Call) -> None:
    answer = ask(call, None)
    assert outcome(answer) == (401, "credential_missing", 1)
    assert answer["headers"]["WWW-Authenticate"].startswith("ApiKey ")
    assert answer["problem"]["request_id"] == answer["request_id"]


def test_verify_two_keys_in_one_header_is_ambiguous(call: Call, key: tuple[Key, str]) -> None:
    assert outcome(ask(call, f"{key[1]}, {key[1]}")) == (400, "credential_ambiguous", 1)


def _service_string() -> str:
    return mint_keystring("kv", StringKind.SERVICE_TOKEN, StringScope.SANDBOX, lambda n: b"\x01" * n).text.reveal()


@pytest.mark.parametrize(
    "text", ["", " ", "nonsense", "ключ", "kv_prv_sbx_", "\x00", "\ud800", "x" * 10_000, _service_string()]
)
def test_verify_what_is_no_api_key_is_credential_invalid(call: Call, text: str) -> None:
    assert outcome(ask(call, text)) == (401, "credential_invalid", 1)


def test_verify_key_of_the_other_environment_names_the_right_base_url(call: Call, key: tuple[Key, str]) -> None:
    answer = ask(call, key[1], environment="production")
    assert outcome(answer) == (401, "environment_mismatch", 2)
    assert "http://127.0.0.1:8000/sandbox" in answer["problem"]["detail"]
    assert "key_id" not in answer


def test_verify_unknown_and_wrong_secret_are_one_answer(call: Call, key: tuple[Key, str]) -> None:
    """Nothing tells an unknown key id from a wrong secret."""
    import zlib

    from keyvault.domain.base62 import encode

    unknown = mint_keystring("kv", StringKind.PRIVATE, StringScope.SANDBOX, lambda n: bytes(range(n))).text.reveal()
    head = key[1][:27] + "0" * 43
    wrong = head + encode(zlib.crc32(head.encode()), 6)
    answers = [ask(call, text) for text in (unknown, wrong)]
    for answer in answers:
        del answer["request_id"], answer["problem"]["request_id"]
    assert answers[0] == answers[1]
    assert outcome(answers[0]) == (401, "credential_invalid", 1)


def test_verify_suspended_revoked_compromised_and_expired(call: Call, token: str) -> None:
    place = find_account("acme", SANDBOX)
    suspended, suspended_text = issue(place)
    suspend_key(may(P.KEYS_SUSPEND, suspended), fresh(suspended))
    revoked, revoked_text = issue(place)
    revoke_key(may(P.KEYS_REVOKE, revoked), fresh(revoked), RevocationReason.SUPERSEDED)
    leaked, leaked_text = issue(place)
    report_compromise(may(P.KEYS_REPORT_COMPROMISE, leaked), fresh(leaked))
    for text, code, key_id in (
        (suspended_text, "key_not_active", suspended.key_id),
        (revoked_text, "key_revoked", revoked.key_id),
        (leaked_text, "key_revoked", leaked.key_id),
    ):
        answer = ask(call, text.reveal())
        assert outcome(answer) == (401, code, 4)
        assert answer["key_id"] == key_id


def test_verify_key_past_its_expiry_is_refused_before_any_sweep(call: Call, token: str) -> None:
    """Expiry is a fact of the clock: no job has to run for it."""
    from datetime import UTC, datetime, timedelta

    long_ago = datetime.now(UTC) - timedelta(days=40)
    expired, text = issue(find_account("acme", SANDBOX), expires_in_days=30, at=long_ago)
    assert fresh(expired).state == "active"
    assert outcome(ask(call, text.reveal())) == (401, "key_expired", 4)


def test_verify_another_merchant_named_is_merchant_mismatch(call: Call, key: tuple[Key, str]) -> None:
    assert outcome(ask(call, key[1], merchant="globex")) == (403, "merchant_mismatch", 2)
    assert ask(call, key[1], merchant="acme")["allowed"] is True


def test_verify_suspended_account_or_merchant_is_merchant_suspended(call: Call, key: tuple[Key, str]) -> None:
    admin = the_operator("admin", Role.KEY_ADMINISTRATOR)
    place = find_account("acme", SANDBOX)
    suspend_account(grant(admin, P.MERCHANTS_WRITE, place), place)
    assert outcome(ask(call, key[1])) == (403, "merchant_suspended", 5)
    _, other = issue(find_account("globex", SANDBOX))
    suspend_merchant(grant(HOST, P.MERCHANTS_WRITE), Merchant.objects.get(pk="globex"))
    assert outcome(ask(call, other.reveal())) == (403, "merchant_suspended", 5)


def test_verify_unknown_endpoint_and_wrong_method(call: Call, key: tuple[Key, str]) -> None:
    assert outcome(ask(call, key[1], endpoint="orders.delete")) == (404, "endpoint_unknown", 3)
    body = {"key": key[1], "environment": "sandbox", "method": "PUT", "path": "/merchants/orders"}
    answer = call("POST", "/v1/keys/verify", body).body
    assert outcome(answer) == (405, "method_not_allowed", 3)
    assert answer["headers"]["Allow"] == "POST"


def test_verify_public_key_on_a_private_endpoint_and_the_reverse(call: Call, key: tuple[Key, str]) -> None:
    _, public = issue(find_account("acme", SANDBOX), kind=KeyKind.PUBLIC)
    assert outcome(ask(call, public.reveal())) == (403, "method_not_supported", 3)
    assert outcome(ask(call, key[1], endpoint="client.configuration")) == (403, "method_not_supported", 3)
    assert ask(call, public.reveal(), endpoint="client.configuration")["allowed"] is True


def test_verify_customer_token_where_none_is_taken_or_any_is_unknown(call: Call, key: tuple[Key, str]) -> None:
    """A Bearer never replaces the private key, and what nobody issued is not valid."""
    assert outcome(ask(call, key[1], customer_token="x")) == (401, "bearer_not_supported", 3)
    assert outcome(ask(call, key[1], endpoint="customers.me")) == (401, "customer_token_missing", 5)
    assert outcome(ask(call, key[1], endpoint="customers.me", customer_token="x")) == (401, "customer_token_invalid", 5)
    assert outcome(ask(call, None, endpoint="customers.me", customer_token="x")) == (401, "credential_missing", 1)


def test_verify_private_key_with_an_origin_is_refused(call: Call, key: tuple[Key, str]) -> None:
    assert outcome(ask(call, key[1], origin="https://shop.example")) == (403, "private_key_in_browser", 3)


@pytest.mark.parametrize("escape", [False, True])
def test_verify_key_in_the_url_is_refused_before_all_else(call: Call, key: tuple[Key, str], escape: bool) -> None:
    text = key[1].replace("_", "%5F") if escape else key[1]
    body = {"key": key[1], "environment": "sandbox", "method": "GET", "path": f"/merchants/orders/a?key={text}"}
    answer = call("POST", "/v1/keys/verify", body).body
    assert outcome(answer) == (400, "credential_in_url", 1)
    assert key[1] not in str(answer)


# --- scope of the token -----------------------------------------------------------------------------------


def test_verify_token_for_another_environment_is_permission_missing(call: Call, key: tuple[Key, str]) -> None:
    _, production_only = make_token(P.KEYS_VERIFY, scope=StringScope.PRODUCTION)
    response = call(
        "POST",
        "/v1/keys/verify",
        {"key": key[1], "environment": "sandbox", "endpoint": "orders.create"},
        HTTP_AUTHORIZATION=f"Bearer {production_only.reveal()}",
    )
    assert (response.status_code, response.body["code"]) == (403, "permission_missing")


def test_verify_key_outside_the_tokens_merchants_is_as_if_unknown(call: Call, key: tuple[Key, str]) -> None:
    """A token scoped to one merchant learns nothing of another's keys: no name, no state, no difference."""
    _, scoped = make_token(P.KEYS_VERIFY, merchants=["globex"])
    response = call(
        "POST",
        "/v1/keys/verify",
        {"key": key[1], "environment": "sandbox", "endpoint": "orders.create", "dry_run": True},
        HTTP_AUTHORIZATION=f"Bearer {scoped.reveal()}",
    )
    assert outcome(response.body) == (401, "credential_invalid", 1)
    assert "key_id" not in response.body
    assert response.body["trace"] == [{"rule": "credential_invalid", "passed": False}]


# --- dry run and use --------------------------------------------------------------------------------------


def test_verify_counts_real_use_only(call: Call, key: tuple[Key, str], usage: UsageLog) -> None:
    """A dry run and a refusal are no evidence that a key is in use."""
    ask(call, key[1], dry_run=True)
    ask(call, key[1], merchant="globex")
    usage.flush()
    assert not KeyUse.objects.exists()
    ask(call, key[1], client_ip="::ffff:192.0.2.9", user_agent="shop/1")
    ask(call, key[1], client_ip="192.0.2.9", user_agent="shop/1")
    ask(call, key[1])
    usage.flush()
    assert KeyUse.objects.get().count == 3
    sources = set(UseBucket.objects.values_list("source", flat=True))
    assert "192.0.2.9" in sources
    assert any(source.startswith("token:") for source in sources)


def test_verify_suspended_key_notes_the_attempt(call: Call, key: tuple[Key, str], usage: UsageLog) -> None:
    suspend_key(may(P.KEYS_SUSPEND, key[0]), fresh(key[0]))
    ask(call, key[1], client_ip="192.0.2.9")
    usage.flush()
    assert UseBucket.objects.get().outcome == "refused"


def test_verify_dry_run_traces_each_rule_in_the_contracts_order(call: Call, key: tuple[Key, str]) -> None:
    trace = ask(call, key[1], merchant="globex", dry_run=True)["trace"]
    assert trace == [
        {"rule": "credential_invalid", "passed": True},
        {"rule": "key_not_active", "passed": True},
        {"rule": "key_expired", "passed": True},
        {"rule": "key_revoked", "passed": True},
        {"rule": "merchant_mismatch", "passed": False},
    ]


# --- shape ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"environment": "staging"}, "/environment"),
        ({"environment": None}, "/environment"),
        ({"key": 7}, "/key"),
        ({"kee": "x"}, "/kee"),
        ({"client_ip": "300.1.1.1"}, "/client_ip"),
        ({"cost": 0}, "/cost"),
        ({"cost": True}, "/cost"),
        ({"cost": 1.5}, "/cost"),
        ({"dry_run": "yes"}, "/dry_run"),
        ({"method": "GET"}, ""),
        ({"method": "GET", "path": "/x"}, ""),
        ({"user_agent": "\ud800"}, "/user_agent"),
        ({"user_agent": "\x00"}, "/user_agent"),
    ],
)
def test_verify_malformed_field_is_pointed_at(call: Call, change: dict[str, Any], pointer: str) -> None:
    body = {"key": "x", "environment": "sandbox", "endpoint": "orders.create", **change}
    response = call("POST", "/v1/keys/verify", body)
    assert response.status_code == 400
    assert response.body["code"] == "request_invalid"
    assert pointer in [fault["pointer"] for fault in response.body["errors"]]


def test_verify_answers_are_never_cached_and_carry_our_request_id(call: Call) -> None:
    body = {"key": None, "environment": "sandbox", "endpoint": "orders.create"}
    response = call("POST", "/v1/keys/verify", body, HTTP_X_REQUEST_ID="mine")
    assert response["Cache-Control"] == "no-store"
    assert response["X-Request-Id"] == response.body["request_id"] != "mine"
