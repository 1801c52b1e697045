"""Operations for migrations of tables that running processes use. None of them blocks readers or writers for long.

A migration with one of them sets `atomic = False` and has no other operations: each of these can be repeated after an
interruption, and Django starts such a migration again from its first operation. On SQLite, where a migration has the
database to itself, they do what Django's own operations do.
"""

from collections.abc import Callable
from typing import Any

from django.contrib.postgres.operations import AddIndexConcurrently, RemoveIndexConcurrently
from django.db import models, transaction
from django.db.backends.base.schema import BaseDatabaseSchemaEditor
from django.db.migrations.operations import AddConstraint, AddIndex, RemoveIndex
from django.db.migrations.operations.base import Operation
from django.db.migrations.state import ProjectState

BATCH_ROWS = 1_000
"""Number of rows that a backfill changes in one transaction."""


class AddIndexOnline(AddIndexConcurrently):
    """Build an index while rows are read and written (PostgreSQL: CONCURRENTLY).

    An interrupted build leaves an invalid index, which no query uses. It is dropped before the next attempt.
    """

    def database_forwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        model = to_state.apps.get_model(app_label, self.model_name)
        is_postgres = schema_editor.connection.vendor == "postgresql"
        if _has_constraint(schema_editor, model, self.index.name):
            if not is_postgres or _is_valid(schema_editor, self.index.name):
                return
            schema_editor.execute(f"DROP INDEX CONCURRENTLY {schema_editor.quote_name(self.index.name)}")
        forwards: Callable[..., None] = super().database_forwards if is_postgres else self._forwards_elsewhere
        forwards(app_label, schema_editor, from_state, to_state)

    def _forwards_elsewhere(self, *arguments: Any) -> None:
        AddIndex.database_forwards(self, *arguments)


class RemoveIndexOnline(RemoveIndexConcurrently):
    """Drop an index while rows are read and written (PostgreSQL: CONCURRENTLY)."""

    def database_forwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        if schema_editor.connection.vendor == "postgresql":
            super().database_forwards(app_label, schema_editor, from_state, to_state)
        elif _has_constraint(schema_editor, from_state.apps.get_model(app_label, self.model_name), self.name):
            RemoveIndex.database_forwards(self, app_label, schema_editor, from_state, to_state)


class AddConstraintOnline(AddConstraint):
    """Add a CHECK constraint to a table with rows: first for new rows (NOT VALID), then validate the others.

    Rows are read and written while the others are validated.
    """

    def database_forwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        if schema_editor.connection.vendor != "postgresql":
            super().database_forwards(app_label, schema_editor, from_state, to_state)
            return
        model = to_state.apps.get_model(app_label, self.model_name)
        if not _has_constraint(schema_editor, model, self.constraint.name):
            # Without parameters: the statement contains its values, and may contain a percent sign.
            schema_editor.execute(f"{self.constraint.create_sql(model, schema_editor)} NOT VALID", params=None)
        table, name = map(schema_editor.quote_name, (model._meta.db_table, self.constraint.name))
        schema_editor.execute(f"ALTER TABLE {table} VALIDATE CONSTRAINT {name}")


class Backfill(Operation):
    """Give columns a value in the rows that lack one, in batches, each in a transaction of its own.

    `missing` is the condition of these rows, which `values` end; it selects the rows that remain after an interruption.
    The last release goes on inserting rows without the value, unless the column has a `db_default`.
    """

    reduces_to_sql = False

    def __init__(self, model_name: str, missing: models.Q, values: dict[str, Any]) -> None:
        self.model_name, self.missing, self.values = model_name, missing, values

    def describe(self) -> str:
        return f"Fill {', '.join(self.values)} of {self.model_name} in batches"

    def state_forwards(self, app_label: str, state: ProjectState) -> None:
        """A backfill changes no column."""

    def database_forwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        if schema_editor.collect_sql:
            return
        alias = schema_editor.connection.alias
        # Not the model's manager, which refuses bulk writes. A migration writes no audit entries.
        rows: models.QuerySet[Any] = models.QuerySet(from_state.apps.get_model(app_label, self.model_name), using=alias)
        waiting = rows.filter(self.missing).order_by("pk").values_list("pk", flat=True)
        batch = list(waiting[:BATCH_ROWS])
        while batch:
            with transaction.atomic(using=alias):
                rows.filter(self.missing, pk__in=batch).update(**self.values)
            batch = list(waiting.filter(pk__gt=batch[-1])[:BATCH_ROWS])

    def database_backwards(self, *arguments: Any) -> None:
        """Keep the values: the migration that removes the column removes them."""


def _has_constraint(schema_editor: BaseDatabaseSchemaEditor, model: type[models.Model], name: str) -> bool:
    """Return whether the table has an index or a constraint of this name."""
    connection = schema_editor.connection
    with connection.cursor() as cursor:
        return name in connection.introspection.get_constraints(cursor, model._meta.db_table)


def _is_valid(schema_editor: BaseDatabaseSchemaEditor, index: str) -> bool:
    with schema_editor.connection.cursor() as cursor:
        cursor.execute(
            "SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(%s)", [schema_editor.quote_name(index)]
        )
        found = cursor.fetchone()
    return bool(found and found[0])
