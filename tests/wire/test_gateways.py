"""The headers in which each gateway describes its client's request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyvault.access.principals import KeyHolder
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind
from keyvault.wire.gateways import (
    NAMES,
    Dialect,
    Forwarded,
    HeaderFault,
    identity_headers,
    last_address,
    nginx_status,
    read_forwarded,
)

TRAEFIK = {
    "X-Forwarded-Method": "GET",
    "X-Forwarded-Uri": "/sandbox/customers/me?x=1,2",
    "X-Forwarded-Host": "shop.example:8443",
    "X-Forwarded-For": "198.51.100.1, 192.0.2.7",
}
NGINX = {
    "X-Original-Method": "POST",
    "X-Original-URI": "/sandbox/merchants/orders",
    "X-Original-Host": "shop.example",
    "X-Original-Address": "192.0.2.8",
}


def test_gateway_dialects_read_their_own_headers_and_no_others() -> None:
    """Guarantee: headers of another gateway that a client adds change nothing."""
    both = {**TRAEFIK, **NGINX}
    assert read_forwarded(NAMES[Dialect.TRAEFIK], both) == Forwarded(
        "GET", "/sandbox/customers/me?x=1,2", "shop.example:8443", "192.0.2.7"
    )
    assert read_forwarded(NAMES[Dialect.NGINX], both) == Forwarded(
        "POST", "/sandbox/merchants/orders", "shop.example", "192.0.2.8"
    )
    assert read_forwarded(NAMES[Dialect.NGINX], TRAEFIK) == HeaderFault("X-Original-Method")
    assert read_forwarded(NAMES[Dialect.TRAEFIK], NGINX) == HeaderFault("X-Forwarded-Method")


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("X-Original-Method", ""),
        ("X-Original-Method", "GET,POST"),
        ("X-Original-URI", ""),
        ("X-Original-URI", "sandbox/customers/me"),
        ("X-Original-URI", "http://shop.example/sandbox/customers/me"),
        ("X-Original-Host", "shop.example,evil.example"),
    ],
)
def test_gateway_without_a_method_or_path_is_misconfigured(header: str, value: str) -> None:
    assert read_forwarded(NAMES[Dialect.NGINX], {**NGINX, header: value}) == HeaderFault(header)


def test_gateway_without_a_host_or_an_address_has_none() -> None:
    headers = {name: NGINX[name] for name in ("X-Original-Method", "X-Original-URI")}
    assert read_forwarded(NAMES[Dialect.NGINX], headers) == Forwarded("POST", "/sandbox/merchants/orders", "", None)


@pytest.mark.parametrize(
    ("host", "hostname"),
    [
        ("Shop.Example:8443", "shop.example"),
        ("shop.example.", "shop.example"),
        ("[2001:db8::1]:80", "2001:db8::1"),
        ("", ""),
        ("[", ""),
        (":80", ""),
    ],
)
def test_gateway_host_is_compared_without_port_and_spelling(host: str, hostname: str) -> None:
    assert Forwarded("GET", "/", host, None).hostname == hostname


@given(st.text(max_size=60))
def test_gateway_client_address_is_what_the_gateway_wrote_last(forged: str) -> None:
    """Guarantee: an entry further left, which a client may have sent, is never used as its address."""
    assert last_address(f"{forged}, 192.0.2.7") == "192.0.2.7"


@given(st.text(max_size=60))
def test_gateway_host_of_any_text_raises_nothing(text: str) -> None:
    assert isinstance(Forwarded("GET", "/", text, None).hostname, str)


def test_gateway_identity_is_always_whole() -> None:
    holder = KeyHolder("K" * 16, "crd_1", KeyKind.PRIVATE, Environment.PRODUCTION, "acme")
    assert identity_headers(holder, None, "R1") == {
        "X-Merchant-Id": "acme",
        "X-Environment": "production",
        "X-Key-Id": "K" * 16,
        "X-Credential-Id": "crd_1",
        "X-Customer-Id": "",
        "X-Request-Id": "R1",
    }


@given(st.integers(100, 599))
def test_gateway_nginx_gets_only_statuses_that_it_can_pass_on(status: int) -> None:
    """Guarantee: no gateway turns a refusal into an acceptance."""
    passed = nginx_status(status)
    assert passed in {200, 401, 403}
    assert (passed == 200) == (status == 200)
