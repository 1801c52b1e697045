"""Public identifiers: generation and validation.

An id identifies and never authenticates. People choose merchants' slugs; all other ids are random.
"""

import re
from typing import Literal

from keyvault.domain.base62 import RandomBytes, random_digits

Subject = tuple[str, str]
"""Kind and id of a changed subject, such as `("key", "6Hs…")`."""

KEY_ID_DIGITS = 16
Prefix = Literal["crd", "req", "rot", "cmp", "sta", "evd", "per", "brk", "ord", "ntc", "con", "opc", "rcp"]

_SLUG = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?")
_KEY_ID = re.compile(r"[0-9A-Za-z]{16}")


def mint_key_id(random_bytes: RandomBytes) -> str:
    return random_digits(KEY_ID_DIGITS, random_bytes)


def mint_id(prefix: Prefix, random_bytes: RandomBytes) -> str:
    """Return the prefix, an underscore and 20 base62 digits (119 bits). Security does not depend on its secrecy."""
    return f"{prefix}_{random_digits(20, random_bytes)}"


def is_merchant_id(text: str) -> bool:
    """Return whether the text is 1 to 64 of a-z, 0-9 and inner hyphens, which URLs and labels need not escape."""
    return _SLUG.fullmatch(text) is not None


def is_key_id(text: str) -> bool:
    return _KEY_ID.fullmatch(text) is not None


def find_account_id(path: str) -> int | None:
    """Return the id of the account that a path of the secret backend begins with; None: it begins with none."""
    first = path.partition("/")[0]
    return int(first) if first.isascii() and first.isdigit() and len(first) <= 18 else None
