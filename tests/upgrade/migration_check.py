"""What a migration would do to a release that runs beside it: block its queries, or take away what it uses.

squawk reads the SQL that Django writes for PostgreSQL and knows the locks. What it cannot know is judged here: the
columns that the last release uses and fills, and what Python code does to the rows.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import sqlparse
from django.db import connection
from django.db.migrations import Migration
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.operations import AddField, RunPython, SeparateDatabaseAndState
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ProjectState

from keyvault.models.migration_operations import AddConstraintOnline, AddIndexOnline, Backfill, RemoveIndexOnline
from tests.upgrade.releases import Release, read_releases

APPS = ("keyvault", "rotation")
ONLINE = (AddConstraintOnline, AddIndexOnline, Backfill, RemoveIndexOnline)
OLDEST_POSTGRES = "14"
DEFINING = frozenset({"ALTER", "COMMENT", "CREATE", "DROP", "SET"})
"""First words of the statements whose locks squawk knows. Any other may lock a table or write many rows."""

LOCKING = frozenset(
    {
        "adding-field-with-default",
        "adding-foreign-key-constraint",
        "adding-not-nullable-field",
        "adding-required-field",
        "adding-serial-primary-key-field",
        "ban-concurrent-index-creation-in-transaction",
        "ban-truncate-cascade",
        "changing-column-type",
        "constraint-missing-not-valid",
        "disallowed-unique-constraint",
        "renaming-column",
        "renaming-table",
        "require-concurrent-index-creation",
        "require-concurrent-index-deletion",
        "require-concurrent-reindex",
    }
)
"""The rules of squawk about locks and about names that the last release uses. Its others are about style."""


def list_new_migrations(loader: MigrationLoader) -> list[Migration]:
    """Return the migrations of our apps since the last release, without those that create the first tables."""
    released = _last_migrations()
    return [
        migration
        for (app, name), migration in sorted(loader.graph.nodes.items())
        if app in APPS and not migration.initial and name > released.get(app, "")
    ]


def released_state(loader: MigrationLoader) -> ProjectState:
    """Return the schema of the last release; before the first one, that of the initial migrations."""
    nodes = [(app, _last_migrations().get(app, "0001_initial")) for app in APPS]
    return loader.project_state(nodes)


def _last_migrations() -> dict[str, str]:
    releases: list[Release] = read_releases()
    return dict(releases[-1].migrations) if releases else {}


def find_faults(migration: Migration, before: ProjectState, released: ProjectState) -> list[str]:
    """Say what may not be in a migration, with what to do instead.

    `before`: the state that it starts from. `released`: that of the last release. Needs PostgreSQL.
    """
    operations = list(_flatten(migration.operations))
    statements = list_statements(migration, before)
    faults = [*_find_in_operations(migration, operations), *_find_in_statements(statements, released)]
    if migration.atomic:
        faults += _find_deadlocks(statements, released)
    return faults + _ask_squawk(statements, is_atomic=migration.atomic)


def list_statements(migration: Migration, before: ProjectState) -> list[str]:
    """Return the SQL of a migration, as `sqlmigrate` prints it, without executing it."""
    with connection.schema_editor(collect_sql=True, atomic=migration.atomic) as editor:
        migration.apply(before.clone(), editor, collect_sql=True)
    # RunSQL may have several statements and comments in one text.
    return sqlparse.split(sqlparse.format("\n".join(editor.collected_sql), strip_comments=True))


def _flatten(operations: Sequence[Operation]) -> Iterator[Operation]:
    for operation in operations:
        if isinstance(operation, SeparateDatabaseAndState):
            yield from _flatten(operation.database_operations)
        else:
            yield operation


def _find_in_operations(migration: Migration, operations: Sequence[Operation]) -> Iterator[str]:
    for operation in operations:
        is_few = isinstance(operation, RunPython) and operation.hints.get("bounded", False)
        if isinstance(operation, RunPython) and not is_few:
            yield (
                "RunPython may read or write all rows in one transaction. Fill them with Backfill; if the function "
                'writes a bounded number of rows, say so: hints={"bounded": True}'
            )
        if isinstance(operation, AddField) and not _may_be_omitted(operation.field):
            yield (
                f"{operation.model_name}.{operation.name} is not null and has no db_default, so the last release "
                "inserts rows without it, which fails. Give it a db_default, or null=True"
            )
        if not migration.atomic and not isinstance(operation, ONLINE):
            yield (
                f"{type(operation).__name__} in a migration with atomic = False is not repeatable after an "
                "interruption. Put it into a migration of its own, with atomic = True"
            )


def _may_be_omitted(field: Any) -> bool:
    """Whether a release that does not know the column can insert rows."""
    return bool(field.null or field.has_db_default() or field.many_to_many)


def _find_in_statements(statements: list[str], released: ProjectState) -> Iterator[str]:
    tables = {
        model._meta.db_table: {field.column for field in model._meta.local_fields}
        for model in released.apps.get_models()
    }
    for statement in statements:
        for table, rest in re.findall(r'ALTER TABLE (?:IF EXISTS |ONLY )*"?(\w+)"? ([^;]*)', statement, re.IGNORECASE):
            for column in re.findall(r'DROP COLUMN (?:IF EXISTS )?"?(\w+)"?', rest, re.IGNORECASE):
                if column in tables.get(table, ()):
                    yield (
                        f"{table}.{column} is dropped, and the last release uses it. Remove it from the state first "
                        "(SeparateDatabaseAndState), release, and drop the column in the release after that"
                    )
        for table in re.findall(r'DROP TABLE (?:IF EXISTS )?"?(\w+)"?', statement, re.IGNORECASE):
            if table in tables:
                yield f"{table} is dropped, and the last release uses it. Drop it in the release after next"
        if statement.split()[0].upper() not in DEFINING:
            yield f"it may lock a table or write many rows: {statement[:80]} … Fill rows with Backfill"


def _find_deadlocks(statements: list[str], released: ProjectState) -> Iterator[str]:
    """Name the pairs of altered tables of which one refers to the other, since queries join them."""
    altered = set(re.findall(r'ALTER TABLE (?:IF EXISTS |ONLY )*"?(\w+)"?', "\n".join(statements), re.IGNORECASE))
    for model in released.apps.get_models():
        referred = {field.related_model._meta.db_table for field in model._meta.local_fields if field.related_model}
        for table in sorted(referred & altered - {model._meta.db_table}):
            if model._meta.db_table in altered:
                yield (
                    f"{model._meta.db_table} and {table} are altered in one transaction, which waits for the lock of "
                    "one while it holds that of the other: a query that joins them is ended as a deadlock. Write a "
                    "migration for each"
                )


def _ask_squawk(statements: list[str], *, is_atomic: bool) -> list[str]:
    """Return what squawk says about the locks of these statements."""
    text = "\n".join(["BEGIN;", *statements, "COMMIT;"] if is_atomic else statements)
    command = [
        find_squawk(),
        "--reporter",
        "json",
        "--pg-version",
        OLDEST_POSTGRES,
        "--stdin-filepath",
        "migration.sql",
    ]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    return [
        f"{each['rule_name']}: {each['message']} {each['help'] or ''}" for each in found if each["rule_name"] in LOCKING
    ]


def make_migration(*operations: Operation, atomic: bool = True) -> Migration:
    """Return a migration that follows the newest one of keyvault, for tests."""
    contents = {"operations": list(operations), "atomic": atomic}
    made: Migration = type("Migration", (Migration,), contents)("9999_next", "keyvault")
    return made


def find_squawk() -> str:
    return str(Path(sys.executable).with_name("squawk"))
