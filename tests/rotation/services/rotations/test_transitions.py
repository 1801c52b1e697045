"""What changes between a worker's reading of the facts and its transition: the other key, its expiry, the lease."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER
from keyvault.domain.environments import Environment
from keyvault.domain.errors import StateConflictError
from keyvault.domain.notifications import NoticeKind
from keyvault.models import Key, Notice, UsageReporter, WorkLease
from keyvault.services.recording.authorization import authorize
from keyvault.services.usage.recorder import UsageLog
from keyvault.services.work import leases
from keyvault.services.work.clock import ClockDiffersError
from rotation.domain.events import RotationState as S
from rotation.domain.states import Move, next_step
from rotation.models import Rotation
from rotation.services.rotations.facts import gather_facts
from rotation.services.rotations.interventions import abort_rotation
from rotation.services.rotations.reports import get_rotation, subject_of
from rotation.services.rotations.transitions import make_transition
from tests.clocks import Clock
from tests.rotation import scene
from tests.rotation.steps import advance, key_states, overlapping, quarantined, revoke, wait
from tests.services.racing import TIMEOUT_SECONDS, held_open, start, wait_until_blocked

pytestmark = [pytest.mark.database, pytest.mark.django_db]


def at_overlap(clock: Clock, verifier: UsageLog, **overrides: object) -> Rotation:
    """Return a rotation whose next transition is the quarantine of the predecessor."""
    return reported(overlapping(clock, verifier, **overrides), clock, verifier)


def at_quarantine(clock: Clock, verifier: UsageLog) -> Rotation:
    """Return a rotation whose next transition is the revocation of the predecessor."""
    return reported(quarantined(clock, verifier), clock, verifier)


def at_rollback(clock: Clock, verifier: UsageLog) -> Rotation:
    """Return a rotation whose next transition is the quarantine of the replacement."""
    rotation = overlapping(clock, verifier)
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, rotation.credential.account, now=clock())
    rotation = advance(abort_rotation(grant, rotation, "the merchant cannot deploy it"), clock, 3)
    scene.use(verifier, rotation.predecessor_id)
    return reported(rotation, clock, verifier)


def at_end_of_rollback(clock: Clock, verifier: UsageLog) -> Rotation:
    """Return a rotation whose next transition is the revocation of the replacement."""
    return reported(wait(at_rollback(clock, verifier), clock, verifier, 0), clock, verifier)


def reported(rotation: Rotation, clock: Clock, verifier: UsageLog) -> Rotation:
    clock.tick(6)
    verifier.flush()
    return get_rotation(rotation.rotation_id)


def begun_turn(rotation: Rotation, clock: Clock, to: S) -> Callable[[], None]:
    """Claim the rotation, read its facts and decide on a transition; return the call that makes it."""
    lease = leases.claim(subject_of(rotation.rotation_id), clock(), ignore_due_at=True)
    assert lease is not None
    facts = gather_facts(rotation, clock())
    step = next_step(facts, clock())
    assert isinstance(step, Move)
    assert step.to is to

    def make() -> None:
        grant = authorize(WORKER, P.ROTATIONS_ADVANCE, rotation.credential.account, now=clock())
        make_transition(grant, rotation, facts, step, lease)

    return make


def other_key(rotation: Rotation) -> Key:
    """Return the key that stays."""
    key = rotation.predecessor if rotation.state == S.ROLLING_BACK else rotation.replacement
    assert key is not None
    return key


@pytest.mark.parametrize(
    ("prepare", "to"),
    [
        (at_overlap, S.QUARANTINE),
        (at_quarantine, S.REVOKING),
        (at_rollback, S.ROLLING_BACK),
        (at_end_of_rollback, S.ROLLED_BACK),
    ],
    ids=["quarantine", "revoking", "rolling back", "rolled back"],
)
def test_transition_whose_other_key_was_revoked_meanwhile_is_refused(
    clock: Clock, verifier: UsageLog, prepare: Callable[[Clock, UsageLog], Rotation], to: S
) -> None:
    """Guarantee: the engine takes no key away from a credential unless the other one is usable at the commit."""
    rotation = prepare(clock, verifier)
    make = begun_turn(rotation, clock, to)
    revoke(other_key(rotation), clock)
    before = rotation.state, key_states(rotation)
    with pytest.raises(StateConflictError, match="no longer usable"):
        make()
    assert (get_rotation(rotation.rotation_id).state, key_states(rotation)) == before


def test_transition_whose_other_key_expired_meanwhile_is_refused(clock: Clock, verifier: UsageLog) -> None:
    """An expired key is active until the sweep records its expiry."""
    rotation = at_overlap(clock, verifier, expires_in_days=30)
    make = begun_turn(rotation, clock, S.QUARANTINE)
    clock.tick(30 * 86_400)
    with pytest.raises(StateConflictError, match="no longer usable"):
        make()
    assert key_states(rotation) == ("active", "active")


@pytest.mark.postgres
@pytest.mark.parametrize(("prepare", "to"), [(at_quarantine, S.REVOKING), (at_end_of_rollback, S.ROLLED_BACK)])
def test_revocation_by_a_worker_with_a_wrong_clock_is_refused(
    clock: Clock,
    verifier: UsageLog,
    prepare: Callable[[Clock, UsageLog], Rotation],
    to: S,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clock that is ahead would end a silence that has not lasted."""
    rotation = prepare(clock, verifier)
    make = begun_turn(rotation, clock, to)
    before = rotation.state, key_states(rotation)
    with monkeypatch.context() as wrong:
        wrong.setattr("keyvault.services.work.clock.host_time", lambda: datetime.now(UTC) + timedelta(seconds=30))
        with pytest.raises(ClockDiffersError):
            make()
    assert (get_rotation(rotation.rotation_id).state, key_states(rotation)) == before
    make()
    assert get_rotation(rotation.rotation_id).state == to


@pytest.mark.postgres
def test_worker_with_a_wrong_clock_expires_no_request_and_raises_one_alarm(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that serves no maintenance queue notices its clock, too."""
    key, _ = scene.first_key(clock(), environment=Environment.PRODUCTION)
    rotation = scene.rotate(key.credential, clock(), quiet_seconds=3_600, quarantine_seconds=600)
    with monkeypatch.context() as wrong:
        wrong.setattr("keyvault.services.work.clock.host_time", lambda: datetime.now(UTC) + timedelta(seconds=30))
        for days in (8, 1):
            assert advance(rotation, clock, days * 86_400).state == S.AWAITING_APPROVAL
    assert Notice.objects.get(kind=NoticeKind.CLOCK_DIFFERS).payload["seconds_ahead"] == 30
    assert advance(rotation, clock, 60).state == S.EXPIRED


@pytest.mark.parametrize(
    ("prepare", "to"),
    [(at_overlap, S.QUARANTINE), (at_end_of_rollback, S.ROLLED_BACK)],
    ids=["quarantine", "rolled back"],
)
def test_transition_of_a_worker_that_lost_its_lease_is_refused(
    clock: Clock, verifier: UsageLog, prepare: Callable[[Clock, UsageLog], Rotation], to: S
) -> None:
    """Guarantee: the lease fences each transition, also while its new holder has written nothing yet."""
    rotation = prepare(clock, verifier)
    before = rotation.state, key_states(rotation)
    make = begun_turn(rotation, clock, to)
    WorkLease.objects.filter(subject=subject_of(rotation.rotation_id)).update(token="another's")
    with pytest.raises(StateConflictError, match="took this over"):
        make()
    assert (get_rotation(rotation.rotation_id).state, key_states(rotation)) == before


def test_predecessor_that_expires_in_quarantine_is_not_resumed(clock: Clock, verifier: UsageLog) -> None:
    """The rotation completes, although the sweep has not recorded the expiry: only a usable key is resumed."""
    key, _ = scene.issue(scene.account(), clock(), expires_in_days=1)
    rotation = scene.rotate(
        key.credential,
        clock(),
        predecessor_may_expire=True,
        deadline=clock() + timedelta(days=3),
        quarantine_seconds=100_000,
    )
    rotation = advance(rotation, clock)
    scene.acknowledge_replacement(rotation.rotation_id, clock())
    rotation = wait(wait(rotation, clock, verifier, 1), clock, verifier, 6)
    assert (rotation.state, key_states(rotation)) == (S.QUARANTINE, ("suspended", "active"))
    rotation = advance(rotation, clock, 90_000)
    assert (rotation.state, key_states(rotation)) == (S.COMPLETED, ("suspended", "active"))


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_race_of_a_transition_with_a_revocation_of_the_other_key_is_refused() -> None:
    """The transition waits for the uncommitted revocation, sees it, and leaves the predecessor usable."""
    clock = Clock(datetime(2026, 11, 21, 12, tzinfo=UTC))
    verifier = UsageLog(now=clock)
    UsageReporter.objects.create(
        reporter_id=verifier.reporter_id, started_at=clock(), flushed_through_at=clock(), peppers={}
    )
    rotation = at_overlap(clock, verifier)
    make = begun_turn(rotation, clock, S.QUARANTINE)
    with held_open(lambda: revoke(other_key(rotation), clock)):
        moving = start(make)
        wait_until_blocked(moving)
    with pytest.raises(StateConflictError, match="no longer usable"):
        moving.result(TIMEOUT_SECONDS)
    assert (get_rotation(rotation.rotation_id).state, key_states(rotation)) == (S.OVERLAP, ("active", "deactivated"))
