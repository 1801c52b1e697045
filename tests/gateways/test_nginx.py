"""The shipped nginx sample, started in front of an upstream and of the server of `make run`."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.domain.keystring import StringScope
from tests.factories import make_token

from .front import nginx_gateway
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

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("nginx"), pytest.mark.long]

LOST = (503, "dependency_unavailable")


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[GatewayScene]:
    with opened_scene(nginx_gateway, tmp_path) as opened:
        yield opened


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
        "X-Original-Method: GET",
        f"X-Original-URI: {CONFIGURATION}",
        "X-Original-Host: evil.example",
        "X-Original-Address: 203.0.113.9",
        "X-Forwarded-Method: GET",
        f"X-Forwarded-Uri: {CONFIGURATION}",
        "X-Forwarded-Host: evil.example",
        "X-Forwarded-For: 203.0.113.9",
        "X-Auth-Status: 200",
        # Some upstreams treat underscores like hyphens.
        "X_Merchant_Id: globex",
        "X-Merchant_Id: globex",
        "X_Api_Key: forged",
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
        assert seen.all("X-Request-Id") == answer.headers.get_all("X-Request-Id")
        assert seen.all("X-Forwarded-For") == ["127.0.0.1"]
        assert seen.all("X-Forwarded-Host") == ["shop.example"]
        assert seen.all("X-Kept") == ["yes"]
        names = {name.lower() for name, _ in seen.headers}
        assert not names & {"x-api-key", "x-service-token", "x-customer-id"}
        assert not {name for name in names if name.startswith("x-original-") or "_" in name}
        text = str(seen.headers)
        assert scene.key not in text
        assert "forged" not in text
        assert answer.headers["RateLimit-Policy"].startswith('"account"')


def gateway_drops_headers_with_underscores(scene: GatewayScene) -> None:
    answer = scene.gateway.send(f"X_Api_Key: {scene.key}", path=ORDERS)
    assert scene.refused(answer) == (401, "credential_missing")


def gateway_returns_431_for_headers_that_are_too_large(scene: GatewayScene) -> None:
    """A client whose headers are too large is at fault, and does not read that Keyvault is down."""
    large = [f"X-{number}: {'a' * 4000}" for number in range(5)]
    answer = scene.gateway.send(f"X-Api-Key: {scene.key}", *large, path=ORDERS)
    assert scene.refused(answer) == (431, "request_invalid")


def gateway_asks_before_it_reads_the_body(scene: GatewayScene) -> None:
    chunked = scene.gateway.send("Transfer-Encoding: chunked", path=ORDERS, body="")
    assert scene.refused(chunked) == (401, "credential_missing")


def gateway_passes_on_no_ambiguous_path(scene: GatewayScene) -> None:
    """Guarantee: Keyvault judges the raw path, although nginx decodes escapes, dots and slashes to find a location."""
    key = f"X-Api-Key: {scene.key}"
    for path in AMBIGUOUS_PATHS:
        assert scene.refused(scene.gateway.send(key, path=path)) == (404, "endpoint_unknown"), path
    # nginx itself refuses what it cannot parse as a path.
    for path in ("/sandbox/merchants/orders%00", "/sandbox/merchants/orders%", "/../sandbox/merchants/orders", "x"):
        assert scene.gateway.send(key, path=path).status == 400, path
    assert scene.gateway.send(key, path="/_keyvault").status == 404
    assert scene.upstream.seen == []
    # A client may name scheme and host before the path: nginx judges and passes on the path alone.
    assert scene.gateway.send(key, path=f"http://evil.example{ORDERS}").status == 207
    assert scene.upstream.seen.pop().path == ORDERS


def gateway_logs_no_key_and_no_query_string(scene: GatewayScene) -> None:
    """Guarantee: no log of the gateway contains a key that a client put into the URL."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        lost = unused.getsockname()[1]
        alone = scene.open_gateway(scene.sandbox_token)
        without_upstream = scene.open_gateway(scene.sandbox_token, upstream=lost)
        without_keyvault = scene.open_gateway(scene.sandbox_token, keyvault=lost)
        cases = (
            (alone, "?", 207),
            (alone, "?api_key={key}&", 400),
            (alone, "/{key}?", 400),
            (alone, "%3Fapi_key={key}?", 400),  # behind an escaped question mark
            (without_upstream, "?", 502),
            (without_keyvault, "?api_key={key}&", 503),
        )
        for number, (gateway, target, status) in enumerate(cases):
            path = f"{ORDERS}{target.format(key=scene.key)}note=from-the-query"
            answer = gateway.send(f"X-Api-Key: {scene.key}", "Referer: https://shop.example/?secret=of-it", path=path)
            assert answer.status == status, target
            logs = gateway.read_logs()
            lines = "".join(logs.values()).splitlines()
            requests = sum(each is gateway for each, *_ in cases[: number + 1])
            assert sum(" POST " in line for line in lines) == requests, logs
            assert any(" POST " in line and f" {status} " in line for line in lines), logs
            for name, text in logs.items():
                for words in (scene.key[-49:], "api_key=", "from-the-query", "of-it", scene.sandbox_token[-49:]):
                    assert words not in text, (target, name, words)


def gateway_leaves_the_upstreams_own_answers_alone(scene: GatewayScene) -> None:
    """A failed upstream is not reported as a denial."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    gateway = scene.open_gateway(scene.sandbox_token, upstream=port)
    assert gateway.send(f"X-Api-Key: {scene.key}", path=ORDERS).status == 502
    assert gateway.send(path=ORDERS).code == "credential_missing"


def gateway_fails_closed_without_keyvault(scene: GatewayScene) -> None:
    """Guarantee: a lost or silent Keyvault, or a refused gateway token, denies every request with a 503."""
    key = f"X-Api-Key: {scene.key}"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        all_environments = make_token(P.KEYS_VERIFY, scope=StringScope.ALL)[1].reveal()
        no_verifier = make_token(P.KEYS_READ, scope=StringScope.SANDBOX)[1].reveal()
        for gateway in (
            scene.open_gateway(scene.sandbox_token, keyvault=silent.getsockname()[1]),
            scene.open_gateway("nonsense"),
            scene.open_gateway(all_environments),
            scene.open_gateway(no_verifier),
        ):
            answer = gateway.send(key, path=ORDERS)
            assert (answer.status, answer.code) == LOST
            assert answer.headers.get_all("Retry-After") == ["1"]
    assert scene.gateway.send(key, path=ORDERS).status == 207
    scene.upstream.seen.clear()
    scene.keyvault.close()
    for lines in ((key,), ()):
        answer = scene.gateway.send(*lines, path=ORDERS)
        assert scene.refused(answer) == LOST
        assert answer.headers.get_all("Retry-After") == ["1"]


CHECKS = (
    gateway_passes_on_the_identity_from_keyvault_alone,
    gateway_returns_the_original_status_to_its_client,
    gateway_drops_headers_with_underscores,
    gateway_returns_431_for_headers_that_are_too_large,
    gateway_asks_before_it_reads_the_body,
    gateway_passes_on_retry_after,
    gateway_of_one_environment_refuses_the_others_key,
    gateway_passes_on_no_ambiguous_path,
    gateway_sends_the_address_of_the_connection,
    gateway_logs_no_key_and_no_query_string,
    gateway_leaves_the_upstreams_own_answers_alone,
    gateway_fails_closed_without_keyvault,
)
"""The last one stops Keyvault."""


def test_nginx_gateway(scene: GatewayScene, subtests: pytest.Subtests) -> None:
    """One server answers all checks, because its start takes most of the time."""
    for check in CHECKS:
        with subtests.test(check.__name__):
            scene.upstream.seen.clear()
            check(scene)
