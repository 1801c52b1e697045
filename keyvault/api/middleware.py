"""What every answer carries, whoever gives it, and which environment's base URL a request came to."""

import logging
import secrets
from collections.abc import Callable
from urllib.parse import urlsplit

from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse
from django.http.request import split_domain_port

from keyvault.domain.environments import Environment
from keyvault.domain.redaction import redact
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
        if not request.path_info.startswith("/static/"):
            response["Cache-Control"] = "no-store"
        if response.status_code >= 400:
            # The path may hold what somebody mistook for a place to put a key. Redacted before it is cut, since
            # half a key no longer has the shape of one.
            _log.info(
                "refused",
                extra={
                    "request_id": request_id,
                    "client_request_id": clean_client_request_id(request.headers.get(REQUEST_ID)) or "",
                    "method": request.method or "",
                    "path": redact(request.path)[:300],
                    "status": response.status_code,
                },
            )
        return response


class EnvironmentMiddleware:
    """Leads a request for an environment's base URL to that environment's routes; the one place that does.

    The routes are `/sandbox/…` and `/production/…` in `path_info`, whatever the base URLs are; `path` stays what
    was asked for. A host of an environment's own serves the environments based there and the health checks,
    nothing else; every other host serves what is based on the origin's. The rest is 404, so that no
    environment answers on another's host. Ports are not looked at: one process listens on one.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response
        self._origin = split_base_url(settings.ORIGIN)[0]
        self._bases: dict[str, list[tuple[str, Environment]]] = {}
        for environment in Environment:
            host, path = split_base_url(settings.BASE_URLS[environment])
            self._bases.setdefault(host, []).append((path, environment))

    def __call__(self, request: HttpRequest) -> HttpResponse:
        host = split_domain_port(request.get_host())[0].strip("[]")
        bases = self._bases.get(host)
        if bases is None:
            host, bases = self._origin, self._bases.get(self._origin, [])
        path = request.path_info
        if path in _HEALTH:
            return self.get_response(request)
        for base, environment in bases:
            if path.startswith(f"{base}/"):
                request.path_info = f"/{environment}{path.removeprefix(base)}"
                return self.get_response(request)
        if path.startswith(INTEGRATION_ROUTES) or host != self._origin:
            raise Http404
        return self.get_response(request)


INTEGRATION_ROUTES = tuple(f"/{environment}/" for environment in Environment)
"""What `path_info` begins with on the integration plane."""

_HEALTH = frozenset({"/healthz", "/readyz"})


def split_base_url(url: str) -> tuple[str, str]:
    """Host and path: what tells base URLs apart."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.path.rstrip("/")


def request_id_of(request: object) -> str:
    """The id of a Django or REST framework request."""
    return str(getattr(request, "request_id", ""))
