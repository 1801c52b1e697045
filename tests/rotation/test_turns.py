"""Whose turn it is: what something happened to at once, what merely waits the rarer the longer it waits."""

from datetime import datetime, timedelta

import pytest

from keyvault.models import WorkLease
from keyvault.models.usage import Outcome
from keyvault.services.leases import claim, postpone
from keyvault.services.usage import UsageLog
from rotation.models import Rotation
from rotation.services import engine
from rotation.services.engine import LOOK_AGAIN_SECONDS, MOST_ATTEMPTS, advance_all_due, list_due
from rotation.services.reports import get_rotation, subject_of
from rotation.states import Act, Facts, Move, Wait, next_step

from . import scene
from .scene import Clock
from .steps import advance, begun, overlapping, quarantined, revoke

pytestmark = [pytest.mark.database, pytest.mark.django_db]


def due_in(rotation: Rotation, clock: Clock) -> float:
    """Seconds until it is looked at again."""
    due_at = WorkLease.objects.get(subject=subject_of(rotation.rotation_id)).due_at
    assert due_at is not None
    waits: timedelta = due_at - clock()
    return waits.total_seconds()


def test_turn_comes_rarer_the_longer_a_rotation_has_waited_and_never_later_than_it_can_go_on(
    clock: Clock, verifier: UsageLog
) -> None:
    shortest, longest = LOOK_AGAIN_SECONDS
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


def test_turn_comes_at_once_when_a_key_is_ended_or_tried(clock: Clock, verifier: UsageLog) -> None:
    """A merchant whose only good key was just taken away does not wait for the next look."""
    rotation = advance(overlapping(clock, verifier), clock)
    assert list_due(clock()) == []
    assert rotation.replacement is not None
    revoke(rotation.replacement, clock)
    assert list_due(clock()) == [rotation.rotation_id]

    other = advance(quarantined(clock, verifier), clock)
    assert other.rotation_id not in list_due(clock())
    scene.use(verifier, other.predecessor_id, outcome=Outcome.REFUSED)
    assert other.rotation_id in list_due(clock())


def test_turn_that_failed_waits_for_its_pause_though_something_happened(clock: Clock, verifier: UsageLog) -> None:
    """Else a step that keeps failing would use up its attempts within seconds."""
    rotation = overlapping(clock, verifier)
    assert rotation.replacement is not None
    revoke(rotation.replacement, clock)
    lease = claim(subject_of(rotation.rotation_id), clock(), now_or_never=True)
    assert lease is not None
    postpone(lease, clock(), "the backend refuses")
    assert list_due(clock()) == []
    assert list_due(clock.tick(2)) == [rotation.rotation_id]


def test_turn_that_somebody_is_at_is_nobody_elses(clock: Clock, verifier: UsageLog) -> None:
    rotation = begun(clock)
    assert claim(subject_of(rotation.rotation_id), clock()) is not None
    assert list_due(clock()) == []
    assert list_due(clock() + timedelta(minutes=1)) == [rotation.rotation_id]


def test_sweep_takes_every_turn_that_is_due_and_stops_when_its_time_is_over(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotations = [begun(clock) for _ in range(3)]
    with monkeypatch.context() as hurry:
        hurry.setattr(engine, "SWEEP_SECONDS", -1.0)
        assert advance_all_due(clock) == 0
    assert advance_all_due(clock) == 3
    assert all(get_rotation(each.rotation_id).state == "awaiting_proof" for each in rotations)
    assert advance_all_due(clock) == 0


def test_fault_that_nobody_foresaw_stops_no_other_rotation_and_stalls_its_own_by_name(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, sound = begun(clock), begun(clock)

    def fail(facts: Facts, now: datetime) -> Wait | Move | Act:
        if facts.plan.credential_id == broken.credential_id and facts.state != "stalled":
            raise ZeroDivisionError("nobody foresaw this")
        return next_step(facts, now)

    monkeypatch.setattr(engine, "next_step", fail)
    for _ in range(MOST_ATTEMPTS):
        advance_all_due(clock)
        clock.tick(80)
    assert get_rotation(sound.rotation_id).state == "awaiting_proof"
    stalled = get_rotation(broken.rotation_id)
    assert (stalled.state, stalled.why) == ("stalled", "a step kept failing: an unforeseen fault; the log has it")
