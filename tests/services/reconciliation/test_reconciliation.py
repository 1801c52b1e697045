"""Nightly reconciliation: destroys the copies of revoked keys, repairs or reports the rest, keeps unattributed ones."""

import io
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER
from keyvault.backends.base import (
    BackendDeniedError,
    BackendInvalidError,
    BackendUnavailableError,
    Mount,
    VersionState,
)
from keyvault.backends.local import LocalKeystore
from keyvault.domain.environments import Environment
from keyvault.domain.errors import StateConflictError
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.revocation import RevocationReason
from keyvault.models import AuditEntry, Credential, Key, Material, Notice, WorkLease
from keyvault.services import maintenance, offboarding
from keyvault.services.keys import lifecycle
from keyvault.services.offboarding import offboard_merchant
from keyvault.services.reconciliation import reconciliation
from keyvault.services.reconciliation import report as reconciliation_report
from keyvault.services.reconciliation.reconciliation import next_night, reconcile, reconcile_due
from keyvault.services.reconciliation.report import ReconciliationReport
from keyvault.services.recording.transaction import recorded
from keyvault.services.secrets import provider_connections
from keyvault.services.secrets.backend import secret_backend
from keyvault.services.secrets.pending_copies import PendingCopy, find_pending, keep_pending
from keyvault.services.secrets.stored_copies import copy_subject
from keyvault.services.work import leases
from tests.factories import SANDBOX, account, grant, issue, make_merchant, own_keystore
from tests.killing import KilledError
from tests.services.conftest import Scene, make_scene
from tests.services.rows import dump_tables, last_body, last_ids, written_since

pytestmark = pytest.mark.django_db


@pytest.fixture
def scene(db: None, tmp_path: Path) -> Iterator[Scene]:
    """A scene with its own keystore, because reconciliation inspects everything in it."""
    with own_keystore(tmp_path):
        yield make_scene()


def labels_of(key: Key, **other: str) -> dict[str, str]:
    labels = {
        "key_id": key.key_id,
        "credential_id": key.credential_id,
        "environment": "sandbox",
        "issuance_request_id": "req_1",
    }
    return {**labels, **other}


def write(path: str, labels: dict[str, str]) -> int:
    """Write the path's next version, attributed by these labels only."""
    backend = secret_backend()
    after = max((each.version for each in backend.versions(Mount.SANDBOX, path)), default=0)
    return backend.put(Mount.SANDBOX, path, Plaintext("foreign secret"), labels, expected_version=after)


def write_late(key: Key) -> int:
    """Write what a stopped worker writes after its key was discarded."""
    return write(key.credential.backend_path, labels_of(key))


def states(key: Key) -> list[str]:
    return [each.state.value for each in secret_backend().versions(Mount.SANDBOX, key.credential.backend_path)]


def revoked_key(scene: Scene) -> Key:
    """A revoked key whose copy is destroyed."""
    key, _ = issue(scene.sandbox)
    lifecycle.revoke_key(grant(scene.admin, P.KEYS_REVOKE, scene.sandbox), key, RevocationReason.SUPERSEDED)
    maintenance.destroy_due()
    return fresh(key.pk)


def fresh(key_id: str) -> Key:
    row = lifecycle.get_key(key_id)
    assert row is not None
    return row


def overwrite_columns(key: Key, **columns: Any) -> None:
    """Write columns past the services, to stage an inconsistent row."""
    row = fresh(key.pk)
    account = row.credential.account
    with recorded(grant(WORKER, P.BACKEND_RECONCILE, account), P.BACKEND_RECONCILE, "test.marked", account=account):
        row.compare_and_swap(**columns)


def counts_of(report: ReconciliationReport) -> dict[str, int]:
    names = ("destroyed", "put_right", "forgotten", "missing", "unattributed", "left", "failed")
    return {name: getattr(report, name) for name in names if getattr(report, name)}


def alarms() -> list[Notice]:
    return list(Notice.objects.filter(kind=NoticeKind.BACKEND_UNATTRIBUTED, is_alarm=True).order_by("created_at"))


# --- own copies -------------------------------------------------------------------------------------------------


@pytest.mark.database
def test_reconcile_without_findings_writes_one_audit_entry(scene: Scene) -> None:
    issue(scene.sandbox)
    revoked_key(scene)
    before = last_ids()
    report = reconcile(SANDBOX)
    assert (counts_of(report), report.is_complete, report.paths, report.versions) == ({}, True, 2, 2)
    assert written_since(before) == (["backend.reconciled"], [])
    assert last_body("backend.reconciled")["details"]["paths"] == 2


def test_reconcile_destroys_the_late_copy_of_a_revoked_key(scene: Scene) -> None:
    """A worker wrote after its key was discarded; the row becomes due before anything is destroyed."""
    key = revoked_key(scene)
    version = write_late(key)
    before = last_ids()
    assert counts_of(reconcile(SANDBOX)) == {"destroyed": 1}
    row = Key.objects.get(pk=key.pk)
    assert (states(key), row.material, row.backend_version) == (["destroyed", "destroyed"], "destroyed", version)
    assert written_since(before)[0] == ["key.orphan_found", "key.material_destroyed", "backend.reconciled"]
    assert counts_of(reconcile(SANDBOX)) == {}


def test_reconcile_destroys_the_late_copy_of_a_key_without_a_recorded_copy(scene: Scene) -> None:
    """Staged, discarded, and only then stored: no row records the copy."""
    key, _ = issue(scene.sandbox)
    engine = grant(WORKER, P.ISSUANCE_EXECUTE, scene.sandbox)
    discarded, _ = lifecycle.stage_key(engine, key.credential, expires_in_days=None)
    lifecycle.discard_key(engine, discarded)
    write_late(discarded)
    assert counts_of(reconcile(SANDBOX)) == {"destroyed": 1}
    assert (states(key), Key.objects.get(pk=discarded.pk).material) == (["live", "destroyed"], "destroyed")


def test_reconcile_erases_the_late_pending_copy_of_a_key_that_ended_and_no_other(scene: Scene) -> None:
    """A suspended worker kept a copy after its key was discarded and its rotation closed."""
    key, _ = issue(scene.sandbox)
    engine = grant(WORKER, P.ISSUANCE_EXECUTE, scene.sandbox)
    staged, discarded = (lifecycle.stage_key(engine, key.credential, expires_in_days=None)[0] for _ in range(2))
    lifecycle.discard_key(engine, discarded)
    for each in (staged, discarded):
        keep_pending(each, PendingCopy(Plaintext("secret"), 1))
    assert counts_of(reconcile(SANDBOX, is_dry_run=True)) == {"forgotten": 1}
    assert find_pending(discarded) is not None
    assert counts_of(reconcile(SANDBOX)) == {"forgotten": 1}
    assert find_pending(discarded) is None
    assert find_pending(staged) is not None
    write("pending/unknown", {})
    assert counts_of(reconcile(SANDBOX)) == {"unattributed": 1}


def test_reconcile_destroys_every_copy_of_a_revoked_key(scene: Scene) -> None:
    key, _ = issue(scene.sandbox)
    lifecycle.revoke_key(grant(scene.admin, P.KEYS_REVOKE, scene.sandbox), key, RevocationReason.SUPERSEDED)
    for _ in range(2):
        write_late(key)
    assert counts_of(reconcile(SANDBOX)) == {"destroyed": 3}
    assert states(key) == ["destroyed"] * 3


@pytest.mark.database
def test_reconcile_keeps_the_copies_of_staged_and_active_keys(scene: Scene) -> None:
    """An issuance in progress may have stored its string already."""
    key, _ = issue(scene.sandbox)
    staged, _ = lifecycle.stage_key(
        grant(WORKER, P.ISSUANCE_EXECUTE, scene.sandbox), key.credential, expires_in_days=None
    )
    write_late(staged)
    write_late(key)
    before = dump_tables()
    assert counts_of(reconcile(SANDBOX, is_dry_run=True)) == {}
    assert dump_tables() == before
    reconcile(SANDBOX)
    assert states(key) == ["live"] * 3


def test_reconcile_restores_the_deleted_copy_of_an_active_key(scene: Scene) -> None:
    """A delayed deletion hid the copy."""
    key, _ = issue(scene.sandbox)
    secret_backend().soft_delete(Mount.SANDBOX, key.credential.backend_path, 1)
    assert counts_of(reconcile(SANDBOX)) == {"put_right": 1}
    assert (states(key), Key.objects.get(pk=key.pk).material) == (["live"], "held")


def test_reconcile_deletes_the_copy_of_a_quarantined_key_again(scene: Scene) -> None:
    key, _ = issue(scene.sandbox)
    overwrite_columns(key, material=Material.DELETED)
    assert counts_of(reconcile(SANDBOX)) == {"put_right": 1}
    assert (states(key), Key.objects.get(pk=key.pk).material) == (["deleted"], "deleted")


@pytest.mark.parametrize("material", [Material.HELD, Material.DELETED])
def test_reconcile_alarms_once_about_a_missing_copy(scene: Scene, material: Material) -> None:
    """The key still verifies; the alarm is raised once, and every report lists the copy."""
    key, _ = issue(scene.sandbox)
    overwrite_columns(key, material=material)
    secret_backend().forget(Mount.SANDBOX, key.credential.backend_path)
    for _ in range(2):
        assert counts_of(reconcile(SANDBOX)) == {"missing": 1}
    assert [(notice.subject, notice.payload["backend_version"]) for notice in alarms()] == [(key.key_id, 1)]
    assert Key.objects.get(pk=key.pk).state == "active"


@pytest.mark.database
@pytest.mark.parametrize("action", ["destroy", "restore"])
def test_reconcile_skips_a_copy_that_a_worker_holds(scene: Scene, action: str) -> None:
    if action == "destroy":
        key = revoked_key(scene)
        write_late(key)
    else:
        key, _ = issue(scene.sandbox)
        secret_backend().soft_delete(Mount.SANDBOX, key.credential.backend_path, 1)
    before = states(key)
    assert leases.claim(copy_subject(key), datetime.now(UTC)) is not None
    assert counts_of(reconcile(SANDBOX)) == {"left": 1}
    assert states(key) == before


@pytest.mark.database
def test_reconcile_of_a_row_that_changed_since_skips_it(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row read before a concurrent write is no reason for an alarm."""
    key, _ = issue(scene.sandbox)
    secret_backend().forget(Mount.SANDBOX, key.credential.backend_path)

    def change_and_read(key_id: str) -> Key | None:
        overwrite_columns(key, material=Material.DESTROY_DUE)
        return lifecycle.get_key(key_id)

    monkeypatch.setattr(reconciliation, "get_key", change_and_read)
    assert counts_of(reconcile(SANDBOX)) == {"left": 1}
    assert alarms() == []


@pytest.mark.database
@pytest.mark.parametrize("point", ["marked", "destroyed"])
def test_reconcile_killed_midway_is_finished_by_the_next_run(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    key = revoked_key(scene)
    write_late(key)
    real = LocalKeystore.destroy

    def die(*args: Any) -> None:
        if point == "destroyed":
            real(*args)
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(LocalKeystore, "destroy", die)
        with pytest.raises(KilledError):
            reconcile(SANDBOX)
    WorkLease.objects.update(until=None, due_at=None)
    assert Key.objects.get(pk=key.pk).material == "destroy_due"
    maintenance.destroy_due()
    assert (states(key), counts_of(reconcile(SANDBOX))) == (["destroyed"] * 2, {})
    assert Key.objects.get(pk=key.pk).material == "destroyed"


# --- a backend with a rolled back storage -------------------------------------------------------------------


@pytest.mark.parametrize("due", [Material.DESTROY_DUE, Material.DELETE_DUE, Material.RESTORE_DUE])
@pytest.mark.parametrize("is_hidden", [False, True])
def test_reused_version_number_never_affects_another_key_s_copy(scene: Scene, due: Material, is_hidden: bool) -> None:
    """A copy is destroyed, hidden or restored by the key that it belongs to, never by its number alone."""
    key, _ = issue(scene.sandbox)
    secret_backend().forget(Mount.SANDBOX, key.credential.backend_path)
    other, _ = lifecycle.stage_key(
        grant(WORKER, P.ISSUANCE_EXECUTE, scene.sandbox), key.credential, expires_in_days=None
    )
    assert write_late(other) == 1
    overwrite_columns(other, material=Material.DELETED if is_hidden else Material.HELD, backend_version=1)
    if is_hidden:
        secret_backend().soft_delete(Mount.SANDBOX, key.credential.backend_path, 1)
    overwrite_columns(key, material=due)
    before = states(key)
    maintenance.destroy_due()
    maintenance.settle_due()
    assert (states(key), Key.objects.get(pk=key.pk).material) == (before, "destroyed")
    assert [notice.subject for notice in alarms()] == [key.key_id]


def test_reconcile_alarms_about_a_copy_with_a_reused_version_number(scene: Scene) -> None:
    key, _ = issue(scene.sandbox)
    secret_backend().forget(Mount.SANDBOX, key.credential.backend_path)
    other, _ = lifecycle.stage_key(
        grant(WORKER, P.ISSUANCE_EXECUTE, scene.sandbox), key.credential, expires_in_days=None
    )
    write_late(other)
    assert counts_of(reconcile(SANDBOX)) == {"missing": 1}
    assert [notice.subject for notice in alarms()] == [key.key_id]


@pytest.mark.database
def test_reconcile_alarms_about_missing_or_older_connection_credentials(scene: Scene) -> None:
    """Rolled back storage does not count as newly stored, so old credentials do not silently come back into use."""
    allowed = grant(scene.tam, P.CONNECTIONS_WRITE, scene.sandbox)
    connection = provider_connections.set_connection(allowed, scene.sandbox, "stripe", Plaintext("first secret"))
    first = secret_backend().read(Mount.SANDBOX, connection.backend_path)
    connection = provider_connections.replace_connection(allowed, connection, Plaintext("second secret"))
    WorkLease.objects.all().delete()
    provider_connections.settle_connection(grant(WORKER, P.BACKEND_RECONCILE, scene.sandbox), connection)
    secret_backend().forget(Mount.SANDBOX, connection.backend_path)
    assert counts_of(reconcile(SANDBOX)) == {"missing": 1}
    secret_backend().put(Mount.SANDBOX, connection.backend_path, first.secret, first.labels, expected_version=0)
    assert counts_of(reconcile(SANDBOX)) == {"missing": 1}
    assert provider_connections.get_connection(scene.sandbox, "stripe").backend_version == 2
    assert [notice.subject for notice in alarms()] == [provider_connections.connection_id(connection)]


# --- unattributed copies ----------------------------------------------------------------------------------------

FOREIGN = {
    "no labels": {},
    "another credential": {"credential_id": "crd_00000000000000000000"},
    "another environment": {"environment": "production"},
    "an unknown key": {"key_id": "0000000000000000"},
}


@pytest.mark.parametrize("what", FOREIGN)
def test_reconcile_reports_an_unattributed_copy_and_keeps_it(scene: Scene, what: str) -> None:
    """An unattributed copy is never deleted; the alarm is raised once, and every report lists the copy."""
    key = revoked_key(scene)
    version = write(key.credential.backend_path, {**labels_of(key), **FOREIGN[what]} if FOREIGN[what] else {})
    for _ in range(2):
        report = reconcile(SANDBOX)
        assert counts_of(report) == {"unattributed": 1}
        assert report.findings[0]["path"] == key.credential.backend_path
    assert states(key) == ["destroyed", "live"]
    assert [(notice.subject, notice.payload["backend_version"]) for notice in alarms()] == [
        (key.credential_id, version)
    ]


def test_reconcile_reports_a_copy_at_another_credential_s_path(scene: Scene) -> None:
    """A revoked key's string at another credential's path counts as unattributed."""
    revoked, (active, _) = revoked_key(scene), issue(scene.sandbox)
    write(active.credential.backend_path, labels_of(revoked, credential_id=active.credential_id))
    assert counts_of(reconcile(SANDBOX)) == {"unattributed": 1}
    assert states(active) == ["live", "live"]


def test_reconcile_reports_unknown_paths(scene: Scene) -> None:
    """A path below an account raises an alarm there; any other path is reported and logged only."""
    key, _ = issue(scene.sandbox)
    paths = [
        f"{scene.sandbox.pk}/crd_00000000000000000000",
        f"{scene.production.pk}/{key.credential_id}",
        "somewhere",
        "999999999999999999999999/x",
        f"{scene.sandbox.pk}/{key.key_id}/deeper",
    ]
    for path in paths:
        write(path, labels_of(key))
    report = reconcile(SANDBOX)
    assert sorted(str(each["path"]) for each in report.findings) == sorted(paths)
    assert {notice.account_id for notice in alarms()} == {scene.sandbox.pk}
    assert len(alarms()) == 2
    assert all(secret_backend().versions(Mount.SANDBOX, path)[0].state is VersionState.LIVE for path in paths)


def test_reconcile_never_reveals_a_key_string_used_as_a_path(scene: Scene) -> None:
    """The report, the log and the console contain no secret, wherever another program has put it."""
    _, text = issue(scene.sandbox)
    write(f"{scene.sandbox.pk}/{text.reveal()}", {})
    report = reconcile(SANDBOX)
    output = json.dumps(report.as_json()) + "".join(json.dumps([each.subject, each.payload]) for each in alarms())
    assert report.unattributed == 1
    assert text.reveal() not in output


def test_reconcile_reports_an_unreadable_payload(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    key, _ = issue(scene.sandbox)

    def fail(*_: object) -> None:
        raise BackendInvalidError("altered")

    monkeypatch.setattr(LocalKeystore, "read", fail)
    assert counts_of(reconcile(SANDBOX)) == {"unattributed": 1}
    assert states(key) == ["live"]


def test_reconcile_keeps_a_deleted_version_that_no_key_names(scene: Scene) -> None:
    """It cannot be read, so its owner is unknown."""
    key, _ = issue(scene.sandbox)
    version = write(key.credential.backend_path, labels_of(key))
    secret_backend().soft_delete(Mount.SANDBOX, key.credential.backend_path, version)
    assert counts_of(reconcile(SANDBOX)) == {"unattributed": 1}
    assert states(key) == ["live", "deleted"]


foreign_writes = st.lists(
    st.tuples(
        st.sampled_from(["own", "other", "unknown", "nowhere"]),
        st.fixed_dictionaries(
            {},
            optional={
                "key_id": st.sampled_from(["revoked", "active", "unknown", "odd \N{SNOWMAN}", ""]),
                "credential_id": st.sampled_from(["own", "other", "unknown", ""]),
                "environment": st.sampled_from(["sandbox", "production", ""]),
            },
        ),
    ),
    max_size=6,
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(writes=foreign_writes)
def test_reconcile_destroys_exactly_the_copies_of_revoked_keys(
    scene: Scene, writes: list[tuple[str, dict[str, str]]]
) -> None:
    """A version is destroyed only at its credential's own path.

    Its labels must name that credential, its environment and one of its revoked keys.
    """
    revoked, (other, _) = revoked_key(scene), issue(scene.sandbox)
    active, _ = lifecycle.stage_key(
        grant(WORKER, P.ISSUANCE_EXECUTE, scene.sandbox), revoked.credential, expires_in_days=None
    )
    ids = {
        "revoked": revoked.key_id,
        "active": active.key_id,
        "own": revoked.credential_id,
        "other": other.credential_id,
    }
    paths = {
        "own": revoked.credential.backend_path,
        "other": other.credential.backend_path,
        "unknown": f"{scene.sandbox.pk}/crd_00000000000000000000",
        "nowhere": "a/b/c",
    }
    kept: list[tuple[str, int]] = []
    own: list[tuple[str, int]] = []
    for place, drawn_labels in writes:
        labels = {name: ids.get(value, value) for name, value in drawn_labels.items()}
        version = write(paths[place], labels)
        is_own = (
            place == "own"
            and labels.items()
            >= {
                "key_id": revoked.key_id,
                "credential_id": revoked.credential_id,
                "environment": "sandbox",
            }.items()
        )
        (own if is_own else kept).append((paths[place], version))
    report = reconcile(SANDBOX)
    assert report.is_complete
    assert report.destroyed == len(own)
    for expected, versions in ((VersionState.DESTROYED, own), (VersionState.LIVE, kept)):
        for path, number in versions:
            by_number = {each.version: each.state for each in secret_backend().versions(Mount.SANDBOX, path)}
            assert by_number[number] is expected
    for place in ("unknown", "nowhere"):  # the next example must find none of these
        secret_backend().forget(Mount.SANDBOX, paths[place])


# --- an unavailable backend, and errors -----------------------------------------------------------------------


def failing_for(path: str, error: Exception) -> Callable[..., Any]:
    real = LocalKeystore.versions

    def versions(self: LocalKeystore, mount: Mount, at: str) -> Any:
        if at == path:
            raise error
        return real(self, mount, at)

    return versions


@pytest.mark.parametrize("error", [BackendUnavailableError("lost"), BackendInvalidError("odd")])
def test_reconcile_continues_after_an_error_of_one_path(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    failing, _ = issue(scene.sandbox)
    orphans = [revoked_key(scene), revoked_key(scene)]
    for key in orphans:
        write_late(key)
    monkeypatch.setattr(LocalKeystore, "versions", failing_for(failing.credential.backend_path, error))
    report = reconcile(SANDBOX)
    # The error occurs once for the backend's path and once for the row.
    assert (counts_of(report), report.is_complete) == ({"destroyed": 2, "failed": 2}, True)


def denials() -> list[str]:
    return [notice.subject for notice in Notice.objects.filter(kind=NoticeKind.BACKEND_DENIED, is_alarm=True)]


@pytest.mark.parametrize("call", ["list_paths", "versions", "read"])
def test_reconcile_when_denied_is_incomplete_and_alarms_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """With a narrowed role, the run counts as unfinished and stops at the first denied call."""
    for _ in range(3):
        issue(scene.sandbox)
    calls: list[object] = []

    def refuse(*args: object) -> None:
        calls.append(args)
        raise BackendDeniedError("refused", status=403)

    monkeypatch.setattr(LocalKeystore, call, refuse)
    for _ in range(2):
        assert not reconcile(SANDBOX).is_complete
    assert (len(calls), denials()) == (2, ["sandbox"])


@pytest.mark.parametrize("call", ["destroy", "soft_delete", "undelete", "forget"])
def test_maintenance_when_denied_stops_and_alarms_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    calls: list[object] = []

    def refuse(*args: object) -> None:
        calls.append(args)
        raise BackendDeniedError("refused", status=403)

    due = {"destroy": Material.DESTROY_DUE, "soft_delete": Material.DELETE_DUE, "undelete": Material.RESTORE_DUE}
    for _ in range(2):
        key, _ = issue(scene.sandbox)
        if call in due:
            overwrite_columns(key, material=due[call])
    if call == "forget":
        offboard_merchant(grant(scene.admin, P.MERCHANTS_OFFBOARD), scene.merchant, "contract ended")
        maintenance.destroy_due()
    monkeypatch.setattr(LocalKeystore, call, refuse)
    maintenance.destroy_due()
    maintenance.settle_due()
    maintenance.forget_paths_due()
    assert (len(calls), denials()) == (1, ["sandbox"])
    WorkLease.objects.update(due_at=None)
    maintenance.destroy_due()
    maintenance.settle_due()
    maintenance.forget_paths_due()
    assert (len(calls), denials()) == (2, ["sandbox"])


@pytest.mark.parametrize("call", ["list_paths", "versions"])
def test_reconcile_with_the_backend_unavailable_is_incomplete(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    for _ in range(5):
        issue(scene.sandbox)
    calls: list[object] = []

    def fail(*args: object) -> None:
        calls.append(args)
        raise BackendUnavailableError("sealed")

    monkeypatch.setattr(LocalKeystore, call, fail)
    report = reconcile(SANDBOX)
    assert not report.is_complete
    assert len(calls) <= 3


@pytest.mark.database
def test_reconcile_due_runs_once_a_night_and_soon_again_after_a_failure(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise BackendUnavailableError("sealed")

    def runs() -> int:
        return AuditEntry.objects.filter(event="backend.reconciled").count()

    with monkeypatch.context() as patch:
        patch.setattr(LocalKeystore, "list_paths", fail)
        reconcile_due()
    reconcile_due()
    assert runs() == 2  # one per environment; both are postponed for a moment
    WorkLease.objects.update(due_at=None)
    reconcile_due()
    reconcile_due()
    assert runs() == 4
    lease = WorkLease.objects.get(subject="reconcile:sandbox")
    assert (lease.token, lease.due_at) == ("", next_night(datetime.now(UTC)))


def test_reconcile_without_its_lease_stops(scene: Scene) -> None:
    issue(scene.sandbox)

    def lost() -> None:
        raise StateConflictError("Another worker took this over.")

    with pytest.raises(StateConflictError):
        reconcile(SANDBOX, renew=lost)


def test_next_night_is_at_two_and_in_the_future() -> None:
    assert next_night(datetime(2026, 11, 21, 1, 59, tzinfo=UTC)) == datetime(2026, 11, 21, 2, tzinfo=UTC)
    assert next_night(datetime(2026, 11, 21, 2, tzinfo=UTC)) == datetime(2026, 11, 22, 2, tzinfo=UTC)


# --- a slow backend -------------------------------------------------------------------------------------------


def destroyed() -> int:
    return Key.objects.filter(material=Material.DESTROYED).count()


def test_maintenance_with_a_slow_backend_stops_in_time_and_continues_next_time(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies of a mass revocation keep no worker from issuing and rotating."""
    for _ in range(3):
        overwrite_columns(issue(scene.sandbox)[0], material=Material.DESTROY_DUE)
    monkeypatch.setattr(maintenance, "_MAINTENANCE_SECONDS", 0)
    maintenance.destroy_due()
    assert destroyed() == 0
    monkeypatch.setattr(maintenance, "_MAINTENANCE_SECONDS", 20)
    maintenance.destroy_due()
    assert destroyed() == 3


@pytest.mark.database
def test_maintenance_of_an_environment_held_by_another_worker_is_skipped(scene: Scene) -> None:
    overwrite_columns(issue(scene.sandbox)[0], material=Material.DESTROY_DUE)
    overwrite_columns(issue(scene.sandbox)[0], material=Material.DELETE_DUE)
    held = leases.claim("maintenance:sandbox", datetime.now(UTC))
    assert held is not None
    maintenance.destroy_due()
    maintenance.settle_due()
    assert Key.objects.filter(material__in=[Material.DESTROY_DUE, Material.DELETE_DUE]).count() == 2
    leases.release(held)
    maintenance.destroy_due()
    maintenance.settle_due()
    assert not Key.objects.filter(material__in=[Material.DESTROY_DUE, Material.DELETE_DUE]).exists()


def test_maintenance_with_the_backend_unavailable_calls_it_a_few_times_only(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(6):
        overwrite_columns(issue(scene.sandbox)[0], material=Material.DESTROY_DUE)
    calls: list[object] = []

    def fail(*args: object) -> None:
        calls.append(args)
        raise BackendUnavailableError("sealed")

    monkeypatch.setattr(LocalKeystore, "destroy", fail)
    maintenance.destroy_due()
    assert len(calls) == 3


# --- offboarded merchants -------------------------------------------------------------------------------------


def offboarded_credential(scene: Scene) -> Credential:
    """A credential of an offboarded merchant, with its key's copy destroyed."""
    key, _ = issue(scene.sandbox)
    offboard_merchant(grant(scene.admin, P.MERCHANTS_OFFBOARD), scene.merchant, "contract ended")
    maintenance.destroy_due()
    return fresh(key.pk).credential


def is_path_known(credential: Credential) -> bool:
    return bool(secret_backend().versions(Mount.SANDBOX, credential.backend_path))


def test_maintenance_forgets_the_paths_of_an_offboarded_merchant(scene: Scene) -> None:
    credential = offboarded_credential(scene)
    assert is_path_known(credential)
    before = last_ids()
    maintenance.forget_paths_due()
    maintenance.forget_paths_due()
    assert not is_path_known(credential)
    assert written_since(before) == (["credential.forgotten"], [("credential", credential.pk)])
    assert Credential.objects.get().forgotten_at is not None


def test_maintenance_forgets_no_path_before_every_copy_is_destroyed(scene: Scene) -> None:
    key, _ = issue(scene.sandbox)
    make_merchant("globex")
    other, _ = issue(account("globex"))
    offboard_merchant(grant(scene.admin, P.MERCHANTS_OFFBOARD), scene.merchant, "contract ended")
    maintenance.forget_paths_due()
    assert is_path_known(key.credential)
    maintenance.destroy_due()
    maintenance.forget_paths_due()
    assert not is_path_known(key.credential)
    assert is_path_known(other.credential)


@pytest.mark.parametrize("call", ["versions", "forget"])
@pytest.mark.parametrize("error", [BackendUnavailableError("sealed"), BackendDeniedError("refused", status=403)])
def test_maintenance_that_fails_to_forget_a_path_retries(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, call: str, error: Exception
) -> None:
    credential = offboarded_credential(scene)

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(LocalKeystore, call, fail)
        maintenance.forget_paths_due()
    assert is_path_known(credential)
    WorkLease.objects.update(due_at=None)
    maintenance.forget_paths_due()
    assert not is_path_known(credential)


@pytest.mark.database
def test_maintenance_killed_while_forgetting_forgets_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    credential = offboarded_credential(scene)

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(offboarding, "recorded", die)
        with pytest.raises(KeyboardInterrupt):
            maintenance.forget_paths_due()
    assert Credential.objects.get().forgotten_at is None
    WorkLease.objects.update(until=None, due_at=None)
    maintenance.forget_paths_due()
    assert (is_path_known(credential), Credential.objects.get().forgotten_at is None) == (False, False)


def test_maintenance_never_forgets_a_path_with_an_unattributed_copy(scene: Scene) -> None:
    """Erasing a merchant's paths never erases what another program has stored there."""
    credential = offboarded_credential(scene)
    write(credential.backend_path, {})
    maintenance.forget_paths_due()
    reconcile(SANDBOX)
    assert is_path_known(credential)
    assert Credential.objects.get().forgotten_at is None


def test_reconcile_forgets_a_path_again_after_a_late_write(scene: Scene) -> None:
    credential = offboarded_credential(scene)
    maintenance.forget_paths_due()
    write_late(Key.objects.select_related("credential__account").get())
    assert counts_of(reconcile(SANDBOX)) == {"destroyed": 1, "forgotten": 1}
    assert not is_path_known(credential)


# --- connections ----------------------------------------------------------------------------------------------


def test_reconcile_keeps_connections_and_erases_removed_ones(scene: Scene) -> None:
    allowed = grant(scene.tam, P.CONNECTIONS_WRITE, scene.sandbox)
    kept = provider_connections.set_connection(allowed, scene.sandbox, "stripe", Plaintext("one secret"))
    removed = provider_connections.set_connection(allowed, scene.sandbox, "adyen", Plaintext("another secret"))
    provider_connections.remove_connection(allowed, removed)
    assert counts_of(reconcile(SANDBOX)) == {"forgotten": 1}
    assert secret_backend().versions(Mount.SANDBOX, kept.backend_path) != []
    assert secret_backend().versions(Mount.SANDBOX, removed.backend_path) == []


@pytest.mark.database
@pytest.mark.parametrize("is_removed", [True, False])
def test_reconcile_reports_an_unattributed_copy_at_a_connection_s_path(scene: Scene, is_removed: bool) -> None:
    allowed = grant(scene.tam, P.CONNECTIONS_WRITE, scene.sandbox)
    connection = provider_connections.set_connection(allowed, scene.sandbox, "stripe", Plaintext("one secret"))
    write(connection.backend_path, {})
    if is_removed:
        provider_connections.remove_connection(allowed, connection)
    assert counts_of(reconcile(SANDBOX)) == {"unattributed": 1}
    assert [each.state for each in secret_backend().versions(Mount.SANDBOX, connection.backend_path)] == [
        "live",
        "live",
    ]


# --- the command ----------------------------------------------------------------------------------------------


def run(*options: str) -> Any:
    output = io.StringIO()
    call_command("reconcile_backend", *options, "--json", stdout=output)
    return json.loads(output.getvalue())


@pytest.mark.database
def test_reconcile_backend_dry_run_reports_and_changes_nothing(scene: Scene) -> None:
    key = revoked_key(scene)
    write_late(key)
    hidden, _ = issue(scene.sandbox)
    secret_backend().soft_delete(Mount.SANDBOX, hidden.credential.backend_path, 1)
    write("nowhere", {})
    before, at = dump_tables(), (states(key), states(hidden))
    report = run("--dry-run", "--environment", "sandbox")
    assert list(report) == ["sandbox"]
    assert {name: report["sandbox"][name] for name in ("destroyed", "put_right", "unattributed")} == {
        "destroyed": 1,
        "put_right": 1,
        "unattributed": 1,
    }
    assert (dump_tables(), (states(key), states(hidden))) == (before, at)


def test_reconcile_backend_covers_both_environments_and_records_the_host_user(scene: Scene) -> None:
    key = revoked_key(scene)
    write_late(key)
    output = io.StringIO()
    call_command("reconcile_backend", stdout=output)
    assert f"orphan destroyed: {key.credential.backend_path}@2 {key.key_id}" in output.getvalue()
    assert "production: paths 0" in output.getvalue()
    entries = AuditEntry.objects.filter(event="backend.reconciled").order_by("id")
    assert [json.loads(bytes(entry.body))["details"]["environment"] for entry in entries] == ["sandbox", "production"]
    assert all("host_user" in json.loads(bytes(entry.body))["details"] for entry in entries)


def test_reconcile_backend_prints_a_path_without_controls(scene: Scene) -> None:
    """Guarantee: who can write to the backend does not control the terminal of the operator."""
    write("nowhere\x1b[2J", {})
    output = io.StringIO()
    call_command("reconcile_backend", stdout=output)
    assert "  unattributed: nowhere\\x1b[2J no credential" in output.getvalue()


def test_reconcile_backend_incomplete_exits_with_an_error(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise BackendUnavailableError("sealed")

    monkeypatch.setattr(LocalKeystore, "list_paths", fail)
    with pytest.raises(CommandError, match="run again: sandbox, production"):
        run()


def test_report_lists_a_bounded_number_of_findings(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciliation_report, "MAX_LISTED_FINDINGS", 3)
    for number in range(5):
        write(f"nowhere/{number}", {})
    report = reconcile(Environment.SANDBOX)
    assert (report.unattributed, len(report.findings)) == (5, 3)
    assert timedelta(0) < next_night(datetime.now(UTC)) - datetime.now(UTC) <= timedelta(days=1)
