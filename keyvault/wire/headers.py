"""Credentials and request ids in HTTP headers, without a framework.

WSGI and ASGI servers join repeated headers with a comma, which no credential of ours contains: so a comma
stands for "came twice", and what came twice is refused rather than chosen from.

What nothing here can see: a WSGI environ has one name, HTTP_X_API_KEY, for `X-Api-Key` and `X_Api_Key`, and
Granian (2.8) does not join the two spellings but keeps the last that came, without a trace of the other. Whoever
stands before it has to drop header names with an underscore; tests/doors keeps watch over this.
"""

from keyvault.domain.base62 import RandomBytes, random_digits

REQUEST_ID = "X-Request-Id"
API_KEY = "X-Api-Key"

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
