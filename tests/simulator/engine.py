"""Workers over the store in memory: the loop of `rotation.services.rotations`, cut into steps that may interleave.

The decisions are the product's (`next_step`, its facts, the table of transitions). This module performs them on rows in
memory, as `engine`, `side_effects` and `transitions` do in the database. Each commit is one step. A worker may crash
before it, within it, or after it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from keyvault.domain.keys import KeyKind, KeyState
from rotation.domain.events import RotationState
from rotation.domain.plan_fields import DeliveryChannel
from rotation.domain.states import CLOSED, TRANSITIONS, Facts, Move, RotationAction, Wait
from tests.simulator.evidence import gather_facts
from tests.simulator.invariants import Commit
from tests.simulator.scheduler import Planned
from tests.simulator.store import StoredKey, StoredRotation

if TYPE_CHECKING:
    from tests.simulator.simulation import Simulation

S = RotationState

LEASE = timedelta(seconds=15)
DISPATCH_AGAIN = timedelta(seconds=30)
MAX_ATTEMPTS = 12
_TAKES_AWAY = frozenset({S.QUARANTINE, S.REVOKING, S.ROLLING_BACK, S.ROLLED_BACK})
_SHORTEST_POLL, _LONGEST_POLL = timedelta(seconds=2), timedelta(days=1)
ACCEPTED_WITHIN = 8.0


class SealedError(Exception):
    """The secret backend is sealed."""


class ConflictError(Exception):
    """Another writer was faster, or the other key is no longer usable."""


class CrashError(BaseException):
    """The worker's process ends here."""


@dataclass(slots=True, eq=False)
class Turn:
    """One worker's turn with a rotation. `held`: the replacement whose string only this worker has."""

    rotation: StoredRotation
    clock: Callable[[], datetime]
    token: int
    held: StoredKey | None = None


def find_due(wait: Wait, rotation: StoredRotation, now: datetime) -> datetime:
    """Return when the tick dispatches a waiting rotation next, unless an event does so before."""
    longest = _LONGEST_POLL if wait.until is None else max(wait.until - now, _SHORTEST_POLL)
    if rotation.deadline is not None and rotation.deadline > now:
        longest = min(longest, rotation.deadline - now)
    poll = now - rotation.entered_at if wait.until is None else longest
    return now + min(max(poll, _SHORTEST_POLL), longest)


class Engine:
    """The tick and the workers."""

    def __init__(self, simulation: "Simulation", clocks: list[Callable[[], datetime]]) -> None:
        self._world, self._random, self._clocks = simulation, simulation.random, clocks
        self._tokens = 0
        self._planned: dict[str, Planned] = {}

    # --- the tick and its messages --------------------------------------------------------------------------

    def wake(self, rotation: StoredRotation, at: datetime | None = None) -> None:
        """Make the rotation due at `at`, or now: an event happened."""
        due_at = at or self._world.clock.now
        if not rotation.is_closed and (rotation.due_at is None or due_at < rotation.due_at):
            self._set_due(rotation, due_at)

    def _set_due(self, rotation: StoredRotation, at: datetime) -> None:
        planned = self._planned.pop(rotation.rotation_id, None)
        if planned is not None:
            self._world.scheduler.cancel(planned)
        rotation.due_at = at
        self._planned[rotation.rotation_id] = self._world.scheduler.at(at, lambda: self._dispatch(rotation))

    def _dispatch(self, rotation: StoredRotation) -> None:
        """Send a message for a due rotation; it may be lost, doubled or late."""
        self._world.touch(rotation.credential, "tick")
        self._planned.pop(rotation.rotation_id, None)
        if rotation.is_closed:
            return
        if self._world.rules.dispatches_again:
            self._set_due(rotation, self._world.clock.now + DISPATCH_AGAIN)
        self._send(rotation)

    def _send(self, rotation: StoredRotation) -> None:
        chance = self._random.random()
        messages = 0 if chance < 0.02 else 2 if chance < 0.05 else 1
        self._world.counts[f"messages {('lost', 'sent', 'doubled')[messages]}"] += 1
        for _ in range(messages):
            delay = self._random.uniform(0, 20) if self._random.random() < 0.02 else 0.01
            self._world.scheduler.after(delay, lambda: self._begin(rotation))

    def _begin(self, rotation: StoredRotation) -> None:
        """Claim the rotation and decide; a message for one that is closed or claimed has no effect."""
        self._world.touch(rotation.credential, "engine")
        clock = self._random.choice(self._clocks)
        now = clock()
        if rotation.is_closed or (rotation.leased_until is not None and rotation.leased_until > now):
            return
        self._tokens += 1
        rotation.token, rotation.leased_until = self._tokens, now + LEASE
        rotation.attempts += 1
        self._decide(Turn(rotation, clock, self._tokens))

    # --- one turn -------------------------------------------------------------------------------------------

    def _decide(self, turn: Turn) -> None:
        """Ask the product for the next step and schedule its commit, before which anything may happen."""
        world, rotation, now = self._world, turn.rotation, turn.clock()
        world.touch(rotation.credential, "engine")
        if self._lost_lease(turn):
            return
        facts = gather_facts(rotation, world.verifiers.observe(now), world.rules, now)
        step = world.rules.next_step(facts, now)
        if isinstance(step, Wait):
            self._wait(turn, step, now)
            return
        version = rotation.version
        takes_away = isinstance(step, Move) and step.to in _TAKES_AWAY
        if self._random.random() < (world.options.races if takes_away else 0.004):
            world.people.interfere(rotation)
        # A paused worker resumes after its lease has expired.
        delay = self._random.uniform(16, 40) if self._random.random() < 0.003 else self._random.uniform(0.01, 0.3)
        world.scheduler.after(delay, lambda: self._commit(turn, facts, step, version))

    def _wait(self, turn: Turn, wait: Wait, now: datetime) -> None:
        rotation, held = turn.rotation, turn.held
        if rotation.state is S.STAGED and held is rotation.replacement and held is not None:
            missing = (held.accepted_at - now).total_seconds()
            if 0 < missing <= ACCEPTED_WITHIN:
                self._world.scheduler.after(missing, lambda: self._decide(turn))
                return
        rotation.wait, rotation.turned_at, rotation.attempts = wait, self._world.clock.now, 0
        self._release(turn)
        self._set_due(rotation, find_due(wait, rotation, self._world.clock.now))

    def _commit(self, turn: Turn, facts: Facts, step: Move | RotationAction, version: int) -> None:
        world, rotation = self._world, turn.rotation
        world.touch(rotation.credential, "engine")
        try:
            self._crash()
            if self._lost_lease(turn) or rotation.version != version:
                raise ConflictError
            before = rotation.credential.count_in_hand(world.clock.now)
            if isinstance(step, Move):
                self._move(rotation, facts, step, turn.clock())
            else:
                self._act(turn, turn.clock())
            world.step.note_commit(Commit(rotation, step, before, rotation.credential.count_in_hand(world.clock.now)))
            self._crash()
        except CrashError:
            world.note(rotation.credential, "the worker crashes")
            world.counts["worker crashes"] += 1
            return
        except SealedError:
            rotation.attempts = 0
            world.counts["steps that met a sealed backend"] += 1
            self._retry(turn, world.backend_opens_at + timedelta(seconds=self._random.uniform(1, 58)))
            return
        except ConflictError:
            world.counts["conflicts of workers"] += 1
            if not self._lost_lease(turn):
                self._fail(turn)
            return
        if rotation.is_closed:
            return
        self._decide(turn)

    def _crash(self) -> None:
        if self._random.random() < 0.004:
            raise CrashError

    def _lost_lease(self, turn: Turn) -> bool:
        return turn.rotation.token != turn.token

    def _release(self, turn: Turn) -> None:
        turn.rotation.token, turn.rotation.leased_until = 0, None

    def _retry(self, turn: Turn, at: datetime) -> None:
        if not self._lost_lease(turn):
            self._release(turn)
            turn.rotation.turned_at = self._world.clock.now
            self._set_due(turn.rotation, at)

    def _fail(self, turn: Turn) -> None:
        rotation = turn.rotation
        if rotation.attempts >= MAX_ATTEMPTS:
            if S.STALLED in TRANSITIONS[rotation.state]:
                self._stop(rotation, S.STALLED, "a step kept failing", self._world.clock.now)
            rotation.alarmed_at = self._world.clock.now
        backoff = min(60, 2 ** min(rotation.attempts, 10))
        self._retry(turn, self._world.clock.now + timedelta(seconds=backoff))

    # --- side effects ---------------------------------------------------------------------------------------

    def _act(self, turn: Turn, now: datetime) -> None:
        rotation = turn.rotation
        match rotation.state:
            case S.SCHEDULED | S.EMERGENCY:
                self._stage(turn, now)
            case S.PUBLISHING:
                self._publish(turn, now)
            case S.ROLLING_BACK:
                self._write_back(rotation, now)
                rotation.written_back_at = rotation.entered_at = now
            case _:
                self._require_backend()
                rotation.predecessor.has_copy = False
        rotation.version += 1

    def _require_backend(self) -> None:
        if self._world.clock.now < self._world.backend_opens_at:
            raise SealedError

    def _stage(self, turn: Turn, now: datetime) -> None:
        self._require_backend()
        rotation, world = turn.rotation, self._world
        credential = rotation.credential
        if rotation.replacement is not None and not rotation.replacement.is_dead:
            world.set_key_state(rotation.credential, rotation.replacement, KeyState.DEACTIVATED, "engine")
        days = rotation.plan.expires_in_days
        key = StoredKey(
            f"key-{credential.number}-{len(credential.keys)}",
            now,
            world.clock.now + timedelta(seconds=self._random.uniform(0.1, 6)),
            None if days is None else now + timedelta(days=days),
        )
        credential.keys.append(key)
        world.step.note_new_key(credential)
        turn.held = rotation.replacement = key
        self._enter(rotation, S.STAGED, "the replacement is made", now)
        if key.expires_at is not None:
            world.scheduler.at(key.expires_at, lambda: world.people.expire(credential, key))

    def _publish(self, turn: Turn, now: datetime) -> None:
        rotation = turn.rotation
        key, credential = rotation.replacement, rotation.credential
        assert key is not None
        self._require_backend()
        if turn.held is not key and not key.has_copy:
            # Its string is lost with the worker that made it.
            self._stage(turn, now)
            return
        credential.in_backend, credential.in_backend_since = key, self._world.clock.now
        key.has_copy = key.is_delivered = True
        self._crash()
        rotation.delivered_at = now
        self._world.note(credential, f"{key.key_id} is delivered")
        if DeliveryChannel.WEBHOOK in rotation.plan.channels:
            self._world.people.receive_notice(rotation)

    def _write_back(self, rotation: StoredRotation, now: datetime) -> None:
        self._require_backend()
        predecessor = rotation.predecessor
        if predecessor.has_copy and not predecessor.is_dead:
            credential = rotation.credential
            credential.in_backend, credential.in_backend_since = predecessor, self._world.clock.now
            self._world.note(rotation.credential, f"{predecessor.key_id} is written back")

    # --- transitions ----------------------------------------------------------------------------------------

    def _move(self, rotation: StoredRotation, facts: Facts, step: Move, now: datetime) -> None:
        if step.to not in TRANSITIONS[rotation.state]:
            raise ConflictError
        if step.to is S.CANCELLED or (step.to is S.ROLLED_BACK and rotation.written_back_at is None):
            if rotation.quarantined_at is not None and rotation.state is not S.ROLLING_BACK:
                self._lift(rotation, now)
                rotation.version += 1
            if rotation.replacement is not None:
                self._write_back(rotation, now)
        match step.to:
            case S.PUBLISHING:
                self._lift(rotation, now)
                rotation.delivered_at = rotation.written_back_at = None
            case S.AWAITING_PROOF:
                rotation.notified_at = now
            case S.OVERLAP if facts.state is S.QUARANTINE:
                self._lift(rotation, now)
                rotation.reinstated_at = rotation.alarmed_at = now
                self._world.counts["predecessors reinstated"] += 1
            case S.OVERLAP:
                rotation.used_at = now
            case S.QUARANTINE:
                self._require_living(rotation.replacement, now)
                self._take_away(rotation, rotation.predecessor, KeyState.SUSPENDED)
                rotation.quarantined_at = now
                rotation.silence_waived = step.event is not None or facts.kind is KeyKind.PUBLIC
                rotation.tried_at = None
            case S.REVOKING:
                self._require_living(rotation.replacement, now)
                self._take_away(rotation, rotation.predecessor, KeyState.DEACTIVATED)
            case S.ROLLING_BACK:
                self._require_living(rotation.predecessor, now)
                assert rotation.replacement is not None
                self._take_away(rotation, rotation.replacement, KeyState.SUSPENDED)
                rotation.quarantined_at = now
                rotation.tried_at = None
            case S.ROLLED_BACK if rotation.replacement is not None and not rotation.replacement.is_dead:
                self._require_living(rotation.predecessor, now)
                self._take_away(rotation, rotation.replacement, KeyState.DEACTIVATED)
        self._stop(rotation, step.to, step.why, now)

    def _stop(self, rotation: StoredRotation, to: RotationState, why: str, now: datetime) -> None:
        """Enter a state. One that stops the rotation undoes its quarantine and notifies operators."""
        if to in {S.CANCELLED, S.STALLED, S.COMPLETED} and rotation.state is not S.REVOKING:
            self._lift(rotation, now)
        if to is S.STALLED:
            rotation.stalled_from = S.OVERLAP if rotation.state is S.QUARANTINE else rotation.state
        self._enter(rotation, to, why, now)
        if to is S.STALLED:
            rotation.alarmed_at = self._world.clock.now
            self._world.people.receive_stall(rotation)
        elif to is S.AWAITING_PROOF:
            self._world.people.receive_replacement(rotation)
        elif to in CLOSED:
            self._world.people.receive_end(rotation)

    def _enter(self, rotation: StoredRotation, to: RotationState, why: str, now: datetime) -> None:
        was = rotation.state
        rotation.state, rotation.why, rotation.entered_at = to, why, now
        rotation.version += 1
        rotation.turned_at = self._world.clock.now
        self._world.counts[f"rotation {to}"] += 1
        self._world.note(rotation.credential, f"{rotation.rotation_id}: {was} to {to}: {why}")

    def _take_away(self, rotation: StoredRotation, key: StoredKey, state: KeyState) -> None:
        if state is KeyState.SUSPENDED:
            key.attempts = {}
        self._world.set_key_state(rotation.credential, key, state, "engine")

    def _lift(self, rotation: StoredRotation, now: datetime) -> None:
        key = rotation.retiring
        if rotation.quarantined_at is None:
            return
        if key is not None and key.state is KeyState.SUSPENDED and not key.is_past(now):
            self._world.set_key_state(rotation.credential, key, KeyState.ACTIVE, "engine")
        rotation.quarantined_at = None

    def _require_living(self, key: StoredKey | None, now: datetime) -> None:
        if self._world.rules.requires_living_key and (key is None or not key.is_usable(now)):
            raise ConflictError
