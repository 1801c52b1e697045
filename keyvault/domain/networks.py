"""IP networks that a credential may be used from, and membership tests of client addresses."""

from collections.abc import Iterable
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

IPNetwork = IPv4Network | IPv6Network

MAX_NETWORKS = 64


def parse_network(text: str) -> IPNetwork:
    """Parse `192.0.2.0/24`, `2001:db8::/32` or a single address. Raises ValueError, also when host bits are set."""
    return ip_network(text)


@lru_cache(maxsize=4096)
def _parse_address(text: str) -> IPv4Address | IPv6Address | None:
    """Parse an address. Cached, because one client uses many keys."""
    try:
        parsed = ip_address(text)
    except ValueError:
        return None
    return (parsed.ipv4_mapped or parsed) if isinstance(parsed, IPv6Address) else parsed


def is_within(address: str, networks: Iterable[IPNetwork]) -> bool:
    """Return whether a network contains the address, an IPv4-mapped one as IPv4; False for an invalid address."""
    parsed = _parse_address(address)
    if parsed is None:
        return False
    return any(parsed.version == network.version and parsed in network for network in networks)
