"""The gateway samples agree with the code, also in what no request shows."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from keyvault.access.principals import KeyHolder
from keyvault.api.middleware import ENVOY
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind
from keyvault.wire.gateways import ENVOY_ADDRESS, SERVICE_TOKEN, identity_headers
from keyvault.wire.headers import API_KEY

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
IDENTITY = set(identity_headers(KeyHolder("K", "c", KeyKind.PRIVATE, Environment.SANDBOX, "acme"), None, "R"))
STRIPPED = {API_KEY, SERVICE_TOKEN}


@pytest.fixture(scope="module")
def envoy() -> Any:
    manager = yaml.safe_load((DEPLOY / "envoy/envoy.yaml").read_text())["static_resources"]["listeners"][0]
    return manager["filter_chains"][0]["filters"][0]["typed_config"]


@pytest.fixture(scope="module")
def traefik() -> Any:
    return yaml.safe_load((DEPLOY / "traefik/keyvault.yaml").read_text())["http"]["middlewares"]


def lower(names: set[str]) -> set[str]:
    return {name.lower() for name in names}


def listed(patterns: Any) -> set[str]:
    return {pattern["exact"] for pattern in patterns["patterns"]}


def test_sample_of_envoy_fails_closed_without_an_answer(envoy: Any) -> None:
    ask = envoy["http_filters"][0]["typed_config"]
    assert ask["failure_mode_allow"] is False
    assert ask["http_service"]["path_prefix"] == ENVOY.rstrip("/")
    assert envoy["http_filters"][1]["name"] == "envoy.filters.http.router"


def test_sample_of_envoy_passes_on_the_identity_and_strips_the_credentials(envoy: Any) -> None:
    ask = envoy["http_filters"][0]["typed_config"]
    service = ask["http_service"]
    assert listed(service["authorization_response"]["allowed_upstream_headers"]) == lower(IDENTITY)
    assert set(envoy["route_config"]["request_headers_to_remove"]) == lower(STRIPPED)
    added = {header["key"]: header["value"] for header in service["authorization_request"]["headers_to_add"]}
    assert set(added) == {SERVICE_TOKEN.lower(), ENVOY_ADDRESS.lower()}
    assert not listed(ask["allowed_headers"]) & set(added)
    assert API_KEY.lower() in listed(ask["allowed_headers"])


def test_sample_of_traefik_asks_between_setting_and_stripping(traefik: Any) -> None:
    assert traefik["keyvault"]["chain"]["middlewares"] == ["keyvault-token", "keyvault-ask", "keyvault-strip"]
    assert SERVICE_TOKEN in traefik["keyvault-token"]["headers"]["customRequestHeaders"]
    ask = traefik["keyvault-ask"]["forwardAuth"]
    assert ask["address"].endswith("/v1/authorize/traefik")
    assert ask["trustForwardHeader"] is False
    assert set(ask["authResponseHeaders"]) == IDENTITY
    assert traefik["keyvault-strip"]["headers"]["customRequestHeaders"] == dict.fromkeys(sorted(STRIPPED), "")


def test_sample_of_envoy_writes_no_access_log_with_the_default_format(envoy: Any) -> None:
    """Envoy's own format holds the path with its query string, in which clients put keys by mistake."""
    assert "access_log" not in envoy
    text = (DEPLOY / "envoy/envoy.yaml").read_text()
    assert "REQ_WITHOUT_QUERY" in text
    assert "%REQ(" not in text


def test_sample_of_traefik_lists_the_fields_that_no_access_log_may_have() -> None:
    text = (DEPLOY / "traefik/keyvault.yaml").read_text()
    assert "RequestPath: drop" in text
    assert "RequestLine: drop" in text


def test_samples_page_names_every_header_for_the_upstream() -> None:
    page = (DEPLOY / "README.md").read_text()
    assert [name for name in sorted(IDENTITY) if f"`{name}`" not in page] == []
