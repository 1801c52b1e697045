"""What every answer carries, whoever gives it: a request id of ours, and no leave to be cached."""

import logging
import secrets
from collections.abc import Callable

from django.http import HttpRequest, HttpResponse

from keyvault.wire.headers import REQUEST_ID, clean_client_request_id, mint_request_id

_log = logging.getLogger("keyvault.requests")


class RequestMiddleware:
    """Sets `request.request_id`. A client's own id is only noted in the log beside ours."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        request_id = mint_request_id(secrets.token_bytes)
        request.request_id = request_id  # type: ignore[attr-defined]  # read back by `request_id_of`
        response = self.get_response(request)
        response[REQUEST_ID] = request_id
        if not request.path.startswith("/static/"):
            response["Cache-Control"] = "no-store"
        if response.status_code >= 400:
            # The path may hold what somebody mistook for a place to put a key; the log handlers redact it.
            _log.info(
                "refused",
                extra={
                    "request_id": request_id,
                    "client_request_id": clean_client_request_id(request.headers.get(REQUEST_ID)) or "",
                    "method": request.method or "",
                    "path": request.path[:300],
                    "status": response.status_code,
                },
            )
        return response


def request_id_of(request: object) -> str:
    """The id of a Django or REST framework request."""
    return str(getattr(request, "request_id", ""))
