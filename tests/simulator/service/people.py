"""The same people as in memory, who act through the services."""

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER
from keyvault.domain.environments import Environment
from keyvault.domain.errors import KeyvaultError
from keyvault.domain.keys import KeyKind, KeyState
from keyvault.domain.revocation import RevocationReason
from keyvault.services.keys import lifecycle
from keyvault.services.recording.authorization import authorize
from rotation.domain.events import RotationState
from rotation.domain.plan_fields import DeliveryChannel, Proof
from rotation.services.rotations import interventions, planning, requests
from rotation.services.rotations.reports import find_waits, get_rotation
from tests.rotation import scene
from tests.simulator.people import HOUR, People
from tests.simulator.planning import LATEST, choose_overrides
from tests.simulator.store import StoredCredential, StoredKey, StoredRotation

if TYPE_CHECKING:
    from tests.simulator.service.simulation import ServiceSimulation

S, K = RotationState, KeyState


class ServicePeople(People):
    """Each act is a call of a service. A refusal with a reason is counted; anything else ends the simulation."""

    _world: "ServiceSimulation"

    def _attempt(self, credential: StoredCredential, act: Callable[[], object], by: str = "person") -> bool:
        world = self._world
        world.report_uses()
        try:
            act()
        except KeyvaultError as error:
            world.counts[f"refused: {type(error).__name__}"] += 1
            world.note(credential, f"refused: {error.detail}")
            is_done = False
        else:
            is_done = True
        world.refresh(credential, by)
        world.wake(credential)
        return is_done

    def _grant(self, credential: StoredCredential, who: str, permission: P, requester: str | None = None) -> Grant:
        world = self._world
        account = world.row_of(credential).account
        return authorize(world.operators[who], permission, account, now=world.clock.now, requester_person=requester)

    # --- requests -------------------------------------------------------------------------------------------

    def request(self, credential: StoredCredential) -> None:
        world = self._world
        world.touch(credential, "person")
        if credential.open_rotation is not None:
            return
        usable = [key for key in credential.keys if key.is_usable(world.clock.now)]
        act = (lambda: self._rotate(credential, usable[0])) if usable else (lambda: self._reissue(credential))
        if not self._attempt(credential, act):
            self._later(10 * 24 * HOUR, credential)
            return
        rotation = credential.open_rotation
        if rotation is None:
            return
        world.traffic.start_new(credential)
        if credential.environment is Environment.PRODUCTION and self._random.random() < 0.95:
            hours = self._random.uniform(0.2, 4 if rotation.state is S.EMERGENCY else 120)
            world.scheduler.after(hours * HOUR, lambda: self._approve(rotation))

    def _rotate(self, credential: StoredCredential, key: StoredKey) -> None:
        now, row = self._world.clock.now, self._world.row_of(credential)
        overrides = replace(
            choose_overrides(credential, key, self._random),
            channels=(DeliveryChannel.SECRET_BACKEND,),
            window=credential.terms.window,
        )
        late = planning.plan_rotation(row, overrides, now).late_sources or {}
        fitting = [datetime.fromisoformat(at) for at in late.values() if at is not None]
        if fitting and self._random.random() < 0.5:
            overrides = replace(overrides, deadline=min(max(fitting), now + LATEST))
        rotation = requests.request_rotation(self._grant(credential, "tam", P.ROTATIONS_WRITE), row, overrides)
        self._world.add_rotation(credential, rotation)

    def _reissue(self, credential: StoredCredential) -> None:
        grant, row = self._grant(credential, "tam", P.ROTATIONS_WRITE), self._world.row_of(credential)
        self._world.add_rotation(credential, requests.reissue_key(grant, row, "it has no key left"))

    def _approve(self, rotation: StoredRotation) -> None:
        credential = rotation.credential
        self._world.touch(credential, "person")

        def approve() -> None:
            row = get_rotation(rotation.rotation_id)
            grant = self._grant(credential, "approver", P.ROTATIONS_APPROVE, row.requester_person)
            requests.approve_rotation(grant, row, row.plan_digest)

        self._attempt(credential, approve)

    # --- the replacement ------------------------------------------------------------------------------------

    def _acknowledge(self, rotation: StoredRotation) -> None:
        credential = rotation.credential
        self._world.touch(credential, "merchant")
        replacement = rotation.replacement
        if rotation.is_closed or replacement is None or not replacement.is_usable(self._world.clock.now):
            return
        if rotation.plan.proof is Proof.CONFIRMATION:
            self._attempt(credential, lambda: self._confirm(rotation))
        else:
            self._attempt(credential, lambda: self._present(rotation))
        if credential.kind is KeyKind.PUBLIC:
            self._attempt(credential, lambda: self._retire(rotation))

    def _present(self, rotation: StoredRotation) -> None:
        row = get_rotation(rotation.rotation_id)
        assert row.replacement is not None
        now, account = self._world.clock.now, row.credential.account
        grant = authorize(scene.holder_of(row.replacement), P.ROTATIONS_ACKNOWLEDGE, account, now=now)
        interventions.acknowledge(grant, row)

    def _confirm(self, rotation: StoredRotation) -> None:
        grant = self._grant(rotation.credential, "tam", P.ROTATIONS_WRITE)
        interventions.confirm_rotation(grant, get_rotation(rotation.rotation_id), "their CTO, by phone")

    def _retire(self, rotation: StoredRotation) -> None:
        credential, row = rotation.credential, get_rotation(rotation.rotation_id)
        at = self._world.clock.now + timedelta(days=self._random.randint(10, 60))
        asked = interventions.request_retirement(self._grant(credential, "tam", P.ROTATIONS_WRITE), row, at)
        if asked.approved_at is None:
            grant = self._grant(credential, "approver", P.ROTATIONS_APPROVE, asked.requester_person)
            interventions.approve_retirement(grant, asked)

    # --- stalled rotations ----------------------------------------------------------------------------------

    def _resolve(self, rotation: StoredRotation) -> None:
        world, credential = self._world, rotation.credential
        world.touch(credential, "person")
        if rotation.state is not S.STALLED:
            return
        for key in (rotation.predecessor, rotation.replacement):
            if key is not None and key.state is K.SUSPENDED and not key.is_past(world.clock.now):
                self._set(credential, key, K.ACTIVE)
        chance = self._random.random()
        if chance < 0.1:
            self._abort(rotation)
            return
        if rotation.deadline is not None and world.clock.now >= rotation.deadline:
            if chance < 0.5:
                self._waive_awaited(rotation)
            else:
                self._find_forgotten(credential)
            if rotation.rolls_back:
                self._attempt(credential, lambda: self._confirm(rotation))
            self._attempt(credential, lambda: self._extend(rotation))
        if rotation.stage is S.AWAITING_PROOF:
            self.receive_replacement(rotation)
        if rotation.state is S.STALLED:
            grant = self._grant(credential, "tam", P.ROTATIONS_WRITE)
            self._attempt(credential, lambda: interventions.resume_rotation(grant, get_rotation(rotation.rotation_id)))

    def _extend(self, rotation: StoredRotation) -> None:
        until = self._world.clock.now + timedelta(days=self._random.randint(10, 90))
        grant = self._grant(rotation.credential, "tam", P.ROTATIONS_WRITE)
        interventions.extend_rotation(grant, get_rotation(rotation.rotation_id), until)

    def _waive_awaited(self, rotation: StoredRotation) -> None:
        credential = rotation.credential
        awaited = find_waits(get_rotation(rotation.rotation_id), self._world.clock.now).awaited
        for name in [source.name for source in awaited]:
            if self._attempt(credential, lambda name=name: self._waive_source(rotation, name)):  # type: ignore[misc]  # bound now
                rotation.waived.add(name)
                self._world.counts["waived sources"] += 1

    def _waive_source(self, rotation: StoredRotation, name: str) -> None:
        grant = self._grant(rotation.credential, "tam", P.ROTATIONS_WRITE)
        interventions.waive_source(grant, get_rotation(rotation.rotation_id), name, "it has ended, says their CTO")

    def _abort(self, rotation: StoredRotation) -> None:
        grant = self._grant(rotation.credential, "tam", P.ROTATIONS_WRITE)
        row = get_rotation(rotation.rotation_id)
        self._attempt(rotation.credential, lambda: interventions.abort_rotation(grant, row, "changed our minds"))

    # --- keys -----------------------------------------------------------------------------------------------

    def _set(self, credential: StoredCredential, key: StoredKey, state: KeyState) -> None:
        world = self._world
        row = lifecycle.get_key(world.id_of(key))
        if row is None or not world.rules.can_transition(key.state, state):
            return
        acts: dict[KeyState, Callable[[], object]] = {
            K.ACTIVE: lambda: lifecycle.resume_key(self._grant(credential, "admin", P.KEYS_RESUME), row),
            K.SUSPENDED: lambda: lifecycle.suspend_key(self._grant(credential, "admin", P.KEYS_SUSPEND), row),
            K.DEACTIVATED: lambda: lifecycle.revoke_key(
                self._grant(credential, "responder", P.KEYS_REVOKE), row, RevocationReason.CESSATION_OF_OPERATION
            ),
            K.COMPROMISED: lambda: lifecycle.report_compromise(
                self._grant(credential, "responder", P.KEYS_REPORT_COMPROMISE), row
            ),
        }
        self._attempt(credential, acts[state])

    def _offboard(self, credential: StoredCredential) -> None:
        """Merchants stay: the fleet is small."""

    def _try_unknown(self, credential: StoredCredential) -> None:
        """Let an unknown client try a key in quarantine."""
        for key in credential.keys:
            if key.state is K.SUSPENDED:
                self._world.try_key(key, "203.0.113.66", "curl")
                self._world.wake(credential)

    def expire(self, credential: StoredCredential, key: StoredKey) -> None:
        world = self._world
        world.touch(credential, "maintenance")
        row = lifecycle.get_key(world.id_of(key))
        if row is not None and not key.is_dead:
            grant = authorize(WORKER, P.ISSUANCE_EXECUTE, row.credential.account, now=world.clock.now)
            self._attempt(credential, lambda: lifecycle.expire_key(grant, row), "maintenance")
            self._replace_last(credential)
