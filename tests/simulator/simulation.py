"""One simulation: a fleet, its people, the service and its faults, driven by one seed."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from random import Random

from keyvault.domain.keys import KeyState
from rotation.domain.pacing import Pace
from tests.simulator.campaign import SimulatedCampaign
from tests.simulator.clock import VirtualClock
from tests.simulator.engine import ConflictError, Engine
from tests.simulator.fleet import Consumer, FleetOptions, SimulatedFleet, Uses
from tests.simulator.invariants import INVARIANTS, Step, judge_stuck
from tests.simulator.people import People
from tests.simulator.rules import Rules
from tests.simulator.scheduler import Scheduler
from tests.simulator.store import StoredCredential, StoredKey
from tests.simulator.traffic import ConsumerTraffic
from tests.simulator.verifiers import Verifier, VerifierFleet

WORKERS, VERIFIERS = 4, 4
_MAX_SKEW_SECONDS = 3.0
_AUDIT_SECONDS = 24 * 3_600.0
_ACT_SECONDS = 6_000_000.0
"""Mean time between two manual acts on one credential."""


@dataclass(frozen=True, slots=True)
class Violation:
    """What an invariant found. `events`: the last events of the credential."""

    step: int
    at: datetime
    what: str
    events: tuple[str, ...]


@dataclass(slots=True)
class SimulationResult:
    """The end of a simulation."""

    seed: int
    steps: int
    at: datetime
    counts: Counter[str] = field(default_factory=Counter)
    violation: Violation | None = None


class Simulation:
    """The run of one seed, one step at a time."""

    def __init__(self, seed: int, options: FleetOptions | None = None, rules: Rules | None = None) -> None:
        self.seed, self.options, self.rules = seed, options or FleetOptions(), rules or Rules()
        self.random, self.clock, self.counts = Random(seed), VirtualClock(), Counter[str]()  # noqa: S311  a simulation, replayed by its seed
        self.scheduler = Scheduler(self.clock, self.random)
        self.began_at = self.backend_opens_at = self._calm_since = self.clock.now
        self.step = Step()
        self.people, self.traffic = People(self), ConsumerTraffic(self)
        self._make_service()
        self._begin()

    def run(self, steps: int) -> SimulationResult:
        """Run the steps, or as many as pass without a violation."""
        number, found = 0, None
        while number < steps and found is None:
            number += 1
            self.step = Step()
            self.scheduler.run_next()
            self.counts[f"steps of {self.step.actor}"] += 1
            self.step.now, self.step.calm_since = self.clock.now, self._calm_since
            found = self._check()
        if found is not None:
            credential = self.step.credential
            events = () if credential is None else tuple(credential.events)
            violation = Violation(number, self.clock.now, found, events)
            return SimulationResult(self.seed, number, self.clock.now, self.counts, violation)
        return SimulationResult(self.seed, number, self.clock.now, self.counts)

    def _make_service(self) -> None:
        """Make the fleet and the service."""
        self.verifiers = VerifierFleet(VERIFIERS, self._start_verifier)
        self.engine = Engine(self, [self.draw_clock() for _ in range(WORKERS)])
        self.fleet = SimulatedFleet(self.random, self.options, self.clock.now)

    def _start_verifier(self, number: int) -> Verifier:
        return Verifier(f"verifier {number}", self.draw_clock())

    # --- what every part uses -------------------------------------------------------------------------------

    def touch(self, credential: StoredCredential | None, actor: str) -> None:
        """Name the credential that this step acts on, and the actor."""
        if self.step.credential is not None:
            return
        self.step.credential, self.step.actor = credential, actor
        if credential is not None:
            self.step.consumers = self.fleet.consumers_of(credential)

    def note(self, credential: StoredCredential, text: str) -> None:
        credential.events.append(f"{self.clock.now:%Y-%m-%d %H:%M:%S} {text}")

    def wake(self, credential: StoredCredential) -> None:
        """Wake the engine: a key of the credential changed, or was used in quarantine."""
        if credential.open_rotation is not None:
            self.engine.wake(credential.open_rotation)

    def set_key_state(self, credential: StoredCredential, key: StoredKey, state: KeyState, by: str) -> None:
        """Change a key's state; `by`: who does it. Raises ConflictError where the product refuses it."""
        was = key.state
        if not self.rules.can_transition(was, state):
            raise ConflictError
        key.state, key.ended_by = state, by
        self.step.changes.append((key, was, state, by))
        self.counts[f"keys {state} by {by}"] += 1
        self.note(credential, f"{key.key_id}: {was} to {state} by {by}")

    def record_uses(self, uses: Uses, verifier: Verifier) -> None:
        """Let the verifier count uses that it allowed."""
        verifier.note(uses.report)

    def record_attempt(self, consumer: Consumer, key: StoredKey, verifier: Verifier) -> None:
        """Let the verifier count an attempt with a suspended key, which wakes the engine."""
        key.attempts[consumer.source] = verifier.clock()
        self.wake(consumer.credential)

    # --- set-up and faults ----------------------------------------------------------------------------------

    def draw_clock(self) -> Callable[[], datetime]:
        return self.clock.skewed(timedelta(seconds=self.random.uniform(-_MAX_SKEW_SECONDS, _MAX_SKEW_SECONDS)))

    def _begin(self) -> None:
        for credential in self.fleet.credentials:
            self.people.plan_next(credential, not_before=self.random.uniform(0, 60) * 86_400)
            for consumer in self.fleet.consumers_of(credential):
                self.traffic.start(consumer)
            key = credential.keys[0]
            if key.expires_at is not None:
                self._expire_later(credential, key, key.expires_at)
        self.scheduler.after(_AUDIT_SECONDS, self._audit)
        self._repeat(9 * 86_400, self._seal)
        self._repeat(4 * 86_400, self._cut_verifier)
        self._repeat(11 * 86_400, self._kill_verifier)
        self._repeat(45 * 86_400, self._start_campaign)
        self._repeat(_ACT_SECONDS / self.options.credentials, self._act)

    def _expire_later(self, credential: StoredCredential, key: StoredKey, at: datetime) -> None:
        self.scheduler.at(at, lambda: self.people.expire(credential, key))

    def _repeat(self, mean_seconds: float, act: Callable[[], None]) -> None:
        """Repeat `act` at random intervals."""

        def again() -> None:
            self.touch(None, "fault")
            act()
            self.scheduler.after(self.random.expovariate(1 / mean_seconds), again)

        self.scheduler.after(self.random.expovariate(1 / mean_seconds), again)

    def _seal(self) -> None:
        self.backend_opens_at = self.clock.now + timedelta(hours=self.random.uniform(0.1, 12))
        self._calm_since = self.backend_opens_at

    def _cut_verifier(self) -> None:
        verifier = self.random.choice(self.verifiers.verifiers)
        verifier.cut()
        self.scheduler.after(self.random.uniform(2, 1_800), lambda: self._reconnect(verifier))

    def _reconnect(self, verifier: Verifier) -> None:
        self.touch(None, "fault")
        verifier.reconnect()

    def _kill_verifier(self) -> None:
        place = self.random.randrange(len(self.verifiers.verifiers))
        self.verifiers.verifiers[place].cut()
        seconds = self.random.uniform(0, 600)
        dead = self.verifiers.verifiers[place]
        self.scheduler.after(seconds, lambda: self._replace(dead))

    def _replace(self, dead: Verifier) -> None:
        self.touch(None, "fault")
        if dead in self.verifiers.verifiers:
            lost = self.verifiers.replace(self.verifiers.verifiers.index(dead))
            self.counts["lost reports of uses"] += lost

    def _start_campaign(self) -> None:
        credentials = self.fleet.credentials
        members = self.random.sample(credentials, min(len(credentials) // 4, 60))
        pace = Pace(per_minute=self.random.randint(5, 30), concurrency=self.random.randint(3, 30))
        SimulatedCampaign(self, members, pace).tick()

    def _act(self) -> None:
        self.people.act(self.random.choice(self.fleet.credentials))

    # --- invariants -----------------------------------------------------------------------------------------

    def _check(self) -> str | None:
        for invariant in INVARIANTS:
            for fault in invariant(self.step):
                return fault
        return None

    def _audit(self) -> None:
        """Check every open rotation, because one without events may be stuck."""
        self.touch(None, "audit")
        self.scheduler.after(_AUDIT_SECONDS, self._audit)
        for credential in self.fleet.credentials:
            rotation = credential.open_rotation
            if rotation is not None and any(judge_stuck(rotation, self.clock.now, self._calm_since)):
                self.step.credential = credential
                return
