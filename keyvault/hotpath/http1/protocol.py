"""One HTTP/1.1 connection on llhttp (httptools) and uvloop. Responses are sent in the order of the requests.

A read that holds exactly one plain request, the usual case for API clients, is parsed as a whole. Any other read is
parsed again, line by line, by a second parser without state from the first attempt. Line by line, the parser gets no
bytes of the next request before the current one is answered. So the start of each request is exactly known.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Final, NamedTuple, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from keyvault.domain.errors import ErrorCode
from keyvault.hotpath.http1.framing import (
    BODY_BYTES,
    CHUNKED_BYTES,
    HEAD_BYTES,
    HEADERS,
    TARGET_BYTES,
    Header,
    RequestLine,
    RequestRefusedError,
    head_too_large,
    judge_headers,
    malformed,
    refusal,
    target_too_long,
)
from keyvault.hotpath.messages.callback_future import CallbackFuture
from keyvault.hotpath.messages.responses import HttpResponse

Handler = Callable[[bytes, bytes, list[Header], bytes | None], HttpResponse | Awaitable[HttpResponse]]
"""Method, target, headers as sent (names in any case), body. The body is None when it was too large and not read."""


Awaited = CallbackFuture | asyncio.Future[HttpResponse]


class Shortcut(NamedTuple):
    """A direct call for POST requests with JSON to `target`, of whose headers only Authorization matters.

    Called with that header's value and the body, which saves processing the headers.
    """

    target: bytes
    answer: Callable[[bytes, bytes], HttpResponse | Awaitable[HttpResponse]]


_BATCH: Final = 100
_BATCH_BYTES: Final = 64 * 1024
"""Maximum responses to pipelined requests, in number and in bytes, before other connections get their turn."""

_BEGUN: Final = 0
_ENDED: Final = 1
_WHOLE: Final = [_BEGUN, _ENDED]
"""Parser events of a read that holds one request and no byte of another."""
_PARSER_ERRORS: Final = (HttpParserError, HttpParserUpgrade)
_UNREADABLE: Final = 2

_CLOSE: Final = b"connection: close\r\n"
_KEEP: Final = b"connection: keep-alive\r\n"
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Timeouts of a connection in seconds, and the maximum number of connections."""

    head_seconds: float = 10.0
    """Timeout for request line and headers, from their first byte."""
    body_seconds: float = 10.0
    idle_seconds: float = 75.0
    write_seconds: float = 10.0
    """Timeout for a client that does not read, until the write buffer has drained below its low-water mark."""
    answer_seconds: float = 30.0
    """Timeout for an awaited response; then the client gets 503. Longer than the handler's own timeouts."""
    linger_seconds: float = 2.0
    """Time in which a client may still send after its last response, before the reset (RFC 9112, 9.6)."""
    connections: int = 8192
    """Maximum number of connections of a process. Those above it get 503; above twice the number they are closed."""


class Shared:
    """State shared by the connections of a process. The server's timer sets `now` and `end`."""

    __slots__ = (
        "bounds",
        "connections",
        "end",
        "handle",
        "hosts",
        "known",
        "lines",
        "loop",
        "now",
        "orphans",
        "shapes",
        "shortcut",
        "shortcut_target",
    )

    def __init__(
        self, handle: Handler, bounds: Bounds, loop: asyncio.AbstractEventLoop, shortcut: Shortcut | None = None
    ) -> None:
        self.handle = handle
        self.shortcut_target = None if shortcut is None else shortcut.target
        self.shortcut = None if shortcut is None else shortcut.answer
        self.bounds = bounds
        self.loop = loop
        self.now = loop.time()
        self.end = b"\r\n"
        """The Date line (RFC 9110, 6.6.1) and the empty line after it."""
        self.connections: set[Connection] = set()
        self.orphans: set[Awaited] = set()
        """Pending responses of lost connections: the requests are completed all the same."""
        self.known = RequestLine()
        self.lines = self.known.lines
        self.hosts = self.known.hosts
        self.shapes = self.known.shapes


class _State(Enum):
    """Next element to read on a connection that is parsed line by line."""

    LINE = auto()
    HEAD = auto()
    BODY = auto()
    CHUNKS = auto()
    END = auto()
    """Nothing more is read: the last response was given."""


class Connection(asyncio.Protocol):
    """One client connection. Parser callbacks only collect; the collected data is judged between two parser calls."""

    __slots__ = (
        "_answers",
        "_awaited",
        "_body",
        "_body_bytes",
        "_events",
        "_feed",
        "_feed_whole",
        "_has_eof",
        "_head_bytes",
        "_headers",
        "_is_blocked",
        "_is_busy",
        "_is_closing",
        "_is_last",
        "_is_paused",
        "_is_ready",
        "_is_sending",
        "_is_whole",
        "_left",
        "_lingers",
        "_offset",
        "_parser",
        "_request",
        "_rest",
        "_sent_headers",
        "_shared",
        "_since",
        "_state",
        "_transport",
        "_whole",
        "_whole_headers",
        "on_body",
        "on_header",
        "on_message_begin",
        "on_message_complete",
    )

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._transport: asyncio.Transport | None = None
        self._since = shared.now
        self._state = _State.LINE
        self._rest, self._offset = b"", 0
        self._answers: list[bytes] = []
        self._awaited: Awaited | None = None
        self._request = (b"", b"", True)
        self._is_ready = True
        """Whether the next read may be a whole request: nothing is partly read, awaited or held back."""
        self._is_whole = False
        """Whether the awaited response is the only work: its request was read as a whole, and nothing arrived since.
        Never for HEAD."""
        self._is_busy = self._is_blocked = self._is_paused = self._has_eof = False
        self._is_last = self._is_closing = self._lingers = False
        self._is_sending = False
        """Whether part of the last response is still unsent."""
        self._headers: list[Header] = []
        self._sent_headers: list[Header] = []
        self._head_bytes = self._body_bytes = self._left = 0
        # Methods of lists and dicts: the parser calls them in half the time of a Python function.
        self._body: list[bytes] = []
        self._events: list[int] = []
        self._whole_headers: dict[bytes, bytes] = {}
        """Headers of a request that is read as a whole. A repeated header appears once."""
        self.on_body = self._body.append
        self.on_message_begin = partial(self._events.append, _BEGUN)
        self.on_message_complete = partial(self._events.append, _ENDED)
        self._parser: HttpRequestParser | None = None
        self._feed: Callable[[bytes], None]
        self._reset_whole_parser()

    def _reset_whole_parser(self) -> None:
        """Create the parser for whole requests, also after a read that was no whole request."""
        self._whole_headers.clear()
        self._body.clear()
        self._events.clear()
        self.on_header: Callable[[bytes, bytes], object] = self._whole_headers.setdefault
        self._whole = HttpRequestParser(self)
        self._feed_whole = self._whole.feed_data

    def _reset_parser(self) -> None:
        """Create the parser for single lines."""
        self._headers.clear()
        self._body.clear()
        self._events.clear()
        append = self._headers.append

        def on_header(name: bytes, value: bytes) -> None:
            # RFC 9112, 5.1: whitespace around a value is not part of it; the parser leaves it at the end.
            append((name, value.rstrip()))

        self.on_header = on_header
        self._parser = HttpRequestParser(self)
        self._feed = self._parser.feed_data

    # --- transport callbacks --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        shared = self._shared
        # uvloop's transports do not derive from asyncio's class.
        self._transport = cast(asyncio.Transport, transport)
        if len(shared.connections) >= 2 * shared.bounds.connections:
            self._transport.abort()
            return
        is_full = len(shared.connections) >= shared.bounds.connections
        shared.connections.add(self)
        if is_full:
            detail = "This verifier has reached its maximum number of connections. Try again."
            self._refuse(RequestRefusedError(503, ErrorCode.DEPENDENCY_UNAVAILABLE, detail))
            self._flush()

    def connection_lost(self, error: Exception | None) -> None:
        self._shared.connections.discard(self)
        if self._awaited is not None:
            self._shared.orphans.add(self._awaited)
        self._transport = None
        self._state, self._is_ready, self._is_whole = _State.END, False, False
        self._rest, self._offset = b"", 0
        # Break the reference cycle with the parsers, or each connection waits for the garbage collector.
        self._parser = None
        del self._whole, self._feed_whole, self.on_header

    def eof_received(self) -> bool:
        """Note that the client sends no more; requests received before are answered."""
        self._has_eof, self._is_whole = True, False
        return self._state is not _State.END and (self._is_busy or self._is_blocked)

    def pause_writing(self) -> None:
        """Stop reading from a client that does not read its responses, until it has caught up."""
        self._is_blocked, self._is_ready, self._is_whole = True, False, False
        self._since = self._shared.now
        self._pause_reading()

    def resume_writing(self) -> None:
        self._is_blocked = False
        self._since = self._shared.now
        self._resume()

    def data_received(self, data: bytes) -> None:
        if not self._is_ready:
            self._receive(data)
            return
        shared, headers, body = self._shared, self._whole_headers, self._body
        try:
            self._feed_whole(data)
        except _PARSER_ERRORS:
            self._events.append(_UNREADABLE)
        text = data[: data.find(b"\n")]
        line = shared.lines.get(text)
        if line is None and len(text) <= TARGET_BYTES:
            line = shared.known.read_line(text)
        names = tuple(headers)
        shape = shared.shapes.get(names) or shared.known.read_shape(names)
        end = data.find(b"\r\n\r\n", 0, HEAD_BYTES)
        if (
            line is None
            or not line[2]
            or self._events != _WHOLE
            or shape is None
            or headers[shape.host] not in shared.hosts
            or (shape.connection is not None and headers[shape.connection].lower() != b"keep-alive")
            or end < 0
            or data.count(b"\n", 0, end) != len(headers)  # as many lines as headers, with the request line
            or len(headers) > HEADERS
            or len(data) - end > BODY_BYTES
            or len(body) > 1
        ):
            self._reset_whole_parser()
            self._receive(data)
            return
        self._events.clear()
        method, target, _ = line
        content = body.pop() if body else b""
        try:
            if (
                target == shared.shortcut_target
                and shape.authorization is not None
                and shape.content_type is not None
                and headers[shape.content_type] == b"application/json"
                and method == b"POST"
            ):
                sent_token = headers[shape.authorization].rstrip()
                answer = shared.shortcut(sent_token, content)  # type: ignore[misc]  # set together with shortcut_target
            else:
                sent = [(name, value.rstrip()) for name, value in headers.items()]
                answer = shared.handle(method, target, sent, content)
            if isinstance(answer, HttpResponse):
                written = answer.on_the_wire(shared.end, has_body=method != b"HEAD")
        except Exception as error:  # noqa: BLE001  any error is logged and never shown to the client
            answer = _fail(error)
            written = answer.on_the_wire(shared.end, has_body=method != b"HEAD")
        headers.clear()
        self._since = shared.now
        if isinstance(answer, HttpResponse):
            self._transport.write(written)  # type: ignore[union-attr]  # set while data arrives
        else:
            self._request, self._is_last = line, False
            self._is_whole = method != b"HEAD"
            self._wait_for(answer)
            if self._answers:
                self._resume()

    # --- line by line ---------------------------------------------------------------------------------------

    def _receive(self, data: bytes) -> None:
        self._is_whole = False
        if self._state is _State.END:
            return
        if not self._rest and self._state is _State.LINE and not self._head_bytes:
            self._since = self._shared.now
        self._rest = self._rest + data if self._rest else data
        self._is_ready = False
        if self._parser is None:
            self._reset_parser()
        if self._is_busy or self._is_blocked:
            self._pause_reading()
        else:
            self._resume()

    def _resume(self) -> None:
        """Process the received data as far as possible, and send the responses."""
        is_over = False
        try:
            is_over = self._read()
        except RequestRefusedError as refused:
            self._refuse(refused)
        except _PARSER_ERRORS:
            self._refuse(malformed("The request is not valid HTTP/1.1."))
        if self._answers:
            self._flush()
        self._rest, self._offset = self._rest[self._offset :], 0
        if self._transport is None or self._state is _State.END or self._is_busy or self._is_blocked:
            return
        if is_over:
            self._is_busy = True
            self._shared.loop.call_soon(self._resume_turn)
            return
        self._is_ready = self._state is _State.LINE and not self._rest and not self._head_bytes and not self._is_closing
        if self._has_eof:
            self._end(lingers=False)
        elif self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()

    def _resume_turn(self) -> None:
        """Continue after the other connections have had their turn."""
        self._is_busy = False
        if self._transport is not None and self._state is not _State.END:
            self._resume()

    def _read(self) -> bool:
        """Process pieces until data is missing or the connection must wait. Returns True when its turn is over.

        Raises RequestRefusedError.
        """
        answers, written = len(self._answers), 0
        while not (self._is_busy or self._is_blocked or self._state is _State.END):
            if written >= _BATCH_BYTES or len(self._answers) >= _BATCH:
                return True
            if not self._read_piece():
                break
            if len(self._answers) > answers:
                answers = len(self._answers)
                written += len(self._answers[-1])
        return False

    def _read_piece(self) -> bool:
        """Process one line, or the available part of a body. Returns False when more data must arrive first."""
        rest, offset = self._rest, self._offset
        if offset == len(rest):
            return False
        if self._state is _State.BODY:
            end = min(len(rest), offset + self._left)
        else:
            end = rest.find(b"\n", offset) + 1
            if not end and self._state is not _State.CHUNKS:
                self._require_short(self._head_bytes + len(rest) - offset)
                return False
            end = end or len(rest)
        self._offset = end
        piece = rest[offset:end]
        if self._state is _State.LINE:
            self._read_line(piece)
        elif self._state is _State.HEAD:
            self._read_header(piece)
        else:
            self._read_body(piece)
        return True

    def _require_short(self, head_bytes: int) -> None:
        if head_bytes > HEAD_BYTES:
            if self._state is _State.LINE:
                raise target_too_long()
            raise head_too_large()

    def _read_line(self, line: bytes) -> None:
        if line in (b"\r\n", b"\n"):
            # RFC 9112, 2.2: some clients send an empty line after a body.
            self._head_bytes += len(line)
            self._require_short(self._head_bytes)
            return
        self._require_short(self._head_bytes + len(line))
        request = self._shared.known.read_line(line[:-1])
        if request is None:
            raise malformed("The request line is not valid HTTP/1.1.")
        if len(request[1]) > TARGET_BYTES:
            raise target_too_long()
        self._feed(line)
        self._request = request
        self._headers.clear()
        self._head_bytes += len(line)
        self._state = _State.HEAD

    def _read_header(self, line: bytes) -> None:
        self._head_bytes += len(line)
        self._require_short(self._head_bytes if len(self._headers) <= HEADERS else HEAD_BYTES + 1)
        if line == b"\r\n":
            self._end_head()
        else:
            self._feed(line)

    def _end_head(self) -> None:
        try:
            self._feed(b"\r\n")
        except HttpParserUpgrade:
            headers = self._headers[:]
            self._ignore_upgrade(headers)
        else:
            headers = self._headers[:]
        self._require_short(0 if len(headers) <= HEADERS else HEAD_BYTES + 1)
        self._sent_headers = headers
        self._headers.clear()  # for trailers, which are read and ignored
        framing = judge_headers(headers, self._shared.known, is_modern=self._request[2])
        self._is_last = framing.is_last
        self._since, self._body_bytes = self._shared.now, 0
        if self._events and self._events[-1] == _ENDED:
            self._respond(b"".join(self._body))
        elif framing.length is not None and framing.length > BODY_BYTES:
            self._respond(None)
        else:
            self._state = _State.CHUNKS if framing.length is None else _State.BODY
            self._left = CHUNKED_BYTES if framing.length is None else framing.length
            if framing.is_continued and self._offset == len(self._rest):
                self._answers.append(_CONTINUE)

    def _ignore_upgrade(self, headers: list[Header]) -> None:
        """Ignore an Upgrade header, as RFC 9110 (7.8) permits. The parser itself would stop.

        Java's own client requests h2c with its first request on every plain connection.
        """
        others = [b"%b: %b\r\n" % header for header in headers if header[0].lower() != b"upgrade"]
        self._reset_parser()
        method, target, is_modern = self._request
        self._feed(b"%b %b HTTP/1.%d\r\n" % (method, target, is_modern))
        self._feed(b"".join(others) + b"\r\n")

    def _read_body(self, piece: bytes) -> None:
        before = len(self._body)
        self._feed(piece)
        self._left -= len(piece)
        # A piece is within one line, so the parser adds at most one part of the body.
        if len(self._body) > before:
            self._body_bytes += len(self._body[-1])
        if len(self._headers) > HEADERS or self._body_bytes > BODY_BYTES:
            self._respond(None)
        elif self._events[-1] == _ENDED:
            self._respond(b"".join(self._body))
        elif self._left <= 0:
            self._respond(None)

    # --- responses ------------------------------------------------------------------------------------------

    def _respond(self, body: bytes | None) -> None:
        """Pass the request to the handler."""
        method, target, _ = self._request
        headers, self._sent_headers = self._sent_headers, []
        self._events.clear()
        self._body.clear()
        self._headers.clear()
        self._state, self._head_bytes = _State.LINE, 0
        if body is None:
            self._is_last = True
        try:
            answer = self._shared.handle(method, target, headers, body)
        except Exception as error:  # noqa: BLE001  any error is logged and never shown to the client
            answer = _fail(error)
        if isinstance(answer, HttpResponse):
            self._answer(answer)
        else:
            self._wait_for(answer)

    def _wait_for(self, answer: Awaitable[HttpResponse]) -> None:
        """Wait for a response. Requests behind it on this connection stay unread; other connections proceed."""
        awaited: Awaited
        if type(answer) is CallbackFuture:
            awaited = answer
        else:
            try:
                awaited = asyncio.ensure_future(answer, loop=self._shared.loop)
            except TypeError as error:
                self._answer(_fail(error))  # neither a response nor an awaitable
                return
        self._is_busy, self._is_ready = True, False
        self._awaited = awaited
        awaited.add_done_callback(self._on_response)

    def _on_response(self, awaited: Awaited) -> None:
        if self._transport is None:
            self._shared.orphans.discard(awaited)
        self._is_busy, self._awaited = False, None
        if type(awaited) is CallbackFuture and awaited.answer is not None:
            answer = awaited.answer
        elif awaited.cancelled() and self._state is _State.END:
            return  # canceled by `check`: it took too long
        else:
            try:
                answer = awaited.result()
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  logged and never shown to the client
                answer = _fail(error)
        if self._is_whole:
            self._is_whole = False
            try:
                written = answer.on_the_wire(self._shared.end)
            except Exception as error:  # noqa: BLE001  an invalid header
                written = _fail(error).on_the_wire(self._shared.end)
            self._since, self._is_ready = self._shared.now, True
            self._transport.write(written)  # type: ignore[union-attr]  # set, see `connection_lost`
        elif self._transport is not None and self._state is not _State.END:
            self._answer(answer)
            self._resume()

    def _answer(self, answer: HttpResponse) -> None:
        method, _, is_modern = self._request
        self._since = self._shared.now
        end = self._shared.end
        if self._is_last or self._is_closing:
            self._state = _State.END
            end = _CLOSE + end
        elif not is_modern:
            end = _KEEP + end
        has_body = method != b"HEAD"
        try:
            written = answer.on_the_wire(end, has_body=has_body)
        except Exception as error:  # noqa: BLE001  an invalid header
            written = _fail(error).on_the_wire(end, has_body=has_body)
        self._answers.append(written)

    def _refuse(self, refused: RequestRefusedError) -> None:
        """Send the connection's own response, and discard what the client still sends."""
        # In state LINE without a pending response, `_request` is the one before.
        is_line_read = self._is_busy or self._state is not _State.LINE
        answer = refused.answer(self._request[1] if is_line_read else b"")
        _log.info("refused", extra={"request_id": answer.request_id, "status": answer.status})
        self._request, self._is_last = (b"", b"", True), True
        self._answer(answer)

    def _flush(self) -> None:
        written = b"".join(self._answers)
        self._answers.clear()
        if self._transport is not None:
            self._transport.write(written)
            if self._state is _State.END:
                self._end(lingers=True)

    # --- closing --------------------------------------------------------------------------------------------

    def _end(self, *, lingers: bool) -> None:
        """Close once everything is written. Closing with unread data would reset the connection, response included."""
        self._state, self._is_ready, self._is_whole = _State.END, False, False
        self._lingers = self._is_sending = lingers and not self._has_eof
        self._since = self._shared.now
        transport = self._transport
        if transport is None:
            return
        if self._lingers:
            transport.write_eof()
            if self._is_paused:
                self._is_paused = False
                transport.resume_reading()
        else:
            transport.close()

    def _pause_reading(self) -> None:
        if not self._is_paused and self._transport is not None and self._state is not _State.END:
            self._is_paused = True
            self._transport.pause_reading()

    def close_after_response(self) -> None:
        """Close the connection after the next response."""
        self._is_closing, self._is_ready, self._is_whole = True, False, False

    def close_idle(self) -> None:
        if self._state is _State.LINE and not (self._rest or self._head_bytes or self._is_busy):
            self._end(lingers=False)

    @property
    def awaited(self) -> Awaited | None:
        """The pending response, if any."""
        return self._awaited

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def check(self, now: float) -> None:
        """Close the connection if a timeout has expired. The server's timer calls this several times a second."""
        bounds, waited = self._shared.bounds, now - self._since
        if self._state is _State.END:
            if self._is_sending and self._transport is not None and not self._transport.get_write_buffer_size():
                # The response is sent. Linger, so that the client can see the end of the stream.
                self._is_sending, self._since, waited = False, now, 0.0
            lingers = self._lingers and not self._is_sending
            if waited > (bounds.linger_seconds if lingers else bounds.write_seconds):
                self.abort()
        elif self._is_blocked:
            if waited > bounds.write_seconds:
                self.abort()
        elif self._is_busy:
            if waited > bounds.answer_seconds:
                self._refuse(
                    RequestRefusedError(503, ErrorCode.DEPENDENCY_UNAVAILABLE, "The request took too long. Try again.")
                )
                self._flush()
                if self._awaited is not None:
                    # The client already has a response: nothing more may be spent or recorded.
                    self._awaited.cancel()
        elif self._state in (_State.BODY, _State.CHUNKS):
            if waited > bounds.body_seconds:
                self.abort()
        elif self._state is _State.HEAD or self._rest or self._head_bytes:
            if waited > bounds.head_seconds:
                self.abort()
        elif waited > bounds.idle_seconds:
            self._end(lingers=False)


def _fail(error: BaseException) -> HttpResponse:
    answer = refusal(500, ErrorCode.INTERNAL_ERROR, "Something went wrong on our side.")
    _log.error("unhandled", exc_info=error, extra={"request_id": answer.request_id})
    return answer
