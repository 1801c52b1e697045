"""Comparison of this host's clock with the database's, before actions that a wrong clock would make irreversible.

With SQLite the database has this host's clock, so there is nothing to compare.
"""

from datetime import UTC, datetime, timedelta

from django.db import connection

from keyvault.domain.errors import DependencyUnavailableError

MAX_DIFFERENCE = timedelta(seconds=10)
"""Maximum difference between the clocks of this host and of the database."""


class ClockDiffersError(DependencyUnavailableError):
    """This host's clock differs from the database's. `difference`: positive if this host is ahead."""

    def __init__(self, difference: timedelta) -> None:
        seconds = difference.total_seconds()
        super().__init__(
            "The clock of this host differs from that of the database. Synchronize both, for example with NTP.",
            internal=f"this host is {seconds:+.0f} s from the database",
        )
        self.difference = difference


def require_true_clock() -> None:
    """Raise ClockDiffersError if this host's clock differs more than MAX_DIFFERENCE from the database's."""
    difference = measure_difference()
    if abs(difference) > MAX_DIFFERENCE:
        raise ClockDiffersError(difference)


def measure_difference() -> timedelta:
    """Return how far this host's clock is ahead of the database's. Costs one query."""
    if connection.vendor != "postgresql":
        return timedelta(0)
    before = host_time()
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()")
        (at,) = cursor.fetchone()
    after = host_time()
    # The server reads its clock between the two readings, so a slow reply is no difference.
    return before - at if at < before else after - at if after < at else timedelta(0)


def host_time() -> datetime:
    return datetime.now(UTC)
