"""Middleware: headers and log line of every response, and routing by an environment's base URL."""

import logging
import secrets
from collections.abc import Callable
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.http.request import split_domain_port

from keyvault.access.catalog import is_canonical_path
from keyvault.access.verification import find_exposed
from keyvault.backends import meters
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode
from keyvault.domain.redaction import redact
from keyvault.wire.headers import REQUEST_ID, clean_client_request_id, mint_request_id
from keyvault.wire.planes import DOCS, METRICS, Plane, find_plane
from keyvault.wire.problems import CONTENT_TYPE, problem
from keyvault.wire.trace_context import TRACEPARENT, traced

RAW_PATH = "keyvault.raw_path"
"""Key in `request.META`: the path as sent, before percent-decoding. Only our own server sets it."""

FEED_WAIT = "keyvault.feed_wait"
"""Key in `request.META`: a `project.feed_waiting.FeedWait`, where the server can wait for the next change."""

FORWARDED_HOST = "keyvault.forwarded_host"
"""Key in `request.META` of an Envoy request: the Host of the client's request."""

ENVOY = "/v1/authorize/envoy/"
"""Path prefix of Envoy's requests; the client's own path follows. Their Host is the client's, too."""

_log = logging.getLogger("keyvault.requests")


class RequestMiddleware:
    """Set `request.request_id`, which the response carries. A client's own id is only logged beside it."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        request.request_id = mint_request_id(secrets.token_bytes)  # type: ignore[attr-defined]  # for `request_id_of`
        with traced(request.headers.get(TRACEPARENT)):
            return self._answer(request)

    def _answer(self, request: HttpRequest) -> HttpResponse:
        begun_at = monotonic()
        response = self.get_response(request)
        plane = find_plane(request.path_info)
        meters.note_request("other" if plane is None else plane, response.status_code, monotonic() - begun_at)
        request_id = request_id_of(request)
        response[REQUEST_ID] = request_id
        if not request.path_info.startswith("/static/"):
            response["Cache-Control"] = "no-store"
        if response.status_code >= 400 and not getattr(response, "is_logged", False):
            # A client may put a key in the path. The path is redacted before it is cut, since the pattern does not
            # match half a key.
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
    """Route a request for an environment's base URL to that environment's routes.

    `path_info` becomes `/sandbox/…` or `/production/…`, independent of the base URLs; `path` stays as requested. A
    host that only environments use serves those environments and the health checks. Every other host serves what
    the origin's host serves. Everything else is 404, so that no environment answers on another's host or in a
    process that does not serve it. Ports are ignored, since a process listens on one.

    On both planes an ambiguous path (escapes, dot segments) is 404. Envoy's path is the client's and is not changed.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response
        self._origin = split_base_url(settings.ORIGIN)[0]
        self._origin_host = urlsplit(settings.ORIGIN).netloc
        self._served = frozenset(settings.ENVIRONMENTS)
        self._bases: dict[str, list[tuple[str, Environment]]] = {}
        for environment in Environment:
            host, path = split_base_url(settings.BASE_URLS[environment])
            self._bases.setdefault(host, []).append((path, environment))

    def __call__(self, request: HttpRequest) -> HttpResponse:
        if raw_path(request).startswith(ENVOY):
            # Django would refuse the client's host, which is not in ALLOWED_HOSTS.
            request.META[FORWARDED_HOST] = request.META.get("HTTP_HOST", "")
            request.META["HTTP_HOST"] = self._origin_host
            return self.get_response(request)
        self._route(request)
        response = self.get_response(request)
        if request.path_info.startswith("/admin/") and response.status_code != 400 and find_exposed(raw_url(request)):
            # The redirect to the sign-in page and its form would repeat the URL.
            detail = "The URL contains a whole key, and URLs are logged. Have the key rotated."
            return problem_response(ErrorCode.CREDENTIAL_IN_URL, detail, request)
        return response

    def _route(self, request: HttpRequest) -> None:
        """Set `path_info` to the route of the host and path. Raises Http404."""
        host = split_domain_port(request.get_host())[0].strip("[]")
        bases = self._bases.get(host)
        if bases is None:
            host, bases = self._origin, self._bases.get(self._origin, [])
        path = request.path_info
        if path in _HEALTH:
            return
        raw = raw_path(request)
        for base, environment in bases:
            if path.startswith(f"{base}/") or path == base:
                # The path as sent: the catalog matches no ambiguous path.
                request.path_info = f"/{environment}/{raw.removeprefix(base).removeprefix('/')}"
                if environment not in self._served or not (raw == base or raw.startswith(f"{base}/")):
                    raise Http404
                return
        if path.startswith(INTEGRATION_ROUTES) or host != self._origin:
            raise Http404
        if path.startswith("/v1/") and not is_canonical_path(raw):
            raise Http404


class PlaneMiddleware:
    """Answer 404 to every path of a plane that this process does not serve, before any code of that plane runs.

    It needs the `path_info` that `EnvironmentMiddleware` sets. Health checks are always served.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        if not _is_served(request.path_info):
            raise Http404
        return self.get_response(request)


def _is_served(path: str) -> bool:
    if path == METRICS:
        return settings.IS_METRICS_PATH_SERVED
    if path in DOCS:
        return settings.ARE_DOCS_SERVED
    if path.startswith(settings.STATIC_URL):
        return settings.ARE_DOCS_SERVED or Plane.CONSOLE in settings.PLANES
    plane = find_plane(path)
    return plane is None or plane in settings.PLANES


INTEGRATION_ROUTES = tuple(f"/{environment}/" for environment in Environment)
"""Prefixes of `path_info` on the integration plane."""

_HEALTH = frozenset({"/healthz", "/readyz"})


def split_base_url(url: str) -> tuple[str, str]:
    """Return the host and the path of a base URL, which identify it."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.path.rstrip("/")


def request_id_of(request: object) -> str:
    """Return the support id of a Django or REST framework request."""
    return str(getattr(request, "request_id", ""))


def raw_path(request: HttpRequest) -> str:
    """Return the path as sent; percent-decoded where the server does not provide the raw path."""
    return str(request.META.get(RAW_PATH, request.path))


def raw_url(request: HttpRequest) -> str:
    """Return path and query as sent, for finding credentials in them."""
    return f"{raw_path(request)}?{request.META.get('QUERY_STRING', '')}"


def problem_response(code: ErrorCode, detail: str, request: object, **more: Any) -> HttpResponse:
    """Return a problem response outside REST framework: for unknown paths, refused hosts and faults."""
    found = problem(code, detail, request_id_of(request), **more)
    return JsonResponse(dict(found.body), status=found.status, headers=dict(found.headers), content_type=CONTENT_TYPE)
