"""Scheduling of turns: changed rotations first, waiting ones at growing intervals."""

from datetime import datetime, timedelta
from types import SimpleNamespace

import pytest

from keyvault.models import WorkLease
from keyvault.models.usage import UseOutcome
from keyvault.services.usage.recorder import UsageLog
from keyvault.services.work.leases import claim, postpone
from rotation.domain.states import Facts, Move, RotationAction, Wait, next_step
from rotation.models import Rotation
from rotation.services.rotations import engine
from rotation.services.rotations.engine import MAX_ATTEMPTS, POLL_SECONDS, advance_all_due, list_due
from rotation.services.rotations.reports import get_rotation, subject_of
from tests.clocks import Clock
from tests.rotation import scene
from tests.rotation.steps import advance, begun, overlapping, quarantined, revoke

pytestmark = [pytest.mark.database, pytest.mark.django_db]


def due_in(rotation: Rotation, clock: Clock) -> float:
    """Return the seconds until the rotation's next check."""
    due_at = WorkLease.objects.get(subject=subject_of(rotation.rotation_id)).due_at
    assert due_at is not None
    waits: timedelta = due_at - clock()
    return waits.total_seconds()


def test_turn_interval_grows_with_the_wait_and_ends_when_a_step_is_possible(clock: Clock, verifier: UsageLog) -> None:
    shortest, longest = POLL_SECONDS
    rotation = advance(begun(clock), clock)
    assert due_in(rotation, clock) == shortest
    advance(rotation, clock, 200)
    assert due_in(rotation, clock) == 10
    advance(rotation, clock, 86_400)
    assert due_in(rotation, clock) == longest
    scene.acknowledge_replacement(rotation.rotation_id, clock())
    verifier.flush()
    assert list_due(clock()) == [rotation.rotation_id]
    advance(rotation, clock, 4)
    verifier.flush()
    advance(rotation, clock)
    assert 0 < due_in(rotation, clock) <= 5


def test_turn_is_immediate_when_a_key_is_ended_or_tried(clock: Clock, verifier: UsageLog) -> None:
    """A merchant that just lost its only good key does not wait for the next regular check."""
    rotation = advance(overlapping(clock, verifier), clock)
    assert list_due(clock()) == []
    assert rotation.replacement is not None
    revoke(rotation.replacement, clock)
    assert list_due(clock()) == [rotation.rotation_id]

    other = advance(quarantined(clock, verifier), clock)
    assert other.rotation_id not in list_due(clock())
    scene.use(verifier, other.predecessor_id, outcome=UseOutcome.REFUSED)
    assert other.rotation_id in list_due(clock())


def test_turn_after_a_failure_waits_for_its_pause_despite_a_change(clock: Clock, verifier: UsageLog) -> None:
    """Otherwise a failing step would use up its attempts within seconds."""
    rotation = overlapping(clock, verifier)
    assert rotation.replacement is not None
    revoke(rotation.replacement, clock)
    lease = claim(subject_of(rotation.rotation_id), clock(), ignore_due_at=True)
    assert lease is not None
    postpone(lease, clock(), "the backend refuses")
    assert list_due(clock()) == []
    assert list_due(clock.tick(2)) == [rotation.rotation_id]


def test_turn_leased_by_one_worker_is_not_taken_by_another(clock: Clock, verifier: UsageLog) -> None:
    rotation = begun(clock)
    assert claim(subject_of(rotation.rotation_id), clock()) is not None
    assert list_due(clock()) == []
    assert list_due(clock() + timedelta(minutes=1)) == [rotation.rotation_id]


def test_sweep_takes_every_due_turn_until_its_time_is_over(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotations = [begun(clock) for _ in range(5)]
    with monkeypatch.context() as hurry:
        hurry.setattr(engine, "SWEEP_SECONDS", -1.0)
        assert advance_all_due(clock) == 2
    monkeypatch.setattr(engine, "SWEEP_SECONDS", 600.0)
    assert advance_all_due(clock) == 3
    assert all(get_rotation(each.rotation_id).state == "awaiting_proof" for each in rotations)
    assert advance_all_due(clock) == 0


def test_sweep_without_time_left_takes_one_turn_of_each_list(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: even with long turns, both changed and waiting rotations progress."""
    urgent = [overlapping(clock, verifier) for _ in range(2)]
    for each in urgent:
        assert each.replacement is not None
        advance(each, clock)
        revoke(each.replacement, clock)
    waiting = {begun(clock).rotation_id for _ in range(3)}
    assert set(list_due(clock())) == waiting | {each.rotation_id for each in urgent}
    taken: list[str] = []
    monkeypatch.setattr(engine, "advance_rotation", lambda rotation_id, clock: taken.append(rotation_id))
    monkeypatch.setattr(engine, "SWEEP_SECONDS", -1.0)
    assert advance_all_due(clock) == 2
    assert len(set(taken) & waiting) == len(set(taken) - waiting) == 1


def test_sweep_does_not_count_the_time_of_its_listing(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: rotations progress even when listing them takes longer than a sweep lasts."""
    for _ in range(3):
        begun(clock)
    seconds = [0.0]

    def list_slowly(now: datetime) -> list[str]:
        seconds[0] += 60
        return list_due(now)

    monkeypatch.setattr(engine, "list_due", list_slowly)
    monkeypatch.setattr(engine, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    assert advance_all_due(clock) == 3


def test_listing_starts_at_a_random_place_so_that_stuck_rotations_hide_no_other(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: more stuck rotations than one listing holds do not starve the others."""
    known = sorted(begun(clock).rotation_id for _ in range(5))
    monkeypatch.setattr(engine, "_MAX_LISTED", 2)
    listed = []
    for start in known:
        monkeypatch.setattr(engine, "_draw_start", lambda start=start: start)
        listed.append(list_due(clock()))
    assert listed == [[each, known[(place + 1) % 5]] for place, each in enumerate(known)]
    monkeypatch.undo()
    starts = {engine._draw_start() for _ in range(20)}
    assert len(starts) == 20
    assert all(len(start) == len(known[0]) for start in starts)


def test_unforeseen_fault_stalls_its_own_rotation_and_no_other(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, sound = begun(clock), begun(clock)

    def fail(facts: Facts, now: datetime) -> Wait | Move | RotationAction:
        if facts.plan.credential_id == broken.credential_id and facts.state != "stalled":
            raise ZeroDivisionError("unforeseen")
        return next_step(facts, now)

    monkeypatch.setattr(engine, "next_step", fail)
    for _ in range(MAX_ATTEMPTS):
        advance_all_due(clock)
        clock.tick(80)
    assert get_rotation(sound.rotation_id).state == "awaiting_proof"
    stalled = get_rotation(broken.rotation_id)
    assert (stalled.state, stalled.why) == ("stalled", "a step kept failing: an unexpected error; see the log")
