"""The shipped samples of Envoy and Traefik, started in front of an upstream and of the server of `make run`."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.domain.keystring import StringScope
from tests.environment import REQUIRE, required_servers
from tests.factories import make_token
from tests.servers.gateways import find_gateway

from .front import echoing, envoy_gateway, traefik_gateway
from .scene import (
    AMBIGUOUS_PATHS,
    CONFIGURATION,
    ORDERS,
    GatewayScene,
    gateway_of_one_environment_refuses_the_others_key,
    gateway_passes_on_retry_after,
    gateway_returns_the_original_status_to_its_client,
    gateway_sends_the_address_of_the_connection,
    opened_scene,
)

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.long]

GATEWAYS = {"envoy": envoy_gateway, "traefik": traefik_gateway}


@pytest.fixture(params=GATEWAYS)
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[GatewayScene]:
    require(request.param)
    with opened_scene(GATEWAYS[request.param], tmp_path) as opened:
        yield opened


def require(name: str) -> None:
    """Skip the test without the gateway, or fail it where KEYVAULT_REQUIRE names it."""
    if find_gateway(name) is None:
        if name in required_servers():
            pytest.fail(f"{REQUIRE} names {name}, which `make gateways` installs", pytrace=False)
        pytest.skip(f"no {name} on this machine: run `make gateways`")


def gateway_passes_on_the_identity_from_keyvault_alone(scene: GatewayScene) -> None:
    """Guarantee: the upstream gets the client's identity from Keyvault alone, and never the key."""
    forged = [
        "X-Merchant-Id: globex",
        "x-merchant-id: globex",
        "X-Environment: production",
        "X-Key-Id: forged",
        "X-Credential-Id: forged",
        "X-Customer-Id: forged",
        "X-Request-Id: forged",
        "X-Service-Token: forged",
        "X-Forwarded-Method: GET",
        f"X-Forwarded-Uri: {CONFIGURATION}",
        "X-Forwarded-Host: evil.example",
        "X-Forwarded-For: 203.0.113.9",
        "X-Envoy-External-Address: 203.0.113.9",
        f"X-Envoy-Original-Path: {CONFIGURATION}",
        "X-Kept: yes",
    ]
    for path in (ORDERS, f"{ORDERS}?a=1&b=%2f//..", f"{ORDERS}?"):
        answer = scene.gateway.send(f"X-Api-Key: {scene.key}", *forged, path=path, body="{}")
        assert (answer.status, answer.body) == (207, b"in")
        seen = scene.upstream.seen.pop()
        assert (seen.method, seen.path, seen.body) == ("POST", path, b"{}")
        assert seen.all("X-Merchant-Id") == ["acme"]
        assert seen.all("X-Environment") == ["sandbox"]
        assert [len(value) for value in seen.all("X-Key-Id")] == [16]
        assert seen.all("X-Credential-Id")[0].startswith("crd_")
        assert seen.all("X-Customer-Id") == [""]
        assert len(seen.all("X-Request-Id")) == 1
        assert seen.all("X-Kept") == ["yes"]
        assert not {name.lower() for name, _ in seen.headers} & {"x-api-key", "x-service-token"}
        text = str(seen.headers)
        assert scene.key not in text
        assert "forged" not in text


def gateway_passes_on_no_identity_with_underscores(scene: GatewayScene) -> None:
    """Guarantee: an upstream that reads X_Merchant_Id as X-Merchant-Id gets Keyvault's value only."""
    for name in ("X_Merchant_Id", "X-Merchant_Id", "X_Merchant-Id", "X_Environment", "X_Api_Key"):
        answer = scene.gateway.send(f"X-Api-Key: {scene.key}", f"{name}: forged", path=ORDERS)
        assert answer.status == 400
        assert scene.upstream.seen == []


def gateway_judges_the_path_that_the_upstream_gets(scene: GatewayScene) -> None:
    """Guarantee: the gateway rewrites an ambiguous path before Keyvault judges it, or Keyvault refuses it."""
    key = f"X-Api-Key: {scene.key}"
    unreadable = ("/sandbox/merchants/orders%00", "/sandbox/merchants/orders%", "/../sandbox/merchants/orders", "x")
    for path in (*AMBIGUOUS_PATHS, *unreadable):
        answer = scene.gateway.send(key, path=path)
        passed = [seen.path for seen in scene.upstream.seen]
        scene.upstream.seen.clear()
        assert passed == ([ORDERS] if answer.status == 207 else []), path
        assert answer.status in {207, 400, 404}, path


def gateway_refuses_requests_with_a_token_that_is_refused(scene: GatewayScene) -> None:
    """Guarantee: a gateway whose own token is invalid, or not allowed to verify, lets nothing through."""
    for token, expected in (
        ("nonsense", (401, "service_token_invalid")),
        (make_token(P.KEYS_VERIFY, scope=StringScope.ALL)[1].reveal(), (403, "permission_missing")),
        (make_token(P.KEYS_READ, scope=StringScope.SANDBOX)[1].reveal(), (403, "permission_missing")),
    ):
        answer = scene.open_gateway(token).send(f"X-Api-Key: {scene.key}", path=ORDERS)
        assert scene.refused(answer) == expected


def gateway_fails_closed_without_keyvault(scene: GatewayScene) -> None:
    """Guarantee: while Keyvault is lost, every request is refused with a server error."""
    key = f"X-Api-Key: {scene.key}"
    assert scene.gateway.send(key, path=ORDERS).status == 207
    scene.upstream.seen.clear()
    scene.keyvault.close()
    for lines in ((key,), ()):
        assert scene.gateway.send(*lines, path=ORDERS).status >= 500
    assert scene.upstream.seen == []


CHECKS = (
    gateway_passes_on_the_identity_from_keyvault_alone,
    gateway_passes_on_no_identity_with_underscores,
    gateway_returns_the_original_status_to_its_client,
    gateway_passes_on_retry_after,
    gateway_of_one_environment_refuses_the_others_key,
    gateway_judges_the_path_that_the_upstream_gets,
    gateway_sends_the_address_of_the_connection,
    gateway_refuses_requests_with_a_token_that_is_refused,
    gateway_fails_closed_without_keyvault,
)
"""The last one stops Keyvault."""


@pytest.mark.timeout(300)
def test_gateway(scene: GatewayScene, subtests: pytest.Subtests) -> None:
    """One server answers all checks, because its start takes most of the time."""
    for check in CHECKS:
        with subtests.test(check.__name__):
            scene.upstream.seen.clear()
            check(scene)


def test_envoy_fails_closed_while_keyvault_is_silent(tmp_path: Path) -> None:
    """Guarantee: Envoy waits for 2 seconds, and then refuses the request. (Traefik waits for 30.)"""
    require("envoy")
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        upstream = stack.enter_context(echoing())
        gateway = stack.enter_context(envoy_gateway("text", keyvault=silent.getsockname()[1], upstream=upstream.port))
        assert gateway.send("X-Api-Key: text", path=ORDERS).status == 503
        assert upstream.seen == []
