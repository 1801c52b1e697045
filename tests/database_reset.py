"""The test database as `migrate` left it, restored after each transactional test.

Django's own flush truncates every table and creates permissions again, which takes longer than most tests. This deletes
the rows of the tables that have some, and keeps what the migrations inserted.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from keyvault.models.triggers import ensure_triggers, expected_triggers, list_triggers

Rows = list[tuple[Any, ...]]


class MigratedDatabase:
    """The tables of a freshly migrated database, and the rows that the migrations inserted."""

    def __init__(self, connection: BaseDatabaseWrapper) -> None:
        self._tables = sorted(connection.introspection.django_table_names(only_existing=True, include_views=False))
        with connection.cursor() as cursor:
            self._rows = {table: _rows(cursor, table) for table in self._filled(cursor)}
        self._triggers = expected_triggers(connection.vendor)

    def restore(self, connection: BaseDatabaseWrapper) -> None:
        """Delete what a test added, and put back what it changed. On PostgreSQL, needs a superuser."""
        with _without_rules(connection) as cursor:
            filled = self._filled(cursor)
            changed = [
                table for table in filled if table not in self._rows or _rows(cursor, table) != self._rows[table]
            ]
            changed += self._rows.keys() - set(filled)
            with _without_triggers_of(connection, cursor, changed):
                for table in changed:
                    cursor.execute(f'DELETE FROM "{table}"')  # noqa: S608  a table of ours
                    for row in self._rows.get(table, []):
                        places = ", ".join(["%s"] * len(row))
                        cursor.execute(f'INSERT INTO "{table}" VALUES ({places})', row)  # noqa: S608  the same
        if not self._triggers <= list_triggers(connection):
            ensure_triggers(connection)

    def _filled(self, cursor: CursorWrapper) -> list[str]:
        exists = (f"SELECT '{table}' WHERE EXISTS (SELECT 1 FROM \"{table}\")" for table in self._tables)  # noqa: S608  tables of ours
        cursor.execute(" UNION ALL ".join(exists))
        return [table for (table,) in cursor.fetchall()]


def _rows(cursor: CursorWrapper, table: str) -> Rows:
    cursor.execute(f'SELECT * FROM "{table}" ORDER BY 1')  # noqa: S608  a table of ours
    rows: Rows = cursor.fetchall()
    return rows


@contextmanager
def _without_rules(connection: BaseDatabaseWrapper) -> Iterator[CursorWrapper]:
    """Yield a cursor in a transaction without foreign keys and, on PostgreSQL, without triggers."""
    if connection.vendor == "sqlite":
        with connection.constraint_checks_disabled(), transaction.atomic(), connection.cursor() as cursor:
            yield cursor
    else:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SET LOCAL session_replication_role = replica")
            yield cursor


@contextmanager
def _without_triggers_of(connection: BaseDatabaseWrapper, cursor: CursorWrapper, tables: list[str]) -> Iterator[None]:
    """On SQLite, drop the triggers of these tables for the block."""
    if connection.vendor != "sqlite":
        yield
        return
    places = ", ".join(["%s"] * len(tables))
    cursor.execute(f"SELECT name, sql FROM sqlite_master WHERE type = 'trigger' AND tbl_name IN ({places})", tables)  # noqa: S608  places only
    triggers = cursor.fetchall()
    for name, _ in triggers:
        cursor.execute(f'DROP TRIGGER "{name}"')
    yield
    for _, statement in triggers:
        cursor.execute(statement)
