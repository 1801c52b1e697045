"""Validation of outbound destinations against SSRF (OWASP): accepted URLs and addresses.

A URL is untrusted, so only its plainest form is accepted. DNS names are untrusted too: the check applies to the
resolved address, and the connection goes to exactly that address.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

from keyvault.domain.networks import IPNetwork, is_within

MAX_URL_LENGTH = 500
_PLAIN = re.compile(r"[!-\[\]-~]+")
_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_NAME = re.compile(rf"(?:{_LABEL}\.)*(?=[a-z]){_LABEL}")
"""The last label begins with a letter: resolvers read `127.1`, `0x7f000001` and `2130706433` as addresses."""
_DEFAULT_PORT = {"https": 443, "http": 80}
_FIRST_FREE_PORT, _LAST_PORT = 1024, 65_535

_PUBLIC_IPV6 = IPv6Network("2000::/3")
_TRANSLATED = IPv6Network("64:ff9b::/96")
_SPECIAL = tuple(
    map(ip_network, ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"))
)
"""Networks that some Python versions report as global: special-purpose ones, and those that embed another address."""


@dataclass(frozen=True, slots=True)
class Destination:
    """A parsed URL. `target`: the path and query of the request line."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def authority(self) -> str:
        """Host and port in the form of the `Host` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORT[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The normalized URL, for comparison."""
        return f"{self.scheme}://{self.authority}{self.target}"


def is_protected_url(url: object) -> bool:
    """Return whether a configured URL is https, or plain http to this machine."""
    try:
        parts = urlsplit(url) if isinstance(url, str) else None
        host = None if parts is None else parts.hostname
    except ValueError:
        return False
    if parts is None or not host:
        return False
    return parts.scheme == "https" or (parts.scheme == "http" and host in {"127.0.0.1", "localhost", "::1"})


def parse_url(text: str, own_networks: Sequence[IPNetwork] = ()) -> Destination:
    """Parse a destination URL. Raises ValueError with the accepted form.

    By default, only https to public addresses is accepted. `own_networks`, which the host's owner configures, allows
    their private addresses and plain http, too. Names are not resolved here: `may_connect` checks the address later.
    """
    if len(text) > MAX_URL_LENGTH or _PLAIN.fullmatch(text) is None:
        raise ValueError(f"at most {MAX_URL_LENGTH} printable ASCII characters, without spaces and backslashes")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ValueError("must be a URL such as https://merchant.example/hooks") from error
    scheme, host = parts.scheme.lower(), (parts.hostname or "").lower()
    if scheme != "https" and not (scheme == "http" and own_networks):
        raise ValueError("must start with https://")
    if "@" in parts.netloc or "#" in text:
        raise ValueError("must not contain a user, a password or a fragment")
    if _is_address(host):
        if not may_connect(host, own_networks):
            raise ValueError("must have a public address")
    elif _NAME.fullmatch(host) is None or len(host) > 253 or "[" in parts.netloc:
        raise ValueError("must have a host name, or an IP address in its usual form")
    if port is None:
        port = _DEFAULT_PORT[scheme]
    if port != _DEFAULT_PORT[scheme] and not _FIRST_FREE_PORT <= port <= _LAST_PORT:
        raise ValueError(f"must use port {_DEFAULT_PORT[scheme]}, or {_FIRST_FREE_PORT} to {_LAST_PORT}")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Destination(scheme, host, port, target)


def may_connect(address: str, own_networks: Sequence[IPNetwork] = ()) -> bool:
    """Return whether the address is public, or in a network that the host's owner configured."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    return is_within(address, own_networks) or _is_public(parsed)


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    if isinstance(address, IPv6Address):
        if address.scope_id is not None:
            return False
        if address.ipv4_mapped is not None:
            return _is_public(address.ipv4_mapped)
        if address in _TRANSLATED:
            return _is_public(IPv4Address(int(address) & 0xFFFF_FFFF))
        if address not in _PUBLIC_IPV6:
            return False
    return address.is_global and not address.is_multicast and not is_within(str(address), _SPECIAL)


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
