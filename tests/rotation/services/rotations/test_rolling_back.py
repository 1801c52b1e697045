"""Rollback: once a merchant may use the replacement, both keys verify until the replacement is silent."""

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER
from keyvault.access.roles import Role
from keyvault.backends.local import LocalKeystore
from keyvault.domain.environments import Environment
from keyvault.domain.errors import StateConflictError
from keyvault.domain.keys import KeyState
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Material, Notice
from keyvault.models.usage import UseOutcome
from keyvault.services.keys.lifecycle import report_compromise
from keyvault.services.recording.authorization import authorize
from keyvault.services.secrets.stored_copies import destroy_string, find_stored, list_to_destroy, newest_version
from keyvault.services.usage.recorder import UsageLog
from rotation.domain.events import RotationState as S
from rotation.models import Rotation
from rotation.services.rotations.engine import advance_rotation
from rotation.services.rotations.interventions import abort_rotation, confirm_rotation, extend_rotation
from rotation.services.rotations.reports import get_rotation
from tests.clocks import Clock
from tests.factories import the_operator
from tests.rotation import scene
from tests.rotation.steps import advance, begun, key_states, overlapping, quarantined, revoke, wait

pytestmark = pytest.mark.django_db


def abort(rotation: Rotation, clock: Clock) -> Rotation:
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, rotation.credential.account, now=clock())
    return abort_rotation(grant, rotation, "the merchant cannot deploy it")


def stored_key(rotation: Rotation) -> str | None:
    stored = find_stored(rotation.credential)
    return None if stored is None else stored.labels["key_id"]


@pytest.mark.database
def test_rotation_rolled_back_in_overlap_redelivers_the_predecessor(clock: Clock, verifier: UsageLog) -> None:
    """At no step of the rollback is there a time without a good key."""
    rotation = abort(overlapping(clock, verifier), clock)
    assert rotation.state == S.ROLLING_BACK
    rotation = advance(rotation, clock, 3)
    assert (rotation.state, key_states(rotation)) == (S.ROLLING_BACK, ("active", "active"))
    assert stored_key(rotation) == rotation.predecessor_id

    # The merchant acknowledged with the replacement, so it must be seen to use the predecessor again.
    rotation = wait(rotation, clock, verifier, 6)
    assert rotation.quarantined_at is None
    scene.use(verifier, rotation.predecessor_id)
    rotation = wait(rotation, clock, verifier, 6)
    assert (rotation.state, key_states(rotation)) == (S.ROLLING_BACK, ("active", "suspended"))

    rotation = wait(rotation, clock, verifier, 6)
    assert (rotation.state, key_states(rotation)) == (S.ROLLED_BACK, ("active", "deactivated"))
    assert rotation.replacement is not None
    assert rotation.replacement.material == Material.DESTROY_DUE
    kinds = [evidence.kind for evidence in rotation.evidence.order_by("created_at", "pk")]
    assert kinds[-3:] == ["written_back", "silent", "untried"]


def test_rotation_rolled_back_in_quarantine_resumes_the_predecessor_immediately(
    clock: Clock, verifier: UsageLog
) -> None:
    rotation = abort(quarantined(clock, verifier), clock)
    assert (rotation.state, key_states(rotation)) == (S.ROLLING_BACK, ("active", "active"))


def test_replacement_used_while_rolling_back_restarts_its_silence(clock: Clock, verifier: UsageLog) -> None:
    rotation = advance(abort(overlapping(clock, verifier), clock), clock, 3)
    scene.use(verifier, rotation.predecessor_id)
    clock.tick(4)
    assert rotation.replacement_id is not None
    scene.use(verifier, rotation.replacement_id)
    clock.tick(1)
    scene.use(verifier, rotation.predecessor_id)
    rotation = wait(rotation, clock, verifier, 3)
    assert rotation.quarantined_at is None
    assert wait(rotation, clock, verifier, 3).quarantined_at is not None


def test_predecessor_compromised_while_rolling_back_redelivers_the_replacement(
    clock: Clock, verifier: UsageLog
) -> None:
    """The backend held a dead key; the merchant must read the good one."""
    rotation = advance(abort(overlapping(clock, verifier), clock), clock, 3)
    scene.use(verifier, rotation.predecessor_id)
    rotation = wait(rotation, clock, verifier, 6)
    assert key_states(rotation) == ("active", "suspended")
    revoke(rotation.predecessor, clock, RevocationReason.KEY_COMPROMISE)
    rotation = advance(rotation, clock, 3)
    assert (rotation.state, key_states(rotation)) == (S.COMPLETED, ("compromised", "active"))
    assert stored_key(rotation) == rotation.replacement_id


def test_replacement_revoked_while_rolling_back_ends_it(clock: Clock, verifier: UsageLog) -> None:
    rotation = abort(overlapping(clock, verifier), clock)
    assert rotation.replacement is not None
    revoke(rotation.replacement, clock)
    rotation = advance(rotation, clock, 3)
    assert (rotation.state, key_states(rotation)) == (S.ROLLED_BACK, ("active", "deactivated"))
    assert stored_key(rotation) == rotation.predecessor_id


def test_rollback_whose_keys_both_ended_offers_no_predecessor(clock: Clock, verifier: UsageLog) -> None:
    rotation = abort(overlapping(clock, verifier), clock)
    assert rotation.replacement is not None
    revoke(rotation.predecessor, clock)
    revoke(rotation.replacement, clock)
    rotation = advance(rotation, clock, 3)
    assert (rotation.state, key_states(rotation)) == (S.ROLLED_BACK, ("deactivated", "deactivated"))
    assert not rotation.evidence.filter(kind="written_back").exists()
    assert not Notice.objects.filter(kind=NoticeKind.PREDECESSOR_AVAILABLE).exists()


def test_replacement_tried_in_its_quarantine_delays_the_end(clock: Clock, verifier: UsageLog) -> None:
    rotation = advance(abort(overlapping(clock, verifier), clock), clock, 3)
    scene.use(verifier, rotation.predecessor_id)
    rotation = wait(rotation, clock, verifier, 6)
    clock.tick(3)
    assert rotation.replacement_id is not None
    scene.use(verifier, rotation.replacement_id, outcome=UseOutcome.REFUSED)
    assert wait(rotation, clock, verifier, 3).state == S.ROLLING_BACK
    rotation = wait(rotation, clock, verifier, 6)
    assert rotation.state == S.ROLLED_BACK
    assert rotation.evidence.get(kind="tried").seen["attempts"], "the evidence names the attempt"


def test_abort_while_rolling_back_or_revoking_is_refused(clock: Clock, verifier: UsageLog) -> None:
    rotation = abort(overlapping(clock, verifier), clock)
    with pytest.raises(StateConflictError, match="can no longer be ended"):
        abort(rotation, clock)


def test_rollback_with_a_dead_predecessor_is_refused(clock: Clock, verifier: UsageLog) -> None:
    rotation = advance(begun(clock), clock)
    revoke(rotation.predecessor, clock)
    rotation.predecessor.refresh_from_db()
    with pytest.raises(StateConflictError, match="cannot be rolled back"):
        abort(rotation, clock)
    assert rotation.predecessor.state == KeyState.DEACTIVATED


def test_replacement_ended_in_quarantine_with_the_backend_down_reinstates_the_predecessor(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merchant has no other key: the database suffices and no secret backend is awaited."""
    rotation = quarantined(clock, verifier)
    assert rotation.replacement is not None
    with monkeypatch.context() as outage:
        for name in ("put", "read", "versions"):
            outage.setattr(LocalKeystore, name, scene.unavailable)
        revoke(rotation.replacement, clock)
        rotation = advance(rotation, clock, 3)
        assert (rotation.state, key_states(rotation)) == (S.QUARANTINE, ("active", "deactivated"))
    rotation = advance(rotation, clock, 60)
    assert (rotation.state, stored_key(rotation)) == (S.CANCELLED, rotation.predecessor_id)


@pytest.mark.database
def test_rotation_aborted_beside_a_stopped_worker_is_fenced(clock: Clock, verifier: UsageLog) -> None:
    """A worker that slept past its lease finds a newer version than the one that it meant to follow."""
    rotation = begun(clock)
    with pytest.MonkeyPatch.context() as death:
        death.setattr(LocalKeystore, "put", _die)
        with pytest.raises(KeyboardInterrupt):
            advance_rotation(rotation.rotation_id, clock)
    clock.tick(60)
    rotation = get_rotation(rotation.rotation_id)
    before = newest_version(rotation.credential)
    assert abort(rotation, clock).state == S.ROLLING_BACK
    rotation = advance(rotation, clock, 3)
    assert stored_key(rotation) == rotation.predecessor_id
    assert newest_version(rotation.credential) == before + 1


def _die(*args: object, **kwargs: object) -> int:
    raise KeyboardInterrupt


def test_rollback_without_traffic_is_confirmed_by_an_operator_or_stalls(clock: Clock, verifier: UsageLog) -> None:
    """It neither waits unnoticed nor ends while it is unknown whether the merchant uses the predecessor."""
    rotation = advance(abort(overlapping(clock, verifier), clock), clock, 3)
    assert rotation.deadline_at is not None
    rotation = wait(rotation, clock, verifier, (rotation.deadline_at - clock()).total_seconds() + 1)
    assert (rotation.state, key_states(rotation)) == (S.STALLED, ("active", "active"))
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, rotation.credential.account, now=clock())
    rotation = extend_rotation(grant, rotation, scene.later(clock(), 86_400))
    assert rotation.state == S.ROLLING_BACK
    confirm_rotation(grant, rotation, "Ada of Acme: they are on the old key")
    rotation = wait(rotation, clock, verifier, 6)
    rotation = wait(rotation, clock, verifier, 6)
    assert (rotation.state, key_states(rotation)) == (S.ROLLED_BACK, ("active", "deactivated"))


def test_replacement_destroyed_before_the_turn_leaves_the_predecessor_readable(
    clock: Clock, verifier: UsageLog
) -> None:
    """Maintenance destroys a dead key's copy immediately, so the newest version is unreadable for the merchant."""
    rotation = overlapping(clock, verifier)
    place, responder = rotation.credential.account, the_operator("responder", Role.INCIDENT_RESPONDER)
    assert rotation.replacement is not None
    report_compromise(authorize(responder, P.KEYS_REPORT_COMPROMISE, place, now=clock()), rotation.replacement, why="x")
    for key in list_to_destroy(Environment.SANDBOX):
        destroy_string(authorize(WORKER, P.ISSUANCE_EXECUTE, place, now=clock()), key)
    rotation = advance(rotation, clock, 3)
    assert (rotation.state, key_states(rotation)) == (S.CANCELLED, ("active", "compromised"))
    assert stored_key(rotation) == rotation.predecessor_id
