"""The door of a WSGI server (PEP 3333): the engine in front of another application, in the same process.

application = mounted(django, door, is_welcome)
"""

import logging
from collections.abc import Callable, Iterable
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Final, Protocol
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from keyvault.hotpath.messages.questions import ENVOY, VERIFY, Headers, is_ours
from keyvault.hotpath.messages.responses import JSON, HttpResponse
from keyvault.wire.headers import REQUEST_ID

BODY_BYTES: Final = 64 * 1024
RAW_PATH: Final = "keyvault.raw_path"
"""The path as it was sent, where the server before us tells it."""

_FEW_DIGITS: Final = 5
"""A length with fewer is below BODY_BYTES."""

_MOST_DIGITS: Final = 20
"""Python refuses to read a number of thousands."""

_STATUS: Final = {200: "200 OK"}

_LENGTH: Final = "Content-Length"
_TYPE, _STORE = JSON
_WRITTEN: Final = 2048
_LENGTHS: Final = tuple([(_LENGTH, str(length)) for length in range(_WRITTEN)])
"""Written once, as in `answers`."""

_log = logging.getLogger(__name__)


class Frontend(Protocol):
    """See `blocking.ThreadedFrontend`."""

    @property
    def verify_known(self) -> Callable[[bytes, bytes], object]: ...

    def answer(self, method: str, target: str, headers: Headers, body: bytes | None) -> HttpResponse: ...


def mounted(behind: WSGIApplication, door: Frontend, is_welcome: Callable[[str], bool]) -> WSGIApplication:
    """`is_welcome` says of a Host header whether the service plane is there; the application behind settles the rest.

    A WSGI server reads `X_Api_Key` as `X-Api-Key`, and undoes the path's escapes: whoever puts this straight behind one
    has its gateway drop headers with underscores. Our own bridge (`keyvault.project.asgi_wsgi_bridge`) tells them
    apart. A server that forks makes this after it has forked: the engine's lock and request ids are of one process.
    """
    # A function and no object that can be called, which takes longer to call than what it does here by itself.
    verify_known, answer = door.verify_known, door.answer

    def application(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        find = environ.get
        path = find(RAW_PATH) or environ["PATH_INFO"]
        if path == VERIFY:
            is_led_here = is_welcome(find("HTTP_HOST", ""))
        else:  # Envoy asks with its client's own Host, which is none that we answer to.
            is_led_here = is_ours(path) and (path.startswith(ENVOY) or is_welcome(find("HTTP_HOST", "")))
        if not is_led_here:
            return behind(environ, start_response)
        length = find("CONTENT_LENGTH", "")
        if (
            len(length) < _FEW_DIGITS
            and length.isdecimal()
            and find("wsgi.input_terminated")
            and "HTTP_TRANSFER_ENCODING" not in environ  # else there may be more than the length says
        ):
            # All there is: Granian takes twice as long to give as many bytes as it is told.
            body = environ["wsgi.input"].read()
        else:
            body = _body(environ)
        method, query = environ["REQUEST_METHOD"], find("QUERY_STRING")
        if path == VERIFY and body and method == "POST" and not query and find("CONTENT_TYPE") == "application/json":
            authorization = find("HTTP_AUTHORIZATION")
            if authorization is not None and authorization.isascii():
                try:
                    known = verify_known(authorization.encode(), body)
                except Exception:  # noqa: BLE001  the whole way meets it again, and has an answer for it
                    _log.exception("the fast way failed")
                    known = None
                if type(known) is HttpResponse:
                    text = known.body
                    size = len(text)
                    length_header = _LENGTHS[size] if size < _WRITTEN else (_LENGTH, str(size))
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
            headers[_names(name)] = value
    if content_type := environ.get("CONTENT_TYPE"):
        headers["content-type"] = content_type
    return headers


@lru_cache(maxsize=1024)
def _names(name: str) -> str:
    return name[5:].lower().replace("_", "-")


def _body(environ: WSGIEnvironment) -> bytes | None:
    """None for one that is too large; it is not read."""
    length: Any = environ.get("CONTENT_LENGTH") or "0"
    if not length.isdecimal() or len(length) > _MOST_DIGITS or (size := int(length)) > BODY_BYTES:
        return None
    body: bytes = environ["wsgi.input"].read(size) if size else b""
    return body
