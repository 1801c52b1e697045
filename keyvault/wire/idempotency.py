"""The Idempotency-Key header: one key of 1 to 255 printable ASCII characters, quoted or bare."""

import re

from keyvault.domain.errors import ErrorCode, Fault, IdempotencyError, RequestInvalidError

IDEMPOTENCY_KEY = "Idempotency-Key"
REPLAYED = "Idempotent-Replayed"

_KEY = re.compile(r"[\x20-\x7e]{1,255}")
_QUOTED = re.compile(r'"((?:[\x20-\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"')
"""A Structured Fields String (RFC 9651, 3.3.3), as in draft-ietf-httpapi-idempotency-key-header."""

_ESCAPED = re.compile(r'\\(["\\])')


def read_idempotency_key(value: str | None) -> str:
    """Parse the header. `"abc"` and `abc` are the same key, and a comma is an ordinary character.

    Raises IdempotencyError when the key is missing or empty, RequestInvalidError when it is malformed.
    """
    text = (value or "").strip(" \t")
    if quoted := _QUOTED.fullmatch(text):
        text = _ESCAPED.sub(r"\1", quoted[1])
    if not text:
        raise IdempotencyError(
            ErrorCode.IDEMPOTENCY_KEY_MISSING, f"Requests that create something require the header {IDEMPOTENCY_KEY}."
        )
    if _KEY.fullmatch(text) is None:
        fault = Fault("", f"The header {IDEMPOTENCY_KEY} must have 1 to 255 printable ASCII characters.")
        raise RequestInvalidError("The request is invalid.", [fault])
    return text
