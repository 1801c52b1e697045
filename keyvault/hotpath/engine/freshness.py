"""May this process still answer from memory? Only as long as it has confirmed the change feed lately."""

from typing import Final

SWITCH_SECONDS: Final = 0.0005
"""For `sys.setswitchinterval`, where threads that follow the feed and write uses live beside those that answer: at
Python's own 5 ms each of their steps could hold up a request as long."""

_STEP_SECONDS: Final = 0.5
"""So far the clocks may move apart between two confirmations: a time server slews by 0.5 ms a second."""

_NEVER: Final = (float("-inf"), 0.0, 0.0)


class Freshness:
    """Staleness is measured in monotonic time. A step of the wall clock, or a machine that was suspended (Linux stops
    the monotonic clock then), counts as unconfirmed until the feed is confirmed again."""

    __slots__ = ("_confirmed_at", "bound_seconds", "is_lost", "vouched")

    def __init__(self, bound_seconds: float) -> None:
        self.bound_seconds = bound_seconds
        self._confirmed_at = float("-inf")
        self.vouched = _NEVER
        """Until when, in monotonic seconds, and between which differences of the clocks `may_vouch` says yes."""
        self.is_lost = False
        """Whether the database itself lacks changes that this process was told of."""

    def confirm(self, monotonic: float, wall: float) -> None:
        """Everything that was committed when the clocks showed this has been applied. Both in seconds."""
        if not self.is_lost:
            offset = wall - monotonic
            self._confirmed_at = monotonic
            self.vouched = (monotonic + self.bound_seconds, offset - _STEP_SECONDS, offset + _STEP_SECONDS)

    def lose(self) -> None:
        """The feed went back. From now on neither memory nor the database is a reason for a yes; only a restart is the
        end of it, which is refused while the journal knows of a revocation that the database lacks."""
        self.is_lost = True
        self._confirmed_at = float("-inf")
        self.vouched = _NEVER

    def may_vouch(self, monotonic: float, wall: float) -> bool:
        until, least, most = self.vouched
        return monotonic < until and least < wall - monotonic < most

    def age_seconds(self, monotonic: float) -> float:
        """How long ago the feed was confirmed; infinite before the first time."""
        return monotonic - self._confirmed_at
