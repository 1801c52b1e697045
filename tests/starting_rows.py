"""Rows that many tests start with: services write them for the first test of a process, later tests insert copies.

The copies include what the services wrote to the keystore and to the revocation log.

A test then starts with a few statements instead of the two hundred that its operators, merchants, peppers and first key
take.
"""

import copy
import sqlite3
from collections.abc import Callable, Hashable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, TypeVar

from django.apps import apps
from django.conf import settings
from django.db import connection, transaction

from keyvault.backends.base import Mount
from keyvault.backends.local import LocalKeystore
from keyvault.models import AuditEntry
from keyvault.services.secrets.backend import MOUNT, secret_backend

T = TypeVar("T")

Rows = list[tuple[Any, ...]]


@dataclass(frozen=True)
class _Made:
    """What a function returned, the rows that it wrote, by table, the records that it stored, and its revocation log.

    The log is None if the function appended nothing to it.
    """

    result: Any
    rows: dict[str, Rows]
    secrets: Rows
    log: bytes | None


_made: dict[tuple[Callable[..., Any], tuple[Hashable, ...]], _Made] = {}

_making: list[Callable[..., Any]] = []
"""The function whose rows are being recorded. What it starts with in turn is a part of them."""


def start_with(make: Callable[..., T], *arguments: Hashable) -> T:
    """Return what `make(*arguments)` returns, with its rows in the database.

    The copies are as old as the first call. `make` runs anew in a database that is not as `migrate` left it (every
    service writes an audit entry), and with settings or a backend of the test's own. A thread that writes rows starts
    after the first call, which compares all rows before and after `make`.
    """
    is_own = _settings() != _shared_settings or type(secret_backend()) is not LocalKeystore
    if is_own or _making or AuditEntry.objects.exists():
        return make(*arguments)
    if (known := _made.get((make, arguments))) is not None:
        _insert(known.rows)
        _store(known.secrets)
        if known.log is not None:
            settings.REVOCATION_LOG.write_bytes(known.log)
        result: T = copy.deepcopy(known.result)
        return result
    before, stored, opened = _read_rows(), set(_read_secrets()), _read_log()
    _making.append(make)
    try:
        result = make(*arguments)
    finally:
        _making.pop()
    after = _read_rows()
    rows = {table: after[table] for table in _parents_first() if after.get(table) != before.get(table)}
    assert before.keys().isdisjoint(rows), "a table has rows of the migrations"
    secrets = [secret for secret in _read_secrets() if secret not in stored]
    log = _read_log()
    _made[make, arguments] = _Made(copy.deepcopy(result), rows, secrets, None if log == opened else log)
    return result


def _settings() -> tuple[object, ...]:
    """Return the settings that decide which rows and secrets are made, and where."""
    return (
        *(settings.IS_VAULT, settings.MASTER_KEY, settings.DATA_DIR, tuple(settings.ENVIRONMENTS)),
        *(settings.KEY_PREFIX, tuple(settings.APPROVALS_NEEDED.items())),
    )


_shared_settings = _settings()


def _read_rows() -> dict[str, Rows]:
    """Return the rows of each table that has some."""
    tables = connection.introspection.django_table_names(only_existing=True, include_views=False)
    exists = (f"SELECT '{table}' WHERE EXISTS (SELECT 1 FROM \"{table}\")" for table in tables)  # noqa: S608  tables of ours
    with connection.cursor() as cursor:
        cursor.execute(" UNION ALL ".join(exists))
        filled = sorted(table for (table,) in cursor.fetchall())
        found = {}
        for table in filled:
            cursor.execute(f'SELECT {_columns()[table]} FROM "{table}" ORDER BY 1')  # noqa: S608  a table of ours
            found[table] = cursor.fetchall()
    return found


@cache
def _columns() -> dict[str, str]:
    """Return the quoted columns of each table. Their order in the table changes when a test rebuilds it."""
    return {
        model._meta.db_table: ", ".join(f'"{field.column}"' for field in model._meta.local_concrete_fields)
        for model in apps.get_models(include_auto_created=True)
    }


def _parents_first() -> list[str]:
    """Return all tables in an order in which triggers find the rows that a new row names."""
    parents = {
        model._meta.db_table: {
            field.related_model._meta.db_table for field in model._meta.local_fields if field.related_model
        }
        - {model._meta.db_table}
        for model in apps.get_models(include_auto_created=True)
    }
    return list(TopologicalSorter(parents).static_order())


def _insert(rows_of_tables: dict[str, Rows]) -> None:
    with transaction.atomic(), connection.cursor() as cursor:
        for table, rows in rows_of_tables.items():
            row = "(" + ", ".join(["%s"] * len(rows[0])) + ")"
            values = [value for each in rows for value in each]
            places = ", ".join([row] * len(rows))
            cursor.execute(f'INSERT INTO "{table}" ({_columns()[table]}) VALUES {places}', values)  # noqa: S608  a table of ours


@contextmanager
def _keystore() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(Path(settings.DATA_DIR, "keystore.sqlite3"), timeout=20)) as connection, connection:
        yield connection


def _read_secrets() -> Rows:
    """Return the keystore's records of keys, and its evidence."""
    mounts = [*MOUNT.values(), Mount.EVIDENCE]
    with _keystore() as connection:
        places = ", ".join("?" * len(mounts))
        return connection.execute(f"SELECT * FROM records WHERE mount IN ({places})", mounts).fetchall()  # noqa: S608  places only


def _read_log() -> bytes:
    log: Path = settings.REVOCATION_LOG
    return log.read_bytes() if log.exists() else b""


def _store(secrets: Rows) -> None:
    """Put the records back as they were made: an earlier test may have deleted them or written later versions."""
    if not secrets:
        return
    with _keystore() as connection:
        connection.executemany("DELETE FROM records WHERE mount = ? AND path = ?", {each[:2] for each in secrets})
        places = ", ".join("?" * len(secrets[0]))
        connection.executemany(f"INSERT INTO records VALUES ({places})", secrets)  # noqa: S608  places only
