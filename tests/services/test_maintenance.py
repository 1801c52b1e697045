"""Maintenance: work that is due is found in the rows, done one by one, and safe to repeat."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from django.db import DatabaseError, OperationalError, connection, transaction
from django.db.models import Model
from django.test import override_settings
from prometheus_client import REGISTRY
from pytest_django import Settings

from keyvault.access.permissions import Permission as P
from keyvault.backends.base import BackendDeniedError, BackendUnavailableError, Health, Mount
from keyvault.backends.local import LocalKeystore
from keyvault.backends.vault import kv
from keyvault.backends.vault.client import VaultServer
from keyvault.backends.vault.logins import TokenFileLogin
from keyvault.domain.environments import Environment
from keyvault.domain.errors import IntegrityError
from keyvault.domain.issuance import COLLECT_WITHIN, REQUEST_LIFETIME, Delivery
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.revocation import RevocationReason
from keyvault.models import IssuanceRequest, Key, Material, Notice, ProviderConnection, WorkLease
from keyvault.models.idempotency import IdempotentRequest
from keyvault.services import idempotency, maintenance, offboarding, retention
from keyvault.services.issuance import collection, requests
from keyvault.services.keys import lifecycle
from keyvault.services.recording import clock_alarm, notifications
from keyvault.services.retention import RetentionRule
from keyvault.services.secrets import provider_connections, stored_copies
from keyvault.services.secrets.backend import secret_backend
from keyvault.services.work import clock, deletion, leases, row_turns
from keyvault.tasks import forget_expired_rows, issue_approved, run_maintenance, watch_backend
from tests.factories import PRODUCTION, SANDBOX, account, approve, grant, issue, issue_request, now, request_key
from tests.services.conftest import Scene, make_scene
from tests.services.rows import last_ids, written_since

pytestmark = [pytest.mark.database, pytest.mark.django_db]

LONG_AGO = datetime(2026, 1, 1, tzinfo=UTC)


def states(rows: Any) -> list[str]:
    return sorted(rows.values_list("state", flat=True))


def revoke_new_key(scene: Scene) -> Key:
    key, _ = issue(scene.sandbox)
    lifecycle.revoke_key(grant(scene.admin, P.KEYS_REVOKE, scene.sandbox), key, RevocationReason.SUPERSEDED)
    return key


def test_maintenance_issues_every_approved_request_and_no_other(scene: Scene) -> None:
    """A message is only a hint: what is due is in the rows, and a second run finds nothing."""
    for _ in range(3):
        request_key(scene.sandbox)
    approve(request_key(scene.production))
    request_key(scene.production)
    issue_approved()
    assert states(IssuanceRequest.objects) == ["issued"] * 4 + ["pending"]
    assert states(Key.objects) == ["active"] * 4
    before = last_ids()
    issue_approved()
    assert written_since(before) == ([], [])


def test_maintenance_of_one_request_isolates_its_error(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that cannot be issued now does not delay the others."""
    first, second = request_key(scene.sandbox), request_key(scene.sandbox)
    real = stored_copies.store_string

    def fail_for_first(key: Key, *args: Any, **options: Any) -> int:
        if options["purpose"] == first.pk:
            raise BackendUnavailableError("sealed")
        return real(key, *args, **options)

    monkeypatch.setattr(requests, "store_string", fail_for_first)
    assert maintenance.issue_due() == 1
    assert IssuanceRequest.objects.get(pk=first.pk).state == "approved"
    assert IssuanceRequest.objects.get(pk=second.pk).state == "issued"


def test_maintenance_of_a_request_denied_by_the_backend_alarms_once_and_issues_it_later(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that is too narrow loses no request, and operators are notified."""
    request = request_key(scene.sandbox)

    def refuse(key: Key, *args: Any, **options: Any) -> int:
        raise BackendDeniedError("The secrets manager does not let us do that.", status=403)

    with monkeypatch.context() as refusing:
        refusing.setattr(requests, "store_string", refuse)
        for _ in range(3):
            assert not maintenance.issue_one(request)
            leases.forget(f"issuance:{request.pk}")
    alarms = Notice.objects.filter(kind=NoticeKind.BACKEND_DENIED)
    assert [(notice.subject, notice.is_alarm) for notice in alarms] == [("sandbox", True)]
    assert maintenance.issue_one(request)
    assert IssuanceRequest.objects.get(pk=request.pk).state == "issued"


def test_maintenance_logs_that_the_backend_is_not_ready(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watch_backend()
    assert caplog.records == []
    monkeypatch.setattr(LocalKeystore, "health", lambda backend: Health(False, "it is sealed"))
    watch_backend()
    assert [getattr(record, "why", "") for record in caplog.records] == ["it is sealed"]


def test_only_maintenance_reports_that_the_vault_is_sealed(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
    """Guarantee: the alert ends with the seal, even if a console, which asks only for its pages, saw it."""
    settings.IS_VAULT = True
    backend = kv.VaultBackend(VaultServer("http://127.0.0.1"), partial(TokenFileLogin, Path()))
    monkeypatch.setattr(maintenance, "secret_backend", lambda: backend)
    for is_ready, expected in ((False, 1), (True, 0)):
        monkeypatch.setattr(kv, "read_health", lambda server, is_ready=is_ready: Health(is_ready, "it says so"))
        watch_backend()
        assert REGISTRY.get_sample_value("keyvault_vault_sealed") == expected
    monkeypatch.setattr(kv, "read_health", lambda server: Health(False, "it is sealed"))
    assert not backend.health().ready
    assert REGISTRY.get_sample_value("keyvault_vault_sealed") == 0


def test_maintenance_expires_overdue_requests_only(scene: Scene) -> None:
    old = request_key(scene.production, at=now() - REQUEST_LIFETIME)
    young = request_key(scene.production, at=now() - REQUEST_LIFETIME + timedelta(minutes=1))
    run_maintenance()
    assert IssuanceRequest.objects.get(pk=old.pk).state == "expired"
    assert IssuanceRequest.objects.get(pk=young.pk).state == "pending"


def test_maintenance_expires_overdue_keys_only(scene: Scene) -> None:
    """Active and suspended keys past their expiry are recorded as expired, once."""
    active, _ = issue(scene.sandbox, expires_in_days=1, at=LONG_AGO)
    suspended, _ = issue(scene.sandbox, expires_in_days=1, at=LONG_AGO)
    lifecycle.suspend_key(grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox), suspended)
    lasting, _ = issue(scene.sandbox, expires_in_days=3650, at=LONG_AGO)
    unlimited, _ = issue(scene.sandbox, at=LONG_AGO)
    before = last_ids()
    maintenance.expire_due()
    maintenance.expire_due()
    events, changes = written_since(before)
    assert events == ["key.expired", "key.expired"]
    assert {subject for _, subject in changes} == {active.key_id, suspended.key_id}
    for key in (active, suspended):
        row = Key.objects.get(pk=key.pk)
        assert (row.state, row.retirement, row.material) == ("deactivated", "expired", Material.DESTROY_DUE)
    assert {Key.objects.get(pk=key.pk).state for key in (lasting, unlimited)} == {"active"}


def test_maintenance_destroys_the_copies_of_revoked_keys_only(scene: Scene) -> None:
    revoked, (active, _) = revoke_new_key(scene), issue(scene.sandbox)
    run_maintenance()
    row = Key.objects.get(pk=revoked.pk)
    assert row.material == Material.DESTROYED
    versions = secret_backend().versions(Mount.SANDBOX, row.credential.backend_path)
    assert [version.state for version in versions] == ["destroyed"]
    assert Key.objects.get(pk=active.pk).material == Material.HELD
    before = last_ids()
    run_maintenance()
    assert written_since(before) == ([], [])


def test_maintenance_killed_between_destruction_and_record_records_it_later(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Destroying a copy twice is harmless."""
    key = revoke_new_key(scene)

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stored_copies, "recorded", die)
        with pytest.raises(KeyboardInterrupt):
            maintenance.destroy_due()
    assert Key.objects.get(pk=key.pk).material == Material.DESTROY_DUE
    maintenance.destroy_due()
    assert Key.objects.get(pk=key.pk).material == Material.DESTROYED


def test_maintenance_with_the_backend_failing_for_one_row_continues(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Revocation needs no backend; the destruction of a copy is retried row by row."""
    first, second = revoke_new_key(scene), revoke_new_key(scene)
    backend = secret_backend()
    real = backend.destroy

    def down_for_first(mount: Mount, path: str, version: int) -> None:
        if path == first.credential.backend_path:
            raise BackendUnavailableError("sealed")
        real(mount, path, version)

    with monkeypatch.context() as patch:
        patch.setattr(backend, "destroy", down_for_first)
        maintenance.destroy_due()
    assert Key.objects.get(pk=first.pk).material == Material.DESTROY_DUE
    assert Key.objects.get(pk=second.pk).material == Material.DESTROYED


def test_maintenance_of_a_row_changed_concurrently_continues(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another worker's or an operator's write does not stop the rest of the run."""
    for _ in range(2):
        issue(scene.sandbox, expires_in_days=1, at=LONG_AGO)
    real = lifecycle.list_expired

    def list_then_change(at: datetime, after: Key | None = None) -> list[Key]:
        found = real(at, after)
        other = lifecycle.get_key(found[0].key_id)
        assert other is not None
        lifecycle.suspend_key(grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox), other)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(lifecycle, "list_expired", list_then_change)
        maintenance.expire_due()
    assert states(Key.objects) == ["deactivated", "suspended"]
    maintenance.expire_due()
    assert states(Key.objects) == ["deactivated", "deactivated"]


def test_maintenance_of_a_damaged_row_retries_later(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = request_key(scene.sandbox)
    request_key(account("acme", PRODUCTION))

    def damaged(*_: object, **__: object) -> None:
        raise IntegrityError("The audit log is damaged.", internal="chain is missing")

    with monkeypatch.context() as patch:
        patch.setattr(requests, "store_string", damaged)
        assert maintenance.issue_one(first) is False
    assert "issuance will be retried" in caplog.text


@pytest.mark.parametrize("environment", list(Environment))
def test_maintenance_in_a_pinned_process_covers_its_environment_only(scene: Scene, environment: Environment) -> None:
    """A process without the other environment's peppers leaves that work to the processes that have them."""
    for place in (scene.sandbox, scene.production):
        issue(place, expires_in_days=1, at=LONG_AGO)
        key, _ = issue(place)
        lifecycle.revoke_key(grant(scene.admin, P.KEYS_REVOKE, place), key, RevocationReason.SUPERSEDED)
        if place == scene.production:
            request_key(place, at=now() - REQUEST_LIFETIME)
            approve(request_key(place))
        else:
            request_key(place)
    with override_settings(ENVIRONMENTS=(environment,)):
        issue_approved()
        run_maintenance()
    served = IssuanceRequest.objects.filter(account__environment=environment)
    others = IssuanceRequest.objects.exclude(account__environment=environment)
    assert not served.filter(state__in=["approved", "pending"]).exists()
    assert others.filter(state__in=["approved", "pending"]).count() == (1 if environment is PRODUCTION else 2)
    retired = Key.objects.filter(state="deactivated")
    assert set(retired.filter(credential__account__environment=environment).values_list("material", flat=True)) == {
        Material.DESTROYED
    }
    others_keys = Key.objects.exclude(credential__account__environment=environment)
    assert sorted(others_keys.values_list("state", "material")) == [("active", "held"), ("deactivated", "destroy_due")]


def test_maintenance_rolls_usage_up_in_one_worker_at_a_time(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[datetime] = []

    def roll_up(at: datetime) -> int:
        runs.append(at)
        return 0

    monkeypatch.setattr(maintenance, "roll_up", roll_up)
    other = leases.claim("usage:rollup", now())
    assert other is not None
    maintenance.forget_due()
    assert runs == []
    leases.release(other)
    maintenance.forget_due()
    assert len(runs) == 1
    assert leases.claim("usage:rollup", now()) is not None


def test_forgetting_continues_while_rows_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs seldom, so one run deletes a backlog of many batches, but no longer than its time."""
    monkeypatch.setattr(deletion, "MAX_DELETED", 1)
    for subject in ("a", "b", "c"):
        WorkLease.objects.create(subject=subject, due_at=LONG_AGO)
    with monkeypatch.context() as hurried:
        hurried.setattr(maintenance, "_MAINTENANCE_SECONDS", 0)
        maintenance.forget_due()
    assert WorkLease.objects.count() == 2
    maintenance.forget_due()
    assert not WorkLease.objects.exists()


@pytest.mark.parametrize("failing", ["the roll-up", "a table"])
def test_forgetting_a_backlog_continues_beside_what_fails(
    failing: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guarantee: what cannot be cleaned delays nothing else, is tried once in a run, and the task fails."""
    runs: list[str] = []

    def fail(at: datetime) -> int:
        runs.append("failing")
        raise DatabaseError("the row is damaged")

    def forget(at: datetime) -> int:
        runs.append("other")
        return 3 - runs.count("other")

    rules = [RetentionRule(Notice, "", forget=fail), RetentionRule(WorkLease, "", forget=forget)]
    monkeypatch.setattr(retention, "RULES", rules[1:] if failing == "the roll-up" else rules)
    monkeypatch.setattr(maintenance, "roll_up", fail if failing == "the roll-up" else lambda at: 0)
    with pytest.raises(DatabaseError, match="damaged"):
        maintenance.forget_due()
    assert (runs.count("failing"), runs.count("other")) == (1, 3)
    assert caplog.messages.count("rows were not rolled up or deleted") == 1


def test_maintenance_shreds_expired_secrets_and_deletes_old_responses(scene: Scene) -> None:
    key, text = issue(scene.sandbox)
    request: dict[str, Any] = {"holder": "h", "endpoint": "e", "environment": SANDBOX, "key": "k", "body": b""}
    response = idempotency.StoredResponse(201, {"key": None}, "key", Plaintext(text.reveal()), key.key_id)
    at = now() - idempotency.SEALED_FOR
    idempotency.run_once(**request, now=at, prepare=lambda: lambda: response)
    idempotency.run_once(**request | {"key": "older"}, now=now() - idempotency.KEEP, prepare=lambda: lambda: response)
    run_maintenance()
    forget_expired_rows()
    assert IdempotentRequest.objects.get().sealed is None


@dataclass(frozen=True)
class RowStep:
    """One step of maintenance: the function that lists its rows and the one that processes a row."""

    run: Callable[[], object]
    module: ModuleType
    lists: str
    acts: str
    rows: str = "key"


ROW_STEPS = (
    RowStep(maintenance.issue_due, requests, "list_approved", "issue_approved", "request"),
    RowStep(maintenance.expire_due, requests, "list_overdue", "expire_issuance", "request"),
    RowStep(maintenance.expire_due, lifecycle, "list_expired", "expire_key"),
    RowStep(maintenance.discard_due, requests, "list_uncollected", "discard_uncollected", "request"),
    RowStep(maintenance.destroy_due, requests, "list_withdrawn", "discard_withdrawn", "request"),
    RowStep(maintenance.destroy_due, stored_copies, "list_to_destroy", "destroy_string"),
    RowStep(maintenance.settle_due, stored_copies, "list_unsettled", "settle_string"),
    RowStep(maintenance.forget_paths_due, offboarding, "list_to_forget", "forget_path", "credential"),
    RowStep(
        maintenance.settle_connections_due, provider_connections, "list_unsettled", "settle_connection", "connection"
    ),
    RowStep(
        maintenance.settle_connections_due, provider_connections, "list_to_forget", "settle_connection", "connection"
    ),
)


@pytest.mark.parametrize("step", ROW_STEPS, ids=lambda step: f"{step.lists}-{step.acts}")
def test_maintenance_reaches_every_row_behind_one_that_the_database_refuses(
    step: RowStep, scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a batch of one row, the row that always fails neither ends the step nor keeps its place."""
    rows = list(_rows_of(step.rows, scene))
    reached = []

    def list_rows(*arguments: Any) -> list[Any]:
        after = arguments[-1] if arguments and isinstance(arguments[-1], Model) else None
        own = rows if after is None else rows[rows.index(after) + 1 :]
        return [row for row in own if row.pk not in reached][:1]

    def process(*arguments: Any) -> None:
        (row,) = (argument for argument in arguments if argument in rows)
        if row == rows[0]:
            with transaction.atomic(), connection.cursor() as cursor:
                cursor.execute("INSERT INTO keyvault_worklease (subject) VALUES (NULL)")
        reached.append(row.pk)

    monkeypatch.setattr(row_turns, "BATCH", 1)
    monkeypatch.setattr(maintenance, "_turns", maintenance.MaintenanceTurns())
    monkeypatch.setattr(step.module, step.lists, list_rows)
    acts = collection if step.acts == "discard_uncollected" else step.module
    monkeypatch.setattr(acts, step.acts, process)
    with override_settings(ENVIRONMENTS=("sandbox",)):
        for _ in range(4):
            step.run()
    assert reached == [row.pk for row in rows[1:]]
    assert "a row cannot be processed" in caplog.text


def _rows_of(kind: str, scene: Scene) -> Iterator[Model]:
    for number in range(1, 4):
        if kind == "connection":
            yield ProviderConnection(pk=number, account=scene.sandbox)
        elif kind == "request":
            yield request_key(scene.sandbox)
        else:
            key, _ = issue(scene.sandbox)
            yield key if kind == "key" else key.credential


def test_maintenance_without_a_database_ends_its_step(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are not tried one after another while the connection is lost."""
    tried = []

    def fail(*arguments: Any) -> None:
        tried.append(arguments)
        raise OperationalError("the connection is lost")

    for _ in range(2):
        issue(scene.sandbox, expires_in_days=1, at=LONG_AGO)
    monkeypatch.setattr(lifecycle, "expire_key", fail)
    with monkeypatch.context() as lost:
        lost.setattr(maintenance, "connection", SimpleNamespace(is_usable=lambda: False))
        with pytest.raises(OperationalError, match="lost"):
            maintenance.expire_due()
    assert len(tried) == 1


@pytest.mark.postgres
def test_maintenance_with_a_wrong_clock_does_nothing_irreversible_and_alarms_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither an expiry nor a discarded key nor a deletion depends on a clock that differs from the database's."""
    key, _ = issue(scene.sandbox, expires_in_days=1, at=LONG_AGO)
    uncollected = request_key(scene.sandbox, delivery=Delivery.SHOW_ONCE, at=now() - COLLECT_WITHIN)
    issue_request(uncollected, at=now() - COLLECT_WITHIN)
    IdempotentRequest.objects.create(
        holder="h", endpoint="e", key_digest=b"k", body_digest=b"b", held_until=LONG_AGO, created_at=LONG_AGO,
        expires_at=LONG_AGO,
    )  # fmt: skip
    with monkeypatch.context() as wrong:
        wrong.setattr(clock, "host_time", lambda: datetime.now(UTC) + timedelta(seconds=30))
        for _ in range(2):
            run_maintenance()
            forget_expired_rows()
    assert Key.objects.get(pk=key.pk).state == "active"
    assert IssuanceRequest.objects.get(pk=uncollected.pk).state == "issued"
    assert IdempotentRequest.objects.exists()
    (alarm,) = Notice.objects.filter(kind=NoticeKind.CLOCK_DIFFERS)
    assert (alarm.is_alarm, alarm.account, alarm.payload["seconds_ahead"]) == (True, None, 30)
    run_maintenance()
    forget_expired_rows()
    assert Key.objects.get(pk=key.pk).state == "deactivated"
    assert not IdempotentRequest.objects.exists()


@pytest.mark.django_db
def test_maintenance_with_a_wrong_clock_alarms_once_for_two_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second worker notices the clock after the first has looked for an alarm and before it has raised one."""
    error, announce = clock.ClockDiffersError(timedelta(seconds=30)), notifications.announce

    def announce_beside(*args: Any, **payload: Any) -> Notice:
        monkeypatch.setattr(clock_alarm, "announce", announce)
        clock_alarm.report_clock(error, now())
        return announce(*args, **payload)

    monkeypatch.setattr(clock_alarm, "announce", announce_beside)
    clock_alarm.report_clock(error, now())
    clock_alarm.report_clock(error, now())
    assert Notice.objects.filter(kind=NoticeKind.CLOCK_DIFFERS).count() == 1


STEPS = ["expire_due", "discard_due", "destroy_due", "shred_due"]


@pytest.mark.usefixtures("scene")
@pytest.mark.parametrize("broken", STEPS)
def test_maintenance_step_that_fails_does_not_stop_the_others(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Keys expire in time whatever else is broken; the task still fails, with the error."""
    done = []

    def step(name: str) -> None:
        done.append(name)
        if name == broken:
            raise ZeroDivisionError(name)

    for name in STEPS:
        monkeypatch.setattr(maintenance, name, partial(step, name))
    with pytest.raises(ZeroDivisionError, match=broken):
        run_maintenance()
    assert done == STEPS
    assert "Traceback" in caplog.text
    assert f"ZeroDivisionError: {broken}" in caplog.text


def test_maintenance_whose_steps_all_fail_logs_each_and_raises_the_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(name: str) -> None:
        raise ZeroDivisionError(name)

    for name in STEPS:
        monkeypatch.setattr(maintenance, name, partial(fail, name))
    with pytest.raises(ZeroDivisionError, match="expire_due"):
        run_maintenance()
    assert [name for name in STEPS if f"ZeroDivisionError: {name}" in caplog.text] == STEPS


@pytest.mark.django_db(transaction=True)
def test_maintenance_outside_a_transaction_runs_all_steps() -> None:
    """As in the worker: steps that lock rows open their own transaction, which a test's transaction would hide."""
    scene = make_scene()
    expiring, _ = issue(scene.sandbox, expires_in_days=1, at=LONG_AGO)
    uncollected = request_key(scene.sandbox, delivery=Delivery.SHOW_ONCE, at=now() - COLLECT_WITHIN)
    discarded = issue_request(uncollected, at=now() - COLLECT_WITHIN)
    overdue = request_key(scene.production, at=now() - REQUEST_LIFETIME)
    request: dict[str, Any] = {"holder": "h", "endpoint": "e", "environment": SANDBOX, "key": "k", "body": b""}
    response = idempotency.StoredResponse(201, {"key": None}, "key", Plaintext("shown once"), discarded.key_id)
    idempotency.run_once(**request, now=now() - idempotency.SEALED_FOR, prepare=lambda: lambda: response)
    run_maintenance()
    for key in (expiring, discarded):
        row = Key.objects.get(pk=key.pk)
        assert (row.state, row.material) == ("deactivated", Material.DESTROYED)
    assert IssuanceRequest.objects.get(pk=uncollected.pk).state == "burned"
    assert IssuanceRequest.objects.get(pk=overdue.pk).state == "expired"
    assert IdempotentRequest.objects.get().sealed is None
