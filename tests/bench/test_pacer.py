"""The generator of load: it sends what it was given, in rotation, and hides no stall of the server."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from .pacer import Outcome, Pacer, is_whole, read_requests, write_requests

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
REFUSED = b"HTTP/1.1 403 Forbidden\r\ncontent-length: 2\r\n\r\n{}"
STALL_SECONDS = 0.2


class Answering:
    """A server of few lines: every 4 bytes are a request, answered by `answer`; `seen` has them all."""

    def __init__(self, listening: socket.socket, answer: bytes, stall_at: int) -> None:
        self.seen: list[bytes] = []
        self._answer, self._stall_at, self._pause = answer, stall_at, threading.Lock()
        self._listening = listening
        self.threads = [threading.Thread(target=self._accept)]
        self.threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            self.threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self.threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        # In closed loop the client goes while it is answered.
        with connection, suppress(ConnectionError):
            while request := connection.recv(4):
                with self._pause:
                    self.seen.append(request)
                    if len(self.seen) == self._stall_at:
                        time.sleep(STALL_SECONDS)
                connection.sendall(self._answer)


@contextmanager
def answering(answer: bytes = OK, stall_at: int = 0) -> Iterator[tuple[int, Answering]]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = Answering(listening, answer, stall_at)
        try:
            yield listening.getsockname()[1], server
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            for thread in server.threads:
                thread.join(10)


REQUESTS = [b"one!", b"two!", b"six!"]


def drive(port: int, seconds: float, rate: float | None) -> Outcome:
    return Pacer(port, REQUESTS, 2, rate).run(seconds)


def test_pacer_in_open_loop_sends_all_that_is_due_in_rotation() -> None:
    with answering() as (port, server):
        outcome = drive(port, 0.1, 1000)
    assert (outcome.requests, outcome.errors, outcome.unanswered) == (100, 0, 0)
    assert sorted(server.seen) == sorted((REQUESTS * 34)[:100])


def test_pacer_in_open_loop_charges_a_stall_to_every_request_that_waited() -> None:
    """No coordinated omission: of two connections that stall, not two requests are late but all that were due."""
    with answering(stall_at=50) as (port, _):
        outcome = drive(port, 0.4, 1000)
    assert outcome.requests == 400
    # A hundred and more were due in the first half of the stall, and waited for the second half at least.
    assert outcome.p99_us >= STALL_SECONDS * 1e6 / 2
    # The server's fault is not the generator's.
    assert outcome.late_us < outcome.most_us


def test_pacer_in_closed_loop_goes_on_as_long_as_it_is_answered() -> None:
    with answering() as (port, server):
        outcome = drive(port, 0.05, None)
    assert 0 < outcome.requests <= len(server.seen) <= outcome.requests + 2
    assert (outcome.errors, outcome.unanswered) == (0, 0)


def test_pacer_once_sends_each_request_once() -> None:
    with answering() as (port, server):
        outcome = Pacer(port, REQUESTS * 7, 2, None).run_once()
    assert (outcome.requests, outcome.errors) == (21, 0)
    assert sorted(server.seen) == sorted(REQUESTS * 7)


def test_pacer_counts_refusals_as_errors() -> None:
    with answering(REFUSED) as (port, _):
        outcome = drive(port, 0.02, 1000)
    assert (outcome.requests, outcome.errors) == (20, 20)


def test_requests_are_read_as_they_were_written(tmp_path: Path) -> None:
    """For their owner only: there are keys in them."""
    path = tmp_path / "requests"
    requests = [b"GET / HTTP/1.1\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n\n12\n{}", b""]
    write_requests(path, requests)
    assert read_requests(path) == requests
    assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("answer", "is_all"),
    [
        (OK, True),
        (OK[:-1], False),
        (b"HTTP/1.1 200 OK\r\nContent-", False),
        (b"HTTP/1.1 204 No Content\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n", False),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", True),
    ],
)
def test_answer_is_whole_when_its_head_says_so(answer: bytes, is_all: bool) -> None:
    assert is_whole(answer) is is_all
