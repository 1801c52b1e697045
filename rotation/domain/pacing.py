"""The rate at which a campaign begins rotations, and the conditions that halt it. PURE.

A rotation holds one of the `concurrency` slots from its beginning until its replacement is proved in use. The quiet
period and the quarantine take days in which the rotation needs no attention, so they hold no slot. For the same reason
a proved rotation counts as successful in the share of failures.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import timedelta
from math import ceil
from typing import Any

from keyvault.domain.canonical import JsonValue
from keyvault.domain.errors import Fault
from rotation.domain.events import RotationState
from rotation.domain.states import ABANDONED

S = RotationState

TICK_SECONDS = 5
"""Interval between a campaign's ticks, in seconds; the starts of a minute are spread over its ticks."""

START_WITHIN = timedelta(days=30)
"""Time after the approval in which a campaign may begin rotations."""

MAX_MEMBERS = 10_000
MAX_PER_MINUTE = 600
MAX_CONCURRENCY = 1_000

UNPROVED = frozenset(
    {S.REQUESTED, S.AWAITING_APPROVAL, S.SCHEDULED, S.EMERGENCY, S.STAGED, S.PUBLISHING, S.AWAITING_PROOF}
)
"""States that hold a slot. A stalled rotation holds none: it waits for a person, and `judge_halt` counts it."""

PROVED = frozenset({S.OVERLAP, S.QUARANTINE, S.REVOKING, S.COMPLETED})
"""States of a proved rotation. A completed one counts only with its proof: it also completes when its predecessor is
revoked by hand or expires."""

FAILED = ABANDONED | {S.ROLLING_BACK}
"""States of a rotation that ended, or will end, without replacing the key."""


@dataclass(frozen=True, slots=True)
class Pace:
    """At most `per_minute` starts in any 60 seconds and `concurrency` unproved rotations at the same time.

    `halt_on_stall`: the first stalled rotation halts the campaign. `halt_at_failed_percent`: a larger share of failed
    and stalled rotations among the decided ones halts it, too; None: no share does.
    """

    per_minute: int = 10
    concurrency: int = 10
    halt_on_stall: bool = True
    halt_at_failed_percent: int | None = 10

    def as_json(self) -> dict[str, JsonValue]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Pace":
        """Read what `as_json` wrote."""
        return cls(**{each.name: values[each.name] for each in fields(cls)})


@dataclass(frozen=True, slots=True)
class CampaignTally:
    """Outcomes of a campaign's rotations since its approval, or since it was last resumed after a halt."""

    proved: int = 0
    failed: int = 0
    stalled: int = 0


def find_pace_faults(pace: Pace) -> Iterator[Fault]:
    """Yield each fault of a pace."""
    if not 1 <= pace.per_minute <= MAX_PER_MINUTE:
        yield Fault("/per_minute", f"1 to {MAX_PER_MINUTE}")
    if not 1 <= pace.concurrency <= MAX_CONCURRENCY:
        yield Fault("/concurrency", f"1 to {MAX_CONCURRENCY}")
    if pace.halt_at_failed_percent is not None and not 0 <= pace.halt_at_failed_percent <= 100:
        yield Fault("/halt_at_failed_percent", "0 to 100")


def count_to_begin(pace: Pace, *, unproved: int, begun_in_last_minute: int) -> int:
    """Return how many rotations may begin in this tick: at most what the pace allows, spread over the minute."""
    each_tick = ceil(pace.per_minute * TICK_SECONDS / 60)
    return max(0, min(each_tick, pace.per_minute - begun_in_last_minute, pace.concurrency - unproved))


def judge_halt(pace: Pace, tally: CampaignTally) -> str | None:
    """Return why the campaign must halt; None: it continues."""
    if pace.halt_on_stall and tally.stalled:
        return "a rotation stalled" if tally.stalled == 1 else f"{tally.stalled} rotations stalled"
    bad = tally.failed + tally.stalled
    judged = bad + tally.proved
    limit = pace.halt_at_failed_percent
    if limit is not None and bad * 100 > limit * judged:
        return f"{bad} of {judged} rotations failed or stalled, which is more than {limit} percent"
    return None


def tally_of(counts: Mapping[RotationState, int]) -> CampaignTally:
    """Build the tally from the number of rotations in each state."""
    return CampaignTally(
        proved=sum(count for state, count in counts.items() if state in PROVED),
        failed=sum(count for state, count in counts.items() if state in FAILED),
        stalled=counts.get(S.STALLED, 0),
    )


def seconds_to_begin(pace: Pace, waiting: int) -> int:
    """Return the minimum time until the last of `waiting` rotations begins at this pace, in seconds."""
    return ceil(waiting * 60 / pace.per_minute)
