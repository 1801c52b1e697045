"""Query plans of an engine sweep: open rotations by an index, single rows by their keys."""

import pytest

from keyvault.services.usage.recorder import UsageLog
from rotation.models import Rotation
from rotation.services.rotations.engine import list_due
from tests.clocks import Clock
from tests.plans import copy_row, explain
from tests.rotation.steps import begun
from tests.services.rows import disable_triggers

pytestmark = [pytest.mark.postgres, pytest.mark.django_db]


def test_list_due_reads_open_rotations_in_order_and_no_whole_table(clock: Clock, verifier: UsageLog) -> None:
    """Guarantee: the number of closed rotations, keys and leases does not slow a sweep."""
    begun(clock)
    disable_triggers()
    copy_row(Rotation, rotation_id="'rot_' || n", state="'completed'")
    plans = explain(lambda: list_due(clock()))
    assert len(plans) == 4
    for plan in plans:
        assert "rotation_open" in plan
        assert "Index Cond: ((rotation_id)::text" in plan
        assert "Seq Scan" not in plan
        assert "Sort" not in plan
