"""The HTTP server in a thread of the test, and a client that writes given bytes."""

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

import uvloop

from keyvault.hotpath.http1.framing import Header
from keyvault.hotpath.http1.protocol import Bounds
from keyvault.hotpath.http1.server import Http1Server
from keyvault.hotpath.messages.responses import HttpResponse

SECONDS = 20
"""Timeout of every wait, in seconds; a longer wait is a hang."""

REQUEST_ID = "0" * 22


@dataclass
class Asked:
    method: bytes
    target: bytes
    headers: list[Header]
    body: bytes | None


def plain(request: Asked) -> HttpResponse:
    return HttpResponse(200, b"%b %b %b" % (request.method, request.target, request.body or b""), REQUEST_ID)


@dataclass
class Served:
    """`asked` is what the handler was called with, `misses` the answers that it owes."""

    port: int
    loop: asyncio.AbstractEventLoop
    server: Http1Server
    asked: list[Asked] = field(default_factory=list)
    misses: list["asyncio.Future[HttpResponse]"] = field(default_factory=list)
    has_asked: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def connect(self) -> "Client":
        return Client(socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS))

    def wait_until_asked(self) -> None:
        assert self.has_asked.acquire(timeout=SECONDS)

    def settle(self, miss: int, answer: HttpResponse | BaseException) -> None:
        future = self.misses[miss]
        if isinstance(answer, BaseException):
            self.loop.call_soon_threadsafe(future.set_exception, answer)
        else:
            self.loop.call_soon_threadsafe(future.set_result, answer)

    def stop(self, drain_seconds: float, idle_seconds: float) -> "Future[None]":
        return asyncio.run_coroutine_threadsafe(self.server.stop(drain_seconds, idle_seconds), self.loop)


class Client:
    def __init__(self, wire: socket.socket) -> None:
        self.wire = wire
        self._file = wire.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        self.wire.close()

    def send(self, *parts: bytes) -> None:
        for part in parts:
            self.wire.sendall(part)

    def read_answer(self, *, has_body: bool = True) -> tuple[int, dict[str, str], bytes]:
        """Return the status, the headers by lower-case name, and the body of the next answer."""
        version, status, _ = self._file.readline().split(b" ", 2)
        assert version == b"HTTP/1.1"
        headers = {}
        while (line := self._file.readline()) != b"\r\n":
            name, _, value = line.decode("latin-1").partition(": ")
            assert name.lower() not in headers
            headers[name.lower()] = value.removesuffix("\r\n")
        length = int(headers.get("content-length", 0)) if has_body else 0
        return int(status), headers, self._file.read(length)

    def read_all(self) -> bytes:
        """Read until the server closes the connection."""
        return self._file.read()

    def ask(self, *parts: bytes) -> bytes:
        """Return all answers of a connection that ends after them."""
        with self:
            self.send(*parts)
            return self.read_all()


@contextmanager
def serving(
    respond: Callable[[Asked], HttpResponse] = plain, *, bounds: Bounds | None = None, misses: tuple[bytes, ...] = ()
) -> Iterator[Served]:
    """Requests for a target of `misses` are answered when the test settles them."""
    listening = socket.create_server(("127.0.0.1", 0))
    loop = uvloop.new_event_loop()

    def handle(
        method: bytes, target: bytes, headers: list[Header], body: bytes | None
    ) -> HttpResponse | Awaitable[HttpResponse]:
        request = Asked(method, target, headers, body)
        served.asked.append(request)
        try:
            if target in misses:
                served.misses.append(loop.create_future())
                return served.misses[-1]
            return respond(request)
        finally:
            served.has_asked.release()

    served = Served(listening.getsockname()[1], loop, Http1Server(handle, bounds))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(served.server.start([listening]), loop).result(SECONDS)
        try:
            yield served
        finally:
            # After a failed test too: a loop with open sockets does not end.
            served.stop(0, 0).result(SECONDS)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(SECONDS)
        loop.close()
