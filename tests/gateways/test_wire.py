"""Envoy's and Traefik's dialects over the wire of the real server: their samples have not been run."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.domain.keystring import StringScope
from keyvault.wire.gateways import Dialect
from tests.factories import account, issue, make_merchant, make_token
from tests.fuzz.drive import UNLIMITED
from tests.fuzz.served import serving

from .front import Gateway, GatewayAnswer

pytestmark = pytest.mark.django_db(transaction=True)

ORDERS = "/sandbox/merchants/orders"
IDENTITY = ("X-Merchant-Id", "X-Environment", "X-Key-Id", "X-Credential-Id", "X-Customer-Id", "X-Request-Id")


@dataclass(frozen=True)
class DialectGateway:
    """A gateway of either dialect, as its samples ask."""

    keyvault: Gateway
    key: str
    token: str

    def ask(self, dialect: Dialect, *lines: str, method: str = "POST", path: str = ORDERS) -> GatewayAnswer:
        head = [f"X-Api-Key: {self.key}", f"X-Service-Token: {self.token}", *lines]
        if dialect is Dialect.ENVOY:
            return self.keyvault.send(*head, method=method, path=f"/v1/authorize/envoy{path}", host="shop.example")
        headers = [f"X-Forwarded-Method: {method}", f"X-Forwarded-Uri: {path}", "X-Forwarded-Host: shop.example"]
        return self.keyvault.send(*head, *headers, method="GET", path="/v1/authorize/traefik", host="127.0.0.1")


@pytest.fixture
def asking(tmp_path: Path) -> Iterator[DialectGateway]:
    make_merchant("acme")
    key = issue(account())[1].reveal()
    token = make_token(P.KEYS_VERIFY, scope=StringScope.SANDBOX)[1].reveal()
    with serving(tmp_path, **UNLIMITED) as port:
        yield DialectGateway(Gateway(f"http://127.0.0.1:{port}"), key, token)
    logged = (tmp_path / "server.log").read_text()
    assert key not in logged
    assert token not in logged
    assert "Traceback" not in logged


def test_gateway_dialects_over_the_wire_get_the_verdicts_of_the_contract(asking: DialectGateway) -> None:
    """Guarantee: the identity is always whole, headers without a value included, and paths are judged as sent."""
    for dialect in (Dialect.ENVOY, Dialect.TRAEFIK):
        answer = asking.ask(dialect)
        assert (answer.status, answer.body) == (200, b"")
        headers = {name: answer.headers.get_all(name, []) for name in IDENTITY}
        assert {name: len(values) for name, values in headers.items()} == dict.fromkeys(IDENTITY, 1)
        assert (headers["X-Merchant-Id"], headers["X-Customer-Id"]) == (["acme"], [""])
        for lines, expected in (
            ((f"X-Service-Token: {asking.token}",), (401, "service_token_invalid")),
            (("X-Api-Key: bad",), (400, "credential_ambiguous")),
            (("Authorization: Bearer x", "Authorization: Bearer x"), (400, "credential_ambiguous")),
            (("X_Service_Token: bad", "X_Forwarded_Uri: /x"), (200, "")),
        ):
            answer = asking.ask(dialect, *lines)
            assert (answer.status, answer.code if answer.body else "") == expected, (dialect, lines)
        for path in (
            "/sandbox/merchants%2forders",
            "/sandbox/merchants/%6frders",
            "/sandbox/x/../merchants/orders",
            "/../../../sandbox/merchants/orders",
            "/sandbox//merchants/orders",
            "//sandbox/merchants/orders",
            "/sandbox/merchants/orders;x",
            "/sandbox/merchants/orders%0a",
            "/production/merchants/orders",
            "/",
        ):
            answer = asking.ask(dialect, path=path)
            assert (answer.status, answer.code) == (404, "endpoint_unknown"), (dialect, path)
        for method in ("PUT", "OPTIONS", "BREW"):
            answer = asking.ask(dialect, method=method)
            assert (answer.status, answer.code, answer.headers["Allow"]) == (405, "method_not_allowed", "POST")
        answer = asking.ask(dialect, path=f"{ORDERS}?k={asking.key}")
        assert (answer.status, answer.code) == (400, "credential_in_url")
