"""Repeatable randomness, and key strings of every kind."""

import hashlib
from collections.abc import Callable

from hypothesis import strategies as st

from keyvault.domain.keystring import StringKind, StringScope, mint_keystring

ALPHANUMERIC = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

SORTS = [
    (kind, scope)
    for kind in StringKind
    for scope in StringScope
    if scope is not StringScope.ALL or kind is StringKind.SERVICE_TOKEN
]
"""Every kind in every scope that it may have."""


def drawn_from(seed: object) -> Callable[[int], bytes]:
    """Pseudorandom bytes of SHAKE-256, the same for the same seed."""
    rolls = 0

    def random_bytes(count: int) -> bytes:
        nonlocal rolls
        rolls += 1
        return hashlib.shake_256(f"{seed}/{rolls}".encode()).digest(count)

    return random_bytes


def mint(
    kind: StringKind = StringKind.PRIVATE,
    scope: StringScope = StringScope.SANDBOX,
    *,
    key_prefix: str = "kv",
    seed: object = 0,
) -> str:
    return mint_keystring(key_prefix, kind, scope, drawn_from(seed)).text.reveal()


key_prefixes = st.from_regex(r"[a-z][a-z0-9]{0,15}", fullmatch=True)

keystrings = st.builds(
    lambda sort, key_prefix, seed: mint(*sort, key_prefix=key_prefix, seed=seed),
    st.sampled_from(SORTS),
    key_prefixes,
    st.integers(0, 2**32),
)
"""Key strings of any key prefix, kind and scope."""
