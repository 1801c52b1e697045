"""`manage.py verifier`: several processes on one port or Unix socket; none is lost and none is left behind."""

import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from django.test import override_settings

from keyvault.management.commands.verifier import _environ, listening_at, require_free_address
from keyvault.management.service import ServiceError, find_free_port
from tests.project.test_supervisor import are_gone, descendants, eventually
from tests.template_database import make_migrated_data_folder

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 90
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


class Verifying:
    """A verifier on a data folder that is set up, from its start until it is stopped."""

    def __init__(self, data: Path, folder: Path, *place: str) -> None:
        self.folder = folder
        self.process = manage(data, folder, "verifier", "--workers", "2", "--json", *place)
        self.answer = json.loads(self._read_line())

    def _read_line(self) -> bytes:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], START_SECONDS)[0], self.stderr
        line = self.process.stdout.readline()
        assert line, self.stderr
        return line

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def close(self) -> None:
        started = descendants(self.process.pid)
        self.process.kill()
        self.process.communicate()
        for process in started:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def manage(data: Path, folder: Path, *arguments: str) -> "subprocess.Popen[bytes]":
    environ = {name: text for name, text in os.environ.items() if not name.startswith("KEYVAULT_")}
    with (folder / "stderr").open("ab") as stderr:
        return subprocess.Popen(
            [sys.executable, ROOT / "manage.py", *arguments],
            cwd=folder,
            env=environ | {"KEYVAULT_DATA_DIR": str(data)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )


def ask(place: str | tuple[str, int], sent: bytes = HEALTH) -> bytes:
    with socket.socket(socket.AF_UNIX if isinstance(place, str) else socket.AF_INET) as wire:
        wire.settimeout(20)
        wire.connect(place)
        wire.sendall(sent)
        parts = []
        while part := wire.recv(65536):
            parts.append(part)
    return b"".join(parts)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Set up one data folder for all tests; leftovers of one verifier do not affect the next."""
    folder = tmp_path_factory.mktemp("verifier")
    make_migrated_data_folder(folder / "data")
    assert manage(folder / "data", folder, "setup").communicate(timeout=START_SECONDS)
    return folder / "data"


@pytest.fixture
def on_port(data: Path, tmp_path: Path) -> Iterator[Verifying]:
    verifying = Verifying(data, tmp_path, "--port", str(find_free_port()))
    yield verifying
    verifying.close()


@pytest.mark.timeout(240)
def test_verifier_serves_from_every_process_restarts_dead_ones_and_stops_on_sigterm(
    data: Path, on_port: Verifying
) -> None:
    """Guarantee: its output is true, a process that dies is replaced, and SIGTERM ends all with exit 0."""
    place = ("127.0.0.1", int(on_port.answer["url"].rpartition(":")[2]))
    workers = set(on_port.answer["pids"])
    assert len(workers) == on_port.answer["workers"] == 2
    assert workers == descendants(on_port.process.pid)
    assert "each process counts limits separately" in on_port.stderr
    assert ask(place).startswith(b"HTTP/1.1 200 OK\r\n")

    with pytest.raises(ServiceError, match="cannot be used"):
        require_free_address(*place)

    killed = min(workers)
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: len(descendants(on_port.process.pid) - {killed}) == 2, seconds=60)
    assert "has exited (killed by SIGKILL); it restarts" in on_port.stderr

    started = descendants(on_port.process.pid)
    on_port.process.send_signal(signal.SIGTERM)
    assert on_port.process.wait(60) == 0
    assert are_gone(started)
    require_free_address(*place)
    # Log lines go to stderr, where systemd and containers collect and bound them, and to no file.
    assert not (data / "logs").exists()
    assert "Traceback" not in on_port.stderr


@pytest.mark.timeout(240)
def test_verifier_killed_with_sigkill_leaves_no_process(on_port: Verifying) -> None:
    """Guarantee: kill -9 of the parent ends every process that it started."""
    started = descendants(on_port.process.pid)
    assert len(started) == 2
    on_port.process.kill()
    on_port.process.wait()
    eventually(lambda: are_gone(started))


@pytest.mark.timeout(240)
def test_verifier_answers_pending_requests_before_it_stops(on_port: Verifying) -> None:
    """Guarantee: a deployment loses no answer on an open connection."""
    port = int(on_port.answer["url"].rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=20) as wire:
        wire.sendall(b"POST /v1/keys/verify HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n")
        eventually(lambda: wire.getpeername())
        on_port.process.send_signal(signal.SIGTERM)
        eventually(lambda: is_refused(port))
        wire.sendall(b"{}")
        answer = wire.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"\r\nconnection: close\r\n" in answer
    assert on_port.process.wait(60) == 0


def is_refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=20).close()
    except ConnectionResetError:
        return False
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.timeout(240)
def test_verifier_on_a_unix_socket_serves_it_and_removes_it(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "verifier.sock"
    verifying = Verifying(data, tmp_path, "--socket", str(path))
    try:
        assert verifying.answer["socket"] == str(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        for _ in range(20):
            assert ask(str(path)).startswith(b"HTTP/1.1 200 OK\r\n")
        with pytest.raises(ServiceError, match="is in use"), listening_at(path):
            pass
        verifying.process.send_signal(signal.SIGTERM)
        assert verifying.process.wait(60) == 0
        assert not path.exists()
    finally:
        verifying.close()


def test_meters_of_two_verifiers_on_the_same_data_are_separate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: a starting verifier removes its own old meters and no other verifier's."""
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    places = ("/run/a.sock", "/run/b.sock", "http://127.0.0.1:8100", "http://[::1]:8100")
    with override_settings(DATA_DIR=tmp_path):
        folders = [Path(_environ(place)["PROMETHEUS_MULTIPROC_DIR"]) for place in places]
        assert len(set(folders)) == len(places)
        for folder in folders:
            (folder / "counter_1.db").touch()
        _environ(places[0])
    assert [(folder / "counter_1.db").exists() for folder in folders] == [False, True, True, True]


def test_socket_of_a_killed_verifier_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "verifier.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with listening_at(path):
        assert path.is_socket()
    assert not path.exists()


def test_file_at_the_socket_path_is_left_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(ServiceError, match="is not a socket"), listening_at(path):
        pass
    assert path.read_text() == "data"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_taken_port_is_refused(host: str) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(ServiceError, match=f"Port {port} on {host} cannot be used"):
            require_free_address(host, port)
    require_free_address(host, port)


def test_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ServiceError, match=r"on 192\.0\.2\.1 cannot be used"):
        require_free_address("192.0.2.1", 8100)


@pytest.mark.timeout(240)
def test_verifier_that_cannot_serve_reports_why_and_leaves_no_process(tmp_path: Path) -> None:
    """Guarantee: no verifier runs on a database that is not set up."""
    process = manage(tmp_path / "data", tmp_path, "verifier", "--workers", "1", "--port", str(find_free_port()))
    assert process.communicate(timeout=START_SECONDS)[0] == b""
    assert process.returncode == 1
    output = (tmp_path / "stderr").read_text()
    assert "verifier-1 has exited." in output
    assert "the database is not set up; run: manage.py setup" in output
