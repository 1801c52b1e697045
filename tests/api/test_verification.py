"""POST /v1/keys/verify, row by row of the table of verdicts."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from keyvault.access.endpoints import EndpointDraft
from keyvault.access.limits import Limit
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.access.roles import Role
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind
from keyvault.domain.keystring import StringKind, StringScope, mint_keystring
from keyvault.domain.revocation import RevocationReason
from keyvault.hotpath.messages.pending_requests import KEY
from keyvault.models import Key, KeyUse, Merchant, UseBucket
from keyvault.models.keys import OriginHeader
from keyvault.services.catalog.endpoints import add_endpoint
from keyvault.services.keys.credentials import restrict_credential
from keyvault.services.keys.lifecycle import get_key, report_compromise, revoke_key, suspend_key
from keyvault.services.limits.limiter import FailedProofs, Limiter
from keyvault.services.limits.overrides import set_account_limit
from keyvault.services.limits.stores import LocalStore
from keyvault.services.merchants.merchants import find_account, suspend_account, suspend_merchant
from keyvault.services.tokens.customer_tokens import issue_customer_token, revoke_customer_token
from keyvault.services.usage.recorder import UsageLog
from tests.factories import grant, issue, make_token, the_operator

from .conftest import Call
from .integration import holder_of, losing

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


def grant_for(permission: P, key: Key) -> Any:
    return grant(the_operator("admin", Role.KEY_ADMINISTRATOR), permission, key.credential.account)


# --- allowed ----------------------------------------------------------------------------------------------


def test_verify_valid_key_is_allowed_and_identified(call: Call, key: tuple[Key, str]) -> None:
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


# --- denied -----------------------------------------------------------------------------------------------


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
def test_verify_text_that_is_no_api_key_is_credential_invalid(call: Call, text: str) -> None:
    assert outcome(ask(call, text)) == (401, "credential_invalid", 1)


def test_verify_key_of_the_other_environment_names_the_right_base_url(call: Call, key: tuple[Key, str]) -> None:
    answer = ask(call, key[1], environment="production")
    assert outcome(answer) == (401, "environment_mismatch", 2)
    assert "http://127.0.0.1:8000/sandbox" in answer["problem"]["detail"]
    assert "key_id" not in answer


def test_verify_unknown_key_and_wrong_secret_get_the_same_answer(call: Call, key: tuple[Key, str]) -> None:
    """An unknown key id and a wrong secret are indistinguishable."""
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
    suspend_key(grant_for(P.KEYS_SUSPEND, suspended), fresh(suspended))
    revoked, revoked_text = issue(place)
    revoke_key(grant_for(P.KEYS_REVOKE, revoked), fresh(revoked), RevocationReason.SUPERSEDED)
    leaked, leaked_text = issue(place)
    report_compromise(grant_for(P.KEYS_REPORT_COMPROMISE, leaked), fresh(leaked))
    for text, code, key_id in (
        (suspended_text, "key_not_active", suspended.key_id),
        (revoked_text, "key_revoked", revoked.key_id),
        (leaked_text, "key_revoked", leaked.key_id),
    ):
        answer = ask(call, text.reveal())
        assert outcome(answer) == (401, code, 4)
        assert answer["key_id"] == key_id


def test_verify_key_past_its_expiry_is_refused_before_any_sweep(call: Call, token: str) -> None:
    """Expiry depends on the clock alone: no job has to run for it."""
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


def test_verify_unknown_or_unaccepted_customer_token_is_refused(call: Call, key: tuple[Key, str]) -> None:
    """A Bearer never replaces the private key, and an unknown token is invalid."""
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


def test_verify_key_outside_the_tokens_merchants_is_unknown(call: Call, key: tuple[Key, str]) -> None:
    """A token scoped to one merchant learns nothing about another merchant's keys."""
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


def probe() -> str:
    return f"Bearer {make_token(P.KEYS_VERIFY, name='probe', is_probe=True)[1].reveal()}"


def test_verify_by_a_probe_counts_as_no_use(call: Call, key: tuple[Key, str], usage: UsageLog) -> None:
    """Probes get normal answers, are marked as probes, and are no evidence of use."""
    token = probe()
    asked = {"key": key[1], "environment": "sandbox", "endpoint": "orders.create", "client_ip": "192.0.2.9"}
    answers = [call("POST", "/v1/keys/verify", asked, HTTP_AUTHORIZATION=token).body]
    batch = call("POST", "/v1/keys/verify-batch", {"requests": [asked, asked]}, HTTP_AUTHORIZATION=token)
    answers += batch.body["decisions"]
    assert [answer["allowed"] for answer in answers] == [True] * 3
    usage.flush()
    assert not KeyUse.objects.exists()
    bucket = UseBucket.objects.get()
    assert (bucket.outcome, bucket.count, bucket.source) == ("probed", 3, "192.0.2.9")
    shown = call("GET", f"/v1/keys/{key[0].key_id}").body
    assert (shown["first_used_at"], shown["last_used_at"]) == (None, None)


def test_verify_by_a_probe_does_not_trigger_the_quarantine(call: Call, key: tuple[Key, str], usage: UsageLog) -> None:
    """A probe of a suspended key is no attempt: it neither raises an alarm nor reinstates the key."""
    suspend_key(grant_for(P.KEYS_SUSPEND, key[0]), fresh(key[0]))
    asked = {"key": key[1], "environment": "sandbox", "endpoint": "orders.create"}
    assert call("POST", "/v1/keys/verify", asked, HTTP_AUTHORIZATION=probe()).body["code"] == "key_not_active"
    usage.flush()
    assert UseBucket.objects.get().outcome == "probed"


def test_verify_records_the_origin_of_a_public_key(call: Call, key: tuple[Key, str], usage: UsageLog) -> None:
    _, text = issue(find_account("acme", SANDBOX), kind=KeyKind.PUBLIC)
    origin = "https://shop.example"
    ask(call, text.reveal(), endpoint="client.configuration", origin=origin, user_agent="browser")
    ask(call, key[1], origin=origin)
    usage.flush()
    origins = UseBucket.objects.order_by("outcome").values_list("outcome", "origin")
    assert list(origins) == [("allowed", origin), ("denied", ""), ("exposed_in_browser", "")]


def test_verify_suspended_key_records_the_attempt(call: Call, key: tuple[Key, str], usage: UsageLog) -> None:
    suspend_key(grant_for(P.KEYS_SUSPEND, key[0]), fresh(key[0]))
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


# --- request format ---------------------------------------------------------------------------------------


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
        ({"cost": 1_000_001}, "/cost"),
        ({"customer_token": 7}, "/customer_token"),
        ({"store": ""}, "/store"),
        ({"merchant": 7}, "/merchant"),
        ({"method": "GET"}, ""),
        ({"method": "GET", "path": "/x"}, ""),
        ({"user_agent": "\ud800"}, "/user_agent"),
        ({"user_agent": "\x00"}, "/user_agent"),
    ],
)
def test_verify_malformed_field_is_named_by_pointer(call: Call, change: dict[str, Any], pointer: str) -> None:
    body = {"key": "x", "environment": "sandbox", "endpoint": "orders.create", **change}
    response = call("POST", "/v1/keys/verify", body)
    assert response.status_code == 400
    assert response.body["code"] == "request_invalid"
    assert pointer in [fault["pointer"] for fault in response.body["errors"]]


def test_verify_answers_are_not_cacheable_and_carry_the_request_id(call: Call) -> None:
    body = {"key": None, "environment": "sandbox", "endpoint": "orders.create"}
    response = call("POST", "/v1/keys/verify", body, HTTP_X_REQUEST_ID="mine")
    assert response["Cache-Control"] == "no-store"
    assert response["X-Request-Id"] == response.body["request_id"] != "mine"


# --- customers, networks, context -------------------------------------------------------------------------


def customer_token(key: Key, **more: Any) -> tuple[str, str]:
    place = key.credential.account
    allowed = grant(holder_of(key), P.CUSTOMER_TOKENS_WRITE, place, **more)
    token, text = issue_customer_token(allowed, place, key, customer_id="cust-1")
    return token.token_id, text.reveal()


def test_verify_customer_token_names_the_customer(call: Call, key: tuple[Key, str], usage: UsageLog) -> None:
    _, token = customer_token(key[0])
    for endpoint in ("customers.me", "orders.retrieve"):
        answer = ask(call, key[1], endpoint=endpoint, customer_token=token)
        assert answer["allowed"] is True
        assert answer["customer_id"] == "cust-1"
        assert token not in str(answer)


def test_verify_customer_token_expired_revoked_or_of_another_merchant(call: Call, key: tuple[Key, str]) -> None:
    me = {"endpoint": "customers.me"}
    _, expired = customer_token(key[0], at=datetime.now(UTC) - timedelta(hours=1))
    answer = ask(call, key[1], customer_token=expired, **me)
    assert outcome(answer) == (401, "customer_token_expired", 4)
    assert answer["headers"]["WWW-Authenticate"].startswith("Bearer ")
    assert answer["customer_id"] is None
    token_id, revoked = customer_token(key[0])
    place = key[0].credential.account
    revoke_customer_token(grant(holder_of(key[0]), P.CUSTOMER_TOKENS_WRITE, place), place, token_id)
    assert outcome(ask(call, key[1], customer_token=revoked, **me)) == (401, "customer_token_revoked", 4)
    foreign, _ = issue(find_account("globex", SANDBOX))
    _, token = customer_token(foreign)
    assert outcome(ask(call, key[1], customer_token=token, **me)) == (401, "customer_token_invalid", 5)


def test_verify_address_outside_the_credentials_networks_is_ip_not_allowed(call: Call, key: tuple[Key, str]) -> None:
    restrict_credential(
        grant_for(P.CREDENTIALS_RESTRICT, key[0]), key[0].credential, ["192.0.2.0/24"], OriginHeader.REFUSE
    )
    assert ask(call, key[1], client_ip="192.0.2.9")["allowed"] is True
    assert ask(call, key[1], client_ip="::ffff:192.0.2.9")["allowed"] is True
    assert outcome(ask(call, key[1], client_ip="198.51.100.1")) == (403, "ip_not_allowed", 5)
    assert outcome(ask(call, key[1])) == (403, "ip_not_allowed", 5)


def add(name: str, path: str, **rule: Any) -> None:
    wish = EndpointDraft(name, "GET", path, frozenset({KeyKind.PRIVATE}), **rule)
    add_endpoint(grant(the_operator("admin", Role.KEY_ADMINISTRATOR), P.CATALOG_WRITE), wish)


def test_verify_added_endpoint_reads_its_context_from_the_path_or_from_the_caller(
    call: Call, key: tuple[Key, str]
) -> None:
    """Path and caller must agree: a caller that names one merchant cannot reach another merchant's resources by
    path.
    """
    add("payouts.list", "/payouts/<shop>", merchant_from="path:shop", store_from="header:X-Store")

    def ask_line(path: str, **more: Any) -> Any:
        body = {"key": key[1], "environment": "sandbox", "method": "GET", "path": path, **more}
        return call("POST", "/v1/keys/verify", body).body

    assert ask_line("/payouts/acme", store="7")["allowed"] is True
    assert ask_line("/sandbox/payouts/acme?shop=globex", store="7")["allowed"] is True
    assert outcome(ask_line("/payouts/globex", store="7")) == (403, "merchant_mismatch", 2)
    assert outcome(ask_line("/payouts/globex", store="7", merchant="acme")) == (403, "merchant_mismatch", 2)
    assert outcome(ask_line("/payouts/acme", store="7", merchant="globex")) == (403, "merchant_mismatch", 2)
    assert outcome(ask_line("/payouts/acme")) == (403, "context_missing", 5)
    assert outcome(ask_line("/payouts/acme", store=" ")) == (403, "context_missing", 5)
    assert outcome(ask(call, key[1], endpoint="payouts.list", store="7")) == (403, "context_missing", 5)
    assert ask(call, key[1], endpoint="payouts.list", store="7", merchant="acme")["allowed"] is True


# --- limits -----------------------------------------------------------------------------------------------


def limit(key: Key, count: int, seconds: int = 3600) -> None:
    place = find_account(key.credential.account.merchant_id, SANDBOX)
    set_account_limit(grant_for(P.LIMITS_WRITE, key), place, Limit(count, seconds))


def test_verify_reports_the_remaining_limit(call: Call, key: tuple[Key, str]) -> None:
    limit(key[0], 10)
    answer = ask(call, key[1])
    assert answer["limit"] == {"policy": "account", "remaining": 9, "reset_seconds": 360}
    assert answer["headers"]["RateLimit-Policy"] == '"account";q=10;w=3600'
    assert answer["headers"]["RateLimit"] == '"account";r=9;t=360'
    assert "Retry-After" not in answer["headers"]


def test_verify_beyond_the_limit_is_rate_limited_with_retry_after(call: Call, key: tuple[Key, str]) -> None:
    limit(key[0], 3)
    assert ask(call, key[1], cost=3)["allowed"] is True
    answer = ask(call, key[1])
    assert outcome(answer) == (429, "rate_limited", None)
    assert int(answer["headers"]["Retry-After"]) >= 1
    assert answer["headers"]["RateLimit"].startswith('"account";r=0;t=')
    assert answer["limit"]["remaining"] == 0
    assert answer["key_id"] == key[0].key_id
    assert "check" not in answer["problem"]


def test_verify_reports_no_limits_before_authentication(call: Call, key: tuple[Key, str]) -> None:
    limit(key[0], 10)
    answer = ask(call, key[1][:-1])
    assert "limit" not in answer
    assert not any(name.startswith("RateLimit") for name in answer["headers"])


def test_verify_dry_run_spends_nothing(call: Call, key: tuple[Key, str]) -> None:
    limit(key[0], 1)
    for _ in range(3):
        assert ask(call, key[1], dry_run=True)["allowed"] is True
    assert ask(call, key[1])["allowed"] is True
    assert ask(call, key[1])["code"] == "rate_limited"


def test_verify_failed_proofs_of_an_address_are_limited_and_a_valid_key_passes(
    call: Call, key: tuple[Key, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Failures are counted by the end client's address, so one guesser does not lock out all clients of a gateway."""
    # The clock stands still, so that the allowance is not refilled meanwhile.
    proofs = FailedProofs(Limiter(LocalStore(lambda: 0), None, 100), lambda: 0.0)
    for module in ("assembly", "stores"):
        monkeypatch.setattr(f"keyvault.hotpath.adapters.{module}.failed_proofs", lambda: proofs)
    batch = {"requests": [{"key": "x", "environment": "sandbox", "endpoint": "orders.create"}] * 100}
    for each in batch["requests"]:
        each["client_ip"] = "192.0.2.9"
    answers = call("POST", "/v1/keys/verify-batch", batch).body["decisions"]
    assert not any("Retry-After" in each["headers"] for each in answers)
    late = ask(call, "x", client_ip="192.0.2.9")
    assert outcome(late) == (401, "credential_invalid", 1)
    assert 1 <= int(late["headers"]["Retry-After"]) <= 60
    assert "Retry-After" not in ask(call, "x", client_ip="192.0.2.10")["headers"]
    assert "Retry-After" not in ask(call, "x")["headers"]
    assert ask(call, key[1], client_ip="192.0.2.9")["allowed"] is True


def test_verify_lost_database_is_verifier_stale(call: Call, key: tuple[Key, str]) -> None:
    """The decision is neither allow nor deny, and the call itself succeeds with 200."""
    with losing(KEY):
        answer = ask(call, key[1])
    assert outcome(answer) == (503, "verifier_stale", None)
    assert answer["headers"]["Retry-After"] == "1"
    assert "key_id" not in answer


# --- concurrency ------------------------------------------------------------------------------------------


def batch(call: Call, *asked: dict[str, Any]) -> Any:
    requests = [{"key": None, "environment": "sandbox", "endpoint": "orders.create", **each} for each in asked]
    return call("POST", "/v1/keys/verify-batch", {"requests": requests})


def test_batch_answers_in_order_with_a_request_id_each(call: Call, key: tuple[Key, str]) -> None:
    response = batch(call, {"key": key[1]}, {}, {"key": "x"}, {"key": key[1], "merchant": "globex"})
    decisions = response.body["decisions"]
    assert [each["code"] for each in decisions] == [
        None,
        "credential_missing",
        "credential_invalid",
        "merchant_mismatch",
    ]
    ids = [each["request_id"] for each in decisions]
    assert len(set(ids)) == 4
    assert all(each.startswith(response["X-Request-Id"]) for each in ids)
    assert all(each["problem"]["request_id"] == each["request_id"] for each in decisions[1:])


def test_batch_spends_one_request_for_each_allowed_decision(call: Call, key: tuple[Key, str]) -> None:
    limit(key[0], 3)
    decisions = batch(call, *[{"key": key[1]}] * 5).body["decisions"]
    assert [each["status"] for each in decisions] == [200, 200, 200, 429, 429]


@pytest.mark.parametrize("requests", [None, [], {}, "x", [1], [{}], [{"key": None}]])
def test_batch_that_is_malformed_is_refused_as_a_whole(call: Call, requests: Any) -> None:
    response = call("POST", "/v1/keys/verify-batch", {"requests": requests})
    assert (response.status_code, response.body["code"]) == (400, "request_invalid")
    assert all(fault["pointer"].startswith("/requests") for fault in response.body["errors"])


def test_batch_with_one_malformed_request_names_it_and_decides_none(
    call: Call, key: tuple[Key, str], usage: UsageLog
) -> None:
    response = batch(call, {"key": key[1]}, {"key": key[1], "cost": 0})
    assert response.status_code == 400
    assert [fault["pointer"] for fault in response.body["errors"]] == ["/requests/1/cost"]
    usage.flush()
    assert not KeyUse.objects.exists()


def test_batch_of_more_than_a_hundred_is_request_invalid(call: Call) -> None:
    assert batch(call, *[{}] * 100).status_code == 200
    response = batch(call, *[{}] * 101)
    assert (response.status_code, response.body["code"]) == (400, "request_invalid")


def test_batch_with_one_foreign_environment_is_refused_before_any_decision(
    call: Call, key: tuple[Key, str], usage: UsageLog
) -> None:
    _, own = make_token(P.KEYS_VERIFY, scope=StringScope.SANDBOX)
    requests = [
        {"key": key[1], "environment": "sandbox", "endpoint": "orders.create"},
        {"key": key[1], "environment": "production", "endpoint": "orders.create"},
    ]
    response = call(
        "POST", "/v1/keys/verify-batch", {"requests": requests}, HTTP_AUTHORIZATION=f"Bearer {own.reveal()}"
    )
    assert (response.status_code, response.body["code"]) == (403, "permission_missing")
    usage.flush()
    assert not KeyUse.objects.exists()
