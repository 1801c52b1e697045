"""The queue of turns: what makes a rotation due, what one tick dispatches, and what a message does."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import partial
from queue import SimpleQueue
from threading import Event
from typing import Any

import pytest
from django.db import connection, transaction
from django.test import TestCase
from django.test.utils import CaptureQueriesContext
from pytest_django import Settings

from keyvault.access.permissions import Permission as P
from keyvault.domain.environments import Environment
from keyvault.models import Verifier, WorkLease
from keyvault.models.usage import UseOutcome
from keyvault.services.keys.lifecycle import get_key, resume_key, suspend_key
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.signals import changes_confirmed
from keyvault.services.usage.recorder import UsageLog
from keyvault.services.work.leases import LEASE, REDISPATCH, claim, postpone
from rotation.domain.states import Facts, Move, RotationAction, Wait, next_step
from rotation.models import Rotation
from rotation.services.rotations import engine, turns
from rotation.services.rotations.engine import MAX_ATTEMPTS, POLL_SECONDS, advance_rotation
from rotation.services.rotations.interventions import abort_rotation
from rotation.services.rotations.reports import get_rotation, subject_of
from rotation.services.rotations.requests import approve_rotation, reissue_key
from rotation.services.rotations.turns import Turn, TurnDispatcher, dispatch_due
from tests.clocks import Clock
from tests.rotation import scene
from tests.rotation.steps import advance, begun, list_due, overlapping, quarantined, revoke, run_due
from tests.services.racing import TIMEOUT_SECONDS, race
from tests.verifiers import confirm, make_verifier

pytestmark = [pytest.mark.database, pytest.mark.django_db]


def row_of(rotation: Rotation) -> WorkLease:
    return WorkLease.objects.get(subject=subject_of(rotation.rotation_id))


def due_in(rotation: Rotation, clock: Clock) -> float:
    """Return the seconds until the rotation's next check."""
    due_at = row_of(rotation).due_at
    assert due_at is not None
    waits: timedelta = due_at - clock()
    return waits.total_seconds()


# --- when a rotation is due ---------------------------------------------------------------------------------


def test_turn_interval_grows_with_the_wait_up_to_its_maximum(clock: Clock, verifier: UsageLog) -> None:
    rotation = advance(begun(clock), clock)
    assert due_in(rotation, clock) == POLL_SECONDS[0]
    advance(rotation, clock, 200)
    assert due_in(rotation, clock) == 10
    advance(rotation, clock, 20 * 600)
    assert due_in(rotation, clock) == 600, "use of the replacement is no event"


def test_turn_is_due_when_the_wait_ends_and_not_before(clock: Clock, verifier: UsageLog) -> None:
    """No worker takes a turn of a waiting rotation until then."""
    key, _ = scene.first_key(clock())
    rotation = scene.rotate(key.credential, clock(), not_before=clock() + timedelta(days=3))
    assert run_due(clock) == 1
    assert due_in(rotation, clock) == 3 * 86_400
    clock.tick(3 * 86_400)
    assert run_due(clock) == 1
    assert get_rotation(rotation.rotation_id).state == "awaiting_proof"


def test_turn_is_due_at_the_deadline_even_if_the_wait_is_longer(clock: Clock, verifier: UsageLog) -> None:
    """Guarantee: a rotation that cannot finish in time stalls at its deadline, with an alarm."""
    rotation = overlapping(clock, verifier, quiet_seconds=86_400)
    deadline = rotation.deadline_at
    assert deadline is not None
    clock.tick((deadline - clock()).total_seconds() - 60)
    scene.use(verifier, rotation.predecessor_id)
    advance(rotation, clock)
    assert due_in(rotation, clock) == 60
    clock.tick(60)
    assert run_due(clock) == 1
    assert get_rotation(rotation.rotation_id).state == "stalled"


def test_turn_in_overlap_is_due_in_some_hours_at_most(clock: Clock, verifier: UsageLog) -> None:
    """The last source may move to the replacement, which is no event."""
    rotation = overlapping(clock, verifier, quiet_seconds=5 * 86_400)
    assert due_in(rotation, clock) == 6 * 3_600


def test_event_makes_the_turn_due_immediately(clock: Clock, verifier: UsageLog) -> None:
    """A merchant that just lost its only good key does not wait for the next regular check."""
    rotation = advance(overlapping(clock, verifier), clock)
    assert rotation.replacement is not None
    assert list_due(clock) == []
    revoke(rotation.replacement, clock)
    assert list_due(clock) == [rotation.rotation_id]
    assert row_of(rotation).is_urgent

    other = advance(quarantined(clock, verifier), clock)
    assert other.rotation_id not in list_due(clock)
    scene.use(verifier, other.predecessor_id, outcome=UseOutcome.REFUSED)
    assert other.rotation_id in list_due(clock)
    assert not row_of(other).is_urgent, "a client that does not stop would delay merchants without a usable key"


def test_emergency_stays_urgent_until_its_key_is_delivered(clock: Clock, verifier: UsageLog) -> None:
    """Guarantee: a merchant without a usable key waits for no backlog, also while verifiers are awaited."""
    make_verifier()
    key, _ = scene.first_key(clock())
    revoke(key, clock)
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, key.credential.account, now=clock())
    rotation = advance(reissue_key(grant, key.credential, "a leak"), clock)
    assert (rotation.state, row_of(rotation).is_urgent) == ("staged", True)
    confirm(Verifier.objects.get(), 2**40)
    assert advance(rotation, clock, 3).delivered_at is not None


@pytest.mark.parametrize("which", ["predecessor", "replacement"])
def test_key_suspended_or_resumed_by_a_person_makes_the_turn_due(clock: Clock, verifier: UsageLog, which: str) -> None:
    rotation = advance(overlapping(clock, verifier), clock)
    key = get_key(getattr(rotation, which).key_id)
    assert key is not None
    place = key.credential.account
    suspend_key(authorize(scene.admin(), P.KEYS_SUSPEND, place, now=clock()), key)
    assert list_due(clock) == [rotation.rotation_id]
    run_due(clock)
    assert list_due(clock) == []
    resume_key(authorize(scene.admin(), P.KEYS_RESUME, place, now=clock()), key)
    assert list_due(clock) == [rotation.rotation_id]


def test_acknowledgement_makes_the_turn_due(clock: Clock, verifier: UsageLog) -> None:
    rotation = advance(begun(clock), clock)
    assert list_due(clock) == []
    scene.acknowledge_replacement(rotation.rotation_id, clock())
    assert list_due(clock) == [rotation.rotation_id]


def test_approval_makes_the_turn_due(clock: Clock) -> None:
    key, _ = scene.first_key(clock(), environment=Environment.PRODUCTION)
    rotation = advance(scene.rotate(key.credential, clock(), quiet_seconds=3_600, quarantine_seconds=600), clock)
    assert (rotation.state, list_due(clock)) == ("awaiting_approval", [])
    account, requester = rotation.credential.account, rotation.requester_person
    grant = authorize(scene.approver(), P.ROTATIONS_APPROVE, account, now=clock(), requester_person=requester)
    approve_rotation(grant, rotation, rotation.plan_digest)
    assert list_due(clock) == [rotation.rotation_id]


def test_turns_own_changes_do_not_make_it_due_again(clock: Clock, verifier: UsageLog) -> None:
    rotation = quarantined(clock, verifier)
    assert list_due(clock) == []
    assert row_of(rotation).wakes == 1, "the acknowledgement"


def test_rotation_that_is_closed_leaves_the_queue(clock: Clock, verifier: UsageLog) -> None:
    """Guarantee: the queue holds open rotations only, whether the engine or an operator closed the others."""
    aborted, completed = begun(clock), quarantined(clock, verifier)
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, aborted.credential.account, now=clock())
    abort_rotation(grant, aborted, "not needed")
    clock.tick(6)
    verifier.flush()
    assert run_due(clock) == 1
    assert get_rotation(completed.rotation_id).state == "completed"
    assert not WorkLease.objects.exclude(queue="").exists()
    assert advance_rotation(completed.rotation_id, clock) is None


# --- one tick -----------------------------------------------------------------------------------------------


def test_tick_dispatches_each_due_rotation_once_until_its_message_may_be_lost(clock: Clock, verifier: UsageLog) -> None:
    """A message that is lost, or a process killed between commit and dispatch, costs one interval."""
    known = sorted(begun(clock).rotation_id for _ in range(3))
    sent: list[Turn] = []
    assert dispatch_due(clock, sent.append) == 3
    assert sorted(turn.rotation_id for turn in sent) == known
    assert dispatch_due(clock, sent.append) == 0
    clock.tick(REDISPATCH.total_seconds() - 1)
    assert dispatch_due(clock, sent.append) == 0
    clock.tick(1)
    assert dispatch_due(clock, sent.append) == 3


def test_tick_dispatches_an_urgent_rotation_before_many_others(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: a backlog of regular turns does not delay a merchant without a usable key."""
    monkeypatch.setattr(turns, "MAX_QUEUED", 2)
    urgent = advance(overlapping(clock, verifier), clock)
    assert urgent.replacement is not None
    waiting = [begun(clock).rotation_id for _ in range(5)]
    clock.tick(60)
    revoke(urgent.replacement, clock)
    sent: list[Turn] = []
    assert dispatch_due(clock, sent.append) == 3
    assert sent[0] == Turn(urgent.rotation_id, "sandbox", is_urgent=True)
    assert {turn.rotation_id for turn in sent[1:]} <= set(waiting)


def test_tick_with_nothing_due_makes_one_query_per_queue(clock: Clock, verifier: UsageLog) -> None:
    """Guarantee: open rotations that wait cost nothing, and no request to the broker."""
    for _ in range(3):
        advance(begun(clock), clock)
    counted, sent = list[str](), list[Turn]()

    def count_messages(environment: str, is_urgent: bool) -> int:
        counted.append(environment)
        return 0

    with CaptureQueriesContext(connection) as made:
        assert dispatch_due(clock, sent.append, count_messages=count_messages) == 0
    assert counted == []
    assert len(made) == 4
    assert all(query["sql"].startswith("SELECT 1") for query in made)


def test_ticks_without_a_worker_fill_the_queue_up_to_its_maximum(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: the broker's queue stays small, however long no worker takes its messages, and none is forgotten."""
    monkeypatch.setattr(turns, "MAX_QUEUED", 3)
    waiting = {begun(clock).rotation_id for _ in range(8)}
    queue: list[Turn] = []

    def tick() -> None:
        clock.tick(1)
        dispatch_due(clock, queue.append, count_messages=lambda environment, urgent: 0 if urgent else len(queue))

    for _ in range(100):
        tick()
        assert len(queue) <= 3
    done: list[str] = []
    while len(done) < 8:
        tick()
        turn = queue.pop(0)  # one slow worker
        if advance_rotation(turn.rotation_id, clock, is_dispatched=True) is not None:
            done.append(turn.rotation_id)
    assert set(done[:8]) == waiting


def test_events_of_a_waiting_rotation_send_one_message(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that goes on with a refused key adds no messages while no worker takes them."""
    sent: list[Turn] = []
    monkeypatch.setattr(TurnDispatcher, "put", lambda _, found: sent.extend(found))
    rotation = advance(quarantined(clock, verifier), clock)
    sent.clear()
    for _ in range(3):
        with TestCase.captureOnCommitCallbacks(execute=True):
            scene.use(verifier, rotation.predecessor_id, outcome=UseOutcome.REFUSED)
        clock.tick(1)
    assert [turn.rotation_id for turn in sent] == [rotation.rotation_id]
    assert list_due(clock) == [rotation.rotation_id]


def test_event_of_an_unserved_environment_sends_no_message(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch, settings: Settings
) -> None:
    """A worker of the environment finds it: no other one takes messages of this process's broker."""
    sent: list[Turn] = []
    monkeypatch.setattr(TurnDispatcher, "put", lambda _, found: sent.extend(found))
    make_verifier()
    rotation = advance(begun(clock), clock)
    assert rotation.state == "staged"
    settings.ENVIRONMENTS = ("production",)
    sent.clear()
    with TestCase.captureOnCommitCallbacks(execute=True):
        changes_confirmed.send(None, above=0, through=2**40, now=clock())
    assert [turn.rotation_id for turn in sent] == []
    assert list_due(clock) == [rotation.rotation_id]


@pytest.mark.django_db(transaction=True)
def test_concurrent_ticks_dispatch_different_rotations(clock: Clock, verifier: UsageLog) -> None:
    known = sorted(begun(clock).rotation_id for _ in range(8))
    sent: list[Turn] = []
    race(*[partial(dispatch_due, clock, sent.append)] * 4)
    dispatch_due(clock, sent.append)  # rows that one tick had locked and another skipped
    assert sorted(turn.rotation_id for turn in sent) == known


# --- one message --------------------------------------------------------------------------------------------


def test_repeated_message_changes_nothing(clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch) -> None:
    rotation = begun(clock)
    assert dispatch_due(clock, lambda turn: None) == 1
    assert advance_rotation(rotation.rotation_id, clock, is_dispatched=True) is not None
    monkeypatch.setattr(engine, "gather_facts", None)
    before = row_of(rotation)
    assert advance_rotation(rotation.rotation_id, clock, is_dispatched=True) is None
    assert row_of(rotation).__dict__.items() >= {"due_at": before.due_at, "attempts": 0, "last_error": ""}.items()


def test_message_for_an_environment_that_is_not_served_changes_nothing(
    clock: Clock, verifier: UsageLog, settings: Any
) -> None:
    """Guarantee: a process performs no rotation of an environment that it does not serve, and delays none."""
    rotation = begun(clock)
    assert dispatch_due(clock, lambda turn: None) == 1
    before = row_of(rotation).__dict__
    settings.ENVIRONMENTS = ("production",)
    for is_dispatched in (False, True):
        assert advance_rotation(rotation.rotation_id, clock, is_dispatched=is_dispatched) is None
    assert {**row_of(rotation).__dict__, "_state": None} == {**before, "_state": None}


def test_event_during_a_turn_makes_the_next_one_due(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: a wake-up is not lost while a worker holds the lease, and its message finds no free lease."""
    rotation = advance(overlapping(clock, verifier), clock)
    replacement = rotation.replacement
    assert replacement is not None

    def meanwhile(facts: Facts, now: datetime) -> Wait | Move | RotationAction:
        step = next_step(facts, now)
        monkeypatch.undo()
        revoke(replacement, clock)
        assert advance_rotation(rotation.rotation_id, clock, is_dispatched=True) is None
        return step

    monkeypatch.setattr(engine, "next_step", meanwhile)
    assert advance_rotation(rotation.rotation_id, clock) is not None
    assert list_due(clock) == [rotation.rotation_id]
    run_due(clock)
    assert get_rotation(rotation.rotation_id).state == "cancelled"


def test_event_after_a_failure_waits_for_its_pause(clock: Clock, verifier: UsageLog) -> None:
    """Otherwise a failing step would use up its attempts within seconds."""
    rotation = overlapping(clock, verifier)
    assert rotation.replacement is not None
    lease = claim(subject_of(rotation.rotation_id), clock(), ignore_due_at=True)
    assert lease is not None
    postpone(lease, clock(), "the backend refuses")
    revoke(rotation.replacement, clock)
    assert list_due(clock) == []
    assert advance_rotation(rotation.rotation_id, clock) is None
    clock.tick(2)
    assert list_due(clock) == [rotation.rotation_id]
    run_due(clock)
    assert get_rotation(rotation.rotation_id).state == "cancelled"


def test_turn_of_a_worker_that_died_is_due_when_its_lease_expires(clock: Clock, verifier: UsageLog) -> None:
    rotation = begun(clock)
    assert claim(subject_of(rotation.rotation_id), clock()) is not None
    assert list_due(clock) == []
    clock.tick(LEASE.total_seconds())
    assert run_due(clock) == 1
    assert get_rotation(rotation.rotation_id).state == "awaiting_proof"


def test_turn_with_many_steps_renews_its_lease(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other worker begins the rotation's turn while the first one still works."""
    rotation = begun(clock)
    free_at: list[datetime | None] = []

    def slowly(facts: Facts, now: datetime) -> Wait | Move | RotationAction:
        free_at.append(row_of(rotation).until)
        clock.tick(10)
        return next_step(facts, now)

    monkeypatch.setattr(engine, "next_step", slowly)
    advance_rotation(rotation.rotation_id, clock)
    assert len(free_at) > 2
    began = clock() - len(free_at) * timedelta(seconds=10)
    assert free_at == [began + number * timedelta(seconds=10) + LEASE for number in range(len(free_at))]


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
        run_due(clock)
        clock.tick(80)
    assert get_rotation(sound.rotation_id).state == "awaiting_proof"
    stalled = get_rotation(broken.rotation_id)
    assert (stalled.state, stalled.why) == ("stalled", "a step kept failing: an unexpected error; see the log")


# --- messages on commit -------------------------------------------------------------------------------------


@pytest.fixture
def dispatcher() -> Iterator[TurnDispatcher]:
    """Let this process send messages, as a server or a worker does."""
    sender = turns.dispatcher
    yield sender
    sender.stop()
    sender.send = None


@pytest.mark.django_db(transaction=True)
def test_event_is_dispatched_after_its_commit(clock: Clock, dispatcher: TurnDispatcher) -> None:
    sent: SimpleQueue[Turn] = SimpleQueue()
    rotation = begun(clock)
    dispatcher.send = sent.put
    with transaction.atomic():
        revoke(rotation.predecessor, clock)
        assert sent.empty()
    assert sent.get(timeout=TIMEOUT_SECONDS) == Turn(rotation.rotation_id, "sandbox", is_urgent=True)


@pytest.mark.django_db(transaction=True)
def test_event_neither_fails_nor_waits_while_the_broker_is_down(
    clock: Clock, verifier: UsageLog, dispatcher: TurnDispatcher
) -> None:
    """Guarantee: revoking needs no broker; the next tick finds the rotation."""
    hangs, is_called = Event(), Event()

    def hang(turn: Turn) -> None:
        is_called.set()
        hangs.wait(TIMEOUT_SECONDS)
        raise ConnectionError("no broker")

    rotation = begun(clock)
    dispatcher.send = hang
    revoke(rotation.predecessor, clock)
    assert is_called.wait(TIMEOUT_SECONDS)
    assert list_due(clock) == [rotation.rotation_id]
    hangs.set()
    assert run_due(clock) == 1
