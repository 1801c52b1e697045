"""Totals of all uses by quarter of an hour."""

from datetime import datetime, timedelta

import pytest

from keyvault.models import Key, UsageTotal
from keyvault.models.usage import UseOutcome
from keyvault.services.usage import totals
from keyvault.services.usage.totals import SLOT, write_totals
from tests.factories import account, issue
from tests.services.usage.conftest import NOON
from tests.services.usage.test_reports import use

pytestmark = pytest.mark.django_db

MINUTE = timedelta(minutes=1)


def written() -> dict[tuple[datetime, str], int]:
    return {(row.at, row.outcome): row.count for row in UsageTotal.objects.all()}


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
    assert written() == {(NOON, UseOutcome.ALLOWED): 4, (NOON, UseOutcome.DENIED): 1}


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
    write_totals(NOON + SLOT)
    assert written() == {(NOON, UseOutcome.ALLOWED): 2}
