"""The one representation there is, whatever the client says it accepts."""

from typing import Any

from rest_framework.negotiation import BaseContentNegotiation


class AlwaysJSON(BaseContentNegotiation):
    """RFC 9110 section 12.4.1 leaves the choice to disregard Accept; RFC 9457 expects problems to do so."""

    def select_parser(self, request: Any, parsers: Any) -> Any:
        """The JSON parser for JSON, none for anything else."""
        media_type = (request.content_type or "").partition(";")[0].strip().lower()
        return next((parser for parser in parsers if parser.media_type == media_type), None)

    def select_renderer(self, request: Any, renderers: Any, format_suffix: Any = None) -> Any:
        return renderers[0], renderers[0].media_type
