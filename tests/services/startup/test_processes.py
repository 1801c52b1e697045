"""Workers and beats report that they run; the others find those that were lost, and measure the queues."""

from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from prometheus_client import REGISTRY

from keyvault.access.permissions import Permission as P
from keyvault.access.roles import Role
from keyvault.domain.environments import Environment
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import Notice, ServiceProcess, WebhookEndpoint
from keyvault.services.merchants.merchants import find_account
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.notifications import announce_to
from keyvault.services.recording.transaction import recorded
from keyvault.services.revocations.log_opening import LateComparison, late_comparison
from keyvault.services.startup.processes import (
    LATE_AFTER,
    LOST_AFTER,
    REPORT_SECONDS,
    ProcessWatch,
    measure,
    report_lost,
)
from keyvault.services.work import leases
from tests.clocks import Clock
from tests.factories import make_merchant, the_operator
from tests.services.racing import race

pytestmark = [pytest.mark.database, pytest.mark.django_db]


@pytest.fixture
def clock() -> Clock:
    return Clock(datetime(2026, 11, 21, 12, tzinfo=UTC))


def watch(clock: Clock, **runs: str) -> ProcessWatch:
    return ProcessWatch(clock, runs)


def alarms() -> list[str]:
    return list(Notice.objects.filter(kind=NoticeKind.PROCESS_LOST, is_alarm=True).values_list("subject", flat=True))


def meter(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, labels)


def test_dead_process_is_reported_once_within_a_minute_by_one_that_lives(clock: Clock) -> None:
    """Guarantee: any server, worker or beat that still runs raises the alarm."""
    worker, server = watch(clock, worker="worker a", beat="beat a"), watch(clock)
    worker.run_once()
    died_at = clock()
    for _ in range(12):
        clock.tick(REPORT_SECONDS)
        server.run_once()
    assert (clock() - died_at).total_seconds() <= 60
    assert sorted(alarms()) == ["beat a", "worker a"]
    assert meter("keyvault_lost_processes") == 2
    assert meter("keyvault_process_seen_timestamp_seconds", kind="worker") == died_at.timestamp()


def test_process_that_is_restarted_under_its_name_raises_no_alarm(clock: Clock) -> None:
    watch(clock, worker="worker a").run_once()
    clock.tick(LOST_AFTER.total_seconds() - 1)
    watch(clock, worker="worker a").run_once()
    clock.tick(LOST_AFTER.total_seconds() - 1)
    report_lost(clock())
    assert alarms() == []
    clock.tick(2)
    report_lost(clock())
    watch(clock, worker="worker a").run_once()
    assert alarms() == ["worker a"]
    assert meter("keyvault_lost_processes") == 0


def test_process_that_stops_in_order_leaves_no_row(clock: Clock) -> None:
    stopping = watch(clock, worker="worker a")
    stopping.run_once()
    stopping._finish()
    assert not ServiceProcess.objects.exists()


def test_lost_process_is_forgotten_after_a_week(clock: Clock) -> None:
    watch(clock, worker="worker a").run_once()
    clock.tick(60)
    report_lost(clock())
    clock.tick(8 * 86_400)
    report_lost(clock())
    assert not ServiceProcess.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_lost_process_found_by_several_raises_one_alarm(clock: Clock) -> None:
    watch(clock, beat="beat a").run_once()
    clock.tick(60)
    race(*[partial(report_lost, clock())] * 4)
    assert alarms() == ["beat a"]


def test_return_of_the_database_reports_no_process_that_waited_for_it(clock: Clock) -> None:
    """Guarantee: after an outage of the database, only processes that do not return raise an alarm."""
    worker, dead, server = watch(clock, worker="worker a"), watch(clock, worker="worker b"), watch(clock)
    for each in (worker, dead, server):
        each.run_once()
    clock.tick(120)
    server.run_once()
    assert alarms() == []
    clock.tick(REPORT_SECONDS)
    worker.run_once()
    server.run_once()
    assert alarms() == ["worker b"]


def test_installation_is_measured_without_a_scrape(clock: Clock) -> None:
    watch(clock).run_once()
    assert meter("keyvault_database_seen_timestamp_seconds") == clock().timestamp()
    assert meter("keyvault_disk_full") == 0
    assert (meter("keyvault_disk_free_bytes") or 0) > 0
    assert meter("keyvault_alarms_unacknowledged") == 0
    watch(clock, worker="worker a").run_once()
    clock.tick(60)
    watch(clock).run_once()
    assert meter("keyvault_alarms_unacknowledged") == 1


def test_missing_revocation_log_is_measured(clock: Clock, settings: Any, tmp_path: Path) -> None:
    settings.REVOCATION_LOG = tmp_path / "revocation_log"
    watch(clock).run_once()
    assert meter("keyvault_revocation_log_missing") == 1
    settings.REVOCATION_LOG.touch()
    watch(clock).run_once()
    assert meter("keyvault_revocation_log_missing") == 0


@pytest.mark.postgres
def test_tables_are_measured_by_estimates_and_seldom(clock: Clock) -> None:
    """Guarantee: the cost of these numbers does not grow with the rows."""
    measured: list[float] = []
    each = ProcessWatch(clock, measures=(lambda: measured.append(1),))
    with CaptureQueriesContext(connection) as queries:
        each.run_once()
        each.run_once()
    assert len(measured) == 1
    assert sum("pg_class" in query["sql"] for query in queries) == 1
    assert (meter("keyvault_table_bytes", table="keyvault_key") or 0) > 0
    assert meter("keyvault_table_rows", table="keyvault_key") is not None


def test_queue_age_is_that_of_the_oldest_work_however_often_it_is_dispatched(clock: Clock) -> None:
    """Guarantee: work that is sent again and again, and never taken, is visible."""
    for number in range(3):
        leases.enqueue(f"work {number}", "queue", clock())
    for _ in range(10):
        clock.tick(31)
        leases.take_due("queue", clock(), 2, is_urgent=False)
    measure(clock(), ["queue"])
    assert meter("keyvault_queue_age_seconds", queue="queue") == 310
    assert meter("keyvault_queue_due", queue="queue") == 3
    for number in range(3):
        assert leases.claim_early(f"work {number}", ["queue"], clock()) is not None
    measure(clock(), ["queue"])
    assert meter("keyvault_queue_age_seconds", queue="queue") == 0
    assert meter("keyvault_queue_due", queue="queue") == 0


def late_queues() -> list[tuple[str, str]]:
    found = Notice.objects.filter(kind=NoticeKind.QUEUE_LATE, is_alarm=True).order_by("created_at")
    return [(notice.subject, notice.payload["due_since"]) for notice in found]


def test_work_that_no_worker_takes_raises_one_alarm_within_a_minute(clock: Clock) -> None:
    """Guarantee: an engine that stands still is reported, also when every worker was stopped in order or hangs."""
    server = ProcessWatch(clock, queues=("rotation:sandbox", "rotation:production"))
    leases.enqueue("work", "rotation:production", clock())
    due_since = format_timestamp(clock())
    for _ in range(12):
        leases.take_due("rotation:production", clock(), 1, is_urgent=False)
        server.run_once()
        clock.tick(REPORT_SECONDS)
    assert late_queues() == [("rotation:production", due_since)]


def test_work_that_is_taken_in_time_raises_no_alarm(clock: Clock) -> None:
    server = ProcessWatch(clock, queues=("queue",))
    leases.enqueue("work", "queue", clock())
    clock.tick(LATE_AFTER.total_seconds())
    server.run_once()
    lease = leases.claim_early("work", ["queue"], clock())
    assert lease is not None
    clock.tick(1)
    server.run_once()
    leases.release_queued(lease, clock(), clock.tick(3_600))
    server.run_once()
    assert late_queues() == []


def test_queues_of_issuance_and_webhooks_are_measured(clock: Clock) -> None:
    measure(clock(), [])
    assert [meter("keyvault_queue_due", queue=queue) for queue in ("issuance", "webhooks")] == [0, 0]
    make_merchant()
    place = find_account("acme", Environment.SANDBOX)
    endpoint = WebhookEndpoint(account=place, url="https://merchant.example/hooks", created_at=clock())
    operator = the_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER)
    grant = authorize(operator, P.WEBHOOKS_WRITE, place, now=clock())
    with recorded(grant, P.WEBHOOKS_WRITE, "webhook_endpoint.added", account=place):
        endpoint.save()
        announce_to(grant, endpoint, NoticeKind.WEBHOOK_TEST, "test")
    measure(clock.tick(7), [])
    assert meter("keyvault_queue_due", queue="webhooks") == 1
    assert meter("keyvault_queue_age_seconds", queue="webhooks") == 7


@pytest.mark.django_db
def test_server_whose_start_missed_the_anchor_compares_with_it_later(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: a server that started beside a sealed Vault does not wait for a worker that missed nothing."""
    compared = []

    def compare(self: LateComparison, now: datetime) -> None:
        compared.append(now)
        self.is_due = False

    monkeypatch.setattr(LateComparison, "_compare", compare)
    monkeypatch.setattr(late_comparison, "is_due", True)
    server = watch(clock)
    server.run_once()
    server.run_once()
    assert compared == [clock()]
