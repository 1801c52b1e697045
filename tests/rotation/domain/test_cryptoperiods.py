"""When a scheduled key is replaced: within its cryptoperiod if the window permits it, and spread by jitter."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rotation.domain.cryptoperiods import Terms, find_term_faults, jitter_of, next_date
from rotation.domain.windows import LOOK_AHEAD, Blackout, Window

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
DAY = timedelta(days=1)
SUNDAYS = Window("Europe/Berlin", (6,), 120, 240)

moments = st.integers(0, 800 * 86_400).map(lambda seconds: NOW - 400 * DAY + timedelta(seconds=seconds))
terms = st.builds(
    lambda period, jitter, lead, window: Terms(period, min(jitter, period - 1), lead, window),
    st.integers(15, 400),
    st.integers(0, 30),
    st.integers(0, 10),
    st.one_of(
        st.none(),
        st.builds(
            lambda weekdays, opens: Window("America/New_York", tuple(sorted(weekdays)), opens, opens + 60),
            st.sets(st.integers(0, 6), min_size=1),
            st.integers(0, 1_380),
        ),
    ),
)


@given(st.text(max_size=20), st.integers(0, 3_000))
def test_jitter_is_within_its_bounds_and_deterministic(credential_id: str, days: int) -> None:
    jitter = jitter_of(credential_id, days)
    assert timedelta(0) <= jitter <= days * DAY
    assert jitter == jitter_of(credential_id, days)


def test_jitter_of_many_credentials_spreads_them() -> None:
    days = [jitter_of(f"crd_{n}", 10) // DAY for n in range(1_000)]
    assert all(days.count(day) > 50 for day in range(10))


# The only opening is in the first day of the second half.
@example(Terms(15, 14, 0, Window("America/New_York", (5,), 481, 541)), "", datetime(2025, 10, 17, 12, tzinfo=UTC))
@given(terms, st.text(max_size=9), moments)
def test_next_date_is_in_the_window_and_within_the_cryptoperiod(
    chosen: Terms, credential_id: str, activated_at: datetime
) -> None:
    """A weekly window satisfies every cryptoperiod of two weeks or more."""
    date = next_date(chosen, credential_id, activated_at)
    assert date.ends_at == activated_at + chosen.cryptoperiod_days * DAY
    assert date.ends_at - chosen.jitter_days * DAY <= date.due_at <= date.ends_at
    assert date.begins_at is not None
    assert not date.is_late
    # Earlier than due only in the second half; with much jitter it is due, and may start, before that.
    middle = activated_at + chosen.cryptoperiod_days * DAY / 2
    assert min(middle, date.due_at) <= date.begins_at <= date.ends_at
    assert date.ask_at == date.begins_at - chosen.lead_days * DAY
    if chosen.window is not None:
        assert chosen.window.next_opening(date.begins_at) == date.begins_at
        if date.begins_at < date.due_at:
            assert chosen.window.next_opening(date.due_at) > date.ends_at  # type: ignore[operator]  # it opens weekly


def test_next_date_without_an_opening_in_the_second_half_is_late() -> None:
    closed = Blackout(NOW + 10 * DAY, NOW + 60 * DAY)
    date = next_date(Terms(30, window=Window(blackouts=(closed,))), "crd", NOW)
    assert (date.begins_at, date.is_late) == (NOW + 60 * DAY, True)


def test_next_date_before_a_blackout_begins_earlier() -> None:
    closed = Blackout(NOW + 25 * DAY, NOW + 35 * DAY)
    date = next_date(Terms(30, window=Window(blackouts=(closed,))), "crd", NOW)
    assert (date.begins_at, date.is_late) == (NOW + 24 * DAY, False)


@pytest.mark.parametrize(
    ("chosen", "pointers"),
    [
        (Terms(90, 10, 7), []),
        (Terms(7, 0, 0, SUNDAYS), []),
        (Terms(0), ["/cryptoperiod_days"]),
        (Terms(3_651), ["/cryptoperiod_days"]),
        (Terms(90, 90), ["/jitter_days"]),
        (Terms(90, -1), ["/jitter_days"]),
        (Terms(90, 0, 90), ["/lead_days"]),
        (Terms(90, 80, 10), ["/lead_days"]),
        (Terms(90, 0, -1), ["/lead_days"]),
        (Terms(5, 0, 0, SUNDAYS), ["/window"]),
        (Terms(30, 0, 0, Window(blackouts=(Blackout(NOW + 90 * DAY, NOW + 125 * DAY),))), ["/window"]),
        (Terms(40, 0, 0, Window(blackouts=(Blackout(NOW + 90 * DAY, NOW + 125 * DAY),))), []),
        (Terms(90, 0, 0, Window(blackouts=(Blackout(NOW, NOW + LOOK_AHEAD + DAY),))), ["/window"]),
    ],
)
def test_find_term_faults_names_infeasible_terms(chosen: Terms, pointers: list[str]) -> None:
    assert [fault.pointer for fault in find_term_faults(chosen, NOW)] == pointers
