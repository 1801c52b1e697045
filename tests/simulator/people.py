"""Operators and merchants: they request, approve, acknowledge, extend, waive, suspend, revoke and repair."""

from datetime import timedelta
from typing import TYPE_CHECKING

from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind, KeyState
from rotation.domain.cryptoperiods import next_date
from rotation.domain.events import OUTCOMES, Event, RotationState
from rotation.domain.plan_fields import Proof, default_of
from rotation.domain.policy import APPROVAL_LIFETIME, Plan
from rotation.domain.states import list_awaited_sources
from tests.simulator.evidence import gather_facts
from tests.simulator.planning import plan_reissue, plan_rotation
from tests.simulator.store import StoredCredential, StoredKey, StoredRotation

if TYPE_CHECKING:
    from tests.simulator.simulation import Simulation

S, K = RotationState, KeyState

HOUR = 3_600.0
DAY = 24 * HOUR


class People:
    """Everyone who acts by hand, and the schedules that they set."""

    def __init__(self, simulation: "Simulation") -> None:
        self._world, self._random = simulation, simulation.random
        self._numbers = 0

    # --- requests -------------------------------------------------------------------------------------------

    def plan_next(self, credential: StoredCredential, *, not_before: float = DAY) -> None:
        """Request the next rotation on the date that the schedule's terms give."""
        now = self._world.clock.now
        date = next_date(credential.terms, credential.credential_id, credential.keys[-1].activated_at)
        earliest = now + timedelta(seconds=self._random.uniform(0.5, 1.5) * not_before)
        self._world.scheduler.at(max(date.ask_at, earliest), lambda: self.request(credential))

    def request(self, credential: StoredCredential) -> None:
        world, now = self._world, self._world.clock.now
        world.touch(credential, "person")
        if credential.has_left or credential.open_rotation is not None:
            return
        usable = [key for key in credential.keys if key.is_usable(now)]
        if not usable:
            self._reissue(credential)
            return
        plan = plan_rotation(credential, usable[0], world.rules, self._random, now) if len(usable) == 1 else None
        if plan is None:
            world.counts["refused plans"] += 1
            self._later(10 * DAY, credential)
            return
        needs_approval = credential.environment is Environment.PRODUCTION
        self._open(credential, plan, usable[0], S.AWAITING_APPROVAL if needs_approval else S.SCHEDULED)

    def begin(self, credential: StoredCredential) -> StoredRotation | None:
        """Request a rotation for an approved campaign; None where the product refuses it."""
        world, now = self._world, self._world.clock.now
        usable = [key for key in credential.keys if key.is_usable(now)]
        if credential.has_left or credential.open_rotation is not None or len(usable) != 1:
            return None
        plan = plan_rotation(credential, usable[0], world.rules, self._random, now)
        return None if plan is None else self._open(credential, plan, usable[0], S.SCHEDULED)

    def _later(self, seconds: float, credential: StoredCredential) -> None:
        self._world.scheduler.after(self._random.uniform(0.5, 1.5) * seconds, lambda: self.request(credential))

    def _reissue(self, credential: StoredCredential) -> None:
        now = self._world.clock.now
        if any(not key.is_dead and not key.is_past(now) for key in credential.keys):
            self._later(DAY, credential)
            return
        latest = credential.keys[-1]
        self._open(credential, plan_reissue(credential, latest, now), latest, S.EMERGENCY)

    def _open(self, credential: StoredCredential, plan: Plan, key: StoredKey, state: RotationState) -> StoredRotation:
        world, now = self._world, self._world.clock.now
        self._numbers += 1
        rotation = StoredRotation(
            f"rot-{self._numbers}",
            credential,
            plan,
            key,
            state,
            entered_at=now,
            turned_at=now,
            approval_expires_at=now + APPROVAL_LIFETIME,
            deadline=plan.deadline,
        )
        credential.rotations.append(rotation)
        world.note(credential, f"{rotation.rotation_id} is requested: {state}")
        world.counts["rotations"] += 1
        rotation.has_approval = credential.environment is not Environment.PRODUCTION or state is S.SCHEDULED
        if not rotation.has_approval and self._random.random() < 0.95:
            hours = self._random.uniform(0.2, 4 if state is S.EMERGENCY else 120)
            world.scheduler.after(hours * HOUR, lambda: self._approve(rotation))
        world.traffic.start_new(credential)
        world.engine.wake(rotation)
        return rotation

    def _approve(self, rotation: StoredRotation) -> None:
        world, now = self._world, self._world.clock.now
        world.touch(rotation.credential, "person")
        if rotation.state not in {S.AWAITING_APPROVAL, S.EMERGENCY} or now >= rotation.approval_expires_at:
            return
        rotation.has_approval = True
        rotation.version += 1
        for name, fitting in (rotation.plan.late_sources or {}).items():
            if fitting is None and self._random.random() < 0.3:
                self._waive(rotation, name)
        if rotation.state is S.AWAITING_APPROVAL:
            rotation.state, rotation.entered_at = S.SCHEDULED, now
            world.note(rotation.credential, f"{rotation.rotation_id} is approved")
        world.engine.wake(rotation)

    # --- notifications of the service -----------------------------------------------------------------------

    def receive_notice(self, rotation: StoredRotation) -> None:
        """The merchant's webhook endpoint accepts the message, or all attempts are given up."""
        world = self._world

        def answer() -> None:
            world.touch(rotation.credential, "merchant")
            if self._random.random() < 0.9:
                rotation.notified_at = world.clock.now
            else:
                rotation.notification_failed = True
            world.engine.wake(rotation)

        world.scheduler.after(self._random.uniform(1, 600), answer)

    def receive_replacement(self, rotation: StoredRotation) -> None:
        """The merchant acknowledges with the replacement, or an operator confirms for it; some never respond."""
        proof = rotation.plan.proof
        if (proof is not Proof.TRAFFIC or rotation.plan.is_dormant) and self._random.random() < 0.9:
            hours = self._random.uniform(1, 240)
            self._world.scheduler.after(hours * HOUR, lambda: self._acknowledge(rotation))

    def _acknowledge(self, rotation: StoredRotation) -> None:
        world, now = self._world, self._world.clock.now
        world.touch(rotation.credential, "merchant")
        replacement = rotation.replacement
        if rotation.is_closed or rotation.rolls_back or replacement is None or not replacement.is_usable(now):
            return
        if rotation.plan.proof is Proof.CONFIRMATION:
            rotation.confirmed_at = now
        else:
            rotation.acknowledged_at = now
        rotation.version += 1
        world.note(rotation.credential, f"{rotation.rotation_id}: the replacement is acknowledged")
        if rotation.credential.kind is KeyKind.PUBLIC:
            rotation.retire_at = now + timedelta(days=self._random.randint(10, 60))
        world.engine.wake(rotation)

    def receive_stall(self, rotation: StoredRotation) -> None:
        self._world.scheduler.after(self._random.uniform(1, 72) * HOUR, lambda: self._resolve(rotation))

    def receive_end(self, rotation: StoredRotation) -> None:
        credential = rotation.credential
        if not credential.has_left:
            self.plan_next(credential, not_before=3 * DAY)

    # --- stalled rotations ----------------------------------------------------------------------------------

    def _resolve(self, rotation: StoredRotation) -> None:
        world, now = self._world, self._world.clock.now
        world.touch(rotation.credential, "person")
        if rotation.state is not S.STALLED or rotation.stalled_from is None:
            return
        for key in (rotation.predecessor, rotation.replacement):
            if key is not None and key.state is K.SUSPENDED and not key.is_past(now):
                self._set(rotation.credential, key, K.ACTIVE)
        rotation.notification_failed = False
        if rotation.notified_at is None and rotation.stalled_from is S.PUBLISHING:
            self.receive_notice(rotation)
        chance = self._random.random()
        if chance < 0.1:
            self._abort(rotation)
            return
        if rotation.deadline is not None and now >= rotation.deadline:
            if chance < 0.5:
                self._waive_awaited(rotation)
            else:
                self._find_forgotten(rotation.credential)
            if rotation.rolls_back:
                rotation.confirmed_at = now
            rotation.deadline = now + timedelta(days=self._random.randint(10, 90))
            world.note(rotation.credential, f"{rotation.rotation_id} is extended to {rotation.deadline:%Y-%m-%d}")
        if rotation.stage is S.AWAITING_PROOF:
            self.receive_replacement(rotation)
        rotation.state, rotation.stalled_from = rotation.stalled_from, None
        rotation.entered_at = rotation.turned_at = now
        rotation.wait = None
        rotation.version += 1
        world.note(rotation.credential, f"{rotation.rotation_id} is resumed: {rotation.state}")
        world.engine.wake(rotation)

    def _waive_awaited(self, rotation: StoredRotation) -> None:
        world, now = self._world, self._world.clock.now
        facts = gather_facts(rotation, world.verifiers.observe(now), world.rules, now)
        for source in list_awaited_sources(facts):
            self._waive(rotation, source.name)

    def _waive(self, rotation: StoredRotation, source: str) -> None:
        rotation.waived.add(source)
        rotation.version += 1
        self._world.counts["waived sources"] += 1
        self._world.note(rotation.credential, f"{rotation.rotation_id} waives {source}")

    def _find_forgotten(self, credential: StoredCredential) -> None:
        """Make every host of the merchant read the newest key at its next run."""
        for consumer in self._world.fleet.consumers_of(credential):
            for host in consumer.hosts:
                host.lag = timedelta() if host.lag is None else host.lag

    def _abort(self, rotation: StoredRotation) -> None:
        """Cancel before delivery, roll back afterwards; refused while a worker holds the rotation."""
        world, now, credential = self._world, self._world.clock.now, rotation.credential
        outcome = OUTCOMES[Event.ABORTED].get(rotation.stage)
        if rotation.leased_until is not None and rotation.leased_until > now:
            return
        predecessor, replacement = rotation.predecessor, rotation.replacement
        may_be_delivered = replacement is not None and replacement.has_copy
        if outcome is S.ROLLING_BACK or (outcome is S.CANCELLED and may_be_delivered):
            if predecessor.is_dead or predecessor.is_past(now):
                return
            if rotation.quarantined_at is not None and predecessor.state is K.SUSPENDED:
                self._set(credential, predecessor, K.ACTIVE)
            rotation.state, rotation.quarantined_at, rotation.written_back_at = S.ROLLING_BACK, None, None
            rotation.confirmed_at = None
            if rotation.deadline is not None:
                seconds = default_of("deadline", credential.environment) + rotation.plan.quiet_seconds
                rotation.deadline = now + timedelta(seconds=seconds)
        elif outcome is S.CANCELLED:
            if replacement is not None and not replacement.is_dead:
                self._set(credential, replacement, K.DEACTIVATED)
            rotation.state = S.CANCELLED
            self.receive_end(rotation)
        else:
            return
        rotation.stalled_from, rotation.entered_at, rotation.turned_at, rotation.wait = None, now, now, None
        rotation.version += 1
        world.counts[f"aborted: {rotation.state}"] += 1
        world.note(credential, f"{rotation.rotation_id} is aborted: {rotation.state}")
        world.engine.wake(rotation)

    # --- keys -----------------------------------------------------------------------------------------------

    def _set(self, credential: StoredCredential, key: StoredKey, state: KeyState) -> None:
        """Change a key's state by hand, if the product allows it; the engine is woken."""
        if self._world.rules.can_transition(key.state, state):
            self._world.set_key_state(credential, key, state, "person")
        self._world.wake(credential)

    def interfere(self, rotation: StoredRotation) -> None:
        """Act on a key while a worker is about to commit."""
        keys = [key for key in (rotation.predecessor, rotation.replacement) if key is not None]
        self._end(rotation.credential, self._random.choice(keys))

    def act(self, credential: StoredCredential) -> None:
        """Do one of the acts that people do at any time."""
        self._world.touch(credential, "person")
        rotation = credential.open_rotation
        chance = self._random.random()
        if chance < 0.25 and rotation is not None:
            self._abort(rotation)
        elif chance < 0.3 and rotation is None:
            self._offboard(credential)
        elif chance < 0.4:
            self._try_unknown(credential)
        else:
            self._end(credential, self._random.choice(credential.keys))

    def _end(self, credential: StoredCredential, key: StoredKey) -> None:
        state = self._random.choice((K.SUSPENDED, K.ACTIVE, K.DEACTIVATED, K.COMPROMISED))
        self._set(credential, key, state)
        if key.state is K.SUSPENDED and key.ended_by == "person":
            self._world.scheduler.after(self._random.uniform(1, 48) * HOUR, lambda: self._resume_key(credential, key))
        self._replace_last(credential)

    def _resume_key(self, credential: StoredCredential, key: StoredKey) -> None:
        self._world.touch(credential, "person")
        if key.state is K.SUSPENDED and key.ended_by == "person" and not key.is_past(self._world.clock.now):
            self._set(credential, key, K.ACTIVE)

    def _try_unknown(self, credential: StoredCredential) -> None:
        """Let an unknown client try a key in quarantine."""
        for key in credential.keys:
            if key.state is K.SUSPENDED:
                key.attempts["203.0.113.0/24 curl"] = self._world.clock.now
                self._world.wake(credential)

    def _offboard(self, credential: StoredCredential) -> None:
        credential.has_left = True
        self._world.note(credential, "the merchant is offboarded")
        for key in credential.keys:
            if not key.is_dead:
                self._set(credential, key, K.DEACTIVATED)

    def expire(self, credential: StoredCredential, key: StoredKey) -> None:
        """End a key whose expiry has come, as maintenance does."""
        self._world.touch(credential, "maintenance")
        if not key.is_dead:
            key.is_expired = True
            self._world.set_key_state(credential, key, K.DEACTIVATED, "maintenance")
            self._world.wake(credential)
            self._replace_last(credential)

    def _replace_last(self, credential: StoredCredential) -> None:
        """Request a key for a merchant that has none left."""
        if not credential.has_left and not any(key.is_usable(self._world.clock.now) for key in credential.keys):
            self._later(8 * HOUR, credential)
