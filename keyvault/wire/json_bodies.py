"""Strict parsing of JSON bodies: one object, unique names, no NaN, limited nesting."""

import json
from typing import Any, NoReturn


def read_object(body: bytes) -> dict[str, Any]:
    """Parse a body. Raises ValueError on anything that two parsers could read differently.

    The error states the position and does not quote the body.
    """
    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"The body is not JSON: {_reason(error)}") from None
    if not isinstance(value, dict):
        raise ValueError("The body must be a JSON object.")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a name appears twice")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at line {error.lineno}, column {error.colno}."
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8."
    if isinstance(error, RecursionError):
        return "it is nested too deeply."
    return f"{str(error)[:80]}."
