"""JSON as the contract means it: one object, each name once, no NaN, no bottomless nesting."""

import json
from collections.abc import Mapping
from typing import IO, Any, NoReturn

from rest_framework.exceptions import ParseError
from rest_framework.parsers import BaseParser


class StrictJSONParser(BaseParser):
    """Raises ParseError, which becomes `request_invalid`, on anything that two readers could read differently."""

    media_type = "application/json"

    def parse(
        self,
        stream: IO[Any],
        media_type: str | None = None,
        parser_context: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        # Through the request and not the stream: the former enforces the limit on a body's size.
        body = parser_context["request"]._request.body if parser_context else stream.read()
        try:
            value = json.loads(body.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise ParseError(f"The body is not JSON: {_reason(error)}") from None
        if not isinstance(value, dict):
            raise ParseError("The body must be a JSON object.")
        return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a name appears twice")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _reason(error: Exception) -> str:
    """Where it went wrong, and nothing of what was sent."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at line {error.lineno}, column {error.colno}."
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8."
    if isinstance(error, RecursionError):
        return "it is nested too deeply."
    return f"{str(error)[:80]}."
