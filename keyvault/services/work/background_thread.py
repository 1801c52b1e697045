"""Background threads of one process: started when needed, stopped at exit, forgotten in a forked child.

A forked child inherits its parent's memory but none of its threads. The parent writes its own pending data, so the
child must forget it, and must start threads of its own.
"""

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from time import monotonic
from typing import ClassVar, Final, Protocol
from weakref import WeakSet

from django.db import InterfaceError, OperationalError, close_old_connections, connections

from keyvault.domain.errors import DependencyUnavailableError
from keyvault.services.work.thread_priority import lower_priority

_log = logging.getLogger(__name__)

JOIN_SECONDS: Final = 5.0
"""Maximum time from the request to stop until the thread ends, in seconds."""


class ProcessState(Protocol):
    """State of one process that a forked child does not share."""

    def forget(self) -> None:
        """Reset in a forked child. No other thread runs there yet, and locks may be held by threads of the parent."""


_states: "WeakSet[ProcessState]" = WeakSet()


def forget_at_fork(state: ProcessState) -> None:
    """Call `state.forget()` in each forked child, as long as the state exists."""
    _states.add(state)


def _forget_in_child() -> None:
    for state in list(_states):
        state.forget()


os.register_at_fork(after_in_child=_forget_in_child)


def stop_at_exit(request: Callable[[], None], stop: Callable[[], None]) -> None:
    """Call `stop` when this process ends, not when a forked child does; before, call the `request` of each.

    atexit does not run in Granian's forked worker; multiprocessing finalizers run there and everywhere else.
    """
    Finalize(None, request, exitpriority=1)
    Finalize(None, stop, exitpriority=0)


@contextmanager
def log_failure(log: logging.Logger, failure: str, *, outage: str | None = None, **fields: object) -> Iterator[None]:
    """Log a failure of the block and go on.

    Logs a warning when the database or another dependency is unavailable (`outage`, by default `failure`), and a
    traceback otherwise.
    """
    try:
        yield
    except DependencyUnavailableError as error:
        log.warning(outage or failure, extra={"why": error.internal or error.detail, **fields})
    except (OperationalError, InterfaceError) as error:
        log.warning(outage or failure, extra={"why": error, **fields})
    except Exception:
        log.exception(failure, extra=fields)


@dataclass(slots=True, eq=False, weakref_slot=True)
class BackgroundThread(ABC):
    """A daemon thread of this process, with what it has not written yet.

    Subclasses define `_loop`, and `forget`, which calls their `__init__` again. Register a process-wide instance with
    `forget_at_fork`.
    """

    thread_name: ClassVar[str]

    _stop: threading.Event = field(default_factory=threading.Event, init=False)
    _thread: threading.Thread | None = field(default_factory=lambda: None, init=False)
    """A factory, because `__init__` does not assign the plain default of such a field."""
    _stop_by: float = field(default_factory=lambda: float("inf"), init=False)
    _starting: threading.Lock = field(default_factory=threading.Lock, init=False)

    def start(self) -> None:
        """Start the thread, and stop it when the process ends. Repeated calls do nothing."""
        with self._starting:
            if self._thread is not None:
                return
            self._prepare()
            self._stop = threading.Event()  # not the event of an earlier thread, which may still be ending
            self._stop_by = float("inf")
            self._thread = threading.Thread(target=self._run, name=self.thread_name, daemon=True)
            self._thread.start()
        stop_at_exit(self.request_stop, self.stop)

    def request_stop(self) -> None:
        """Request the thread to stop, without waiting. Its JOIN_SECONDS begin.

        At exit every thread gets the request before the process waits for the first one: the supervisor's timeout is
        too short for their last rounds one after the other.
        """
        self._stop.set()
        self._stop_by = min(self._stop_by, monotonic() + JOIN_SECONDS)

    def stop(self) -> None:
        """Stop the thread, wait until it ends or its time is over, and write what is left. Does nothing without one."""
        self.request_stop()
        if self._thread is not None:
            self._thread.join(timeout=max(0.0, self._stop_by - monotonic()))
            self._thread = None
            self._finish()

    @abstractmethod
    def forget(self) -> None:
        """Reset in a forked child, which starts a thread of its own."""

    @abstractmethod
    def _loop(self) -> None:
        """Work until `_stop` is set. Runs in the thread."""

    def _prepare(self) -> None:  # noqa: B027  optional
        """Run before the thread starts. When this raises, no thread is started."""

    def _finish(self) -> None:  # noqa: B027  optional
        """Run after the thread has ended, in the thread that stops it."""

    def _run(self) -> None:
        try:
            self._loop()
        finally:
            connections.close_all()  # this thread's own

    def _repeat(self, work: Callable[[], None], interval_seconds: float) -> None:
        """Call `work` after each interval until the thread is stopped, with low priority. A failed call is logged."""
        stop = self._stop
        lower_priority()
        while not stop.wait(interval_seconds):
            with log_failure(_log, "a round of a background thread failed", thread_name=self.thread_name):
                try:
                    work()
                finally:
                    # Also after a failure: a connection that the server has closed is never used again.
                    close_old_connections()


@dataclass(slots=True, eq=False)
class FlushThread(BackgroundThread):
    """A background thread that writes pending data after each interval and when it ends."""

    interval_seconds: ClassVar[float]
    failure: ClassVar[str]
    """Log message of a failed flush."""
    outage: ClassVar[str]
    """Log message of a flush while the database is unavailable; pending data is kept."""

    @abstractmethod
    def flush(self) -> None:
        """Write the pending data. May raise."""

    def _loop(self) -> None:
        self._repeat(self._try_flush, self.interval_seconds)

    def _finish(self) -> None:
        self._try_flush()

    def _try_flush(self) -> None:
        with log_failure(logging.getLogger(type(self).__module__), self.failure, outage=self.outage):
            self.flush()
