"""Query plans of PostgreSQL, with costs that make table scans and sorts the last choice."""

from collections.abc import Callable

from django.db import connection
from django.db.models import AutoField, Model
from django.test.utils import CaptureQueriesContext

ROWS = 5_000
"""Number of rows from which every other index costs more, whatever the statistics of earlier tests."""


def copy_row(model: type[Model], **changed: str) -> None:
    """Copy one row of the model ROWS times; `changed`: SQL for the columns in which the copies differ, of `n`."""
    fields = [field for field in model._meta.local_concrete_fields if not isinstance(field, AutoField)]
    names = ", ".join(str(field.column) for field in fields)
    values = ", ".join(changed.get(field.name, str(field.column)) for field in fields)
    table = model._meta.db_table
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {table} ({names}) SELECT {values} "  # noqa: S608  names of ours
            f"FROM (SELECT * FROM {table} LIMIT 1) AS one, generate_series(1, {ROWS}) AS n"
        )
        cursor.execute(f"ANALYZE {table}")


def explain(act: Callable[[], object]) -> list[str]:
    """Run what reads the database and return the plan of each of its queries.

    Inside a transaction, which the test's own is: the settings end with it.
    """
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off; SET LOCAL enable_sort = off; SET LOCAL enable_bitmapscan = off")
        with CaptureQueriesContext(connection) as made:
            act()
        plans = []
        for query in made.captured_queries:
            cursor.execute("EXPLAIN " + query["sql"])  # the query that the application has just made
            plans.append("\n".join(line for (line,) in cursor.fetchall()))
        return plans
