"""Content negotiation: every response is JSON, whatever the client accepts."""

from typing import Any

from rest_framework.negotiation import BaseContentNegotiation


class AlwaysJSON(BaseContentNegotiation):
    """Disregard Accept, as RFC 9110 section 12.4.1 allows and RFC 9457 expects for problems."""

    def select_parser(self, request: Any, parsers: Any) -> Any:
        """Return the JSON parser for a JSON body, None for any other media type."""
        media_type = (request.content_type or "").partition(";")[0].strip().lower()
        return next((parser for parser in parsers if parser.media_type == media_type), None)

    def select_renderer(self, request: Any, renderers: Any, format_suffix: Any = None) -> Any:
        return renderers[0], renderers[0].media_type
