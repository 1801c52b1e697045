"""The embedded service as processes: none is lost and none is left behind, whichever ends first."""

import json
import os
import re
import select
import shlex
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import pytest

from keyvault.management import supervisor
from keyvault.management.service import ServiceError, find_free_port, require_free_port
from keyvault.management.supervisor import Program, Supervisor

pytestmark = pytest.mark.long

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
SLEEP = (sys.executable, "-c", "import os, time; print('I am', os.getpid(), flush=True); time.sleep(600)")
IGNORE_SIGTERM = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("I am", os.getpid(), flush=True)
time.sleep(600)
"""
LEAVE_A_CHILD = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
print("I am", os.getpid(), flush=True)
time.sleep(600)
"""
CHATTY = """
import signal, time
signal.signal(signal.SIGUSR1, lambda *_: print("again", flush=True))
print("x" * 100, flush=True)
while True:
    time.sleep(600)
"""
READY = "Press Ctrl-C to stop"


def eventually(look: Callable[[], T], seconds: float = 30) -> T:
    deadline = time.monotonic() + seconds
    while not (seen := look()):
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.02)
    return seen


def parent_of(process_id: int) -> int | None:
    """Return None for a process that is gone, or a zombie."""
    try:
        state, parent = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state == "Z" else int(parent)


def descendants(process_id: int) -> set[int]:
    parents = {int(path.name): parent_of(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    found, fresh = set(), {process_id}
    while fresh:
        found |= fresh
        fresh = {child for child, parent in parents.items() if parent in fresh} - found
    return found - {process_id}


def are_gone(process_ids: set[int]) -> bool:
    return all(parent_of(process_id) is None for process_id in process_ids)


# ------------------------------------------------------------------------------------------- the supervisor


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def supervise(tmp_path: Path, messages: list[str]) -> Callable[..., Supervisor]:
    def make(**commands: tuple[str, ...]) -> Supervisor:
        programs = [Program(name, command) for name, command in commands.items()]
        return Supervisor(programs, os.environ, tmp_path, tmp_path / "logs", messages.append)

    return make


def process_id(service: Supervisor, name: str) -> int:
    """Return the process id that the program's latest process printed."""
    assert service.logs is not None
    log = service.logs / f"{name}.log"
    return int(eventually(lambda: re.findall(r"I am (\d+)\n", log.read_text()))[-1])


def test_supervisor_killed_program_is_restarted_and_reported(
    supervise: Callable[..., Supervisor], messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_SECONDS", 0.1)
    with supervise(one=SLEEP, other=SLEEP) as service:
        killed, spared = process_id(service, "one"), process_id(service, "other")
        os.kill(killed, signal.SIGKILL)
        service.wait(10)  # returns immediately
        service.restart_ended()
        assert len(messages) == 1
        assert "one has exited (killed by SIGKILL); it restarts" in messages[0]
        while not service.is_running("one"):
            service.wait(10)
            service.restart_ended()
        eventually(lambda: process_id(service, "one") != killed)
        assert process_id(service, "other") == spared
    assert not service.is_running("one")


def test_supervisor_crashing_program_is_restarted_with_growing_pauses(
    supervise: Callable[..., Supervisor], messages: list[str]
) -> None:
    with supervise(broken=(sys.executable, "-c", "raise SystemExit(3)")) as service:
        while len(messages) < 2:
            service.wait(10)
            service.restart_ended()
    assert ["exit 3" in line for line in messages] == [True, True]
    assert "it restarts in 1 s" in messages[0]
    assert "it restarts in 2 s" in messages[1]


def test_supervisor_orphans_of_a_dead_program_are_killed(supervise: Callable[..., Supervisor], tmp_path: Path) -> None:
    """Guarantee: no orphan keeps serving or working beside the program that replaces its parent."""
    log = tmp_path / "logs" / "parent.log"
    with supervise(parent=(sys.executable, "-c", LEAVE_A_CHILD)) as service:
        child = int(eventually(lambda: re.findall(r"child (\d+)\n", log.read_text()))[0])
        os.kill(process_id(service, "parent"), signal.SIGKILL)
        service.wait(10)
        service.restart_ended()
        eventually(lambda: are_gone({child}))


def test_supervisor_stops_in_reverse_order_and_kills_unresponsive_programs(
    supervise: Callable[..., Supervisor], messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "STOP_SECONDS", 0.5)
    with supervise(deaf=(sys.executable, "-c", IGNORE_SIGTERM), quick=SLEEP) as service:
        started = {process_id(service, "deaf"), process_id(service, "quick")}
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert are_gone(started)
    assert ["deaf did not stop in time" in line for line in messages] == [True]


def test_supervisor_logs_are_owner_only(supervise: Callable[..., Supervisor], tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with supervise(one=SLEEP):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "logs").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "logs" / "one.log").stat().st_mode) == 0o600


def test_supervisor_log_tail_is_redacted(supervise: Callable[..., Supervisor]) -> None:
    """Guarantee: a secret in a program's output is not repeated on the terminal."""
    shaped = f"kv_prv_sbx_{'k' * 16}{'s' * 49}"
    with supervise(one=(sys.executable, "-c", f"print('x' * 30000, '{shaped}')")) as service:
        eventually(lambda: not service.is_running("one"))
        assert "kv_prv_sbx_kkkkkkkkkkkkkkkk***" in service.log_tail("one")
        assert "sss" not in service.log_tail("one")
        assert service.log_tail("unknown") == ""


def test_supervisor_log_that_grows_too_large_is_moved_and_continued(
    supervise: Callable[..., Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program keeps its file open, and writes its next line at the new end."""
    echo = (sys.executable, "-c", CHATTY)
    monkeypatch.setattr(supervisor, "MAX_LOG_BYTES", 100)
    with supervise(chatty=echo) as service:
        assert service.logs is not None
        log, moved = (service.logs / name for name in ("chatty.log", "chatty.log.1"))
        eventually(lambda: log.exists() and log.stat().st_size == 101)
        service.restart_ended()
        assert (log.read_text(), moved.read_text()) == ("", "x" * 100 + "\n")
        (child,) = service._children
        assert child.process is not None
        child.process.send_signal(signal.SIGUSR1)
        assert eventually(log.read_text) == "again\n"
        service.restart_ended()
        assert moved.read_text() == "x" * 100 + "\n", "expected a small log to stay"


def test_supervisor_in_another_thread_starts_nothing(supervise: Callable[..., Supervisor]) -> None:
    """Guarantee: no program ends with a thread that happened to start it."""
    errors = []

    def start() -> None:
        try:
            supervise(one=SLEEP).__enter__()
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert ["main thread" in error for error in errors] == [True]


def test_supervisor_start_that_fails_halfway_leaves_no_process(
    supervise: Callable[..., Supervisor], tmp_path: Path
) -> None:
    service = supervise(one=SLEEP, two=SLEEP)
    (tmp_path / "logs" / "two.log").mkdir(parents=True)
    with pytest.raises(IsADirectoryError), service:
        pytest.fail("the second program cannot have a log")
    assert not service.is_running("one")


# ------------------------------------------------------------------------------------------------- the port


def test_port_that_is_free_is_accepted() -> None:
    require_free_port(find_free_port())


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])  # noqa: S104  a foreign server, for a moment
def test_port_with_a_listener_that_shares_it_is_refused(address: str) -> None:
    """Guarantee: two servers never share the requests of one port unnoticed."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((address, 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ServiceError, match=f"Port {port} on 127.0.0.1 is in use"):
            require_free_port(port)


def test_port_bound_without_listening_is_refused() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        with pytest.raises(ServiceError, match="is in use"):
            require_free_port(holder.getsockname()[1])


def test_port_with_closing_connections_is_accepted() -> None:
    """Guarantee: `make run` can be restarted immediately."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            server, _ = listener.accept()
            server.close()  # the side that closes first keeps the port in TIME_WAIT
            assert client.recv(1) == b""
    require_free_port(port)


# ---------------------------------------------------------------------------------------------- manage.py run


class Running:
    """`manage.py run` in its own data folder, read until it reports that it serves."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        environ = {name: text for name, text in os.environ.items() if not name.startswith("KEYVAULT_")}
        with (folder.parent / "stderr").open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, ROOT / "manage.py", "run", "--port", str(port)],
                cwd=folder.parent,
                env=environ | {"KEYVAULT_DATA_DIR": str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        self.text = ""

    def read_until(self, text: str, seconds: float = 90) -> None:
        assert self.process.stdout is not None
        deadline = time.monotonic() + seconds
        while text not in self.text:
            assert select.select([self.process.stdout], [], [], deadline - time.monotonic())[0], self.text
            chunk = os.read(self.process.stdout.fileno(), 65536).decode()
            assert chunk, f"{self.text}\n{self.stderr}"
            self.text += chunk

    @property
    def stderr(self) -> str:
        return (self.folder.parent / "stderr").read_text()


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    running = Running(tmp_path / "data", find_free_port())
    try:
        yield running
    finally:
        started = descendants(running.process.pid)
        running.process.kill()
        running.process.wait()
        assert running.process.stdout is not None
        running.process.stdout.close()
        for process in started:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def send_as_printed(text: str) -> dict[str, object]:
    """Send what the printed curl line would send."""
    (line,) = (line for line in text.splitlines() if line.strip().startswith("curl "))
    arguments = shlex.split(line)
    headers = dict(argument.split(": ", 1) for before, argument in pairwise(arguments) if before == "-H")
    url = next(argument for argument in arguments if argument.startswith("http://127.0.0.1:"))
    body = arguments[arguments.index("-d") + 1].encode()
    request = urllib.request.Request(url, body, headers)  # noqa: S310  the test checked the address
    with urllib.request.urlopen(request, timeout=20) as answer:  # noqa: S310  the same
        decision: dict[str, object] = json.load(answer)
        return decision


def worker_of(running: Running) -> int | None:
    for process in descendants(running.process.pid):
        with suppress(FileNotFoundError, ProcessLookupError):
            if b"\0worker\0" in Path(f"/proc/{process}/cmdline").read_bytes():
                return process
    return None


@pytest.mark.timeout(240)
def test_run_serves_what_it_prints_restarts_programs_and_stops_on_sigterm(running: Running) -> None:
    """Guarantee: SIGTERM ends everything that `make run` started, in order, with exit 0."""
    running.read_until(READY)
    # A passkey is bound to a domain, which an address is not.
    assert re.search(r"^  console +http://localhost:\d+/admin/$", running.text, re.MULTILINE)
    decision = send_as_printed(running.text)
    assert (decision["allowed"], decision["merchant_id"]) == (True, "acme")
    for operator in ("admin", "approver", "auditor", "responder", "tam"):
        assert re.search(rf"^  {operator} +\S{{24}} +[A-Z2-7]{{32,}} +[a-z_]+$", running.text, re.MULTILINE)

    killed = worker_of(running)
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: worker_of(running) not in {None, killed}, seconds=60)
    assert "worker has exited (killed by SIGKILL); it restarts" in running.stderr

    started = descendants(running.process.pid)
    assert len(started) >= 3  # the server and its worker process, the Celery worker
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(60) == 0
    assert are_gone(started)
    require_free_port(running.port)
    logs = {path.name: path.read_text() for path in (running.folder / "logs").iterdir()}
    assert set(logs) == {"server.log", "worker.log"}
    assert [name for name, text in logs.items() if "Traceback" in text or "superuser" in text] == []


@pytest.mark.timeout(240)
def test_run_killed_with_sigkill_leaves_no_child(running: Running) -> None:
    """Guarantee: kill -9 of the supervisor ends the server, its worker process and the Celery worker."""
    running.read_until(READY)
    started = descendants(running.process.pid)
    assert len(started) >= 3
    running.process.kill()
    eventually(lambda: are_gone(started), seconds=30)
    require_free_port(running.port)


@pytest.mark.timeout(240)
def test_run_killed_server_process_is_replaced_once(running: Running) -> None:
    """Guarantee: no process of a killed server keeps answering beside its successor."""
    running.read_until(READY)
    before = descendants(running.process.pid)
    (server,) = (
        process
        for process in before
        if parent_of(process) == running.process.pid and b"granian" in Path(f"/proc/{process}/cmdline").read_bytes()
    )
    family = {server, *descendants(server)}
    os.kill(server, signal.SIGKILL)
    eventually(lambda: are_gone(family), seconds=30)

    def answers() -> bool:
        try:
            return send_as_printed(running.text)["allowed"] is True
        except OSError:
            return False

    eventually(answers, seconds=60)
    assert "server has exited (killed by SIGKILL)" in running.stderr


def test_run_on_a_taken_port_is_refused_before_any_start(tmp_path: Path) -> None:
    """Guarantee: the second `make run` states what is wrong and touches no data."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        running = Running(tmp_path / "data", listener.getsockname()[1])
        output, _ = running.process.communicate(timeout=60)
    assert running.process.returncode == 1
    assert output == b""
    assert re.fullmatch(r"CommandError: Port \d+ on 127\.0\.0\.1 is in use\. .*PORT=\d+\n", running.stderr)
    assert (running.folder / "keyvault.sqlite3").stat().st_size == 0
    assert not (running.folder / "logs").exists()
