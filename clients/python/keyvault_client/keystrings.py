"""What the client reads from a key string: its kind and its environment. The service verifies everything else."""

import hmac
import re

from keyvault.domain.plaintext import Plaintext

ENVIRONMENT_SCOPES = {"sandbox": "sbx", "production": "prd"}

_KEY_STRING = re.compile(r"[a-z][a-z0-9]{0,15}_(pub|prv|cat|svc)_(sbx|prd|all)_([0-9A-Za-z]{16})[0-9A-Za-z]{49}")
KEY_SHAPED = re.compile(r"_(?:pub|prv|cat|svc)_(?:sbx|prd|all)_[0-9A-Za-z]{16}")
"""Matches a key string in a longer text."""


def as_plaintext(text: str | Plaintext) -> Plaintext:
    """Return the secret in its own type. Functions rebind an argument to it first, as error reports show arguments."""
    return text if isinstance(text, Plaintext) else Plaintext(text)


def kind_and_scope(secret: Plaintext) -> tuple[str, str]:
    """Return the second and the third field of a key string, such as `("prv", "sbx")`; empty texts for other text."""
    found = _KEY_STRING.fullmatch(secret.reveal())
    return ("", "") if found is None else (found[1], found[2])


def key_id(secret: Plaintext) -> str:
    """Return the key id, which is no secret; empty for text that is no key string."""
    found = _KEY_STRING.fullmatch(secret.reveal())
    return "" if found is None else found[3]


def is_same(one: Plaintext, other: Plaintext) -> bool:
    return hmac.compare_digest(one.reveal().encode(errors="replace"), other.reveal().encode(errors="replace"))
