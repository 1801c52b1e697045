"""Totals of all uses by quarter of an hour."""

from collections import Counter
from datetime import datetime, timedelta
from typing import Any

import pytest

from keyvault.domain.environments import Environment
from keyvault.models import Key, UsageTotal
from keyvault.models.usage import UseOutcome
from keyvault.services.usage import totals
from keyvault.services.usage.totals import SLOT, read_totals, write_totals
from tests.factories import account, issue
from tests.services.usage.conftest import NOON
from tests.services.usage.test_reports import use

pytestmark = pytest.mark.django_db

MINUTE = timedelta(minutes=1)


def written() -> dict[tuple[datetime, str], int]:
    return {(row.at, row.outcome): row.count for row in UsageTotal.objects.filter(count__gt=0)}


@pytest.mark.database
def test_totals_are_those_of_the_slot_by_outcome(key: Key) -> None:
    other, _ = issue(account())
    use(key, at=NOON, times=3)
    use(other, at=NOON + 14 * MINUTE)
    use(key, at=NOON + MINUTE, outcome=UseOutcome.DENIED)
    use(key, at=NOON + MINUTE, outcome=UseOutcome.PROBED)
    use(key, at=NOON - MINUTE)
    write_totals(NOON + 14 * MINUTE)
    write_totals(NOON + 14 * MINUTE)
    assert written() == {
        (NOON - SLOT, UseOutcome.ALLOWED): 1,
        (NOON, UseOutcome.ALLOWED): 4,
        (NOON, UseOutcome.DENIED): 1,
    }
    assert read_totals([*Environment], NOON) == {NOON: {UseOutcome.ALLOWED: 4, UseOutcome.DENIED: 1}}


@pytest.mark.database
def test_slots_that_ended_while_no_worker_ran_are_added_up(key: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: a worker that is down, or late, leaves no slot partial or empty. A run has a bound."""
    write_totals(NOON - MINUTE)
    use(key, at=NOON)
    write_totals(NOON + MINUTE)
    for number in range(40):
        use(key, at=NOON + MINUTE + number * SLOT)
    back = NOON + 40 * SLOT + 3 * MINUTE
    monkeypatch.setattr(totals, "_RUN_SECONDS", 0.0)
    for _ in range(2):
        write_totals(back)
    assert written() == {(NOON, UseOutcome.ALLOWED): 2, (NOON + SLOT, UseOutcome.ALLOWED): 1}
    monkeypatch.setattr(totals, "_RUN_SECONDS", float("inf"))
    write_totals(back)
    complete = {(NOON + number * SLOT, UseOutcome.ALLOWED): 1 for number in range(1, 40)}
    assert written() == {(NOON, UseOutcome.ALLOWED): 2, **complete}


def test_slots_that_ended_are_added_up_once(key: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: slots are not read again each minute, with or without uses."""
    monkeypatch.setattr(totals, "_MAX_LIVE", -1)
    read: list[datetime] = []

    def add_up(slot: datetime) -> Counter[tuple[str, str]]:
        read.append(slot)
        return Counter()

    monkeypatch.setattr(totals, "_add_up", add_up)
    for number in range(31):
        write_totals(NOON + number * MINUTE)
    assert read == [NOON - 2 * SLOT, NOON - SLOT, NOON]


def test_slots_whose_minutes_may_be_rolled_up_stay_as_they_are(key: Key, settings: Any) -> None:
    """Guarantee: a slot whose buckets have moved keeps its totals."""
    settings.USAGE_MINUTE_DAYS = 1
    write_totals(NOON + MINUTE)
    use(key, at=NOON + 3 * MINUTE)
    use(key, at=NOON + timedelta(hours=2))
    write_totals(NOON + timedelta(days=1, minutes=5))
    assert written() == {(NOON + timedelta(hours=2), UseOutcome.ALLOWED): 1}


def test_slot_is_added_up_again_shortly_after_its_end(key: Key) -> None:
    """Guarantee: a count that a reporter sends late is in the totals."""
    use(key, at=NOON)
    write_totals(NOON + 14 * MINUTE)
    use(key, at=NOON + 14 * MINUTE)
    write_totals(NOON + SLOT + MINUTE)
    assert written() == {(NOON, UseOutcome.ALLOWED): 2}
    use(key, at=NOON + 14 * MINUTE)
    write_totals(NOON + SLOT + 5 * MINUTE)
    assert written() == {(NOON, UseOutcome.ALLOWED): 2}


def test_large_slot_is_added_up_only_after_its_end(key: Key, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: the buckets of a busy installation are not read again each minute."""
    monkeypatch.setattr(totals, "_MAX_LIVE", 1)
    monkeypatch.setattr(totals, "_BATCH", 1)
    use(key, at=NOON)
    use(key, "192.0.2.9", at=NOON)
    write_totals(NOON + MINUTE)
    assert written() == {}
    write_totals(NOON + SLOT + MINUTE)
    assert written() == {(NOON, UseOutcome.ALLOWED): 2}
