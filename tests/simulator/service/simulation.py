"""The simulation over the real services: rows in PostgreSQL, a secret backend in memory, one virtual clock."""

from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER
from keyvault.access.roles import Role
from keyvault.backends.base import Mount
from keyvault.domain.environments import Environment
from keyvault.domain.errors import KeyvaultError
from keyvault.domain.keys import KeyState, RetirementReason
from keyvault.models import Credential, Key, Notice, UsageReporter
from keyvault.models.usage import UseOutcome
from keyvault.services.recording.authorization import authorize
from keyvault.services.secrets.stored_copies import (
    copy_subject,
    destroy_string,
    list_to_destroy,
    list_unsettled,
    settle_string,
)
from keyvault.services.usage.recorder import UsageLog
from keyvault.services.usage.recorder import Uses as Counts
from keyvault.services.usage.retention import forget_old, roll_up
from keyvault.services.work import leases
from rotation.domain.events import RotationState
from rotation.models import Rotation
from rotation.services.rotations.facts import list_waived
from tests.factories import the_operator
from tests.rotation import scene
from tests.rotation.machine.backend import MemoryBackend
from tests.simulator.fleet import Consumer, FleetOptions, SimulatedFleet, Uses
from tests.simulator.rules import Rules
from tests.simulator.service.engine import ServiceEngine
from tests.simulator.service.people import ServicePeople
from tests.simulator.simulation import Simulation
from tests.simulator.store import StoredCredential, StoredKey, StoredRotation
from tests.simulator.verifiers import Verifier, VerifierFleet

S = RotationState
MINUTE = timedelta(minutes=1)
_VERIFIERS, _WORKERS = 2, 3


class ReportingVerifier(Verifier):
    """A verifier with the product's usage log, which reports before anything reads the uses, instead of each second.

    `allowed`: uses that the next report has. The truth learns of them with it.
    """

    def __init__(self, name: str, clock: Callable[[], datetime]) -> None:
        super().__init__(name, clock)
        self.log = UsageLog(now=clock, reporter_id=f"simulated-{name}")
        self.log.add_counter(self._take)
        self.allowed: list[Uses] = []
        self._counted: list[Counts] = []
        now = self.clock()
        UsageReporter.objects.create(
            reporter_id=self.log.reporter_id, started_at=now, flushed_through_at=now, peppers={}
        )

    def count(self, key_id: str, source: str, at: datetime, outcome: UseOutcome, count: int = 1) -> None:
        """Count uses in one minute, as the verifier's engine does."""
        caller, _, product = source.partition(" ")
        client, seconds = (caller.replace("0/24", "7"), f"{product}/1.0"), at.timestamp()
        self._counted.append((key_id, "orders.create", *client, "", outcome.value, count, seconds, seconds))

    def _take(self) -> list[Counts]:
        counted, self._counted = self._counted, []
        return counted

    def report(self) -> None:
        """Report, unless the database cannot be reached."""
        if self.cut_since is not None:
            return
        self.log.flush()
        allowed, self.allowed = self.allowed, []
        for uses in allowed:
            uses.report()

    def cut(self) -> None:
        self.report()
        super().cut()


class RememberingFleet(SimulatedFleet):
    """Keeps the uses of the time before the simulation, which it reports to the service once the rows exist."""

    def remember(self, consumer: Consumer, key: StoredKey, first_at: datetime, last_at: datetime) -> None:
        super().remember(consumer, key, first_at, last_at)
        self.uses = [*getattr(self, "uses", []), (first_at, key, consumer), (last_at, key, consumer)]


class ServiceSimulation(Simulation):
    """Mirrors the rows of a credential after each step, and judges the mirror by the same invariants."""

    engine: ServiceEngine

    def __init__(self, seed: int, backend: MemoryBackend, options: FleetOptions, rules: Rules | None = None) -> None:
        self.backend = backend
        self._ids: dict[StoredKey, str] = {}
        self._keys: dict[str, StoredKey] = {}
        self._rows: dict[int, Credential] = {}
        self.rotations: dict[str, StoredRotation] = {}
        self.operators = {
            "tam": the_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER),
            "approver": the_operator("approver", Role.APPROVER),
            "admin": the_operator("admin", Role.KEY_ADMINISTRATOR),
            "responder": the_operator("responder", Role.INCIDENT_RESPONDER),
        }
        super().__init__(seed, options, rules)

    def _make_service(self) -> None:
        fleet = RememberingFleet(self.random, self.options, self.clock.now)
        self.fleet, self.people = fleet, ServicePeople(self)
        self.verifiers = VerifierFleet(_VERIFIERS, self._start_verifier)
        self.engine = ServiceEngine(self, [self.draw_clock() for _ in range(_WORKERS)])
        for credential in fleet.credentials:
            self._issue(credential)
        self._report_history(fleet)

    def _issue(self, credential: StoredCredential) -> None:
        (key,) = credential.keys
        account = scene.account(f"merchant-{credential.number}", credential.environment)
        row, _ = scene.issue(account, key.activated_at, kind=credential.kind)
        self._rows[credential.number] = row.credential
        self._ids[key], self._keys[row.key_id] = row.key_id, key
        key.expires_at = row.expires_at

    def _report_history(self, fleet: RememberingFleet) -> None:
        verifier = ReportingVerifier("history", self.draw_clock())
        for at, key, consumer in sorted(getattr(fleet, "uses", []), key=lambda use: use[0]):
            verifier.count(self._ids[key], consumer.source, at, UseOutcome.ALLOWED)
        verifier.log.flush(is_final=True)

    def _start_verifier(self, number: int) -> ReportingVerifier:
        return ReportingVerifier(str(number), self.draw_clock())

    # --- what the parts use ---------------------------------------------------------------------------------

    def row_of(self, credential: StoredCredential) -> Credential:
        return self._rows[credential.number]

    def id_of(self, key: StoredKey) -> str:
        return self._ids[key]

    def pass_time(self, seconds: float) -> None:
        self.clock.advance_to(self.clock.now + timedelta(seconds=seconds))

    def interfere(self, rotation: StoredRotation) -> None:
        """Let a person act between two transactions of a worker."""
        self.refresh(rotation.credential, "engine")
        self.people.interfere(rotation)

    def report_uses(self) -> None:
        """Let every verifier report, before anything reads the uses or the time up to which they are complete."""
        for verifier in self.verifiers.verifiers:
            assert isinstance(verifier, ReportingVerifier)
            verifier.report()

    def record_uses(self, uses: Uses, verifier: Verifier) -> None:
        assert isinstance(verifier, ReportingVerifier)
        key_id, source = self._ids[uses.key], uses.consumer.source
        minutes = (uses.last_at - uses.first_at) // MINUTE + 1
        for minute in range(minutes):
            at = uses.first_at + minute * MINUTE
            verifier.count(key_id, source, at, UseOutcome.ALLOWED, -(-uses.count // minutes))
        verifier.note(lambda: verifier.allowed.append(uses))

    def record_attempt(self, consumer: Consumer, key: StoredKey, verifier: Verifier) -> None:
        self._note_attempt(verifier, key, consumer.source)

    def try_key(self, key: StoredKey, source: str, product: str) -> None:
        self._note_attempt(self.random.choice(self.verifiers.verifiers), key, f"{source} {product}")

    def _note_attempt(self, verifier: Verifier, key: StoredKey, source: str) -> None:
        assert isinstance(verifier, ReportingVerifier)
        verifier.count(self._ids[key], source, verifier.clock(), UseOutcome.REFUSED)
        verifier.note(verifier.report)

    def _begin(self) -> None:
        super()._begin()
        self._repeat(7 * 86_400, self._maintain)

    def _maintain(self) -> None:
        """Roll usage up, delete expired rows, and reconcile the backend's copies with the rows."""
        self.report_uses()
        now = self.clock.now
        roll_up(now)
        forget_old(now)
        for environment in Environment:
            grant = authorize(WORKER, P.ISSUANCE_EXECUTE, scene.account("merchant-0", environment), now=now)
            for key in list_to_destroy(environment):
                with suppress(KeyvaultError):
                    destroy_string(grant, key)
            for key in list_unsettled(environment):
                lease = leases.claim(copy_subject(key), now, ignore_due_at=True)
                if lease is not None:
                    with suppress(KeyvaultError):
                        settle_string(grant, key, lease, lambda: now)
                    leases.release(lease)

    def _check(self) -> str | None:
        found = super()._check()
        self.engine.plan_tick()
        return found

    def _start_campaign(self) -> None:
        """Start none: its approvals would need a fleet of one account."""

    def _seal(self) -> None:
        super()._seal()
        self.backend.is_down = True
        self.scheduler.at(self.backend_opens_at, self._unseal)

    def _unseal(self) -> None:
        self.touch(None, "fault")
        self.backend.is_down = False

    # --- the mirror -----------------------------------------------------------------------------------------

    def add_rotation(self, credential: StoredCredential, row: Rotation) -> None:
        rotation = StoredRotation(
            row.rotation_id,
            credential,
            row.approved_plan,
            self._keys[row.predecessor_id],
            row.current_state,
            entered_at=row.entered_at,
            turned_at=self.clock.now,
            approval_expires_at=row.approval_expires_at,
            deadline=row.deadline_at,
        )
        credential.rotations.append(rotation)
        self.rotations[rotation.rotation_id] = rotation
        self.counts["rotations"] += 1
        self.note(credential, f"rotation {len(credential.rotations)} is requested: {rotation.state}")

    def refresh(self, credential: StoredCredential, by: str) -> None:
        """Mirror the credential's rows; `by`: who changed them since the last time."""
        for row in Key.objects.filter(credential=self._rows[credential.number]).order_by("created_at"):
            self._mirror_key(credential, row, by)
        path, mount = self._rows[credential.number].backend_path, Mount(credential.environment.value)
        newest = self.backend.newest(mount, path)
        read = None if newest is None else self._keys.get(newest.labels.get("key_id", ""))
        if read is not None and read is not credential.in_backend:
            credential.in_backend, credential.in_backend_since = read, self.clock.now
            self.note(credential, f"{read.key_id} is in the backend")
        if credential.rotations and not credential.rotations[-1].is_closed:
            self._mirror_rotation(credential.rotations[-1], by)

    def _mirror_key(self, credential: StoredCredential, row: Key, by: str) -> None:
        key, state = self._keys.get(row.key_id), KeyState(row.state)
        if key is None:
            name = f"key-{credential.number}-{len(credential.keys)}"
            key = StoredKey(name, row.created_at, row.created_at, row.expires_at, state)
            self._keys[row.key_id], self._ids[key] = key, row.key_id
            credential.keys.append(key)
            self.step.note_new_key(credential)
            if row.expires_at is not None:
                self._expire_later(credential, key, row.expires_at)
        elif key.state is not state:
            self.step.changes.append((key, key.state, state, by))
            self.counts[f"keys {state} by {by}"] += 1
            self.note(credential, f"{key.key_id}: {key.state} to {state} by {by}")
            key.state, key.ended_by = state, by
        key.is_expired = row.retirement == RetirementReason.EXPIRED
        key.is_delivered = key.is_delivered or row.key_id in self.backend.delivered

    def _mirror_rotation(self, rotation: StoredRotation, by: str) -> None:
        row = Rotation.objects.get(pk=rotation.rotation_id)
        was = rotation.state
        rotation.state = row.current_state
        rotation.stalled_from = None if row.stalled_from is None else S(row.stalled_from)
        rotation.replacement = None if row.replacement_id is None else self._keys[row.replacement_id]
        if by != "engine":
            # Only people approve and waive.
            rotation.has_approval = row.bypassed_at is not None or row.approvals.count() >= row.approvals_needed
            rotation.waived = list_waived(row, row.predecessor)
        rotation.entered_at, rotation.why, rotation.deadline = row.entered_at, row.why, row.deadline_at
        rotation.used_at, rotation.quarantined_at = row.used_at, row.quarantined_at
        rotation.reinstated_at, rotation.silence_waived = row.reinstated_at, row.waived_at is not None
        alarm = Notice.objects.filter(subject=rotation.rotation_id, is_alarm=True).order_by("created_at").last()
        rotation.alarmed_at = None if alarm is None else alarm.created_at
        if rotation.state is was:
            return
        rotation.turned_at, rotation.wait = self.clock.now, None
        if rotation.state is S.QUARANTINE:
            rotation.tried_at = None
        self.counts[f"rotation {rotation.state}"] += 1
        self.note(
            rotation.credential, f"rotation {len(rotation.credential.rotations)}: {was} to {rotation.state}: {row.why}"
        )
        if rotation.state is S.STALLED:
            self.people.receive_stall(rotation)
        elif rotation.state is S.AWAITING_PROOF:
            self.people.receive_replacement(rotation)
        elif rotation.is_closed:
            self.people.receive_end(rotation)
