"""Rows that many tests start with: services write them for the first test of a process, later tests insert copies.

A test then starts with a few statements instead of the two hundred that its operators, merchants and peppers take.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Any, TypeVar

from django.apps import apps
from django.conf import settings
from django.db import connection, transaction

from keyvault.backends.local import LocalKeystore
from keyvault.models import AuditEntry
from keyvault.services.secrets.backend import secret_backend

T = TypeVar("T")

Rows = list[tuple[Any, ...]]


@dataclass(frozen=True)
class _Made:
    """What a function returned, and the rows that it wrote, by table."""

    result: Any
    rows: dict[str, Rows]


_made: dict[tuple[Callable[..., Any], tuple[str, ...]], _Made] = {}


def start_with(make: Callable[..., T], *arguments: str) -> T:
    """Return what `make(*arguments)` returns, with its rows in the database.

    The copies are as old as the first call. `make` runs anew in a database that is not as `migrate` left it (every
    service writes an audit entry), and with a keystore or a backend of the test's own, whose peppers differ.
    """
    is_own = _keystore() != _shared_keystore or type(secret_backend()) is not LocalKeystore
    if is_own or AuditEntry.objects.exists():
        return make(*arguments)
    if (known := _made.get((make, arguments))) is not None:
        _insert(known.rows)
        result: T = copy.deepcopy(known.result)
        return result
    before = _read_rows()
    result = make(*arguments)
    after = _read_rows()
    rows = {table: after[table] for table in _parents_first() if after.get(table) != before.get(table)}
    assert before.keys().isdisjoint(rows), "a table has rows of the migrations"
    _made[make, arguments] = _Made(copy.deepcopy(result), rows)
    return result


def _keystore() -> tuple[object, ...]:
    """Return the settings that decide which peppers are made, and where."""
    return settings.IS_VAULT, settings.MASTER_KEY, settings.DATA_DIR, tuple(settings.ENVIRONMENTS)


_shared_keystore = _keystore()


def _read_rows() -> dict[str, Rows]:
    """Return the rows of each table that has some."""
    tables = connection.introspection.django_table_names(only_existing=True, include_views=False)
    exists = (f"SELECT '{table}' WHERE EXISTS (SELECT 1 FROM \"{table}\")" for table in tables)  # noqa: S608  tables of ours
    with connection.cursor() as cursor:
        cursor.execute(" UNION ALL ".join(exists))
        filled = sorted(table for (table,) in cursor.fetchall())
        found = {}
        for table in filled:
            cursor.execute(f'SELECT * FROM "{table}" ORDER BY 1')  # noqa: S608  a table of ours
            found[table] = cursor.fetchall()
    return found


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
            cursor.execute(f'INSERT INTO "{table}" VALUES {", ".join([row] * len(rows))}', values)  # noqa: S608  a table of ours
