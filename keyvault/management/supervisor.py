"""Programs that live and die together: started, started again when they die, stopped in order.

None of them outlives the process that supervises them, whatever ends it. A program leads a process group of
its own: the terminal's Ctrl-C reaches the supervisor alone, and whatever a dead program left behind is found
by the group and killed.
"""

import os
import select
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
"""All programs together; what has not ended by then is killed."""

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 5.0
STEADY_SECONDS = 30.0
"""A program that lived this long is not in a loop of crashes: its next pause is the first again."""

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_DEATH_SIGNAL_SCRIPT = str(Path(__file__).with_name("parent_death_signal.py"))


class StopRequestedError(BaseException):
    """The host wants us to end: no error, and nothing that a handler of errors should swallow."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def stopping_on_signals() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise StopRequestedError in the main thread; one that was ignored stays so."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise StopRequestedError(number)

    before = {number: signal.getsignal(number) for number in _STOPPING}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN or number != signal.SIGHUP:
            signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C does not interrupt the end that the first one asked for."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True, slots=True)
class Program:
    """`orphan_signal` is what it gets when the supervisor dies: one that has children of its own ends them first.

    `descriptors` of ours are open in it, under the same numbers.
    """

    name: str
    command: tuple[str, ...]
    orphan_signal: signal.Signals = signal.SIGKILL
    descriptors: tuple[int, ...] = ()


@dataclass(slots=True)
class _Child:
    """A program and the process that runs it, if one does."""

    program: Program
    log: Path
    process: "subprocess.Popen[bytes] | None" = None
    descriptor: int = -1
    started_at: float = 0.0
    due_at: float = 0.0
    next_pause: float = FIRST_PAUSE_SECONDS

    def has_ended(self) -> bool:
        """Without reaping it: as long as it is not, its process group cannot become somebody else's."""
        return bool(select.select([self.descriptor], [], [], 0)[0])

    def reap(self) -> int:
        """Kills what is left of its group. The exit status, negative for a signal."""
        assert self.process is not None  # noqa: S101  asked for one that was started
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        status = self.process.wait()
        os.close(self.descriptor)
        self.process, self.descriptor = None, -1
        return status


def _require_main_thread() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("programs are started by the main thread: they die with the thread that starts them")


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


@dataclass(slots=True)
class Supervisor:
    """Starts the programs on entering, and on leaving stops them, the last one first.

    Their output goes to `<logs>/<name>.log`, readable by its owner only. `tend` starts again what has died;
    whoever supervises calls it often, always in the main thread: the kernel counts the end of the thread that
    started a program as the death of its parent.
    """

    programs: Sequence[Program]
    environ: Mapping[str, str]
    folder: Path
    logs: Path
    say: Callable[[str], None] = _say
    stops_together: bool = False
    """All are asked to end at once: programs that need nothing of each other, and take their time over it."""
    _children: list[_Child] = field(default_factory=list)

    def __enter__(self) -> Self:
        _require_main_thread()
        ensure_private_directory(self.logs)
        self._children = [_Child(program, self.logs / f"{program.name}.log") for program in self.programs]
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
        """The end of a program's log, redacted once more on its way to a terminal."""
        path = self.logs / f"{name}.log"
        with suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 20_000))
            text = file.read().decode(errors="replace")
            return redact("\n".join(text.splitlines()[-15:]))
        return ""

    def tend(self) -> None:
        """Notices what has died, says so, and starts it again after its pause. Returns at once."""
        _require_main_thread()
        for child in self._children:
            if child.process is not None and child.has_ended():
                now = time.monotonic()
                pause = FIRST_PAUSE_SECONDS if now - child.started_at > STEADY_SECONDS else child.next_pause
                child.next_pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
                child.due_at = now + pause
                status = _status(child.reap())
                self.say(f"{child.program.name} has ended ({status}) and starts again in {pause:.0f} s: {child.log}")
            if child.process is None and time.monotonic() >= child.due_at:
                self._start(child)

    def wait(self, seconds: float) -> None:
        """Returns when a program ends, when one is due to be started again, or after that many seconds."""
        now = time.monotonic()
        pauses = [child.due_at - now for child in self._children if child.process is None]
        alive = [child.descriptor for child in self._children if child.process is not None]
        select.select(alive, [], [], max(0.0, min([seconds, *pauses])))

    def stop(self) -> None:
        """Asks each to end, the last started first, then kills what has not. Repeatable, bounded, undisturbed."""
        deadline = time.monotonic() + STOP_SECONDS
        with _undisturbed():
            for child in self._children if self.stops_together else ():
                if child.process is not None:
                    os.kill(child.process.pid, signal.SIGTERM)
            for child in reversed(self._children):
                if child.process is None:
                    continue
                os.kill(child.process.pid, signal.SIGTERM)
                select.select([child.descriptor], [], [], max(0.0, deadline - time.monotonic()))
                if not child.has_ended():
                    self.say(f"{child.program.name} did not end when asked to, and is killed: {child.log}")
                child.reap()

    def _start(self, child: _Child) -> None:
        log = os.open(child.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            child.process = start_leashed(
                child.program.command,
                environ=self.environ,
                folder=self.folder,
                output=log,
                orphan_signal=child.program.orphan_signal,
                descriptors=child.program.descriptors,
            )
        finally:
            os.close(log)
        child.descriptor = os.pidfd_open(child.process.pid)
        child.started_at = time.monotonic()


def start_leashed(
    command: Sequence[str],
    *,
    environ: Mapping[str, str],
    folder: Path,
    output: int | None = None,
    orphan_signal: signal.Signals = signal.SIGKILL,
    descriptors: Sequence[int] = (),
) -> "subprocess.Popen[bytes]":
    """The command in a session of its own, tied to the life of the calling thread. `output` None: ours."""
    leash = [sys.executable, "-I", "-S", _DEATH_SIGNAL_SCRIPT, str(os.getpid()), str(int(orphan_signal))]
    return subprocess.Popen(  # noqa: S603  our own programs, by their paths
        [*leash, *command],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=dict(environ),
        cwd=folder,
        start_new_session=True,
        pass_fds=descriptors,
    )


def _status(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit {status}"
