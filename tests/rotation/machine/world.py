"""A credential, its rotations, the operators, a clock, two verifiers and a failing secret backend.

Everything uses the real services. The actual uses are recorded beside the reported ones, so the engine's decisions can
be compared with the truth.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER
from keyvault.access.roles import Role
from keyvault.domain.environments import Environment
from keyvault.domain.errors import KeyvaultError
from keyvault.domain.keys import KeyKind, KeyState
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Account, Credential, Key, Merchant, UsageReporter
from keyvault.models.usage import UseOutcome
from keyvault.services.keys import lifecycle
from keyvault.services.merchants import merchants
from keyvault.services.recording.authorization import authorize
from keyvault.services.secrets.stored_copies import (
    copy_subject,
    destroy_string,
    list_to_destroy,
    list_unsettled,
    settle_string,
)
from keyvault.services.usage.recorder import UsageLog
from keyvault.services.work import leases
from rotation.domain.events import RotationState
from rotation.domain.plan_fields import PlanOverrides, Proof
from rotation.domain.states import CLOSED, Wait
from rotation.models import Rotation
from rotation.services.rotations import interventions, requests
from rotation.services.rotations.engine import advance_rotation
from rotation.services.rotations.reports import find_waits, get_rotation
from tests.clocks import Clock
from tests.factories import the_operator
from tests.rotation import scene
from tests.rotation.machine.backend import BackendFault, MemoryBackend
from tests.rotation.machine.interrupting import Interruption
from tests.rotation.machine.watching import Watcher

S = RotationState
START = datetime(2026, 11, 21, 12, tzinfo=UTC)
KNOWN, UNKNOWN = ("192.0.2.1", "198.51.100.2"), "203.0.113.66"
"""Source addresses of the merchant's machines, and of an attacker who found a key."""

PERIOD = timedelta(seconds=601)
"""One second more than the quiet period of every plan here, which exceeds the quarantine."""


@dataclass(frozen=True)
class Variant:
    """The kind of key to rotate, and its plan."""

    name: str
    overrides: PlanOverrides
    environment: Environment = Environment.SANDBOX
    kind: KeyKind = KeyKind.PRIVATE
    expires_in_days: int | None = None
    is_used: bool = True


@dataclass
class Use:
    """One actual call with a key."""

    key_id: str
    at: datetime
    source: str
    outcome: UseOutcome
    verifier: str
    is_reported: bool = False


@dataclass
class MachineWorld:
    variant: Variant
    backend: MemoryBackend
    clock: Clock = field(default_factory=lambda: Clock(START))
    uses: list[Use] = field(default_factory=list)
    logs: list[UsageLog] = field(default_factory=list)
    rotation_ids: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    credential_id: str = ""
    history: list[str] = field(default_factory=list)
    last_wait: Wait | None = None
    is_suspended: bool = False
    resumed: dict[str, datetime] = field(default_factory=dict)
    """When operators last resumed each key, by its id, and the merchant."""

    def __post_init__(self) -> None:
        self.people = {
            "tam": the_operator("tam", Role.TECHNICAL_ACCOUNT_MANAGER),
            "approver": the_operator("approver", Role.APPROVER),
            "admin": the_operator("admin", Role.KEY_ADMINISTRATOR),
            "responder": the_operator("responder", Role.INCIDENT_RESPONDER),
        }
        self.watcher = Watcher(self)

    # --- creation -----------------------------------------------------------------------------------------------

    def create(self) -> None:
        """Create a credential with one good key, used before where the variant requires it, and two verifiers."""
        place = scene.account("acme", self.variant.environment)
        chosen = {"kind": self.variant.kind, "expires_in_days": self.variant.expires_in_days}
        key, _ = scene.issue(place, self.clock(), **chosen)
        self.credential_id = key.credential_id
        self._credential: Credential = key.credential
        self.account: Account = key.credential.account
        for _ in range(2):
            self.start_verifier()
        self.backend.on_call = self.watcher.on_backend_call
        if self.variant.is_used:
            self.use(0, KNOWN[0], 0)
            self.clock.tick(61)
            self.flush()
        self.ask()
        self.watcher.check("people")

    def copied(self) -> "MachineWorld":
        """Copy everything for a scene except the rows, which a savepoint keeps."""
        again = replace(
            self,
            clock=Clock(self.clock.now),
            uses=[replace(use) for use in self.uses],
            logs=[],
            rotation_ids=list(self.rotation_ids),
            counts=Counter(),
            resumed=dict(self.resumed),
            history=[],
        )
        # A live reporter's memory is empty in a scene: everything is flushed. Its reports are numbered on.
        again.logs = [
            UsageLog(now=again.clock, reporter_id=log.reporter_id, _reports=log._reports) for log in self.logs
        ]
        again._credential, again.account = self._credential, self.account
        again.backend.on_call = again.watcher.on_backend_call
        again.watcher.take_over(self.watcher)
        return again

    # --- current state ------------------------------------------------------------------------------------------

    @property
    def now(self) -> datetime:
        return self.clock()

    @property
    def rotation(self) -> Rotation:
        """Return the latest rotation."""
        return get_rotation(self.rotation_ids[-1])

    @property
    def state(self) -> RotationState:
        return self.watcher.rotations[self.rotation_ids[-1]].state

    @property
    def is_open(self) -> bool:
        return self.state not in CLOSED

    def key_ids(self) -> list[str]:
        """Return the predecessor of the latest rotation, and its replacement if it exists."""
        return self.watcher.rotations[self.rotation_ids[-1]].key_ids

    def grant(self, who: str, permission: P, requester_person: str | None = None) -> Grant:
        return authorize(self.people[who], permission, self.account, now=self.now, requester_person=requester_person)

    # --- the engine ---------------------------------------------------------------------------------------------

    def work(self) -> None:
        self.last_wait = advance_rotation(self.rotation_ids[-1], self.clock)

    def engine(self, act: Callable[[], object], interruption: Interruption | None = None) -> None:
        """Run an engine step, watched as one unit, or as several when it is interrupted."""
        self.watcher.in_engine = True
        try:
            if interruption is None:
                act()
            else:
                with interruption.under_way(self.backend):
                    act()
        finally:
            self.watcher.in_engine = False
        if interruption is not None and interruption.has_happened:
            self.counts["died" if interruption.is_dead else "audit refused" if interruption.refuses else "met"] += 1
        self.watcher.check("engine")

    def meanwhile(self, act: Callable[[], object]) -> Callable[[], None]:
        """Run another actor between two transactions of a worker."""

        def met() -> None:
            self.watcher.check("engine")
            self.watcher.in_engine = False
            self.people_do(act)
            self.watcher.in_engine = True

        return met

    def sweep(self) -> None:
        """Run maintenance: record expired keys and update their copies in the backend."""
        for key in lifecycle.list_expired(self.now):
            with suppress(KeyvaultError):
                lifecycle.expire_key(authorize(WORKER, P.ISSUANCE_EXECUTE, key.credential.account, now=self.now), key)
        for key in list_to_destroy(self.variant.environment):
            with suppress(KeyvaultError):
                destroy_string(self._maintenance_grant(), key)
        for key in list_unsettled(self.variant.environment):
            lease = leases.claim(copy_subject(key), self.now, ignore_due_at=True)
            if lease is not None:
                with suppress(KeyvaultError):
                    settle_string(self._maintenance_grant(), key, lease, lambda: self.now)
                leases.release(lease)

    def _maintenance_grant(self) -> Grant:
        return authorize(WORKER, P.ISSUANCE_EXECUTE, self.account, now=self.now)

    # --- people -------------------------------------------------------------------------------------------------

    def people_do(self, act: Callable[[], object]) -> bool:
        """Return whether the act was permitted; any outcome other than a reasoned refusal is a violation."""
        try:
            act()
        except KeyvaultError as error:
            self.counts[f"refused: {type(error).__name__}"] += 1
            done = False
        else:
            done = True
        self.watcher.check("people")
        return done

    def ask(self) -> None:
        rotation = requests.request_rotation(self.grant("tam", P.ROTATIONS_WRITE), self.credential(), self.overrides())
        self.rotation_ids.append(rotation.rotation_id)

    def overrides(self) -> PlanOverrides:
        """Return the variant's plan, with times counted from now."""
        overrides = self.variant.overrides
        if overrides.deadline is None:
            return overrides
        return replace(overrides, deadline=self.now + (overrides.deadline - START))

    def reissue(self) -> None:
        rotation = requests.reissue_key(self.grant("tam", P.ROTATIONS_WRITE), self.credential(), "it has no key left")
        self.rotation_ids.append(rotation.rotation_id)

    def credential(self) -> Credential:
        return self._credential

    def approve(self) -> None:
        rotation = self.rotation
        grant = self.grant("approver", P.ROTATIONS_APPROVE, rotation.requester_person)
        requests.approve_rotation(grant, rotation, rotation.plan_digest)

    def bypass(self) -> None:
        rotation = self.rotation
        requests.bypass_rotation(
            self.grant("admin", P.ROTATIONS_BYPASS), rotation, rotation.plan_digest, "it cannot wait"
        )

    def reject(self) -> None:
        rotation = self.rotation
        grant = self.grant("approver", P.ROTATIONS_APPROVE, rotation.requester_person)
        requests.reject_rotation(grant, rotation, "not today")

    def abort(self) -> None:
        interventions.abort_rotation(self.grant("tam", P.ROTATIONS_WRITE), self.rotation, "changed our minds")

    def resume_stalled(self) -> None:
        interventions.resume_rotation(self.grant("tam", P.ROTATIONS_WRITE), self.rotation)

    def extend(self, days: int = 30) -> None:
        rotation = self.rotation
        until = max(self.now, rotation.deadline_at or self.now) + timedelta(days=days)
        interventions.extend_rotation(self.grant("tam", P.ROTATIONS_WRITE), rotation, until)

    def waive(self) -> None:
        """Waive every source that the latest rotation waits for."""
        rotation = self.rotation
        for awaited in find_waits(rotation, self.now).awaited:
            grant = self.grant("tam", P.ROTATIONS_WRITE)
            interventions.waive_source(grant, self.rotation, awaited.name, "it has ended, says their CTO")

    def confirm(self) -> None:
        interventions.confirm_rotation(self.grant("tam", P.ROTATIONS_WRITE), self.rotation, "their CTO, by phone")

    def retire(self, seconds: int = 60) -> None:
        """Request a public key's retirement, and approve it by a second person where necessary."""
        rotation = self.rotation
        until = self.now + timedelta(seconds=seconds)
        asked = interventions.request_retirement(self.grant("tam", P.ROTATIONS_WRITE), rotation, until)
        if asked.approved_at is None:
            grant = self.grant("approver", P.ROTATIONS_APPROVE, asked.requester_person)
            interventions.approve_retirement(grant, asked)

    def acknowledge(self) -> None:
        """Acknowledge as the merchant, with the replacement, if it is good and readable."""
        key = self.rotation.replacement
        if key is None or key.key_id not in self.backend.delivered or not self.watcher.is_good(key.key_id):
            return
        self.use(1, KNOWN[0], 0, endpoint="credentials.acknowledge")
        grant = authorize(scene.holder_of(key), P.ROTATIONS_ACKNOWLEDGE, self.account, now=self.now)
        interventions.acknowledge(grant, self.rotation)

    def revoke(self, which: int) -> None:
        """A revocation always takes effect immediately, whatever the backend and the worker are doing."""
        self._end(which, P.KEYS_REVOKE, lifecycle.revoke_key, RevocationReason.CESSATION_OF_OPERATION)

    def compromise(self, which: int) -> None:
        self._end(which, P.KEYS_REPORT_COMPROMISE, lifecycle.report_compromise)

    def _end(self, which: int, permission: P, end: Callable[..., object], *args: Any) -> None:
        key = self.key(which)
        if key is None:
            return
        end(self.grant("responder", permission), key, *args)
        fresh = self.key(which)
        assert fresh is not None
        self.watcher.require(not self.watcher.is_living(fresh.state), "5: a key that was revoked by hand lives")

    def suspend(self, which: int) -> None:
        key = self.key(which)
        if key is not None:
            lifecycle.suspend_key(self.grant("admin", P.KEYS_SUSPEND), key)

    def resume(self, which: int) -> None:
        key = self.key(which)
        if key is not None:
            lifecycle.resume_key(self.grant("admin", P.KEYS_RESUME), key)
            self.resumed[key.key_id] = self.now

    def suspend_merchant(self) -> None:
        """Suspend the merchant. Its clients stop until it is resumed."""
        merchants.suspend_merchant(self._grant_of_merchant(), self._read_merchant())
        self.is_suspended = True

    def resume_merchant(self) -> None:
        merchants.resume_merchant(self._grant_of_merchant(), self._read_merchant())
        self.is_suspended, self.resumed["merchant"] = False, self.now

    def _grant_of_merchant(self) -> Grant:
        return authorize(self.people["admin"], P.MERCHANTS_WRITE, now=self.now)

    def _read_merchant(self) -> Merchant:
        return Merchant.objects.get(pk=self.account.merchant_id)

    def key(self, which: int) -> Key | None:
        ids = self.key_ids()
        return lifecycle.get_key(ids[which]) if which < len(ids) else None

    # --- traffic and verifiers ----------------------------------------------------------------------------------

    def use(self, which: int, source: str, verifier: int, count: int = 1, endpoint: str = "orders.create") -> None:
        """Use one of the two keys, decided as verifiers decide it, and reported later or never."""
        ids = self.key_ids() if self.rotation_ids else list(self.watcher.keys) or [self._only_key()]
        if which >= len(ids) or self.is_suspended:
            return
        key_id = ids[which]
        if self.watcher.is_good(key_id):
            outcome = UseOutcome.ALLOWED
        elif self.watcher.state_of(key_id) == KeyState.SUSPENDED:
            outcome = UseOutcome.REFUSED
        else:
            return
        log = self.logs[verifier]
        for _ in range(count):
            log.note(key_id, source=source, user_agent="shop/1", endpoint=endpoint, outcome=outcome)
        self.uses.append(Use(key_id, self.now, source, outcome, log.reporter_id))

    def _only_key(self) -> str:
        self.watcher.check("people")
        return next(iter(self.watcher.keys))

    def flush(self, verifier: int | None = None) -> None:
        for log in self.logs if verifier is None else [self.logs[verifier]]:
            log.flush()
            for use in self.uses:
                if use.verifier == log.reporter_id:
                    use.is_reported = True

    def start_verifier(self) -> None:
        log = UsageLog(now=self.clock)
        UsageReporter.objects.create(
            reporter_id=log.reporter_id, started_at=self.now, flushed_through_at=self.now, peppers={}
        )
        self.logs.append(log)

    def lose_verifier(self, verifier: int) -> None:
        """Kill a verifier with its unreported uses; another one replaces it."""
        lost = self.logs.pop(verifier)
        self.uses = [use for use in self.uses if use.is_reported or use.verifier != lost.reporter_id]
        self.start_verifier()

    # --- time ---------------------------------------------------------------------------------------------------

    def pass_time(self, seconds: float) -> None:
        self.clock.tick(seconds)

    def pass_quietly(self, seconds: float) -> None:
        """Let time pass while the verifiers report, the replacement carries the traffic, and the workers run."""
        half = seconds / 2
        for part in (half, seconds - half):
            self.clock.tick(part)
            self.use(1, KNOWN[0], 0)
            self.flush()
        self.engine(self.work)

    def fail_next(self, *faults: BackendFault) -> None:
        self.backend.faults.extend(faults)

    def prove(self) -> None:
        """Provide every proof that the plan may require."""
        for source in KNOWN:
            self.use(1, source, 0, count=3)
        self.clock.tick(6)
        self.use(1, KNOWN[0], 1)
        self.flush()
        plan = self.rotation.approved_plan
        if plan.proof in {Proof.ACK, Proof.BOTH}:
            self.people_do(self.acknowledge)
        if plan.proof is Proof.CONFIRMATION or plan.is_dormant:
            self.people_do(self.confirm)

    # --- the end ------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """End all faults and let time pass: no rotation may hang without naming what it waits for.

        The first wait exceeds every possible clock correction, lease and pause.
        """
        self.backend.clear_faults()
        for seconds in (917, 61, 61):
            self.clock.tick(seconds)
            self.flush()
            self.engine(self.work)
            if self.last_wait is not None:
                break
        self.watcher.require_nothing_hangs()
        self.sweep()
        self.watcher.check("people")
        self.watcher.require_copies_as_the_rows_say()

    def finish(self) -> None:
        """Let operators do what each state requires, until every rotation ends."""
        for _ in range(14):
            if not self.is_open:
                break
            self.counts[f"finishing {self.state}"] += 1
            self._help()
            self.clock.tick(3)
            self.flush()
            self.engine(self.work)
        self.watcher.require(
            not self.is_open, f"eventually: it is still {self.state}, which waits for {self.last_wait}"
        )

    def _help(self) -> None:
        if self.is_suspended:
            self.people_do(self.resume_merchant)
        for which in (0, 1):
            if self.watcher.is_suspended_by_people(which):
                self.people_do(partial(self.resume, which))
        match self.state:
            case S.REQUESTED | S.AWAITING_APPROVAL | S.EMERGENCY:
                self.people_do(self.approve)
            case S.STALLED:
                self.people_do(self.extend)
                self.people_do(self.resume_stalled)
            case S.AWAITING_PROOF:
                self.prove()
            case S.OVERLAP if self.variant.kind is KeyKind.PUBLIC:
                self.people_do(self.retire)
                self.pass_quietly(PERIOD.total_seconds())
            case S.ROLLING_BACK:
                self.people_do(self.waive)
                self.use(0, KNOWN[0], 0)
                self.clock.tick(PERIOD.total_seconds() / 2)
                self.use(0, KNOWN[0], 0)
                self.flush()
                self.clock.tick(PERIOD.total_seconds() / 2)
                self.flush()
            case _:
                self.people_do(self.waive)
                self.pass_quietly(PERIOD.total_seconds())


PEOPLE: dict[str, Callable[[MachineWorld], object]] = {
    "revoke predecessor": lambda world: world.revoke(0),
    "revoke replacement": lambda world: world.revoke(1),
    "compromise predecessor": lambda world: world.compromise(0),
    "compromise replacement": lambda world: world.compromise(1),
    "suspend predecessor": lambda world: world.suspend(0),
    "suspend replacement": lambda world: world.suspend(1),
    "resume predecessor": lambda world: world.resume(0),
    "resume replacement": lambda world: world.resume(1),
    "suspend merchant": MachineWorld.suspend_merchant,
    "resume merchant": MachineWorld.resume_merchant,
    "abort": MachineWorld.abort,
    "resume stalled": MachineWorld.resume_stalled,
    "extend": MachineWorld.extend,
    "acknowledge": MachineWorld.acknowledge,
    "confirm": MachineWorld.confirm,
    "waive": MachineWorld.waive,
    "approve": MachineWorld.approve,
    "ask again": MachineWorld.ask,
    "reissue": MachineWorld.reissue,
}
"""What operators do at any time, also in the middle of a worker's step."""
