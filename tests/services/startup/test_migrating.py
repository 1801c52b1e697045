"""`setup` migrates while other transactions use the tables, and gives way to them."""

import os
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from django.db import connection

from keyvault.domain.errors import DependencyUnavailableError
from keyvault.models.triggers import drop_triggers, ensure_triggers, expected_triggers, list_triggers
from keyvault.services.startup import migrating

pytestmark = [pytest.mark.postgres, pytest.mark.django_db(transaction=True)]

CHANGE = "ALTER TABLE keyvault_order ALTER COLUMN currency SET STATISTICS 50"
"""Needs a lock that a writer of the table refuses."""


@pytest.fixture
def other() -> Iterator["psycopg.Connection[Any]"]:
    """Another process's connection."""
    with psycopg.connect(os.environ["KEYVAULT_DATABASE_URL"]) as opened:
        yield opened


class Pauses:
    """Replaces `time.sleep`: counts the pauses, and ends the other transaction in one of them."""

    def __init__(self, other: "psycopg.Connection[Any]", ends_in: int) -> None:
        self.count, self._other, self._ends_in = 0, other, ends_in

    def __call__(self, seconds: float) -> None:
        self.count += 1
        if self.count == self._ends_in:
            self._other.execute("SELECT pg_advisory_unlock_all()")
            self._other.rollback()


@pytest.fixture(autouse=True)
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The attempts of a migration that changes one table."""
    made: list[str] = []

    def apply() -> None:
        made.append(CHANGE)
        with connection.cursor() as cursor:
            cursor.execute(CHANGE)

    monkeypatch.setattr(migrating, "_migrate", apply)
    monkeypatch.setattr(migrating, "LOCK_SECONDS", 0.1)
    return made


def setting(name: str) -> str:
    with connection.cursor() as cursor:
        cursor.execute(f"SHOW {name}")
        return str(cursor.fetchone()[0])


def test_migration_gives_way_to_a_transaction_and_is_repeated(
    other: "psycopg.Connection[Any]", attempts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: no query waits longer than the lock time-out behind a migration."""
    other.execute("LOCK TABLE keyvault_order IN SHARE UPDATE EXCLUSIVE MODE")
    monkeypatch.setattr("time.sleep", Pauses(other, ends_in=2))
    migrating.migrate()
    assert len(attempts) == 3
    assert setting("lock_timeout") == "0"


def test_migration_that_never_gets_its_lock_is_refused_with_what_to_do(
    other: "psycopg.Connection[Any]", attempts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other.execute("LOCK TABLE keyvault_order IN SHARE UPDATE EXCLUSIVE MODE")
    monkeypatch.setattr("time.sleep", Pauses(other, ends_in=0))
    monkeypatch.setattr(migrating, "ATTEMPTS", 3)
    with pytest.raises(DependencyUnavailableError, match="pg_stat_activity"):
        migrating.migrate()
    assert len(attempts) == 3


def test_migration_waits_for_another_process_that_migrates(
    other: "psycopg.Connection[Any]", attempts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: two hosts may run `setup` at the same time."""
    other.execute("SELECT pg_advisory_lock(%s, %s)", migrating._MIGRATOR)
    pauses = Pauses(other, ends_in=2)
    monkeypatch.setattr("time.sleep", pauses)
    migrating.migrate()
    assert (pauses.count, len(attempts)) == (2, 1)
    assert other.execute("SELECT pg_try_advisory_lock(%s, %s)", migrating._MIGRATOR).fetchone() == (True,)


def test_triggers_that_are_as_they_should_be_lock_no_table(other: "psycopg.Connection[Any]") -> None:
    """Guarantee: a migration of other tables does not block the writers of all tables that have triggers."""
    other.execute("LOCK TABLE keyvault_key, keyvault_auditentry IN ROW EXCLUSIVE MODE")
    with connection.cursor() as cursor:
        cursor.execute("SET lock_timeout = '100ms'")
        try:
            ensure_triggers(connection)
        finally:
            cursor.execute("SET lock_timeout = DEFAULT")


@pytest.mark.parametrize(
    "damage",
    [
        "DROP TRIGGER kv_key_no_revival ON keyvault_key",
        "ALTER TABLE keyvault_key DISABLE TRIGGER kv_key_no_revival",
        "CREATE OR REPLACE TRIGGER kv_key_no_revival BEFORE INSERT ON keyvault_key EXECUTE FUNCTION kv_key_stays()",
        "CREATE TRIGGER kv_left_over BEFORE INSERT ON keyvault_key FOR EACH ROW EXECUTE FUNCTION kv_key_no_revival()",
    ],
    ids=["missing", "disabled", "another event", "of an older release"],
)
def test_triggers_that_differ_are_restored(damage: str) -> None:
    before = definitions()
    with connection.cursor() as cursor:
        cursor.execute(damage)
    ensure_triggers(connection)
    assert definitions() == before


def test_triggers_on_a_database_without_any_are_all_created() -> None:
    drop_triggers(connection)
    ensure_triggers(connection)
    assert list_triggers(connection) == expected_triggers("postgresql")


def definitions() -> list[Any]:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT tgname, tgenabled, pg_get_triggerdef(oid) FROM pg_trigger WHERE tgname LIKE 'kv_%' ORDER BY 1"
        )
        return list(cursor.fetchall())
