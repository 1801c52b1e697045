"""Starts a server on its core, waits until it listens, and sees to its end."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from keyvault.management.supervisor import start_child_process
from tests.environment import ROOT
from tests.servers.throwaway import free_port

from .machine import pinned

START_SECONDS = 60
STOP_SECONDS = 15


class StartError(Exception):
    """The server ended or does not listen; the text ends with the tail of its log."""


@dataclass(frozen=True, slots=True)
class Started:
    """A server that listens. `process` is the one that was started, and is above all others of it."""

    port: int
    process: int


def clean_environ(**added: str) -> dict[str, str]:
    """Without a developer's own settings, nor those of a run of ours around this."""
    ours = ("KEYVAULT_", "VAULT_", "BAO_", "DJANGO_", "PROMETHEUS_")
    return {name: text for name, text in os.environ.items() if not name.startswith(ours)} | added


def run_to_end(command: list[str], failed: str, environ: Mapping[str, str] | None = None) -> None:
    """Raises RuntimeError, with the end of what it said, where it fails."""
    done = subprocess.run(
        command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{failed}: {(done.stderr or done.stdout).strip()[-1500:]}")


@contextmanager
def launched(
    command: list[str], environ: Mapping[str, str], log: Path, core: int | None, port: int = 0
) -> Iterator[Started]:
    """`{port}` in the command is the server's port, a free one unless told. On leaving it is asked to end, and made
    to. Raises StartError."""
    port = port or free_port()
    command = [part.replace("{port}", str(port)) for part in command]
    environ = {name: text.replace("{port}", str(port)) for name, text in environ.items()}
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        process = start_child_process(
            pinned(command, core), environ=environ, folder=ROOT, output=descriptor, orphan_signal=signal.SIGTERM
        )
    finally:
        os.close(descriptor)
    try:
        _wait_until_listening(process, port, log)
        yield Started(port, process.pid)
    finally:
        _end(process)


def _wait_until_listening(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise StartError(f"ended with {process.returncode}: {_tail(log)}")
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=2).close()
            return
        time.sleep(0.03)
    raise StartError(f"does not listen after {START_SECONDS} s: {_tail(log)}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").splitlines()[-8:])[-1500:]
