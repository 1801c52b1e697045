"""Web origins (RFC 6454) in the serialization of the `Origin` header, which is compared as text."""

import re

_HOST = r"(?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)*[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_ORIGIN = re.compile(
    rf"(?P<scheme>https?)://(?P<host>{_HOST}|\[[0-9a-f:]{{2,39}}\])(?::(?P<port>[1-9][0-9]{{0,4}}))?", re.ASCII
)
_MAX_LENGTH = 300
_DEFAULT_PORT = {"http": "80", "https": "443"}
_LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})


def is_origin(text: str) -> bool:
    """Return whether the text is an origin as browsers serialize it, with https, or with http on localhost.

    `null` is rejected, because every sandboxed document sends it.
    """
    match = _ORIGIN.fullmatch(text) if len(text) <= _MAX_LENGTH else None
    if match is None:
        return False
    port = match["port"]
    if port is not None and (int(port) > 65_535 or port == _DEFAULT_PORT[match["scheme"]]):
        return False
    return match["scheme"] == "https" or match["host"] in _LOCAL


def find_origin_fault(text: str) -> str | None:
    """Return the accepted form if the text is not an origin that may be listed, else None."""
    if is_origin(text):
        return None
    return "https://host or https://host:port, lower case, no path, no wildcard, no port 443; http on localhost only"


def to_domain(origin: str) -> str:
    """Return the origin with `localhost` in place of a loopback address, because passkeys belong to a domain."""
    scheme, _, host = origin.partition("://")
    for address in ("127.0.0.1", "[::1]"):
        if host == address or host.startswith(f"{address}:"):
            return f"{scheme}://localhost{host.removeprefix(address)}"
    return origin
