"""The load generators send every request in rotation, count every error, and hide no stall of the server."""

import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.environment import REQUIRE, ROOT, required_servers

from .generators import Generators, compile_pacer, find_compiler
from .pacer import Outcome, Pacer, read_requests, write_requests

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
REFUSED = b"HTTP/1.1 403 Forbidden\r\ncontent-length: 2\r\n\r\n{}"
CHUNKED = b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\nb\r\n"a": "0\r\n"}\r\n0\r\n\r\n'
STALL_SECONDS = 0.2

REQUESTS = [b"one!", b"two!", b"six!"]


class Answering:
    """A small server: every `size` bytes are a request, which gets `answer`; `seen` holds all requests."""

    def __init__(self, listening: socket.socket, answer: bytes, stall_at: int, size: int) -> None:
        self.seen: list[bytes] = []
        self._answer, self._stall_at, self._size, self._pause = answer, stall_at, size, threading.Lock()
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
        # In closed loop the client can disconnect during an answer.
        with connection, connection.makefile("rb") as sent, suppress(ConnectionError):
            while request := sent.read(self._size):
                with self._pause:
                    self.seen.append(request)
                    if len(self.seen) == self._stall_at:
                        time.sleep(STALL_SECONDS)
                connection.sendall(self._answer)


@contextmanager
def answering(
    answer: bytes = OK, *, stall_at: int = 0, size: int = 4, room: int = 0
) -> Iterator[tuple[int, Answering]]:
    """`room`: size of the server's receive buffer, in bytes; 0: the default."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        if room:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        server = Answering(listening, answer, stall_at, size)
        try:
            yield listening.getsockname()[1], server
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            for thread in server.threads:
                thread.join(10)


@contextmanager
def serving(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """Yield the port of a server that is one function, which ends with the generator."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        # A generator that never connects ends the test.
        listening.settimeout(30)
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            thread.join(60)


# --- open loop, of either generator ---------------------------------------------------------------------------


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Generators:
    """Return generators with pacer.c; skip without a compiler, or fail if KEYVAULT_REQUIRE is set."""
    compiler = find_compiler()
    if compiler is None:
        if required_servers():
            pytest.fail(f"{REQUIRE} is set, but there is no cc on this machine", pytrace=False)
        pytest.skip("no cc on this machine")
    return Generators(pacer=compile_pacer(compiler, tmp_path_factory.mktemp("pacer")))


@pytest.fixture(params=["pacer.c", "pacer.py"])
def generators(request: pytest.FixtureRequest) -> Generators:
    made: Generators = Generators() if request.param == "pacer.py" else request.getfixturevalue("compiled")
    assert made.names["open"] == request.param
    return made


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Start a generator as the benchmarks do, and wait for its end."""

    def perform(
        generators: Generators,
        port: int,
        seconds: float,
        rate: float,
        *,
        requests: Sequence[bytes] = REQUESTS,
        connections: int = 2,
    ) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "requests"
        write_requests(path, requests)
        command = generators.command(port, path, seconds, connections, rate)
        return subprocess.run(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60
        )

    return perform


Drive = Callable[..., Outcome]


@pytest.fixture
def drive(run: Run, generators: Generators) -> Drive:
    """Return the counts of either generator as an `Outcome`."""

    def perform(port: int, seconds: float, rate: float, **chosen: object) -> Outcome:
        return counted(run(generators, port, seconds, rate, **chosen))

    return perform


def counted(done: subprocess.CompletedProcess[str]) -> Outcome:
    assert (done.returncode, done.stderr) == (0, "")
    return Outcome(**json.loads(done.stdout))


@pytest.mark.parametrize("rate", [1000, 50_000])
def test_pacer_in_open_loop_sends_every_due_request(drive: Drive, rate: int) -> None:
    """At the higher rate, requests are due more often than the generator wakes up."""
    with answering() as (port, server):
        outcome = drive(port, 100 / rate, rate)
    assert (outcome.requests, outcome.errors, outcome.unanswered) == (100, 0, 0)
    assert sorted(server.seen) == sorted((REQUESTS * 34)[:100])
    # The last request is due 99 gaps after the first.
    assert outcome.seconds > 99 / rate
    assert 0 < outcome.p50_us <= outcome.p99_us <= outcome.p999_us <= outcome.most_us


def test_pacer_in_open_loop_sends_in_rotation(drive: Drive) -> None:
    with answering() as (port, server):
        drive(port, 0.1, 1000, connections=1)
    assert server.seen == (REQUESTS * 34)[:100]


def test_pacer_in_open_loop_charges_a_stall_to_every_request_that_waited(drive: Drive) -> None:
    """No coordinated omission: while two connections stall, every due request is late, not just two."""
    with answering(stall_at=50) as (port, _):
        outcome = drive(port, 0.4, 1000)
    assert outcome.requests == 400
    # More than a hundred requests were due in the first half of the stall, and waited for the second half at least.
    assert outcome.p99_us >= STALL_SECONDS * 1e6 / 2
    # The stall of the server does not count as lateness of the generator.
    assert outcome.late_us < outcome.most_us


def test_pacer_counts_refusals_as_errors(drive: Drive) -> None:
    with answering(REFUSED) as (port, _):
        outcome = drive(port, 0.02, 1000)
    assert (outcome.requests, outcome.errors, outcome.unanswered) == (20, 20, 0)


def test_pacer_reads_a_chunked_answer(drive: Drive) -> None:
    with answering(CHUNKED) as (port, _):
        outcome = drive(port, 0.02, 1000)
    assert (outcome.requests, outcome.errors, outcome.unanswered) == (20, 0, 0)


def test_pacer_fails_when_the_server_closes_a_connection(run: Run, generators: Generators) -> None:
    def close_after_one(listening: socket.socket) -> None:
        with listening.accept()[0] as connection:
            connection.recv(4)
            connection.sendall(OK)

    with serving(close_after_one) as port:
        done = run(generators, port, 60, 1000, connections=1)
    assert (done.returncode, done.stdout) == (1, "")
    assert "the server closed a connection that was to be kept" in done.stderr


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"220 ready\r\n", "not HTTP/1"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2, 2\r\n\r\n{}", "not understood"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n{}", "not understood"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 30 + b"\r\n\r\n{}", "not understood"),
        (CHUNKED.replace(b"\r\nb\r\n", b"\r\na\r\n"), "not understood"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 10_000, "too long"),
        (OK + b"}", "more than it was asked for"),
    ],
    ids=["ftp", "two lengths", "negative", "endless", "wrong chunk", "long line", "more"],
)
def test_compiled_pacer_fails_on_an_answer_that_it_cannot_parse(
    run: Run, compiled: Generators, answer: bytes, why: str
) -> None:
    with answering(answer) as (port, _):
        done = run(compiled, port, 0.02, 1000)
    assert (done.returncode, done.stdout) == (1, "")
    assert why in done.stderr


# --- pacer.py alone -------------------------------------------------------------------------------------------


def test_pacer_in_closed_loop_sends_the_next_request_after_each_answer() -> None:
    with answering() as (port, server):
        outcome = Pacer(port, REQUESTS, 2, None).run(0.05)
    assert 0 < outcome.requests <= len(server.seen) <= outcome.requests + 2
    assert (outcome.errors, outcome.unanswered) == (0, 0)


def test_pacer_once_sends_each_request_once() -> None:
    with answering() as (port, server):
        outcome = Pacer(port, REQUESTS * 7, 2, None).run_once()
    assert (outcome.requests, outcome.errors) == (21, 0)
    assert sorted(server.seen) == sorted(REQUESTS * 7)


def test_requests_are_read_as_they_were_written(tmp_path: Path) -> None:
    """The file contains keys, so only its owner may read it."""
    path = tmp_path / "requests"
    requests = [b"GET / HTTP/1.1\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n\n12\n{}", b""]
    write_requests(path, requests)
    assert read_requests(path) == requests
    assert path.stat().st_mode & 0o077 == 0
