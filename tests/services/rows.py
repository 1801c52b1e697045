"""Snapshots of database contents, for tests that compare before with after."""

import json
from typing import Any

from django.db import connection

from keyvault.models import AuditEntry, Change
from keyvault.models.triggers import drop_triggers

Tables = dict[str, list[str]]


def dump_tables() -> Tables:
    """Return every row of every table as text, with binary columns as bytes."""
    found: Tables = {}
    with connection.cursor() as cursor:
        for table in connection.introspection.table_names(cursor):
            cursor.execute(f'SELECT * FROM "{table}"')  # noqa: S608  the name comes from the database
            found[table] = sorted(repr([_plain(value) for value in row]) for row in cursor.fetchall())
    return found


def changed_tables(before: Tables, after: Tables) -> set[str]:
    return {table for table in before.keys() | after.keys() if before.get(table) != after.get(table)}


def last_ids() -> tuple[int, int]:
    """Return the newest audit entry id and change sequence, as `written_since` takes them."""
    return _last(AuditEntry.objects.order_by("-id"), "id"), _last(Change.objects.order_by("-sequence"), "sequence")


def written_since(ids: tuple[int, int]) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the audit events and the change rows written after these ids, in order."""
    events = list(AuditEntry.objects.filter(id__gt=ids[0]).order_by("id").values_list("event", flat=True))
    changes = Change.objects.filter(sequence__gt=ids[1]).order_by("sequence")
    return events, list(changes.values_list("subject_kind", "subject_id"))


def events_of(chain: str) -> list[str]:
    return list(AuditEntry.objects.filter(chain_id=chain).order_by("sequence").values_list("event", flat=True))


def last_body(event: str) -> dict[str, Any]:
    """Return the body of the newest entry of an event."""
    entry = AuditEntry.objects.filter(event=event).latest("id")
    body: dict[str, Any] = json.loads(bytes(entry.body))
    return body


def disable_triggers() -> None:
    """Drop the integrity triggers, as an attacker with database access does; rolled back with the test."""
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
    drop_triggers(connection)


def _last(rows: Any, column: str) -> int:
    return int(rows.values_list(column, flat=True).first() or 0)


def _plain(value: object) -> object:
    return bytes(value) if isinstance(value, memoryview) else value
