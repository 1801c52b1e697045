"""Uses of keys over time, as charts show them."""

from datetime import timedelta

import pytest

from keyvault.models import Key
from keyvault.models.usage import UseOutcome
from keyvault.services.usage import series
from keyvault.services.usage.series import choose_step, count_uses, floor
from tests.factories import account, issue
from tests.services.usage.conftest import NOON
from tests.services.usage.test_reports import use

MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


@pytest.mark.django_db
@pytest.mark.database
def test_uses_are_counted_in_the_step_of_their_minute(key: Key) -> None:
    use(key, at=NOON, times=2)
    use(key, "192.0.2.9", at=NOON + 59 * MINUTE)
    use(key, at=NOON + HOUR, outcome=UseOutcome.DENIED)
    use(key, at=NOON + HOUR, outcome=UseOutcome.REFUSED)
    use(key, at=NOON - MINUTE)
    use(key, at=NOON + 3 * HOUR)
    assert count_uses([key.key_id], NOON, NOON + 2 * HOUR, HOUR) == {key.key_id: [3, 1, 0]}


@pytest.mark.django_db
def test_uses_of_a_key_without_any_are_zero(key: Key) -> None:
    assert count_uses([key.key_id], NOON, NOON + HOUR, HOUR) == {key.key_id: [0, 0]}
    assert count_uses([], NOON, NOON + HOUR, HOUR) == {}


@pytest.mark.django_db
@pytest.mark.database
def test_uses_of_a_key_with_many_clients_displace_no_other_key(key: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: a holder who adds clients hides its own older ones only."""
    other, _ = issue(account())
    monkeypatch.setattr(series, "MAX_CONTEXTS", 8)
    use(other, times=5)
    for number in range(9):
        use(key, f"192.0.2.{number + 1}")
    assert count_uses([key.key_id, other.key_id], NOON, NOON, HOUR) == {key.key_id: [2], other.key_id: [5]}


@pytest.mark.parametrize(
    ("period", "age", "step"),
    [
        (HOUR, timedelta(), MINUTE),
        (DAY, timedelta(), 30 * MINUTE),
        (HOUR, 30 * DAY, HOUR),
        (HOUR, 1_000 * DAY, DAY),
    ],
)
def test_step_is_about_a_sixtieth_and_not_shorter_than_the_buckets(
    period: timedelta, age: timedelta, step: timedelta
) -> None:
    assert choose_step(NOON, NOON + period, NOON + period + age) == step


def test_floor_is_a_whole_number_of_steps_from_the_epoch() -> None:
    assert floor(NOON + 59 * MINUTE, HOUR) == NOON
    assert floor(NOON, HOUR) == NOON
