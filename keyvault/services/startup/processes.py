"""Workers and beats report that they run; each of them and each server finds those that no longer do.

A process that is killed and restarted under the same name raises no alarm. Any other running process (a server, a
worker, or a beat) reports one that does not return, within a minute.
"""

import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from time import monotonic
from typing import ClassVar

from django.apps import apps
from django.conf import settings
from django.db import connection
from django.db.models import Max, QuerySet
from redis import Redis, RedisError

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER
from keyvault.backends import meters
from keyvault.domain.errors import StateConflictError
from keyvault.domain.issuance import IssuanceState
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import DeliveryState, IssuanceRequest, Notice, ServiceProcess, WebhookDelivery
from keyvault.models.notifications import UNSEEN_NOTICE
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.notifications import alarm_due, announce
from keyvault.services.recording.transaction import recorded
from keyvault.services.revocations.log_opening import late_comparison
from keyvault.services.startup.metrics import allocate_meter_files
from keyvault.services.work.background_thread import BackgroundThread, forget_at_fork, log_failure
from keyvault.services.work.clock import measure_difference
from keyvault.services.work.disk_space import is_disk_full, keep_reserve, measure_free_bytes
from keyvault.services.work.leases import measure_queue

_log = logging.getLogger(__name__)

REPORT_SECONDS = 5.0
"""Interval between two reports, in seconds."""

SLOW_SECONDS = 30.0
"""Interval between two measurements of tables and rotations, in seconds."""

LOST_AFTER = timedelta(seconds=30)
"""Time without a report after which a process counts as lost."""

LATE_AFTER = timedelta(seconds=50)
"""Time for which due work may wait for a worker before an alarm, which then follows within a minute."""

_KEPT_FOR = timedelta(days=7)
"""Retention of lost processes that never returned."""

_MAX_LOST = 100
"""Maximum processes that one run reports."""

_MAX_COUNTED = 10_000
"""Maximum rows of a queue that are counted."""

_BROKER_SECONDS = 2.0
"""Maximum wait for the broker, in seconds."""


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(slots=True, eq=False)
class ProcessWatch(BackgroundThread):
    """Report this process, find lost ones and late work, keep the disk reserve, and compare with the anchor once.

    `runs`: the names that this process reports, by kind. `queues`: the queues of work that are measured.
    `measures`: what is measured besides, every SLOW_SECONDS.
    """

    thread_name: ClassVar[str] = "processes"

    now: Callable[[], datetime] = utc_now
    runs: dict[str, str] = field(default_factory=dict)
    queues: tuple[str, ...] = ()
    measures: tuple[Callable[[], None], ...] = ()
    _done_at: datetime | None = field(default_factory=lambda: None, init=False)
    _slow_at: float = field(default_factory=lambda: float("-inf"), init=False)

    def report_as(self, kind: str, name: str = "") -> None:
        """Report this process as a worker or a beat from now on."""
        self.runs[kind] = f"{kind} {name or socket.gethostname()}"[:64]
        self.start()

    def forget(self) -> None:
        self.__init__(self.now, queues=self.queues, measures=self.measures)  # type: ignore[misc]  # a dataclass's own

    def run_once(self) -> None:
        # Before the reserve takes the free space: a meter file that has none kills the process.
        allocate_meter_files()
        keep_reserve()
        _measure_host()
        now = self.now()
        for kind, name in self.runs.items():
            ServiceProcess.objects.update_or_create(name=name, defaults={"kind": kind, "seen_at": now, "lost_at": None})
        # After an outage of the database no process has reported: the others get the time to do so.
        if self._done_at is None or now - self._done_at < LOST_AFTER / 2:
            report_lost(now)
        self._done_at = now
        report_late(measure(now, self.queues), now)
        if monotonic() - self._slow_at >= SLOW_SECONDS:
            self._slow_at = monotonic()
            measure_tables()
            for each in self.measures:
                each()
        meters.note_database(self.now())
        # Only for processes that missed the anchor at their start: a worker that started later has nothing to compare.
        late_comparison.run(now)

    def _loop(self) -> None:
        self._repeat(self.run_once, REPORT_SECONDS)

    def _finish(self) -> None:
        """Deregister; a process that cannot reach the database is reported as lost."""
        with log_failure(_log, "the process could not deregister"):
            ServiceProcess.objects.filter(name__in=list(self.runs.values())).delete()


process_watch = ProcessWatch()
forget_at_fork(process_watch)


def report_lost(now: datetime) -> None:
    """Raise one alarm for each process that no longer reports, and delete rows that are old."""
    ServiceProcess.objects.filter(lost_at__lt=now - _KEPT_FOR).delete()
    silent = ServiceProcess.objects.filter(seen_at__lt=now - LOST_AFTER, lost_at__isnull=True)
    for process in silent.order_by("seen_at")[:_MAX_LOST]:
        with suppress(StateConflictError):
            _report(process, silent.filter(pk=process.pk), now)


def _report(process: ServiceProcess, still_silent: QuerySet[ServiceProcess], now: datetime) -> None:
    grant, seen_at = authorize(WORKER, P.PROCESSES_WATCH, now=now), format_timestamp(process.seen_at)
    with recorded(grant, P.PROCESSES_WATCH, "process.lost", name=process.name, seen_at=seen_at):
        if still_silent.update(lost_at=now) != 1:
            raise StateConflictError("Another process reported it first, or it has returned.", internal=process.name)
        announce(grant, NoticeKind.PROCESS_LOST, None, process.name, kind=process.kind, seen_at=seen_at)
    _log.error("a process no longer reports", extra={"process_name": process.name, "seen_at": process.seen_at})


def report_late(due_since: Mapping[str, datetime], now: datetime) -> None:
    """Raise an alarm for each queue whose oldest work waits for too long, until an operator has seen it.

    No worker serves the queue, or too few do, or its workers run and get no message. `due_since`: as `measure` returns
    it.
    """
    for queue, since in due_since.items():
        if now - since <= LATE_AFTER:
            continue
        grant, at = authorize(WORKER, P.PROCESSES_WATCH, now=now), format_timestamp(since)
        with alarm_due(NoticeKind.QUEUE_LATE, queue, now) as is_due:
            if is_due:
                with recorded(grant, P.PROCESSES_WATCH, "queue.late", queue=queue, due_since=at):
                    announce(grant, NoticeKind.QUEUE_LATE, None, queue, due_since=at)
                _log.warning("due work waits for a worker", extra={"queue": queue, "due_since": since})


def measure(now: datetime, queues: Sequence[str]) -> dict[str, datetime]:
    """Set the meters of processes and queues. Return since when the oldest work in each of the queues is due."""
    seen = ServiceProcess.objects.values_list("kind").annotate(at=Max("seen_at"))
    for kind, at in seen.order_by("kind"):
        meters.note_process(kind, at)
    meters.note_lost(ServiceProcess.objects.filter(lost_at__isnull=False).count())
    due_since = {}
    for queue in queues:
        depth, since = measure_queue(queue, now)
        meters.note_queue(queue, depth, 0.0 if since is None else max(0.0, (now - since).total_seconds()))
        if since is not None:
            due_since[queue] = since
    meters.note_queue("issuance", IssuanceRequest.objects.filter(state=IssuanceState.APPROVED)[:_MAX_COUNTED].count())
    depth, age = 0, 0.0
    for is_urgent in (True, False):
        due = WebhookDelivery.objects.filter(state=DeliveryState.DUE, is_urgent__in=[is_urgent], due_at__lte=now)
        count = due[:_MAX_COUNTED].count()
        oldest = due.order_by("due_at").values_list("due_at", flat=True).first() if count else None
        depth += count
        age = age if oldest is None else max(age, (now - oldest).total_seconds())
    meters.note_queue("webhooks", min(depth, _MAX_COUNTED), age)
    meters.note_alarms(Notice.objects.filter(UNSEEN_NOTICE)[:_MAX_COUNTED].count())
    meters.note_clock(measure_difference().total_seconds())
    if settings.BROKER_URL.startswith("redis"):
        _measure_broker([queue.name for queue in settings.CELERY_TASK_QUEUES])
    return due_since


def _measure_host() -> None:
    """Set the meters of this host's disks and of its revocation log, which need no database."""
    with suppress(OSError):
        meters.note_disk(measure_free_bytes(), is_full=is_disk_full())
        meters.note_log(is_missing=not settings.REVOCATION_LOG.exists())


_TABLES = """
    SELECT relname, greatest(reltuples, 0), pg_total_relation_size(pg_class.oid)
    FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
    WHERE relkind = 'r' AND nspname = current_schema() AND relname = ANY(%s)
"""
"""The planner's estimates. Counting the rows of a table would read all of them."""


def measure_tables() -> None:
    """Set the meters of tables, on PostgreSQL. The cost depends on the number of tables, not on that of rows."""
    if connection.vendor != "postgresql":
        return
    with connection.cursor() as cursor:
        cursor.execute(_TABLES, [sorted(model._meta.db_table for model in apps.get_models())])
        for table, rows, size_bytes in cursor.fetchall():
            meters.note_table(table, rows, size_bytes)


def _measure_broker(names: Sequence[str]) -> None:
    """Record the lengths of the broker's queues. If the broker does not answer, keep the last values."""
    limits = {"socket_timeout": _BROKER_SECONDS, "socket_connect_timeout": _BROKER_SECONDS}
    try:
        with Redis.from_url(settings.BROKER_URL, **limits) as broker, broker.pipeline(transaction=False) as lengths:
            for name in names:
                lengths.llen(name)
            for name, length in zip(names, lengths.execute(), strict=True):
                meters.note_messages(name, length)
        meters.note_broker(is_down=False)
    except RedisError as error:
        meters.note_broker(is_down=True)
        _log.warning("the broker's queues could not be measured", extra={"why": str(error)})
