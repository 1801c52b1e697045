"""The JSON parser of every body, see `keyvault.wire.json_bodies`."""

from collections.abc import Mapping
from typing import IO, Any

from rest_framework.exceptions import ParseError
from rest_framework.parsers import BaseParser

from keyvault.wire.json_bodies import read_object


class StrictJSONParser(BaseParser):
    """Parse unambiguous JSON only. Raises ParseError (`request_invalid`) where two parsers could differ."""

    media_type = "application/json"

    def parse(
        self,
        stream: IO[Any],
        media_type: str | None = None,
        parser_context: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        # Read from the request, which enforces the maximum body size; the stream does not.
        body = parser_context["request"]._request.body if parser_context else stream.read()
        try:
            return read_object(body)
        except ValueError as error:
            raise ParseError(str(error)) from None
