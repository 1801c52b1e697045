"""Run one rotation from request to end, inject one fault on the way, and count what must hold throughout.

The merchant reads its key from the server and switches to the key it finds there, the worker's beat runs, and an
operator resumes a stalled rotation after the fault is repaired. Nothing waits in real time: the scene's clock is
advanced.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

import requests

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.backends.base import BackendError
from keyvault.domain.keys import DEAD_STATES, KeyState
from keyvault.models import Key, Material, WorkLease
from keyvault.services import maintenance
from keyvault.services.keys.lifecycle import get_key
from keyvault.services.recording.authorization import authorize
from keyvault.services.secrets.stored_copies import copy_subject
from rotation.domain.events import RotationState
from rotation.services.rotations.interventions import abort_rotation, resume_rotation
from rotation.services.rotations.reports import get_rotation, subject_of
from tests.rotation import scene
from tests.rotation.steps import revoke, run_due

from .harness import VaultHarness
from .proxy import NO_FAULT, Injection

S = RotationState

MERCHANT = "acme"
TURN_SECONDS = 3
MOST_TURNS = 60
TURNS_IN_FAULT = 7
"""Enough turns for the breaker to open and to reach its longest pause."""

VERIFIED_IN_FAULT = 3
"""Number of times each good key is verified per turn during a fault."""

RESUMES_WITHIN = timedelta(seconds=60)

_OLD_IS_GOOD = frozenset({S.SCHEDULED, S.STAGED, S.PUBLISHING, S.AWAITING_PROOF, S.OVERLAP})


def _nothing(harness: VaultHarness) -> None:
    return None


@dataclass(frozen=True, slots=True)
class VaultFault:
    """A fault: `inject` defines what happens to the injected request and to `others` after it; `repair` ends it.

    `lasts`: the fault persists until it is repaired, and the service runs turns meanwhile. `stalls`: the rotation then
    waits for a person. `needs_short_timeouts`: the client's timeout must expire.
    """

    name: str
    inject: Callable[[VaultHarness], Injection]
    repair: Callable[[VaultHarness], None] = _nothing
    lasts: bool = True
    stalls: bool = False
    needs_short_timeouts: bool = False


@dataclass(slots=True)
class Trial:
    """The outcome of one rotation.

    `violations` must be empty. `verified`, the number of times a good key was allowed, must equal `asked`, the number
    of times it was presented. `resumed_after` is measured on the scene's clock from the recovery on.
    """

    calls: list[str] = field(default_factory=list)
    was_injected: bool = False
    asked: int = 0
    verified: int = 0
    stalled: str = ""
    resumed_after: timedelta | None = None
    pauses: int = 0
    violations: list[str] = field(default_factory=list)

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.violations.append(what)


class InconclusiveError(Exception):
    """The fault itself failed, such as a seal that the server did not answer: the trial says nothing about it."""


class Journey:
    """One trial: inject `fault` at request number `at`.

    `aborted_in`: the state in which the merchant asks for its old key back. `strings`: the keys given to the merchant,
    by id. `in_hand`: the key that the merchant read last.
    """

    def __init__(
        self,
        harness: VaultHarness,
        fault: VaultFault | None = None,
        at: int = 0,
        *,
        aborted_in: RotationState | None = None,
    ) -> None:
        self.harness, self.fault, self.at, self.trial = harness, fault, at, Trial()
        self.aborted_in, self.is_aborted = aborted_in, False
        clock, place = harness.clock, scene.account(MERCHANT)
        harness.proxy.inject_at(0, NO_FAULT)
        harness.begin_process()  # The previous trial may have left its breaker open.
        key, text = scene.issue(place, clock())
        self.strings, self.in_hand = {key.key_id: text}, key.key_id
        self.bystander, self.bystander_text = scene.issue(place, clock(), label="bystander")
        self.credential = key.credential
        self.rotation_id = scene.rotate(key.credential, clock()).rotation_id
        harness.begin_process(needs_short_timeouts=fault is not None and fault.needs_short_timeouts)

    def run(self) -> Trial:
        """Run the rotation to its end and check the final state. Raises InconclusiveError."""
        proxy, trial = self.harness.proxy, self.trial
        proxy.inject_at(self.at, self.fault.inject(self.harness) if self.fault else NO_FAULT)
        for _ in range(MOST_TURNS):
            self._turn()
            if self.fault and proxy.injected.is_set() and not trial.was_injected:
                trial.was_injected = True
                self._run_fault(self.fault)
            if self._is_over():
                break
        proxy.wait_until_idle()
        trial.calls = list(proxy.calls)
        if proxy.failures:
            raise InconclusiveError(f"{proxy.failures}; violations so far: {trial.violations}")
        self._check_end()
        return trial

    def resumed(self) -> Trial:
        """Run the rest of a rotation that the test began and repaired itself; a person resumes it if it has stalled."""
        rotation, now = get_rotation(self.rotation_id), self.harness.clock()
        self.harness.proxy.inject_at(0, NO_FAULT)
        self.fault = None
        if rotation.state == S.STALLED:
            resume_rotation(self._tam(now), rotation)
        self._wait_until_resumed(now)
        return self.run()

    # --- turns ----------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Run the merchant, the verifier and the worker once."""
        self._merchant_reads()
        self._people_act()
        self.harness.clock.tick(TURN_SECONDS)
        self._beat()
        self._verify_all()

    def _beat(self) -> None:
        self.harness.reporter.flush()
        run_due(self.harness.clock)
        maintenance.destroy_due()
        maintenance.settle_due()

    def _merchant_reads(self) -> None:
        """Read the merchant's key; do nothing while the server does not answer."""
        try:
            found = self.harness.read_newest(self.credential.backend_path)
        except (BackendError, requests.RequestException):
            return
        if found is not None:
            self.in_hand, self.strings[found[0]] = found

    def _people_act(self) -> None:
        rotation, now = get_rotation(self.rotation_id), self.harness.clock()
        if rotation.state == self.aborted_in and not self.is_aborted:
            self.is_aborted = True
            abort_rotation(self._tam(now), rotation, "a bad day")
        elif rotation.state == S.AWAITING_PROOF and rotation.replacement_id == self.in_hand:
            scene.acknowledge_replacement(self.rotation_id, now)
        elif rotation.state == S.ROLLING_BACK and rotation.predecessor_id == self.in_hand:
            scene.use(self.harness.reporter, self.in_hand)

    def _tam(self, now: datetime) -> Grant:
        return authorize(scene.tam(), P.ROTATIONS_WRITE, self.credential.account, now=now)

    def _verify_all(self, times: int = 1) -> None:
        """Verify every good key.

        The key that the merchant read last is good at every moment; the old key is good until its quarantine and again
        during a rollback.
        """
        state = get_rotation(self.rotation_id).current_state
        stalled_from = get_rotation(self.rotation_id).stalled_from
        is_old_good = self.is_aborted or (stalled_from or state) in _OLD_IS_GOOD
        good = {self.in_hand, *([next(iter(self.strings))] if is_old_good else [])}
        for key_id in good:
            for _ in range(times):
                is_allowed, code = self.harness.verify(self.strings[key_id])
                self.trial.asked += 1
                self.trial.verified += is_allowed
                self.trial.expect(is_allowed, f"{key_id} is good but refused in {state}: {code}")

    def _is_over(self) -> bool:
        """Return whether the rotation is closed and no copy has work pending."""
        owed = {Material.DELETE_DUE, Material.RESTORE_DUE, Material.DESTROY_DUE}
        is_owed = Key.objects.filter(credential=self.credential, material__in=owed).exists()
        return get_rotation(self.rotation_id).closed_at is not None and not is_owed

    # --- the fault ------------------------------------------------------------------------------------------

    def _run_fault(self, fault: VaultFault) -> None:
        self._verify_all(times=VERIFIED_IN_FAULT)
        self._revoke_bystander()
        if fault.lasts:
            self.harness.proxy.wait_until_idle()
            for _ in range(TURNS_IN_FAULT):
                # Repair at the worst moment: right after an attempt.
                self._move_on_to(self._next_due() or self.harness.clock())
                self._beat()
                self._verify_all(times=VERIFIED_IN_FAULT)
        fault.repair(self.harness)
        recovered_at = self.harness.clock()
        rotation = get_rotation(self.rotation_id)
        if rotation.state == S.STALLED:
            self.trial.stalled = rotation.why
            resume_rotation(self._tam(recovered_at), rotation)
        self.trial.expect(fault.stalls or not self.trial.stalled, f"the rotation stalled: {self.trial.stalled}")
        self._wait_until_resumed(recovered_at)

    def _revoke_bystander(self) -> None:
        """Revoke a key during the fault: the revocation commits and the key is refused immediately."""
        self.trial.expect(self.harness.verify(self.bystander_text)[0], "the bystander's key is refused")
        revoke(self.bystander, self.harness.clock)
        self.trial.expect(
            self.harness.verify(self.bystander_text) == (False, "key_revoked"),
            "a revoked key is not refused immediately",
        )

    def _wait_until_resumed(self, recovered_at: datetime) -> None:
        """Wait until no pending work has failed on its last attempt."""
        while (due_at := self._next_due()) is not None:
            self._move_on_to(due_at)
            self.trial.pauses += 1
            assert self.trial.pauses < MOST_TURNS, "work is due, fails, and is due again immediately"
            if self.harness.clock() - recovered_at > RESUMES_WITHIN:
                self.trial.expect(False, f"not resumed {self.harness.clock() - recovered_at} after the recovery")
                break
            self._beat()
            self._verify_all()
        self.trial.resumed_after = self.harness.clock() - recovered_at

    def _next_due(self) -> datetime | None:
        """Return when the failed work is retried next."""
        failed = WorkLease.objects.exclude(last_error="").filter(subject__in=self._subjects())
        return failed.order_by("due_at").values_list("due_at", flat=True).first()

    def _subjects(self) -> list[str]:
        """List the subjects of pending work; a copy to be hidden may by now be due for destruction."""
        owed = Key.objects.filter(credential=self.credential, material__in=[Material.DELETE_DUE, Material.RESTORE_DUE])
        return [subject_of(self.rotation_id), *map(copy_subject, owed)]

    def _move_on_to(self, at: datetime) -> None:
        self.harness.clock.now = max(self.harness.clock.now, at)

    # --- the end --------------------------------------------------------------------------------------------

    def _check_end(self) -> None:
        """Check that the keys equal those of a run without a fault, and that each readable copy belongs to a living key
        and vice versa.
        """
        expect, rotation = self.trial.expect, get_rotation(self.rotation_id)
        end, survivor = S.COMPLETED, rotation.replacement_id
        if self.is_aborted:
            end, survivor = S.ROLLED_BACK, rotation.predecessor_id
        expect(rotation.state == end, f"it ends {rotation.state} {rotation.why}")
        keys = list(Key.objects.filter(credential=self.credential))
        living = [key for key in keys if key.state not in DEAD_STATES]
        expect([key.state for key in living] == [KeyState.ACTIVE], f"living at the end: {living}")
        expect([key.key_id for key in living] == [survivor], f"{living} is good, not {survivor}")
        expected = {key.backend_version: key.key_id for key in living if key.material == Material.HELD}
        stored = self.harness.live_versions(self.credential.backend_path)
        expect(stored == expected, f"the server has {stored}, the rows say {expected}")
        self._merchant_reads()
        ungiven = [key.key_id for key in living if key.key_id not in self.strings]
        expect(not ungiven, f"keys that the merchant never received: {ungiven}")
        for key_id, text in self.strings.items():
            is_good = key_id in {key.key_id for key in living}
            expect(self.harness.verify(text)[0] is is_good, f"{key_id} at the end: good is not {is_good}")
        self._check_bystander()

    def _check_bystander(self) -> None:
        """Check that the revoked key's copy is destroyed within the same time."""
        fresh = get_key(self.bystander.key_id)
        assert fresh is not None
        if fresh.state in DEAD_STATES:
            self.harness.clock.tick(RESUMES_WITHIN.total_seconds())
            maintenance.destroy_due()
            stored = self.harness.live_versions(fresh.credential.backend_path)
            self.trial.expect(stored == {}, f"the revoked key's copy is still there: {stored}")
