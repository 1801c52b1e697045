"""The nightly look at the secret backend: ours and dead is destroyed, the rest put right or told of; strangers stay."""

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
from keyvault.services.secrets.stored_copies import copy_subject
from keyvault.services.work import leases
from tests.factories import SANDBOX, account, grant, issue, make_merchant, own_keystore
from tests.services.conftest import Scene, make_scene
from tests.services.rows import dump_tables, last_body, last_ids, written_since

pytestmark = [pytest.mark.database, pytest.mark.django_db]


@pytest.fixture
def scene(db: None, tmp_path: Path) -> Iterator[Scene]:
    """With a keystore of the test's own: everything that stands in it is looked at."""
    with own_keystore(tmp_path):
        yield make_scene()


def labels_of(key: Key, **other: str) -> dict[str, str]:
    found = {"key_id": key.key_id, "credential_id": key.credential_id, "environment": "sandbox", "request_id": "req_1"}
    return {**found, **other}


def write(path: str, labels: dict[str, str]) -> int:
    """The next version there, by whoever."""
    backend = secret_backend()
    after = max((each.version for each in backend.versions(Mount.SANDBOX, path)), default=0)
    return backend.put(Mount.SANDBOX, path, Plaintext("somebody's secret"), labels, expected_version=after)


def write_late(key: Key) -> int:
    """What a worker that was stopped writes after its key was given up."""
    return write(key.credential.backend_path, labels_of(key))


def states(key: Key) -> list[str]:
    return [each.state.value for each in secret_backend().versions(Mount.SANDBOX, key.credential.backend_path)]


def ended(scene: Scene) -> Key:
    """A dead key whose copy is destroyed."""
    key, _ = issue(scene.sandbox)
    lifecycle.revoke_key(grant(scene.admin, P.KEYS_REVOKE, scene.sandbox), key, RevocationReason.SUPERSEDED)
    maintenance.destroy_due()
    return fresh(key.pk)


def fresh(key_id: str) -> Key:
    row = lifecycle.get_key(key_id)
    assert row is not None
    return row


def mark(key: Key, **columns: Any) -> None:
    """A row as something left it that should not have."""
    row = fresh(key.pk)
    account = row.credential.account
    with recorded(grant(WORKER, P.BACKEND_RECONCILE, account), P.BACKEND_RECONCILE, "test.marked", account=account):
        row.compare_and_swap(**columns)


def found(report: ReconciliationReport) -> dict[str, int]:
    names = ("destroyed", "put_right", "forgotten", "missing", "strangers", "left", "failed")
    return {name: getattr(report, name) for name in names if getattr(report, name)}


def alarms() -> list[Notice]:
    return list(Notice.objects.filter(kind=NoticeKind.BACKEND_UNATTRIBUTED, is_alarm=True).order_by("created_at"))


# --- ours -----------------------------------------------------------------------------------------------------


def test_reconcile_where_all_is_well_finds_nothing_and_leaves_one_entry(scene: Scene) -> None:
    issue(scene.sandbox)
    ended(scene)
    before = last_ids()
    report = reconcile(SANDBOX)
    assert (found(report), report.is_complete, report.paths, report.versions) == ({}, True, 2, 2)
    assert written_since(before) == (["backend.reconciled"], [])
    assert last_body("backend.reconciled")["details"]["paths"] == 2


def test_reconcile_destroys_what_a_dead_key_left_behind(scene: Scene) -> None:
    """A worker wrote after its key was given up: the row says that it is due before anything is destroyed."""
    key = ended(scene)
    version = write_late(key)
    before = last_ids()
    assert found(reconcile(SANDBOX)) == {"destroyed": 1}
    row = Key.objects.get(pk=key.pk)
    assert (states(key), row.material, row.backend_version) == (["destroyed", "destroyed"], "destroyed", version)
    assert written_since(before)[0] == ["key.orphan_found", "key.material_destroyed", "backend.reconciled"]
    assert found(reconcile(SANDBOX)) == {}


def test_reconcile_destroys_the_late_write_of_a_key_that_was_never_noted(scene: Scene) -> None:
    """Staged, burned, and then its string arrives: no row ever knew of a copy."""
    key, _ = issue(scene.sandbox)
    engine = grant(WORKER, P.ISSUANCE_EXECUTE, scene.sandbox)
    burned, _ = lifecycle.stage_key(engine, key.credential, expires_in_days=None)
    lifecycle.discard_key(engine, burned)
    write_late(burned)
    assert found(reconcile(SANDBOX)) == {"destroyed": 1}
    assert (states(key), Key.objects.get(pk=burned.pk).material) == (["live", "destroyed"], "destroyed")


def test_reconcile_destroys_every_copy_of_a_dead_key_and_what_it_still_owes(scene: Scene) -> None:
    key, _ = issue(scene.sandbox)
    lifecycle.revoke_key(grant(scene.admin, P.KEYS_REVOKE, scene.sandbox), key, RevocationReason.SUPERSEDED)
    for _ in range(2):
        write_late(key)
    assert found(reconcile(SANDBOX)) == {"destroyed": 3}
    assert states(key) == ["destroyed"] * 3


def test_reconcile_leaves_a_staged_and_a_living_key_alone(scene: Scene) -> None:
    """An issuance in progress has its key's row, and perhaps its string already."""
    key, _ = issue(scene.sandbox)
    staged, _ = lifecycle.stage_key(
        grant(WORKER, P.ISSUANCE_EXECUTE, scene.sandbox), key.credential, expires_in_days=None
    )
    write_late(staged)
    write_late(key)
    before = dump_tables()
    assert found(reconcile(SANDBOX, is_dry_run=True)) == {}
    assert dump_tables() == before
    reconcile(SANDBOX)
    assert states(key) == ["live"] * 3


def test_reconcile_brings_back_the_copy_of_a_good_key(scene: Scene) -> None:
    """A deletion that was overtaken came late."""
    key, _ = issue(scene.sandbox)
    secret_backend().soft_delete(Mount.SANDBOX, key.credential.backend_path, 1)
    assert found(reconcile(SANDBOX)) == {"put_right": 1}
    assert (states(key), Key.objects.get(pk=key.pk).material) == (["live"], "held")


def test_reconcile_hides_the_copy_of_a_quarantined_key_again(scene: Scene) -> None:
    key, _ = issue(scene.sandbox)
    mark(key, material=Material.DELETED)
    assert found(reconcile(SANDBOX)) == {"put_right": 1}
    assert (states(key), Key.objects.get(pk=key.pk).material) == (["deleted"], "deleted")


@pytest.mark.parametrize("material", [Material.HELD, Material.DELETED])
def test_reconcile_tells_once_of_a_copy_that_is_gone(scene: Scene, material: Material) -> None:
    """The key is as good as before; somebody has to look at it. In the answer it is told every night."""
    key, _ = issue(scene.sandbox)
    mark(key, material=material)
    secret_backend().forget(Mount.SANDBOX, key.credential.backend_path)
    for _ in range(2):
        assert found(reconcile(SANDBOX)) == {"missing": 1}
    assert [(notice.subject, notice.payload["backend_version"]) for notice in alarms()] == [(key.key_id, 1)]
    assert Key.objects.get(pk=key.pk).state == "active"


@pytest.mark.parametrize("does", ["destroys", "puts right"])
def test_reconcile_leaves_a_copy_that_a_worker_is_at(scene: Scene, does: str) -> None:
    if does == "destroys":
        key = ended(scene)
        write_late(key)
    else:
        key, _ = issue(scene.sandbox)
        secret_backend().soft_delete(Mount.SANDBOX, key.credential.backend_path, 1)
    before = states(key)
    assert leases.claim(copy_subject(key), datetime.now(UTC)) is not None
    assert found(reconcile(SANDBOX)) == {"left": 1}
    assert states(key) == before


def test_reconcile_meeting_a_change_of_the_row_leaves_it_for_the_next_night(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read before somebody else wrote is no ground for an alarm."""
    key, _ = issue(scene.sandbox)
    secret_backend().forget(Mount.SANDBOX, key.credential.backend_path)

    def meanwhile(key_id: str) -> Key | None:
        mark(key, material=Material.DESTROY_DUE)
        return lifecycle.get_key(key_id)

    monkeypatch.setattr(reconciliation, "get_key", meanwhile)
    assert found(reconcile(SANDBOX)) == {"left": 1}
    assert alarms() == []


@pytest.mark.parametrize("point", ["marked", "destroyed"])
def test_reconcile_killed_in_the_middle_is_finished_by_the_next_run(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    class KilledError(BaseException):
        pass

    key = ended(scene)
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
    WorkLease.objects.update(until=None)
    assert Key.objects.get(pk=key.pk).material == "destroy_due"
    maintenance.destroy_due()
    assert (states(key), found(reconcile(SANDBOX))) == (["destroyed"] * 2, {})
    assert Key.objects.get(pk=key.pk).material == "destroyed"


# --- a backend whose storage was set back -------------------------------------------------------------------


@pytest.mark.parametrize("due", [Material.DESTROY_DUE, Material.DELETE_DUE, Material.RESTORE_DUE])
@pytest.mark.parametrize("is_hidden", [False, True])
def test_number_that_was_used_again_harms_nobodys_copy(scene: Scene, due: Material, is_hidden: bool) -> None:
    """Guarantee: a copy is destroyed, hidden or brought back by whose string it is, never by its number alone."""
    key, _ = issue(scene.sandbox)
    secret_backend().forget(Mount.SANDBOX, key.credential.backend_path)
    other, _ = lifecycle.stage_key(
        grant(WORKER, P.ISSUANCE_EXECUTE, scene.sandbox), key.credential, expires_in_days=None
    )
    assert write_late(other) == 1
    mark(other, material=Material.DELETED if is_hidden else Material.HELD, backend_version=1)
    if is_hidden:
        secret_backend().soft_delete(Mount.SANDBOX, key.credential.backend_path, 1)
    mark(key, material=due)
    before = states(key)
    maintenance.destroy_due()
    maintenance.settle_due()
    assert (states(key), Key.objects.get(pk=key.pk).material) == (before, "destroyed")
    assert [notice.subject for notice in alarms()] == [key.key_id]


def test_reconcile_tells_of_a_copy_whose_number_was_used_again(scene: Scene) -> None:
    key, _ = issue(scene.sandbox)
    secret_backend().forget(Mount.SANDBOX, key.credential.backend_path)
    other, _ = lifecycle.stage_key(
        grant(WORKER, P.ISSUANCE_EXECUTE, scene.sandbox), key.credential, expires_in_days=None
    )
    write_late(other)
    assert found(reconcile(SANDBOX)) == {"missing": 1}
    assert [notice.subject for notice in alarms()] == [key.key_id]


def test_reconcile_tells_of_a_connections_credentials_that_are_gone_or_older(scene: Scene) -> None:
    """What was set back is not taken for newly stored: last year's credentials do not come back into use unseen."""
    allowed = grant(scene.tam, P.CONNECTIONS_WRITE, scene.sandbox)
    connection = provider_connections.set_connection(allowed, scene.sandbox, "stripe", Plaintext("first secret"))
    first = secret_backend().read(Mount.SANDBOX, connection.backend_path)
    connection = provider_connections.replace_connection(allowed, connection, Plaintext("second secret"))
    WorkLease.objects.all().delete()
    provider_connections.settle_connection(grant(WORKER, P.BACKEND_RECONCILE, scene.sandbox), connection)
    secret_backend().forget(Mount.SANDBOX, connection.backend_path)
    assert found(reconcile(SANDBOX)) == {"missing": 1}
    secret_backend().put(Mount.SANDBOX, connection.backend_path, first.secret, first.labels, expected_version=0)
    assert found(reconcile(SANDBOX)) == {"missing": 1}
    assert provider_connections.get_connection(scene.sandbox, "stripe").backend_version == 2
    assert [notice.subject for notice in alarms()] == [provider_connections.connection_id(connection)]


# --- somebody else's ------------------------------------------------------------------------------------------

FOREIGN = {
    "no labels": {},
    "another credential": {"credential_id": "crd_00000000000000000000"},
    "another environment": {"environment": "production"},
    "a key that nobody knows": {"key_id": "0000000000000000"},
}


@pytest.mark.parametrize("what", FOREIGN)
def test_reconcile_tells_of_a_stranger_and_never_touches_it(scene: Scene, what: str) -> None:
    """Guarantee: nothing that cannot be attributed is deleted; it is an alarm once, and in the answer every night."""
    key = ended(scene)
    version = write(key.credential.backend_path, {**labels_of(key), **FOREIGN[what]} if FOREIGN[what] else {})
    for _ in range(2):
        report = reconcile(SANDBOX)
        assert found(report) == {"strangers": 1}
        assert report.findings[0]["path"] == key.credential.backend_path
    assert states(key) == ["destroyed", "live"]
    assert [(notice.subject, notice.payload["backend_version"]) for notice in alarms()] == [
        (key.credential_id, version)
    ]


def test_reconcile_tells_of_another_credentials_key(scene: Scene) -> None:
    """A dead key's string copied to another credential's path is nobody's there."""
    dead, (alive, _) = ended(scene), issue(scene.sandbox)
    write(alive.credential.backend_path, labels_of(dead, credential_id=alive.credential_id))
    assert found(reconcile(SANDBOX)) == {"strangers": 1}
    assert states(alive) == ["live", "live"]


def test_reconcile_tells_of_paths_that_are_nobodys(scene: Scene) -> None:
    """Where the path names an account of ours its operators have an alarm; else the answer and the log say it."""
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


def test_reconcile_keeps_a_key_string_that_somebody_took_for_a_path_to_itself(scene: Scene) -> None:
    """Guarantee: no secret in the answer, the log or the console, wherever a stranger has put it."""
    _, text = issue(scene.sandbox)
    write(f"{scene.sandbox.pk}/{text.reveal()}", {})
    report = reconcile(SANDBOX)
    told = json.dumps(report.as_json()) + "".join(json.dumps([each.subject, each.payload]) for each in alarms())
    assert report.strangers == 1
    assert text.reveal() not in told


def test_reconcile_tells_of_a_payload_that_cannot_be_understood(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    key, _ = issue(scene.sandbox)

    def fail(*_: object) -> None:
        raise BackendInvalidError("altered")

    monkeypatch.setattr(LocalKeystore, "read", fail)
    assert found(reconcile(SANDBOX)) == {"strangers": 1}
    assert states(key) == ["live"]


def test_reconcile_leaves_a_deleted_version_that_no_key_names(scene: Scene) -> None:
    """It cannot be read, so nobody can tell whose it was."""
    key, _ = issue(scene.sandbox)
    version = write(key.credential.backend_path, labels_of(key))
    secret_backend().soft_delete(Mount.SANDBOX, key.credential.backend_path, version)
    assert found(reconcile(SANDBOX)) == {"strangers": 1}
    assert states(key) == ["live", "deleted"]


strangers = st.lists(
    st.tuples(
        st.sampled_from(["own", "other", "unknown", "nowhere"]),
        st.fixed_dictionaries(
            {},
            optional={
                "key_id": st.sampled_from(["dead", "alive", "unknown", "odd \N{SNOWMAN}", ""]),
                "credential_id": st.sampled_from(["own", "other", "unknown", ""]),
                "environment": st.sampled_from(["sandbox", "production", ""]),
            },
        ),
    ),
    max_size=6,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(writes=strangers)
def test_reconcile_destroys_exactly_what_is_ours_and_dead(
    scene: Scene, writes: list[tuple[str, dict[str, str]]]
) -> None:
    """Guarantee: of whatever anybody writes wherever, only a version at a credential's own path whose labels name
    that credential, its environment and a dead key of it is destroyed."""
    dead, (other, _) = ended(scene), issue(scene.sandbox)
    alive, _ = lifecycle.stage_key(
        grant(WORKER, P.ISSUANCE_EXECUTE, scene.sandbox), dead.credential, expires_in_days=None
    )
    ids = {"dead": dead.key_id, "alive": alive.key_id, "own": dead.credential_id, "other": other.credential_id}
    paths = {
        "own": dead.credential.backend_path,
        "other": other.credential.backend_path,
        "unknown": f"{scene.sandbox.pk}/crd_00000000000000000000",
        "nowhere": "a/b/c",
    }
    kept: list[tuple[str, int]] = []
    ours: list[tuple[str, int]] = []
    for place, chosen in writes:
        labels = {name: ids.get(value, value) for name, value in chosen.items()}
        version = write(paths[place], labels)
        is_ours = (
            place == "own"
            and labels.items()
            >= {
                "key_id": dead.key_id,
                "credential_id": dead.credential_id,
                "environment": "sandbox",
            }.items()
        )
        (ours if is_ours else kept).append((paths[place], version))
    report = reconcile(SANDBOX)
    assert report.is_complete
    assert report.destroyed == len(ours)
    for wanted, versions in ((VersionState.DESTROYED, ours), (VersionState.LIVE, kept)):
        for path, number in versions:
            by_number = {each.version: each.state for each in secret_backend().versions(Mount.SANDBOX, path)}
            assert by_number[number] is wanted
    for place in ("unknown", "nowhere"):  # the next example finds none of this one's
        secret_backend().forget(Mount.SANDBOX, paths[place])


# --- a backend that is away, and faults -----------------------------------------------------------------------


def failing_for(path: str, error: Exception) -> Callable[..., Any]:
    real = LocalKeystore.versions

    def versions(self: LocalKeystore, mount: Mount, at: str) -> Any:
        if at == path:
            raise error
        return real(self, mount, at)

    return versions


@pytest.mark.parametrize("error", [BackendUnavailableError("lost"), BackendInvalidError("odd")])
def test_reconcile_goes_on_after_a_paths_fault(scene: Scene, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    sick, _ = issue(scene.sandbox)
    orphans = [ended(scene), ended(scene)]
    for key in orphans:
        write_late(key)
    monkeypatch.setattr(LocalKeystore, "versions", failing_for(sick.credential.backend_path, error))
    report = reconcile(SANDBOX)
    # Met once from the backend's side, and once from the row's.
    assert (found(report), report.is_complete) == ({"destroyed": 2, "failed": 2}, True)


def denials() -> list[str]:
    return [notice.subject for notice in Notice.objects.filter(kind=NoticeKind.BACKEND_DENIED, is_alarm=True)]


@pytest.mark.parametrize("call", ["list_paths", "versions", "read"])
def test_reconcile_that_is_refused_is_not_finished_and_alarms_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A role that was narrowed: not a night that counts as done, nor one call for each path there is."""
    for _ in range(3):
        issue(scene.sandbox)
    asked: list[object] = []

    def refuse(*args: object) -> None:
        asked.append(args)
        raise BackendDeniedError("refused", status=403)

    monkeypatch.setattr(LocalKeystore, call, refuse)
    for _ in range(2):
        assert not reconcile(SANDBOX).is_complete
    assert (len(asked), denials()) == (2, ["sandbox"])


@pytest.mark.parametrize("call", ["destroy", "soft_delete", "undelete", "forget"])
def test_upkeep_that_is_refused_stops_there_and_alarms_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    asked: list[object] = []

    def refuse(*args: object) -> None:
        asked.append(args)
        raise BackendDeniedError("refused", status=403)

    due = {"destroy": Material.DESTROY_DUE, "soft_delete": Material.DELETE_DUE, "undelete": Material.RESTORE_DUE}
    for _ in range(2):
        key, _ = issue(scene.sandbox)
        if call in due:
            mark(key, material=due[call])
    if call == "forget":
        offboard_merchant(grant(scene.admin, P.MERCHANTS_OFFBOARD), scene.merchant, "contract ended")
        maintenance.destroy_due()
    monkeypatch.setattr(LocalKeystore, call, refuse)
    maintenance.destroy_due()
    maintenance.settle_due()
    maintenance.forget_paths_due()
    assert (len(asked), denials()) == (1, ["sandbox"])
    WorkLease.objects.update(due_at=None)
    maintenance.destroy_due()
    maintenance.settle_due()
    maintenance.forget_paths_due()
    assert (len(asked), denials()) == (2, ["sandbox"])


@pytest.mark.parametrize("call", ["list_paths", "versions"])
def test_reconcile_with_the_backend_away_says_that_it_is_not_finished(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    for _ in range(5):
        issue(scene.sandbox)
    asked: list[object] = []

    def away(*args: object) -> None:
        asked.append(args)
        raise BackendUnavailableError("sealed")

    monkeypatch.setattr(LocalKeystore, call, away)
    report = reconcile(SANDBOX)
    assert not report.is_complete
    assert len(asked) <= 3


def test_reconcile_due_runs_once_a_night_and_again_soon_after_a_failure(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise BackendUnavailableError("sealed")

    def runs() -> int:
        return AuditEntry.objects.filter(event="backend.reconciled").count()

    with monkeypatch.context() as patch:
        patch.setattr(LocalKeystore, "list_paths", away)
        reconcile_due()
    reconcile_due()
    assert runs() == 2  # of two environments; they are put off for a moment
    WorkLease.objects.update(due_at=None)
    reconcile_due()
    reconcile_due()
    assert runs() == 4
    lease = WorkLease.objects.get(subject="reconcile:sandbox")
    assert (lease.token, lease.due_at) == ("", next_night(datetime.now(UTC)))


def test_reconcile_that_lost_its_lease_stops(scene: Scene) -> None:
    issue(scene.sandbox)

    def lost() -> None:
        raise StateConflictError("Another worker took this over.")

    with pytest.raises(StateConflictError):
        reconcile(SANDBOX, renew=lost)


def test_next_night_is_at_two_and_always_to_come() -> None:
    assert next_night(datetime(2026, 11, 21, 1, 59, tzinfo=UTC)) == datetime(2026, 11, 21, 2, tzinfo=UTC)
    assert next_night(datetime(2026, 11, 21, 2, tzinfo=UTC)) == datetime(2026, 11, 22, 2, tzinfo=UTC)


# --- a backend that is slow -----------------------------------------------------------------------------------


def destroyed() -> int:
    return Key.objects.filter(material=Material.DESTROYED).count()


def test_upkeep_of_a_slow_backend_ends_in_time_and_goes_on_next_time(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of a mass revocation keep no worker from issuing and rotating."""
    for _ in range(3):
        mark(issue(scene.sandbox)[0], material=Material.DESTROY_DUE)
    monkeypatch.setattr(maintenance, "_MAINTENANCE_SECONDS", 0)
    maintenance.destroy_due()
    assert destroyed() == 0
    monkeypatch.setattr(maintenance, "_MAINTENANCE_SECONDS", 20)
    maintenance.destroy_due()
    assert destroyed() == 3


def test_upkeep_leaves_an_environment_to_the_worker_that_is_at_it(scene: Scene) -> None:
    mark(issue(scene.sandbox)[0], material=Material.DESTROY_DUE)
    mark(issue(scene.sandbox)[0], material=Material.DELETE_DUE)
    held = leases.claim("upkeep:sandbox", datetime.now(UTC))
    assert held is not None
    maintenance.destroy_due()
    maintenance.settle_due()
    assert Key.objects.filter(material__in=[Material.DESTROY_DUE, Material.DELETE_DUE]).count() == 2
    leases.release(held)
    maintenance.destroy_due()
    maintenance.settle_due()
    assert not Key.objects.filter(material__in=[Material.DESTROY_DUE, Material.DELETE_DUE]).exists()


def test_upkeep_asks_a_backend_that_is_away_a_few_times_only(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(6):
        mark(issue(scene.sandbox)[0], material=Material.DESTROY_DUE)
    asked: list[object] = []

    def away(*args: object) -> None:
        asked.append(args)
        raise BackendUnavailableError("sealed")

    monkeypatch.setattr(LocalKeystore, "destroy", away)
    maintenance.destroy_due()
    assert len(asked) == 3


# --- merchants that have left ---------------------------------------------------------------------------------


def gone(scene: Scene) -> Credential:
    """A credential of a merchant that has left, its key's copy destroyed."""
    key, _ = issue(scene.sandbox)
    offboard_merchant(grant(scene.admin, P.MERCHANTS_OFFBOARD), scene.merchant, "contract ended")
    maintenance.destroy_due()
    return fresh(key.pk).credential


def remembered(credential: Credential) -> bool:
    return bool(secret_backend().versions(Mount.SANDBOX, credential.backend_path))


def test_upkeep_forgets_the_paths_of_a_merchant_that_has_left(scene: Scene) -> None:
    credential = gone(scene)
    assert remembered(credential)
    before = last_ids()
    maintenance.forget_paths_due()
    maintenance.forget_paths_due()
    assert not remembered(credential)
    assert written_since(before) == (["credential.forgotten"], [("credential", credential.pk)])
    assert Credential.objects.get().forgotten_at is not None


def test_upkeep_forgets_nothing_before_every_copy_is_destroyed(scene: Scene) -> None:
    key, _ = issue(scene.sandbox)
    make_merchant("globex")
    stays, _ = issue(account("globex"))
    offboard_merchant(grant(scene.admin, P.MERCHANTS_OFFBOARD), scene.merchant, "contract ended")
    maintenance.forget_paths_due()
    assert remembered(key.credential)
    maintenance.destroy_due()
    maintenance.forget_paths_due()
    assert not remembered(key.credential)
    assert remembered(stays.credential)


@pytest.mark.parametrize("call", ["versions", "forget"])
@pytest.mark.parametrize("error", [BackendUnavailableError("sealed"), BackendDeniedError("refused", status=403)])
def test_upkeep_forgets_later_what_it_could_not_now(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, call: str, error: Exception
) -> None:
    credential = gone(scene)

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(LocalKeystore, call, fail)
        maintenance.forget_paths_due()
    assert remembered(credential)
    WorkLease.objects.update(due_at=None)
    maintenance.forget_paths_due()
    assert not remembered(credential)


def test_upkeep_killed_while_forgetting_forgets_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    credential = gone(scene)

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(offboarding, "recorded", die)
        with pytest.raises(KeyboardInterrupt):
            maintenance.forget_paths_due()
    assert Credential.objects.get().forgotten_at is None
    WorkLease.objects.update(until=None)
    maintenance.forget_paths_due()
    assert (remembered(credential), Credential.objects.get().forgotten_at is None) == (False, False)


def test_upkeep_never_forgets_a_path_with_something_of_a_strangers(scene: Scene) -> None:
    """Guarantee: erasing what we remember of a merchant never erases what somebody else has put there."""
    credential = gone(scene)
    write(credential.backend_path, {})
    maintenance.forget_paths_due()
    reconcile(SANDBOX)
    assert remembered(credential)
    assert Credential.objects.get().forgotten_at is None


def test_reconcile_forgets_again_what_came_late(scene: Scene) -> None:
    """A worker wrote after the path was forgotten."""
    credential = gone(scene)
    maintenance.forget_paths_due()
    write_late(Key.objects.select_related("credential__account").get())
    assert found(reconcile(SANDBOX)) == {"destroyed": 1, "forgotten": 1}
    assert not remembered(credential)


# --- connections ----------------------------------------------------------------------------------------------


def test_reconcile_knows_connections_and_erases_what_is_left_of_removed_ones(scene: Scene) -> None:
    allowed = grant(scene.tam, P.CONNECTIONS_WRITE, scene.sandbox)
    kept = provider_connections.set_connection(allowed, scene.sandbox, "stripe", Plaintext("one secret"))
    removed = provider_connections.set_connection(allowed, scene.sandbox, "adyen", Plaintext("another secret"))
    provider_connections.remove_connection(allowed, removed)
    assert found(reconcile(SANDBOX)) == {"forgotten": 1}
    assert secret_backend().versions(Mount.SANDBOX, kept.backend_path) != []
    assert secret_backend().versions(Mount.SANDBOX, removed.backend_path) == []


@pytest.mark.parametrize("is_removed", [True, False])
def test_reconcile_tells_of_a_stranger_at_a_connections_path(scene: Scene, is_removed: bool) -> None:
    allowed = grant(scene.tam, P.CONNECTIONS_WRITE, scene.sandbox)
    connection = provider_connections.set_connection(allowed, scene.sandbox, "stripe", Plaintext("one secret"))
    write(connection.backend_path, {})
    if is_removed:
        provider_connections.remove_connection(allowed, connection)
    assert found(reconcile(SANDBOX)) == {"strangers": 1}
    assert [each.state for each in secret_backend().versions(Mount.SANDBOX, connection.backend_path)] == [
        "live",
        "live",
    ]


# --- the command ----------------------------------------------------------------------------------------------


def run(*words: str) -> Any:
    said = io.StringIO()
    call_command("reconcile_backend", *words, "--json", stdout=said)
    return json.loads(said.getvalue())


def test_reconcile_backend_dry_run_tells_and_changes_nothing(scene: Scene) -> None:
    key = ended(scene)
    write_late(key)
    hidden, _ = issue(scene.sandbox)
    secret_backend().soft_delete(Mount.SANDBOX, hidden.credential.backend_path, 1)
    write("nowhere", {})
    before, at = dump_tables(), (states(key), states(hidden))
    answer = run("--dry-run", "--environment", "sandbox")
    assert list(answer) == ["sandbox"]
    assert {name: answer["sandbox"][name] for name in ("destroyed", "put_right", "strangers")} == {
        "destroyed": 1,
        "put_right": 1,
        "strangers": 1,
    }
    assert (dump_tables(), (states(key), states(hidden))) == (before, at)


def test_reconcile_backend_does_both_environments_and_says_who_ran_it(scene: Scene) -> None:
    key = ended(scene)
    write_late(key)
    said = io.StringIO()
    call_command("reconcile_backend", stdout=said)
    assert f"orphan destroyed: {key.credential.backend_path}@2 {key.key_id}" in said.getvalue()
    assert "production: paths 0" in said.getvalue()
    entries = AuditEntry.objects.filter(event="backend.reconciled").order_by("id")
    assert [json.loads(bytes(entry.body))["details"]["environment"] for entry in entries] == ["sandbox", "production"]
    assert all("host_user" in json.loads(bytes(entry.body))["details"] for entry in entries)


def test_reconcile_backend_not_finished_exits_with_an_error(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise BackendUnavailableError("sealed")

    monkeypatch.setattr(LocalKeystore, "list_paths", away)
    with pytest.raises(CommandError, match="run again: sandbox, production"):
        run()


def test_report_lists_a_bounded_number_of_findings(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciliation_report, "MAX_LISTED_FINDINGS", 3)
    for number in range(5):
        write(f"nowhere/{number}", {})
    report = reconcile(Environment.SANDBOX)
    assert (report.strangers, len(report.findings)) == (5, 3)
    assert timedelta(0) < next_night(datetime.now(UTC)) - datetime.now(UTC) <= timedelta(days=1)
