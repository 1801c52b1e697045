"""Windows: the next opening is exact across clock changes and midnight, and None where there is none."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from keyvault.domain.errors import RequestInvalidError
from rotation.domain.windows import (
    LOOK_AHEAD,
    MAX_BLACKOUTS,
    Blackout,
    Window,
    clock_text,
    read_blackouts,
    read_clock,
)

BERLIN = "Europe/Berlin"
ZONES = [
    "UTC",
    BERLIN,
    "America/New_York",
    "America/St_Johns",
    "Asia/Kolkata",
    "Australia/Lord_Howe",  # its clock changes by half an hour
    "Africa/Casablanca",  # changes four times a year, around Ramadan
    "Pacific/Apia",
]
MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)
CHANGES = [
    datetime(2026, 3, 29, 1, tzinfo=UTC),  # Berlin, forward
    datetime(2026, 10, 25, 1, tzinfo=UTC),  # Berlin, back
    datetime(2026, 3, 8, 7, tzinfo=UTC),  # New York, forward
    datetime(2026, 11, 1, 6, tzinfo=UTC),  # New York, back
    datetime(2026, 4, 4, 15, tzinfo=UTC),  # Lord Howe, back
    datetime(2026, 2, 15, 2, tzinfo=UTC),  # Casablanca
]


def at(text: str) -> datetime:
    return datetime.fromisoformat(text)


def is_open(window: Window, moment: datetime) -> bool:
    """Directly from the definition: local time lies in a range of one of the window's days."""
    if any(each.begins_at <= moment < each.ends_at for each in window.blackouts):
        return False
    if not window.weekdays:
        return True
    wall = moment.astimezone(ZoneInfo(window.time_zone)).replace(tzinfo=None)
    today = wall.replace(hour=0, minute=0, second=0, microsecond=0)
    for day in (today - DAY, today):
        closes = window.closes if window.opens < window.closes else window.closes + 24 * 60
        if day.weekday() in window.weekdays and day + window.opens * MINUTE <= wall < day + closes * MINUTE:
            return True
    return False


moments = st.builds(
    lambda change, minutes: change + minutes * MINUTE,
    st.sampled_from(CHANGES),
    st.integers(-4 * 24 * 60, 2 * 24 * 60),
)
blackouts = st.lists(
    st.builds(
        lambda begins_at, minutes: Blackout(begins_at, begins_at + minutes * MINUTE),
        moments,
        st.integers(1, 4 * 24 * 60),
    ),
    max_size=3,
).map(tuple)
windows = st.builds(
    Window,
    time_zone=st.sampled_from(ZONES),
    weekdays=st.sets(st.integers(0, 6)).map(sorted).map(tuple),
    opens=st.integers(0, 24 * 60 - 1),
    closes=st.integers(1, 24 * 60),
    blackouts=blackouts,
).filter(lambda window: window.opens != window.closes)

SCANNED = 8 * 24 * 60
"""Minutes of a week, plus a day for hours that a clock change skips."""


@given(windows, moments)
@example(Window(BERLIN, tuple(range(7)), 150, 240), at("2026-03-29T00:00:00+00:00"))
@example(Window(BERLIN, tuple(range(7)), 135, 165), at("2026-10-25T00:45:00+00:00"))
def test_next_opening_equals_a_scan_by_minute(window: Window, after: datetime) -> None:
    found = window.next_opening(after)
    scanned = next((after + n * MINUTE for n in range(SCANNED) if is_open(window, after + n * MINUTE)), None)
    if scanned is None:
        assert found is None or found >= after + SCANNED * MINUTE
    else:
        assert found == scanned


@given(windows, moments, st.integers(0, 59_999_999))
def test_next_opening_within_a_minute_is_exact(window: Window, minute: datetime, microseconds: int) -> None:
    """Openings are on whole minutes and never rounded."""
    after = minute + timedelta(microseconds=microseconds)
    found = window.next_opening(after)
    if is_open(window, after):
        assert found == after
    else:
        assert found == window.next_opening(minute + MINUTE)


@given(windows, moments)
def test_next_opening_of_an_opening_is_itself(window: Window, after: datetime) -> None:
    found = window.next_opening(after)
    if found is not None:
        assert found.tzinfo is UTC
        assert window.next_opening(found) == found
        assert is_open(window, found)


@given(windows)
def test_window_round_trips_through_json(window: Window) -> None:
    if not window.weekdays:
        window = Window(window.time_zone, blackouts=window.blackouts)
    assert Window.from_json(window.as_json()) == window


@pytest.mark.parametrize(
    ("window", "after", "opens_at"),
    [
        # On the night without the hour from 2 to 3, 02:30 to 04:00 opens at 3.
        (Window(BERLIN, (6,), 150, 240), "2026-03-29T00:59:59+00:00", "2026-03-29T01:00:00+00:00"),
        # A range within the skipped hour does not open that night.
        (Window(BERLIN, (6,), 135, 165), "2026-03-29T00:00:00+00:00", "2026-04-05T00:15:00+00:00"),
        # The hour from 2 to 3 occurs twice.
        (Window(BERLIN, (6,), 135, 165), "2026-10-25T00:45:00+00:00", "2026-10-25T01:15:00+00:00"),
        (Window(BERLIN, (6,), 135, 165), "2026-10-25T01:45:00+00:00", "2026-11-01T01:15:00+00:00"),
        # Saturday 22 to 4 belongs to Saturday, past midnight too.
        (Window("UTC", (5,), 1320, 240), "2026-11-22T03:59:59+00:00", "2026-11-22T03:59:59+00:00"),
        (Window("UTC", (5,), 1320, 240), "2026-11-22T04:00:00+00:00", "2026-11-28T22:00:00+00:00"),
        (Window("UTC", (5,), 1320, 240), "2026-11-21T03:00:00+00:00", "2026-11-21T22:00:00+00:00"),
        # Monday there begins on Sunday in UTC.
        (Window("Asia/Kolkata", (0,)), "2026-11-22T12:00:00+00:00", "2026-11-22T18:30:00+00:00"),
        # The end of a blackout is open again; its begin is not.
        (
            Window(blackouts=(Blackout(at("2026-12-20T00:00:00+00:00"), at("2027-01-07T00:00:00+00:00")),)),
            "2026-12-20T00:00:00+00:00",
            "2027-01-07T00:00:00+00:00",
        ),
    ],
)
def test_next_opening_across_clock_changes_and_midnight_follows_local_time(
    window: Window, after: str, opens_at: str
) -> None:
    assert window.next_opening(at(after)) == at(opens_at)


def test_next_opening_of_two_blackouts_in_a_row_is_after_both() -> None:
    now = at("2026-11-21T12:00:00+00:00")
    row = (Blackout(now + DAY, now + 2 * DAY), Blackout(now - DAY, now + DAY), Blackout(now, now + DAY / 2))
    assert Window(blackouts=row).next_opening(now) == now + 2 * DAY


def test_next_opening_in_two_years_of_blackout_is_none() -> None:
    now = at("2026-11-21T12:00:00+00:00")
    closed = Window(blackouts=(Blackout(now, now + LOOK_AHEAD + MINUTE),))
    assert closed.next_opening(now) is None
    assert closed.next_opening(now + 2 * MINUTE) == now + LOOK_AHEAD + MINUTE


def test_next_opening_always_in_a_blackout_is_none() -> None:
    """Mondays from 2 to 4, with a blackout on every Monday."""
    now = at("2026-11-21T12:00:00+00:00")
    monday = at("2026-11-23T00:00:00+00:00")
    mondays = tuple(Blackout(monday + 7 * n * DAY, monday + (7 * n + 1) * DAY) for n in range(106))
    assert Window("UTC", (0,), 120, 240, mondays).next_opening(now) is None
    assert Window("UTC", (0,), 120, 240, mondays[:-3]).next_opening(now) is not None


@pytest.mark.parametrize(
    ("values", "pointer"),
    [
        ([], ""),
        ({}, "/time_zone"),
        ({"time_zone": 5}, "/time_zone"),
        ({"time_zone": "Europe/Atlantis"}, "/time_zone"),
        ({"time_zone": "../../etc/passwd"}, "/time_zone"),
        ({"time_zone": "/etc/passwd"}, "/time_zone"),
        ({"time_zone": "Europe"}, "/time_zone"),
        ({"time_zone": "a\0b"}, "/time_zone"),
        ({"time_zone": "\ud800"}, "/time_zone"),
        ({"time_zone": "x" * 5000}, "/time_zone"),
        ({"time_zone": ""}, "/time_zone"),
        ({"time_zone": "localtime"}, "/time_zone"),
        ({"time_zone": "UTC", "weekdays": "0"}, "/weekdays"),
        ({"time_zone": "UTC", "weekdays": [7]}, "/weekdays"),
        ({"time_zone": "UTC", "weekdays": [True]}, "/weekdays"),
        ({"time_zone": "UTC", "weekdays": [0, 0]}, "/weekdays"),
        ({"time_zone": "UTC", "weekdays": [0], "opens": 90}, "/opens"),
        ({"time_zone": "UTC", "weekdays": [0], "opens": "24:00"}, "/opens"),
        ({"time_zone": "UTC", "weekdays": [0], "opens": "1:00"}, "/opens"),
        ({"time_zone": "UTC", "weekdays": [0], "closes": "24:01"}, "/closes"),
        ({"time_zone": "UTC", "weekdays": [0], "closes": "00:00"}, "/closes"),
        ({"time_zone": "UTC", "weekdays": [0], "opens": "02:00", "closes": "02:00"}, "/closes"),
        ({"time_zone": "UTC", "opens": "02:00"}, "/weekdays"),
        ({"time_zone": "UTC", "day": 1}, "/day"),
        ({"time_zone": "UTC", "blackouts": {}}, "/blackouts"),
        ({"time_zone": "UTC", "blackouts": [1]}, "/blackouts/0"),
    ],
)
def test_from_json_with_invalid_values_names_the_field(values: object, pointer: str) -> None:
    with pytest.raises(RequestInvalidError) as refused:
        Window.from_json(values)  # type: ignore[arg-type]  # what a client can send
    assert pointer in {fault.pointer for fault in refused.value.faults}


@pytest.mark.parametrize(
    ("period", "pointer"),
    [
        ({"begins_at": "2026-12-20T00:00:00Z"}, "/0"),
        ({"begins_at": "2026-12-20T00:00:00Z", "ends_at": "2026-12-21T00:00:00Z", "name": "x"}, "/0"),
        ({"begins_at": "2026-12-20T00:00:00", "ends_at": "2026-12-21T00:00:00Z"}, "/0/begins_at"),
        ({"begins_at": "2026-12-20T00:00:00Z", "ends_at": "9999-12-31T23:59:59-12:00"}, "/0/ends_at"),
        ({"begins_at": "2026-12-20T00:00:00Z", "ends_at": "2026-12-20T01:00:00+01:00"}, "/0/ends_at"),
        ({"begins_at": 5, "ends_at": None}, "/0/ends_at"),
        ({"begins_at": "2026-12-20T00:00:00Z", "ends_at": "2026-12-21T00:00:00Z", "why": 5}, "/0/why"),
        ({"begins_at": "2026-12-20T00:00:00Z", "ends_at": "2026-12-21T00:00:00Z", "why": "a\0b"}, "/0/why"),
    ],
)
def test_blackouts_with_invalid_values_name_the_field(period: object, pointer: str) -> None:
    with pytest.raises(RequestInvalidError) as refused:
        read_blackouts([period])
    assert pointer in {fault.pointer for fault in refused.value.faults}


def test_blackouts_above_the_maximum_number_are_refused() -> None:
    period = {"begins_at": "2026-12-20T00:00:00Z", "ends_at": "2026-12-21T00:00:00Z"}
    assert len(read_blackouts([period] * MAX_BLACKOUTS)) == MAX_BLACKOUTS
    with pytest.raises(RequestInvalidError):
        read_blackouts([period] * (MAX_BLACKOUTS + 1))


def test_blackouts_are_read_in_utc_and_sorted() -> None:
    later = {"begins_at": "2026-12-24T00:00:00+01:00", "ends_at": "2026-12-27T00:00:00+01:00", "why": "Christmas"}
    sooner = {"begins_at": "2026-12-01T00:00:00Z", "ends_at": "2026-12-02T00:00:00Z"}
    assert read_blackouts([later, sooner]) == (
        Blackout(at("2026-12-01T00:00:00+00:00"), at("2026-12-02T00:00:00+00:00")),
        Blackout(at("2026-12-23T23:00:00+00:00"), at("2026-12-26T23:00:00+00:00"), "Christmas"),
    )


def test_from_json_names_each_fault() -> None:
    same = CHANGES[0].isoformat()
    unread = {"time_zone": 5, "weekdays": "0", "opens": 90, "closes": "24:01"}
    unread |= {"blackouts": [{"begins_at": same, "ends_at": same}]}
    misshapen = {"time_zone": "Nowhere", "weekdays": [9], "opens": "24:00", "closes": "00:00"}
    for values, more in ((unread, ["/blackouts/0/ends_at"]), (misshapen, [])):
        with pytest.raises(RequestInvalidError) as refused:
            Window.from_json(values)
        found = {fault.pointer for fault in refused.value.faults}
        assert found == {"/time_zone", "/weekdays", "/opens", "/closes", *more}
    assert Window.from_json({"time_zone": BERLIN, "weekdays": [0, 4], "opens": "22:00", "closes": "04:00"}) == Window(
        BERLIN, (0, 4), 1320, 240
    )


@given(st.integers(0, 24 * 60))
def test_clock_time_round_trips_as_text(minutes: int) -> None:
    assert read_clock(clock_text(minutes)) == minutes
