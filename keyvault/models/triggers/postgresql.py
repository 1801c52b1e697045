"""Triggers in PostgreSQL's dialect. A refusal is a constraint violation (SQLSTATE 23514), as on SQLite."""

from collections.abc import Iterable, Iterator

from django.db.backends.utils import CursorWrapper

from keyvault.models.triggers.rules import WriteGuard


def create_statements(guards: Iterable[WriteGuard], never_truncated: Iterable[str], prefix: str) -> Iterator[str]:
    """Yield the statements that create the triggers and their functions."""
    for guard in guards:
        name = f"{prefix}{guard.name}"
        yield (
            f"CREATE OR REPLACE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            f"IF {guard.condition} THEN RAISE EXCEPTION '{guard.message}' USING ERRCODE = 'check_violation'; "
            f"END IF; RETURN {'OLD' if guard.when == 'DELETE' else 'NEW'}; END $$"
        )
        yield f"CREATE TRIGGER {name} BEFORE {guard.when} ON {guard.table} FOR EACH ROW EXECUTE FUNCTION {name}()"
    yield (
        f"CREATE OR REPLACE FUNCTION {prefix}refuse_truncate() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION '% is never truncated', TG_TABLE_NAME USING ERRCODE = 'check_violation'; END $$"
    )
    for table in never_truncated:
        yield (
            f"CREATE TRIGGER {prefix}{_no_truncate(table)} BEFORE TRUNCATE ON {table} "
            f"EXECUTE FUNCTION {prefix}refuse_truncate()"
        )


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
