"""A payment provider's credentials as text: what may be stored and where, and which mode they are plainly of."""

import json
import re
from collections.abc import Iterator

from keyvault.domain.environments import ConnectionMode
from keyvault.domain.errors import Fault, RequestInvalidError
from keyvault.domain.ids import is_merchant_id
from keyvault.domain.plaintext import Plaintext

MOST_BYTES = 8192
"""Of the credentials of one connection, in UTF-8."""

_PATH = re.compile(r"[1-9][0-9]{0,18}/con_[0-9A-Za-z]{20}")

_STRIPE = re.compile(r"[prs]k_(test|live)_[0-9A-Za-z]")
"""Sandbox keys start with `pk_test_`, `rk_test_` and `sk_test_`, live ones with `live` (docs.stripe.com/keys). Others
name theirs alike; where a provider's keys say nothing of their mode, nothing is concluded."""


def connection_path(account: int, connection_id: str) -> str:
    """Where the backend keeps a connection's credentials, in the mount of the account's environment."""
    return f"{account}/{connection_id}"


def is_connection_path(path: str) -> bool:
    """Whether a path of a keys mount is a connection's and no credential's: by its shape, whoever wrote there."""
    return _PATH.fullmatch(path) is not None


def read_provider(text: str) -> str:
    """What the provider is called here: a slug, as merchants' ids are. Raises RequestInvalidError."""
    if is_merchant_id(text):
        return text
    # What was given is not repeated: somebody may have put the secret there.
    raise RequestInvalidError(
        "The provider's name does not fit.", [Fault("/provider", "1 to 64 of a-z, 0-9 and inner hyphens")]
    )


def read_credentials(text: Plaintext, mode: ConnectionMode) -> Plaintext:
    """The credentials as they are stored: one secret text, or a JSON object whose values are texts.

    Blanks around them go, as does the carriage return that browsers put at the end of a line. Raises
    RequestInvalidError, which never repeats any of it.
    """
    stripped = text.reveal().replace("\r\n", "\n").strip()
    fault = _fault_of(stripped, mode)
    if fault:
        raise RequestInvalidError("These credentials cannot be stored.", [Fault("/credentials", fault)])
    return Plaintext(stripped)


def _fault_of(text: str, mode: ConnectionMode) -> str:
    """What is wrong with it, or nothing. A word and no exception: that would carry the text along."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        return "no text: it cannot be written in UTF-8"
    if not text:
        return "nothing is there"
    if size > MOST_BYTES:
        return f"at most {MOST_BYTES} bytes"
    if "\x00" in text:
        return "no NUL character"
    values = list(_values(text))
    if not values or not all(isinstance(value, str) and value for value in values):
        return "one secret text, or a JSON object of texts, each named once and none of them empty"
    modes = {match[1] for value in values if (match := _STRIPE.match(str(value).strip()))}
    if modes - {mode.value}:
        return f"a {modes.pop()} key: this environment's connections are in {mode} mode"
    return ""


def _values(text: str) -> Iterator[object]:
    """The secrets in it; none where it begins like a JSON object and is no flat one."""
    if not text.startswith("{"):
        yield text
        return
    try:
        pairs = json.loads(text, object_pairs_hook=list)
    except (ValueError, RecursionError):
        return
    if len({name for name, _ in pairs}) == len(pairs):
        yield from (value for _, value in pairs)
