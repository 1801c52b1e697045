"""Credentials, addresses and request ids in HTTP headers, without a framework.

Repeated headers are joined with a comma, which no credential of ours contains: so a comma stands for "came
twice", and what came twice is refused rather than chosen from.
"""

import re
from collections.abc import Iterable
from ipaddress import IPv6Address, ip_address

from keyvault.domain.base62 import RandomBytes, random_digits

REQUEST_ID = "X-Request-Id"
API_KEY = "X-Api-Key"
PREFERENCE_APPLIED = "Preference-Applied"

_LONGEST_CLIENT_ID = 64


def mint_request_id(random_bytes: RandomBytes) -> str:
    """Ours, always: a client's own id is only noted beside it."""
    return random_digits(22, random_bytes)


def clean_client_request_id(value: str | None) -> str | None:
    """The client's own id when it is short and plain enough to stand in a log line, else None."""
    if value is None or not 1 <= len(value) <= _LONGEST_CLIENT_ID:
        return None
    if not value.isascii() or not all(char.isalnum() or char in "._-" for char in value):
        return None
    return value


def join_headers(sent: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """The values by lower-case name, byte for byte (latin-1); of one that came twice, both with a comma between.

    A name with an underscore is dropped: CGI, and all that follows it, would read it as the one with a hyphen.
    """
    joined: dict[str, str] = {}
    for raw_name, raw_value in sent:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        if "_" not in name:
            joined[name] = f"{joined[name]},{value}" if name in joined else value
    return joined


def came_twice(value: str | None) -> bool:
    """Whether a credential header came more than once, or holds the comma that stands for it."""
    return value is not None and "," in value


def read_bearer(authorization: str | None) -> str | None:
    """The token behind `Bearer `, None without the header, and "" for anything else (which proves nothing).

    The scheme's name is matched without regard to case (RFC 9110, 11.1); a comma spoils the whole header.
    """
    if authorization is None:
        return None
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "bearer" or "," in token:
        return ""
    return token.strip(" ")


_PREFERENCE = r'(?:[^",]|"(?:[^"\\]|\\.)*")*'
_PREFERENCES = re.compile(f"{_PREFERENCE}(?:,{_PREFERENCE})*")
_WAIT = re.compile(r"[ \t]*wait[ \t]*=[ \t]*([0-9]+)[ \t]*(?:;.*)?", re.IGNORECASE | re.DOTALL)
_ANY_WAIT = re.compile(r"[ \t]*wait[ \t]*(?:[=;].*)?", re.IGNORECASE | re.DOTALL)
_WAIT_DIGITS = 9


def read_preference_wait(prefer: str | None) -> int | None:
    """The seconds of `Prefer: wait=5` (RFC 7240, 4.3), or None: not asked for, or not so that it can be read.

    Several preferences stand in one header or in several that were joined; of two waits the first one counts, and
    what is not understood is passed over (RFC 7240, 2). Of a number beyond all patience the first 9 digits are read.
    """
    if prefer is None or _PREFERENCES.fullmatch(prefer) is None:
        return None
    for preference in re.findall(_PREFERENCE, prefer):
        if _ANY_WAIT.fullmatch(preference) is not None:
            wait = _WAIT.fullmatch(preference)
            return None if wait is None else int(wait[1].lstrip("0")[:_WAIT_DIGITS] or "0")
    return None


def client_address(remote_address: str | None, forwarded_for: str | None, trusted_proxies: int) -> str | None:
    """Who asked: the peer, or with n proxies of ours before us the n-th entry from the right of X-Forwarded-For.

    What stands further left was written by somebody whom nobody vouches for. None when there are fewer entries
    or it is no address. Canonical (RFC 5952), without a port; an IPv4-mapped address as IPv4.
    """
    if trusted_proxies == 0:
        return _canonical_address(remote_address or "")
    entries = (forwarded_for or "").split(",")
    return _canonical_address(_without_port(entries[-trusted_proxies])) if trusted_proxies <= len(entries) else None


def _without_port(entry: str) -> str:
    """`192.0.2.1:80`, `[2001:db8::1]:80` and `[2001:db8::1]` as the address; anything else as it is."""
    entry = entry.strip(" \t")
    if entry.startswith("["):
        address, bracket, port = entry[1:].partition("]")
        return address if bracket and ":" in address and (port == "" or _is_port(port)) else ""
    address, colon, port = entry.partition(":")
    return address if colon and _is_port(f":{port}") else entry


def _is_port(text: str) -> bool:
    return text.startswith(":") and text[1:].isascii() and text[1:].isdecimal() and len(text) <= len(":65535")


def _canonical_address(text: str) -> str | None:
    try:
        address = ip_address(text)
    except ValueError:
        return None
    if isinstance(address, IPv6Address):
        if address.scope_id is not None:
            return None  # a link's name means nothing on another machine
        return str(address.ipv4_mapped or address)
    return str(address)
