"""Public handles: how each is minted, and what one looks like.

An id names, it never proves. Merchants carry slugs that people choose; everything else is random.
"""

import re
from typing import Literal

from keyvault.domain.base62 import RandomBytes, random_digits

KEY_ID_DIGITS = 16
Prefix = Literal["crd", "req", "rot", "cmp", "evd", "per", "brk", "ord", "ntc", "con"]

_SLUG = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,62}[a-z0-9])?")
_KEY_ID = re.compile(r"[0-9A-Za-z]{16}")


def mint_key_id(random_bytes: RandomBytes) -> str:
    return random_digits(KEY_ID_DIGITS, random_bytes)


def mint_id(prefix: Prefix, random_bytes: RandomBytes) -> str:
    """`crd_` and 20 base62 digits (119 bits): cannot be guessed, though nothing depends on that."""
    return f"{prefix}_{random_digits(20, random_bytes)}"


def is_merchant_id(text: str) -> bool:
    """1 to 64 of a-z, 0-9 and inner hyphens, so that it stands in a URL, a path and a label unescaped."""
    return _SLUG.fullmatch(text) is not None


def is_key_id(text: str) -> bool:
    return _KEY_ID.fullmatch(text) is not None
