"""How fast a campaign begins its rotations, and when it stops by itself. PURE.

A rotation holds one of the `concurrency` places from its begin until its replacement is proved in use. The quiet
period and the quarantine after that take days, in which both keys are good and nobody waits: they hold no place.
For the same reason a rotation counts as gone well from its proof on, when the share of failures is judged.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from math import ceil
from typing import Any

from keyvault.domain.canonical import JsonValue
from keyvault.domain.errors import Fault
from rotation.domain.events import RotationState

S = RotationState

TICK_SECONDS = 5
"""A campaign is looked at that often; the begins of a minute are spread over its ticks."""

START_WITHIN = timedelta(days=30)
"""What an approved campaign has not begun by then is not begun any more."""

MOST_MEMBERS = 10_000
FASTEST_PER_MINUTE = 600
MOST_AT_ONCE = 1_000

UNPROVED = frozenset(
    {S.REQUESTED, S.AWAITING_APPROVAL, S.SCHEDULED, S.EMERGENCY, S.STAGED, S.PUBLISHING, S.AWAITING_PROOF}
)
"""Holds a place. One that stalled holds none: it waits for a person, and `judge_halt` has counted it."""

PROVED = frozenset({S.OVERLAP, S.QUARANTINE, S.REVOKING, S.COMPLETED})
FAILED = frozenset({S.ROLLING_BACK, S.ROLLED_BACK, S.CANCELLED, S.REJECTED, S.EXPIRED})


@dataclass(frozen=True, slots=True)
class Pace:
    """At most `per_minute` begins in any 60 seconds, `concurrency` unproved rotations at once.

    `halt_on_stall`: the first rotation that stalls halts the campaign. `halt_at_failed_percent`: so does a larger
    share than that of failed and stalled ones among those that came to something; None: no share does.
    """

    per_minute: int = 10
    concurrency: int = 10
    halt_on_stall: bool = True
    halt_at_failed_percent: int | None = 10

    def as_json(self) -> dict[str, JsonValue]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Pace":
        """What `as_json` wrote."""
        return cls(**{each.name: values[each.name] for each in fields(cls)})


@dataclass(frozen=True, slots=True)
class CampaignTally:
    """What became of a campaign's rotations since it was approved, or resumed after a halt."""

    proved: int = 0
    failed: int = 0
    stalled: int = 0


def find_pace_faults(pace: Pace) -> Iterator[Fault]:
    """What of it cannot be meant."""
    if not 1 <= pace.per_minute <= FASTEST_PER_MINUTE:
        yield Fault("/per_minute", f"1 to {FASTEST_PER_MINUTE}")
    if not 1 <= pace.concurrency <= MOST_AT_ONCE:
        yield Fault("/concurrency", f"1 to {MOST_AT_ONCE}")
    if pace.halt_at_failed_percent is not None and not 0 <= pace.halt_at_failed_percent <= 100:
        yield Fault("/halt_at_failed_percent", "0 to 100")


def count_to_begin(pace: Pace, *, unproved: int, begun_in_last_minute: int) -> int:
    """How many may begin in this tick: never more than the pace allows, and spread over the minute's ticks."""
    each_tick = ceil(pace.per_minute * TICK_SECONDS / 60)
    return max(0, min(each_tick, pace.per_minute - begun_in_last_minute, pace.concurrency - unproved))


def judge_halt(pace: Pace, tally: CampaignTally) -> str | None:
    """Why the campaign is to halt; None: it goes on."""
    if pace.halt_on_stall and tally.stalled:
        return "a rotation stalled" if tally.stalled == 1 else f"{tally.stalled} rotations stalled"
    bad = tally.failed + tally.stalled
    judged = bad + tally.proved
    limit = pace.halt_at_failed_percent
    if limit is not None and bad * 100 > limit * judged:
        return f"{bad} of {judged} rotations failed or stalled, which is more than {limit} percent"
    return None


def tally_of(counts: Mapping[RotationState, int]) -> CampaignTally:
    """Of rotations counted by the state that each is in."""
    return CampaignTally(
        proved=sum(count for state, count in counts.items() if state in PROVED),
        failed=sum(count for state, count in counts.items() if state in FAILED),
        stalled=counts.get(S.STALLED, 0),
    )


def seconds_to_begin(pace: Pace, waiting: int) -> int:
    """How long it takes at least, at this pace, until the last of those that wait has begun."""
    return ceil(waiting * 60 / pace.per_minute)
