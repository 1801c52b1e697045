"""A circuit breaker: after repeated failures, calls fail immediately for a pause instead of waiting for a timeout.

The breaker starts closed. After `trips_after` consecutive failures it opens for a pause that doubles up to
`max_seconds`. Then it allows one trial call, whose outcome decides; without an outcome, another trial follows after
`TRIAL_SECONDS`. Thread-safe.
"""

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

TRIPS_AFTER = 5
FIRST_SECONDS = 1.0
MAX_SECONDS = 15.0
TRIAL_SECONDS = 8.0
"""Time after which a trial without an outcome is ignored, in seconds; longer than the timeouts of a call."""


@dataclass(slots=True)
class Breaker:
    """The state of one breaker. `clock` returns monotonic seconds."""

    clock: Callable[[], float] = time.monotonic
    trips_after: int = TRIPS_AFTER
    max_seconds: float = MAX_SECONDS
    _failures: int = 0
    _pause: float = FIRST_SECONDS
    _open_until: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def seconds_left(self) -> float:
        """Return the remaining pause in seconds. With 0.0 the caller may call, and must report the outcome."""
        with self._lock:
            if self._failures < self.trips_after:
                return 0.0
            left = self._open_until - self.clock()
            if left > 0:
                return left
            self._open_until = self.clock() + TRIAL_SECONDS
            return 0.0

    def succeeded(self) -> None:
        """Record that the server replied. A refusal is a reply, too."""
        with self._lock:
            self._failures, self._pause = 0, FIRST_SECONDS

    def failed(self) -> None:
        with self._lock:
            self._failures += 1
            if self._failures >= self.trips_after:
                jitter = 1 + secrets.randbelow(250) / 1000
                self._open_until = self.clock() + self._pause * jitter
                self._pause = min(2 * self._pause, self.max_seconds)
