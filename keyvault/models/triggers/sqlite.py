"""Triggers in SQLite's dialect."""

from collections.abc import Iterable

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from keyvault.models.triggers.rules import WriteGuard

_EPOCH = "CAST(strftime('%s', {time}) AS INTEGER)"


def restore(
    connection: BaseDatabaseWrapper, guards: Iterable[WriteGuard], never_truncated: Iterable[str], prefix: str
) -> None:
    """Create all triggers again, in one transaction. SQLite has no TRUNCATE."""
    with transaction.atomic(using=connection.alias), connection.cursor() as cursor:
        drop_all(cursor, prefix)
        for guard in guards:
            cursor.execute(
                f"CREATE TRIGGER {prefix}{guard.name} BEFORE {guard.when} ON {guard.table} FOR EACH ROW "
                f"WHEN {guard.render(_EPOCH)} BEGIN SELECT RAISE(ABORT, '{guard.message}'); END"
            )


def drop_all(cursor: CursorWrapper, prefix: str) -> None:
    for name in find_enabled(cursor, prefix):
        cursor.execute(f"DROP TRIGGER {name}")


def find_enabled(cursor: CursorWrapper, prefix: str) -> set[str]:
    """Return the names of the triggers."""
    cursor.execute("SELECT name FROM sqlite_master WHERE type = 'trigger' AND name LIKE %s", [f"{prefix}%"])
    return {name for (name,) in cursor.fetchall()}


def truncate_names(never_truncated: Iterable[str]) -> set[str]:
    """Return no name: SQLite has no TRUNCATE."""
    return set()
