"""Freshness of cached verdicts: how long ago the change feed was confirmed."""

from typing import Final

SWITCH_SECONDS: Final = 0.0005
"""Interpreter switch interval of servers and workers, in seconds. With Python's default of 5 ms, another thread could
delay a request, or each query of a task, by that long."""

_STEP_SECONDS: Final = 0.5
"""Maximum drift between the two clocks after a confirmation, in seconds. A time server slews by 0.5 ms a second."""

_NEVER: Final = (float("-inf"), 0.0, 0.0)


class Freshness:
    """Age of the last confirmation of the feed, in monotonic time.

    A step of the wall clock, or a suspended machine (Linux stops the monotonic clock), counts as unconfirmed until the
    next confirmation.
    """

    __slots__ = ("_confirmed_at", "bound_seconds", "fresh_window", "is_lost")

    def __init__(self, bound_seconds: float) -> None:
        self.bound_seconds = bound_seconds
        self._confirmed_at = float("-inf")
        self.fresh_window = _NEVER
        """End of freshness in monotonic seconds, and the accepted range of the difference between the clocks."""
        self.is_lost = False
        """Whether the database lacks changes that this process has already applied."""

    def confirm(self, monotonic: float, wall: float) -> None:
        """Record that all changes committed at these times, in seconds, have been applied."""
        if not self.is_lost:
            offset = wall - monotonic
            self._confirmed_at = monotonic
            self.fresh_window = (monotonic + self.bound_seconds, offset - _STEP_SECONDS, offset + _STEP_SECONDS)

    def mark_lost(self) -> None:
        """Record that the feed went back: neither memory nor the database can justify a grant any more.

        Only a restart ends this state. The restart is refused while the revocation log has an entry that the
        database lacks.
        """
        self.is_lost = True
        self._confirmed_at = float("-inf")
        self.fresh_window = _NEVER

    def is_fresh(self, monotonic: float, wall: float) -> bool:
        until, least, most = self.fresh_window
        return monotonic < until and least < wall - monotonic < most

    def age_seconds(self, monotonic: float) -> float:
        """Return the age of the last confirmation in seconds; infinite before the first one."""
        return monotonic - self._confirmed_at
