"""Metrics of rotations: open ones by state, transitions, and the time to proof."""

import pytest
from prometheus_client import REGISTRY

from keyvault.services.usage.recorder import UsageLog
from rotation.domain.events import RotationState as S
from rotation.domain.states import CLOSED
from rotation.services.rotations.metrics import measure_rotations
from tests.clocks import Clock
from tests.rotation.steps import begun, overlapping

pytestmark = [pytest.mark.database, pytest.mark.django_db]


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0


def counts() -> dict[str, float]:
    measure_rotations()
    return {state.value: value("keyvault_rotations", state=state.value) for state in S if state not in CLOSED}


def test_open_rotations_are_counted_by_state(clock: Clock, verifier: UsageLog) -> None:
    assert set(counts().values()) == {0}
    rotation = begun(clock)
    assert {state: count for state, count in counts().items() if count} == {rotation.state: 1}


def test_proof_is_measured_from_the_delivery(clock: Clock, verifier: UsageLog) -> None:
    before = value("keyvault_rotation_proof_seconds_count"), value("keyvault_rotation_proof_seconds_sum")
    entered = value("keyvault_rotation_transitions_total", state="overlap")
    rotation = overlapping(clock, verifier)
    assert rotation.used_at is not None
    assert rotation.delivered_at is not None
    assert value("keyvault_rotation_transitions_total", state="overlap") == entered + 1
    assert value("keyvault_rotation_proof_seconds_count") == before[0] + 1
    taken = (rotation.used_at - rotation.delivered_at).total_seconds()
    assert value("keyvault_rotation_proof_seconds_sum") == pytest.approx(before[1] + taken)
