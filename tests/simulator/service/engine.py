"""The workers of the real engine. The only place that calls `advance_rotation` and knows when a turn is due."""

from datetime import datetime
from typing import TYPE_CHECKING

from django.db.models import Min

from keyvault.domain.keys import KeyState
from keyvault.models import WorkLease
from rotation.domain.events import Event, RotationState
from rotation.domain.states import Move, Wait
from rotation.services.rotations.engine import advance_rotation
from rotation.services.rotations.turns import dispatch_due
from tests.killing import KilledError
from tests.rotation.machine.watching import ViolationError
from tests.simulator.engine import Engine
from tests.simulator.invariants import Commit, Step
from tests.simulator.scheduler import Planned
from tests.simulator.service.interruption import TurnInterruption
from tests.simulator.store import StoredKey, StoredRotation

if TYPE_CHECKING:
    from tests.simulator.service.simulation import ServiceSimulation

S = RotationState

_STATEMENTS_OF_A_TURN = 150


class ServiceEngine(Engine):
    """Ticks when a row of the queue is due, sends its messages, and takes the turns, which may be interrupted."""

    _world: "ServiceSimulation"
    _tick_at: datetime | None = None
    _tick: Planned | None = None

    def wake(self, rotation: StoredRotation, at: datetime | None = None) -> None:
        """Do nothing: the services make rotations due themselves."""

    def plan_tick(self) -> None:
        """Schedule the tick for the earliest row that is due. An allowed use changes no row of the queue."""
        if self._world.step.actor == "consumer" and not self._world.step.refusals:
            return
        rows = WorkLease.objects.exclude(queue="").filter(due_at__isnull=False)
        due_at = rows.aggregate(at=Min("due_at"))["at"]
        if due_at == self._tick_at:
            return
        if self._tick is not None:
            self._world.scheduler.cancel(self._tick)
        self._tick_at = due_at
        self._tick = None if due_at is None else self._world.scheduler.at(due_at, self._dispatch_due)

    def _dispatch_due(self) -> None:
        """Send a message for each due rotation; it may be lost, doubled or late."""
        world = self._world
        world.touch(None, "tick")
        self._tick = self._tick_at = None
        due: list[str] = []
        dispatch_due(lambda: world.clock.now, lambda turn: due.append(turn.rotation_id))
        # The database returns them in any order.
        for rotation in sorted((world.rotations[each] for each in due), key=lambda each: each.credential.number):
            self._send(rotation)

    def _begin(self, rotation: StoredRotation) -> None:
        world, credential = self._world, rotation.credential
        world.touch(credential, "engine")
        if rotation.is_closed:
            return
        world.report_uses()
        hand = {key for key in credential.keys if key.is_delivered and key.is_usable(world.clock.now)}
        state = rotation.state
        wait = self._turn(rotation)
        world.refresh(credential, "engine")
        after = 0 if _took_last(hand, world.step) else 1
        for move in _list_moves(rotation, state):
            world.step.note_commit(Commit(rotation, move, 1, after))
        if wait is not None:
            rotation.wait, rotation.turned_at = wait, world.clock.now

    def _turn(self, rotation: StoredRotation) -> Wait | None:
        world, clock = self._world, self._random.choice(self._clocks)
        try:
            with self._draw_interruption(rotation).under_way(world.backend):
                return advance_rotation(rotation.rotation_id, clock, is_dispatched=True)
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
        clock = self._random.choice(self._clocks)
        dispatch_due(clock, lambda turn: advance_rotation(turn.rotation_id, clock, is_dispatched=True))


def _took_last(hand: set[StoredKey], step: Step) -> bool:
    """Whether the engine took the last of the keys in hand, in the order of the step's changes; people may take it."""
    changed = {key for key, _, _, _ in step.changes}
    kept = [] if step.credential is None else step.credential.keys
    hand = hand | {key for key in kept if key.is_delivered and key.is_usable(step.now) and key not in changed}
    for key, _, state, by in step.changes:
        if state is KeyState.ACTIVE:
            hand.add(key)
        elif key in hand:
            hand.discard(key)
            if not hand and by == "engine":
                return True
    return False


def _list_moves(rotation: StoredRotation, was: RotationState) -> list[Move]:
    """List the moves of a turn that take the predecessor away, as far as the states before and after show them."""
    moves = []
    event = Event.DEADLINE if rotation.silence_waived else None
    if was is S.OVERLAP and rotation.state is S.QUARANTINE:
        moves.append(Move(S.QUARANTINE, rotation.why, event))
    is_revoked = rotation.predecessor.is_dead and rotation.predecessor.ended_by == "engine"
    if was in {S.OVERLAP, S.QUARANTINE} and is_revoked:
        moves.append(Move(S.REVOKING, rotation.why))
    return moves or [Move(rotation.state, rotation.why)]
