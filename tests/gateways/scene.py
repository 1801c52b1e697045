"""A gateway in front of an upstream and of the server of `make run`, and what every shipped sample does."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from keyvault.access.limits import Limit
from keyvault.access.permissions import Permission as P
from keyvault.access.roles import Role
from keyvault.domain.keys import KeyKind
from keyvault.domain.keystring import StringScope
from keyvault.models.keys import OriginHeader
from keyvault.services.keys.credentials import restrict_credential
from keyvault.services.limits.overrides import set_account_limit
from tests.factories import PRODUCTION, account, grant, issue, make_merchant, make_token, the_operator
from tests.fuzz.drive import UNLIMITED
from tests.fuzz.served import serving

from .front import Gateway, GatewayAnswer, Upstream, echoing

ORDERS = "/sandbox/merchants/orders"
CONFIGURATION = "/sandbox/client/configuration"

AMBIGUOUS_PATHS = (
    "/sandbox/merchants%2forders",
    "/sandbox/merchants%2Forders",
    "/sandbox/merchants/%6frders",
    "/sandbox/x/../merchants/orders",
    "/sandbox/x/%2e%2e/merchants/orders",
    "/sandbox/./merchants/orders",
    "/sandbox/merchants//orders",
    "//sandbox/merchants/orders",
    "/sandbox/merchants/orders/",
    "/sandbox/merchants/orders/.",
    "/sandbox/merchants/orders;x",
    "/sandbox;x/merchants/orders",
    "/sandbox/merchants/orders%3b",
    "/sandbox/merchants/orders%20",
    "/sandbox/merchants/orders%3fx",
    "/sandbox/merchants/orders%ff",
    "/sandbox/merchants/orders\xe9",
    "/sandbox/merchants\\orders",
    "/sandbox/merchants/orders#x",
    "/sandbox/Merchants/orders",
    "/_keyvault/../sandbox/merchants//orders",
)
"""Paths that some servers read as ORDERS. Keyvault knows none of them."""

StartGateway = Callable[..., AbstractContextManager[Gateway]]
"""Starts a gateway with a token, `keyvault=` and `upstream=` as ports."""


@dataclass
class GatewayScene:
    """A sandbox gateway and a production gateway in front of one upstream, and Keyvault, which a test can stop."""

    gateway: Gateway
    production: Gateway
    upstream: Upstream
    key: str
    sandbox_token: str
    production_token: str
    keyvault: ExitStack
    open_gateway: Callable[..., Gateway]

    def refused(self, answer: GatewayAnswer) -> tuple[int, str]:
        """Return the status and code of a denial, after a check that the upstream got no request."""
        assert self.upstream.seen == []
        assert self.key.encode() not in answer.body
        assert ("WWW-Authenticate" in answer.headers) == (answer.status == 401)
        assert len(answer.headers.get_all("X-Request-Id", [])) <= 1
        return answer.status, answer.code


@contextmanager
def opened_scene(start: StartGateway, folder: Path) -> Iterator[GatewayScene]:
    """Start Keyvault, an upstream and two gateways. At the end, no log of the server has a key or token."""
    make_merchant("acme")
    key = issue(account())[1].reveal()
    tokens = [
        make_token(P.KEYS_VERIFY, name=f"{scope}-gateway", scope=scope)[1].reveal()
        for scope in (StringScope.SANDBOX, StringScope.PRODUCTION)
    ]
    with ExitStack() as around:
        upstream = around.enter_context(echoing())
        keyvault = around.enter_context(ExitStack())
        port = keyvault.enter_context(serving(folder, **UNLIMITED))

        def open_gateway(token: str, keyvault: int = port, upstream: int = upstream.port) -> Gateway:
            return around.enter_context(start(token, keyvault=keyvault, upstream=upstream))

        gateways = [open_gateway(token) for token in tokens]
        yield GatewayScene(gateways[0], gateways[1], upstream, key, tokens[0], tokens[1], keyvault, open_gateway)
    logged = (folder / "server.log").read_text()
    assert key not in logged
    assert not any(token in logged for token in tokens)
    assert "Traceback" not in logged


def gateway_returns_the_original_status_to_its_client(scene: GatewayScene) -> None:
    key, other = f"X-Api-Key: {scene.key}", issue(account("acme", PRODUCTION))[1].reveal()
    public = f"X-Api-Key: {issue(account(), kind=KeyKind.PUBLIC)[1].reveal()}"
    for lines, line, expected in (
        ((), ("POST", ORDERS), (401, "credential_missing")),
        (("X-Api-Key:",), ("POST", ORDERS), (401, "credential_invalid")),
        (("X-Api-Key: nonsense",), ("POST", ORDERS), (401, "credential_invalid")),
        (("X-Api-Key: \xe9",), ("POST", ORDERS), (401, "credential_invalid")),
        ((f"X-Api-Key: {other}",), ("POST", ORDERS), (401, "environment_mismatch")),
        ((f"X-Service-Token: {scene.sandbox_token}",), ("POST", ORDERS), (401, "credential_missing")),
        ((key, "Authorization: Bearer x"), ("POST", ORDERS), (401, "bearer_not_supported")),
        ((key,), ("GET", "/sandbox/customers/me"), (401, "customer_token_missing")),
        ((key, key), ("POST", ORDERS), (400, "credential_ambiguous")),
        ((key, "X-Api-Key:"), ("POST", ORDERS), (400, "credential_ambiguous")),
        (("x-api-key: bad", key), ("POST", ORDERS), (400, "credential_ambiguous")),
        ((), ("POST", f"{ORDERS}?k={scene.key}"), (400, "credential_in_url")),
        ((key,), ("POST", f"/sandbox/{scene.key.replace('_', '%5f')}"), (400, "credential_in_url")),
        ((public,), ("POST", ORDERS), (403, "method_not_supported")),
        ((key, "Origin: https://shop.example"), ("POST", ORDERS), (403, "private_key_in_browser")),
        ((key,), ("GET", "/sandbox/nowhere"), (404, "endpoint_unknown")),
        ((key,), ("GET", "/"), (404, "endpoint_unknown")),
        ((key,), ("POST", "/production/merchants/orders"), (404, "endpoint_unknown")),
        ((key,), ("PATCH", ORDERS), (405, "method_not_allowed")),
        ((), ("OPTIONS", ORDERS), (405, "method_not_allowed")),
    ):
        answer = scene.gateway.send(*lines, method=line[0], path=line[1])
        assert scene.refused(answer) == expected, (lines, line)
        assert len(answer.headers.get_all("WWW-Authenticate", [])) == (expected[0] == 401)
        assert answer.headers["Allow"] == ("POST" if expected[0] == 405 else None)


def gateway_passes_on_retry_after(scene: GatewayScene) -> None:
    make_merchant("globex")
    place = account("globex")
    limiting = grant(the_operator("admin", Role.KEY_ADMINISTRATOR), P.LIMITS_WRITE, place)
    set_account_limit(limiting, place, Limit(1, 3600))
    key = f"X-Api-Key: {issue(place)[1].reveal()}"
    assert scene.gateway.send(key, path=ORDERS).status == 207
    scene.upstream.seen.clear()
    answer = scene.gateway.send(key, path=ORDERS)
    assert scene.refused(answer) == (429, "rate_limited")
    (retry_after,) = answer.headers.get_all("Retry-After", [])
    assert 3500 <= int(retry_after) <= 3600
    assert answer.headers["RateLimit-Policy"] == '"account";q=1;w=3600'
    assert answer.headers["RateLimit"].startswith('"account";r=0;')


def gateway_of_one_environment_refuses_the_others_key(scene: GatewayScene) -> None:
    """Guarantee: neither a sandbox key nor the sandbox gateway's own token, sent by a client, opens production."""
    path = "/production/merchants/orders"
    for lines in ((), (f"X-Service-Token: {scene.sandbox_token}",)):
        answer = scene.production.send(f"X-Api-Key: {scene.key}", *lines, path=path)
        assert scene.refused(answer) == (401, "environment_mismatch")
    production = issue(account("acme", PRODUCTION))[1].reveal()
    assert scene.production.send(f"X-Api-Key: {production}", path=path).status == 207
    assert scene.upstream.seen.pop().all("X-Environment") == ["production"]


def gateway_sends_the_address_of_the_connection(scene: GatewayScene) -> None:
    """Guarantee: no header of a client changes the address that is compared with a credential's networks."""
    for networks, expected in ((["192.0.2.0/24"], 403), (["127.0.0.0/8"], 207)):
        key, text = issue(account())
        may = grant(the_operator("admin", Role.KEY_ADMINISTRATOR), P.CREDENTIALS_RESTRICT, account())
        restrict_credential(may, key.credential, networks, OriginHeader.REFUSE)
        answer = scene.gateway.send(
            f"X-Api-Key: {text.reveal()}",
            "X-Original-Address: 192.0.2.7",
            "X-Forwarded-For: 192.0.2.7",
            "X-Real-IP: 192.0.2.7",
            path=ORDERS,
        )
        assert answer.status == expected
