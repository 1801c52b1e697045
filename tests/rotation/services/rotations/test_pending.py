"""The pending copy of a staged replacement: what it survives, who can read it, and when it is erased."""

from collections.abc import Callable
from typing import Any

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.backends.base import BackendUnavailableError, Mount
from keyvault.backends.local import LocalKeystore
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyState
from keyvault.domain.plaintext import Plaintext
from keyvault.models import Key, Verifier
from keyvault.services.recording.authorization import authorize
from keyvault.services.secrets.backend import MOUNT, secret_backend
from keyvault.services.secrets.stored_copies import find_stored, newest_version
from keyvault.services.usage.recorder import UsageLog
from rotation.domain.events import RotationState as S
from rotation.models import LedgerEntry, LedgerState, Rotation
from rotation.services.rotations.engine import advance_rotation
from rotation.services.rotations.interventions import abort_rotation
from rotation.services.rotations.requests import approve_rotation
from rotation.services.rotations.side_effects import forget_due
from tests.clocks import Clock
from tests.killing import KilledError
from tests.rotation import scene
from tests.rotation.scene import unavailable
from tests.rotation.steps import advance, begun, damage, revoke
from tests.verifiers import confirm, make_verifier

pytestmark = pytest.mark.django_db

FAR = 2**40
"""A sequence above every change of a test."""


def pending_paths() -> list[str]:
    """List the pending copies of this test's keys; other tests use the same keystore."""
    ours = {f"pending/{key_id}" for key_id in Key.objects.values_list("pk", flat=True)}
    return [path for path in secret_backend().list_paths(Mount.SANDBOX) if path in ours]


def open_entries() -> int:
    return LedgerEntry.objects.filter(step=S.STAGED, state=LedgerState.STARTED).count()


@pytest.fixture
def staged(clock: Clock, verifier: UsageLog) -> Rotation:
    """Return a rotation whose replacement a verifier has yet to accept."""
    make_verifier()
    rotation = advance(begun(clock), clock)
    assert rotation.state == S.STAGED
    return rotation


def accept() -> None:
    if not Verifier.objects.filter(confirmed_sequence=FAR).exists():
        confirm(Verifier.objects.get(), FAR)


@pytest.mark.database
def test_pending_copy_is_apart_from_what_the_merchant_reads_and_erased_at_delivery(
    staged: Rotation, clock: Clock
) -> None:
    assert pending_paths() == [f"pending/{staged.replacement_id}"]
    stored = find_stored(staged.credential)
    assert stored is not None
    assert stored.labels["key_id"] == staged.predecessor_id
    accept()
    assert advance(staged, clock).state == S.AWAITING_PROOF
    assert pending_paths() == []
    assert open_entries() == 0
    stored = find_stored(staged.credential)
    assert stored is not None
    assert stored.labels["key_id"] == staged.replacement_id


def test_pending_copy_whose_version_another_client_wrote_meanwhile_is_made_again(
    staged: Rotation, clock: Clock
) -> None:
    """Check-and-set counts the deleted version, so the copy could never be stored."""
    place = MOUNT[staged.credential.environment], staged.credential.backend_path
    foreign = secret_backend().put(*place, Plaintext("x"), {}, expected_version=newest_version(staged.credential))
    secret_backend().soft_delete(*place, foreign)
    accept()
    for _ in range(3):
        rotation = advance(staged, clock, 30)
    assert rotation.replacement_id != staged.replacement_id
    assert rotation.delivered_at is not None
    stored = find_stored(rotation.credential)
    assert stored is not None
    assert stored.labels["key_id"] == rotation.replacement_id
    forget_due(clock())
    assert pending_paths() == []


def test_pending_copy_that_could_not_be_erased_never_ends_the_key_that_was_delivered(
    staged: Rotation, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a rollback the predecessor has its version. Once the predecessor is dead, it is the only good key."""
    monkeypatch.setattr(LocalKeystore, "forget", unavailable)
    accept()
    rotation = advance(staged, clock)
    assert rotation.state == S.AWAITING_PROOF
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, rotation.credential.account, now=clock())
    abort_rotation(grant, rotation, "a bad day")
    advance(rotation, clock, 3)
    revoke(rotation.predecessor, clock)
    rotation = advance(rotation, clock, 61)
    assert rotation.replacement is not None
    assert (rotation.replacement_id, rotation.replacement.state) == (staged.replacement_id, KeyState.ACTIVE)
    stored = find_stored(rotation.credential)
    assert stored is not None
    assert stored.labels["key_id"] == rotation.replacement_id


def test_pending_copy_whose_write_may_have_been_read_is_not_made_again(
    staged: Rotation, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merchant may have the key from a write without a reply, although the version is gone since."""
    place = MOUNT[staged.credential.environment], staged.credential.backend_path
    put = LocalKeystore.put

    def lose_reply(*args: Any, **named: Any) -> int:
        version = put(*args, **named)
        secret_backend().soft_delete(*place, version)
        raise BackendUnavailableError("no answer in time", may_be_applied=True)

    accept()
    with monkeypatch.context() as outage:
        outage.setattr(LocalKeystore, "put", lose_reply)
        advance(staged, clock)
    for _ in range(3):
        rotation = advance(staged, clock, 60)
    assert rotation.replacement is not None
    assert (rotation.replacement_id, rotation.replacement.state) == (staged.replacement_id, KeyState.ACTIVE)


def test_pending_copy_is_needed_only_while_a_verifier_is_awaited(clock: Clock, verifier: UsageLog) -> None:
    assert advance(begun(clock), clock).state == S.AWAITING_PROOF
    assert open_entries() == 0


def test_pending_copy_of_a_canceled_rotation_is_erased_by_maintenance(staged: Rotation, clock: Clock) -> None:
    assert forget_due(clock()) == 0
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, staged.credential.account, now=clock())
    assert abort_rotation(grant, staged, "not needed").state == S.CANCELLED
    assert forget_due(clock()) == 1
    assert (pending_paths(), open_entries()) == ([], 0)
    assert forget_due(clock()) == 0


@pytest.mark.database
def test_pending_copy_stays_open_while_the_backend_is_down_and_is_erased_later(
    staged: Rotation, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: a delivery does not fail because the pending copy cannot be erased."""
    accept()
    with monkeypatch.context() as outage:
        outage.setattr(LocalKeystore, "forget", unavailable)
        assert advance(staged, clock).state == S.AWAITING_PROOF
        assert forget_due(clock()) == 0
    assert len(pending_paths()) == 1
    assert forget_due(clock()) == 1
    assert (pending_paths(), open_entries()) == ([], 0)


def test_pending_copy_of_a_dead_replacement_is_erased_although_its_rotation_cannot_end(
    staged: Rotation, clock: Clock
) -> None:
    """No turn can cancel a rotation whose plan is unreadable, and a compromised string must not wait for one."""
    assert staged.replacement is not None
    damage(staged, {"unknown_to_this_release": 1})
    revoke(staged.replacement, clock)
    assert forget_due(clock()) == 1
    assert (pending_paths(), open_entries()) == ([], 0)


def test_pending_copies_of_one_environment_do_not_wait_for_the_backend_of_another(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_verifier()
    rotations = []
    for environment in (Environment.SANDBOX, Environment.PRODUCTION):
        key, _ = scene.first_key(clock(), environment=environment)
        rotation = scene.rotate(key.credential, clock(), quiet_seconds=3_600, quarantine_seconds=600)
        if rotation.state == S.AWAITING_APPROVAL:
            person = rotation.requester_person
            place = key.credential.account
            grant = authorize(scene.approver(), P.ROTATIONS_APPROVE, place, now=clock(), requester_person=person)
            approve_rotation(grant, rotation, rotation.plan_digest)
        rotations.append(advance(rotation, clock))
    assert [rotation.state for rotation in rotations] == [S.STAGED, S.STAGED]
    for rotation in rotations:
        grant = authorize(scene.tam(), P.ROTATIONS_WRITE, rotation.credential.account, now=clock())
        abort_rotation(grant, rotation, "not needed")
    forget = LocalKeystore.forget

    def fail_in_sandbox(self: LocalKeystore, mount: Mount, path: str) -> Any:
        return unavailable() if mount is Mount.SANDBOX else forget(self, mount, path)

    monkeypatch.setattr(LocalKeystore, "forget", fail_in_sandbox)
    assert forget_due(clock()) == 1
    assert open_entries() == 1


def killed(method: str, *, is_after: bool, number: int = 1) -> Callable[..., Any]:
    """Return the backend's method, at whose n-th call the process is killed before or after it."""
    call, counted = getattr(LocalKeystore, method), [0]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        counted[0] += 1
        if counted[0] == number and not is_after:
            raise KilledError
        result = call(*args, **kwargs)
        if counted[0] == number:
            raise KilledError
        return result

    return wrapped


@pytest.mark.database
@pytest.mark.parametrize("is_after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("point", ["keep", "publish", "erase"])
def test_worker_killed_at_the_pending_copy_leaves_a_rotation_that_completes(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch, point: str, is_after: bool
) -> None:
    """Guarantee: whatever step is killed, the merchant reads a key that verifies, and no pending copy remains."""
    make_verifier()
    rotation = begun(clock)
    if point == "keep":
        monkeypatch.setattr(LocalKeystore, "put", killed("put", is_after=is_after))
    else:
        advance(rotation, clock)
        accept()
        method = "put" if point == "publish" else "forget"
        monkeypatch.setattr(LocalKeystore, method, killed(method, is_after=is_after))
    with pytest.raises(KilledError):
        advance_rotation(rotation.rotation_id, clock)
    monkeypatch.undo()
    accept()
    for _ in range(3):
        rotation = advance(rotation, clock, 60)
    forget_due(clock())
    assert rotation.state == S.AWAITING_PROOF
    assert (pending_paths(), open_entries()) == ([], 0)
    active = set(Key.objects.filter(credential=rotation.credential, state=KeyState.ACTIVE).values_list("pk", flat=True))
    assert active == {rotation.predecessor_id, rotation.replacement_id}
    stored = find_stored(rotation.credential)
    assert stored is not None
    assert stored.labels["key_id"] == rotation.replacement_id
    expected = 3 if (point, is_after) == ("keep", False) else 2
    assert rotation.credential.keys.count() == expected, "only a string that was never stored is made again"
