"""A small share of `make simulate ARGS=engine`, and a run with a rule that is broken on purpose."""

from datetime import datetime
from functools import partial
from unittest import mock

import pytest

from rotation.domain.events import RotationState
from rotation.domain.states import Facts, Move, RotationAction, Wait, next_step
from rotation.services.rotations import engine
from tests.simulator.fleet import FleetOptions
from tests.simulator.report import format_result
from tests.simulator.service.place import service
from tests.simulator.service.simulation import ServiceSimulation
from tests.simulator.simulation import SimulationResult

pytestmark = pytest.mark.django_db

SMALL = FleetOptions(credentials=3, forgotten=0, sandbox=1)
"""In the sandbox every request is approved, and every period is short."""


def _run(seed: int, steps: int) -> SimulationResult:
    """Run from the request of a rotation of each credential."""
    with service() as backend:
        simulation = ServiceSimulation(seed, backend, SMALL)
        for credential in simulation.fleet.credentials:
            simulation.scheduler.after(1, partial(simulation.people.request, credential))
        return simulation.run(steps)


def test_service_simulation_violates_nothing() -> None:
    result = _run(1, 60)
    assert result.violation is None, format_result(result, result.at, 0)
    assert result.counts["rotation awaiting_proof"]


def _skip_quarantine(facts: Facts, now: datetime) -> Wait | Move | RotationAction:
    if facts.state is RotationState.QUARANTINE:
        return Move(RotationState.REVOKING, "in a hurry")
    return next_step(facts, now)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_service_simulation_notices_a_skipped_quarantine() -> None:
    """The simulator can fail on the real engine, too. The run ends with the violation, mostly after 1,000 steps."""
    with mock.patch.object(engine, "next_step", _skip_quarantine):
        result = _run(7, 10_000)
    assert result.violation is not None
    assert "without a whole quarantine" in result.violation.what
