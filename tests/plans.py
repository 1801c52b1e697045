"""What PostgreSQL does for a query, with nothing to gain from reading a table or sorting it."""

from collections.abc import Callable

from django.db import connection
from django.test.utils import CaptureQueriesContext


def explain(act: Callable[[], object]) -> list[str]:
    """Run what reads the database and return the plan of each of its queries.

    Tests have few rows, for which PostgreSQL would read whole tables. Inside a transaction, which the test's own is.
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
