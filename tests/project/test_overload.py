"""Overload of a real Granian with the bridge: which requests are answered, refused or dropped."""

import json
import os
import select
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.client import HTTPResponse
from pathlib import Path

import pytest

from keyvault.management import service
from keyvault.management.service import find_free_port
from tests.fuzz.served import Answer

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 60.0
"""Maximum wait for one event in these tests, in seconds; no assertion depends on it."""

THREADS, QUEUE = 2, 2
CONSOLE_THREADS, CONSOLE_QUEUE = 2, 12


@dataclass
class Gate:
    """Where requests report that they hold a thread, and wait to be released."""

    listener: socket.socket
    held: list[socket.socket] = field(default_factory=list)

    def next_report(self) -> str:
        connection, _ = self.listener.accept()
        self.held.append(connection)
        return connection.makefile().readline().rstrip()

    def release(self) -> None:
        for connection in self.held:
            connection.close()
        self.held.clear()


@dataclass
class Site:
    port: int
    gate: Gate
    stack: ExitStack

    def send(self, head: str, body: bytes = b"") -> socket.socket:
        """Send a request and return its connection, without waiting for the answer."""
        connection = self.stack.enter_context(socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS))
        connection.sendall(f"{head} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        return connection

    def get(self, path: str) -> Answer:
        return read(self.send(f"GET {path}"))


def read(connection: socket.socket) -> Answer:
    with HTTPResponse(connection) as response:
        response.begin()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, headers, response.read())


Start = Callable[..., Site]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the site with the options of `make run`, some of them replaced."""
    with ExitStack() as stack:

        def serve(*, body_seconds: float = SECONDS, **options: int) -> Site:
            port = find_free_port()
            gate = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            gate.settimeout(SECONDS)
            command = list(service.server_program(port).command)
            command[command.index("keyvault.project.asgi:application")] = "tests.project.overload_site:application"
            for name, number in options.items():
                command[command.index(f"--{name.replace('_', '-')}") + 1] = str(number)
            capacity = {"threads": THREADS, "queue": QUEUE, "body_seconds": body_seconds}
            capacity |= {"console_threads": CONSOLE_THREADS, "console_queue": CONSOLE_QUEUE}
            environ = {"GATE": str(gate.getsockname()[1]), "CAPACITY": json.dumps(capacity)}
            log = stack.enter_context((tmp_path / "server.log").open("wb"))
            process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environ}, stdout=log, stderr=log)
            stack.callback(process.wait, 20)
            stack.callback(process.terminate)
            site = Site(port, Gate(gate), stack)
            stack.callback(site.gate.release)
            _wait_until_it_listens(process, port)
            return site

        yield serve


def _wait_until_it_listens(process: "subprocess.Popen[bytes]", port: int) -> None:
    while True:
        assert process.poll() is None, "the site does not start"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        select.select([], [], [], 0.05)


def first_refused(connections: list[socket.socket]) -> tuple[socket.socket, Answer]:
    """Return the first connection with an answer while all threads are held."""
    (connection, *_), _, _ = select.select(connections, [], [], SECONDS)
    return connection, read(connection)


def test_sign_ins_on_every_console_thread_leave_the_other_planes_answering(start: Start) -> None:
    """Guarantee: no number of anonymous sign-ins delays a request of the integration or the service plane."""
    site = start()
    count = CONSOLE_THREADS + CONSOLE_QUEUE
    sign_ins = [site.send("POST /admin/login/", b"username=a&password=b") for _ in range(count + 1)]
    assert [site.gate.next_report() for _ in range(CONSOLE_THREADS)] == ["/admin/login/"] * CONSOLE_THREADS
    refused, page = first_refused(sign_ins)  # all others are queued by now
    assert (page.status, page.headers["content-type"]) == (503, "text/html; charset=utf-8")
    assert (page.headers["retry-after"], page.headers["cache-control"]) == ("1", "no-store")
    assert site.get("/sandbox/echo").status == 200
    sign_ins.remove(refused)
    site.gate.release()
    for _ in range(CONSOLE_QUEUE):
        assert site.gate.next_report() == "/admin/login/"
        site.gate.release()
    assert [read(connection).status for connection in sign_ins] == [200] * count


def test_full_queue_refuses_with_a_problem_and_the_console_still_answers(start: Start) -> None:
    site = start()
    requests = [site.send("GET /held") for _ in range(THREADS + QUEUE + 1)]
    assert [site.gate.next_report() for _ in range(THREADS)] == ["/held"] * THREADS
    _, answer = first_refused(requests)
    problem = json.loads(answer.body)
    assert (answer.status, problem["code"]) == (503, "dependency_unavailable")
    assert problem["request_id"] == answer.headers["x-request-id"]
    assert (answer.headers["retry-after"], answer.headers["cache-control"]) == ("1", "no-store")
    assert site.get("/admin/echo").status == 200
    # Refusing a liveness probe would restart a process that is only busy.
    assert [site.get(path).status for path in ("/healthz", "/readyz")] == [200, 200]


@pytest.mark.parametrize("body", [b"", b"{}"])
def test_queued_request_whose_client_disconnects_never_runs(start: Start, body: bytes) -> None:
    """Guarantee: the request of a disconnected client is not executed."""
    site = start()
    for _ in range(THREADS):
        site.send("GET /held")
        assert site.gate.next_report() == "/held"
    sent = {site.send(f"POST /{number}", body): f"/{number}" for number in range(QUEUE + 1)}
    refused, answer = first_refused(list(sent))  # the others are queued by now
    assert answer.status == 503
    del sent[refused]
    (gone, _), (stays, stays_path) = sent.items()
    gone.close()
    assert site.gate.next_report() == "disconnect"
    assert site.get("/admin/echo").status == 200  # the loop has dropped it by now
    late = site.send("POST /late", body)
    site.gate.release()
    assert {site.gate.next_report(), site.gate.next_report()} == {stays_path, "/late"}
    site.gate.release()
    assert (read(stays).body, read(late).body) == (stays_path.encode(), b"/late")


def test_endless_body_is_answered_and_its_connection_closed(start: Start) -> None:
    """Guarantee: a slow sender holds no thread, and its connection only for a bounded time."""
    site = start(body_seconds=0.2)
    slow = []
    for _ in range(THREADS + QUEUE + 1):
        connection = site.stack.enter_context(socket.create_connection(("127.0.0.1", site.port), timeout=SECONDS))
        connection.sendall(b"POST /held HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nab")
        slow.append(connection)
    for connection in slow:
        answer = read(connection)
        assert (answer.status, json.loads(answer.body)["code"]) == (408, "request_timeout")
        assert answer.headers["connection"] == "close"
        assert connection.recv(1) == b""
    assert site.get("/echo").status == 200


def test_connection_above_the_cap_waits_until_another_closes(start: Start) -> None:
    site = start(backpressure=1)
    first = site.send("GET /echo")
    assert read(first).status == 200
    site.send("GET /waits")
    first.sendall(b"GET /runs HTTP/1.1\r\nHost: a\r\n\r\n")
    assert site.gate.next_report() == "/runs"
    site.gate.release()
    assert read(first).status == 200
    first.close()
    assert site.gate.next_report() == "/waits"


def test_idle_connections_are_closed_and_do_not_block_others(start: Start) -> None:
    site = start(backpressure=2, http1_header_read_timeout=300)
    silent = site.stack.enter_context(socket.create_connection(("127.0.0.1", site.port), timeout=SECONDS))
    half = site.stack.enter_context(socket.create_connection(("127.0.0.1", site.port), timeout=SECONDS))
    half.sendall(b"GET /echo HTTP/1.1\r\nHost:")
    waits = site.send("GET /echo")
    assert (silent.recv(1), half.recv(1)) == (b"", b"")
    assert read(waits).status == 200
    assert waits.recv(1) == b""
