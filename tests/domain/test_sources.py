"""Names of sources: one site and one client program are one source, whatever their addresses and versions."""

from ipaddress import IPv4Address, IPv6Address
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyvault.domain.sources import MAX_NAME_LENGTH, OTHERS, Minutes, find_longest_gap, name_source, network_of


@given(st.ip_addresses(v=4), st.integers(0, 255))
def test_network_of_an_ipv4_address_is_its_24_bits(address: IPv4Address, last: int) -> None:
    other = IPv4Address(int(address) & ~0xFF | last)
    assert network_of(str(address)) == network_of(str(other))
    assert network_of(str(address)).endswith(".0/24")


@given(st.ip_addresses(v=6, network="2000::/3"), st.integers(0, 2**64 - 1))
def test_network_of_an_ipv6_address_is_its_64_bits(address: IPv6Address, rest: int) -> None:
    other = IPv6Address(int(address) >> 64 << 64 | rest)
    assert network_of(str(address)) == network_of(str(other))
    assert network_of(str(address)).endswith("/64")


@pytest.mark.parametrize(
    ("source", "network"),
    [
        ("192.0.2.77", "192.0.2.0/24"),
        ("::ffff:192.0.2.77", "192.0.2.0/24"),
        ("2001:db8:1:2::3", "2001:db8:1:2::/64"),
        ("::1", "::/64"),
        ("token:abc", "token:abc"),
        ("unknown", "unknown"),
        ("", ""),
    ],
)
def test_network_of_a_source(source: str, network: str) -> None:
    """A calling token or an unknown source is a separate network."""
    assert network_of(source) == network


@pytest.mark.parametrize(
    ("caller", "user_agent", "name"),
    [
        ("192.0.2.7", "curl/8.5.0", "192.0.2.0/24 curl"),
        ("192.0.2.9", "curl/7.1", "192.0.2.0/24 curl"),
        ("192.0.2.7", "month-end/3 (linux) lib/2", "192.0.2.0/24 month-end"),
        ("192.0.2.7", "  billing export", "192.0.2.0/24 billing"),
        ("192.0.2.7", "Mozilla", "192.0.2.0/24 Mozilla"),
        ("192.0.2.7", "", "192.0.2.0/24"),
        ("2001:db8:1:2::3", "curl/8", "2001:db8:1:2::/64 curl"),
        ("token:abc", "gateway/1", "token:abc gateway"),
        ("", "", OTHERS),
    ],
)
def test_source_is_a_network_and_a_product(caller: str, user_agent: str, name: str) -> None:
    assert name_source(caller, user_agent) == name


@given(st.text(max_size=64), st.text(max_size=120))
def test_source_of_any_client_text_has_a_name_that_fits(caller: str, user_agent: str) -> None:
    assert 0 < len(name_source(caller, user_agent)) <= MAX_NAME_LENGTH


def gaps(minutes: list[int]) -> int:
    return max((later - earlier for earlier, later in pairwise(minutes)), default=0)


def summarize(uses: list[list[int]]) -> list[Minutes]:
    """Return what is kept of the uses of each key."""
    return sorted((min(minutes), max(minutes), gaps(sorted(minutes))) for minutes in uses if minutes)


@given(st.lists(st.integers(0, 1_000), min_size=1, unique=True), st.sets(st.integers(0, 100)))
def test_longest_gap_is_the_same_after_any_rotations(minutes: list[int], rotated_at: set[int]) -> None:
    """The longest gap of a source does not depend on which keys it uses."""
    minutes.sort()
    cuts = sorted({0, len(minutes), *(cut for cut in rotated_at if cut < len(minutes))})
    assert find_longest_gap(summarize([minutes[a:b] for a, b in pairwise(cuts)])) == gaps(minutes)


@given(st.lists(st.tuples(st.integers(0, 1_000), st.integers(0, 2)), min_size=1))
def test_longest_gap_of_a_source_that_uses_several_keys_is_never_too_short(uses: list[tuple[int, int]]) -> None:
    by_key = [[minute for minute, key in uses if key == number] for number in range(3)]
    assert find_longest_gap(summarize(by_key)) >= gaps(sorted(minute for minute, _ in uses))
