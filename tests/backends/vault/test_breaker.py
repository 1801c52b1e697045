"""The circuit breaker: which calls it permits, and when."""

from hypothesis import given
from hypothesis import strategies as st

from keyvault.backends.vault.breaker import FIRST_SECONDS, MAX_SECONDS, TRIAL_SECONDS, TRIPS_AFTER, Breaker

JITTER = 1.25


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def tripped(time: Time) -> Breaker:
    breaker = Breaker(time)
    for _ in range(TRIPS_AFTER):
        assert breaker.seconds_left() == 0
        breaker.failed()
    return breaker


def test_breaker_opens_after_consecutive_failures() -> None:
    breaker = tripped(Time())
    assert FIRST_SECONDS <= breaker.seconds_left() <= FIRST_SECONDS * JITTER


def test_breaker_failures_with_a_success_between_them_leave_it_closed() -> None:
    breaker = Breaker(Time())
    for _ in range(3 * TRIPS_AFTER):
        for _ in range(TRIPS_AFTER - 1):
            breaker.failed()
        breaker.succeeded()
    assert breaker.seconds_left() == 0


def test_breaker_permits_one_trial_after_the_pause() -> None:
    time = Time()
    breaker = tripped(time)
    time.now += FIRST_SECONDS * JITTER
    assert breaker.seconds_left() == 0
    assert breaker.seconds_left() > 0
    breaker.succeeded()
    assert [breaker.seconds_left() for _ in range(10)] == [0] * 10


def test_breaker_failed_trial_doubles_the_pause_up_to_the_maximum() -> None:
    time = Time()
    breaker = tripped(time)
    expected = FIRST_SECONDS
    for _ in range(8):
        time.now += expected * JITTER
        assert breaker.seconds_left() == 0
        breaker.failed()
        expected = min(2 * expected, MAX_SECONDS)
        assert expected <= breaker.seconds_left() <= expected * JITTER


def test_breaker_trial_without_outcome_does_not_keep_it_open() -> None:
    """A worker killed during the trial must not block all others."""
    time = Time()
    breaker = tripped(time)
    time.now += FIRST_SECONDS * JITTER
    assert breaker.seconds_left() == 0
    time.now += TRIAL_SECONDS
    assert breaker.seconds_left() == 0


@given(st.lists(st.tuples(st.sampled_from(["ok", "fail", "silent"]), st.floats(0, 40))))
def test_breaker_after_any_history_recovers_within_the_maximum_pause(
    history: list[tuple[str, float]],
) -> None:
    """After any history, a caller that waits as long as it was asked gets through, and never waits beyond the
    maximum.
    """
    time = Time()
    breaker = Breaker(time)
    in_a_row = 0
    for outcome, pause in history:
        time.now += pause
        left = breaker.seconds_left()
        assert 0 <= left <= MAX_SECONDS * JITTER
        assert left == 0 or in_a_row >= TRIPS_AFTER
        if left > 0:
            continue
        if outcome == "ok":
            breaker.succeeded()
            in_a_row = 0
        elif outcome == "fail":
            breaker.failed()
            in_a_row += 1
    time.now += breaker.seconds_left()
    left = breaker.seconds_left()
    time.now += left
    assert left == 0 or breaker.seconds_left() == 0
