"""Follow the change feed of the central service over HTTP, for a regional verifier.

While nothing has changed, the service holds a read open for a quarter of the staleness bound. Freshness counts from
when the read was sent plus that waiting time. A slow connection therefore shortens the use of the memory, and never
extends it.
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
    _confirmed: int = 0
    _fresh_until: float = _NEVER
    _wait_seconds: int = 0
    _failures: int = 0
    _applied: threading.Event = field(default_factory=threading.Event)
    """Set while something is applied and not confirmed."""

    @property
    def is_fresh(self) -> bool:
        """Whether the last read is within the staleness bound."""
        return time.monotonic() < self._fresh_until

    def forget(self) -> None:
        """Raise RuntimeError: a forked child would read under the same name."""
        raise RuntimeError("a regional verifier does not fork")

    def read_once(self) -> None:
        """Read and apply; `confirm_once` confirms. Raises CentralUnavailableError, CentralRefusedError."""
        monotonic, wall = time.monotonic(), time.time()
        query: dict[str, object] = {"reader": self.name}
        if self._after is not None:
            query |= {"after": self._after, "wait": self._wait_seconds}
        body = self.central.get("/v1/changes", query, seconds=self._wait_seconds + CALL_SECONDS)
        if self._after is None:
            self.apply(None)
        elif subjects := [(change["kind"], change["id"]) for change in body["changes"]]:
            self.apply(subjects if all(kind in KINDS for kind, _ in subjects) else None)
        self._after = body["sequence"]
        self._note_fresh(body, monotonic, wall)
        if self._after > self._confirmed:
            self._applied.set()

    def confirm_once(self) -> None:
        """Confirm what is applied, if it is more than before. Raises CentralUnavailableError, CentralRefusedError."""
        self._applied.clear()
        sequence = self._after
        if sequence is not None and sequence > self._confirmed:
            self.central.post("/v1/changes/confirmations", {"reader": self.name, "sequence": sequence})
            # If the reader has started again meanwhile, perhaps with lower sequences, nothing is confirmed.
            self._confirmed = sequence if self._after is not None and self._after >= sequence else 0

    def start_again(self) -> None:
        """Drop the memory and the position: the service does not know this reader any more."""
        self._withdraw()
        self.apply(None)
        self._after, self._confirmed = None, 0

    def _note_fresh(self, body: dict[str, Any], monotonic: float, wall: float) -> None:
        bound = float(body["staleness_seconds"])
        self._wait_seconds = max(1, int(bound / 4))
        self.set_bound(bound)
        waited = float(body["waited_seconds"])
        self._fresh_until = monotonic + waited + bound
        self.confirm(monotonic + waited, wall + waited)

    def _withdraw(self) -> None:
        self._fresh_until = _NEVER
        self.confirm(_NEVER, 0.0)

    def _loop(self) -> None:
        # A thread of its own: a confirmation must not wait for a long poll, nor the next read for a confirmation.
        threading.Thread(target=self._confirm_all, name="feed-confirm", daemon=True).start()
        while not self._stop.is_set():
            self._try_read()
            if self._failures:
                self._stop.wait(_PAUSES[min(self._failures - 1, len(_PAUSES) - 1)])
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

    def _try_read(self) -> None:
        try:
            self.read_once()
        except CentralRefusedError as error:
            if error.code == ErrorCode.CURSOR_EXPIRED:
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

    def _note_failure(self, error: Exception) -> None:
        if not self._failures:
            _log.warning("the change feed cannot be read", extra={"why": error})
        self._failures += 1
