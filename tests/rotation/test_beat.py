"""Beat: its entries name tasks and queues that exist; two beats start each rotation once."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.conf import settings

from keyvault.domain.environments import Environment
from keyvault.project.celery import SettingsScheduler, app
from keyvault.services.usage.recorder import UsageLog
from rotation.domain.states import CLOSED
from rotation.models import Rotation
from rotation.services.rotations import engine
from rotation.services.rotations.turns import Turn
from rotation.tasks import count_messages, send_turn
from tests.clocks import Clock
from tests.rotation.services.schedules.test_schedules import save
from tests.rotation.steps import begun

from . import scene

pytestmark = [pytest.mark.database, pytest.mark.django_db(transaction=True)]

ENTRIES: dict[str, dict[str, Any]] = app.conf.beat_schedule


@pytest.fixture
def eager() -> Iterator[None]:
    """Execute messages immediately; a task's exception reaches the sender.

    Beat only executes registered tasks; a worker's start registers them, and here this line does.
    """
    app.loader.import_default_modules()
    app.conf.update(task_always_eager=True, task_eager_propagates=True)
    yield
    app.conf.update(task_always_eager=False, task_eager_propagates=False)


def tick_all(*beats: SettingsScheduler) -> list[str]:
    """Run each entry of each beat once; return the tasks that were sent."""
    sent = []
    for beat in beats:
        for entry in beat.schedule.values():
            entry.last_run_at = datetime.now(UTC) - timedelta(hours=1)
        for _ in ENTRIES:
            beat.tick()
        sent += [str(entry.task) for entry in beat.schedule.values() if entry.total_run_count]
    return sent


def test_beat_has_exactly_the_entries_of_the_settings() -> None:
    assert set(SettingsScheduler(app=app).schedule) == set(ENTRIES)
    assert app.conf.beat_scheduler == "keyvault.project.celery:SettingsScheduler"


def test_beat_sleeps_until_an_entry_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """It neither looks at the entries again and again before, nor sends one later."""
    clock, sent = Clock(datetime(2026, 1, 1, tzinfo=UTC)), []
    monkeypatch.setattr(app, "now", clock)
    monkeypatch.setattr(SettingsScheduler, "apply_entry", lambda _, entry, producer: sent.append((entry.name, clock())))
    beat = SettingsScheduler(app=app)
    begun_at = clock()
    while clock() - begun_at < timedelta(seconds=60):
        count = len(sent)
        interval = beat.tick()
        if len(sent) == count:
            assert interval > 0
            clock.tick(interval)
    for name, entry in ENTRIES.items():
        times = [at - begun_at for each, at in sent if each == name]
        assert times == [timedelta(seconds=n * entry["schedule"]) for n in range(1, len(times) + 1)]
        assert len(times) >= 60 // entry["schedule"] - 1


def test_messages_that_wait_in_the_broker_are_counted() -> None:
    """Guarantee: the tick knows the length of a queue with every transport, so that it can bound it."""
    app.loader.import_default_modules()
    before = count_messages("sandbox", is_urgent=False), count_messages("sandbox", is_urgent=True)
    try:
        for is_urgent in (True, False, False):
            send_turn(Turn("rot_unknown", "sandbox", is_urgent))
        after = count_messages("sandbox", is_urgent=False), count_messages("sandbox", is_urgent=True)
    finally:
        with app.connection_or_acquire() as broker:
            for queue in ("rotations.sandbox", "emergencies.sandbox"):
                broker.default_channel.queue_purge(queue)
    assert after == (before[0] + 2, before[1] + 1)


def test_entries_name_existing_tasks_and_queues() -> None:
    app.loader.import_default_modules()
    assert {entry["task"] for entry in ENTRIES.values()} <= set(app.tasks)
    queues = {queue.name for queue in settings.CELERY_TASK_QUEUES}
    assert {entry["options"]["queue"] for entry in ENTRIES.values()} <= queues


def test_entries_of_the_file_broker_cover_every_environment() -> None:
    """Its only worker serves all environments: a message either names one of them, or none and means all."""
    found: dict[str, set[tuple[str, ...]]] = {}
    for entry in ENTRIES.values():
        found.setdefault(entry["task"], set()).add(entry["args"])
    assert set(map(frozenset, found.values())) == {
        frozenset({()}),
        frozenset((environment,) for environment in settings.ENVIRONMENTS),
    }
    assert found["rotation.tasks.dispatch_due"] == {()}


def test_each_environment_has_its_own_queues() -> None:
    assert {queue.name.partition(".")[2] for queue in settings.CELERY_TASK_QUEUES} == set(settings.ENVIRONMENTS)
    assert app.conf.task_default_queue in {queue.name for queue in settings.CELERY_TASK_QUEUES}


def test_tick_without_an_environment_advances_the_rotations_of_all(eager: None, verifier: UsageLog) -> None:
    rotation = begun(Clock(datetime.now(UTC)))
    entry = next(entry for entry in ENTRIES.values() if entry["task"] == "rotation.tasks.dispatch_due")
    app.tasks[entry["task"]](*entry["args"])
    before = rotation.state
    rotation.refresh_from_db()
    assert rotation.state != before


def test_messages_expire_by_no_clock() -> None:
    """Guarantee: a host whose clock is wrong drops no message of another."""
    app.loader.import_default_modules()
    assert [name for name, task in app.tasks.items() if task.expires is not None] == []
    assert [name for name, entry in ENTRIES.items() if "expires" in entry.get("options", {})] == []


def test_two_beats_start_each_rotation_once(eager: None) -> None:
    """Both send every tick; the rows, not the messages, define the work."""
    now = datetime.now(UTC)
    place = scene.account(environment=Environment.PRODUCTION)
    for number in range(3):
        scene.issue(place, now - timedelta(days=91), label=f"n{number}")
    save(Environment.PRODUCTION, now)
    sent = tick_all(SettingsScheduler(app=app), SettingsScheduler(app=app))
    assert sent.count("rotation.tasks.begin_scheduled") == 2 * len(settings.ENVIRONMENTS)
    assert Rotation.objects.count() == 3
    assert Rotation.objects.exclude(state__in=CLOSED).values("credential").distinct().count() == 3


def test_two_beats_advance_each_rotation_once(eager: None, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch) -> None:
    rotations = {begun(Clock(datetime.now(UTC))).rotation_id for _ in range(3)}
    taken: list[str] = []
    advance = engine._advance_to_wait

    def noted(rotation_id: str, *rest: Any) -> Any:
        taken.append(rotation_id)
        return advance(rotation_id, *rest)

    monkeypatch.setattr(engine, "_advance_to_wait", noted)
    monkeypatch.setattr(engine, "POLL_SECONDS", (3_600.0, 3_600.0))  # a later turn is none of a repeated message
    tick_all(SettingsScheduler(app=app), SettingsScheduler(app=app))
    assert sorted(taken) == sorted(rotations)
