"""Pace and halts of a campaign: never faster and never past the halt than approved."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rotation.domain.events import RotationState as S
from rotation.domain.pacing import (
    FAILED,
    MAX_CONCURRENCY,
    MAX_PER_MINUTE,
    PROVED,
    TICK_SECONDS,
    UNPROVED,
    CampaignTally,
    Pace,
    count_to_begin,
    find_pace_faults,
    judge_halt,
    seconds_to_begin,
    tally_of,
)
from rotation.domain.states import CLOSED

paces = st.builds(
    Pace,
    per_minute=st.integers(1, MAX_PER_MINUTE),
    concurrency=st.integers(1, MAX_CONCURRENCY),
    halt_on_stall=st.booleans(),
    halt_at_failed_percent=st.none() | st.integers(0, 100),
)
tallies = st.builds(CampaignTally, *[st.integers(0, 500)] * 3)


@given(paces, st.lists(st.integers(0, 12), min_size=1, max_size=60), st.data())
def test_count_to_begin_with_any_ticks_keeps_rate_and_concurrency(
    pace: Pace, gaps: list[int], data: st.DataObject
) -> None:
    """In any 60 seconds at most `per_minute` rotations start, and at most `concurrency` are unproved."""
    begun: list[int] = []
    now = unproved = 0
    for gap in gaps:
        now += gap
        unproved -= data.draw(st.integers(0, unproved))
        lately = sum(at > now - 60 for at in begun)
        count = count_to_begin(pace, unproved=unproved, begun_in_last_minute=lately)
        assert count >= 0
        begun += [now] * count
        unproved += count
        assert unproved <= pace.concurrency
        assert sum(at > now - 60 for at in begun) <= pace.per_minute


@given(st.integers(1, MAX_PER_MINUTE))
def test_count_to_begin_below_the_limits_reaches_the_pace(per_minute: int) -> None:
    """Ticks at their normal interval start `per_minute` rotations in the first minute, spread over it."""
    pace = Pace(per_minute=per_minute, concurrency=MAX_CONCURRENCY)
    begun: list[int] = []
    for now in range(0, 60, TICK_SECONDS):
        begun += [now] * count_to_begin(pace, unproved=0, begun_in_last_minute=len(begun))
    assert len(begun) == per_minute
    assert begun.count(0) <= per_minute * TICK_SECONDS / 60 + 1


@given(paces, tallies)
def test_judge_halt_on_stall_halts_at_the_first(pace: Pace, tally: CampaignTally) -> None:
    if pace.halt_on_stall and tally.stalled:
        assert judge_halt(pace, tally) is not None


@given(paces, tallies)
def test_judge_halt_by_share_agrees_with_the_fraction(pace: Pace, tally: CampaignTally) -> None:
    """It halts exactly when the share exceeds the approved one or on the first stall; computed in integers."""
    bad, judged = tally.failed + tally.stalled, tally.failed + tally.stalled + tally.proved
    limit = pace.halt_at_failed_percent
    by_share = limit is not None and judged > 0 and bad / judged > limit / 100 + 1e-12
    assert (judge_halt(pace, tally) is not None) == (by_share or (pace.halt_on_stall and tally.stalled > 0))


@given(paces, tallies)
def test_judge_halt_with_more_failures_stays_halted(pace: Pace, tally: CampaignTally) -> None:
    worse = CampaignTally(tally.proved, tally.failed + 1, tally.stalled)
    if judge_halt(pace, tally) is not None:
        assert judge_halt(pace, worse) is not None


@pytest.mark.parametrize(
    ("tally", "halts"),
    [
        (CampaignTally(), False),
        (CampaignTally(proved=9, failed=1), False),
        (CampaignTally(proved=8, failed=1), True),
        (CampaignTally(failed=1), True),
        (CampaignTally(proved=9, stalled=1), False),
        (CampaignTally(proved=17, failed=1, stalled=1), True),
    ],
)
def test_judge_halt_at_ten_percent_matches_examples(tally: CampaignTally, halts: bool) -> None:
    pace = Pace(halt_on_stall=False, halt_at_failed_percent=10)
    assert (judge_halt(pace, tally) is not None) == halts


def test_groups_every_state_is_in_exactly_one() -> None:
    """A new state has to be assigned to a campaign group."""
    for state in S:
        groups = [state in UNPROVED, state in PROVED, state in FAILED, state is S.STALLED]
        assert sum(groups) == 1, state
    assert CLOSED <= PROVED | FAILED


@given(st.dictionaries(st.sampled_from(S), st.integers(0, 50)))
def test_tally_counts_each_rotation_at_most_once(counts: dict[S, int]) -> None:
    found = tally_of(counts)
    unproved = sum(count for state, count in counts.items() if state in UNPROVED)
    assert found.proved + found.failed + found.stalled + unproved == sum(counts.values())


@given(paces)
def test_pace_round_trips(pace: Pace) -> None:
    assert Pace.from_json(pace.as_json()) == pace
    assert list(find_pace_faults(pace)) == []


@pytest.mark.parametrize(
    ("pace", "pointer"),
    [
        (Pace(per_minute=0), "/per_minute"),
        (Pace(per_minute=MAX_PER_MINUTE + 1), "/per_minute"),
        (Pace(concurrency=0), "/concurrency"),
        (Pace(concurrency=MAX_CONCURRENCY + 1), "/concurrency"),
        (Pace(halt_at_failed_percent=-1), "/halt_at_failed_percent"),
        (Pace(halt_at_failed_percent=101), "/halt_at_failed_percent"),
    ],
)
def test_pace_out_of_range_is_a_fault_of_its_field(pace: Pace, pointer: str) -> None:
    assert [fault.pointer for fault in find_pace_faults(pace)] == [pointer]


def test_seconds_to_begin_rounds_up() -> None:
    assert seconds_to_begin(Pace(per_minute=7), 0) == 0
    assert seconds_to_begin(Pace(per_minute=7), 1) == 9
    assert seconds_to_begin(Pace(per_minute=60), 10_000) == 10_000
