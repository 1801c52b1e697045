"""The event `aborted` of the state table: an operator ends a rotation, in each possible state."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import models

from keyvault.access.permissions import Permission as P
from keyvault.backends.local import LocalKeystore
from keyvault.domain.environments import Environment
from keyvault.domain.errors import RequestInvalidError, StateConflictError
from keyvault.domain.keys import KeyState
from keyvault.services.change_feed import receipts
from keyvault.services.keys.lifecycle import get_key, suspend_key
from keyvault.services.recording.authorization import authorize
from keyvault.services.usage.recorder import UsageLog
from rotation.domain.events import OPEN
from rotation.domain.events import RotationState as S
from rotation.domain.plan_fields import PlanOverrides, Proof
from rotation.models import Rotation
from rotation.services.rotations.interventions import abort_rotation, extend_rotation
from rotation.services.rotations.reports import get_rotation
from rotation.services.rotations.requests import reissue_key, request_rotation
from tests.clocks import Clock
from tests.rotation import scene
from tests.rotation.scene import unavailable
from tests.rotation.steps import advance, begun, key_states, overlapping, quarantined, revoke, wait

pytestmark = pytest.mark.django_db

Patch = pytest.MonkeyPatch
Way = Callable[[Clock, UsageLog, Patch], Rotation]

ABORTED = {
    S.REQUESTED: S.CANCELLED,
    S.AWAITING_APPROVAL: S.CANCELLED,
    S.SCHEDULED: S.CANCELLED,
    S.EMERGENCY: S.CANCELLED,
    S.STAGED: S.CANCELLED,
    S.PUBLISHING: S.CANCELLED,
    S.AWAITING_PROOF: S.ROLLING_BACK,
    S.OVERLAP: S.ROLLING_BACK,
    S.QUARANTINE: S.ROLLING_BACK,
    S.REVOKING: None,
    S.ROLLING_BACK: None,
}
"""The expected state after an abort; None: refused."""


def abort(rotation: Rotation, clock: Clock) -> Rotation:
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, rotation.credential.account, now=clock())
    abort_rotation(grant, get_rotation(rotation.rotation_id), "changed our minds")
    return get_rotation(rotation.rotation_id)


def _awaiting_approval(clock: Clock, verifier: UsageLog, patch: Patch) -> Rotation:
    key, _ = scene.first_key(clock(), environment=Environment.PRODUCTION)
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, key.credential.account, now=clock())
    return request_rotation(grant, key.credential, PlanOverrides(proof=Proof.ACK))


def _requested(clock: Clock, verifier: UsageLog, patch: Patch) -> Rotation:
    """No service currently leaves a rotation in this state."""
    rotation = _awaiting_approval(clock, verifier, patch)
    models.QuerySet(Rotation).filter(pk=rotation.pk).update(state=S.REQUESTED)
    return get_rotation(rotation.rotation_id)


def _emergency(clock: Clock, verifier: UsageLog, patch: Patch) -> Rotation:
    key, _ = scene.first_key(clock())
    revoke(key, clock)
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, key.credential.account, now=clock())
    return reissue_key(grant, key.credential, "it has no key left")


def _staged(clock: Clock, verifier: UsageLog, patch: Patch) -> Rotation:
    patch.setattr(receipts, "list_unconfirmed", lambda sequence: ["verifier-1"])
    return advance(begun(clock), clock)


def _publishing(clock: Clock, verifier: UsageLog, patch: Patch) -> Rotation:
    rotation = begun(clock)
    patch.setattr(LocalKeystore, "put", unavailable)
    return advance(rotation, clock)


def _revoking(clock: Clock, verifier: UsageLog, patch: Patch) -> Rotation:
    rotation = quarantined(clock, verifier)
    patch.setattr(LocalKeystore, "destroy", unavailable)
    return wait(rotation, clock, verifier, 6)


WAYS: dict[S, Way] = {
    S.REQUESTED: _requested,
    S.AWAITING_APPROVAL: _awaiting_approval,
    S.SCHEDULED: lambda clock, verifier, patch: begun(clock),
    S.EMERGENCY: _emergency,
    S.STAGED: _staged,
    S.PUBLISHING: _publishing,
    S.AWAITING_PROOF: lambda clock, verifier, patch: advance(begun(clock), clock),
    S.OVERLAP: lambda clock, verifier, patch: overlapping(clock, verifier),
    S.QUARANTINE: lambda clock, verifier, patch: quarantined(clock, verifier),
    S.REVOKING: _revoking,
    S.ROLLING_BACK: lambda clock, verifier, patch: abort(overlapping(clock, verifier), clock),
}


@pytest.mark.database
def test_aborted_every_open_state_is_tested() -> None:
    assert set(WAYS) == set(ABORTED) == set(OPEN)


@pytest.mark.parametrize("state", OPEN)
def test_aborted_in_each_state_does_what_was_reviewed(
    state: S, clock: Clock, verifier: UsageLog, monkeypatch: Patch
) -> None:
    """Before delivery it is canceled and the replacement discarded; afterwards both keys verify during the rollback."""
    rotation = WAYS[state](clock, verifier, monkeypatch)
    assert rotation.state == state
    expected = ABORTED[state]
    if expected is None:
        with pytest.raises(StateConflictError):
            abort(rotation, clock)
        assert get_rotation(rotation.rotation_id).state == state
        return
    after = abort(rotation, clock)
    assert after.state == expected
    assert (after.closed_at is not None) == (expected is S.CANCELLED)
    old, new = key_states(after)
    assert old == ("deactivated" if state is S.EMERGENCY else "active")
    if rotation.replacement is not None:
        assert new == ("active" if expected is S.ROLLING_BACK else "deactivated")


@pytest.mark.parametrize("state", [S.SCHEDULED, S.STAGED, S.AWAITING_PROOF, S.OVERLAP])
def test_aborted_while_stalled_depends_on_the_state_it_stalled_in(
    state: S, clock: Clock, verifier: UsageLog, monkeypatch: Patch
) -> None:
    rotation = WAYS[state](clock, verifier, monkeypatch)
    predecessor = get_key(rotation.predecessor_id)
    assert predecessor is not None
    suspend_key(authorize(scene.admin(), P.KEYS_SUSPEND, rotation.credential.account, now=clock()), predecessor)
    rotation = advance(rotation, clock, 3)
    assert (rotation.state, rotation.stalled_from) == (S.STALLED, state)
    assert abort(rotation, clock).state == ABORTED[state]


def test_aborted_while_publishing_with_the_key_in_the_backend_is_rolled_back(
    clock: Clock, verifier: UsageLog, monkeypatch: Patch
) -> None:
    """The reply was lost, so the service does not know about the delivery, but the merchant may use the key."""
    put = LocalKeystore.put
    rotation = begun(clock)
    with monkeypatch.context() as patch:

        def lost(*args: Any, **kwargs: Any) -> int:
            put(*args, **kwargs)
            patch.setattr(LocalKeystore, "read", unavailable)
            return unavailable()

        patch.setattr(LocalKeystore, "put", lost)
        rotation = advance(rotation, clock)
    assert (rotation.state, rotation.delivered_at) == (S.PUBLISHING, None)
    after = abort(rotation, clock)
    assert after.state == S.ROLLING_BACK
    assert key_states(after) == (KeyState.ACTIVE, KeyState.ACTIVE)


EXTENDABLE = {S.SCHEDULED, S.STAGED, S.PUBLISHING, S.AWAITING_PROOF, S.OVERLAP, S.ROLLING_BACK}
"""States in which a deadline has an effect."""


@pytest.mark.parametrize("state", sorted(WAYS))
def test_deadline_is_extended_only_where_it_has_an_effect(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch, state: S
) -> None:
    """In particular, the deadline of a plan that awaits approval stays the one that was shown."""
    with monkeypatch.context() as patch:
        rotation = WAYS[state](clock, verifier, patch)
    assert (rotation.state, rotation.deadline_at is None) == (state, False)
    assert rotation.deadline_at is not None
    deadline = rotation.deadline_at + timedelta(days=1)
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, rotation.credential.account, now=clock())
    if state in EXTENDABLE:
        assert extend_rotation(grant, rotation, deadline).deadline_at == deadline
        return
    with pytest.raises(StateConflictError, match="cannot be extended"):
        extend_rotation(grant, rotation, deadline)
    assert get_rotation(rotation.rotation_id).deadline_at == rotation.deadline_at


@pytest.mark.parametrize("is_made", [False, True])
@pytest.mark.parametrize(
    ("old_days", "new_days", "may_expire", "days", "is_refused"),
    [
        (10, None, False, 11, True),
        (10, None, False, 9, False),
        (10, None, True, 11, False),
        (None, 10, True, 11, True),
        (None, 10, False, 9, False),
    ],
)
def test_deadline_is_extended_past_the_expiry_of_a_key_only_as_planned(
    clock: Clock,
    verifier: UsageLog,
    old_days: int | None,
    new_days: int | None,
    may_expire: bool,
    days: int,
    is_refused: bool,
    is_made: bool,
) -> None:
    key, _ = scene.issue(scene.account(), clock(), expires_in_days=old_days)
    deadline = clock() + timedelta(days=days)
    overrides = {"expires_in_days": new_days, "predecessor_may_expire": may_expire}
    rotation = scene.rotate(key.credential, clock(), deadline=clock() + timedelta(days=1), **overrides)
    if is_made:
        rotation = advance(rotation, clock)
    assert (rotation.replacement is not None) == is_made
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, rotation.credential.account, now=clock())
    if not is_refused:
        assert extend_rotation(grant, rotation, deadline).deadline_at == deadline
        return
    with pytest.raises(RequestInvalidError) as refused:
        extend_rotation(grant, rotation, deadline)
    assert [fault.pointer for fault in refused.value.faults] == ["/deadline"]


def test_deadline_of_a_rollback_is_extended_past_the_expiry_of_a_key(clock: Clock, verifier: UsageLog) -> None:
    """It revokes the replacement, which may be the leaked one, and needs its time for that."""
    rotation = abort(overlapping(clock, verifier), clock)
    models.QuerySet(Rotation).filter(pk=rotation.pk).update(deadline_at=clock() + timedelta(days=1))
    rotation = get_rotation(rotation.rotation_id)
    rotation.predecessor.expires_at = clock() + timedelta(days=2)
    deadline = clock() + timedelta(days=3)
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, rotation.credential.account, now=clock())
    assert extend_rotation(grant, rotation, deadline).deadline_at == deadline


def test_deadline_is_extended_past_the_expiry_of_a_predecessor_that_has_ended(clock: Clock, verifier: UsageLog) -> None:
    key, _ = scene.issue(scene.account(), clock(), expires_in_days=10)
    rotation = advance(scene.rotate(key.credential, clock(), deadline=clock() + timedelta(days=1)), clock)
    revoke(rotation.predecessor, clock)
    deadline = clock() + timedelta(days=11)
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, key.credential.account, now=clock())
    assert extend_rotation(grant, get_rotation(rotation.rotation_id), deadline).deadline_at == deadline
