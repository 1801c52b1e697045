"""A small share of `make simulate ARGS=engine`, and a run with a rule that is broken on purpose."""

from datetime import datetime
from unittest import mock

import pytest

from rotation.domain.events import RotationState
from rotation.domain.states import Facts, Move, RotationAction, Wait, next_step
from rotation.services.rotations import engine
from tests.simulator.fleet import FleetOptions
from tests.simulator.report import format_result
from tests.simulator.service.place import service
from tests.simulator.service.simulation import ServiceSimulation
from tests.simulator.simulation import Result

pytestmark = pytest.mark.django_db

SMALL = FleetOptions(credentials=6, sandbox=1)
"""In the sandbox every request is approved, and every period is short."""


def _run(seed: int, steps: int) -> Result:
    with service() as backend:
        simulation = ServiceSimulation(seed, backend, SMALL)
        return simulation.run(steps)


def test_service_simulation_violates_nothing() -> None:
    result = _run(1, 150)
    assert result.violation is None, format_result(result, result.at, 0)
    assert result.counts["steps of consumer"]


def _skip_silence(facts: Facts, now: datetime) -> Wait | Move | RotationAction:
    if facts.state is RotationState.OVERLAP:
        return Move(RotationState.QUARANTINE, "in a hurry")
    return next_step(facts, now)


@pytest.mark.long
def test_service_simulation_notices_a_key_taken_away_in_use() -> None:
    """The simulator can fail on the real engine, too."""
    with mock.patch.object(engine, "next_step", _skip_silence):
        result = _run(1, 1_500)
    assert result.violation is not None
    assert "in a hurry" in result.violation.what
