"""Send requests to several verifiers at a steady rate, and record every response for the key that is revoked.

One thread with raw sockets. Half of the requests are for that key, the others are load.
"""

import json
import select
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .machine import stolen_seconds
from .pacer import is_whole

TIMEOUT_SECONDS = 10.0
"""Time after which a verifier that still allows the key has missed the change, in seconds."""

WINDOW_NS = 100_000_000
"""Period of each revocation in which stolen time is measured, in nanoseconds.

It is constant, so that slow revocations are not excluded more often.
"""

ALLOWED_BEFORE_NS = 3_000_000
"""Time for which every verifier allows the key before it is revoked, in nanoseconds."""


@dataclass(frozen=True, slots=True)
class WatchedResponse:
    """A response for the watched key; times in nanoseconds of the monotonic clock."""

    verifier: int
    sent_ns: int
    received_ns: int
    is_allowed: bool


@dataclass(frozen=True, slots=True)
class WatchedRevocation:
    """One revocation.

    Args:
        commit_ns: Time just before COMMIT.
        returned_ns: Time at which the service returned.
        answers: All responses for the key, before and after.
        confirmed_ms: Time from the commit to each verifier's receipt, by which it has evicted the key.
        stolen_ms: Time that the host stole from the machine in the WINDOW_NS from before the commit.
    """

    commit_ns: int
    returned_ns: int
    answers: Sequence[WatchedResponse]
    confirmed_ms: Sequence[float]
    stolen_ms: float = 0.0

    def evicted_after_ms(self, verifiers: int) -> float | None:
        """Return the time from COMMIT to the last verifier's receipt; None without all receipts and denials."""
        if len(self.confirmed_ms) != verifiers or self.refused_after_ms(verifiers) is None:
            return None
        return max(self.confirmed_ms)

    def refused_after_ms(self, verifiers: int) -> float | None:
        """Return the time from COMMIT to the last verifier's first denial; None if one never denied the key.

        It includes the wait for the prober's next request, and the duration of that request.
        """
        first: dict[int, int] = {}
        for each in self.answers:
            if not each.is_allowed:
                first[each.verifier] = min(each.received_ns, first.get(each.verifier, each.received_ns))
        return (max(first.values()) - self.commit_ns) / 1e6 if len(first) == verifiers else None

    def sent_after_receipts(self) -> list[WatchedResponse]:
        """Return the responses to requests sent after the revoke call had returned and after the last receipt."""
        last_ns = self.commit_ns + 1e6 * max(self.confirmed_ms, default=TIMEOUT_SECONDS * 1000)
        return [each for each in self.sent_after() if each.sent_ns > last_ns]

    def sent_after(self) -> list[WatchedResponse]:
        """Return the responses to requests sent after the revoke call had returned."""
        return [each for each in self.answers if each.sent_ns > self.returned_ns]


class _ProbeConnection:
    """One connection to one verifier."""

    __slots__ = ("is_busy", "is_watching", "read", "sent_ns", "socket", "verifier")

    def __init__(self, verifier: int, port: int) -> None:
        self.verifier = verifier
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.is_busy = self.is_watching = False
        self.read, self.sent_ns = b"", 0


class Prober:
    """One run. `load`: requests for other keys. `writer`: the process of `writer.py`."""

    def __init__(
        self, ports: list[int], load: list[bytes], rate: float, connections: int, writer: "subprocess.Popen[bytes]"
    ) -> None:
        self.verifiers = len(ports)
        self._connections = [
            _ProbeConnection(number, port) for _ in range(connections) for number, port in enumerate(ports)
        ]
        self._load, self._writer, self._gap_ns = load, writer, 1e9 / rate
        self._by_descriptor = {each.socket.fileno(): each for each in self._connections}
        self._turn, self._due = 0, 0.0
        self.sent = 0
        assert writer.stdout
        self._poll = select.epoll()
        for descriptor in (*self._by_descriptor, writer.stdout.fileno()):
            self._poll.register(descriptor, select.EPOLLIN)

    def close(self) -> None:
        for each in self._connections:
            each.socket.close()
        self._poll.close()

    def watch(self, key_id: str, request: bytes, after: int) -> WatchedRevocation:
        """Have the key revoked, and record the responses for it.

        It ends when every verifier has denied the key, and `after` requests sent after the revoke call had returned
        have a response; at the latest after TIMEOUT_SECONDS. Raises RuntimeError if the key was denied before.
        """
        answers: list[WatchedResponse] = []
        reply: dict[str, Any] | None = None
        revoked_at, began = 0, time.monotonic_ns()
        allowing: set[int] = set()
        refused: set[int] = set()
        late = 0
        stolen_before, stolen = 0.0, -1.0
        while reply is None or late < after or len(refused) < self.verifiers:
            self._send_due(request)
            for descriptor, _ in self._arrived():
                connection = self._by_descriptor.get(descriptor)
                if connection is None:
                    reply = self._read_writer()
                elif (answered := self._receive(connection)) is not None:
                    answers.append(answered)
                    (allowing if answered.is_allowed else refused).add(answered.verifier)
                    late += reply is not None and answered.sent_ns > reply["returned_ns"]
            now = time.monotonic_ns()
            if stolen < 0 and revoked_at and now - revoked_at > WINDOW_NS:
                stolen = stolen_seconds() - stolen_before
            if not revoked_at and refused:
                raise RuntimeError("A key was denied before it was revoked.")
            if not revoked_at and len(allowing) == self.verifiers and now - began > ALLOWED_BEFORE_NS:
                revoked_at, stolen_before = now, stolen_seconds()
                self._send_to_writer(key_id)
            if now - began > TIMEOUT_SECONDS * 1e9:
                break
        if reply is None:
            raise RuntimeError("The writer did not revoke the key in time, or no verifier responded.")
        if stolen < 0:
            stolen = stolen_seconds() - stolen_before
        # Requests in progress are for this key, too.
        answers += self._drain()
        self._send_to_writer(f"receipt {reply['sequence']}")
        confirmed = self._read_writer()["confirmed_ns"]
        confirmed_ms = [(each - reply["commit_day_ns"]) / 1e6 for each in confirmed]
        return WatchedRevocation(reply["commit_ns"], reply["returned_ns"], answers, confirmed_ms, 1000 * stolen)

    def _arrived(self) -> list[tuple[int, int]]:
        """Sleep until a response arrives or the next request is due; return what is readable.

        Spinning would delay the database, which shares the core. Timeouts of epoll are whole milliseconds.
        """
        seconds = max(0.0, (self._due - time.monotonic_ns()) / 1e9)
        return self._poll.poll(0) if select.select([self._poll], [], [], seconds)[0] else []

    def _send_due(self, request: bytes) -> None:
        now = time.monotonic_ns()
        if now < self._due:
            return
        # A slow verifier gets at most one request per connection; requests that could not be sent are dropped.
        self._due = max(self._due + self._gap_ns, now - 10 * self._gap_ns)
        connection = self._connections[self._turn % len(self._connections)]
        self._turn += 1
        if connection.is_busy:
            return
        # Alternate for each verifier and for each of its connections, so that each gets both kinds of requests.
        connection.is_watching = (self._turn // self.verifiers + self._turn // len(self._connections)) % 2 == 0
        connection.is_busy = True
        self.sent += 1
        sent = request if connection.is_watching else self._load[self._turn % len(self._load)]
        connection.sent_ns = time.monotonic_ns()
        connection.socket.send(sent)

    def _receive(self, connection: _ProbeConnection) -> WatchedResponse | None:
        """Read from the connection. None if the response is incomplete, or belongs to load."""
        answer = connection.socket.recv(65_536)
        if not answer:
            raise ConnectionResetError("A verifier closed a connection.")
        received = time.monotonic_ns()
        connection.read += answer
        if not is_whole(connection.read):
            return None
        whole, connection.read, connection.is_busy = connection.read, b"", False
        if not connection.is_watching:
            return None
        return WatchedResponse(connection.verifier, connection.sent_ns, received, is_allowed(whole))

    def _drain(self) -> list[WatchedResponse]:
        answers, deadline = [], time.monotonic() + TIMEOUT_SECONDS
        while any(connection.is_busy for connection in self._connections) and time.monotonic() < deadline:
            for descriptor, _ in self._poll.poll(0.1):
                connection = self._by_descriptor.get(descriptor)
                if connection is not None and (answered := self._receive(connection)) is not None:
                    answers.append(answered)
        return answers

    def _send_to_writer(self, command: str) -> None:
        assert self._writer.stdin
        self._writer.stdin.write(f"{command}\n".encode())
        self._writer.stdin.flush()

    def _read_writer(self) -> dict[str, Any]:
        assert self._writer.stdout
        line = self._writer.stdout.readline()
        if not line:
            raise RuntimeError("The writer has ended.")
        reply: dict[str, Any] = json.loads(line)
        return reply


def is_allowed(answer: bytes) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.startswith(b"HTTP/1.1 200 ") and json.loads(body)["allowed"] is True
