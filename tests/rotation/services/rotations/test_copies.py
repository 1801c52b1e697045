"""Backend copies in quarantine: hidden, restored, destroyed, each in its own step."""

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER
from keyvault.backends.base import (
    BackendDeniedError,
    BackendMissingError,
    BackendUnavailableError,
    Mount,
    StoredSecret,
)
from keyvault.backends.local import LocalKeystore
from keyvault.domain.errors import KeyvaultError, StateConflictError
from keyvault.domain.issuance import Delivery
from keyvault.domain.keys import KeyKind
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.revocation import RevocationReason
from keyvault.models import AuditEntry, Key, Material, Notice
from keyvault.services.keys import lifecycle
from keyvault.services.offboarding import offboard_merchant
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.transaction import recorded
from keyvault.services.secrets import stored_copies
from keyvault.services.secrets.backend import secret_backend
from keyvault.services.secrets.stored_copies import find_stored, read_public_string, read_string
from keyvault.services.usage.recorder import UsageLog
from rotation.domain.events import RotationState as S
from rotation.domain.plan_fields import Proof
from rotation.models import LedgerEntry, LedgerState, Rotation
from rotation.services.rotations.engine import advance_rotation
from rotation.services.rotations.interventions import abort_rotation, confirm_rotation, request_retirement
from rotation.services.rotations.reports import get_rotation
from tests.clocks import Clock
from tests.killing import KilledError
from tests.rotation import scene
from tests.rotation.copies import copy_of, lose_leases, run_maintenance, versions_of
from tests.rotation.scene import unavailable
from tests.rotation.services.rotations.test_tripwire import KNOWN, attempt, in_quarantine
from tests.rotation.steps import advance, key_states, overlapping, revoke, wait

pytestmark = pytest.mark.django_db

HELD, DELETED, DESTROYED = ("held", "live"), ("deleted", "deleted"), ("destroyed", "destroyed")


def hidden(clock: Clock, verifier: UsageLog) -> Rotation:
    """Return a rotation in quarantine whose predecessor's copy is soft-deleted."""
    rotation = in_quarantine(clock, verifier)
    assert copy_of(rotation.predecessor) == ("delete_due", "live")
    run_maintenance()
    assert copy_of(rotation.predecessor) == DELETED
    return get_rotation(rotation.rotation_id)


def abort(rotation: Rotation, clock: Clock) -> Rotation:
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, rotation.credential.account, now=clock())
    return abort_rotation(grant, get_rotation(rotation.rotation_id), "a bad day")


def operator(permission: P, key: Key, clock: Clock) -> tuple[Grant, Key]:
    return authorize(scene.admin(), permission, key.credential.account, now=clock()), Key.objects.get(pk=key.pk)


def newest_key(rotation: Rotation) -> str | None:
    stored = find_stored(rotation.credential)
    return None if stored is None else stored.labels["key_id"]


# --- quarantine ---------------------------------------------------------------------------------------------


@pytest.mark.database
def test_copy_of_a_key_in_quarantine_is_hidden_and_reported_once(clock: Clock, verifier: UsageLog) -> None:
    """A retiring key's string is no longer readable; merchants read the replacement as the newest version."""
    rotation = hidden(clock, verifier)
    run_maintenance()
    assert AuditEntry.objects.filter(event="key.material_deleted").count() == 1
    assert newest_key(rotation) == rotation.replacement_id
    assert versions_of(rotation.predecessor) == ["deleted", "live"]
    with pytest.raises(BackendMissingError, match="in quarantine"):
        read_string(rotation.predecessor)


def test_copy_of_a_key_suspended_by_an_operator_stays(clock: Clock, verifier: UsageLog) -> None:
    """A suspension is no quarantine: the key is on hold, not retiring."""
    key, _ = scene.first_key(clock())
    grant, row = operator(P.KEYS_SUSPEND, key, clock)
    lifecycle.suspend_key(grant, row)
    run_maintenance()
    assert copy_of(key) == HELD


def test_quarantine_over_destroys_the_hidden_copy(clock: Clock, verifier: UsageLog) -> None:
    rotation = wait(hidden(clock, verifier), clock, verifier, 6)
    assert (rotation.state, copy_of(rotation.predecessor)) == (S.COMPLETED, DESTROYED)
    assert copy_of(rotation.replacement) == HELD


def test_destruction_retried_during_an_outage_continues_one_ledger_row(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outage of a day makes thousands of attempts, and ledger rows are kept."""
    rotation = hidden(clock, verifier)
    with monkeypatch.context() as outage:
        outage.setattr(LocalKeystore, "destroy", unavailable)
        rotation = wait(rotation, clock, verifier, 6)
        for _ in range(3):
            rotation = advance(rotation, clock, 60)
    assert rotation.state == S.REVOKING
    assert rotation.ledger.filter(step=S.REVOKING).count() == 1
    assert advance(rotation, clock, 60).state == S.COMPLETED
    assert rotation.ledger.get(step=S.REVOKING).state == "done"


def test_quarantine_over_before_the_copy_was_hidden_destroys_it(clock: Clock, verifier: UsageLog) -> None:
    """This covers a short quarantine and a backend outage throughout it."""
    rotation = wait(in_quarantine(clock, verifier), clock, verifier, 6)
    assert (rotation.state, copy_of(rotation.predecessor)) == (S.COMPLETED, DESTROYED)


def test_predecessor_reinstated_has_its_copy_restored(clock: Clock, verifier: UsageLog) -> None:
    rotation = attempt(hidden(clock, verifier), clock, verifier, KNOWN)
    assert (rotation.state, copy_of(rotation.predecessor)) == (S.OVERLAP, ("restore_due", "deleted"))
    run_maintenance()
    assert copy_of(rotation.predecessor) == HELD
    assert newest_key(rotation) == rotation.replacement_id
    # A second quarantine hides the copy again.
    scene.use(verifier, rotation.replacement_id or "")
    assert wait(rotation, clock, verifier, 6).state == S.QUARANTINE
    run_maintenance()
    assert copy_of(rotation.predecessor) == DELETED


def test_predecessor_reinstated_before_its_copy_was_hidden_has_it_restored(clock: Clock, verifier: UsageLog) -> None:
    """The deletion may already have happened; only restoring afterwards is certain."""
    rotation = attempt(in_quarantine(clock, verifier), clock, verifier, KNOWN)
    assert copy_of(rotation.predecessor) == ("restore_due", "live")
    run_maintenance()
    assert copy_of(rotation.predecessor) == HELD


def test_predecessor_resumed_by_an_operator_stalls_and_has_its_copy_restored(clock: Clock, verifier: UsageLog) -> None:
    rotation = hidden(clock, verifier)
    grant, row = operator(P.KEYS_RESUME, rotation.predecessor, clock)
    lifecycle.resume_key(grant, row)
    rotation = advance(rotation, clock, 3)
    run_maintenance()
    assert (rotation.state, copy_of(rotation.predecessor)) == (S.STALLED, HELD)


@pytest.mark.parametrize("reason", [RevocationReason.UNSPECIFIED, RevocationReason.KEY_COMPROMISE])
@pytest.mark.parametrize("is_hidden", [True, False])
def test_predecessor_ended_in_quarantine_has_its_copy_destroyed(
    clock: Clock, verifier: UsageLog, reason: RevocationReason, is_hidden: bool
) -> None:
    rotation = hidden(clock, verifier) if is_hidden else in_quarantine(clock, verifier)
    revoke(rotation.predecessor, clock, reason)
    assert copy_of(rotation.predecessor)[0] == "destroy_due"
    run_maintenance()
    rotation = advance(rotation, clock, 3)
    assert (rotation.state, copy_of(rotation.predecessor), copy_of(rotation.replacement)) == (
        S.COMPLETED,
        DESTROYED,
        HELD,
    )


@pytest.mark.parametrize("reason", [RevocationReason.UNSPECIFIED, RevocationReason.KEY_COMPROMISE])
@pytest.mark.parametrize("is_destroyed_first", [True, False])
def test_replacement_ended_in_quarantine_makes_the_predecessor_readable(
    clock: Clock, verifier: UsageLog, reason: RevocationReason, is_destroyed_first: bool
) -> None:
    """The hidden copy is restored and written as the newest version."""
    rotation = hidden(clock, verifier)
    assert rotation.replacement is not None
    revoke(rotation.replacement, clock, reason)
    if is_destroyed_first:
        run_maintenance()
    rotation = advance(rotation, clock, 3)
    run_maintenance()
    assert (rotation.state, newest_key(rotation)) == (S.CANCELLED, rotation.predecessor_id)
    assert (copy_of(rotation.predecessor), copy_of(rotation.replacement)) == (HELD, DESTROYED)
    assert versions_of(rotation.predecessor) == ["destroyed", "destroyed", "live"]


def test_predecessor_expired_in_quarantine_has_its_copy_destroyed(clock: Clock, verifier: UsageLog) -> None:
    key, _ = scene.issue(scene.account(), clock(), expires_in_days=1)
    deadline = clock() + timedelta(days=3)
    rotation = scene.rotate(
        key.credential, clock(), predecessor_may_expire=True, deadline=deadline, quarantine_seconds=100_000
    )
    rotation = advance(rotation, clock)
    scene.acknowledge_replacement(rotation.rotation_id, clock())
    rotation = wait(wait(rotation, clock, verifier, 1), clock, verifier, 6)
    assert rotation.state == S.QUARANTINE
    run_maintenance()
    assert copy_of(key) == DELETED
    clock.tick(90_000)
    lifecycle.expire_key(
        authorize(WORKER, P.ISSUANCE_EXECUTE, key.credential.account, now=clock()), Key.objects.get(pk=key.pk)
    )
    run_maintenance()
    assert copy_of(key) == DESTROYED


def test_rotation_aborted_in_quarantine_restores_the_predecessor_as_the_newest(
    clock: Clock, verifier: UsageLog
) -> None:
    rotation = abort(hidden(clock, verifier), clock)
    assert copy_of(rotation.predecessor) == ("restore_due", "deleted")
    rotation = advance(rotation, clock, 3)
    assert (newest_key(rotation), copy_of(rotation.predecessor)) == (rotation.predecessor_id, HELD)
    assert versions_of(rotation.predecessor) == ["destroyed", "live", "live"]


def back_in_quarantine(clock: Clock, verifier: UsageLog) -> Rotation:
    """Return a rotation rolling back, with the replacement in quarantine and its copy hidden."""
    rotation = advance(abort(overlapping(clock, verifier), clock), clock, 3)
    scene.use(verifier, rotation.predecessor_id)
    rotation = wait(rotation, clock, verifier, 6)
    assert key_states(rotation) == ("active", "suspended")
    run_maintenance()
    assert (copy_of(rotation.replacement), newest_key(rotation)) == (DELETED, rotation.predecessor_id)
    return rotation


def test_replacement_in_quarantine_of_a_rollback_is_hidden_and_then_destroyed(clock: Clock, verifier: UsageLog) -> None:
    rotation = wait(back_in_quarantine(clock, verifier), clock, verifier, 6)
    run_maintenance()
    assert rotation.state == S.ROLLED_BACK
    assert (copy_of(rotation.predecessor), copy_of(rotation.replacement)) == (HELD, DESTROYED)


def test_predecessor_lost_in_a_rollback_restores_the_replacement_as_the_newest(
    clock: Clock, verifier: UsageLog
) -> None:
    """The merchant reads a good key, even though its only copy was hidden."""
    rotation = back_in_quarantine(clock, verifier)
    revoke(rotation.predecessor, clock, RevocationReason.KEY_COMPROMISE)
    rotation = advance(rotation, clock, 3)
    run_maintenance()
    assert (rotation.state, newest_key(rotation)) == (S.COMPLETED, rotation.replacement_id)
    assert (copy_of(rotation.predecessor), copy_of(rotation.replacement)) == (DESTROYED, HELD)


def test_replacement_that_is_the_newest_is_never_hidden(clock: Clock, verifier: UsageLog) -> None:
    """Without the predecessor's copy merchants would find nothing at the path."""
    key, _ = scene.issue(scene.account(), clock(), delivery=Delivery.SHOW_ONCE)
    with recorded(
        authorize(WORKER, P.ISSUANCE_EXECUTE, key.credential.account, now=clock()),
        P.ISSUANCE_EXECUTE,
        "issuance.collected",
        account=key.credential.account,
    ):
        key.compare_and_swap(material=Material.DESTROY_DUE)
    run_maintenance()
    rotation = advance(scene.rotate(key.credential, clock()), clock)
    scene.acknowledge_replacement(rotation.rotation_id, clock())
    verifier.flush()
    rotation = advance(abort(advance(rotation, clock, 3), clock), clock, 3)
    scene.use(verifier, rotation.predecessor_id)
    rotation = wait(rotation, clock, verifier, 6)
    assert key_states(rotation) == ("active", "suspended")
    run_maintenance()
    assert copy_of(rotation.replacement) == HELD


def test_merchant_offboarded_in_quarantine_leaves_no_copy(clock: Clock, verifier: UsageLog) -> None:
    rotation = hidden(clock, verifier)
    merchant = rotation.credential.account.merchant
    offboard_merchant(authorize(scene.admin(), P.MERCHANTS_OFFBOARD, now=clock()), merchant, "gone")
    advance(rotation, clock, 3)
    run_maintenance()
    assert copy_of(rotation.predecessor) == copy_of(rotation.replacement) == DESTROYED


# --- backend outages, denials and losses --------------------------------------------------------------------


@pytest.mark.parametrize("error", [BackendUnavailableError("sealed"), BackendDeniedError("refused", status=403)])
def test_backend_that_fails_to_hide_copies_delays_no_quarantine(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch, error: KeyvaultError
) -> None:
    """Hiding is retried throughout the quarantine, and the rotation continues regardless."""

    def fail(*_: object) -> None:
        raise error

    rotation = in_quarantine(clock, verifier)
    with monkeypatch.context() as patch:
        patch.setattr(LocalKeystore, "soft_delete", fail)
        run_maintenance()
        run_maintenance()
        assert copy_of(rotation.predecessor) == ("delete_due", "live")
        rotation = wait(rotation, clock, verifier, 6)
    assert (rotation.state, copy_of(rotation.predecessor)) == (S.COMPLETED, DESTROYED)


@pytest.mark.parametrize("error", [BackendUnavailableError("sealed"), BackendDeniedError("refused", status=403)])
def test_backend_that_fails_to_restore_a_copy_is_retried(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch, error: KeyvaultError
) -> None:
    """The key itself is good immediately."""

    def fail(*_: object) -> None:
        raise error

    rotation = hidden(clock, verifier)
    with monkeypatch.context() as patch:
        patch.setattr(LocalKeystore, "undelete", fail)
        rotation = attempt(rotation, clock, verifier, KNOWN)
        run_maintenance()
        assert (key_states(rotation), copy_of(rotation.predecessor)) == (
            ("active", "active"),
            ("restore_due", "deleted"),
        )
    run_maintenance()
    assert copy_of(rotation.predecessor) == HELD


def test_copy_that_cannot_be_restored_raises_an_alarm_and_the_key_stays_good(clock: Clock, verifier: UsageLog) -> None:
    rotation = attempt(hidden(clock, verifier), clock, verifier, KNOWN)
    key = rotation.predecessor
    secret_backend().destroy(Mount.SANDBOX, key.credential.backend_path, 1)
    run_maintenance()
    assert (key_states(rotation), copy_of(key)) == (("active", "active"), DESTROYED)
    notice = Notice.objects.get(kind=NoticeKind.BACKEND_UNATTRIBUTED)
    assert (notice.subject, notice.is_alarm, notice.payload["backend_version"]) == (key.key_id, True, 1)


# --- public keys --------------------------------------------------------------------------------------------


def test_public_key_in_quarantine_is_not_shown_with_the_reason(clock: Clock, verifier: UsageLog) -> None:
    """The refusal states its reason before and after the copy is hidden; a good key is shown again."""
    key, _ = scene.issue(scene.account(), clock(), kind=KeyKind.PUBLIC)
    rotation = advance(scene.rotate(key.credential, clock(), proof=Proof.CONFIRMATION), clock)
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, key.credential.account, now=clock())
    rotation = advance(confirm_rotation(grant, rotation, "their CTO, by phone"), clock, 3)
    request_retirement(grant, rotation, clock() + timedelta(seconds=5))
    rotation = wait(rotation, clock, verifier, 6)
    assert rotation.state == S.QUARANTINE
    for _ in range(2):
        with pytest.raises(StateConflictError, match="in quarantine"):
            read_public_string(*operator(P.KEYS_READ, key, clock))
        run_maintenance()
    abort(rotation, clock)
    with pytest.raises(StateConflictError, match="just left"):
        read_public_string(*operator(P.KEYS_READ, key, clock))
    run_maintenance()
    assert read_public_string(*operator(P.KEYS_READ, key, clock)) is not None


# --- killed, lost, failed -----------------------------------------------------------------------------------


@pytest.mark.database
@pytest.mark.parametrize("when", ["before", "after", "commit"])
@pytest.mark.parametrize(("call", "due"), [("soft_delete", "delete_due"), ("undelete", "restore_due")])
def test_step_killed_anywhere_is_completed_by_the_next_run(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch, when: str, call: str, due: str
) -> None:
    """It is killed before the backend call, after it, and right before the row is updated."""
    rotation = in_quarantine(clock, verifier)
    if due == "restore_due":
        run_maintenance()
        rotation = attempt(rotation, clock, verifier, KNOWN)
    real = getattr(LocalKeystore, call)

    def die(*args: object) -> None:
        if when == "after":
            real(*args)
        raise KilledError

    with monkeypatch.context() as patch:
        if when == "commit":
            patch.setattr(stored_copies, "_record_material", die)
        else:
            patch.setattr(LocalKeystore, call, die)
        with pytest.raises(KilledError):
            run_maintenance()
    assert copy_of(rotation.predecessor)[0] == due
    lose_leases()
    run_maintenance()
    assert copy_of(rotation.predecessor) == (DELETED if due == "delete_due" else HELD)


@pytest.mark.database
def test_step_overtaken_by_another_worker_writes_nothing(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that slept during its call finds its lease lost and keeps the row as the other worker left it."""
    rotation = in_quarantine(clock, verifier)
    real = LocalKeystore.soft_delete

    def sleep_over(self: LocalKeystore, *args: object) -> None:
        monkeypatch.setattr(LocalKeystore, "soft_delete", real)
        lose_leases()
        run_maintenance()
        real(self, *args)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(LocalKeystore, "soft_delete", sleep_over)
    run_maintenance()
    assert copy_of(rotation.predecessor) == DELETED
    assert AuditEntry.objects.filter(event="key.material_deleted").count() == 1


@pytest.mark.database
def test_worker_overtaken_before_its_call_changes_nothing_in_the_backend(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker that took over has closed their ledger row, so a later call would have no open row before it."""
    rotation = back_in_quarantine(clock, verifier)
    revoke(rotation.predecessor, clock, RevocationReason.KEY_COMPROMISE)
    clock.tick(3)
    read, seen = LocalKeystore.read, list[str]()
    rows = LedgerEntry.objects.filter(rotation=rotation, step=S.PUBLISHING, key=rotation.replacement)

    def sleep_before(self: LocalKeystore, *args: object) -> StoredSecret:
        if args[2:] and rows.filter(state=LedgerState.STARTED).exists():  # the version that it wants to restore
            monkeypatch.setattr(LocalKeystore, "read", read)
            clock.tick(16)
            advance_rotation(rotation.rotation_id, clock)
            seen.append("overtaken")
            for name in ("put", "undelete", "soft_delete", "destroy"):
                monkeypatch.setattr(LocalKeystore, name, lambda *_, name=name, **__: seen.append(name))
        return read(self, *args)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(LocalKeystore, "read", sleep_before)
    advance_rotation(rotation.rotation_id, clock)
    monkeypatch.undo()
    assert seen == ["overtaken"]
    assert set(rows.values_list("state", flat=True)) == {LedgerState.DONE}
    rotation = get_rotation(rotation.rotation_id)
    assert (rotation.state, newest_key(rotation)) == (S.COMPLETED, rotation.replacement_id)


@pytest.mark.parametrize("then", ["nothing", "suspended", "revoked"])
@pytest.mark.parametrize("killed", ["after put", "after destroy"])
def test_replacement_written_again_by_a_killed_worker_has_one_copy(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch, killed: str, then: str
) -> None:
    """Its row names the only readable copy, also when a person acts before the next turn. A dead key has none."""
    rotation = back_in_quarantine(clock, verifier)
    revoke(rotation.predecessor, clock, RevocationReason.KEY_COMPROMISE)
    _, name = killed.split()
    real = getattr(LocalKeystore, name)

    def die(*args: object, **named: object) -> None:
        real(*args, **named)
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(LocalKeystore, name, die)
        with pytest.raises(KilledError):
            advance_rotation(rotation.rotation_id, clock)
    assert rotation.replacement is not None
    if then == "suspended":
        lifecycle.suspend_key(*operator(P.KEYS_SUSPEND, rotation.replacement, clock))
    elif then == "revoked":
        revoke(rotation.replacement, clock)
    rotation = advance(rotation, clock, 61)
    run_maintenance()
    is_dead = then == "revoked"
    assert copy_of(rotation.replacement) == (DESTROYED if is_dead else HELD), rotation.state
    assert versions_of(rotation.predecessor).count("live") == (0 if is_dead else 1)


STEPS = ("suspend", "resume", "revoke", "maintenance", "maintenance", "lost", "failed", "refused", "died", "read")


def retiring(clock: Clock) -> Key:
    """Return a key whose credential's newest version belongs to another key."""
    key, _ = scene.first_key(clock())
    advance(scene.rotate(key.credential, clock()), clock)
    return key


@pytest.mark.long
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.sampled_from(STEPS), min_size=1, max_size=14))
def test_backend_with_random_faults_finally_agrees_with_the_rows(
    clock: Clock, verifier: UsageLog, steps: list[str]
) -> None:
    """Across quarantines and ends with lost, refused or killed calls, the copy is finally readable, hidden or destroyed
    as the row says, and never hidden while the key is good.
    """
    key = retiring(clock)
    with pytest.MonkeyPatch.context() as patch:
        for step in steps:
            _do(step, key, clock, patch)
        patch.undo()
        lose_leases()
        run_maintenance()
    state, (row, copy) = Key.objects.get(pk=key.pk).state, copy_of(key)
    wanted = {"active": HELD, "suspended": DELETED, "deactivated": DESTROYED}
    assert (row, copy) == wanted[state]


def _do(step: str, key: Key, clock: Clock, patch: pytest.MonkeyPatch) -> None:
    clock.tick(1)
    fresh = Key.objects.select_related("credential__account__merchant").get(pk=key.pk)
    advancing = authorize(WORKER, P.ROTATIONS_ADVANCE, fresh.credential.account, now=clock())
    with suppress(KeyvaultError, KilledError):
        match step:
            case "suspend":
                lifecycle.suspend_key(advancing, fresh, hides_copy=True)
            case "resume":
                lifecycle.resume_key(advancing, fresh)
            case "revoke":
                lifecycle.revoke_key(advancing, fresh, RevocationReason.SUPERSEDED)
            case "read":
                stored_copies.recover_string(fresh, fence=lambda: None)
            case "maintenance":
                run_maintenance()
            case _:
                _run_maintenance_with_fault(step, patch)


def _run_maintenance_with_fault(how: str, patch: pytest.MonkeyPatch) -> None:
    """`lost`: executed, and the reply is lost. `died`: the worker dies too, and its lease expires."""
    errors = {
        "lost": BackendUnavailableError("no answer"),
        "failed": BackendUnavailableError("sealed"),
        "refused": BackendDeniedError("refused", status=403),
        "died": KilledError(),
    }
    for call in ("soft_delete", "undelete", "destroy"):
        real = getattr(LocalKeystore, call)

        def fail(*args: object, _real: Callable[..., None] = real) -> None:
            if how in {"lost", "died"}:
                _real(*args)
            raise errors[how]

        patch.setattr(LocalKeystore, call, fail)
    try:
        run_maintenance()
    finally:
        patch.undo()
        lose_leases()
