"""/v1/authorize/…: the same judgement for any gateway, told in the way that each can pass on."""

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
from keyvault.models import KeyUse, Operator, UseBucket
from keyvault.models.keys import OriginHeader
from keyvault.services.catalog.endpoints import add_endpoint
from keyvault.services.keys.credentials import restrict_credential
from keyvault.services.limits.limiter import failed_proofs
from keyvault.services.usage.recorder import UsageLog
from keyvault.services.verification.refusals import RefusalLog, find_refusal
from keyvault.wire.gateways import NAMES, Dialect
from tests.factories import account, grant, issue, make_merchant, make_token, the_operator

from .integration import change_account, losing, private, public

pytestmark = [pytest.mark.database, pytest.mark.django_db]

ORDERS = "/sandbox/merchants/orders"
ME = "/sandbox/customers/me"
CONFIGURATION = "/sandbox/client/configuration"
IDENTITY = {"X-Merchant-Id", "X-Environment", "X-Key-Id", "X-Credential-Id", "X-Customer-Id"}
EVERY = pytest.mark.parametrize("dialect", list(Dialect))

Gateway = Callable[..., Any]
"""`gateway(dialect, method, uri, key=…, token=…, host=…, address=…, **headers)`: the answer to its question."""


@pytest.fixture
def token(db: None) -> str:
    for merchant_id in ("acme", "globex"):
        make_merchant(merchant_id)
        for environment in Environment:
            change_account(merchant_id, environment, limit_count=1000, limit_seconds=1)
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
        **more: str,
    ) -> Any:
        headers = {name.replace("_", "-"): value for name, value in more.items()}
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
        told = {names.method: method, names.uri: uri, names.host: host, names.address: address}
        headers |= {name: value for name, value in told.items() if value is not None}
        return client.generic("GET", f"/v1/authorize/{dialect}", headers=headers)

    yield send
    failed_proofs.cache_clear()


def verdict(dialect: Dialect, response: Any) -> tuple[int, str]:
    """The real status and the code of a refusal, which is told as the dialect can pass it on."""
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


@EVERY
def test_gateway_lets_in_with_200_and_tells_who_it_is(dialect: Dialect, gateway: Gateway, usage: UsageLog) -> None:
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
    use = UseBucket.objects.get(key=key)
    assert (use.count, use.source, use.user_agent) == (1, "192.0.2.7", "curl/8")


@EVERY
def test_gateway_that_probes_counts_as_no_use(dialect: Dialect, gateway: Gateway, usage: UsageLog) -> None:
    """A test call of our own through a gateway is answered as any other, and is no evidence that a key is in use."""
    key, text = issue(account())
    _, probe = make_token(P.KEYS_VERIFY, scope=StringScope.SANDBOX, name="probe", is_probe=True)
    assert gateway(dialect, key=text, token=probe.reveal()).status_code == 200
    usage.flush()
    assert UseBucket.objects.get(key=key).outcome == "probed"
    assert not KeyUse.objects.exists()


@EVERY
def test_gateway_reads_the_clients_headers_method_and_path(dialect: Dialect, gateway: Gateway) -> None:
    """tests/entry_points asserts the other verdicts."""
    key = private()
    for more, expected in (
        ({"uri": f"/sandbox/{key.reveal()}"}, (400, "credential_in_url")),
        ({"key": key, "Authorization": "Bearer x,Bearer y"}, (400, "credential_ambiguous")),
        ({"key": key, "Authorization": ",Bearer x"}, (400, "credential_ambiguous")),
        ({"key": key, "uri": "/production/merchants/orders"}, (404, "endpoint_unknown")),
        ({"key": key, "method": "BREW"}, (405, "method_not_allowed")),
        ({"method": "OPTIONS", "Origin": "https://shop.example"}, (405, "method_not_allowed")),
    ):
        response = gateway(dialect, **more)
        assert verdict(dialect, response) == expected, more
        assert key.reveal().encode() not in response.content
        if expected[0] == 405:
            assert response["Allow"] == "POST"


@EVERY
def test_gateway_path_that_could_be_read_in_two_ways_is_never_allowed(dialect: Dialect, gateway: Gateway) -> None:
    """Guarantee: a path that nginx, Envoy or an upstream may read as another one names no endpoint."""
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
            continue  # no path of HTTP's, and the test client drops it
        assert verdict(dialect, gateway(dialect, uri=uri, key=key)) == (404, "endpoint_unknown"), uri


@EVERY
def test_gateway_passes_on_when_to_come_back(dialect: Dialect, gateway: Gateway) -> None:
    key = private()
    change_account(limit_count=1, limit_seconds=3600)
    assert gateway(dialect, key=key).status_code == 200
    response = gateway(dialect, key=key)
    assert verdict(dialect, response) == (429, "rate_limited")
    assert 3590 <= int(response["Retry-After"]) <= 3600
    assert response["RateLimit-Policy"] == '"account";q=1;w=3600'
    assert response["RateLimit"].startswith('"account";r=0;')


@EVERY
@pytest.mark.parametrize("lost", [KEY, TOKEN, RULES])
def test_gateway_whose_database_is_lost_lets_nobody_in(dialect: Dialect, lost: str, gateway: Gateway) -> None:
    key = private()
    with losing(lost):
        response = gateway(dialect, key=key)
    assert verdict(dialect, response) == (503, "verifier_stale")
    assert int(response["Retry-After"]) >= 1


@EVERY
def test_gateway_that_meets_a_fault_of_ours_lets_nobody_in(dialect: Dialect, gateway: Gateway) -> None:
    with mock.patch.object(slow_path, "judge", side_effect=ZeroDivisionError):
        assert verdict(dialect, gateway(dialect, key=private())) == (500, "internal_error")


@EVERY
def test_gateway_whose_look_up_meets_a_fault_of_ours_lets_nobody_in(dialect: Dialect, gateway: Gateway) -> None:
    with mock.patch.object(DatabaseStore, "find", side_effect=ZeroDivisionError):
        assert verdict(dialect, gateway(dialect, key=private())) == (500, "internal_error")


# --- the gateway itself -----------------------------------------------------------------------------------


@EVERY
def test_gateway_shows_its_own_token_in_its_own_header_once(dialect: Dialect, gateway: Gateway, token: str) -> None:
    key = private()
    for sent in (None, "", "nonsense", f"{token},{token}", f"{token},", f"Bearer {token}", key.reveal()):
        assert verdict(dialect, gateway(dialect, key=key, token=sent)) == (401, "service_token_invalid"), sent
    in_authorization = gateway(dialect, key=key, token=None, Authorization=f"Bearer {token}")
    assert verdict(dialect, in_authorization) == (401, "service_token_invalid")
    assert in_authorization["WWW-Authenticate"].startswith("Bearer")


@EVERY
def test_gateway_token_is_for_verifying_and_for_one_environment(dialect: Dialect, gateway: Gateway) -> None:
    key = private()
    for token in (
        make_token(P.KEYS_READ, scope=StringScope.SANDBOX)[1],
        make_token(P.KEYS_VERIFY, scope=StringScope.ALL)[1],
    ):
        assert verdict(dialect, gateway(dialect, key=key, token=token.reveal())) == (403, "permission_missing")


@EVERY
def test_gateway_of_an_environment_that_is_not_served_here_lets_nobody_in(
    dialect: Dialect, gateway: Gateway, settings: Any
) -> None:
    key = private()
    settings.ENVIRONMENTS = ("production",)
    assert verdict(dialect, gateway(dialect, key=key)) == (404, "not_found")


@EVERY
def test_gateway_refuses_the_host_of_the_other_environment(
    dialect: Dialect, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    bases = {Environment.SANDBOX: "https://sandbox.example", Environment.PRODUCTION: "https://api.example"}
    monkeypatch.setattr(assembly, "BASE_URLS", bases)
    key, uri = private(), "/merchants/orders"
    # A host that cannot be read might be either: with hosts of their own, that is no way round the comparison.
    for host in ("api.example", "API.example:443", "api.example.", "", "[::1"):
        assert verdict(dialect, gateway(dialect, uri=uri, key=key, host=host)) == (403, "permission_missing"), host
    for host in ("sandbox.example", "shop.example"):
        assert gateway(dialect, uri=uri, key=key, host=host).status_code == 200, host


@pytest.mark.parametrize("dialect", [Dialect.TRAEFIK, Dialect.NGINX])
def test_gateway_that_does_not_say_what_it_asks_about_is_refused(dialect: Dialect, gateway: Gateway) -> None:
    """Guarantee: a gateway that is set up wrongly lets nobody in, whatever the other gateways' headers say."""
    key, other = private(), Dialect.NGINX if dialect is Dialect.TRAEFIK else Dialect.TRAEFIK
    names = NAMES[other]
    foreign = {names.method: "POST", names.uri: ORDERS}
    for told in ({"method": ""}, {"uri": ""}, {"uri": "sandbox/merchants/orders"}, {"method": "POST,POST"}):
        response = gateway(dialect, key=key, **told, **foreign)
        assert verdict(dialect, response) == (400, "request_invalid"), told


@EVERY
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


@EVERY
def test_gateway_client_address_is_the_one_that_the_gateway_saw(dialect: Dialect, gateway: Gateway) -> None:
    """Guarantee: no address that a client writes itself opens a credential that is for certain networks."""
    key, text = issue(account())
    may = grant(the_operator("admin", Role.KEY_ADMINISTRATOR), P.CREDENTIALS_RESTRICT, account())
    restrict_credential(may, key.credential, ["192.0.2.0/24"], OriginHeader.REFUSE)
    assert gateway(dialect, key=text, address="192.0.2.7").status_code == 200
    assert gateway(dialect, key=text, address="198.51.100.1, 192.0.2.7").status_code == 200
    for address in ("198.51.100.1", "192.0.2.7, 198.51.100.1", "nonsense", None):
        refused = gateway(dialect, key=text, address=address)
        assert verdict(dialect, refused) == (403, "ip_not_allowed"), address


@EVERY
def test_gateway_clients_failed_proofs_are_counted_by_their_address(dialect: Dialect, gateway: Gateway) -> None:
    key = private()
    text = private().reveal()
    wrong = text[:-1] + ("A" if text[-1] != "A" else "B")
    # More than a hundred on a slow machine, where some of the allowance comes back meanwhile.
    answers = (gateway(dialect, key=wrong, address="192.0.2.7") for _ in range(1_000))
    refused = next(answer for answer in answers if "Retry-After" in answer)
    assert verdict(dialect, refused) == (401, "credential_invalid")
    assert int(refused["Retry-After"]) >= 1
    assert "Retry-After" not in gateway(dialect, key=wrong, address="192.0.2.8")
    assert gateway(dialect, key=key, address="192.0.2.7").status_code == 200


@EVERY
def test_gateway_protects_an_upstream_with_its_contexts(dialect: Dialect, gateway: Gateway) -> None:
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


@EVERY
def test_gateway_refusal_is_found_by_its_request_id(dialect: Dialect, gateway: Gateway, refusals: RefusalLog) -> None:
    response = gateway(dialect, key=public(), address="192.0.2.7")
    refusals.flush()
    found = find_refusal(response["X-Request-Id"])
    assert found is not None
    assert (found.door, found.environment, found.endpoint) == (dialect.value, "sandbox", "orders.create")
    assert (found.code, found.merchant_id, found.source) == ("method_not_supported", "acme", "192.0.2.7")


@EVERY
def test_gateway_key_in_the_clients_url_is_noted_as_exposed(
    dialect: Dialect, gateway: Gateway, usage: UsageLog
) -> None:
    key, text = issue(account())
    assert verdict(dialect, gateway(dialect, uri=f"{ORDERS}?k={text.reveal()}")) == (400, "credential_in_url")
    usage.flush()
    assert UseBucket.objects.get(key=key).outcome == "exposed_in_url"


def test_gateway_that_is_set_up_with_a_key_in_its_own_url_is_told_so(gateway: Gateway, token: str) -> None:
    client = Client(raise_request_exception=False)
    response = client.get(f"/v1/authorize/nginx?k={private().reveal()}", headers={"X-Service-Token": token})
    assert verdict(Dialect.NGINX, response) == (400, "credential_in_url")


def test_gateway_may_ask_with_any_method_and_a_body_that_nobody_reads(token: str, gateway: Gateway) -> None:
    headers = {"X-Service-Token": token, "X-Original-Method": "POST", "X-Original-URI": ORDERS}
    headers["X-Api-Key"] = private().reveal()
    client = Client(raise_request_exception=False, enforce_csrf_checks=True)
    for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "BREW"):
        response = client.generic(method, "/v1/authorize/nginx", b"x" * 70_000, "text/html", headers=headers)
        assert (response.status_code, response.content) == (200, b""), method


def test_gateway_admin_session_is_no_credential_of_it(gateway: Gateway, client: Client) -> None:
    the_operator("admin", Role.KEY_ADMINISTRATOR)
    client.force_login(Operator.objects.get(username="admin"))
    response = client.get("/v1/authorize/traefik", headers={"X-Forwarded-Method": "POST", "X-Forwarded-Uri": ORDERS})
    assert verdict(Dialect.TRAEFIK, response) == (401, "service_token_invalid")
