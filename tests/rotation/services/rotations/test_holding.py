"""An operator holds a key in quarantine: the rotation neither resumes nor revokes it until the release."""

from datetime import timedelta

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.domain.errors import RequestInvalidError, StateConflictError
from keyvault.models import AuditEntry
from keyvault.models.usage import UseOutcome
from keyvault.services.keys.lifecycle import get_key, resume_key
from keyvault.services.recording.authorization import authorize
from keyvault.services.usage.recorder import UsageLog
from rotation.domain.events import RotationState as S
from rotation.models import Rotation
from rotation.services.rotations.interventions import (
    abort_rotation,
    hold_quarantine,
    release_quarantine,
    resume_rotation,
)
from rotation.services.rotations.reports import get_rotation
from tests.clocks import Clock
from tests.rotation import scene
from tests.rotation.steps import advance, begun, damage, key_states, overlapping, quarantined, revoke, wait

pytestmark = pytest.mark.django_db

HELD = ("suspended", "active")


def hold(rotation: Rotation, clock: Clock) -> Rotation:
    grant = authorize(scene.tam(), P.KEYS_SUSPEND, rotation.credential.account, now=clock())
    return hold_quarantine(grant, get_rotation(rotation.rotation_id), "the merchant investigates")


def release(rotation: Rotation, clock: Clock) -> Rotation:
    grant = authorize(scene.admin(), P.KEYS_RESUME, rotation.credential.account, now=clock())
    return release_quarantine(grant, get_rotation(rotation.rotation_id))


def held(clock: Clock, verifier: UsageLog) -> Rotation:
    return hold(quarantined(clock, verifier), clock)


def attempt(rotation: Rotation, clock: Clock, verifier: UsageLog) -> None:
    clock.tick(1)
    scene.use(verifier, rotation.predecessor_id, outcome=UseOutcome.REFUSED)


@pytest.mark.database
def test_held_key_is_not_revoked_until_its_release(clock: Clock, verifier: UsageLog) -> None:
    """The quarantine begins again with the release."""
    rotation = held(clock, verifier)
    for _ in range(3):
        rotation = wait(rotation, clock, verifier, 6)
        assert (rotation.state, key_states(rotation)) == (S.QUARANTINE, HELD)
    rotation = advance(release(rotation, clock), clock)
    assert (rotation.state, key_states(rotation)) == (S.QUARANTINE, HELD)
    assert wait(rotation, clock, verifier, 6).state == S.COMPLETED
    events = AuditEntry.objects.filter(event__startswith="rotation.quarantine_").values_list("event", "actor")
    assert list(events.order_by("id")) == [
        ("rotation.quarantine_held", "operator:tam"),
        ("rotation.quarantine_released", "operator:admin"),
    ]


def test_held_key_is_not_reinstated_by_an_attempt_until_its_release(clock: Clock, verifier: UsageLog) -> None:
    """The source that the plan reinstates the key for is remembered."""
    rotation = advance(begun(clock), clock)
    scene.use(verifier, rotation.predecessor_id)
    clock.tick(1)
    scene.acknowledge_replacement(rotation.rotation_id, clock())
    rotation = hold(wait(wait(rotation, clock, verifier, 6), clock, verifier, 6), clock)
    attempt(rotation, clock, verifier)
    rotation = advance(rotation, clock, 3)
    assert (rotation.state, key_states(rotation)) == (S.QUARANTINE, HELD)
    rotation = advance(release(rotation, clock), clock)
    assert (rotation.state, key_states(rotation)) == (S.OVERLAP, ("active", "active"))


def test_held_key_stays_suspended_when_the_replacement_is_revoked(clock: Clock, verifier: UsageLog) -> None:
    """Without a hold, the next turn would reinstate the predecessor; with one, the operator decides."""
    rotation = held(clock, verifier)
    assert rotation.replacement is not None
    revoke(rotation.replacement, clock)
    rotation = advance(rotation, clock, 3)
    assert (rotation.state, key_states(rotation)) == (S.QUARANTINE, ("suspended", "deactivated"))
    rotation = advance(release(rotation, clock), clock)
    assert (rotation.state, key_states(rotation)) == (S.CANCELLED, ("active", "deactivated"))


def test_held_key_revoked_by_hand_ends_the_rotation(clock: Clock, verifier: UsageLog) -> None:
    """A hold never prevents a revocation by a person."""
    rotation = held(clock, verifier)
    revoke(rotation.predecessor, clock)
    assert advance(rotation, clock, 3).state == S.COMPLETED


def test_held_key_resumed_by_hand_is_no_longer_held(clock: Clock, verifier: UsageLog) -> None:
    rotation = held(clock, verifier)
    key = get_key(rotation.predecessor_id)
    assert key is not None
    resume_key(authorize(scene.admin(), P.KEYS_RESUME, rotation.credential.account, now=clock()), key)
    rotation = advance(rotation, clock, 3)
    assert (rotation.state, rotation.stalled_from, rotation.held_at) == (S.STALLED, S.OVERLAP, None)


def test_held_key_of_an_unreadable_plan_stays_suspended(clock: Clock, verifier: UsageLog) -> None:
    """A stall ends other quarantines, and not this one."""
    rotation = held(clock, verifier)
    plan = rotation.plan
    rotation = advance(damage(rotation, {"window": {"timezone": "Mars/Olympus"}}), clock, 3)
    assert (rotation.state, rotation.stalled_from, key_states(rotation)) == (S.STALLED, S.QUARANTINE, HELD)
    rotation = advance(release(damage(rotation, plan), clock), clock)
    assert (rotation.state, key_states(rotation)) == (S.STALLED, HELD)
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, rotation.credential.account, now=clock())
    assert resume_rotation(grant, rotation).state == S.QUARANTINE


def test_held_replacement_of_a_rollback_is_not_revoked(clock: Clock, verifier: UsageLog) -> None:
    rotation = overlapping(clock, verifier)
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, rotation.credential.account, now=clock())
    rotation = advance(abort_rotation(grant, rotation, "the merchant cannot deploy it"), clock, 3)
    scene.use(verifier, rotation.predecessor_id)
    rotation = hold(wait(rotation, clock, verifier, 6), clock)
    rotation = wait(rotation, clock, verifier, 6)
    assert (rotation.state, key_states(rotation)) == (S.ROLLING_BACK, ("active", "suspended"))
    assert wait(release(rotation, clock), clock, verifier, 6).state == S.ROLLED_BACK


def test_held_key_is_not_rolled_back(clock: Clock, verifier: UsageLog) -> None:
    """A rollback would resume it."""
    rotation = held(clock, verifier)
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, rotation.credential.account, now=clock())
    with pytest.raises(StateConflictError, match="Release it first"):
        abort_rotation(grant, rotation, "changed our minds")


def test_hold_needs_a_reason_and_a_key_in_quarantine(clock: Clock, verifier: UsageLog) -> None:
    rotation = overlapping(clock, verifier)
    with pytest.raises(StateConflictError, match="no key in quarantine"):
        hold(rotation, clock)
    with pytest.raises(StateConflictError, match="No operator holds"):
        release(rotation, clock)
    rotation = wait(rotation, clock, verifier, 6)
    grant = authorize(scene.tam(), P.KEYS_SUSPEND, rotation.credential.account, now=clock() + timedelta(seconds=1))
    with pytest.raises(RequestInvalidError, match="needs a reason"):
        hold_quarantine(grant, rotation, " ")
    hold(rotation, clock)
    with pytest.raises(StateConflictError, match="already"):
        hold(rotation, clock)
