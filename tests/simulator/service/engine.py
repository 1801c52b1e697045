"""The workers of the real engine. The only place that calls `advance_rotation` and knows when a turn is due."""

from typing import TYPE_CHECKING

from rotation.domain.events import Event, RotationState
from rotation.domain.states import Move, Wait
from rotation.services.rotations.engine import advance_rotation
from tests.killing import KilledError
from tests.rotation.machine.watching import ViolationError
from tests.simulator.engine import Engine, find_due
from tests.simulator.invariants import Commit
from tests.simulator.service.interruption import TurnInterruption
from tests.simulator.store import StoredRotation

if TYPE_CHECKING:
    from tests.simulator.service.simulation import ServiceSimulation

S = RotationState

_STATEMENTS_OF_A_TURN = 150


class ServiceEngine(Engine):
    """Dispatches as the engine in memory does; each turn is one call of the service, which may be interrupted."""

    _world: "ServiceSimulation"

    def _begin(self, rotation: StoredRotation) -> None:
        world, credential = self._world, rotation.credential
        world.touch(credential, "engine")
        if rotation.is_closed:
            return
        world.report_uses()
        before, state = credential.count_in_hand(world.clock.now), rotation.state
        wait = self._turn(rotation)
        world.refresh(credential, "engine")
        for move in _list_moves(rotation, state):
            world.step.note_commit(Commit(rotation, move, before, credential.count_in_hand(world.clock.now)))
        if wait is not None:
            rotation.wait, rotation.turned_at = wait, world.clock.now
            if not rotation.is_closed:
                self._set_due(rotation, find_due(wait, rotation, world.clock.now))
        elif world.backend.is_down:
            self._set_due(rotation, world.draw_reopening())

    def _turn(self, rotation: StoredRotation) -> Wait | None:
        world, clock = self._world, self._random.choice(self._clocks)
        try:
            with self._draw_interruption(rotation).under_way(world.backend):
                return advance_rotation(rotation.rotation_id, clock)
        except KilledError:
            world.counts["worker crashes"] += 1
            world.note(rotation.credential, "the worker crashes")
        except ViolationError as error:
            world.step.faults.append(str(error))
        return None

    def _draw_interruption(self, rotation: StoredRotation) -> TurnInterruption:
        chance, at = self._random.random(), self._random.randint(1, _STATEMENTS_OF_A_TURN)
        if chance < 0.1:
            return TurnInterruption(at)
        if chance < 0.2:
            return TurnInterruption(at, lambda: self._world.interfere(rotation))
        if chance < 0.23:
            return TurnInterruption(at, lambda: self._take_over(rotation))
        return TurnInterruption(0, lambda: None)

    def _take_over(self, rotation: StoredRotation) -> None:
        """Pause the worker until its lease has expired, while another one takes the rotation over."""
        self._world.pass_time(self._random.uniform(16, 40))
        self._world.counts["workers overtaken"] += 1
        advance_rotation(rotation.rotation_id, self._random.choice(self._clocks))


def _list_moves(rotation: StoredRotation, was: RotationState) -> list[Move]:
    """List the moves of a turn that take the predecessor away, as far as the states before and after show them."""
    moves = []
    event = Event.DEADLINE if rotation.silence_waived else None
    if was is S.OVERLAP and rotation.state is S.QUARANTINE:
        moves.append(Move(S.QUARANTINE, rotation.why, event))
    if was is S.QUARANTINE and rotation.predecessor.is_dead and rotation.predecessor.ended_by == "engine":
        moves.append(Move(S.REVOKING, rotation.why))
    return moves or [Move(rotation.state, rotation.why)]
