"""What a sweep of the engine reads to list its turns: open rotations by an index, and single rows by their keys."""

import pytest

from keyvault.services.usage import UsageLog
from rotation.services.engine import list_due
from tests.plans import explain

from .scene import Clock
from .steps import begun

pytestmark = [pytest.mark.postgres, pytest.mark.django_db]


def test_list_due_reads_open_rotations_in_order_and_no_whole_table(clock: Clock, verifier: UsageLog) -> None:
    """Guarantee: closed rotations, keys and leases make no sweep slower, however many there are."""
    begun(clock)
    plans = explain(lambda: list_due(clock()))
    assert len(plans) == 4
    for plan in plans:
        assert "rotation_open" in plan
        assert "Index Cond: ((rotation_id)::text" in plan
        assert "Seq Scan" not in plan
        assert "Sort" not in plan
        assert "Hash" not in plan
