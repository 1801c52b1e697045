"""Clocks that advance only when a test says so."""

from dataclasses import dataclass
from datetime import datetime, timedelta


@dataclass
class Clock:
    """A wall clock."""

    now: datetime

    def __call__(self) -> datetime:
        return self.now

    def tick(self, seconds: float) -> datetime:
        self.now += timedelta(seconds=seconds)
        return self.now


@dataclass
class MonotonicClock:
    """A monotonic clock, in seconds."""

    seconds: float = 1_000.0

    def __call__(self) -> float:
        return self.seconds

    def nanos(self) -> int:
        return int(self.seconds * 1_000_000_000)
