"""/v1/authorize/…: the verdict of verify for any gateway, in the form that each can forward."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from django.test import Client

from keyvault.access.endpoints import EndpointDraft
from keyvault.access.permissions import Permission as P
from keyvault.access.roles import Role
from keyvault.api.middleware import RAW_PATH
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind
from keyvault.domain.keystring import StringScope
from keyvault.hotpath.adapters import assembly
from keyvault.hotpath.adapters.stores import DatabaseStore
from keyvault.hotpath.messages.pending_requests import KEY, RULES, TOKEN
from keyvault.hotpath.slow_path import slow_path
from keyvault.models import KeyUse, Operator, Refusal, UseBucket, UseContext
from keyvault.models.keys import OriginHeader
from keyvault.services.catalog.endpoints import add_endpoint
from keyvault.services.keys.credentials import restrict_credential
from keyvault.services.limits.limiter import failed_proofs
from keyvault.services.usage.recorder import UsageLog
from keyvault.services.verification.refusals import RefusalLog
from keyvault.wire.gateways import NAMES, Dialect
from tests.factories import account, grant, issue, make_token, the_operator
from tests.starting_rows import start_with

from .integration import change_account, losing, make_roomy_merchants, private, public

pytestmark = pytest.mark.django_db

ORDERS = "/sandbox/merchants/orders"
ME = "/sandbox/customers/me"
CONFIGURATION = "/sandbox/client/configuration"
IDENTITY = {"X-Merchant-Id", "X-Environment", "X-Key-Id", "X-Credential-Id", "X-Customer-Id"}
EACH_DIALECT = pytest.mark.parametrize("dialect", list(Dialect))

Gateway = Callable[..., Any]
"""`gateway(dialect, method, uri, key=…, token=…, host=…, address=…, **headers)` returns the answer to the gateway."""


@pytest.fixture
def token(db: None) -> str:
    return start_with(_make_token)


def _make_token() -> str:
    make_roomy_merchants()
    return make_token(P.KEYS_VERIFY, scope=StringScope.SANDBOX)[1].reveal()


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> RefusalLog:
    log = RefusalLog()
    monkeypatch.setattr(assembly, "refusal_log", log)
    return log


@pytest.fixture
def gateway(token: str, usage: UsageLog, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    monkeypatch.setattr(assembly, "usage_log", usage)
    client = Client(raise_request_exception=False)

    def send(
        dialect: Dialect,
        method: str = "POST",
        uri: str = ORDERS,
        *,
        key: Any = None,
        token: str | None = token,
        host: str = "shop.example",
        address: str | None = None,
        **extra_headers: str,
    ) -> Any:
        headers = {name.replace("_", "-"): value for name, value in extra_headers.items()}
        if key is not None:
            headers["X-Api-Key"] = key if isinstance(key, str) else key.reveal()
        if token is not None:
            headers["X-Service-Token"] = token
        if dialect is Dialect.ENVOY:
            if address is not None:
                headers["X-Envoy-External-Address"] = address
            path = f"/v1/authorize/envoy{uri}"
            raw: Any = {RAW_PATH: path.partition("?")[0]}
            return client.generic(method, path, headers={**headers, "Host": host}, **raw)
        names = NAMES[dialect]
        original = {names.method: method, names.uri: uri, names.host: host, names.address: address}
        headers |= {name: value for name, value in original.items() if value is not None}
        return client.generic("GET", f"/v1/authorize/{dialect}", headers=headers)

    yield send
    failed_proofs.cache_clear()


def verdict(dialect: Dialect, response: Any) -> tuple[int, str]:
    """Return the status and the code of the decision, decoded from the dialect's answer."""
    body = response.json()
    assert response["Content-Type"] == "application/problem+json"
    assert response["Cache-Control"] == "no-store"
    assert body["request_id"] == response["X-Request-Id"]
    assert not IDENTITY & set(response.headers)
    assert ("WWW-Authenticate" in response) == (body["status"] == 401)
    if dialect is Dialect.NGINX:
        assert response["X-Auth-Status"] == str(body["status"])
        assert response["X-Auth-Code"] == body["code"]
        assert response.status_code == (body["status"] if body["status"] in {401, 403} else 403)
    else:
        assert response.status_code == body["status"]
        assert "X-Auth-Status" not in response
    return body["status"], body["code"]


@EACH_DIALECT
def test_gateway_allowed_request_answers_200_with_the_identity(
    dialect: Dialect, gateway: Gateway, usage: UsageLog
) -> None:
    key, text = issue(account())
    response = gateway(dialect, key=text, User_Agent="curl/8", address="192.0.2.7")
    assert (response.status_code, response.content) == (200, b"")
    assert {name: response[name] for name in IDENTITY} == {
        "X-Merchant-Id": "acme",
        "X-Environment": "sandbox",
        "X-Key-Id": key.key_id,
        "X-Credential-Id": key.credential.credential_id,
        "X-Customer-Id": "",
    }
    assert len(response["X-Request-Id"]) == 22
    assert response["Cache-Control"] == "no-store"
    assert response["RateLimit-Policy"] == '"account";q=1000;w=1'
    assert response["RateLimit"].startswith('"account";r=999;')
    assert "Content-Type" not in response
    assert "Set-Cookie" not in response
    usage.flush()
    use = UseBucket.objects.get(context__key=key)
    assert (use.count, use.context.source, use.context.user_agent) == (1, "192.0.2.7", "curl/8")


@EACH_DIALECT
def test_gateway_with_a_probe_token_counts_as_no_use(dialect: Dialect, gateway: Gateway, usage: UsageLog) -> None:
    """A probe through a gateway gets a normal answer and is no evidence that a key is in use."""
    key, text = issue(account())
    _, probe = make_token(P.KEYS_VERIFY, scope=StringScope.SANDBOX, name="probe", is_probe=True)
    assert gateway(dialect, key=text, token=probe.reveal()).status_code == 200
    usage.flush()
    assert UseContext.objects.get(key=key).outcome == "probed"
    assert not KeyUse.objects.exists()


@EACH_DIALECT
def test_gateway_reads_the_clients_headers_method_and_path(dialect: Dialect, gateway: Gateway) -> None:
    """The verdicts that depend on credentials and states are asserted in tests/entry_points."""
    key = private()
    for changes, expected in (
        ({"uri": f"/sandbox/{key.reveal()}"}, (400, "credential_in_url")),
        ({"key": key, "Authorization": "Bearer x,Bearer y"}, (400, "credential_ambiguous")),
        ({"key": key, "Authorization": ",Bearer x"}, (400, "credential_ambiguous")),
        ({"key": key, "uri": "/production/merchants/orders"}, (404, "endpoint_unknown")),
        ({"key": key, "method": "BREW"}, (405, "method_not_allowed")),
        ({"method": "OPTIONS", "Origin": "https://shop.example"}, (405, "method_not_allowed")),
    ):
        response = gateway(dialect, **changes)
        assert verdict(dialect, response) == expected, changes
        assert key.reveal().encode() not in response.content
        if expected[0] == 405:
            assert response["Allow"] == "POST"


@EACH_DIALECT
def test_gateway_ambiguous_path_is_never_allowed(dialect: Dialect, gateway: Gateway) -> None:
    """Guarantee: a path that nginx, Envoy or an upstream may interpret differently matches no endpoint."""
    key = private()
    for uri in (
        "/sandbox/merchants%2forders",
        "/sandbox/merchants/%6frders",
        "/sandbox/merchants/orders/..",
        "/sandbox/x/../merchants/orders",
        "/sandbox/./merchants/orders",
        "//sandbox/merchants/orders",
        "/sandbox//merchants/orders",
        "/sandbox/merchants/orders/",
        "/sandbox/merchants/orders;x",
        "/sandbox/merchants/orders#x",
        "/sandbox/merchants/orders%00",
        "/sandbox/merchants/orders%0a",
        "/sandbox/Merchants/orders",
        "/SANDBOX/merchants/orders",
    ):
        if dialect is Dialect.ENVOY and "#" in uri:
            continue  # not a valid HTTP path, and the test client drops it
        assert verdict(dialect, gateway(dialect, uri=uri, key=key)) == (404, "endpoint_unknown"), uri


@EACH_DIALECT
def test_gateway_rate_limited_answer_carries_retry_after(dialect: Dialect, gateway: Gateway) -> None:
    key = private()
    change_account(limit_count=1, limit_seconds=3600)
    assert gateway(dialect, key=key).status_code == 200
    response = gateway(dialect, key=key)
    assert verdict(dialect, response) == (429, "rate_limited")
    assert 3590 <= int(response["Retry-After"]) <= 3600
    assert response["RateLimit-Policy"] == '"account";q=1;w=3600'
    assert response["RateLimit"].startswith('"account";r=0;')


@EACH_DIALECT
@pytest.mark.parametrize("lost", [KEY, TOKEN, RULES])
def test_gateway_without_the_database_denies(dialect: Dialect, lost: str, gateway: Gateway) -> None:
    key = private()
    with losing(lost):
        response = gateway(dialect, key=key)
    assert verdict(dialect, response) == (503, "verifier_stale")
    assert int(response["Retry-After"]) >= 1


@EACH_DIALECT
def test_gateway_with_an_internal_fault_denies(dialect: Dialect, gateway: Gateway) -> None:
    with mock.patch.object(slow_path, "judge", side_effect=ZeroDivisionError):
        assert verdict(dialect, gateway(dialect, key=private())) == (500, "internal_error")


@EACH_DIALECT
def test_gateway_with_a_fault_in_the_lookup_denies(dialect: Dialect, gateway: Gateway) -> None:
    with mock.patch.object(DatabaseStore, "find", side_effect=ZeroDivisionError):
        assert verdict(dialect, gateway(dialect, key=private())) == (500, "internal_error")


# --- the gateway's own credentials ------------------------------------------------------------------------


@EACH_DIALECT
def test_gateway_token_is_accepted_once_in_its_own_header_only(dialect: Dialect, gateway: Gateway, token: str) -> None:
    key = private()
    for sent in (None, "", "nonsense", f"{token},{token}", f"{token},", f"Bearer {token}", key.reveal()):
        assert verdict(dialect, gateway(dialect, key=key, token=sent)) == (401, "service_token_invalid"), sent
    in_authorization = gateway(dialect, key=key, token=None, Authorization=f"Bearer {token}")
    assert verdict(dialect, in_authorization) == (401, "service_token_invalid")
    assert in_authorization["WWW-Authenticate"].startswith("Bearer")


@EACH_DIALECT
def test_gateway_token_without_permission_or_environment_is_refused(dialect: Dialect, gateway: Gateway) -> None:
    key = private()
    for token in (
        make_token(P.KEYS_READ, scope=StringScope.SANDBOX)[1],
        make_token(P.KEYS_VERIFY, scope=StringScope.ALL)[1],
    ):
        assert verdict(dialect, gateway(dialect, key=key, token=token.reveal())) == (403, "permission_missing")


@EACH_DIALECT
def test_gateway_of_an_environment_not_served_here_denies(dialect: Dialect, gateway: Gateway, settings: Any) -> None:
    key = private()
    settings.ENVIRONMENTS = ("production",)
    assert verdict(dialect, gateway(dialect, key=key)) == (404, "not_found")


@EACH_DIALECT
def test_gateway_refuses_the_host_of_the_other_environment(
    dialect: Dialect, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    bases = {Environment.SANDBOX: "https://sandbox.example", Environment.PRODUCTION: "https://api.example"}
    monkeypatch.setattr(assembly, "BASE_URLS", bases)
    key, uri = private(), "/merchants/orders"
    # An invalid Host could belong to either environment; it must not bypass the comparison.
    for host in ("api.example", "API.example:443", "api.example.", "", "[::1"):
        assert verdict(dialect, gateway(dialect, uri=uri, key=key, host=host)) == (403, "permission_missing"), host
    for host in ("sandbox.example", "shop.example"):
        assert gateway(dialect, uri=uri, key=key, host=host).status_code == 200, host


@pytest.mark.parametrize("dialect", [Dialect.TRAEFIK, Dialect.NGINX])
def test_gateway_without_the_original_request_is_refused(dialect: Dialect, gateway: Gateway) -> None:
    """Guarantee: a misconfigured gateway admits no client, whatever the other gateways' headers say."""
    key, other = private(), Dialect.NGINX if dialect is Dialect.TRAEFIK else Dialect.TRAEFIK
    names = NAMES[other]
    foreign = {names.method: "POST", names.uri: ORDERS}
    for original in ({"method": ""}, {"uri": ""}, {"uri": "sandbox/merchants/orders"}, {"method": "POST,POST"}):
        response = gateway(dialect, key=key, **original, **foreign)
        assert verdict(dialect, response) == (400, "request_invalid"), original


@EACH_DIALECT
def test_gateway_other_dialects_headers_change_nothing(dialect: Dialect, gateway: Gateway) -> None:
    key = private()
    forged = {
        name: value
        for other in NAMES
        if other is not dialect
        for name, value in zip(
            ("method", "uri", "host", "address"), ("GET", CONFIGURATION, "evil.example", "192.0.2.66"), strict=True
        )
        for name in (getattr(NAMES[other], name),)
    }
    forged |= {"X-Merchant-Id": "globex", "X-Environment": "production", "X-Auth-Status": "200"}
    response = gateway(dialect, key=key, **forged)
    assert (response.status_code, response["X-Merchant-Id"]) == (200, "acme")
    assert verdict(dialect, gateway(dialect, uri="/sandbox/nowhere", key=key, **forged)) == (404, "endpoint_unknown")


@EACH_DIALECT
def test_gateway_client_address_is_the_one_seen_by_the_gateway(dialect: Dialect, gateway: Gateway) -> None:
    """Guarantee: an address written by the client does not satisfy a credential's network restriction."""
    key, text = issue(account())
    allowed = grant(the_operator("admin", Role.KEY_ADMINISTRATOR), P.CREDENTIALS_RESTRICT, account())
    restrict_credential(allowed, key.credential, ["192.0.2.0/24"], OriginHeader.REFUSE)
    assert gateway(dialect, key=text, address="192.0.2.7").status_code == 200
    assert gateway(dialect, key=text, address="198.51.100.1, 192.0.2.7").status_code == 200
    for address in ("198.51.100.1", "192.0.2.7, 198.51.100.1", "nonsense", None):
        refused = gateway(dialect, key=text, address=address)
        assert verdict(dialect, refused) == (403, "ip_not_allowed"), address


@EACH_DIALECT
def test_gateway_clients_failed_proofs_are_counted_by_their_address(dialect: Dialect, gateway: Gateway) -> None:
    key = private()
    text = private().reveal()
    wrong = text[:-1] + ("A" if text[-1] != "A" else "B")
    # Up to 1,000 attempts instead of 101: a slow machine refills part of the allowance meanwhile.
    answers = (gateway(dialect, key=wrong, address="192.0.2.7") for _ in range(1_000))
    refused = next(answer for answer in answers if "Retry-After" in answer)
    assert verdict(dialect, refused) == (401, "credential_invalid")
    assert int(refused["Retry-After"]) >= 1
    assert "Retry-After" not in gateway(dialect, key=wrong, address="192.0.2.8")
    assert gateway(dialect, key=key, address="192.0.2.7").status_code == 200


@EACH_DIALECT
def test_gateway_checks_the_contexts_of_an_upstream_endpoint(dialect: Dialect, gateway: Gateway) -> None:
    draft = EndpointDraft(
        "refunds.create",
        method="POST",
        path="/refunds/<merchant_id>",
        credentials=frozenset({KeyKind.PRIVATE}),
        merchant_from="path:merchant_id",
        store_from="header:X-Store",
    )
    add_endpoint(grant(the_operator("admin", Role.KEY_ADMINISTRATOR), P.CATALOG_WRITE), draft)
    key = private()
    assert gateway(dialect, uri="/sandbox/refunds/acme", key=key, X_Store="s1").status_code == 200
    refused = gateway(dialect, uri="/sandbox/refunds/globex", key=key, X_Store="s1")
    assert verdict(dialect, refused) == (403, "merchant_mismatch")
    for store in ({}, {"X_Store": " "}, {"X_Store": "s1,s2"}):
        refused = gateway(dialect, uri="/sandbox/refunds/acme?x=1", key=key, **store)
        assert verdict(dialect, refused) == (403, "context_missing"), store


@EACH_DIALECT
def test_gateway_refusal_is_found_by_its_request_id(dialect: Dialect, gateway: Gateway, refusals: RefusalLog) -> None:
    response = gateway(dialect, key=public(), address="192.0.2.7")
    refusals.flush()
    found = Refusal.objects.filter(pk=response["X-Request-Id"]).first()
    assert found is not None
    assert (found.entry_point, found.environment, found.endpoint) == (dialect.value, "sandbox", "orders.create")
    assert (found.code, found.merchant_id, found.source) == ("method_not_supported", "acme", "192.0.2.7")


@EACH_DIALECT
def test_gateway_key_in_the_clients_url_is_recorded_as_exposed(
    dialect: Dialect, gateway: Gateway, usage: UsageLog
) -> None:
    key, text = issue(account())
    assert verdict(dialect, gateway(dialect, uri=f"{ORDERS}?k={text.reveal()}")) == (400, "credential_in_url")
    usage.flush()
    assert UseContext.objects.get(key=key).outcome == "exposed_in_url"


def test_gateway_with_a_key_in_its_own_url_is_refused(gateway: Gateway, token: str) -> None:
    client = Client(raise_request_exception=False)
    response = client.get(f"/v1/authorize/nginx?k={private().reveal()}", headers={"X-Service-Token": token})
    assert verdict(Dialect.NGINX, response) == (400, "credential_in_url")


def test_gateway_request_with_any_method_and_body_is_answered(token: str, gateway: Gateway) -> None:
    headers = {"X-Service-Token": token, "X-Original-Method": "POST", "X-Original-URI": ORDERS}
    headers["X-Api-Key"] = private().reveal()
    client = Client(raise_request_exception=False, enforce_csrf_checks=True)
    for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "BREW"):
        response = client.generic(method, "/v1/authorize/nginx", b"x" * 70_000, "text/html", headers=headers)
        assert (response.status_code, response.content) == (200, b""), method


def test_gateway_with_an_admin_session_is_refused(gateway: Gateway, client: Client) -> None:
    the_operator("admin", Role.KEY_ADMINISTRATOR)
    client.force_login(Operator.objects.get(username="admin"))
    response = client.get("/v1/authorize/traefik", headers={"X-Forwarded-Method": "POST", "X-Forwarded-Uri": ORDERS})
    assert verdict(Dialect.TRAEFIK, response) == (401, "service_token_invalid")
