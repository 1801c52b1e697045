"""Follow the change feed of the central service over HTTP, for a regional verifier.

While nothing has changed, the service holds a read open for a quarter of the staleness bound. Freshness counts from
when the read was sent plus that waiting time. A slow connection therefore shortens the use of the memory, and never
extends it.

Two threads read and three confirm, each over a connection of its own. While a reply is in flight, another read is open;
a stalled connection delays no receipt by more than the next read. Only one of them registers the reader, because the
service expects an empty memory then.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from keyvault.backends.central import CALL_SECONDS, CentralRefusedError, CentralService, CentralUnavailableError
from keyvault.domain.errors import ErrorCode
from keyvault.domain.ids import Subject
from keyvault.services.work.background_thread import BackgroundThread

_log = logging.getLogger(__name__)

KINDS: Final = frozenset(
    {"key", "credential", "account", "merchant", "limit", "endpoint", "customer_token", "service_token"}
)
"""The kinds of changes that this release knows. A change of any other kind clears the memory."""

_PAUSES: Final = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Pauses after consecutive failures, in seconds; the last one repeats."""

_CONFIRM_CHECK_SECONDS: Final = 1.0

_CONFIRM_THREADS: Final = 3

_MAX_OFFSET_SECONDS: Final = 1.0
"""Maximum time between the reads of the two threads, in seconds."""

_REGISTERING_PAUSE_SECONDS: Final = 0.1

_NEVER: Final = float("-inf")


@dataclass(eq=False)
class RemoteFollower(BackgroundThread):
    """Follow the feed as the reader `name`, see `Follower` for `apply` and `confirm`.

    `set_bound`: receives the staleness bound that the service token has, in seconds.
    """

    thread_name: ClassVar[str] = "feed"

    central: CentralService
    name: str
    apply: Callable[[Collection[Subject] | None], None]
    confirm: Callable[[float, float], None]
    set_bound: Callable[[float], None]
    _after: int | None = None
    _starts: int = 0
    """How often the memory was dropped. Replies to earlier reads and confirmations are ignored."""
    _confirming: int = 0
    """The highest sequence whose confirmation is under way, or was sent; 0 after a failure."""
    _confirmed: int = 0
    _fresh_from: float = _NEVER
    _fresh_until: float = _NEVER
    _wait_seconds: int = 0
    _first_sent_at: float = _NEVER
    _round_trip: float = 0.0
    _failures: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)
    """Held while a reply is applied: no later reply makes the memory fresh before that."""
    _applied: threading.Event = field(default_factory=threading.Event)
    """Set while something is applied and not confirmed."""

    @property
    def is_fresh(self) -> bool:
        """Whether the last read is within the staleness bound."""
        return time.monotonic() < self._fresh_until

    def forget(self) -> None:
        """Raise RuntimeError: a forked child would read under the same name."""
        raise RuntimeError("a regional verifier does not fork")

    def read_once(self, *, is_first: bool = True) -> None:
        """Read and apply; `confirm_once` confirms. Raises CentralUnavailableError, CentralRefusedError.

        `is_first`: only the first of the reading threads registers the reader. Until then the other does nothing.
        """
        with self._lock:
            after, starts, wait_seconds = self._after, self._starts, self._wait_seconds
        if after is None and not is_first:
            return
        monotonic, wall = time.monotonic(), time.time()
        if is_first:
            self._first_sent_at = monotonic
        query: dict[str, object] = {"reader": self.name}
        if after is not None:
            query |= {"after": after, "wait": wait_seconds}
        try:
            body = self.central.get("/v1/changes", query, seconds=wait_seconds + CALL_SECONDS)
        except CentralRefusedError:
            if after is not None and (after, starts) != (self._after, self._starts):
                return  # The other thread confirmed more, or started again, before this read arrived.
            raise
        with self._lock:
            if starts != self._starts:
                return
            if after is None:
                self.apply(None)
            elif subjects := [(change["kind"], change["id"]) for change in body["changes"]]:
                self.apply(subjects if all(kind in KINDS for kind, _ in subjects) else None)
            self._after = max(self._after or 0, body["sequence"])
            self._note_fresh(body, monotonic, wall)
            self._round_trip = time.monotonic() - monotonic - float(body["waited_seconds"])
            if self._after > self._confirmed:
                self._applied.set()

    def confirm_once(self) -> None:
        """Confirm what is applied, if it is more than before. Raises CentralUnavailableError, CentralRefusedError."""
        with self._lock:
            self._applied.clear()
            sequence, starts = self._after, self._starts
            if sequence is None or sequence <= max(self._confirming, self._confirmed):
                return
            self._confirming = sequence
        try:
            self.central.post("/v1/changes/confirmations", {"reader": self.name, "sequence": sequence})
        except (CentralUnavailableError, CentralRefusedError):
            self._confirming = 0
            raise
        with self._lock:
            if starts == self._starts:
                self._confirmed = max(self._confirmed, sequence)

    def start_again(self) -> None:
        """Drop the memory and the position: the service does not know this reader any more."""
        with self._lock:
            self._starts += 1
            self._withdraw()
            self.apply(None)
            self._after, self._confirming, self._confirmed = None, 0, 0

    def _note_fresh(self, body: dict[str, Any], monotonic: float, wall: float) -> None:
        bound = float(body["staleness_seconds"])
        self._wait_seconds = max(1, int(bound / 4))
        self.set_bound(bound)
        waited = float(body["waited_seconds"])
        if monotonic + waited > self._fresh_from:
            self._fresh_from = monotonic + waited
            self._fresh_until = self._fresh_from + bound
            self.confirm(self._fresh_from, wall + waited)

    def _withdraw(self) -> None:
        self._fresh_from = self._fresh_until = _NEVER
        self.confirm(_NEVER, 0.0)

    def _loop(self) -> None:
        # Threads of their own: a confirmation must not wait for a long poll, nor the next read for a confirmation.
        beside = [self._read_beside, *[self._confirm_all] * _CONFIRM_THREADS]
        for number, target in enumerate(beside):
            threading.Thread(target=target, name=f"feed-{number}", daemon=True).start()
        while not self._stop.is_set():
            self._try_read()
        self._end()

    def _read_beside(self) -> None:
        """Read half a round trip after the first thread, so that one of them is mostly waiting at the service."""
        stop = self._stop
        while not stop.is_set():
            if self._after is None:
                stop.wait(_REGISTERING_PAUSE_SECONDS)
                continue
            self._try_read(is_first=False)
            offset = min(self._round_trip / 2, _MAX_OFFSET_SECONDS)
            stop.wait(max(0.0, self._first_sent_at + offset - time.monotonic()))

    def _end(self) -> None:
        """Allow nothing from memory from now on. A reply that is still in flight is ignored."""
        with self._lock:
            self._starts += 1
            self._withdraw()

    def _confirm_all(self) -> None:
        stop = self._stop
        while not stop.is_set():
            if not self._applied.wait(_CONFIRM_CHECK_SECONDS):
                continue
            try:
                self.confirm_once()
            except (CentralUnavailableError, CentralRefusedError):
                # The reading thread logs the outage. It starts again if the service does not know the reader.
                self._applied.set()
                stop.wait(_PAUSES[1])

    def _try_read(self, *, is_first: bool = True) -> None:
        """Read once, and pause after a failure."""
        try:
            self.read_once(is_first=is_first)
        except CentralRefusedError as error:
            # A registration is refused, too, while receipts wait for this reader and a confirmation of it is overdue.
            if error.code == ErrorCode.CURSOR_EXPIRED and self._after is not None:
                _log.warning("the change feed is read again from its end, with an empty memory")
                self.start_again()
            else:
                self._note_failure(error)
        except CentralUnavailableError as error:
            self._note_failure(error)
        except Exception:  # noqa: BLE001  the thread must survive; the memory expires if no read succeeds
            _log.exception("the change feed cannot be read")
            self._failures += 1
        else:
            if self._failures:
                _log.warning("the change feed is read again")
            self._failures = 0
        if failures := self._failures:
            self._stop.wait(_PAUSES[min(failures - 1, len(_PAUSES) - 1)])

    def _note_failure(self, error: Exception) -> None:
        if not self._failures:
            _log.warning("the change feed cannot be read", extra={"why": error})
        self._failures += 1
