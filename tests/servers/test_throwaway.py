"""Temporary servers start, and leave nothing behind, however the run ends."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest

from . import throwaway
from .openbao import find_vault, openbao_on_disk, openbao_server
from .postgres import find_postgres, postgres_server
from .redis import find_redis, redis_server
from .throwaway import FailedServerError, MissingServerError, Place, Plan, running

ROOT = Path(__file__).resolve().parents[2]
HOLD = """
import time
from tests.servers.{name} import {name}_server
with {name}_server() as server:
    print(getattr(server, "address", server), flush=True)
    time.sleep(600)
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder for temporary files where an unprivileged server can go, unlike `tmp_path`."""
    with tempfile.TemporaryDirectory(prefix="kv-open-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder


def is_listening(url: str) -> bool:
    """Return whether a server answers at that address."""
    parts = urlsplit(url)
    with socket.socket() as probe:
        return probe.connect_ex((parts.hostname or "", parts.port or 0)) == 0


def eventually(holds: Callable[[], bool], within_seconds: float = 15) -> bool:
    """Return whether the condition becomes true in time."""
    deadline = time.monotonic() + within_seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.skipif(find_postgres() is None, reason="no PostgreSQL server on this machine")
def test_postgres_server_wants_its_password_and_is_gone_afterwards() -> None:
    """Other users of this machine can reach the port, and a superuser of PostgreSQL can run programs."""
    with postgres_server() as url:
        with psycopg.connect(url) as connection:
            row = connection.execute("SELECT current_setting('data_directory'), current_user").fetchone()
        assert row
        address = urlsplit(url)
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(f"postgresql://postgres:wrong@{address.hostname}:{address.port}/postgres")
    assert row[1] == "postgres"
    assert not is_listening(url)
    assert not Path(row[0]).parent.exists()


@pytest.mark.parametrize(
    ("name", "find"),
    [
        ("postgres", find_postgres),
        ("redis", find_redis),
        pytest.param("openbao", find_vault, marks=pytest.mark.openbao),
    ],
)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_server_of_a_killed_run_ends_and_leaves_nothing(
    name: str, find: Callable[[], Path | None], how: signal.Signals, open_folder: Path
) -> None:
    """The servers of a killed run end: no open port, no directory of test data."""
    if find() is None:
        pytest.skip(f"no {name} server on this machine")
    command = [sys.executable, "-c", HOLD.format(name=name)]
    variables = {**os.environ, "TMPDIR": str(open_folder)}
    with subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout
        url = run.stdout.readline().strip()
        assert is_listening(url)
        assert any(open_folder.iterdir())
        run.send_signal(how)
    assert eventually(lambda: not is_listening(url))
    assert eventually(lambda: not any(open_folder.iterdir()))


@pytest.mark.openbao
@pytest.mark.skipif(find_vault() is None, reason="no OpenBao or Vault on this machine")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_vault_on_disk_of_a_killed_run_ends_and_leaves_nothing(how: signal.Signals, open_folder: Path) -> None:
    command = [sys.executable, "-c", HOLD.format(name="openbao").replace("openbao_server", "openbao_on_disk")]
    variables = {**os.environ, "TMPDIR": str(open_folder)}
    with subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout
        url = run.stdout.readline().strip()
        assert is_listening(url)
        run.send_signal(how)
    assert eventually(lambda: not is_listening(url))
    assert eventually(lambda: not any(open_folder.iterdir()))


@pytest.mark.openbao
@pytest.mark.skipif(find_vault() is None, reason="no OpenBao or Vault on this machine")
def test_vault_on_disk_is_sealed_killed_and_started_again(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(open_folder))
    with openbao_on_disk() as server:
        server.seal()
        server.unseal()
        server.kill()
        assert not is_listening(server.address)
        server.start()
        assert is_listening(server.address)
        server.unseal()
        assert server.audit_log.stat().st_size > 0
    assert not is_listening(server.address)
    assert not any(open_folder.iterdir())


def test_vault_that_the_environment_names_is_used_and_not_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYVAULT_TEST_VAULT_ADDR", "http://127.0.0.1:1")
    monkeypatch.setenv("KEYVAULT_TEST_VAULT_TOKEN", "s.lent")
    with openbao_server() as server:
        assert (server.address, server.root_token) == ("http://127.0.0.1:1", "s.lent")


def test_vault_binary_that_the_environment_names_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("bao", "vault"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("KEYVAULT_TEST_VAULT_BIN", raising=False)
    assert find_vault() == tmp_path / "bao"
    (tmp_path / "bao").unlink()
    assert find_vault() == tmp_path / "vault"
    monkeypatch.setenv("KEYVAULT_TEST_VAULT_BIN", "/opt/its/own")
    assert find_vault() == Path("/opt/its/own")


def test_vault_that_is_not_installed_is_missing_with_the_places_searched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("KEYVAULT_TEST_VAULT_BIN", "KEYVAULT_TEST_VAULT_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for start in (openbao_server, openbao_on_disk):
        with pytest.raises(MissingServerError, match="bao and vault on PATH"), start():
            pass


def test_server_that_does_not_start_is_reported_with_its_output(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(open_folder))
    monkeypatch.setattr(throwaway, "ATTEMPTS", 2)
    starts = []

    def plan(place: Place) -> Plan:
        starts.append(place.port)
        serve = ["/bin/sh", "-c", "echo the port is taken; exit 3"]
        return Plan("redis://127.0.0.1:1", serve, lambda: False, signal.SIGTERM)

    with pytest.raises(FailedServerError, match="the port is taken"), running("kv-broken-", plan):
        pass
    assert len(starts) == 2
    assert not any(open_folder.iterdir())


def test_server_that_is_not_installed_is_missing_with_the_places_searched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingServerError, match="redis-server on PATH"), redis_server():
        pass
