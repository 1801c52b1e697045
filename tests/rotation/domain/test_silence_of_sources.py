"""Silence of a key by source: each has moved, has been silent by its own habit, or is waived."""

from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyvault.domain.sources import OTHERS
from rotation.domain.silence import SourceFacts, list_awaited
from rotation.domain.states import KeyFacts, Move, RotationAction, Wait, list_awaited_sources
from tests.rotation.situation import DAY, ENTERED, NOW, QUIET, SECOND, K, S, facts, outcome_of, step, used

DAILY = SourceFacts("192.0.2.0/24 shop", used_at=NOW - QUIET, moved_at=NOW)
JOB = SourceFacts("203.0.113.0/24 month-end", used_at=NOW - DAY, gap_seconds=86_400)
ONCE = SourceFacts("198.51.100.0/24 curl", used_at=NOW - 90 * DAY, gap_seconds=None)
CARRIES = used(1, 1, NOW)


def overlap(*sources: SourceFacts, **changes: object) -> str:
    return outcome_of(_step(*sources, **changes))


def _step(*sources: SourceFacts, **changes: object) -> Wait | Move | RotationAction:
    last_at = max((source.used_at for source in sources), default=None)
    known = {
        "observed_through": NOW,
        "deadline": NOW + 9 * DAY,
        "predecessor": KeyFacts(K.ACTIVE, last_used_at=last_at),
    }
    return step(S.OVERLAP, replacement=CARRIES, sources=sources, **{**known, **changes})


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (DAILY, "to quarantine"),
        (replace(DAILY, used_at=NOW - QUIET + SECOND), "wait"),
        (replace(DAILY, moved_at=DAILY.used_at), "to quarantine"),
        (replace(DAILY, gap_seconds=86_400, used_at=NOW - DAY - QUIET + SECOND), "wait"),
        (replace(DAILY, gap_seconds=86_400, used_at=NOW - DAY - QUIET), "to quarantine"),
        (replace(DAILY, gap_seconds=None), "to quarantine"),
        (replace(DAILY, gap_seconds=86_400, moved_at=DAILY.used_at - SECOND), "wait"),
        (JOB, "wait"),
        (replace(JOB, used_at=NOW - 2 * DAY + SECOND), "wait"),
        (replace(JOB, used_at=NOW - 2 * DAY), "to quarantine"),
        (replace(JOB, gap_seconds=0), "to quarantine"),
        (replace(JOB, is_waived=True), "to quarantine"),
        (ONCE, "wait"),
        (replace(ONCE, is_waived=True), "to quarantine"),
        (replace(ONCE, moved_at=NOW - DAY), "to quarantine"),
    ],
    ids=[
        "moved",
        "moved, and used the old key since",
        "moved at the same time",
        "moved, but one of its hosts may not have called yet",
        "moved, and each of its hosts has called",
        "moved: seen once before",
        "used the old key last",
        "silent for one gap",
        "silent for two gaps, but a second",
        "silent for two gaps",
        "no gap: silent for the quiet period",
        "waived",
        "seen once, 90 days ago",
        "seen once, waived",
        "seen once, moved",
    ],
)
def test_source_is_finished_when_it_moved_or_was_silent_by_its_habit_or_is_waived(
    source: SourceFacts, expected: str
) -> None:
    assert overlap(source) == expected
    assert overlap(DAILY, source) == expected, "another source changes nothing"


def test_source_waived_delays_nothing_by_its_uses() -> None:
    """It is known that it will be refused."""
    assert overlap(DAILY, replace(JOB, used_at=NOW, is_waived=True)) == "to quarantine"
    assert overlap(DAILY, replace(JOB, used_at=NOW)) == "wait"


def test_attempt_of_a_source_is_the_last_use_of_the_old_key() -> None:
    """The replacement must be used after it, as after a use that was allowed."""
    attempt = replace(JOB, used_at=NOW - QUIET, gap_seconds=0)
    known = {"predecessor": KeyFacts(K.ACTIVE, last_used_at=NOW - DAY)}
    assert overlap(attempt, **known) == "to quarantine"
    assert (
        outcome_of(
            step(S.OVERLAP, replacement=used(1, 1, NOW - DAY), sources=(attempt,), observed_through=NOW, **known)
        )
        == "wait"
    )


@pytest.mark.parametrize("moved_at", [None, NOW])
def test_clients_that_were_not_kept_apart_have_neither_moved_nor_stopped(moved_at: datetime | None) -> None:
    """One of them may be a job that calls once a month."""
    others = SourceFacts(OTHERS, used_at=NOW - 90 * DAY, moved_at=moved_at, gap_seconds=None)
    assert overlap(DAILY, others) == "wait"
    assert overlap(DAILY, replace(others, is_waived=True)) == "to quarantine"
    found = _step(DAILY, others)
    assert isinstance(found, Wait)
    assert "others, clients beyond the limit on distinct sources, to be waived" in found.waiting_for


def test_use_without_a_known_source_counts_as_one() -> None:
    assert overlap(DAILY, predecessor=KeyFacts(K.ACTIVE, last_used_at=NOW - SECOND)) == "wait"


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ((), "wait"),
        ((DAILY,), "to quarantine"),
        ((DAILY, replace(JOB, gap_seconds=0)), "wait"),
        ((DAILY, replace(JOB, gap_seconds=0, is_waived=True)), "to quarantine"),
    ],
    ids=["unknown sources", "all have moved", "one has not", "that one is waived"],
)
def test_lost_verifier_restarts_the_silence_of_sources_that_have_not_moved(
    sources: tuple[SourceFacts, ...], expected: str
) -> None:
    """A use that was lost with it can be by any source, but one that has moved has the other key."""
    assert overlap(*sources, lost_at=NOW - QUIET + SECOND) == expected
    assert overlap(*sources, lost_at=NOW - QUIET) == "to quarantine"


@pytest.mark.parametrize(
    ("sources", "period"),
    [
        ((), QUIET),
        ((DAILY,), QUIET),
        ((replace(DAILY, gap_seconds=3_600),), QUIET + timedelta(hours=1)),
        ((replace(JOB, gap_seconds=3_600),), timedelta(hours=2)),
        ((DAILY, replace(JOB, gap_seconds=3_600, is_waived=True)), QUIET),
    ],
    ids=["unknown sources", "moved", "moved, with a gap", "not moved", "that one is waived"],
)
def test_silence_of_a_suspended_merchant_counts_from_its_resumption(
    sources: tuple[SourceFacts, ...], period: timedelta
) -> None:
    """Clients stop while their merchant is refused. Those that have not switched find their key afterwards."""
    sources = tuple(replace(source, used_at=NOW - 9 * DAY) for source in sources)
    assert overlap(*sources, resumed_at=NOW - period + SECOND) == "wait"
    assert overlap(*sources, resumed_at=NOW - period) == "to quarantine"
    assert overlap(*sources, is_suspended=True) == "wait"


def test_overlap_lasts_for_the_quiet_period_whatever_the_sources() -> None:
    assert overlap(DAILY, entered_at=NOW - QUIET + SECOND) == "wait"
    assert overlap(DAILY, entered_at=NOW - QUIET) == "to quarantine"


def test_overlap_names_the_sources_that_it_waits_for_and_until_when() -> None:
    found = _step(DAILY, JOB, ONCE)
    assert isinstance(found, Wait)
    assert found.waiting_for == (
        "silence of the predecessor: 203.0.113.0/24 month-end until 2026-11-22 12:00:00 UTC, "
        "198.51.100.0/24 curl, seen only once, to use the other key or to be waived"
    )
    assert found.until == NOW + DAY
    known = facts(S.OVERLAP, sources=(DAILY, JOB, ONCE), observed_through=NOW)
    assert [(source.name, source.until) for source in list_awaited_sources(known)] == [
        (JOB.name, NOW + DAY),
        (ONCE.name, None),
    ]


@pytest.mark.parametrize("days", [0, 9, 99])
def test_deadline_stalls_and_never_retires_while_a_source_is_awaited(days: int) -> None:
    for source in (JOB, ONCE):
        assert overlap(source, deadline=NOW - days * DAY) == "to stalled"


def test_roll_back_waits_for_the_sources_of_the_replacement() -> None:
    known = {"predecessor": CARRIES, "written_back_at": ENTERED, "observed_through": NOW, "deadline": NOW + DAY}
    replacement = KeyFacts(K.ACTIVE, last_used_at=JOB.used_at)
    moved = replace(JOB, used_at=JOB.used_at - QUIET, moved_at=NOW)
    for source, expected in ((JOB, "wait"), (moved, "to rolling_back")):
        found = step(S.ROLLING_BACK, replacement=replacement, sources=(source,), **known)
        assert outcome_of(found) == expected


moments = st.integers(-(10**6), 0).map(lambda seconds: NOW + timedelta(seconds=seconds))
any_source = st.builds(
    SourceFacts,
    name=st.sampled_from("abc"),
    used_at=moments,
    moved_at=st.none() | moments,
    gap_seconds=st.none() | st.integers(0, 10**6),
    is_waived=st.booleans(),
)


@given(st.lists(any_source, max_size=4).map(tuple), st.none() | moments, st.none() | moments, st.none() | moments)
def test_source_that_is_not_awaited_has_moved_or_was_silent_or_is_waived(
    sources: tuple[SourceFacts, ...], lost_at: datetime | None, through: datetime | None, resumed_at: datetime | None
) -> None:
    finished = [each for each in sources if not list_awaited((each,), 600, lost_at, through, resumed_at)]
    for each in finished:
        if not each.is_waived and each.has_moved:
            assert through is not None
            period = QUIET + timedelta(seconds=each.gap_seconds or 0)
            assert each.used_at + period <= through
            assert resumed_at is None or resumed_at + period <= through
        if not each.is_waived and not each.has_moved:
            is_silent = (
                each.gap_seconds is not None
                and through is not None
                and each.used_at + timedelta(seconds=2 * each.gap_seconds) <= through
                and each.used_at + QUIET <= through
                and (resumed_at is None or resumed_at + max(QUIET, timedelta(seconds=2 * each.gap_seconds)) <= through)
            )
            assert is_silent
    assert len(list_awaited(sources, 600, lost_at, through, resumed_at)) == len(sources) - len(finished)
