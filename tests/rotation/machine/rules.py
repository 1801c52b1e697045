"""The Hypothesis state machine: what may happen to the world next, in any order."""

from collections import Counter
from contextlib import nullcontext
from typing import Any, ClassVar

from django.db import connection, transaction
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from rotation.domain.events import RotationState
from tests.rotation.machine.backend import BackendFault
from tests.rotation.machine.interrupting import Interruption
from tests.rotation.machine.scenes import SavedScene
from tests.rotation.machine.watching import ViolationError
from tests.rotation.machine.world import KNOWN, PEOPLE, PERIOD, UNKNOWN, MachineWorld

S = RotationState
DAY = 86_400

points = st.one_of(st.integers(1, 25), st.integers(1, 90))
"""Number of events of a worker's step at which an interruption may occur; a step of one transition has about fifty."""

acts = st.sampled_from(sorted(PEOPLE))
OVERTAKING = ("worker", "worker", "abort", "revoke replacement")
which = st.sampled_from([0, 1])
verifiers = st.sampled_from([0, 1])
sources = st.sampled_from([*KNOWN, UNKNOWN])


class SequenceTally:
    """The totals of many sequences."""

    def __init__(self) -> None:
        self.sequences = self.steps = 0
        self.counts: Counter[str] = Counter()
        self.violations: list[str] = []

    def add(self, other: "SequenceTally") -> None:
        self.sequences += other.sequences
        self.steps += other.steps
        self.counts += other.counts
        self.violations += other.violations


class Rotating(RuleBasedStateMachine):
    """One sequence. `machine_of` sets `scene` and `tally` on a subclass."""

    scene: ClassVar[SavedScene]
    tally: ClassVar[SequenceTally]
    thorough_every: ClassVar[int] = 10

    def __init__(self) -> None:
        super().__init__()
        scene = self.scene
        transaction.savepoint_rollback(scene.savepoint)
        scene.world.backend.restore_from(scene.backend)
        self.world = scene.world.copied()
        self.has_failed = False
        self.tally.sequences += 1

    def step(self, name: str, act: Any) -> None:
        """Run one step, which must leave no transaction open; a violation ends the sequence."""
        if self.has_failed:
            return
        world = self.world
        world.history.append(name)
        self.tally.steps += 1
        self.tally.counts[f"step {name.split(':')[0]}"] += 1
        depth = len(connection.savepoint_ids)
        try:
            act()
            world.watcher.require(len(connection.savepoint_ids) == depth, "a transaction was left open")
        except (Exception, ViolationError) as error:  # noqa: BLE001  any error is recorded and ends the sequence
            self.has_failed = True
            kind = "" if isinstance(error, ViolationError) else f"{type(error).__name__}: "
            self.tally.violations.append(
                f"{kind}{error} | {world.variant.name}, from {self.scene.name}: {'; '.join(world.history)}"
            )

    def teardown(self) -> None:
        world = self.world
        if not self.has_failed:
            self.step("recover", world.recover)
            if self.tally.sequences % self.thorough_every == 0:
                self.step("finish", world.finish)
                self.step("recover", world.recover)
        self.tally.counts += world.counts + world.watcher.counts
        if not self.has_failed:
            self.tally.counts[f"ended {world.state}"] += 1

    # --- workers ------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0, 3, 3, 61]))
    def advance(self, seconds: int) -> None:
        def act() -> None:
            self.world.pass_time(seconds)
            self.world.engine(self.world.work)
            self.world.watcher.require_predecessor_reinstated()

        self.step(f"worker: after {seconds} s", act)

    @rule()
    def worker_twice(self) -> None:
        """A duplicated or reordered message: the second run does nothing unless the first one failed."""

        def act() -> None:
            world = self.world
            world.pass_time(3)
            world.engine(world.work)
            has_failed, before = world.last_wait is None, world.watcher.rotations
            world.engine(world.work)
            is_idle = has_failed or before == world.watcher.rotations
            world.watcher.require(is_idle, "3: a duplicate did something")

        self.step("worker twice", act)

    @rule(at=points, seconds=st.sampled_from([3, 3, 61]))
    def worker_dies(self, at: int, seconds: int) -> None:
        def act() -> None:
            self.world.pass_time(seconds)
            self.world.engine(self.world.work, Interruption(at))

        self.step(f"worker dies: after {seconds} s, at {at}", act)

    @rule(at=points, other=acts)
    def worker_meets(self, at: int, other: str) -> None:
        """Another actor runs between two transactions of the worker."""

        def act() -> None:
            world = self.world
            world.pass_time(3)
            met = world.meanwhile(lambda: PEOPLE[other](world))
            world.engine(world.work, Interruption(at, met))

        self.step(f"worker meets: {other} at {at}", act)

    @rule(at=points, by=st.sampled_from(OVERTAKING))
    def worker_is_overtaken(self, at: int, by: str) -> None:
        """The worker sleeps past its lease, and another worker or an operator acts meanwhile."""

        def act() -> None:
            world = self.world
            world.pass_time(3)

            def overtake() -> None:
                world.pass_time(16)
                if by == "worker":
                    world.work()
                    world.watcher.check("engine")
                else:
                    world.meanwhile(lambda: PEOPLE[by](world))()

            world.engine(world.work, Interruption(at, overtake))

        self.step(f"worker is overtaken: by {by} at {at}", act)

    @precondition(lambda self: self.world.state is S.QUARANTINE)
    @rule(how=st.sampled_from([MachineWorld.revoke, MachineWorld.compromise, MachineWorld.suspend]))
    def replacement_ends_during_an_outage(self, how: Any) -> None:
        """The predecessor is good again with the next turn, though the backend is down."""

        def act() -> None:
            world = self.world
            world.backend.is_down = True
            world.people_do(lambda: how(world, 1))
            world.pass_time(3)
            world.engine(world.work)
            world.watcher.require_predecessor_reinstated()

        self.step(f"replacement ends during an outage: {how.__name__}", act)

    @rule()
    def log_refuses(self) -> None:
        """7: an unrecorded change does not happen."""

        def act() -> None:
            self.world.pass_time(3)
            self.world.engine(self.world.work, Interruption(1, refuses='INSERT INTO "keyvault_auditentry"'))

        self.step("audit log refuses", act)

    @rule(dies_at=st.one_of(st.none(), points))
    def maintenance(self, dies_at: int | None) -> None:
        def act() -> None:
            with nullcontext() if dies_at is None else Interruption(dies_at).under_way(self.world.backend):
                self.world.sweep()
            self.world.watcher.check("people")

        self.step("maintenance" if dies_at is None else f"maintenance dies: at {dies_at}", act)

    # --- people -------------------------------------------------------------------------------------------------

    @rule(act=acts)
    def people(self, act: str) -> None:
        self.step(f"people: {act}", lambda: self.world.people_do(lambda: PEOPLE[act](self.world)))

    @rule(key=which, act=st.sampled_from(["revoke", "compromise", "suspend", "resume"]))
    def operator(self, key: int, act: str) -> None:
        self.step(f"operator: {act} {key}", lambda: self.world.people_do(lambda: getattr(self.world, act)(key)))

    @precondition(lambda self: self.world.state in {S.AWAITING_APPROVAL, S.EMERGENCY})
    @rule(how=st.sampled_from([MachineWorld.approve, MachineWorld.bypass, MachineWorld.reject]))
    def decide(self, how: Any) -> None:
        self.step(f"decide: {how.__name__}", lambda: self.world.people_do(lambda: how(self.world)))

    @precondition(lambda self: self.world.state is S.STALLED)
    @rule(how=st.sampled_from([MachineWorld.resume_stalled, MachineWorld.extend, MachineWorld.abort]))
    def unstall(self, how: Any) -> None:
        self.step(f"unstall: {how.__name__}", lambda: self.world.people_do(lambda: how(self.world)))

    @precondition(lambda self: not self.world.is_open)
    @rule(how=st.sampled_from([MachineWorld.ask, MachineWorld.ask, MachineWorld.reissue]))
    def again(self, how: Any) -> None:
        self.step(f"again: {how.__name__}", lambda: self.world.people_do(lambda: how(self.world)))

    @rule(seconds=st.sampled_from([1, 600]))
    def retire(self, seconds: int) -> None:
        self.step("retire", lambda: self.world.people_do(lambda: self.world.retire(seconds)))

    # --- traffic ------------------------------------------------------------------------------------------------

    @rule(key=which, source=sources, verifier=verifiers, is_reported=st.booleans())
    def use(self, key: int, source: str, verifier: int, is_reported: bool) -> None:
        def act() -> None:
            self.world.use(key, source, verifier)
            if is_reported:
                self.world.flush(verifier)

        self.step(f"use: {key} from {source} by {verifier}, {'' if is_reported else 'un'}reported", act)

    @rule()
    def prove(self) -> None:
        self.step("prove", self.world.prove)

    @rule()
    def report(self) -> None:
        self.step("report", self.world.flush)

    @rule(verifier=verifiers)
    def lose_verifier(self, verifier: int) -> None:
        self.step(f"lose verifier: {verifier}", lambda: self.world.lose_verifier(verifier))

    # --- time ---------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1, 16, 300, 601, 3_601, DAY, 3 * DAY]))
    def time(self, seconds: int) -> None:
        self.step(f"time: {seconds} s", lambda: self.world.pass_time(seconds))

    @rule(seconds=st.sampled_from([1, 9, 70]))
    def clock_goes_back(self, seconds: int) -> None:
        self.step(f"clock goes back: {seconds} s", lambda: self.world.pass_time(-seconds))

    @rule(seconds=st.sampled_from([301, PERIOD.total_seconds(), 3_601]))
    def quiet(self, seconds: float) -> None:
        self.step(f"quiet: {seconds} s", lambda: self.world.pass_quietly(seconds))

    # --- the secret backend -------------------------------------------------------------------------------------

    @rule(faults=st.lists(st.sampled_from(BackendFault), min_size=1, max_size=3))
    def backend_fails(self, faults: list[BackendFault]) -> None:
        self.step(f"backend fails: {', '.join(faults)}", lambda: self.world.fail_next(*faults))

    @rule()
    def backend_down_or_up(self) -> None:
        def act() -> None:
            self.world.backend.is_down = not self.world.backend.is_down

        self.step("backend down or up", act)


def machine_of(scene: SavedScene, tally: SequenceTally, *, thorough_every: int) -> type[Rotating]:
    kept: dict[str, Any] = {"scene": scene, "tally": tally, "thorough_every": thorough_every}
    return type("RotatingFrom" + scene.name.title().replace("_", ""), (Rotating,), kept)
