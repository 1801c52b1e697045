"""Beat: its entries equal the settings whatever its rows contain; two beats start each rotation once."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest import mock

import pytest
from celery.beat import Scheduler as PlainScheduler
from django.contrib import admin
from django.core.management import call_command
from django.db import OperationalError, connection
from django.test.utils import CaptureQueriesContext
from django_celery_beat.models import (
    CrontabSchedule,
    IntervalSchedule,
    PeriodicTask,
    PeriodicTasks,
)

from keyvault.domain.environments import Environment
from keyvault.project.beat import Scheduler
from keyvault.project.celery import app
from rotation.domain.states import CLOSED
from rotation.models import Rotation
from tests.rotation.services.schedules.test_schedules import save

from . import scene

pytestmark = [pytest.mark.database, pytest.mark.django_db(transaction=True)]

ENTRIES: dict[str, dict[str, Any]] = app.conf.beat_schedule


@pytest.fixture
def beats() -> Iterator[list[Scheduler]]:
    """Collect schedulers that skip the startup checks and stop writing to the database after the test."""
    made: list[Scheduler] = []
    with mock.patch("keyvault.project.beat.start_or_exit"):
        yield made
    for scheduler in made:
        scheduler._finalize.cancel()


@pytest.fixture
def eager() -> Iterator[None]:
    """Execute messages immediately; a task's exception reaches the sender.

    Beat only executes registered tasks; a worker's start registers them, and here this line does.
    """
    app.loader.import_default_modules()
    app.conf.update(task_always_eager=True, task_eager_propagates=True)
    yield
    app.conf.update(task_always_eager=False, task_eager_propagates=False)


def start(beats: list[Scheduler]) -> Scheduler:
    """Start a scheduler and let it read the rows twice: from then on it notices changes."""
    beats.append(Scheduler(app=app))
    _ = beats[-1].schedule
    return beats[-1]


def stored() -> dict[str, tuple[str, float, bool]]:
    rows = PeriodicTask.objects.select_related("interval")
    return {row.name: (row.task, row.schedule.run_every.total_seconds(), row.enabled) for row in rows}


def wanted() -> dict[str, tuple[str, float, bool]]:
    return {name: (entry["task"], entry["schedule"], True) for name, entry in ENTRIES.items()}


def test_beat_has_exactly_the_entries_of_the_settings(beats: list[Scheduler]) -> None:
    scheduler = start(beats)
    assert stored() == wanted()
    assert set(scheduler.schedule) == set(ENTRIES)
    assert app.conf.beat_scheduler == "keyvault.project.beat:Scheduler"


def test_beat_entries_name_existing_tasks_without_arguments() -> None:
    app.loader.import_default_modules()
    assert {entry["task"] for entry in ENTRIES.values()} <= set(app.tasks)
    assert {name for entry in ENTRIES.values() for name in entry} == {"task", "schedule"}


def test_beat_restarted_drops_entries_missing_from_the_settings(beats: list[Scheduler]) -> None:
    """A renamed entry does not tick under both names, and a foreign row does not tick."""
    start(beats)
    every = IntervalSchedule.objects.first()
    PeriodicTask.objects.create(name="old-name", task="rotation.tasks.advance_due", interval=every)
    PeriodicTask.objects.create(name="theirs", task="os.system", interval=every)
    assert set(start(beats).schedule) == set(ENTRIES)
    assert stored() == wanted()


HARM: list[dict[str, Any]] = [
    {"enabled": False},
    {"task": "nothing"},
    {"args": "[1]"},
    {"kwargs": "broken"},
    {"one_off": True},
    {"expires": datetime(2020, 1, 1, tzinfo=UTC)},
    {"start_time": datetime(2099, 1, 1, tzinfo=UTC)},
    {"queue": "nowhere"},
    {"headers": "{}}"},
    {"expire_seconds": 0},
]


def test_beat_corrects_a_changed_row(beats: list[Scheduler]) -> None:
    """Rotations cannot be stopped by editing a row of the scheduler."""
    scheduler = start(beats)
    name = "begin-scheduled-rotations"
    row = PeriodicTask.objects.filter(name=name)
    for harm in [*HARM, {"interval": None, "crontab": CrontabSchedule.objects.create()}]:
        row.update(**harm)
        PeriodicTasks.update_changed()
        assert scheduler.schedule[name].task == ENTRIES[name]["task"], harm
        assert stored() == wanted(), harm
        (now,) = row.values(*harm)
        assert all(now[column] != value for column, value in harm.items()), harm


def test_beat_restarted_continues_its_schedule(beats: list[Scheduler]) -> None:
    start(beats)
    ran_at = datetime.now(UTC) - timedelta(hours=3)
    PeriodicTask.objects.filter(name="run-maintenance").update(last_run_at=ran_at, total_run_count=7)
    assert start(beats).schedule["run-maintenance"].last_run_at == ran_at
    assert PeriodicTask.objects.get(name="run-maintenance").total_run_count == 7


def test_beat_ticks_write_nothing(beats: list[Scheduler]) -> None:
    """SQLite has one writer, and beat does not occupy it every second."""
    scheduler = start(beats)
    sent: list[str] = []
    _make_due()
    with (
        mock.patch.object(Scheduler, "apply_async", lambda self, entry, **options: sent.append(entry.task)),
        CaptureQueriesContext(connection) as queries,
    ):
        scheduler = start(beats)
        queries_before = len(queries)
        for _ in range(3 * len(ENTRIES)):
            scheduler.tick()
    assert set(sent) == {entry["task"] for entry in ENTRIES.values()}
    ticks = [query["sql"] for query in queries.captured_queries[queries_before:]]
    assert ticks
    assert [sql for sql in ticks if not sql.startswith(("SELECT", "COMMIT"))] == []


def test_beat_without_the_database_continues_with_its_entries(
    beats: list[Scheduler], caplog: pytest.LogCaptureFixture
) -> None:
    """A database restart does not end beat."""
    scheduler = start(beats)
    PeriodicTasks.update_changed()
    with mock.patch.object(PeriodicTask.objects, "exclude", side_effect=OperationalError("it restarts")):
        assert set(scheduler.schedule) == set(ENTRIES)
        assert "continues with its current entries" in caplog.text
        with pytest.raises(OperationalError):
            start(beats)


def test_two_beats_start_each_rotation_once(
    beats: list[Scheduler], monkeypatch: pytest.MonkeyPatch, eager: None
) -> None:
    """Both send every tick; the rows, not the messages, define the work."""
    now = datetime.now(UTC)
    place = scene.account(environment=Environment.PRODUCTION)
    for number in range(3):
        scene.issue(place, now - timedelta(days=91), label=f"n{number}")
    save(Environment.PRODUCTION, now)
    start(beats)
    _make_due()
    both = [start(beats), start(beats)]
    ran: list[str] = []
    applied = Scheduler.apply_async

    def counting(self: Scheduler, entry: Any, **options: Any) -> Any:
        ran.append(entry.task)
        return applied(self, entry, **options)

    monkeypatch.setattr(Scheduler, "apply_async", counting)
    for _ in range(2 * len(ENTRIES)):
        for scheduler in both:
            scheduler.tick()
    assert ran.count("rotation.tasks.begin_scheduled") == 2
    assert Rotation.objects.count() == 3
    assert Rotation.objects.exclude(state__in=CLOSED).values("credential").distinct().count() == 3


def test_two_beats_starting_together_share_one_set_of_entries(beats: list[Scheduler]) -> None:
    """The second one finds that the first was faster, and reads its entries."""
    start(beats)
    stale = PeriodicTask.objects.none()
    real = PeriodicTask.objects.select_related
    with mock.patch.object(PeriodicTask.objects, "select_related", side_effect=[stale, real("interval")]):
        second = start(beats)
    assert set(second.schedule) == set(ENTRIES)
    assert stored() == wanted()


def test_beat_rows_have_no_page_in_the_console() -> None:
    """The schedule is code, without a form to change it."""
    registered = {model._meta.app_label for model in admin.site._registry}
    assert "django_celery_beat" not in registered


def test_beat_tables_are_created_by_migrate_without_warnings() -> None:
    call_command("check", fail_level="WARNING")
    call_command("makemigrations", "django_celery_beat", check=True, dry_run=True, interactive=False, verbosity=0)
    assert issubclass(Scheduler, PlainScheduler)


def _make_due() -> None:
    PeriodicTask.objects.update(last_run_at=datetime.now(UTC) - timedelta(hours=1))
