"""Run a WSGI application behind ASGI: read each request as sent, and call the application in a few threads.

The environ of a WSGI server loses information: it has one name for `X-Api-Key` and `X_Api_Key`, a decoded path, and no
body of unannounced length. ASGI has the bytes, so the environ (PEP 3333) is built here:

- a header whose name holds an underscore is dropped; a repeated header is joined with a comma;
- `keyvault.raw_path` is the path as it was sent (see `keyvault.api.middleware`);
- a path and query above 8 KiB, and a head above 16 KiB, are refused as on the dedicated verifier;
- an unreadable Content-Type is omitted, and so are its parameters with a charset other than UTF-8;
- the body is read before a thread is taken, so that slow senders hold none. A body above the limit is not read: code
  that reads it gets RequestDataTooBig. Credentials are thus judged before the body, whatever its size.

The bridge bounds what one process accepts (see `Capacity`). The console has its own threads and queue, since sign-ins
compute password hashes for anonymous clients: the other planes keep their threads. So do probes. The bridge answers 503
with Retry-After when a queue is full, and 408 when a body arrives too slowly. It drops a queued request when its client
disconnects.

Granian (2.8) itself refuses a request line or header that is not HTTP (empty 400), a target above 64 KiB (empty 414),
and more than 100 headers or a head above 400 KiB (empty 431). It drops a fragment, and prefers Transfer-Encoding to
Content-Length (RFC 9112, 6.3).
"""

import io
import logging
import sys
from collections.abc import Awaitable, Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, NoReturn
from urllib.parse import unquote_to_bytes
from wsgiref.types import WSGIApplication

from django.conf import settings
from django.core.exceptions import RequestDataTooBig
from django.utils.http import parse_header_parameters

from keyvault.admin.framework.middleware import is_console_path
from keyvault.api.middleware import FEED_WAIT, RAW_PATH
from keyvault.domain.errors import ErrorCode, Fault
from keyvault.hotpath.http1.framing import (
    HEAD_BYTES,
    HEADERS,
    TARGET_BYTES,
    RequestRefusedError,
    head_too_large,
    refusal,
    target_too_long,
)
from keyvault.hotpath.http1.protocol import Bounds
from keyvault.hotpath.messages.pending_requests import VERIFY
from keyvault.hotpath.messages.responses import HttpResponse
from keyvault.project.deadline import BodyDeadline
from keyvault.project.engine_view import serves_host
from keyvault.project.feed_waiting import FeedWait, FeedWaiters
from keyvault.project.request_pool import ClientGoneError, QueueFullError, RequestPool
from keyvault.wire.headers import join_headers
from keyvault.wire.problems import PROBLEM_TYPES

AsgiScope = MutableMapping[str, Any]
AsgiReceive = Callable[[], Awaitable[MutableMapping[str, Any]]]
AsgiSend = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Capacity:
    """Limits of one process."""

    threads: int = 4
    """Threads for everything but the console. Few, since SQLite has one writer and Python one interpreter; each keeps
    its database connection."""
    queue: int = 128
    """Maximum number of requests that wait for one of these threads; their bodies take at most 8 MiB together."""
    console_threads: int = 2
    """Threads for the console. `services/sessions/low_priority` has as many for their password hashes."""
    console_queue: int = 16
    """Maximum number of requests that wait for the console. Short, because a sign-in takes long."""
    probe_queue: int = 16
    """Maximum number of probes that wait for their own thread. No other bound refuses them: an overloaded process must
    not look like a dead one."""
    requests: int = 512
    """Maximum number of requests in progress, with those whose body is still arriving. It equals the `--backpressure`
    that Granian is started with, and also holds without that option."""
    body_seconds: float = Bounds().body_seconds
    """Maximum time in which a body arrives, the same as on the dedicated verifier."""


PROBES = frozenset({"/healthz", "/readyz"})
"""Paths of the health checks of a load balancer or an orchestrator."""

CHANGES = b"/v1/changes"
"""Path of the change feed, whose requests may wait without a thread."""

_VERIFY = VERIFY.encode()

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WsgiResponse:
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class BodyUnreadableError(Exception):
    """The body ended early, or its framing is invalid."""


class TooLargeBody:
    """A body that was not read. Reading it raises RequestDataTooBig."""

    def read(self, size: int = -1) -> NoReturn:
        raise RequestDataTooBig("the body is larger than DATA_UPLOAD_MAX_MEMORY_SIZE")

    readline = read


Body = io.BytesIO | TooLargeBody


VerifyKnown = Callable[[bytes, bytes], object]
"""See `Engine.verify_known`."""


class Bridge:
    """One WSGI application in three fixed pools of threads that live as long as the process.

    `verify_known` runs first, in the loop: an answer from memory needs no thread.
    """

    def __init__(
        self,
        wsgi: WSGIApplication,
        verify_known: VerifyKnown | None = None,
        capacity: Capacity | None = None,
        feed: FeedWaiters | None = None,
    ) -> None:
        self._wsgi = wsgi
        self._verify_known = verify_known
        self._feed = feed
        self._capacity = capacity or Capacity()
        self._pool = RequestPool("request", self._capacity.threads, self._capacity.queue)
        self._console_pool = RequestPool("console", self._capacity.console_threads, self._capacity.console_queue)
        self._probe_pool = RequestPool("probe", 1, self._capacity.probe_queue)
        self._body_deadline = BodyDeadline(self._capacity.body_seconds)
        self._in_progress = 0

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        if scope["type"] == "lifespan":
            await self._serve_lifespan(receive, send)
        elif scope["type"] == "http":
            answer = await self._admit(scope, receive)
            if answer is not None:
                await send({"type": "http.response.start", "status": answer.status, "headers": answer.headers})
                await send({"type": "http.response.body", "body": answer.body})
        else:
            raise ValueError(f"unsupported ASGI scope: {scope['type']}")

    async def _serve_lifespan(self, receive: AsgiReceive, send: AsgiSend) -> None:
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        if self._feed is not None:
            self._feed.close()
        # Answer and record accepted requests before the process deregisters.
        await self._pool.close()
        await self._console_pool.close()
        await self._probe_pool.close()
        await send({"type": "lifespan.shutdown.complete"})

    async def _admit(self, scope: AsgiScope, receive: AsgiReceive) -> WsgiResponse | None:
        """Answer the request unless too many are in progress; None when the client is gone."""
        if self._in_progress >= self._capacity.requests and _path_info(scope) not in PROBES:
            return _refuse_as_busy(scope)
        self._in_progress += 1
        try:
            return await self._answer(scope, receive)
        except QueueFullError:
            return _refuse_as_busy(scope)
        except ClientGoneError:
            _log.info("dropped: the client disconnected while the request waited for a thread")
            return None
        finally:
            self._in_progress -= 1

    async def _answer(self, scope: AsgiScope, receive: AsgiReceive) -> WsgiResponse:
        """Raises QueueFullError, ClientGoneError."""
        raw_path, query = _target(scope)
        oversized = _find_oversized(scope)
        if oversized is not None:
            return _send_refusal(oversized.answer(raw_path))
        headers = join_headers(scope["headers"])
        try:
            body, length = await self._body_deadline.bound(_read_body(headers, receive))
        except BodyUnreadableError:
            detail = "The body is incomplete, or its framing is invalid. Send it again."
            return _refuse(ErrorCode.REQUEST_INVALID, detail, [Fault("", detail)], path=raw_path)
        except TimeoutError:
            return _refuse_slow_body(self._capacity.body_seconds, raw_path)
        if raw_path == _VERIFY and not query and scope["method"] == "POST" and isinstance(body, io.BytesIO):
            known = self._verify_from_memory(headers, body)
            if known is not None:
                return known
        environ = _environ(scope, headers, body, length)
        pool = self._pool_for(environ["PATH_INFO"])
        # An oversized body stays unread, so the client's disconnect, which comes after it, cannot be seen.
        watch = None if isinstance(body, TooLargeBody) else partial(_wait_for_disconnect, receive)
        if self._feed is not None and watch is not None and raw_path == CHANGES and scope["method"] == "GET":
            return await self._answer_waiting(self._feed, partial(_environ, scope, headers, body, length), watch)
        return await pool.run(partial(self._run, environ), watch)

    async def _answer_waiting(
        self, feed: FeedWaiters, make_environ: Callable[[], dict[str, Any]], watch: Callable[[], Awaitable[None]]
    ) -> WsgiResponse:
        """Answer a read of the change feed: immediately, or again after the next change. Each answer authenticates.

        Raises QueueFullError, ClientGoneError.
        """
        feed.start()
        version, began_at = feed.version, monotonic()
        wanted = FeedWait()
        answer = await self._pool.run(partial(self._run, {**make_environ(), FEED_WAIT: wanted}), watch)
        if wanted.wanted_seconds <= 0 or not await feed.wait(version, wanted.wanted_seconds, watch):
            return answer
        waited = FeedWait(waited_seconds=monotonic() - began_at)
        return await self._pool.run(partial(self._run, {**make_environ(), FEED_WAIT: waited}), watch)

    def _pool_for(self, path: str) -> RequestPool:
        if is_console_path(path):
            return self._console_pool
        return self._probe_pool if path in PROBES else self._pool

    def _verify_from_memory(self, headers: dict[str, str], body: io.BytesIO) -> WsgiResponse | None:
        authorization = headers.get("authorization")
        if self._verify_known is None or authorization is None or not authorization.isascii():
            return None
        if headers.get("content-type") != "application/json":
            return None
        if not serves_host(headers.get("host", "")):
            return None
        try:
            known = self._verify_known(authorization.encode(), body.getvalue())
        except Exception:  # noqa: BLE001  the slow path answers, if only with a problem document
            _log.exception("unhandled")
            return None
        if not isinstance(known, HttpResponse):
            return None
        return _encode(known)

    def _run(self, environ: dict[str, Any]) -> WsgiResponse:
        try:
            return _call(self._wsgi, environ)
        except Exception:  # noqa: BLE001  any error is logged and never shown to the client
            path = environ[RAW_PATH].encode("latin-1")
            answer = _refuse(ErrorCode.INTERNAL_ERROR, "Something went wrong on our side.", path=path)
            _log.exception("unhandled", extra={"request_id": dict(answer.headers)[b"x-request-id"].decode()})
            return answer


def _call(wsgi: WSGIApplication, environ: dict[str, Any]) -> WsgiResponse:
    started: list[tuple[int, list[tuple[bytes, bytes]]]] = []
    written: list[bytes] = []

    def start_response(status: str, headers: list[tuple[str, str]], exc_info: object = None) -> Callable[[bytes], Any]:
        encoded = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        started.append((int(status[:3]), encoded))
        return written.append

    response: Iterable[bytes] = wsgi(environ, start_response)
    try:
        written.extend(response)
    finally:
        if close := getattr(response, "close", None):
            close()  # Django's resets the thread's database connection
    code, encoded = started[-1]
    return WsgiResponse(code, encoded, b"".join(written))


async def _read_body(headers: dict[str, str], receive: AsgiReceive) -> tuple[Body, int]:
    """Return the body and its length. Raises BodyUnreadableError."""
    announced, encoding = headers.get("content-length"), headers.get("transfer-encoding")
    if announced is None and encoding is None:
        return io.BytesIO(), 0
    if encoding is not None and (announced is not None or encoding.lower() != "chunked"):
        raise BodyUnreadableError
    if announced is not None and not (announced.isascii() and announced.isdecimal() and len(announced) <= 20):
        raise BodyUnreadableError
    limit: int = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
    length = int(announced or 0)
    chunks: list[bytes] = []
    read, more = 0, length <= limit
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise BodyUnreadableError
        chunks.append(message.get("body", b""))
        read += len(chunks[-1])
        more = message.get("more_body", False) and read <= limit
    length = max(length, read)
    return (TooLargeBody() if length > limit else io.BytesIO(b"".join(chunks))), length


def _target(scope: AsgiScope) -> tuple[bytes, bytes]:
    """Return path and query as sent; Granian's `raw_path` contains the query too."""
    raw_path: bytes = scope["raw_path"]
    query: bytes = scope["query_string"]
    return raw_path.partition(b"?")[0], query


def _find_oversized(scope: AsgiScope) -> RequestRefusedError | None:
    """Return the refusal of a head above the dedicated verifier's bounds.

    It counts one space after the colon of each header: the server has removed others.
    """
    raw_path, query = _target(scope)
    target_bytes = len(raw_path) + len(query) + bool(query)
    if target_bytes > TARGET_BYTES:
        return target_too_long()
    headers: Sequence[tuple[bytes, bytes]] = scope["headers"]
    line_bytes = len(scope["method"]) + target_bytes + len("  HTTP/1.1\r\n")
    head_bytes = line_bytes + sum(len(name) + len(value) + len(": \r\n") for name, value in headers) + len("\r\n")
    return head_too_large() if head_bytes > HEAD_BYTES or len(headers) > HEADERS else None


def _path_info(scope: AsgiScope) -> str:
    """Return the percent-decoded path, as Django routes it."""
    return unquote_to_bytes(_target(scope)[0]).decode("latin-1")


def _environ(scope: AsgiScope, headers: dict[str, str], body: Body, length: int) -> dict[str, Any]:
    raw_path, query = _target(scope)
    server, client = scope.get("server") or ("", 0), scope.get("client") or ("", 0)
    environ = {
        "REQUEST_METHOD": scope["method"],
        "SCRIPT_NAME": "",
        "PATH_INFO": _path_info(scope),
        "QUERY_STRING": query.decode("latin-1"),
        "SERVER_NAME": server[0],
        "SERVER_PORT": str(server[1]),
        "SERVER_PROTOCOL": f"HTTP/{scope['http_version']}",
        "REMOTE_ADDR": client[0],
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": scope["scheme"],
        "wsgi.input": body,
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
        RAW_PATH: raw_path.decode("latin-1"),
    }
    for name, value in headers.items():
        if name not in {"content-type", "content-length", "transfer-encoding"}:
            environ[f"HTTP_{name.upper().replace('-', '_')}"] = value
    environ["CONTENT_TYPE"] = _content_type(headers.get("content-type", ""))
    environ["CONTENT_LENGTH"] = str(length)
    return environ


def _content_type(sent: str) -> str:
    """Return a Content-Type that Django can read.

    Django fails on some, and decodes the query in any charset that Python knows (`rot13`).
    """
    try:
        charset = parse_header_parameters(sent)[1].get("charset", "utf-8")
    except (LookupError, ValueError):
        return ""
    return sent if charset.lower() in {"utf-8", "utf8"} else sent.partition(";")[0]


async def _wait_for_disconnect(receive: AsgiReceive) -> None:
    """Return when the client has disconnected. The body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _refuse(code: ErrorCode, detail: str, faults: Sequence[Fault] = (), *, path: bytes) -> WsgiResponse:
    """Refuse without Django and without examining more of the request than its path."""
    return _send_refusal(refusal(PROBLEM_TYPES[code].status, code, detail, faults, target=path))


def _send_refusal(found: HttpResponse) -> WsgiResponse:
    _log.info("refused", extra={"request_id": found.request_id, "status": found.status})
    return _encode(found)


def _refuse_slow_body(seconds: float, path: bytes) -> WsgiResponse:
    """Answer 408 and close the connection: the rest of the body may still come."""
    detail = (
        f"The body did not arrive within {seconds:g} s. Nothing was done. Send the request again, with the whole body."
    )
    answer = _refuse(ErrorCode.REQUEST_TIMEOUT, detail, path=path)
    answer.headers.append((b"connection", b"close"))
    return answer


def _refuse_as_busy(scope: AsgiScope) -> WsgiResponse:
    """Answer 503: a page in the console, a problem document elsewhere."""
    busy = "The service has too many requests in progress. Nothing was done."
    detail = f"{busy} Wait for the time in Retry-After, then send it again."
    answer = _refuse(ErrorCode.DEPENDENCY_UNAVAILABLE, detail, path=_target(scope)[0])
    if not is_console_path(_path_info(scope)):
        return answer
    headers = {**dict(answer.headers), b"content-type": b"text/html; charset=utf-8"}
    page = _BUSY_PAGE % (busy.encode(), headers[b"x-request-id"])
    headers[b"content-length"] = b"%d" % len(page)
    return WsgiResponse(answer.status, list(headers.items()), page)


_BUSY_PAGE = b"""<!doctype html>
<html lang="en">
<title>Service busy</title>
<h1>Service busy</h1>
<p>%b Wait a few seconds, then load the page or send the form again.</p>
<p>Request id: %b</p>
</html>
"""


def _encode(found: HttpResponse) -> WsgiResponse:
    encoded = [(name.lower().encode(), value.encode()) for name, value in found.all_headers().items()]
    return WsgiResponse(found.status, encoded, found.body)
