"""The service under experiment: the programs of `make run`, in any number, supervised and restarted."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from django.conf import settings

from keyvault.management import service, supervisor
from keyvault.management.service import WORKER, find_free_port
from keyvault.management.supervisor import STOP_SECONDS, Program, Supervisor
from tests.environment import ROOT
from tests.faults.results import say

POLL_SECONDS = 0.1


class GaveUpError(Exception):
    """A wait that timed out; its message is reported as a violation."""


@contextmanager
def served(
    folder: Path, *, workers: int = 1, beats: int = 1, environ: Mapping[str, str] | None = None, wrapper: str = ""
) -> Iterator[tuple[Supervisor, int]]:
    """Start a server with this many beats and workers, and yield its port once it is ready. All end on exit.

    `wrapper`: the module of `tests.faults` through which beats and workers start; the environment chooses its patches.
    """
    port = find_free_port()
    variables = {**os.environ, "KEYVAULT_ORIGIN": f"http://127.0.0.1:{port}", **(environ or {})}
    programs = [service.server_program(port)]
    # With the file broker each worker runs a beat.
    programs += [
        _numbered(service.beat_program(), number, wrapper) for number in range(0 if settings.IS_FILE_BROKER else beats)
    ]
    programs += [_numbered(service.worker_program(), number, wrapper) for number in range(workers)]
    with Supervisor(programs, variables, ROOT, folder / "logs", _note_restart) as supervised:
        service.wait_until_ready(supervised, port)
        yield supervised, port


restarted: list[str] = []
"""The supervisor's messages in this process: each line is a program that ended by itself."""


def _note_restart(line: str) -> None:
    restarted.append(line)
    say(line)


def _numbered(program: Program, number: int, wrapper: str) -> Program:
    command = program.command
    if wrapper:
        options = command[command.index("keyvault.project") + 1 :]
        command = (sys.executable, "-m", wrapper, *options)
    if program.name == WORKER:
        command = (*command, "--hostname", f"worker{number}@faults")
    return Program(f"{program.name}{number}", command, program.orphan_signal)


def until(what: str, holds: Callable[[], bool], seconds: float, poll: Callable[[], None] = lambda: None) -> None:
    """Poll until the event, which is in another process, has occurred. Raises GaveUpError."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise GaveUpError(f"not within {seconds:.0f} s: {what}")
        poll()
        time.sleep(POLL_SECONDS)


class WorkerLauncher:
    """Starts preloaded workers, one at a time. Each one is killed at the crash point that it was given."""

    def __init__(self, folder: Path, notes: Path) -> None:
        # Like `start_child_process`, with a pipe instead of the empty input.
        launcher = [sys.executable, "-I", "-S", supervisor._LAUNCHER, str(os.getpid()), str(int(signal.SIGKILL))]
        self.log = folder / "logs" / "crashing.log"
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [*launcher, sys.executable, "-m", "tests.faults.worker", "--preloaded"],
                cwd=ROOT,
                env={**os.environ, "FAULTS_NOTES": str(notes), "C_FORCE_ROOT": "1"},
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
            )
        self._pid = 0

    def launch(self, point: str) -> None:
        """Start the next worker. The previous one has ended."""
        assert self._process.stdin
        self._process.stdin.write(f"{point}\n".encode())
        self._process.stdin.flush()
        self._pid = self._read()

    def has_ended(self, within_seconds: float) -> bool:
        assert self._process.stdout
        return bool(select.select([self._process.stdout], [], [], within_seconds)[0])

    def reap(self) -> int:
        """Wait for the worker's end and return its status, as `os.waitpid` does."""
        status, self._pid = self._read(), 0
        return status

    def end_worker(self) -> int:
        """Send the worker SIGTERM, as the supervisor does, and kill it if it does not end in time.

        It may have died at its crash point meanwhile, and its launcher has reaped it.
        """
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGTERM)
            if not self.has_ended(STOP_SECONDS):
                os.kill(self._pid, signal.SIGKILL)
        return self.reap()

    def _read(self) -> int:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise GaveUpError(f"the launcher is gone:\n{self.log.read_text()[-2000:]}")
        return int(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
