"""Load generator in Python: raw sockets in one thread, open or closed loop.

It is slower than a fast server; with a C compiler, `pacer.c` generates open-loop load.

    python -m tests.bench.pacer PORT REQUESTS --seconds 3 --connections 32 [--rate 80000] [--once]

With `--rate` (open loop) the n-th request is due at a time fixed in advance, on connection n modulo their number. Its
latency is measured from that time even if it is sent later, so that a stall counts for every request that waited (no
coordinated omission). Without `--rate` (closed loop) a connection sends the next request after each response. Prints
one JSON object. Imports the standard library only, because it is started often.
"""

import argparse
import ctypes
import gc
import json
import math
import select
import socket
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

SPIN_NS = 40_000
"""Maximum wait for the next due request without sleeping, in nanoseconds."""

SMALL_BYTES = 16_384
"""Maximum size of a response that arrives whole over loopback, in bytes; one that ends like JSON is not parsed."""

ONCE_NS = 120_000_000_000
"""Maximum time for sending each request once, in nanoseconds."""

GIVE_UP_NS = 5_000_000_000
"""Maximum wait after the last request was due, in nanoseconds."""

_PR_SET_TIMERSLACK = 29


def write_requests(path: Path, requests: Sequence[bytes]) -> None:
    """Write the requests, each after its length, for this module, `pacer.c` and `rotate.lua`.

    Only the owner can read the file, because it contains keys.
    """
    path.touch(mode=0o600)
    with path.open("wb") as file:
        for request in requests:
            file.write(b"%d\n%b" % (len(request), request))


def read_requests(path: Path) -> list[bytes]:
    requests = []
    with path.open("rb") as file:
        while length := file.readline():
            requests.append(file.read(int(length)))
    return requests


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a run. `late_us`: p99 of the generator's own delay in sending. `unanswered`: due without a response."""

    requests: int
    seconds: float
    p50_us: float
    p99_us: float
    p999_us: float
    most_us: float
    late_us: float
    errors: int
    unanswered: int


def is_whole(answer: bytes) -> bool:
    """Whether the bytes are a complete response: with a Content-Length, or chunked and without trailers."""
    head, end, body = answer.partition(b"\r\n\r\n")
    if not end:
        return False
    _, found, rest = head.lower().partition(b"\r\ncontent-length:")
    if found:
        return len(body) >= int(rest.split(b"\r\n", 1)[0])
    return b"\r\ntransfer-encoding: chunked" not in head.lower() or body.endswith(b"0\r\n\r\n")


class _LoadConnection:
    __slots__ = ("due", "is_busy", "number", "read", "socket", "turn")

    def __init__(self, port: int, number: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.number, self.turn, self.due = number, 0, 0
        self.is_busy, self.read = False, b""


class Pacer:
    """One run; without a `rate` a closed loop."""

    def __init__(self, port: int, requests: list[bytes], connections: int, rate: float | None) -> None:
        self._requests = requests
        self._connections = [_LoadConnection(port, number) for number in range(connections)]
        self._by_descriptor = {each.socket.fileno(): each for each in self._connections}
        self._gap_ns = 1e9 / rate if rate else 0.0
        self._latencies = array("q")
        self._lateness = array("q")
        self._sent = self._errors = 0
        self._poll = select.epoll()
        for descriptor in self._by_descriptor:
            self._poll.register(descriptor, select.EPOLLIN)

    def run_once(self) -> Outcome:
        """Run a closed loop until every request has had a response."""
        began = time.perf_counter_ns()
        self._run_closed(began + ONCE_NS, len(self._requests))
        return self._outcome((time.perf_counter_ns() - began) / 1e9, self._sent)

    def run(self, seconds: float) -> Outcome:
        began = time.perf_counter_ns()
        end = began + int(seconds * 1e9)
        if self._gap_ns:
            self._run_paced(began, int(seconds * 1e9 / self._gap_ns))
            offered = int(seconds * 1e9 / self._gap_ns)
        else:
            self._run_closed(end)
            offered = self._sent
        return self._outcome((time.perf_counter_ns() - began) / 1e9, offered)

    def _run_closed(self, end: int, most: float = math.inf) -> None:
        for each in self._connections:
            if self._sent < most:
                self._send(each, time.perf_counter_ns())
        while time.perf_counter_ns() < end and len(self._latencies) + self._errors < most:
            for descriptor, _ in self._poll.poll(1.0):
                connection = self._by_descriptor[descriptor]
                if self._receive(connection) and self._sent < most:
                    self._send(connection, time.perf_counter_ns())

    def _run_paced(self, began: int, offered: int) -> None:
        """Run an open loop: request n is due `n` gaps after the beginning."""
        clock, gap, count = time.perf_counter_ns, self._gap_ns, len(self._connections)
        row, last = 0, began + int(offered * gap) + GIVE_UP_NS
        descriptors = list(self._by_descriptor)
        while len(self._latencies) + self._errors < offered:
            now = clock()
            due = began + int(row * gap)
            while row < offered and due <= now:
                connection = self._connections[row % count]
                self._lateness.append(now - due)
                if not connection.is_busy:
                    self._send(connection, due)
                    now = clock()
                # Else it is sent when the connection is free again, with the same due time.
                row += 1
                due = began + int(row * gap)
            if now > last:
                return
            wait = due - now if row < offered else GIVE_UP_NS
            if wait > SPIN_NS:
                ready: list[int] = select.select(descriptors, [], [], min(wait / 1e9, 0.5))[0]
            else:
                ready = [descriptor for descriptor, _ in self._poll.poll(0)]
            for descriptor in ready:
                connection = self._by_descriptor[descriptor]
                if self._receive(connection):
                    following = connection.number + connection.turn * count
                    due = began + int(following * gap)
                    if following < row and following < offered:
                        self._send(connection, due)

    def _send(self, connection: _LoadConnection, due: int) -> None:
        request = self._requests[self._sent % len(self._requests)]
        self._sent += 1
        connection.turn += 1
        connection.due, connection.is_busy = due, True
        sent = connection.socket.send(request)
        if sent < len(request):
            # Larger than the socket's buffer: block until it is sent.
            connection.socket.setblocking(True)
            connection.socket.sendall(request[sent:])
            connection.socket.setblocking(False)

    def _receive(self, connection: _LoadConnection) -> bool:
        """Return whether the response is complete. A closed connection ends the run with an error."""
        answer = connection.socket.recv(262_144)
        if not answer:
            raise ConnectionResetError("the server closed a connection that was to be kept")
        now = time.perf_counter_ns()
        is_plain = len(answer) < SMALL_BYTES and answer.endswith(b"}") and answer.startswith(b"HTTP/1.1 200 ")
        if connection.read or not is_plain:
            connection.read = answer = connection.read + answer
            if not is_whole(answer):
                return False
            connection.read = b""
        if answer.startswith(b"HTTP/1.1 2"):
            self._latencies.append(now - connection.due)
        else:
            self._errors += 1
        connection.is_busy = False
        return True

    def _outcome(self, took: float, offered: int) -> Outcome:
        for each in self._connections:
            each.socket.close()
        self._poll.close()
        ordered, lateness = sorted(self._latencies), sorted(self._lateness)

        def at(values: list[int], share: float) -> float:
            return values[min(len(values) - 1, int(share * len(values)))] / 1000 if values else 0.0

        answered = len(ordered) + self._errors
        return Outcome(
            requests=answered,
            seconds=took,
            p50_us=at(ordered, 0.5),
            p99_us=at(ordered, 0.99),
            p999_us=at(ordered, 0.999),
            most_us=at(ordered, 1.0),
            late_us=at(lateness, 0.99),
            errors=self._errors,
            # Closed loop: requests in flight at the end are not counted as unanswered.
            unanswered=offered - answered if self._gap_ns else 0,
        )


def reduce_timer_slack() -> None:
    """Set the timer slack of this process to 1 microsecond; the default is 50."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.pacer")
    parser.add_argument("port", type=int)
    parser.add_argument("requests", type=Path)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--rate", type=float, default=None)
    parser.add_argument("--once", action="store_true")
    options = parser.parse_args()
    reduce_timer_slack()
    gc.disable()
    pacer = Pacer(options.port, read_requests(options.requests), options.connections, options.rate)
    outcome = pacer.run_once() if options.once else pacer.run(options.seconds)
    sys.stdout.write(json.dumps(asdict(outcome)) + "\n")


if __name__ == "__main__":
    main()
