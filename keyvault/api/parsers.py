"""The JSON of every body: see `keyvault.wire.json_bodies`."""

from collections.abc import Mapping
from typing import IO, Any

from rest_framework.exceptions import ParseError
from rest_framework.parsers import BaseParser

from keyvault.wire.json_bodies import read_object


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
            return read_object(body)
        except ValueError as error:
            raise ParseError(str(error)) from None
