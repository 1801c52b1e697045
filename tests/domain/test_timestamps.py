"""The text form of times."""

from datetime import UTC, datetime, timedelta, timezone

from hypothesis import given
from hypothesis import strategies as st

from keyvault.domain.timestamps import format_timestamp

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


def test_timestamp_is_in_utc_with_z_whatever_the_zone() -> None:
    assert format_timestamp(NOON) == "2026-11-21T12:00:00Z"
    assert format_timestamp(NOON.astimezone(timezone(timedelta(hours=5)))) == "2026-11-21T12:00:00Z"
    assert format_timestamp(NOON.replace(microsecond=120_000)) == "2026-11-21T12:00:00.120000Z"
    assert format_timestamp(None) is None


@given(st.datetimes(timezones=st.just(UTC)))
def test_timestamp_is_read_back_as_the_same_time(at: datetime) -> None:
    assert datetime.fromisoformat(format_timestamp(at)) == at
