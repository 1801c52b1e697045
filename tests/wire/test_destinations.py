"""Webhook destinations: which URLs and which addresses are accepted."""

import ipaddress
from ipaddress import IPv4Address, IPv6Address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyvault.wire.destinations import MAX_URL_LENGTH, Destination, may_connect, parse_url

OWN = (ip_network("10.1.0.0/16"), ip_network("fd00:1::/64"))


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("https://acme.example/hooks?a=b&c", "https://acme.example/hooks?a=b&c"),
        ("https://acme.example", "https://acme.example/"),
        ("https://acme.example?x=1", "https://acme.example/?x=1"),
        ("HTTPS://Acme.Example:443/Hooks", "https://acme.example/Hooks"),
        ("https://acme.example:/x", "https://acme.example/x"),
        ("https://acme.example:8443/", "https://acme.example:8443/"),
        ("https://xn--bcher-kva.example/", "https://xn--bcher-kva.example/"),
        ("https://8.8.8.8/", "https://8.8.8.8/"),
        ("https://[2606:4700::1]:8443/", "https://[2606:4700::1]:8443/"),
    ],
)
def test_url_accepted_is_written_in_its_canonical_form(text: str, url: str) -> None:
    assert parse_url(text).url == url
    assert parse_url(url).url == url


@pytest.mark.parametrize(
    "text",
    [
        "",
        "acme.example",
        "//acme.example/",
        "http://acme.example/",
        "ftp://acme.example/",
        "javascript:alert(1)",
        "https:///hooks",
        "https://",
        "https://user@acme.example/",
        "https://user:word@acme.example/",
        "https://acme.example@127.0.0.1/",
        "https://acme.example/#fragment",
        "https://acme.example/#",
        "https://acme.example/a b",
        "https://acme.example/\r\nHost: other",
        "https://acme.example/\ta",
        "https://acme.example\\@127.0.0.1/",
        "https://acme.example/é",
        "https://bücher.example/",
        "https://acme..example/",
        "https://acme.example./",
        "https://-acme.example/",
        "https://acme_.example/",
        "https://*.example/",
        "https://acme.example:0/",
        "https://acme.example:22/",
        "https://acme.example:80/",
        "https://acme.example:65536/",
        "https://acme.example:x/",
        "https://127.0.0.1/",
        "https://127.1/",
        "https://0177.0.0.1/",
        "https://0x7f.0.0.1/",
        "https://0x7f000001/",
        "https://2130706433/",
        "https://10.1.2.3/",
        "https://169.254.169.254/latest/meta-data",
        "https://[::1]/",
        "https://[::ffff:127.0.0.1]/",
        "https://[::ffff:7f00:1]/",
        "https://[fe80::1%25eth0]/",
        "https://[v1.x]/",
        "https://[::1/",
        "https://acme.example/" + "x" * MAX_URL_LENGTH,
        "https://" + "a" * 64 + ".example/",
    ],
)
def test_url_that_is_ambiguous_or_internal_is_refused(text: str) -> None:
    """Only the plainest form is accepted, so that no two parsers of a URL differ about its host."""
    with pytest.raises(ValueError, match=r"."):
        parse_url(text)


def test_url_of_an_internal_network_is_accepted_where_configured() -> None:
    assert parse_url("http://10.1.2.3:8080/hooks", OWN) == Destination("http", "10.1.2.3", 8080, "/hooks")
    assert parse_url("http://hooks.internal/", OWN) == Destination("http", "hooks.internal", 80, "/")
    with pytest.raises(ValueError, match="public"):
        parse_url("http://10.2.0.1/", OWN)


@given(st.text(max_size=80))
def test_url_of_any_text_is_read_or_refused(text: str) -> None:
    """Guarantee: any text is accepted or raises ValueError, so no input breaks the form."""
    for candidate in (text, f"https://{text}", f"https://acme.example{text}", f"https://acme.example:{text}"):
        try:
            found = parse_url(candidate, OWN)
        except ValueError:
            continue
        assert parse_url(found.url, OWN) == found
        assert "\r" not in found.url
        assert "\n" not in found.url


PRIVATE = [
    IPv4Address(text)
    for text in ("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1")
]


def _embedded(inner: IPv4Address) -> list[IPv6Address]:
    """Return every form in which an IPv6 address contains an IPv4 one."""
    bits = int(inner)
    return [
        IPv6Address(bits),
        IPv6Address(0xFFFF << 32 | bits),
        IPv6Address(int(IPv6Address("64:ff9b::")) | bits),
        IPv6Address(int(IPv6Address("64:ff9b:1::")) | bits),
        IPv6Address(0x2002 << 112 | bits << 80 | 1),
        IPv6Address(0x20010000 << 96 | bits << 64 | bits ^ 0xFFFF_FFFF),
    ]


@pytest.mark.parametrize("address", [str(each) for inner in PRIVATE for each in (inner, *_embedded(inner))])
def test_address_that_is_internal_is_refused_in_every_form(address: str) -> None:
    """A private address is refused in every notation, also inside an IPv6 address."""
    assert not may_connect(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_address_that_is_public_is_accepted(address: str) -> None:
    assert may_connect(address)


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.1",
        "192.0.0.9",
        "192.0.2.1",
        "192.88.99.1",
        "198.18.0.1",
        "203.0.113.1",
        "224.0.0.1",
        "239.255.255.250",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "100::1",
        "2001:db8::1",
        "2001:1::1",
        "3fff::1",
        "4000::1",
        "5f00::1",
        "fc00::1",
        "fe80::1",
        "fe80::1%eth0",
        "2606:4700::1%eth0",
        "ff02::1",
        "",
        "localhost",
        "127.1",
    ],
)
def test_address_of_a_special_kind_is_refused(address: str) -> None:
    """Reserved, multicast, documentation, unallocated, scoped: none is a merchant's server."""
    assert not may_connect(address)


@given(st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)))
def test_address_accepted_is_global_and_unicast(address: IPv4Address | IPv6Address) -> None:
    """Guarantee: every accepted address is global by Python's `ipaddress` too."""
    if not may_connect(str(address)):
        return
    inner = address.ipv4_mapped if isinstance(address, IPv6Address) and address.ipv4_mapped else address
    assert ipaddress.ip_address(str(inner)).is_global
    assert not inner.is_multicast
    assert inner.version == 6 or not inner.is_reserved


@given(st.ip_addresses(v=4, network="10.0.0.0/8"))
def test_address_of_a_configured_network_is_accepted_and_its_neighbors_are_not(address: IPv4Address) -> None:
    assert may_connect(str(address), OWN) == (address in OWN[0])
    assert may_connect(f"::ffff:{address}", OWN) == (address in OWN[0])
