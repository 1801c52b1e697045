"""Responses of the engine, and their HTTP/1.1 encoding."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from msgspec import Struct

JSON: Final = (("Content-Type", "application/json"), ("Cache-Control", "no-store"))
"""Headers of nearly every response, beside the request id and the length."""

_HEADS = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_JSON_HEAD = _HEADS[200] + b"content-type: application/json\r\ncache-control: no-store\r\nx-request-id: "
_LENGTHS = tuple(b"\r\ncontent-length: %d\r\n" % length for length in range(2048))
"""Formatted once: verdicts have a few hundred bytes, and formatting the number takes a tenth of the response time."""


class HttpResponse(Struct, gc=False):
    """Status, headers and body. `headers` omits X-Request-Id and Content-Length, which every response has."""

    status: int
    body: bytes
    request_id: str
    headers: tuple[tuple[str, str], ...] = JSON

    def all_headers(self) -> Mapping[str, str]:
        return {**dict(self.headers), "X-Request-Id": self.request_id, "Content-Length": str(len(self.body))}

    def on_the_wire(self, end: bytes = b"\r\n", *, has_body: bool = True) -> bytes:
        """Return the whole response, or its head alone if not `has_body` (HEAD).

        `end` completes the head: header lines of the connection, and the empty line. Raises ValueError for a header
        that contains a line break or a character beyond latin-1.
        """
        body = self.body
        if self.status == 200 and self.headers is JSON and has_body:
            length = len(body)
            line = _LENGTHS[length] if length < 2048 else b"\r\ncontent-length: %d\r\n" % length
            return b"".join((_JSON_HEAD, self.request_id.encode(), line, end, body))
        lines = "".join([f"{name.lower()}: {value}\r\n" for name, value in self.headers])
        if lines.count("\n") != len(self.headers) or lines.count("\r") != len(self.headers):
            raise ValueError("a response header contains a line break")
        head = f"{lines}x-request-id: {self.request_id}\r\ncontent-length: {len(body)}\r\n"
        return b"".join((_HEADS[self.status], head.encode("latin-1"), end, body if has_body else b""))
