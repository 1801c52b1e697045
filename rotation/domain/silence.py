"""Silence of a key, judged for each source that used it. PURE.

A client that calls every day must not hide a month-end job with the same key. So each source of the key that is being
retired is judged alone. It is finished once it uses the key that stays, has been silent for long enough by its own
habit, or was waived by name.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

from keyvault.domain.sources import OTHERS

GAPS = 2
"""Number of its longest gaps for which a source must be silent."""


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """One source of the key that is being retired.

    `used_at`: its last use of that key, allowed, denied, or refused while the key was suspended. `moved_at`: its last
    allowed use of the key that stays.
    `gap_seconds`: its longest gap between two uses; 0: the plan's quiet period suffices; None: it was seen only once
    (`keyvault.domain.sources.OCCASION`), or is OTHERS, whose silence proves nothing.
    """

    name: str
    used_at: datetime
    moved_at: datetime | None = None
    gap_seconds: int | None = 0
    is_waived: bool = False

    @property
    def has_moved(self) -> bool:
        """Whether it used the key that stays last. False for OTHERS, because some of its clients may not have moved."""
        return self.name != OTHERS and self.moved_at is not None and self.moved_at >= self.used_at

    def find_end(
        self, quiet_seconds: int, lost_at: datetime | None, resumed_at: datetime | None = None
    ) -> datetime | None:
        """Return when its silence is long enough; None: never, so it must move or be waived.

        A source that has moved is known to have the other key, but another of its hosts may not have moved. So it must
        be silent for one gap, in which every host calls again, and then for the quiet period. A lost verifier may have
        lost uses, so a source that has not moved must be silent from the loss on. Clients stop while their merchant,
        account or key is suspended, so silence counts from the resumption on.
        """
        since = self.used_at if resumed_at is None else max(self.used_at, resumed_at)
        if self.has_moved:
            return since + timedelta(seconds=quiet_seconds + (self.gap_seconds or 0))
        if self.gap_seconds is None:
            return None
        since = since if lost_at is None else max(since, lost_at)
        return since + timedelta(seconds=max(quiet_seconds, GAPS * self.gap_seconds))


_SLACK = timedelta(days=1)
"""Time that a proposed deadline leaves for approval and delivery."""


def find_fitting_deadline(
    used_at: datetime, gap_seconds: int | None, quiet_seconds: int, begins_at: datetime, deadline: datetime
) -> datetime | None:
    """Return a deadline by which a source that never moves is silent: `deadline` if it is late enough, or None.

    The source may use the key until the replacement is delivered, soon after `begins_at`.
    """
    if gap_seconds is None:
        return None
    is_open_since = (begins_at - used_at).total_seconds()
    silent_at = begins_at + timedelta(
        seconds=max(quiet_seconds, GAPS * gap_seconds, is_open_since if gap_seconds else 0)
    )
    return deadline if silent_at <= deadline else silent_at + _SLACK


@dataclass(frozen=True, slots=True)
class AwaitedSource:
    """A source that a rotation waits for. `until`: the end of its silence; None: it must move or be waived."""

    name: str
    used_at: datetime
    until: datetime | None

    def describe(self) -> str:
        if self.until is None:
            return f"{self.name}, {describe_need(self.name)}"
        return f"{self.name} until {show_time(self.until)}"


def describe_need(name: str) -> str:
    """Describe what must happen to a source whose silence never ends."""
    if name == OTHERS:
        return "clients beyond the limit on distinct sources, to be waived"
    return "seen only once, to use the other key or to be waived"


def list_awaited(
    sources: tuple[SourceFacts, ...],
    quiet_seconds: int,
    lost_at: datetime | None,
    observed_through: datetime | None,
    resumed_at: datetime | None = None,
) -> list[AwaitedSource]:
    """List the sources that have neither moved nor been silent long enough nor been waived."""
    awaited = []
    for source in sources:
        until = source.find_end(quiet_seconds, lost_at, resumed_at)
        is_silent = until is not None and observed_through is not None and until <= observed_through
        if not source.is_waived and not is_silent:
            awaited.append(AwaitedSource(source.name, source.used_at, until))
    return awaited


def show_time(at: datetime) -> str:
    return f"{at:%Y-%m-%d %H:%M:%S} UTC"
