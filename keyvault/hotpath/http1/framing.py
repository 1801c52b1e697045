"""Checks of a request head in addition to the parser's: request line, Host and body framing.

Stricter than llhttp alone, which accepts RTSP, HTTP/0.9 and 2.0, two spaces in a request line, `Transfer-Encoding:
gzip, chunked`, and no Host or two of them (RFC 9112, 3, 3.2 and 6).
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from keyvault.domain.errors import ErrorCode, Fault
from keyvault.hotpath.messages.pending_requests import dialect_of
from keyvault.hotpath.messages.rendering import nginx_answer
from keyvault.hotpath.messages.responses import HttpResponse
from keyvault.wire.gateways import Dialect
from keyvault.wire.headers import mint_request_id
from keyvault.wire.problems import CONTENT_TYPE, HEAD_TOO_LARGE, problem

Header = tuple[bytes, bytes]
StartLine = tuple[bytes, bytes, bool]
"""Method, target in origin form, and whether it is HTTP/1.1 (else 1.0)."""

TARGET_BYTES: Final = 8192
"""Maximum length of path and query, in bytes. RFC 9112 (3) recommends accepting request lines of 8,000."""
HEAD_BYTES: Final = 16 * 1024
"""Maximum length of request line and headers, with their line ends and the empty line, in bytes."""
HEADERS: Final = 100
BODY_BYTES: Final = 64 * 1024
CHUNKED_BYTES: Final = 8 * BODY_BYTES
"""Maximum size of a chunked body as sent, in bytes, with chunk sizes, extensions and trailers."""

_MAX_CACHED: Final = 512
_MAX_CACHED_NAMES: Final = 32
_MAX_CACHED_NAME_BYTES: Final = 40
_MAX_CACHED_BYTES: Final = 74
"""Maximum length of a cached request line or host, in bytes: less than the shortest key, so that neither contains one.
A header name with a key is longer than its 40 bytes."""

_LINE = re.compile(rb"([A-Z-]{1,16}) ([!-~]+) HTTP/1\.([01])\r")
_UNSAFE = re.compile(rb"[#<>`]|\?.*\"")
"""Characters that RFC 3986 (2) excludes from a target and that hyper, which parses for the ordinary server, rejects.

hyper accepts the other ASCII characters that RFC 3986 excludes. This server accepts them as well, so that both answer
alike. The parser rejects non-ASCII characters.
"""
_ABSOLUTE = re.compile(rb"https?://([^/?@]+)(/[^?]*)?(\?.*)?", re.IGNORECASE)
_HOST = re.compile(rb"(?:[A-Za-z0-9._~-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?")
"""Narrower than RFC 3986 (3.2.2), which allows `%` and `!` in names. No client uses them."""


class RequestRefusedError(Exception):
    """A request that the connection itself refuses."""

    def __init__(self, status: int, code: ErrorCode, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail

    def answer(self, target: bytes) -> HttpResponse:
        """Return the response. `target`: of the refused request; empty when its request line was not read."""
        faults = [Fault("", self.detail)] if self.code is ErrorCode.REQUEST_INVALID else []
        return refusal(self.status, self.code, self.detail, faults, target=target)


def refusal(
    status: int, code: ErrorCode, detail: str, faults: Sequence[Fault] = (), *, target: bytes = b""
) -> HttpResponse:
    """Return a problem document, with a status for nginx if the request was for its dialect's path."""
    request_id = mint_request_id(secrets.token_bytes)
    found = problem(code, detail, request_id, faults=faults)
    headers = (("Content-Type", CONTENT_TYPE), *found.headers.items())
    answer = HttpResponse(status, json.dumps({**found.body, "status": status}).encode(), request_id, headers)
    return nginx_answer(answer, code) if dialect_of(target.decode("latin-1")) is Dialect.NGINX else answer


def target_too_long() -> RequestRefusedError:
    return RequestRefusedError(414, ErrorCode.URI_TOO_LONG, "Path and query together are longer than 8 KiB.")


def head_too_large() -> RequestRefusedError:
    detail = "Request line and headers are longer than 16 KiB, or there are more than 100 headers."
    return RequestRefusedError(HEAD_TOO_LARGE, ErrorCode.REQUEST_INVALID, detail)


def malformed(detail: str) -> RequestRefusedError:
    return RequestRefusedError(400, ErrorCode.REQUEST_INVALID, detail)


class Shape:
    """Names of the headers that decide how a request is read, spelled as sent."""

    __slots__ = ("authorization", "connection", "content_type", "host")

    def __init__(self, names: Mapping[bytes, bytes]) -> None:
        """Read the names as sent, by their lower case. Raises KeyError without a Host."""
        self.host = names[b"host"]
        self.connection = names.get(b"connection")
        self.authorization = names.get(b"authorization")
        self.content_type = names.get(b"content-type")


class RequestLine:
    """Cache of valid request lines, hosts and header names. Clients repeat a few of them."""

    __slots__ = ("hosts", "lines", "shapes")

    def __init__(self) -> None:
        self.lines: dict[bytes, StartLine] = {}
        self.hosts: set[bytes] = set()
        self.shapes: dict[tuple[bytes, ...], Shape] = {}

    def read_shape(self, names: tuple[bytes, ...]) -> Shape | None:
        """Return the shape of these header names; None when the request must be parsed line by line."""
        lower = {name.lower(): name for name in names}
        if len(lower) != len(names) or b"host" not in lower or b"transfer-encoding" in lower:
            return None
        shape = Shape(lower)
        if len(names) <= _MAX_CACHED_NAMES and max(map(len, names)) <= _MAX_CACHED_NAME_BYTES:
            if len(self.shapes) >= _MAX_CACHED:
                self.shapes.clear()
            self.shapes[names] = shape
        return shape

    def read_line(self, text: bytes) -> StartLine | None:
        """Parse a request line, given without its LF; None when it is invalid."""
        line = self.lines.get(text)
        if line is None:
            line = _read_line(text)
            if line is not None and len(text) <= _MAX_CACHED_BYTES:
                if len(self.lines) >= _MAX_CACHED:
                    self.lines.clear()
                self.lines[text] = line
        return line

    def is_host(self, value: bytes) -> bool:
        if value in self.hosts:
            return True
        if _HOST.fullmatch(value) is None:
            return False
        if len(value) <= _MAX_CACHED_BYTES:
            if len(self.hosts) >= _MAX_CACHED:
                self.hosts.clear()
            self.hosts.add(value)
        return True


def _read_line(text: bytes) -> StartLine | None:
    match = _LINE.fullmatch(text)
    if match is None or _UNSAFE.search(match[2]):
        return None
    method, target, minor = match.groups()
    if not target.startswith(b"/") and not (target == b"*" and method == b"OPTIONS"):
        # RFC 9112, 3.2.2: a server accepts the absolute form too.
        absolute = _ABSOLUTE.fullmatch(target)
        if absolute is None or _HOST.fullmatch(absolute[1]) is None:
            return None
        target = (absolute[2] or b"/") + (absolute[3] or b"")
    return (method, target, minor == b"1") if method != b"CONNECT" else None


@dataclass(frozen=True, slots=True)
class Framing:
    """Framing of a body.

    `length` is None for a chunked body. `is_continued`: the client waits for 100 Continue (RFC 9110, 10.1.1).
    `is_last`: the connection ends after the response (RFC 9112, 9.3).
    """

    length: int | None
    is_continued: bool
    is_last: bool


def judge_headers(headers: Sequence[Header], known: RequestLine, *, is_modern: bool) -> Framing:
    """Check a head that the parser has accepted. Raises RequestRefusedError."""
    hosts, length, is_chunked, is_continued = 0, 0, False, False
    connection = set()
    for name, value in headers:
        match name.lower():
            case b"host":
                hosts += 1
                if not known.is_host(value):
                    raise malformed("Host is not a valid host name.")
            case b"connection":
                connection |= {option.strip(b" \t") for option in value.lower().split(b",")}
            case b"content-length":
                length = int(value)
            case b"transfer-encoding":
                if not is_modern or value.lower() != b"chunked":
                    raise malformed("Transfer-Encoding must be chunked, in HTTP/1.1 only.")
                is_chunked = True
            case b"expect":
                is_continued = is_modern and value.lower() == b"100-continue"
    if hosts > 1 or (is_modern and not hosts):
        raise malformed("Send exactly one Host header.")
    is_last = b"close" in connection or not (is_modern or b"keep-alive" in connection)
    return Framing(None if is_chunked else length, is_continued, is_last)
