"""Canonical JSON: one byte representation per value, so that equal values have equal digests.

A subset of RFC 8785 (JSON Canonicalization Scheme): sorted keys, no white space, UTF-8, no floats.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence

JsonValue = None | bool | int | str | Sequence["JsonValue"] | Mapping[str, "JsonValue"]


def canonical_bytes(value: JsonValue) -> bytes:
    """Serialize a value canonically.

    Raises TypeError on anything but null, booleans, integers, strings, lists and string-keyed objects.
    """
    _refuse_ambiguous(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def canonical_digest(value: JsonValue) -> str:
    """Return the SHA-256 of the canonical bytes as 64 lower-case hexadecimal characters."""
    return hashlib.sha256(canonical_bytes(value)).hexdigest()


def _refuse_ambiguous(value: object) -> None:
    if value is None or isinstance(value, bool | int | str):
        return
    if isinstance(value, Mapping):
        for key, member in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{type(key).__name__} is not a valid object key; use a string")
            _refuse_ambiguous(member)
    elif isinstance(value, list | tuple):
        for member in value:
            _refuse_ambiguous(member)
    else:
        raise TypeError(f"{type(value).__name__} has no canonical form")
