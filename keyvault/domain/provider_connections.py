"""Credentials of payment providers: validation of text and mode (test or live), and the storage path."""

import json
import re
from collections.abc import Iterator

from keyvault.domain.environments import ConnectionMode
from keyvault.domain.errors import Fault, RequestInvalidError
from keyvault.domain.ids import is_merchant_id
from keyvault.domain.plaintext import Plaintext

MAX_BYTES = 8192
"""Maximum size of the credentials of one connection, in bytes of UTF-8."""

_STRIPE = re.compile(r"[prs]k_(test|live)_[0-9A-Za-z]")
"""Key prefixes that name the mode: `pk_test_`, `rk_test_`, `sk_test_`, and `live` likewise (docs.stripe.com/keys).
Other providers use the same scheme. A key without such a prefix is accepted in either mode."""


def connection_path(account: int, connection_id: str) -> str:
    """Return the backend path of a connection's credentials, in the mount of the account's environment."""
    return f"{account}/{connection_id}"


def read_provider(text: str) -> str:
    """Validate a provider's name: a slug, like a merchant id. Raises RequestInvalidError."""
    if is_merchant_id(text):
        return text
    # The error does not quote the input: it may be the secret, entered in the wrong field.
    raise RequestInvalidError(
        "The provider's name is invalid.", [Fault("/provider", "must be 1 to 64 of a-z, 0-9 and inner hyphens")]
    )


def read_credentials(text: Plaintext, mode: ConnectionMode) -> Plaintext:
    """Validate and normalize credentials: one secret text, or a JSON object whose values are texts.

    Strips surrounding white space and the carriage returns that browsers add to line ends. Raises
    RequestInvalidError, which never quotes the input.
    """
    stripped = text.reveal().replace("\r\n", "\n").strip()
    fault = _find_fault(stripped, mode)
    if fault:
        raise RequestInvalidError("These credentials cannot be stored.", [Fault("/secret", fault)])
    return Plaintext(stripped)


def _find_fault(text: str, mode: ConnectionMode) -> str:
    """Return the fault, or an empty string. Not an exception, whose traceback would carry the secret."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        return "must be text that UTF-8 can encode"
    if not text:
        return "must not be empty"
    if size > MAX_BYTES:
        return f"at most {MAX_BYTES} bytes"
    if "\x00" in text:
        return "must not contain a NUL character"
    values = list(_values(text))
    if not values or not all(isinstance(value, str) and value for value in values):
        return "must be one secret text, or a JSON object of texts with unique names and no empty text"
    modes = {match[1] for value in values if (match := _STRIPE.match(str(value).strip()))}
    if modes - {mode.value}:
        return f"contains a {modes.pop()} key, but this environment uses {mode} mode"
    return ""


def _values(text: str) -> Iterator[object]:
    """Yield the values to check; none when the text begins with a brace but is not a flat JSON object."""
    if not text.startswith("{"):
        yield text
        return
    try:
        pairs = json.loads(text, object_pairs_hook=list)
    except (ValueError, RecursionError):
        return
    if len({name for name, _ in pairs}) == len(pairs):
        yield from (value for _, value in pairs)
