"""A write whose reply was lost and that arrives after it was given up: no discarded key stays readable."""

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.backends.base import BackendConflictError, BackendUnavailableError
from keyvault.backends.local import LocalKeystore
from keyvault.models import Key, Material
from keyvault.services.recording.authorization import authorize
from keyvault.services.secrets.stored_copies import find_stored, newest_version, read_string
from keyvault.services.usage.recorder import UsageLog
from rotation.domain.events import RotationState as S
from rotation.models import LedgerState, Rotation
from rotation.services.rotations.engine import advance_rotation
from rotation.services.rotations.interventions import abort_rotation
from rotation.services.rotations.reports import get_rotation
from tests.clocks import Clock
from tests.rotation import scene
from tests.rotation.copies import DelayedKeystore
from tests.rotation.steps import advance, begun, key_states, revoke
from tests.verifiers import make_verifier

pytestmark = pytest.mark.django_db


def stored_key(rotation: Rotation) -> str | None:
    stored = find_stored(rotation.credential)
    return None if stored is None else stored.labels["key_id"]


def after_a_late_write(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> tuple[Rotation, str]:
    """Return a rotation and the id of its discarded first replacement.

    The write of the first replacement arrives just before that of the second one.
    """
    rotation, put, late = begun(clock), LocalKeystore.put, []

    def lost(self: LocalKeystore, *args: object, **kwargs: object) -> int:
        late.append(lambda: put(self, *args, **kwargs))  # type: ignore[arg-type]  # forwarded arguments
        raise BackendUnavailableError("no answer in time", may_be_applied=True)

    def beaten(self: LocalKeystore, *args: object, **kwargs: object) -> int:
        late[0]()
        return put(self, *args, **kwargs)  # type: ignore[arg-type]  # forwarded arguments

    with monkeypatch.context() as outage:
        outage.setattr(LocalKeystore, "put", lost)
        rotation = advance(rotation, clock, 1)
    discarded = rotation.replacement_id
    assert discarded is not None
    with monkeypatch.context() as race:
        race.setattr(LocalKeystore, "put", beaten)
        rotation = advance(rotation, clock, 20)
    assert stored_key(rotation) == discarded != rotation.replacement_id
    return rotation, discarded


def settled(rotation: Rotation, clock: Clock, discarded: str) -> Rotation:
    """Run some turns: the discarded copy is recorded, so that it will be destroyed."""
    for _ in range(3):
        rotation = advance(get_rotation(rotation.rotation_id), clock, 30)
    assert Key.objects.get(pk=discarded).material in {Material.DESTROY_DUE, Material.DESTROYED}
    return rotation


@pytest.mark.database
def test_rotation_aborted_after_a_late_write_keeps_the_predecessor_readable(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotation, discarded = after_a_late_write(clock, monkeypatch)
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, rotation.credential.account, now=clock())
    abort_rotation(grant, rotation, "not today")
    rotation = settled(rotation, clock, discarded)
    assert stored_key(rotation) == rotation.predecessor_id
    assert read_string(rotation.predecessor) is not None


def test_replacement_revoked_after_a_late_write_keeps_the_predecessors_copy(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The active key's only copy is not sacrificed for a discarded one's."""
    rotation, discarded = after_a_late_write(clock, monkeypatch)
    assert rotation.replacement is not None
    revoke(rotation.replacement, clock)
    rotation = settled(rotation, clock, discarded)
    assert (rotation.state, key_states(rotation)) == (S.CANCELLED, ("active", "deactivated"))
    assert stored_key(rotation) == rotation.predecessor_id
    assert read_string(rotation.predecessor) is not None


def test_rotation_after_a_late_write_continues_with_another_key(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotation, discarded = after_a_late_write(clock, monkeypatch)
    rotation = settled(rotation, clock, discarded)
    assert rotation.state == S.AWAITING_PROOF
    assert stored_key(rotation) == rotation.replacement_id


def test_rotation_aborted_during_a_write_makes_that_write_fail(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: a ledger row precedes the write. So an abort knows of it, and writes the predecessor before it."""
    rotation, put, late = begun(clock), LocalKeystore.put, []

    def stop(self: LocalKeystore, *args: object, **kwargs: object) -> int:
        late.append(lambda: put(self, *args, **kwargs))  # type: ignore[arg-type]  # forwarded arguments
        raise KeyboardInterrupt

    with monkeypatch.context() as suspension:
        suspension.setattr(LocalKeystore, "put", stop)
        with pytest.raises(KeyboardInterrupt):
            advance_rotation(rotation.rotation_id, clock)
    clock.tick(60)
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, rotation.credential.account, now=clock())
    abort_rotation(grant, get_rotation(rotation.rotation_id), "not today")
    rotation = advance(rotation, clock, 3)
    with pytest.raises(BackendConflictError):
        late[0]()
    assert stored_key(rotation) == rotation.predecessor_id


# --- a write without a reply --------------------------------------------------------------------------------


def abort(rotation: Rotation, clock: Clock) -> Rotation:
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, rotation.credential.account, now=clock())
    return abort_rotation(grant, get_rotation(rotation.rotation_id), "not today")


def test_rotation_aborted_after_a_write_without_a_reply_makes_that_write_fail(
    clock: Clock, verifier: UsageLog, keystore: DelayedKeystore
) -> None:
    """Guarantee: the merchant never reads a discarded key, however late its write arrives."""
    rotation = begun(clock)
    with keystore.delaying():
        rotation = advance(rotation, clock)
    assert abort(rotation, clock).state == S.ROLLING_BACK
    rotation = advance(rotation, clock)
    assert keystore.arrive() == [BackendConflictError]
    assert stored_key(rotation) == rotation.predecessor_id


def test_rotation_aborted_after_its_key_was_made_again_makes_the_first_write_fail(
    clock: Clock, verifier: UsageLog, keystore: DelayedKeystore
) -> None:
    """A discarded replacement's write may still arrive, too."""
    rotation = begun(clock)
    with keystore.delaying():
        first = advance(rotation, clock).replacement_id
    make_verifier()
    rotation = advance(rotation, clock, 10)
    assert rotation.state == S.STAGED
    assert rotation.replacement_id != first
    assert abort(rotation, clock).state == S.ROLLING_BACK
    rotation = advance(rotation, clock)
    assert keystore.arrive() == [BackendConflictError]
    assert stored_key(rotation) == rotation.predecessor_id


def after_an_unsent_write(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Rotation:
    rotation = begun(clock)
    with monkeypatch.context() as outage:
        outage.setattr(LocalKeystore, "put", scene.unavailable)
        return advance(rotation, clock)


@pytest.mark.database
def test_rotation_aborted_after_a_write_that_was_not_sent_is_canceled(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outage does not turn each abort into a rollback."""
    rotation = after_an_unsent_write(clock, monkeypatch)
    assert abort(rotation, clock).state == S.CANCELLED
    assert stored_key(rotation) == rotation.predecessor_id


def test_write_without_a_reply_is_settled_by_the_next_delivery(
    clock: Clock, verifier: UsageLog, keystore: DelayedKeystore
) -> None:
    rotation = begun(clock)
    with keystore.delaying():
        rotation = advance(rotation, clock)
    rotation = advance(rotation, clock, 30)
    assert rotation.delivered_at is not None
    assert keystore.arrive() == [BackendConflictError]
    assert not rotation.ledger.filter(state=LedgerState.STARTED).exists()
    assert stored_key(rotation) == rotation.replacement_id


def test_cancellation_after_a_write_that_was_not_sent_writes_nothing(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A credential has few versions, and the predecessor is the newest one already."""
    rotation = after_an_unsent_write(clock, monkeypatch)
    before = newest_version(rotation.credential)
    assert rotation.replacement is not None
    revoke(rotation.replacement, clock)
    rotation = advance(rotation, clock, 30)
    assert rotation.state == S.CANCELLED
    assert newest_version(rotation.credential) == before
