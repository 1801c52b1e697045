"""Gateways that verify keys at the hosts continuously, each on its own connections. Every response is kept.

Times are of the machine's monotonic clock. `sent_at` is taken before anything is sent, so that a request with a later
`sent_at` than some moment was really sent after it.
"""

import json
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keyvault.domain.plaintext import Plaintext
from tests.faults.hosts import Host

ANSWER_TIMEOUT_SECONDS = 12
NO_ANSWER = 0
RENEWED = 0.01
HOT = 8
"""Number of requests that are sent most often: those about the most recently changed subjects."""


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """A request to send. `request`: the bytes of one POST /v1/keys/verify."""

    name: str
    request: bytes


def make_request(name: str, key: Plaintext, token: Plaintext, endpoint: str = "orders.retrieve") -> VerifyRequest:
    fields = {
        "key": key.reveal(),
        "environment": "sandbox",
        "endpoint": endpoint,
        "client_ip": "198.51.100.7",
        "user_agent": "faults/1.0",
    }
    body = json.dumps(fields).encode()
    head = (
        f"POST /v1/keys/verify HTTP/1.1\r\nHost: verifier\r\nAuthorization: Bearer {token.reveal()}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return VerifyRequest(name, head.encode() + body)


@dataclass(frozen=True, slots=True)
class Reply:
    """`status`: of the decision, else of the call, else NO_ANSWER. `remaining`: of the binding limit, if any."""

    host: str
    name: str
    sent_at: float
    answered_at: float
    is_yes: bool
    status: int
    code: str
    remaining: int | None = None


class VerifierConnection:
    """One connection of one thread. It is opened again after a fault."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._socket: socket.socket | None = None
        self._file: Any = None

    def open(self) -> None:
        if self._socket is None:
            self._socket = self._host.connect()
            self._socket.settimeout(ANSWER_TIMEOUT_SECONDS)
            self._file = self._socket.makefile("rb")

    def send(self, request: VerifyRequest) -> float:
        """Send the request and return the time before it was sent. Raises OSError."""
        sent_at = time.monotonic()
        self.open()
        assert self._socket
        self._socket.sendall(request.request)
        return sent_at

    def receive(self, request: VerifyRequest, sent_at: float) -> Reply:
        """Receive a response. Raises OSError, ValueError."""
        status = int(self._file.readline().split(b" ", 2)[1])
        length = 0
        while (line := self._file.readline()) not in {b"\r\n", b""}:
            if line.lower().startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        answer = json.loads(self._file.read(length))
        is_yes = answer.get("allowed") is True
        limit = answer.get("limit") or {}
        return Reply(
            self._host.name,
            request.name,
            sent_at,
            time.monotonic(),
            is_yes,
            int(answer.get("status", status)),
            "" if is_yes else str(answer.get("code")),
            limit.get("remaining"),
        )

    def ask(self, request: VerifyRequest) -> Reply:
        began = time.monotonic()
        try:
            return self.receive(request, self.send(request))
        except (OSError, ValueError, IndexError) as error:
            self.close()
            return Reply(self._host.name, request.name, began, time.monotonic(), False, NO_ANSWER, type(error).__name__)

    def close(self) -> None:
        if self._socket is not None:
            self._file.close()
            self._socket.close()
        self._socket = None


@dataclass(slots=True)
class RequestSender:
    """A context manager that sends `rate` requests per second to each host, on `connections` connections."""

    hosts: Sequence[Host]
    requests: Mapping[str, VerifyRequest]
    seed: int
    rate: float = 400.0
    connections: int = 6
    replies: "deque[Reply]" = field(default_factory=deque)
    _hot: "deque[str]" = field(default_factory=lambda: deque(maxlen=HOT))
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> "RequestSender":
        for host in self.hosts:
            for number in range(self.connections):
                thread = threading.Thread(target=self._ask, args=(host, number), daemon=True)
                self._threads.append(thread)
                thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def prefer(self, name: str) -> None:
        """Send this request often from now on, until others replace it."""
        if name not in self._hot:
            self._hot.append(name)

    def _ask(self, host: Host, number: int) -> None:
        rng = random.Random(f"{self.seed} {host.name} {number}")  # noqa: S311  not for secrets
        names, connection, pause = list(self.requests), VerifierConnection(host), self.connections / self.rate
        while not self._stop.wait(pause * 2 * rng.random()):
            hot = list(self._hot)
            name = rng.choice(hot) if hot and rng.random() < 0.7 else rng.choice(names)
            self.replies.append(connection.ask(self.requests[name]))
            if rng.random() < RENEWED:
                connection.close()  # the next connection may lead to another process of the host
        connection.close()
