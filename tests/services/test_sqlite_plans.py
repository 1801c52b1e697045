"""Query plans of SQLite, which uses no index for a condition that is a column itself, such as `NOT is_exposure`."""

import re
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from keyvault.services.usage.retention import forget_old, roll_up
from keyvault.services.usage.totals import write_totals
from keyvault.services.webhooks.deliveries import deliver_due
from keyvault.services.work.leases import has_due, measure_queue, take_due

pytestmark = pytest.mark.django_db

NOW = datetime(2026, 9, 18, 12, tzinfo=UTC)

JOBS: dict[str, Callable[[], object]] = {
    "totals": lambda: write_totals(NOW),
    "roll-up": lambda: roll_up(NOW),
    "retention of uses": lambda: forget_old(NOW),
    "queue": lambda: (has_due("rotation", NOW, is_urgent=False), take_due("rotation", NOW, 10, is_urgent=False)),
    "depth of a queue": lambda: measure_queue("rotation", NOW),
    "webhooks": lambda: deliver_due(lambda: NOW),
}


@pytest.mark.parametrize("job", JOBS)
def test_periodic_job_searches_its_table_by_the_boolean_too(job: str) -> None:
    """Guarantee: on the embedded default, too, no periodic job reads all rows of a table or of a queue."""
    with CaptureQueriesContext(connection) as made:
        JOBS[job]()
    by_boolean = [
        each["sql"] for each in made.captured_queries if re.search(r'WHERE.*"is_(exposure|urgent)"', each["sql"])
    ]
    assert by_boolean
    for sql in by_boolean:
        with connection.cursor() as cursor:
            # Django shows times without the quotes of its parameters.
            cursor.execute(
                "EXPLAIN QUERY PLAN " + re.sub(r"(?<!')(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?)", r"'\1'", sql)
            )
            plan = " | ".join(row[3] for row in cursor.fetchall())
        assert re.search(r"is_(exposure|urgent)=\?", plan), (sql, plan)
