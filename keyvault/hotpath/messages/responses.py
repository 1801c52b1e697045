"""What the engine answers, and the bytes that carry it over HTTP/1.1."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from msgspec import Struct

JSON: Final = (("Content-Type", "application/json"), ("Cache-Control", "no-store"))
"""The headers of nearly every answer, beside the request's id and the length."""

_HEADS = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_JSON_HEAD = _HEADS[200] + b"content-type: application/json\r\ncache-control: no-store\r\nx-request-id: "
_LENGTHS = tuple(b"\r\ncontent-length: %d\r\n" % length for length in range(2048))
"""Written once: a verdict is a few hundred bytes, and formatting a number is a tenth of the whole answer."""


class HttpResponse(Struct, gc=False):
    """Status, headers and body. `headers` lacks X-Request-Id and Content-Length, which every answer has."""

    status: int
    body: bytes
    request_id: str
    headers: tuple[tuple[str, str], ...] = JSON

    def all_headers(self) -> Mapping[str, str]:
        return {**dict(self.headers), "X-Request-Id": self.request_id, "Content-Length": str(len(self.body))}

    def on_the_wire(self, end: bytes = b"\r\n", *, has_body: bool = True) -> bytes:
        """The whole response; without `has_body` (HEAD) its head alone.

        `end` is the end of the head: what the connection adds to it, as lines, and the empty line. Raises ValueError
        for a header that would be read as two, or that has a character beyond latin-1.
        """
        body = self.body
        if self.status == 200 and self.headers is JSON and has_body:
            length = len(body)
            line = _LENGTHS[length] if length < 2048 else b"\r\ncontent-length: %d\r\n" % length
            return b"".join((_JSON_HEAD, self.request_id.encode(), line, end, body))
        lines = "".join([f"{name.lower()}: {value}\r\n" for name, value in self.headers])
        if lines.count("\n") != len(self.headers) or lines.count("\r") != len(self.headers):
            raise ValueError("a header of the answer holds a line break")
        head = f"{lines}x-request-id: {self.request_id}\r\ncontent-length: {len(body)}\r\n"
        return b"".join((_HEADS[self.status], head.encode("latin-1"), end, body if has_body else b""))
