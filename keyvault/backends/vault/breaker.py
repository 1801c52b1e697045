"""A circuit breaker: a server that does not answer is not asked again for a moment, so that nobody waits for it.

Closed at first. After `trips_after` failures in a row it is open, for a pause that doubles up to `longest_seconds`;
then one call is let through, and its outcome decides; one that never says what came of it counts for nothing after
`TRIAL_SECONDS`. Thread-safe.
"""

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

TRIPS_AFTER = 5
FIRST_SECONDS = 1.0
LONGEST_SECONDS = 15.0
TRIAL_SECONDS = 8.0
"""Longer than the time limits of a call."""


@dataclass(slots=True)
class Breaker:
    """`clock` in monotonic seconds."""

    clock: Callable[[], float] = time.monotonic
    trips_after: int = TRIPS_AFTER
    longest_seconds: float = LONGEST_SECONDS
    _failures: int = 0
    _pause: float = FIRST_SECONDS
    _open_until: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def seconds_left(self) -> float:
        """How long it lets nobody through; 0.0: whoever asks may call, and says what came of it."""
        with self._lock:
            if self._failures < self.trips_after:
                return 0.0
            left = self._open_until - self.clock()
            if left > 0:
                return left
            self._open_until = self.clock() + TRIAL_SECONDS
            return 0.0

    def succeeded(self) -> None:
        """The server answered, be it a refusal."""
        with self._lock:
            self._failures, self._pause = 0, FIRST_SECONDS

    def failed(self) -> None:
        with self._lock:
            self._failures += 1
            if self._failures >= self.trips_after:
                jitter = 1 + secrets.randbelow(250) / 1000
                self._open_until = self.clock() + self._pause * jitter
                self._pause = min(2 * self._pause, self.longest_seconds)

    @property
    def is_open(self) -> bool:
        """For showing: whether calls are refused now."""
        return self._failures >= self.trips_after and self._open_until > self.clock()
