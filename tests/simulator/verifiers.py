"""Verifier processes: each reports the uses that it allowed, and says up to when its reports are complete."""

from collections.abc import Callable
from datetime import datetime, timedelta

from keyvault.services.usage.recorder import LOST_AFTER, Observation

_REPORT = timedelta(seconds=1)
"""Age of the last report of a verifier that reaches the database."""


class Verifier:
    """One process on one host, with a clock of its own.

    While it cannot report (`cut_since`) it keeps its uses; when it dies meanwhile they are lost.
    """

    def __init__(self, name: str, clock: Callable[[], datetime]) -> None:
        self.name, self.clock = name, clock
        self.cut_since: datetime | None = None
        self.lost_at: datetime | None = None
        self._kept: list[Callable[[], None]] = []

    def note(self, report: Callable[[], None]) -> None:
        """Note uses; `report` writes them."""
        if self.cut_since is None:
            report()
        else:
            self._kept.append(report)

    def cut(self) -> None:
        """Lose the connection to the database."""
        if self.cut_since is None:
            self.cut_since = self.clock()

    def reconnect(self) -> None:
        """Report what was kept, as the process that lives on does."""
        self.cut_since = self.lost_at = None
        kept, self._kept = self._kept, []
        for report in kept:
            report()

    def die(self) -> int:
        """End without a report; return how many uses are lost with it."""
        lost, self._kept = len(self._kept), []
        if self.cut_since is None:
            self.cut_since = self.clock()
        return lost

    @property
    def through(self) -> datetime:
        return (self.cut_since or self.clock()) - _REPORT


class VerifierFleet:
    """The verifiers of all environments. A dead one is replaced by a new process; the loss of the old one remains."""

    def __init__(self, size: int, start: Callable[[int], Verifier]) -> None:
        self.verifiers = [start(number) for number in range(size)]
        self._start, self._number = start, size
        self._gone: list[Verifier] = []

    def replace(self, place: int) -> int:
        """Let the verifier die and start another one; return the number of uses that are lost."""
        dead = self.verifiers[place]
        lost = dead.die()
        self._gone.append(dead)
        self.verifiers[place] = self._start(self._number)
        self._number += 1
        return lost

    def observe(self, now: datetime) -> Observation:
        """Mark silent verifiers as lost, as each turn of the engine does, and return the observation."""
        through, losses = None, []
        for verifier in [*self.verifiers, *self._gone]:
            if verifier.lost_at is None and abs(now - verifier.through) > LOST_AFTER:
                verifier.lost_at = now
            if verifier.lost_at is not None:
                losses.append(verifier.lost_at)
            else:
                through = verifier.through if through is None else min(through, verifier.through)
        lost_at = max(losses, default=None)
        self._gone = [gone for gone in self._gone if gone.lost_at is None or gone.lost_at == lost_at]
        return Observation(None if through is None else min(through, now), lost_at)
