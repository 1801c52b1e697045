"""A process supervisor: starts programs, restarts those that exit, and stops them in order.

No program outlives the supervising process, however it ends. Each program leads its own process group: the
terminal's Ctrl-C reaches the supervisor only, and processes that an exited program left behind are killed by group.
"""

import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Self

from keyvault.backends.private_files import ensure_private_directory
from keyvault.domain.redaction import redact

STOP_SECONDS = 15.0
"""Maximum time for all programs to stop, in seconds; the remaining ones are then killed."""

FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 5.0
STEADY_SECONDS = 30.0
"""Minimum uptime, in seconds, after which the restart pause is FIRST_PAUSE_SECONDS again."""

MAX_LOG_BYTES = 50_000_000
"""Size of a program's log file above which its content moves to `<name>.log.1`, which it replaces."""

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LAUNCHER = str(Path(__file__).with_name("parent_death_signal.py"))


class StopRequestedError(BaseException):
    """A stop signal arrived. A BaseException, so that no handler of errors swallows it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def stopping_on_signals() -> Iterator[None]:
    """Raise StopRequestedError in the main thread on SIGINT, SIGTERM and SIGHUP; an ignored SIGHUP stays ignored."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise StopRequestedError(number)

    before = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN or number != signal.SIGHUP:
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _ignore_stop_signals() -> Iterator[None]:
    """Ignore further stop signals, so that a second Ctrl-C does not interrupt the shutdown."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True, slots=True)
class Program:
    """A command to supervise.

    `orphan_signal` is sent when the supervisor dies; a program with children of its own needs SIGTERM to stop them.
    The program inherits `descriptors` under the same numbers.
    """

    name: str
    command: tuple[str, ...]
    orphan_signal: signal.Signals = signal.SIGKILL
    descriptors: tuple[int, ...] = ()


@dataclass(slots=True)
class _Child:
    """A program and its current process, if any."""

    program: Program
    log: Path | None
    process: "subprocess.Popen[bytes] | None" = None
    descriptor: int = -1
    started_at: float = 0.0
    due_at: float = 0.0
    next_pause: float = FIRST_PAUSE_SECONDS

    def log_place(self) -> str:
        return "" if self.log is None else f" Log: {self.log}"

    def has_ended(self) -> bool:
        """Return whether the process has exited. It is not reaped, so the kernel cannot reuse its process group id."""
        return bool(select.select([self.descriptor], [], [], 0)[0])

    def bound_log(self) -> None:
        """Move the content of a log file that is too large. A line written meanwhile can be lost."""
        if self.log is not None and self.log.exists() and self.log.stat().st_size > MAX_LOG_BYTES:
            shutil.copyfile(self.log, self.log.with_suffix(".log.1"))
            os.truncate(self.log, 0)

    def reap(self) -> int:
        """Kill the rest of the process group and return the exit status, negative for a signal."""
        assert self.process is not None  # noqa: S101  asked for one that was started
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        exit_status = self.process.wait()
        os.close(self.descriptor)
        self.process, self.descriptor = None, -1
        return exit_status


def _require_main_thread() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("only the main thread may start programs, since they end with the thread that starts them")


def _write_line(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


@dataclass(slots=True)
class Supervisor:
    """A context manager that starts the programs on entry and stops them on exit, the last one first.

    Their output goes to `<logs>/<name>.log`, readable by its owner only and bounded, or to this process's own (`logs`
    None). The supervising process calls `restart_ended` often, always in the main thread: the kernel treats the end of
    the thread that started a program as the death of its parent.
    """

    programs: Sequence[Program]
    environ: Mapping[str, str]
    folder: Path
    logs: Path | None
    report: Callable[[str], None] = _write_line
    stops_together: bool = False
    """Stop all programs simultaneously: for independent programs that need time to stop."""
    _children: list[_Child] = field(default_factory=list)

    def __enter__(self) -> Self:
        _require_main_thread()
        if self.logs is not None:
            ensure_private_directory(self.logs)
        self._children = [_Child(program, self._log_of(program.name)) for program in self.programs]
        try:
            for child in self._children:
                self._start(child)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def is_running(self, name: str) -> bool:
        return any(
            child.process is not None and not child.has_ended()
            for child in self._children
            if child.program.name == name
        )

    def log_tail(self, name: str) -> str:
        """Return the last 15 lines of a program's log file, redacted again for the terminal."""
        path = self._log_of(name)
        if path is None or not path.exists():
            return ""
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 20_000))
            text = file.read().decode(errors="replace")
        return redact("\n".join(text.splitlines()[-15:]))

    def _log_of(self, name: str) -> Path | None:
        return None if self.logs is None else self.logs / f"{name}.log"

    def restart_ended(self) -> None:
        """Report programs that exited and restart them after their pause; bound the log files. Does not block."""
        _require_main_thread()
        for child in self._children:
            with suppress(OSError):
                child.bound_log()
            if child.process is not None and child.has_ended():
                now = time.monotonic()
                pause = FIRST_PAUSE_SECONDS if now - child.started_at > STEADY_SECONDS else child.next_pause
                child.next_pause = min(2 * pause, MAX_PAUSE_SECONDS)
                child.due_at = now + pause
                exit_status = _format_status(child.reap())
                self.report(
                    f"{child.program.name} has exited ({exit_status}); it restarts in {pause:.0f} s.{child.log_place()}"
                )
            if child.process is None and time.monotonic() >= child.due_at:
                self._start(child)

    def wait(self, seconds: float) -> None:
        """Wait until a program exits, a restart is due, or `seconds` have passed."""
        now = time.monotonic()
        pauses = [child.due_at - now for child in self._children if child.process is None]
        alive = [child.descriptor for child in self._children if child.process is not None]
        select.select(alive, [], [], max(0.0, min([seconds, *pauses])))

    def stop(self) -> None:
        """Stop the programs, the last started first, and kill those that do not stop in time. Repeatable.

        Stop signals are ignored meanwhile.
        """
        deadline = time.monotonic() + STOP_SECONDS
        with _ignore_stop_signals():
            for child in self._children if self.stops_together else ():
                if child.process is not None:
                    os.kill(child.process.pid, signal.SIGTERM)
            for child in reversed(self._children):
                if child.process is None:
                    continue
                os.kill(child.process.pid, signal.SIGTERM)
                select.select([child.descriptor], [], [], max(0.0, deadline - time.monotonic()))
                if not child.has_ended():
                    self.report(f"{child.program.name} did not stop in time and is killed.{child.log_place()}")
                child.reap()

    def _start(self, child: _Child) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        log = None if child.log is None else os.open(child.log, flags, 0o600)
        try:
            child.process = start_child_process(
                child.program.command,
                environ=self.environ,
                folder=self.folder,
                output=log,
                orphan_signal=child.program.orphan_signal,
                descriptors=child.program.descriptors,
            )
        finally:
            if log is not None:
                os.close(log)
        child.descriptor = os.pidfd_open(child.process.pid)
        child.started_at = time.monotonic()


def start_child_process(
    command: Sequence[str],
    *,
    environ: Mapping[str, str],
    folder: Path,
    output: int | None = None,
    orphan_signal: signal.Signals = signal.SIGKILL,
    descriptors: Sequence[int] = (),
) -> "subprocess.Popen[bytes]":
    """Start the command in its own session; it ends with the calling thread. `output` None: inherited."""
    launcher = [sys.executable, "-I", "-S", _LAUNCHER, str(os.getpid()), str(int(orphan_signal))]
    return subprocess.Popen(  # noqa: S603  our own programs, by their paths
        [*launcher, *command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=dict(environ),
        cwd=folder,
        start_new_session=True,
        pass_fds=descriptors,
    )


def _format_status(exit_status: int) -> str:
    return f"killed by {signal.Signals(-exit_status).name}" if exit_status < 0 else f"exit {exit_status}"
