"""The frontend of a WSGI server (PEP 3333): the engine in front of another application, in the same process.

application = mounted(django, frontend, serves_host)
"""

import logging
from collections.abc import Callable, Iterable
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Final, Protocol
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from keyvault.hotpath.messages.pending_requests import ENVOY, VERIFY, Headers, is_engine_path
from keyvault.hotpath.messages.responses import JSON, HttpResponse
from keyvault.wire.headers import REQUEST_ID

BODY_BYTES: Final = 64 * 1024
RAW_PATH: Final = "keyvault.raw_path"
"""Environ key for the path as sent, where the server provides it."""

_FEW_DIGITS: Final = 5
"""A Content-Length with fewer digits is below BODY_BYTES."""

_MAX_DIGITS: Final = 20
"""Maximum number of digits in a Content-Length. Python refuses to parse thousands of digits."""

_STATUS: Final = {200: "200 OK"}

_LENGTH: Final = "Content-Length"
_TYPE, _STORE = JSON
_PREFORMATTED: Final = 2048
_LENGTHS: Final = tuple([(_LENGTH, str(length)) for length in range(_PREFORMATTED)])
"""Formatted once, as in `messages.responses`."""

_log = logging.getLogger(__name__)


class Frontend(Protocol):
    """See `threaded_frontend.ThreadedFrontend`."""

    @property
    def verify_known(self) -> Callable[[bytes, bytes], object]: ...

    def answer(self, method: str, target: str, headers: Headers, body: bytes | None) -> HttpResponse: ...


def mounted(fallback: WSGIApplication, frontend: Frontend, serves_host: Callable[[str], bool]) -> WSGIApplication:
    """Return a WSGI application that answers the engine's paths and passes all others to `fallback`.

    `serves_host` decides from a Host header whether the service plane is served there.

    A WSGI server maps both `X_Api_Key` and `X-Api-Key` to one name, and decodes the path. Directly behind such a
    server, a gateway must drop headers with underscores. `keyvault.project.asgi_wsgi_bridge` distinguishes them.

    A server that forks must call this after the fork: the engine's lock and request ids belong to one process.
    """
    # A function, since calling a callable object would take longer than the work done here.
    verify_known, answer = frontend.verify_known, frontend.answer

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        find = environ.get
        path = find(RAW_PATH) or environ["PATH_INFO"]
        if path == VERIFY:
            is_engine_request = serves_host(find("HTTP_HOST", ""))
        else:  # Envoy sends the client's own Host, which is not one of ours
            is_engine_request = is_engine_path(path) and (path.startswith(ENVOY) or serves_host(find("HTTP_HOST", "")))
        if not is_engine_request:
            return fallback(environ, start_response)
        length = find("CONTENT_LENGTH", "")
        if (
            len(length) < _FEW_DIGITS
            and length.isdecimal()
            and find("wsgi.input_terminated")
            and "HTTP_TRANSFER_ENCODING" not in environ  # else the body may be longer than announced
        ):
            # Without a size: with one, Granian takes twice as long.
            body = environ["wsgi.input"].read()
        else:
            body = _body(environ)
        method, query = environ["REQUEST_METHOD"], find("QUERY_STRING")
        if path == VERIFY and body and method == "POST" and not query and find("CONTENT_TYPE") == "application/json":
            authorization = find("HTTP_AUTHORIZATION")
            if authorization is not None and authorization.isascii():
                try:
                    known = verify_known(authorization.encode(), body)
                except Exception:  # noqa: BLE001  the slow path handles the same error
                    _log.exception("the fast path failed")
                    known = None
                if type(known) is HttpResponse:
                    text = known.body
                    size = len(text)
                    length_header = _LENGTHS[size] if size < _PREFORMATTED else (_LENGTH, str(size))
                    start_response("200 OK", [_TYPE, _STORE, (REQUEST_ID, known.request_id), length_header])
                    return [text]
        found = answer(method, f"{path}?{query}" if query else path, _headers(environ), body)
        start_response(status_line(found.status), list(found.all_headers().items()))
        return [] if method == "HEAD" else [found.body]

    return application


def status_line(status: int) -> str:
    found = _STATUS.get(status)
    if found is None:
        found = _STATUS[status] = f"{status} {HTTPStatus(status).phrase}"
    return found


def _headers(environ: WSGIEnvironment) -> Headers:
    headers = Headers()
    for name, value in environ.items():
        if name.startswith("HTTP_"):
            headers[_header_name(name)] = value
    if content_type := environ.get("CONTENT_TYPE"):
        headers["content-type"] = content_type
    return headers


@lru_cache(maxsize=1024)
def _header_name(name: str) -> str:
    return name[5:].lower().replace("_", "-")


def _body(environ: WSGIEnvironment) -> bytes | None:
    """Return the body; None, unread, when it is too large."""
    length: Any = environ.get("CONTENT_LENGTH") or "0"
    if not length.isdecimal() or len(length) > _MAX_DIGITS or (size := int(length)) > BODY_BYTES:
        return None
    body: bytes = environ["wsgi.input"].read(size) if size else b""
    return body
