"""The host's clock against the database's: PostgreSQL has a clock of its own, SQLite has not."""

from datetime import UTC, datetime, timedelta

import pytest

from keyvault.services.work import clock
from keyvault.services.work.clock import ClockDiffersError, require_true_clock

pytestmark = [pytest.mark.postgres, pytest.mark.django_db]


@pytest.mark.parametrize("seconds", [-3_600, -12, 12, 3_600])
def test_clock_that_differs_from_the_database_is_refused(seconds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "host_time", lambda: datetime.now(UTC) + timedelta(seconds=seconds))
    with pytest.raises(ClockDiffersError) as refused:
        require_true_clock()
    assert (refused.value.difference > timedelta(0)) == (seconds > 0)


def test_clock_near_the_database_is_accepted() -> None:
    require_true_clock()


def test_clock_with_a_slow_database_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that the reply takes is no difference."""
    readings = iter([datetime.now(UTC) - timedelta(hours=1), datetime.now(UTC) + timedelta(hours=1)])
    monkeypatch.setattr(clock, "host_time", lambda: next(readings))
    require_true_clock()
