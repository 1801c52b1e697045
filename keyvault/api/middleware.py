"""What every answer carries, whoever gives it, and which environment's base URL a request came to."""

import logging
import secrets
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.http.request import split_domain_port

from keyvault.access.catalog import is_canonical_path
from keyvault.access.verification import find_exposed
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode
from keyvault.domain.redaction import redact
from keyvault.wire.headers import REQUEST_ID, clean_client_request_id, mint_request_id
from keyvault.wire.problems import CONTENT_TYPE, problem

RAW_PATH = "keyvault.raw_path"
"""In `request.META`, behind our own server: the path as it was sent, before its escapes were undone."""

FORWARDED_HOST = "keyvault.forwarded_host"
"""In `request.META` of Envoy's question: the Host of the client's request."""

ENVOY = "/v1/authorize/envoy/"
"""Envoy asks with the client's own path behind this, and the client's own Host."""

_log = logging.getLogger("keyvault.requests")


class RequestMiddleware:
    """Sets `request.request_id`. A client's own id is only noted in the log beside ours."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        request.request_id = mint_request_id(secrets.token_bytes)  # type: ignore[attr-defined]  # for `request_id_of`
        response = self.get_response(request)
        request_id = request_id_of(request)
        response[REQUEST_ID] = request_id
        if not request.path_info.startswith("/static/"):
            response["Cache-Control"] = "no-store"
        if response.status_code >= 400 and not getattr(response, "is_logged", False):
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
    environment answers on another's host, and none that this process does not serve. Ports are not looked at: one
    process listens on one.

    On the integration and the service plane a path is read in one way or not at all: with escapes, dot segments and
    the like it names nothing. Envoy's path is the client's and left as it is.
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
            # Before anybody asks for the host: a gateway's is none that we answer to.
            request.META[FORWARDED_HOST] = request.META.get("HTTP_HOST", "")
            request.META["HTTP_HOST"] = self._origin_host
            return self.get_response(request)
        self._lead(request)
        response = self.get_response(request)
        if request.path_info.startswith("/admin/") and response.status_code != 400 and find_exposed(raw_url(request)):
            # The way to the log-in, and its form, would repeat the address.
            detail = "A whole key stands in the address, where logs keep it. Have it rotated."
            return problem_response(ErrorCode.CREDENTIAL_IN_URL, detail, request)
        return response

    def _lead(self, request: HttpRequest) -> None:
        """Sets `path_info`. Raises Http404."""
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
                # As it was sent: the catalog has no entry for what could be read in two ways.
                request.path_info = f"/{environment}/{raw.removeprefix(base).removeprefix('/')}"
                if environment not in self._served or not (raw == base or raw.startswith(f"{base}/")):
                    raise Http404
                return
        if path.startswith(INTEGRATION_ROUTES) or host != self._origin:
            raise Http404
        if path.startswith("/v1/") and not is_canonical_path(raw):
            raise Http404


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


def raw_path(request: HttpRequest) -> str:
    """The path as it was sent; behind a server that does not tell it, with its escapes undone."""
    return str(request.META.get(RAW_PATH, request.path))


def raw_url(request: HttpRequest) -> str:
    """Path and query as they were sent, for whoever looks for what must not stand there."""
    return f"{raw_path(request)}?{request.META.get('QUERY_STRING', '')}"


def problem_response(code: ErrorCode, detail: str, request: object, **more: Any) -> HttpResponse:
    """A problem from outside REST framework: unknown paths, refused hosts, faults."""
    found = problem(code, detail, request_id_of(request), **more)
    return JsonResponse(dict(found.body), status=found.status, headers=dict(found.headers), content_type=CONTENT_TYPE)
