"""Start a server on its core, wait until it listens, and stop it."""

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
    """The server exited or does not listen; the text ends with the tail of its log."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that listens. `process`: id of the process that was started, the parent of its others."""

    port: int
    process: int


def clean_environ(**added: str) -> dict[str, str]:
    """Return the environment without settings of Keyvault, its dependencies, or a surrounding test run."""
    ours = ("KEYVAULT_", "VAULT_", "BAO_", "DJANGO_", "PROMETHEUS_")
    return {name: text for name, text in os.environ.items() if not name.startswith(ours)} | added


def run_checked(command: list[str], failed: str, environ: Mapping[str, str] | None = None) -> None:
    """Run a command to its end. Raises RuntimeError with `failed` and the end of its output if it fails."""
    done = subprocess.run(
        command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{failed}: {(done.stderr or done.stdout).strip()[-1500:]}")


@contextmanager
def running_server(
    command: list[str], environ: Mapping[str, str], log: Path, core: int | None, port: int = 0
) -> Iterator[RunningServer]:
    """Run a server until the block ends. Raises StartError.

    `{port}` in command and environment is replaced by `port`, or by a free port if that is 0. At the end the server
    gets SIGTERM, and SIGKILL after STOP_SECONDS.
    """
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
        yield RunningServer(port, process.pid)
    finally:
        stop_process(process)


def _wait_until_listening(process: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise StartError(f"exited with {process.returncode}: {_tail(log)}")
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=2).close()
            return
        time.sleep(0.03)
    raise StartError(f"does not listen after {START_SECONDS} s: {_tail(log)}")


def stop_process(process: "subprocess.Popen[bytes]") -> None:
    """Stop a process and its group."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tail(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").splitlines()[-8:])[-1500:]
