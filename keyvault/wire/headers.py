"""Credentials, addresses and request ids in HTTP headers, without a framework.

HTTP servers join repeated headers with a comma, which no credential contains. A comma therefore means a repeated
header, and the request is rejected: no value is preferred.
"""

import re
from collections.abc import Iterable, Mapping
from ipaddress import IPv6Address, ip_address
from typing import Any

from keyvault.domain.base62 import RandomBytes, random_digits

REQUEST_ID = "X-Request-Id"
API_KEY = "X-Api-Key"
PREFERENCE_APPLIED = "Preference-Applied"

_MAX_CLIENT_ID_LENGTH = 64


def mint_request_id(random_bytes: RandomBytes) -> str:
    """Return a new request id. The client's own id is only logged beside it."""
    return random_digits(22, random_bytes)


def clean_client_request_id(value: str | None) -> str | None:
    """Return the client's own id if it is short and plain enough for a log line, else None."""
    if value is None or not 1 <= len(value) <= _MAX_CLIENT_ID_LENGTH:
        return None
    if not value.isascii() or not all(char.isalnum() or char in "._-" for char in value):
        return None
    return value


def join_headers(sent: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the values by lower-case name, byte for byte (latin-1), with repeated headers joined by a comma.

    Drops names with an underscore, which CGI and WSGI would confuse with the name with a hyphen.
    """
    joined: dict[str, str] = {}
    for raw_name, raw_value in sent:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        if "_" not in name:
            joined[name] = f"{joined[name]},{value}" if name in joined else value
    return joined


def is_repeated(value: str | None) -> bool:
    """Return whether a credential header was repeated, which a comma indicates."""
    return value is not None and "," in value


def read_bearer(authorization: str | None) -> str | None:
    """Return the token after `Bearer `, None without the header, and "" (never valid) for anything else.

    The scheme is case-insensitive (RFC 9110, 11.1). A comma makes the whole header invalid.
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
    """Return the seconds of `Prefer: wait=5` (RFC 7240, 4.3), or None if it is absent or malformed.

    One header or several joined ones may list several preferences. The first wait counts, and unknown preferences are
    ignored (RFC 7240, 2). Only the first 9 digits of a number are read.
    """
    if prefer is None or _PREFERENCES.fullmatch(prefer) is None:
        return None
    for preference in re.findall(_PREFERENCE, prefer):
        if _ANY_WAIT.fullmatch(preference) is not None:
            wait = _WAIT.fullmatch(preference)
            return None if wait is None else int(wait[1].lstrip("0")[:_WAIT_DIGITS] or "0")
    return None


def client_address(remote_address: str | None, forwarded_for: str | None, trusted_proxies: int) -> str | None:
    """Return the client's address: the peer's, or behind n trusted proxies the n-th last X-Forwarded-For entry.

    Entries further left are untrusted. Returns None if there are fewer entries or the entry is no address. The result
    is canonical (RFC 5952), without a port, and an IPv4-mapped address as IPv4.
    """
    if trusted_proxies == 0:
        return _canonical_address(remote_address or "")
    entries = (forwarded_for or "").split(",")
    return _canonical_address(_without_port(entries[-trusted_proxies])) if trusted_proxies <= len(entries) else None


def address_from_environ(environ: Mapping[str, Any], trusted_proxies: int) -> str | None:
    """Return the client's address, as `client_address` does, from a WSGI environ or Django's `request.META`."""
    return client_address(environ.get("REMOTE_ADDR"), environ.get("HTTP_X_FORWARDED_FOR"), trusted_proxies)


def _without_port(entry: str) -> str:
    """Strip the port of `192.0.2.1:80` and `[2001:db8::1]:80`, and bare brackets. Returns other text unchanged."""
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
            return None  # A zone index is only valid on one machine.
        return str(address.ipv4_mapped or address)
    return str(address)
