"""The virtual clock of a simulation."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

START = datetime(2026, 1, 1, tzinfo=UTC)


class VirtualClock:
    """The true time of a simulation; only the scheduler advances it."""

    def __init__(self, at: datetime = START) -> None:
        self.now = at

    def advance_to(self, at: datetime) -> None:
        if at < self.now:
            raise ValueError(f"{at} is before {self.now}")
        self.now = at

    def skewed(self, offset: timedelta) -> Callable[[], datetime]:
        """Return the clock of a host that differs from the true time by `offset`."""
        return lambda: self.now + offset
