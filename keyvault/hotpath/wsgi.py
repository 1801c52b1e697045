"""The door of a WSGI server (PEP 3333): the engine in front of another application, in the same process.

application = Mounted(django, door.answer, is_welcome)
"""

import logging
from collections.abc import Callable, Iterable
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Final, Protocol
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from keyvault.hotpath.answers import JSON, Answer
from keyvault.hotpath.questions import ENVOY, VERIFY, Headers, is_ours
from keyvault.wire.headers import REQUEST_ID

BODY_BYTES: Final = 64 * 1024
RAW_PATH: Final = "keyvault.raw_path"
"""The path as it was sent, where the server before us tells it."""

_STATUS: Final = {200: "200 OK"}

_LENGTH: Final = "Content-Length"

_log = logging.getLogger(__name__)


class Door(Protocol):
    """See `blocking.BlockingDoor`."""

    def verify_known(self, authorization: str, body: bytes) -> Answer | None: ...

    def answer(self, method: str, target: str, headers: Headers, body: bytes | None) -> Answer: ...


class Mounted:
    """`is_welcome` says of a Host header whether the service plane is there; the application behind settles the rest.

    A WSGI server reads `X_Api_Key` as `X-Api-Key`, and undoes the path's escapes: whoever puts this straight behind one
    has its gateway drop headers with underscores. Our own bridge (`keyvault.project.bridge`) tells them apart.
    A server that forks makes this after it has forked: the engine's lock and request ids are of one process.
    """

    def __init__(self, behind: WSGIApplication, door: Door, is_welcome: Callable[[str], bool]) -> None:
        self._behind = behind
        self._door = door
        self._is_welcome = is_welcome

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get(RAW_PATH) or environ["PATH_INFO"]
        if not (is_ours(path) and is_led_here(path, environ.get("HTTP_HOST", ""), self._is_welcome)):
            return self._behind(environ, start_response)
        body = _body(environ)
        if path == VERIFY and body and environ.get("CONTENT_TYPE") == "application/json":
            known = self._known(environ, body)
            if known is not None:
                text = known.body
                start_response("200 OK", [*JSON, (REQUEST_ID, known.request_id), (_LENGTH, str(len(text)))])
                return [text]
        method, query = environ["REQUEST_METHOD"], environ.get("QUERY_STRING")
        answer = self._door.answer(method, f"{path}?{query}" if query else path, _headers(environ), body)
        start_response(status_line(answer.status), list(answer.all_headers().items()))
        return [] if method == "HEAD" else [answer.body]

    def _known(self, environ: WSGIEnvironment, body: bytes) -> Answer | None:
        authorization = environ.get("HTTP_AUTHORIZATION")
        if authorization is None or environ["REQUEST_METHOD"] != "POST" or environ.get("QUERY_STRING"):
            return None
        try:
            return self._door.verify_known(authorization, body)
        except Exception:  # noqa: BLE001  the whole way meets it again, and has an answer for it
            _log.exception("the fast way failed")
            return None


def is_led_here(path: str, host: str, is_welcome: Callable[[str], bool]) -> bool:
    """Envoy asks with its client's own Host, which is none that we answer to."""
    return path.startswith(ENVOY) or is_welcome(host)


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
    if not length.isdecimal() or (size := int(length)) > BODY_BYTES:
        return None
    body: bytes = environ["wsgi.input"].read(size) if size else b""
    return body
