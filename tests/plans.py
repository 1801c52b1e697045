"""Query plans of PostgreSQL, with costs that make table scans and sorts the last choice."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

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


# --- plans on large tables --------------------------------------------------------------------------------------

LARGE = 100_000
"""Estimated number of rows from which a table counts as large."""

MOST_READ = 5_000
"""Maximum number of rows that a query of a large table may return or sort, by the planner's estimate."""

MOST_COST = 500.0
"""Maximum cost of a filtered scan in the planner's units: some ten thousands of rows that are in memory."""


def empty_files() -> None:
    """Give each table that has no rows an empty file, until the transaction ends.

    The planner counts pages, and the rows of earlier tests, which were rolled back, still have some.
    """
    tables = connection.introspection.django_table_names(only_existing=True, include_views=False)
    exists = (f"SELECT '{table}' WHERE NOT EXISTS (SELECT 1 FROM \"{table}\")" for table in tables)  # noqa: S608  tables of ours
    with connection.cursor() as cursor:
        cursor.execute(" UNION ALL ".join(exists))
        empty = ", ".join(f'"{table}"' for (table,) in cursor.fetchall())
        cursor.execute("SET LOCAL session_replication_role = replica")  # no triggers
        cursor.execute(f"TRUNCATE {empty} CASCADE")
        cursor.execute("SET LOCAL session_replication_role = DEFAULT")


def multiply_statistics(factor: int) -> None:
    """Let the planner believe that each table has `factor` times its rows, until the transaction ends.

    The planner takes the number of pages from the file and the number of rows on a page from pg_class. A column with
    more than 20 values gets more of them with more rows. No value of a nearly unique column is common. No account and
    no chain has a large share of the rows.
    """
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE pg_statistic SET"
            " stadistinct = CASE WHEN stadistinct > 0 THEN -stadistinct / reltuples ELSE stadistinct END,"
            " stakind1 = CASE WHEN stakind1 = 1 AND (stadistinct < 0 OR attname IN ('account_id', 'chain_id'))"
            " THEN 0 ELSE stakind1 END"
            " FROM pg_class, pg_attribute WHERE pg_class.oid = starelid AND relnamespace = 'public'::regnamespace"
            " AND attrelid = starelid AND attnum = staattnum AND (stadistinct > 20 OR stadistinct < 0)"
        )
        cursor.execute(
            "UPDATE pg_class SET reltuples = reltuples * %s"
            " WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'i')",
            [factor],
        )


def read_sizes() -> dict[str, float]:
    """Return the number of rows of each table and index, as the planner believes."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT relname, reltuples FROM pg_class WHERE relnamespace = 'public'::regnamespace")
        return dict(cursor.fetchall())


@dataclass
class SlowQueries:
    """Queries whose plan reads or sorts a large table: what each step does and the SQL, by who makes them."""

    sizes: Mapping[str, float] = field(default_factory=read_sizes)
    count: int = 0
    found: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    _is_explaining: bool = False

    @contextmanager
    def watch(self, name: str) -> Iterator[None]:
        """Explain each query of this block before it is executed."""
        with connection.execute_wrapper(partial(self._explain, name)):
            yield

    def _explain(self, name: str, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        if not self._is_explaining and sql.lstrip().startswith(("SELECT", "UPDATE", "DELETE", "INSERT", "WITH")):
            self._is_explaining = True
            try:
                with connection.cursor() as cursor:
                    cursor.execute(f"EXPLAIN (FORMAT JSON) {sql}", params[0] if many else params)
                    plan = cursor.fetchone()[0][0]["Plan"]
            finally:
                self._is_explaining = False
            self.count += 1
            for fault in list_plan_faults(plan, self.sizes):
                self.found.setdefault(name, []).append((fault, f"{sql} {params}"))
        return execute(sql, params, many, context)


def list_plan_faults(plan: Mapping[str, Any], sizes: Mapping[str, float], *, is_limited: bool = False) -> Iterator[str]:
    """Yield the steps whose cost grows with a large table."""
    kind, table, rows = plan["Node Type"], plan.get("Relation Name", ""), plan["Plan Rows"]
    is_limited = is_limited or kind == "Limit"
    # A limit ends a scan early if most rows of the table, or of the partial index, pass the filter.
    walked = min(sizes.get(table, 0), sizes.get(plan.get("Index Name", table), 0))
    ends_early = is_limited and kind != "Seq Scan" and rows > walked / 2
    if sizes.get(table, 0) >= LARGE and not ends_early:
        if kind == "Seq Scan":
            if "Filter" in plan or not is_limited:
                yield f"reads all of {table}"
        elif kind in {"Index Scan", "Index Only Scan"} and "Index Cond" not in plan:
            if sizes[plan["Index Name"]] > MOST_READ and ("Filter" in plan or not is_limited):
                yield f"reads all of {plan['Index Name']}"
        elif rows > MOST_READ and not is_limited:
            yield f"reads {rows} rows of {table}"
        elif "Filter" in plan and plan["Total Cost"] > MOST_COST:
            # A limit ends it early only if many rows pass the filter.
            yield f"reads much of {table} to find {rows} rows"
    if kind == "Sort" and rows > MOST_READ:
        yield f"sorts {rows} rows"
    # These read all their rows, whatever the limit above them.
    passes_limit = kind not in {"Sort", "Aggregate", "Hash", "WindowAgg"}
    for part in plan.get("Plans", ()):
        yield from list_plan_faults(part, sizes, is_limited=is_limited and passes_limit)
