"""Query plans of a tick: only rows that are due, by an index."""

import pytest

from keyvault.models import WorkLease
from keyvault.services.usage.recorder import UsageLog
from rotation.services.rotations.turns import dispatch_due
from tests.clocks import Clock
from tests.plans import copy_row, explain
from tests.rotation.steps import begun, run_due

pytestmark = [pytest.mark.postgres, pytest.mark.django_db]


def test_tick_reads_due_rows_in_order_and_no_whole_table(clock: Clock, verifier: UsageLog) -> None:
    """Guarantee: the number of open rotations that wait does not slow a tick."""
    begun(clock)
    run_due(clock)
    copy_row(WorkLease, subject="'rotation:' || n")
    plans = explain(lambda: run_due(clock))
    assert len(plans) == 4
    for plan in plans:
        assert "work_lease_due" in plan
        assert "due_at <=" in plan.partition("Index Cond")[2]
        assert "Seq Scan" not in plan


def test_tick_takes_the_longest_due_without_sorting(clock: Clock, verifier: UsageLog) -> None:
    begun(clock)
    copy_row(WorkLease, subject="'rotation:' || n", due_at="due_at + n * interval '1 second'")
    plans = explain(lambda: dispatch_due(clock, lambda turn: None))
    taken = next(plan for plan in plans if "LockRows" in plan)
    assert "Index Cond: (((queue)::text" in taken
    assert "due_at <=" in taken
    assert "Sort" not in taken
    assert "Seq Scan" not in taken
