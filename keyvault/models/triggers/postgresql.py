"""Triggers in PostgreSQL's dialect. A refusal is a constraint violation (SQLSTATE 23514), as on SQLite."""

from collections.abc import Iterable

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from keyvault.models.triggers.rules import WriteGuard

_EPOCH = "extract(epoch FROM {time})"


def restore(
    connection: BaseDatabaseWrapper, guards: Iterable[WriteGuard], never_truncated: Iterable[str], prefix: str
) -> None:
    """Create what is missing, replace what differs, and drop what no rule has, each trigger in a statement of its own.

    Processes use the tables meanwhile. A trigger that is as it should be is left alone, because creating it blocks the
    writers of its table, and dropping it the readers too. A function is replaced without a lock on a table.
    """
    guards, wanted = list(guards), {}
    with connection.cursor() as cursor:
        for guard in guards:
            name = f"{prefix}{guard.name}"
            cursor.execute(
                f"CREATE OR REPLACE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
                f"IF {guard.render(_EPOCH)} THEN RAISE EXCEPTION '{guard.message}' USING ERRCODE = 'check_violation'; "
                f"END IF; RETURN {'OLD' if guard.when == 'DELETE' else 'NEW'}; END $$"
            )
            rest = f"BEFORE {guard.when} ON {guard.table} FOR EACH ROW EXECUTE FUNCTION {name}()"
            wanted[name] = guard.table, f"TRIGGER {name} {rest}"
        cursor.execute(
            f"CREATE OR REPLACE FUNCTION {prefix}refuse_truncate() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION '% is never truncated', TG_TABLE_NAME USING ERRCODE = 'check_violation'; END $$"
        )
        for table in never_truncated:
            name = f"{prefix}{_no_truncate(table)}"
            rest = f"BEFORE TRUNCATE ON {table} FOR EACH STATEMENT EXECUTE FUNCTION {prefix}refuse_truncate()"
            wanted[name] = table, f"TRIGGER {name} {rest}"
        found = _find_definitions(cursor, prefix)
        for name, table in found.keys() - {(name, table) for name, (table, _) in wanted.items()}:
            cursor.execute(f"DROP TRIGGER {name} ON {table}")
        for name, (table, definition) in wanted.items():
            if found.get((name, table)) != f"CREATE {definition}":
                cursor.execute(f"CREATE OR REPLACE {definition}")


def _find_definitions(cursor: CursorWrapper, prefix: str) -> dict[tuple[str, str], str]:
    """Return the statement of each trigger by name and table; a disabled one has none."""
    cursor.execute(
        "SELECT tgname, tgrelid::regclass::text, CASE WHEN tgenabled <> 'D' THEN pg_get_triggerdef(oid, true) END"
        " FROM pg_trigger WHERE NOT tgisinternal AND tgname LIKE %s",
        [f"{prefix}%"],
    )
    return {(name, table): definition for name, table, definition in cursor.fetchall()}


def drop_all(cursor: CursorWrapper, prefix: str) -> None:
    cursor.execute(
        "SELECT tgname, tgrelid::regclass::text FROM pg_trigger WHERE NOT tgisinternal AND tgname LIKE %s",
        [f"{prefix}%"],
    )
    for name, table in cursor.fetchall():
        cursor.execute(f"DROP TRIGGER {name} ON {table}")


def find_enabled(cursor: CursorWrapper, prefix: str) -> set[str]:
    """Return the names of the triggers, without the disabled ones."""
    cursor.execute(
        "SELECT tgname FROM pg_trigger WHERE NOT tgisinternal AND tgenabled <> 'D' AND tgname LIKE %s",
        [f"{prefix}%"],
    )
    return {name for (name,) in cursor.fetchall()}


def truncate_names(never_truncated: Iterable[str]) -> set[str]:
    """Return the names of the triggers that refuse TRUNCATE, which runs no trigger of a row."""
    return {_no_truncate(table) for table in never_truncated}


def _no_truncate(table: str) -> str:
    return f"{table}_no_truncate"
