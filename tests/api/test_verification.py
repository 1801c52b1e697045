"""POST /v1/keys/verify and verify-batch: fields, scope of the service token, recorded uses, dry runs and limits.

tests/entry_points asserts the verdict of each credential, state and request.
"""

from typing import Any

import pytest

from keyvault.access.endpoints import EndpointDraft
from keyvault.access.limits import Limit
from keyvault.access.permissions import Permission as P
from keyvault.access.roles import Role
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind
from keyvault.domain.keystring import StringScope
from keyvault.hotpath.messages.pending_requests import KEY
from keyvault.models import Key, KeyUse, UseBucket, UseContext
from keyvault.models.keys import OriginHeader
from keyvault.services.catalog.endpoints import add_endpoint
from keyvault.services.keys.credentials import restrict_credential
from keyvault.services.keys.lifecycle import get_key, suspend_key
from keyvault.services.limits.limiter import FailedProofs, Limiter
from keyvault.services.limits.overrides import set_account_limit
from keyvault.services.limits.stores import LocalStore
from keyvault.services.merchants.merchants import find_account
from keyvault.services.usage.recorder import UsageLog
from tests.factories import grant, issue, make_token, the_operator

from .conftest import Call
from .integration import losing

pytestmark = pytest.mark.django_db

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


# --- key strings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [" ", "ключ", "kv_prv_sbx_", "\x00", "\ud800", "x" * 10_000])
def test_verify_key_impossible_in_a_header_is_credential_invalid(call: Call, text: str) -> None:
    assert outcome(ask(call, text)) == (401, "credential_invalid", 1)


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


# --- dry runs and recorded uses ---------------------------------------------------------------------------


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
    sources = set(UseContext.objects.values_list("source", flat=True))
    assert "192.0.2.9" in sources
    assert any(source.startswith("token:") for source in sources)


def probe() -> str:
    return f"Bearer {make_token(P.KEYS_VERIFY, name='probe', is_probe=True)[1].reveal()}"


def test_verify_by_a_probe_counts_as_no_use(call: Call, key: tuple[Key, str], usage: UsageLog) -> None:
    """Probes get normal answers, are marked as probes, and are no evidence of use."""
    token = probe()
    request = {"key": key[1], "environment": "sandbox", "endpoint": "orders.create", "client_ip": "192.0.2.9"}
    answers = [call("POST", "/v1/keys/verify", request, HTTP_AUTHORIZATION=token).body]
    batch = call("POST", "/v1/keys/verify-batch", {"requests": [request, request]}, HTTP_AUTHORIZATION=token)
    answers += batch.body["decisions"]
    assert [answer["allowed"] for answer in answers] == [True] * 3
    usage.flush()
    assert not KeyUse.objects.exists()
    bucket = UseBucket.objects.get()
    assert (bucket.context.outcome, bucket.count, bucket.context.source) == ("probed", 3, "192.0.2.9")
    shown = call("GET", f"/v1/keys/{key[0].key_id}").body
    assert (shown["first_used_at"], shown["last_used_at"]) == (None, None)


def test_verify_by_a_probe_does_not_trigger_the_quarantine(call: Call, key: tuple[Key, str], usage: UsageLog) -> None:
    """A probe of a suspended key is no attempt: it neither raises an alarm nor reinstates the key."""
    suspend_key(grant_for(P.KEYS_SUSPEND, key[0]), fresh(key[0]))
    request = {"key": key[1], "environment": "sandbox", "endpoint": "orders.create"}
    assert call("POST", "/v1/keys/verify", request, HTTP_AUTHORIZATION=probe()).body["code"] == "key_not_active"
    usage.flush()
    assert UseContext.objects.get().outcome == "probed"


def test_verify_records_the_origin_of_a_public_key(call: Call, key: tuple[Key, str], usage: UsageLog) -> None:
    _, text = issue(find_account("acme", SANDBOX), kind=KeyKind.PUBLIC)
    origin = "https://shop.example"
    ask(call, text.reveal(), endpoint="client.configuration", origin=origin, user_agent="browser")
    ask(call, key[1], origin=origin)
    usage.flush()
    origins = UseContext.objects.order_by("outcome").values_list("outcome", "origin")
    assert list(origins) == [("allowed", origin), ("denied", ""), ("exposed_in_browser", "")]


def test_verify_suspended_key_records_the_attempt(call: Call, key: tuple[Key, str], usage: UsageLog) -> None:
    suspend_key(grant_for(P.KEYS_SUSPEND, key[0]), fresh(key[0]))
    ask(call, key[1], client_ip="192.0.2.9")
    usage.flush()
    assert UseContext.objects.get().outcome == "refused"


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


def test_verify_client_ip_outside_the_credentials_networks_is_ip_not_allowed(call: Call, key: tuple[Key, str]) -> None:
    """Guarantee: a missing address is outside every network; an IPv4-mapped address counts as its IPv4 address."""
    restrict_credential(
        grant_for(P.CREDENTIALS_RESTRICT, key[0]), key[0].credential, ["192.0.2.0/24"], OriginHeader.REFUSE
    )
    assert ask(call, key[1], client_ip="::ffff:192.0.2.9")["allowed"] is True
    assert outcome(ask(call, key[1])) == (403, "ip_not_allowed", 5)


def add_catalog_endpoint(name: str, path: str, **rule: Any) -> None:
    draft = EndpointDraft(name, "GET", path, frozenset({KeyKind.PRIVATE}), **rule)
    add_endpoint(grant(the_operator("admin", Role.KEY_ADMINISTRATOR), P.CATALOG_WRITE), draft)


def test_verify_added_endpoint_reads_its_context_from_the_path_or_from_the_caller(
    call: Call, key: tuple[Key, str]
) -> None:
    """A caller that names one merchant cannot reach another merchant's resources by path."""
    add_catalog_endpoint("payouts.list", "/payouts/<shop>", merchant_from="path:shop", store_from="header:X-Store")

    def ask_by_path(path: str, **more: Any) -> Any:
        body = {"key": key[1], "environment": "sandbox", "method": "GET", "path": path, **more}
        return call("POST", "/v1/keys/verify", body).body

    assert ask_by_path("/payouts/acme", store="7")["allowed"] is True
    assert ask_by_path("/sandbox/payouts/acme?shop=globex", store="7")["allowed"] is True
    assert outcome(ask_by_path("/payouts/globex", store="7")) == (403, "merchant_mismatch", 2)
    assert outcome(ask_by_path("/payouts/globex", store="7", merchant="acme")) == (403, "merchant_mismatch", 2)
    assert outcome(ask_by_path("/payouts/acme", store="7", merchant="globex")) == (403, "merchant_mismatch", 2)
    assert outcome(ask_by_path("/payouts/acme")) == (403, "context_missing", 5)
    assert outcome(ask_by_path("/payouts/acme", store=" ")) == (403, "context_missing", 5)
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


def test_verify_with_a_whole_cost_written_as_a_decimal_spends_it(call: Call, key: tuple[Key, str]) -> None:
    limit(key[0], 10)
    assert ask(call, key[1], cost=2.0)["limit"]["remaining"] == 8


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


# --- batches ----------------------------------------------------------------------------------------------


def batch(call: Call, *changes: dict[str, Any]) -> Any:
    requests = [{"key": None, "environment": "sandbox", "endpoint": "orders.create", **each} for each in changes]
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
