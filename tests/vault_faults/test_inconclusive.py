"""A trial whose fault itself failed says nothing: it is repeated, a bounded number of times."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.faults.results import Result
from tests.faults.vault import ATTEMPTS, _find_conclusive

from .journey import InconclusiveError, Trial
from .proxy import NO_FAULT, VaultProxy


def journeys(*outcomes: Trial | Exception) -> Iterator[Any]:
    for outcome in outcomes:

        def run(outcome: Trial | Exception = outcome) -> Trial:
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        yield SimpleNamespace(run=run)


def test_inconclusive_trial_is_repeated_and_counted() -> None:
    broken = Trial(violations=["a good key is refused"])
    begun, result = journeys(InconclusiveError("slow"), broken), Result("fault points")
    assert _find_conclusive(lambda: next(begun), "sealed at 1", result) is broken
    assert result.counts == {"inconclusive trials": 1}


def test_point_without_a_conclusive_trial_has_none() -> None:
    begun, result = journeys(*[InconclusiveError("slow")] * ATTEMPTS), Result("fault points")
    assert _find_conclusive(lambda: next(begun), "sealed at 1", result) is None
    assert result.counts == {"inconclusive trials": ATTEMPTS}


def test_violation_that_is_raised_is_not_repeated() -> None:
    begun = journeys(AssertionError("work is due, fails, and is due again immediately"))
    with pytest.raises(AssertionError, match="due again"):
        _find_conclusive(lambda: next(begun), "sealed at 1", Result("fault points"))


def test_failure_of_an_earlier_fault_does_not_count_against_a_later_one() -> None:
    proxy = VaultProxy("http://127.0.0.1:1")
    try:
        proxy.failures.append(OSError("slow"))
        proxy.inject_at(1, NO_FAULT)
        assert proxy.failures == []
    finally:
        proxy._server.server_close()
