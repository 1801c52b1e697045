"""Triggers in SQLite's dialect."""

from collections.abc import Iterable, Iterator

from django.db.backends.utils import CursorWrapper

from keyvault.models.triggers.rules import WriteGuard


def create_statements(guards: Iterable[WriteGuard], never_truncated: Iterable[str], prefix: str) -> Iterator[str]:
    """Yield the statements that create the triggers. SQLite has no TRUNCATE."""
    for guard in guards:
        yield (
            f"CREATE TRIGGER {prefix}{guard.name} BEFORE {guard.when} ON {guard.table} FOR EACH ROW "
            f"WHEN {guard.condition} BEGIN SELECT RAISE(ABORT, '{guard.message}'); END"
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
