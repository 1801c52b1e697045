"""Networks that a credential may be used from: their format, and which addresses they contain."""

from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyvault.domain.networks import is_within, parse_network


@pytest.mark.parametrize(
    "text", ["192.0.2.0/24", "192.0.2.9", "192.0.2.9/32", "0.0.0.0/0", "2001:db8::/32", "::1", "2001:db8::9/128"]
)
def test_network_or_single_address_is_parsed(text: str) -> None:
    assert parse_network(text) == ip_network(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "x",
        "192.0.2.1/24",
        "2001:db8::1/32",
        "192.0.2.0/33",
        "192.0.2.0/-1",
        "192.0.2",
        "192.0.2.0/24,192.0.3.0/24",
        "192.0.2.0 /24",
        "192.000.002.000/24",
        "1.2.3.4.5",
        "localhost",
    ],
)
def test_network_that_is_malformed_is_refused(text: str) -> None:
    """Host bits are refused too: 192.0.2.1/24 is ambiguous between one address and 256."""
    with pytest.raises(ValueError):  # noqa: PT011  the library's own words
        parse_network(text)


OFFICE = (parse_network("192.0.2.0/24"), parse_network("2001:db8::/32"))


@pytest.mark.parametrize(
    ("address", "within"),
    [
        ("192.0.2.0", True),
        ("192.0.2.255", True),
        ("192.0.3.0", False),
        ("192.0.1.255", False),
        ("::ffff:192.0.2.9", True),
        ("::ffff:c000:209", True),
        ("::ffff:192.0.3.9", False),
        ("::192.0.2.9", False),
        ("2001:db8::", True),
        ("2001:db8:ffff::1", True),
        ("2001:DB8::1", True),
        ("2001:db9::", False),
        ("", False),
        ("x", False),
        (" 192.0.2.9", False),
        ("192.0.2.9 ", False),
        ("192.0.2.9\n", False),
        ("192.0.2.9:80", False),
        ("192.0.2.9, 192.0.2.10", False),
        ("192.0.2.9/32", False),
        ("0xc0000209", False),
        ("3221225993", False),
        ("192.0.521", False),
    ],
)
def test_address_is_within_only_as_an_address_of_the_list(address: str, within: bool) -> None:
    """Guarantee: a string that is not an address is in no network."""
    assert is_within(address, OFFICE) is within


def test_address_is_within_no_empty_list() -> None:
    assert not is_within("192.0.2.9", ())


@given(st.ip_addresses(v=4), st.integers(0, 32), st.ip_addresses(v=4))
def test_ipv4_mapped_address_counts_as_the_ipv4_address(home: object, prefix: int, asking: object) -> None:
    """A dual-stack server reports one client in two notations, which are judged alike."""
    networks = (ip_network(f"{home}/{prefix}", strict=False),)
    expected = asking in networks[0]
    assert is_within(str(asking), networks) is is_within(f"::ffff:{asking}", networks) is expected


@given(st.text(), st.ip_addresses())
def test_any_text_is_compared_without_a_fault(text: str, home: object) -> None:
    within = is_within(text, (ip_network(str(home)),))
    assert not within or ip_address(text)
