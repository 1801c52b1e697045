"""Propagation of a new pepper: it is used once every live process has loaded it, so no process refuses a valid key."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
from django.core.management import call_command

from keyvault.backends.base import BackendUnavailableError
from keyvault.backends.local import LocalKeystore
from keyvault.domain.digests import PepperSet
from keyvault.domain.errors import StateConflictError
from keyvault.models import AuditEntry, Key, PepperVersion, UsageReporter
from keyvault.services import maintenance
from keyvault.services.maintenance import renew_peppers
from keyvault.services.pepper_rotation.propagation import list_lagging
from keyvault.services.pepper_rotation.status import describe_version
from keyvault.services.peppers import ring
from keyvault.services.peppers.ring import PepperRing, load_peppers
from keyvault.services.usage.recorder import UsageLog
from keyvault.services.verification import judging
from tests.factories import have_peppers, issue, now
from tests.services.conftest import Scene, make_scene
from tests.services.keys.test_lifecycle import verdict
from tests.services.peppering import isolated_peppers, rehash, retire, rotate
from tests.services.racing import race
from tests.services.rows import disable_triggers

pytestmark = pytest.mark.django_db

SANDBOX, PRODUCTION = PepperSet.SANDBOX, PepperSet.PRODUCTION


@pytest.fixture(autouse=True)
def isolated_keystore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with isolated_peppers(tmp_path, monkeypatch):
        yield


@pytest.fixture
def scene(isolated_keystore: None, db: None) -> Scene:
    return make_scene()


def reporter(name: str, **columns: object) -> UsageReporter:
    row = {"started_at": now(), "flushed_through_at": now(), **columns}
    return UsageReporter.objects.update_or_create(reporter_id=name, defaults=row)[0]


def hashing_version() -> int:
    load_peppers.refresh()
    return load_peppers(SANDBOX).current_version


@pytest.mark.database
def test_process_without_the_backend_delays_the_new_pepper_and_refuses_no_key(scene: Scene) -> None:
    """Of two processes, one cannot reach the secret backend.

    No key is hashed with a pepper that this process has not loaded, so both processes verify every valid key.
    """
    keys = [issue(scene.sandbox, label=str(number)) for number in range(3)]
    unreachable = PepperRing()
    unreachable(SANDBOX)
    reporter("unreachable", peppers=unreachable.newest_versions())
    rotate()

    def verdict_of_the_other(text: object) -> object:
        with (
            mock.patch.object(judging, "load_peppers", unreachable),
            mock.patch.object(ring, "load_peppers", unreachable),
        ):
            return verdict(text)  # type: ignore[arg-type]  # a Plaintext

    with mock.patch.object(LocalKeystore, "read", side_effect=BackendUnavailableError("It is sealed.")):
        for _ in range(3):
            unreachable.refresh()
            reporter("unreachable", peppers=unreachable.newest_versions())
            renew_peppers()
            assert hashing_version() == 1
            assert [verdict(text) for _, text in keys] == [None] * 3
            rehash()
            assert [verdict_of_the_other(text) for _, text in keys] == [None] * 3
    row = PepperVersion.objects.get(pepper_set=SANDBOX, number=2)
    assert describe_version(row).lagging == ["unreachable"]
    with pytest.raises(StateConflictError, match="Not loaded yet by: unreachable"):
        rotate()
    with pytest.raises(StateConflictError, match="Not loaded yet by: unreachable"):
        retire(SANDBOX, 1)
    unreachable.refresh()
    reporter("unreachable", peppers=unreachable.newest_versions())
    renew_peppers()
    assert hashing_version() == 2
    assert [verdict(text) for _, text in keys] == [None] * 3
    rehash()
    assert set(Key.objects.values_list("pepper_version", flat=True)) == {2}
    assert [verdict_of_the_other(text) for _, text in keys] == [None] * 3


def test_show_peppers_names_lagging_processes(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    reporter("slow-web-1", peppers={"sandbox": 1})
    rotate()
    call_command("show_peppers")
    assert "not loaded by: slow-web-1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("columns", "waits"),
    [
        ({"peppers": {"sandbox": 1, "service": 1}}, True),
        ({"peppers": {"sandbox": 0}}, True),
        ({"peppers": {"sandbox": 2}}, False),
        ({"peppers": {"production": 1, "service": 1}}, False),
        ({"peppers": {"sandbox": 1}, "stopped_at": now()}, False),
        ({"peppers": {"sandbox": 1}, "lost_at": now()}, False),
    ],
    ids=["behind", "not loaded", "loaded", "other environment", "stopped", "lost"],
)
def test_new_pepper_waits_for_live_processes_of_its_environment(
    scene: Scene, columns: dict[str, object], waits: bool
) -> None:
    reporter("other", **columns)
    rotate()
    assert (hashing_version() == 1) is waits


def test_reporter_reports_its_loaded_peppers_with_each_watermark(scene: Scene) -> None:
    load_peppers.cache_clear()
    load_peppers(SANDBOX)
    log = UsageLog()
    log.sink.register(log.reporter_id, now(), 0)
    assert UsageReporter.objects.get().peppers == {"sandbox": 1, "production": 0, "service": 0}
    load_peppers(PRODUCTION)
    row = rotate()
    assert list_lagging(row) == [log.reporter_id]
    log.flush()
    assert UsageReporter.objects.get().peppers == {"sandbox": 2, "production": 1, "service": 0}
    assert list_lagging(row) == []


def test_process_learns_from_the_database_that_a_pepper_is_in_use(scene: Scene) -> None:
    """The version is loaded already, so a poll of the database is enough."""
    reporter("other", peppers={"sandbox": 1})
    rotate()
    idle = PepperRing()
    assert idle(SANDBOX).current_version == 1
    reporter("other", peppers={"sandbox": 2})
    renew_peppers()
    assert idle(SANDBOX).current_version == 1
    with mock.patch.object(idle, "schedule_refresh", idle.refresh):
        idle.poll()
    assert idle(SANDBOX).current_version == 2


@pytest.mark.database
@pytest.mark.django_db(transaction=True)
def test_pepper_taken_into_use_by_concurrent_workers_is_recorded_once(isolated_keystore: None) -> None:
    have_peppers()
    reporter("other", peppers={"sandbox": 1})
    rotate()
    reporter("other", peppers={"sandbox": 2})
    with mock.patch.object(maintenance, "load_peppers"):
        assert race(*[renew_peppers] * 4) == [None] * 4
    row = PepperVersion.objects.get(pepper_set=SANDBOX, number=2)
    assert row.hashes_from_at is not None
    assert row.hashes_from_at >= row.created_at - timedelta(seconds=1)
    assert AuditEntry.objects.filter(event="pepper.in_use").count() == 1
    disable_triggers()
    PepperVersion.objects.all()._raw_delete("default")
