"""An HTTP server on a loopback port that answers as a test sets it, even as no server should."""

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

Handler = Callable[[socket.socket, "ReceivedRequest"], None]
"""Answers on the connection, which is closed after it."""


@dataclass(frozen=True)
class ReceivedRequest:
    """`headers`: names in lower case, repeated ones joined with a comma."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


class ScriptedServer:
    """Answers with the replies, one after the other, and records what it gets.

    A reply is a Handler, or a mapping as in `clients/conformance.json`.
    """

    def __init__(self, host: str = "127.0.0.1", other: str = "") -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://{host}:{self._listener.getsockname()[1]}"
        self._other = other
        self._replies: list[Handler | Mapping[str, Any]] = []
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self.received: list[ReceivedRequest] = []
        self.connections = 0
        self.stopped = threading.Event()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def begin(self, *replies: Handler | Mapping[str, Any]) -> None:
        """Set the next replies, and forget what was received."""
        with self._lock:
            self._replies, self.received = list(replies), []

    def refuse_connections(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def close(self) -> None:
        self.stopped.set()
        with suppress(OSError):
            self.refuse_connections()
        with self._lock:
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self.connections += 1
                self._open.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, suppress(OSError), connection.makefile("rb") as reader:
                while (request := _read_request(reader)) is not None:
                    with self._lock:
                        self.received.append(request)
                        reply = self._replies.pop(0) if self._replies else {"status": 599, "headers": {}}
                    if callable(reply):
                        reply(connection, request)
                        return
                    if not self._answer(connection, reply):
                        return
        finally:
            with self._lock:
                self._open.discard(connection)

    def _answer(self, connection: socket.socket, reply: Mapping[str, Any]) -> bool:
        """Send a reply. Returns whether the connection stays open."""
        fault = reply.get("fault")
        if fault == "cut":
            return False
        if fault == "silent":
            self.stopped.wait()
            return False
        head, body = render(reply, {"{self}": self.url, "{other}": self._other})
        if fault is None:
            connection.sendall(head + body)
            return True
        connection.sendall(head + body[: len(body) // 2])
        if fault == "slow_body":
            self.stopped.wait()
        return False


def render(reply: Mapping[str, Any], names: Mapping[str, str]) -> tuple[bytes, bytes]:
    """Return the head and the body of a reply."""
    text = json.dumps(reply["body"]) if "body" in reply else reply.get("text", "")
    headers = {"Content-Type": "application/json"} | dict(reply.get("headers", {}))
    lines = [f"HTTP/1.1 {reply['status']} Reply"]
    for name, value in headers.items():
        for placeholder, address in names.items():
            value = value.replace(placeholder, address)
        lines.append(f"{name}: {value}")
    body = b"" if reply["status"] == 204 else text.encode()
    if reply["status"] != 204:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode(), body


def _read_request(reader: Any) -> ReceivedRequest | None:
    line = reader.readline().decode("latin-1").split()
    if len(line) != 3:
        return None
    headers: dict[str, str] = {}
    while (header := reader.readline().decode("latin-1").strip()) != "":
        name, _, value = header.partition(":")
        name = name.lower()
        headers[name] = f"{headers[name]},{value.strip()}" if name in headers else value.strip()
    body = reader.read(int(headers.get("content-length", "0")))
    return ReceivedRequest(line[0], line[1], headers, body)


@contextmanager
def scripted_server(*replies: Handler | Mapping[str, Any], host: str = "127.0.0.1", other: str = "") -> Iterator[Any]:
    server = ScriptedServer(host, other)
    server.begin(*replies)
    try:
        yield server
    finally:
        server.close()
