"""Hosts with dedicated verifiers: real processes, each host with its own data folder, network and clock."""

import mmap
import os
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from keyvault.management.service import ADDRESS, READY_SECONDS
from keyvault.management.supervisor import start_child_process
from tests.environment import ROOT
from tests.faults.proxy import Proxy
from tests.servers.throwaway import free_port

STEPPING = Path(__file__).with_name("stepping")
NOT_COPIED = ("generation", "logs", "run.lock", "metrics*", "keyvault_*", "clock-*")
"""Files of the data folder that another host would not have."""

STOP_SECONDS = 20


class Host:
    """A host. Its connections to the database have `name`. Start and stop it in the main thread."""

    def __init__(self, name: str, data: Path, folder: Path, workers: int, environ: Mapping[str, str]) -> None:
        self.name, self.data, self.workers = name, data, workers
        self.port = free_port()
        self.log = folder / f"{name}.log"
        self.clock = _Clock(folder / f"clock-{name}")
        self.proxy, through_proxy = Proxy.before(environ["KEYVAULT_DATABASE_URL"])
        variables = {
            **environ,
            "KEYVAULT_DATA_DIR": str(data),
            "KEYVAULT_DATABASE_URL": through_proxy,
            "PGAPPNAME": name,
            "PYTHONPATH": str(STEPPING),
            "FAULTS_CLOCK": str(self.clock.path),
        }
        command = (sys.executable, "manage.py", "verifier", "--json", "--port", str(self.port))
        output = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._process = start_child_process(
                (*command, "--workers", str(workers)),
                environ=variables,
                folder=ROOT,
                output=output,
                orphan_signal=signal.SIGTERM,
            )
        finally:
            os.close(output)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} does not serve:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        return any('"pids"' in line for line in self.log.read_text().splitlines())

    def pids(self) -> list[int]:
        """Return the process ids of its current verifiers."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
        return [int(pid) for pid in children.split()]

    def connect(self) -> socket.socket:
        return socket.create_connection((ADDRESS, self.port), timeout=30)

    def close(self) -> None:
        for pid in self.pids() if self._process.poll() is None else []:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
            self.proxy.close()


class _Clock:
    """The host's wall clock, with an offset in seconds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(struct.pack("d", 0.0))
        with path.open("r+b") as file:
            self._step = mmap.mmap(file.fileno(), 8)

    def step(self, seconds: float) -> None:
        self._step[:8] = struct.pack("d", seconds)


def copy_data(data: Path, to: Path) -> Path:
    """Copy the files that another host needs of an installation."""
    shutil.copytree(data, to, ignore=shutil.ignore_patterns(*NOT_COPIED))
    to.chmod(0o700)
    return to
