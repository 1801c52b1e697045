"""The key string: `<key prefix>_<kind>_<env>_<16 key id><43 secret><6 crc>`.

It has a fixed length, a double click selects it whole, and one regular expression finds it in a leak scan. The
checksum is zlib's CRC-32 over the preceding ASCII text. It rejects typing errors and random guesses before any
look-up; it is not secret and proves nothing. Proof is a digest, see `domain.digests`.
"""

import re
import zlib
from enum import StrEnum
from functools import cache

from msgspec import Struct

from keyvault.domain.base62 import RandomBytes, decode_six, encode, random_digits
from keyvault.domain.environments import Environment
from keyvault.domain.ids import KEY_ID_DIGITS, mint_key_id
from keyvault.domain.keys import KeyKind
from keyvault.domain.plaintext import Plaintext

SECRET_DIGITS = 43
CHECKSUM_DIGITS = 6
_DIGITS = KEY_ID_DIGITS + SECRET_DIGITS + CHECKSUM_DIGITS
MAX_LENGTH = 128
"""Maximum length of a text that is parsed, in characters. A key prefix has at most 16 of them."""

KEY_ID_PLACE = slice(-_DIGITS, KEY_ID_DIGITS - _DIGITS)
"""Slice of a well-formed key string that is the key id."""

KEY_PREFIX_PATTERN = re.compile(r"[a-z][a-z0-9]{0,15}")


class StringKind(StrEnum):
    """The second field of a key string: all four credential strings of the service."""

    PUBLIC = "pub"
    PRIVATE = "prv"
    CUSTOMER_TOKEN = "cat"  # noqa: S105  the name of a kind
    SERVICE_TOKEN = "svc"  # noqa: S105  the name of a kind


class StringScope(StrEnum):
    """The third field: an environment, or `all` for a service token that serves both."""

    SANDBOX = "sbx"
    PRODUCTION = "prd"
    ALL = "all"


STRING_KIND = {KeyKind.PUBLIC: StringKind.PUBLIC, KeyKind.PRIVATE: StringKind.PRIVATE}
STRING_SCOPE = {Environment.SANDBOX: StringScope.SANDBOX, Environment.PRODUCTION: StringScope.PRODUCTION}
SCOPE_ENVIRONMENTS = {
    StringScope.SANDBOX: frozenset({Environment.SANDBOX}),
    StringScope.PRODUCTION: frozenset({Environment.PRODUCTION}),
    StringScope.ALL: frozenset(Environment),
}

# Plain; percent-encoded, once or repeatedly (%255F); escaped in JSON, and in JSON within JSON.
# Bounded, so that matching a long run of escapes takes linear time.
_UNDERSCORE = r"(?:_|%(?:25){0,8}5[Ff]|\\{1,16}u005[Ff])"
SHAPED_HEAD = rf"{_UNDERSCORE}(?:pub|prv|cat|svc){_UNDERSCORE}(?:sbx|prd|all){_UNDERSCORE}[0-9A-Za-z]{{16}}"
SHAPED = re.compile(rf"(?P<head>{SHAPED_HEAD})[0-9A-Za-z]{{1,512}}")
"""Matches text shaped like a key string: any key prefix or none, any checksum, and any length from one digit of the
secret (a truncated log line, a repeated digit). Its underscores may be escaped for a URL or in JSON, also repeatedly.
The head is public; the rest must not be shown."""


class KeyString(Struct, frozen=True, gc=False):
    """A well-formed presented string. `text` is the whole string, which the digest covers."""

    kind: StringKind
    scope: StringScope
    key_id: str
    text: Plaintext


def string_scope(environments: frozenset[Environment]) -> StringScope:
    """Return the scope of these environments. Raises StopIteration for none."""
    return next(scope for scope, held in SCOPE_ENVIRONMENTS.items() if held == environments)


def _has_scope(kind: StringKind, scope: StringScope) -> bool:
    return scope is not StringScope.ALL or kind is StringKind.SERVICE_TOKEN


@cache
def _openings(key_prefix: str) -> dict[str, tuple[StringKind, StringScope]]:
    """Return the kind and scope of each valid opening: the text before the key id."""
    pairs = ((kind, scope) for kind in StringKind for scope in StringScope if _has_scope(kind, scope))
    return {f"{key_prefix}_{kind}_{scope}_": (kind, scope) for kind, scope in pairs}


def checksum(head: str) -> str:
    return encode(zlib.crc32(head.encode("ascii")), CHECKSUM_DIGITS)


def mint_keystring(key_prefix: str, kind: StringKind, scope: StringScope, random_bytes: RandomBytes) -> KeyString:
    """Generate a key string with a new key id and at least 256 random bits of secret.

    Raises ValueError for a key prefix that does not match KEY_PREFIX_PATTERN, and for the scope `all` unless `kind` is
    a service token.
    """
    if KEY_PREFIX_PATTERN.fullmatch(key_prefix) is None:
        raise ValueError(f"invalid key prefix {key_prefix!r}: use 1 to 16 of a-z and 0-9, beginning with a letter")
    if not _has_scope(kind, scope):
        raise ValueError(f"a {kind} string needs one environment as its scope")
    key_id = mint_key_id(random_bytes)
    head = f"{key_prefix}_{kind}_{scope}_{key_id}{random_digits(SECRET_DIGITS, random_bytes)}"
    return KeyString(kind, scope, key_id, Plaintext(head + checksum(head)))


def parse_keystring(text: str, key_prefix: str) -> KeyString | None:
    """Parse a presented string. Returns None when it is malformed, mistyped or with another key prefix.

    Does no look-up and accepts any text: over-long, non-ASCII and empty texts return None.
    """
    if len(text) > MAX_LENGTH:
        return None
    found, digits = _openings(key_prefix).get(text[:-_DIGITS]), text[-_DIGITS:]
    if found is None or len(digits) != _DIGITS or not (digits.isascii() and digits.isalnum()):
        return None
    if zlib.crc32(text[:-CHECKSUM_DIGITS].encode()) != decode_six(digits[-CHECKSUM_DIGITS:]):
        return None
    kind, scope = found
    return KeyString(kind, scope, digits[:KEY_ID_DIGITS], Plaintext(text))
