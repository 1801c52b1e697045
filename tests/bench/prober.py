"""Asks several verifiers for one key and for others, in turn and at a steady pace, and remembers every answer.

One thread with raw sockets. Half of the requests are for the key that is being watched, the rest are load.
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
"""Time after which a verifier that still allows the key has lost the change, in seconds."""

WINDOW_NS = 100_000_000
"""Window of each revocation in which no other process should run, in nanoseconds.

It has one length for all, so that slow revocations are not left out more often.
"""

WAIT_BEFORE_NS = 3_000_000
"""Every verifier has said yes, and still goes on for so long before the key is revoked."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A request for the watched key; times in nanoseconds of the monotonic clock."""

    verifier: int
    sent_ns: int
    received_ns: int
    is_allowed: bool


@dataclass(frozen=True, slots=True)
class Watched:
    """One revocation. `commit_ns`: just before COMMIT; `answers`: all for its key, before and after.

    `confirmed_ms`: how long after the commit each verifier said that it had forgotten the key, by its receipt.
    `stolen_ms`: of the machine, by its host, in the WINDOW_NS that began before the commit, however soon the verifiers
    refused; in steps of some milliseconds, as the kernel counts.
    """

    commit_ns: int
    returned_ns: int
    answers: Sequence[Answered]
    confirmed_ms: Sequence[float]
    stolen_ms: float = 0.0

    def evicted_after_ms(self, verifiers: int) -> float | None:
        """From COMMIT to the last verifier's receipt; None when one has given none, or never refused."""
        if len(self.confirmed_ms) != verifiers or self.refused_after_ms(verifiers) is None:
            return None
        return max(self.confirmed_ms)

    def refused_after_ms(self, verifiers: int) -> float | None:
        """From COMMIT to the first refusal of the last verifier, as it arrives: what the next request of the prober's
        pace waits for is in it, and the time that a refusal takes. None when one never refused."""
        first: dict[int, int] = {}
        for each in self.answers:
            if not each.is_allowed:
                first[each.verifier] = min(each.received_ns, first.get(each.verifier, each.received_ns))
        return (max(first.values()) - self.commit_ns) / 1e6 if len(first) == verifiers else None

    def sent_after_receipts(self) -> list[Answered]:
        """Those of them that were sent after the last receipt, too."""
        last_ns = self.commit_ns + 1e6 * max(self.confirmed_ms, default=TIMEOUT_SECONDS * 1000)
        return [each for each in self.sent_after() if each.sent_ns > last_ns]

    def sent_after(self) -> list[Answered]:
        """Those that were sent after the revoke call had returned."""
        return [each for each in self.answers if each.sent_ns > self.returned_ns]


class _Line:
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
    """`load` are requests for other keys. `writer` revokes the key whose id it reads, and answers when it has."""

    def __init__(
        self, ports: list[int], load: list[bytes], rate: float, lines: int, writer: "subprocess.Popen[bytes]"
    ) -> None:
        self.verifiers = len(ports)
        self._lines = [_Line(number, port) for _ in range(lines) for number, port in enumerate(ports)]
        self._load, self._writer, self._gap_ns = load, writer, 1e9 / rate
        self._by_descriptor = {each.socket.fileno(): each for each in self._lines}
        self._turn, self._due = 0, 0.0
        self.sent = 0
        assert writer.stdout
        self._poll = select.epoll()
        for descriptor in (*self._by_descriptor, writer.stdout.fileno()):
            self._poll.register(descriptor, select.EPOLLIN)

    def close(self) -> None:
        for each in self._lines:
            each.socket.close()
        self._poll.close()

    def watch(self, key_id: str, request: bytes, after: int) -> Watched:
        """Until `after` requests for the key were answered that were sent after the revoke had returned, and every
        verifier has refused it, or patience is at an end. Raises RuntimeError when the key was not good before."""
        answers: list[Answered] = []
        told: dict[str, Any] | None = None
        asked_at, began = 0, time.monotonic_ns()
        fine: set[int] = set()
        refused: set[int] = set()
        late = 0
        stolen_before, stolen = 0.0, -1.0
        while told is None or late < after or len(refused) < self.verifiers:
            self._send_due(request)
            for descriptor, _ in self._arrived():
                line = self._by_descriptor.get(descriptor)
                if line is None:
                    told = self._read_writer()
                elif (answered := self._receive(line)) is not None:
                    answers.append(answered)
                    (fine if answered.is_allowed else refused).add(answered.verifier)
                    late += told is not None and answered.sent_ns > told["returned_ns"]
            now = time.monotonic_ns()
            if stolen < 0 and asked_at and now - asked_at > WINDOW_NS:
                stolen = stolen_seconds() - stolen_before
            if not asked_at and refused:
                raise RuntimeError("a key that is to be revoked was not good before")
            if not asked_at and len(fine) == self.verifiers and now - began > WAIT_BEFORE_NS:
                asked_at, stolen_before = now, stolen_seconds()
                self._ask_writer(key_id)
            if now - began > TIMEOUT_SECONDS * 1e9:
                break
        if told is None:
            raise RuntimeError("the writer did not revoke, or no verifier answered, in time")
        if stolen < 0:
            stolen = stolen_seconds() - stolen_before
        # What is still under way was asked about this key, too.
        answers += self._drain()
        self._ask_writer(f"receipt {told['sequence']}")
        confirmed = self._read_writer()["confirmed_ns"]
        confirmed_ms = [(each - told["commit_day_ns"]) / 1e6 for each in confirmed]
        return Watched(told["commit_ns"], told["returned_ns"], answers, confirmed_ms, 1000 * stolen)

    def _arrived(self) -> list[tuple[int, int]]:
        """Asleep until there is something, or the next request is due: who spins would keep the database waiting, with
        which it shares a core. (An epoll object's own time-outs are of whole milliseconds.)"""
        seconds = max(0.0, (self._due - time.monotonic_ns()) / 1e9)
        return self._poll.poll(0) if select.select([self._poll], [], [], seconds)[0] else []

    def _send_due(self, request: bytes) -> None:
        now = time.monotonic_ns()
        if now < self._due:
            return
        # A verifier that is behind gets no more than it has lines for; what could not be sent is not made up for.
        self._due = max(self._due + self._gap_ns, now - 10 * self._gap_ns)
        line = self._lines[self._turn % len(self._lines)]
        self._turn += 1
        if line.is_busy:
            return
        # By turns for each verifier, and for each of its lines: none is left alone for as long as a round takes.
        line.is_watching = (self._turn // self.verifiers + self._turn // len(self._lines)) % 2 == 0
        line.is_busy = True
        self.sent += 1
        sent = request if line.is_watching else self._load[self._turn % len(self._load)]
        line.sent_ns = time.monotonic_ns()
        line.socket.send(sent)

    def _receive(self, line: _Line) -> Answered | None:
        """None for what is not whole yet, and for load."""
        answer = line.socket.recv(65_536)
        if not answer:
            raise ConnectionResetError("a verifier closed a connection")
        received = time.monotonic_ns()
        line.read += answer
        if not is_whole(line.read):
            return None
        whole, line.read, line.is_busy = line.read, b"", False
        if not line.is_watching:
            return None
        return Answered(line.verifier, line.sent_ns, received, is_allowed(whole))

    def _drain(self) -> list[Answered]:
        answers, deadline = [], time.monotonic() + TIMEOUT_SECONDS
        while any(line.is_busy for line in self._lines) and time.monotonic() < deadline:
            for descriptor, _ in self._poll.poll(0.1):
                line = self._by_descriptor.get(descriptor)
                if line is not None and (answered := self._receive(line)) is not None:
                    answers.append(answered)
        return answers

    def _ask_writer(self, line: str) -> None:
        assert self._writer.stdin
        self._writer.stdin.write(f"{line}\n".encode())
        self._writer.stdin.flush()

    def _read_writer(self) -> dict[str, Any]:
        assert self._writer.stdout
        line = self._writer.stdout.readline()
        if not line:
            raise RuntimeError("the writer has ended")
        told: dict[str, Any] = json.loads(line)
        return told


def is_allowed(answer: bytes) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.startswith(b"HTTP/1.1 200 ") and json.loads(body)["allowed"] is True
