"""The source of a request: the network that it comes from, or the calling token, and the product of its user agent."""

import re
from collections.abc import Iterable
from datetime import timedelta
from functools import lru_cache
from ipaddress import ip_address, ip_network

_NETWORK_BITS = {4: 24, 6: 64}
"""Prefix length of one site's network by IP version, in bits."""

_PRODUCT = re.compile(r"[^\s/(;,]{0,40}")
"""The first product of a user agent, without its version: releases of a client are one source."""

MAX_NAME_LENGTH = 110
"""Maximum length of a source's name, in characters: an address or token of 64, a space and a product of 40."""

OTHERS = "others"
"""Name of the source that stands for all clients beyond the limit on distinct sources.

It can hide a client that calls rarely, so no use of a key shows that it has moved or stopped.
"""

OCCASION = timedelta(days=1)
"""Maximum time from the first to the last use of a source that was seen only once, however often it called.

A single run of a job does not show when the job runs again. A source that is in use for longer, such as a client that
calls every day, counts as seen more than once: its longest gap between two uses predicts the next one.
"""


Minutes = tuple[int, int, int]
"""A source's use of one key: its first minute, its last minute, and the longest gap between two uses, in minutes."""


def find_longest_gap(uses: Iterable[Minutes]) -> int:
    """Return a source's longest gap between two uses, of one key or of two keys in succession, in minutes.

    `uses`: one or more, one for each key, ordered by their first minutes.
    """
    remaining = iter(uses)
    _, seen_at, longest = next(remaining)
    for first, last, gap in remaining:
        longest = max(longest, gap, first - seen_at)
        seen_at = max(seen_at, last)
    return longest


@lru_cache(maxsize=65_536)
def network_of(caller: str) -> str:
    """Return the /24 of an IPv4 address or the /64 of an IPv6 address; return any other caller unchanged."""
    try:
        address = ip_address(caller)
    except ValueError:
        return caller
    mapped = address.ipv4_mapped if address.version == 6 else None
    address = mapped or address
    return str(ip_network((int(address), _NETWORK_BITS[address.version]), strict=False))


def product_of(user_agent: str) -> str:
    """Return the first product of a user agent, without its version; empty if it names none."""
    product = _PRODUCT.match(user_agent.lstrip())
    return product.group() if product else ""


@lru_cache(maxsize=65_536)
def name_source(caller: str, user_agent: str) -> str:
    """Return the name of the source. `caller`: the client's address, else the calling token."""
    return f"{network_of(caller)} {product_of(user_agent)}".strip() or OTHERS


def network_of_source(name: str) -> str:
    """Return the network or token of a source, without the product, by the source's name."""
    return name.partition(" ")[0]
