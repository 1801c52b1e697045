"""Beat's scheduler: the settings' entries, kept as rows of django-celery-beat so that they survive a restart.

Two running beats tick twice. This is harmless: a tick only makes a worker check for work.
"""

import logging
from datetime import timedelta
from typing import Any

from django.core.exceptions import ValidationError
from django.db import DatabaseError, IntegrityError, transaction
from django_celery_beat.models import (
    IntervalSchedule,
    PeriodicTask,
)
from django_celery_beat.schedulers import DatabaseScheduler

from keyvault.services.startup.startup_checks import start_or_exit

_log = logging.getLogger(__name__)


class Scheduler(DatabaseScheduler):  # type: ignore[misc]  # the package has no type information
    """Keep the rows equal to the settings: delete other rows, and correct these whenever the rows are read."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Exit with one line where the process must not run.

        Celery creates the scheduler first, and prints what that raises with a traceback.
        """
        start_or_exit("beat", needs_peppers=False)
        super().__init__(*args, **options)

    def setup_schedule(self) -> None:
        """Raises DatabaseError: beat exits, and its supervisor restarts it."""
        _ = self.schedule

    def all_as_schedule(self) -> dict[str, Any]:
        try:
            self._sync_rows()
            return dict(super().all_as_schedule())
        except DatabaseError:
            if self._schedule is None:
                raise
            _log.exception("the schedule cannot be read; beat continues with its current entries")
            return dict(self._schedule)

    def _sync_rows(self) -> None:
        entries: dict[str, dict[str, Any]] = self.app.conf.beat_schedule
        try:
            with transaction.atomic():
                for row in PeriodicTask.objects.exclude(name__in=entries):
                    row.delete()
                rows = {row.name: row for row in PeriodicTask.objects.select_related("interval")}
                for name, entry in entries.items():
                    _write(rows.get(name) or PeriodicTask(name=name), **entry)
        except (IntegrityError, ValidationError):
            _log.info("another beat has corrected the entries at the same time")


def _write(row: Any, task: str, schedule: float) -> None:
    """Write an entry of the settings as a row, unless the row is equal already."""
    every = None if row.interval is None else row.interval.schedule.run_every
    wanted = {field.name: field.get_default() for field in PeriodicTask._meta.fields if field.name in _DEFAULTED_FIELDS}
    wanted |= {
        "task": task,
        "interval": row.interval if every == timedelta(seconds=schedule) else _find_interval(schedule),
    }
    if row.pk is not None and all(getattr(row, name) == value for name, value in wanted.items()):
        return
    for name, value in wanted.items():
        setattr(row, name, value)
    row.save()


_DEFAULTED_FIELDS = frozenset(
    {"crontab", "solar", "clocked", "args", "kwargs", "queue", "exchange", "routing_key", "headers", "priority"}
    | {"expires", "expire_seconds", "one_off", "start_time", "enabled", "description"}
)
"""Fields that no entry of the settings sets."""


def _find_interval(seconds: float) -> Any:
    found = IntervalSchedule.objects.filter(every=seconds, period=IntervalSchedule.SECONDS).first()
    return found or IntervalSchedule.objects.create(every=seconds, period=IntervalSchedule.SECONDS)
