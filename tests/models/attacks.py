"""What somebody with the database's password can try: SQL past the models and past the services."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import IntegrityError, connection, transaction

from keyvault.models.triggers import list_guards

Row = dict[str, Any]

MESSAGES = {guard.name: guard.message for guard in list_guards()}


def execute(sql: str, *values: Any) -> int:
    """One statement, as it stands."""
    with connection.cursor() as cursor:
        cursor.execute(sql, values)
        return int(cursor.rowcount)


def read_row(table: str, **where: Any) -> Row:
    """The one row, column by column, or the first of several."""
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT * FROM {table} {_where(where)} ORDER BY 1", list(where.values()))  # noqa: S608  our own
        found = cursor.fetchone()
        assert found is not None, f"no such row in {table}"
        return dict(zip([column[0] for column in cursor.description], found, strict=True))


def insert(table: str, row: Row, *, verb: str = "INSERT", tail: str = "") -> None:
    marks = ", ".join(["%s"] * len(row))
    execute(f"{verb} INTO {table} ({', '.join(row)}) VALUES ({marks}) {tail}", *row.values())


def insert_copy(table: str, changes: Row, *, verb: str = "INSERT", tail: str = "", **where: Any) -> None:
    """The row again, with changes; None for `id` lets the database choose a new one."""
    row = read_row(table, **where) | changes
    if row.get("id", "") is None:
        del row["id"]
    insert(table, row, verb=verb, tail=tail)


def update(table: str, changes: Row, *, or_replace: bool = False, **where: Any) -> None:
    """`or_replace`: SQLite deletes whatever row stands in the way; PostgreSQL knows no such thing."""
    assignments = ", ".join(f"{column} = %s" for column in changes)
    verb = "UPDATE OR REPLACE" if or_replace and connection.vendor == "sqlite" else "UPDATE"
    sql = f"{verb} {table} SET {assignments} {_where(where)}"
    assert execute(sql, *changes.values(), *where.values()), "the attack met no row"


def delete(table: str, **where: Any) -> None:
    assert execute(f"DELETE FROM {table} {_where(where)}", *where.values()), "the attack met no row"  # noqa: S608  our own


@contextmanager
def refused(because: str) -> Iterator[None]:
    """The database refuses what is tried inside, for that reason, and the transaction around goes on."""
    with pytest.raises(IntegrityError, match=re.escape(because)), transaction.atomic():
        yield


def expect_refusal(name: str, attack: Callable[[], object]) -> None:
    """The rule of that name refuses the attack; with that one rule gone, nothing else gives its reason."""
    with refused(MESSAGES[name]):
        attack()
    with undone():
        _drop(name)
        told = ""
        try:
            with transaction.atomic():
                attack()
        except IntegrityError as other:
            told = str(other)
        assert MESSAGES[name] not in told, "another rule says the same, so this one proves nothing"


@contextmanager
def undone() -> Iterator[None]:
    """Whatever happens inside is rolled back."""
    with transaction.atomic():
        settle_foreign_keys()
        yield
        transaction.set_rollback(True)


def settle_foreign_keys() -> None:
    """PostgreSQL changes or empties no table while foreign keys wait for the end of the transaction."""
    if connection.vendor == "postgresql":
        execute("SET CONSTRAINTS ALL IMMEDIATE")


def defer_foreign_keys() -> None:
    if connection.vendor == "postgresql":
        execute("SET CONSTRAINTS ALL DEFERRED")


def _drop(name: str) -> None:
    guard = next(guard for guard in list_guards() if guard.name == name)
    execute(f"DROP TRIGGER kv_{name}" + (f" ON {guard.table}" if connection.vendor == "postgresql" else ""))


def _where(where: Row) -> str:
    return "WHERE " + " AND ".join(f"{column} = %s" for column in where) if where else ""
