"""Networks that a credential may be used from, and addresses that are compared with them."""

from collections.abc import Iterable
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

IPNetwork = IPv4Network | IPv6Network

MOST_NETWORKS = 64


def parse_network(text: str) -> IPNetwork:
    """`192.0.2.0/24`, `2001:db8::/32` or a single address. Raises ValueError, also on bits set beyond the prefix."""
    return ip_network(text)


def is_within(address: str, networks: Iterable[IPNetwork]) -> bool:
    """Whether the address is in one of the networks; an IPv4-mapped one counts as IPv4, and no address is in none."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return any(parsed.version == network.version and parsed in network for network in networks)
