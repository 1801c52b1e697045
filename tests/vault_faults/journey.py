"""One rotation from its request to its end, struck by one fault on its way; what must hold all the while is counted.

The merchant reads its key from the server and goes over to whatever it finds there; the worker's beat comes by; an
operator resumes what has stalled, once the fault is mended. None of them waits: the scene's clock is moved on.
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
from rotation.services.rotations.engine import advance_all_due
from rotation.services.rotations.interventions import abort_rotation, resume_rotation
from rotation.services.rotations.reports import get_rotation, subject_of
from tests.rotation import scene
from tests.rotation.steps import revoke

from .proxy import UNDISTURBED, Strike
from .stand import Stand

S = RotationState

MERCHANT = "acme"
TURN_SECONDS = 3
MOST_TURNS = 60
TURNS_IN_FAULT = 7
"""More than the breaker needs to open, and to stay so for as long as it ever does."""

VERIFIED_IN_FAULT = 3
"""So often in each of its turns, each good key."""

RESUMES_WITHIN = timedelta(seconds=60)

_OLD_IS_GOOD = frozenset({S.SCHEDULED, S.STAGED, S.PUBLISHING, S.AWAITING_PROOF, S.OVERLAP})


def _nothing(stand: Stand) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Fault:
    """`strike` says what happens to the request that is hit, and to `others` from then on; `mend` ends it.

    `lasts`: until it is mended, and the service has turns in it. `stalls`: the rotation then waits for a person.
    `is_impatient`: the client's time limit is to be met.
    """

    name: str
    strike: Callable[[Stand], Strike]
    mend: Callable[[Stand], None] = _nothing
    lasts: bool = True
    stalls: bool = False
    is_impatient: bool = False


@dataclass(slots=True)
class Trial:
    """What came of one rotation. `violations` must be empty, `verified` must be `asked`: how often a good key was
    allowed, and how often it was presented. `resumed_after`: by the scene's clock, from the recovery on."""

    calls: list[str] = field(default_factory=list)
    was_struck: bool = False
    asked: int = 0
    verified: int = 0
    stalled: str = ""
    resumed_after: timedelta | None = None
    pauses: int = 0
    violations: list[str] = field(default_factory=list)

    def must_be(self, holds: bool, what: str) -> None:
        if not holds:
            self.violations.append(what)


class Journey:
    """One trial: `fault` at the request of number `at`. `aborted_in`: there the merchant wants its old key back.

    `strings`: the keys that the merchant was given, by id; `in_hand` is the one that it read last.
    """

    def __init__(
        self, stand: Stand, fault: Fault | None = None, at: int = 0, *, aborted_in: RotationState | None = None
    ) -> None:
        self.stand, self.fault, self.at, self.trial = stand, fault, at, Trial()
        self.aborted_in, self.is_aborted = aborted_in, False
        clock, place = stand.clock, scene.account(MERCHANT)
        stand.proxy.strike_at(0, UNDISTURBED)
        stand.begin_process()  # The trial before this one may have left its breaker open.
        key, text = scene.issue(place, clock())
        self.strings, self.in_hand = {key.key_id: text}, key.key_id
        self.bystander, self.bystander_text = scene.issue(place, clock(), label="bystander")
        self.credential = key.credential
        self.rotation_id = scene.rotate(key.credential, clock()).rotation_id
        stand.begin_process(is_impatient=fault is not None and fault.is_impatient)

    def run(self) -> Trial:
        """To its end, and what is then there."""
        proxy, trial = self.stand.proxy, self.trial
        proxy.strike_at(self.at, self.fault.strike(self.stand) if self.fault else UNDISTURBED)
        for _ in range(MOST_TURNS):
            self._turn()
            if self.fault and proxy.struck.is_set() and not trial.was_struck:
                trial.was_struck = True
                self._live_through(self.fault)
            if self._is_over():
                break
        proxy.wait_until_idle()
        trial.calls = list(proxy.calls)
        assert proxy.failures == []
        self._judge_end()
        return trial

    def resumed(self) -> Trial:
        """The rest of one that was begun by hand and then mended: resumed by a person if it has stalled."""
        rotation, now = get_rotation(self.rotation_id), self.stand.clock()
        self.stand.proxy.strike_at(0, UNDISTURBED)
        self.fault = None
        if rotation.state == S.STALLED:
            resume_rotation(self._tam(now), rotation)
        self._wait_until_resumed(now)
        return self.run()

    # --- turns ----------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """The merchant, the verifier, the worker."""
        self._merchant_reads()
        self._people_act()
        self.stand.clock.tick(TURN_SECONDS)
        self._beat()
        self._verify_all()

    def _beat(self) -> None:
        self.stand.reporter.flush()
        advance_all_due(self.stand.clock)
        maintenance.destroy_due()
        maintenance.settle_due()

    def _merchant_reads(self) -> None:
        """Nothing, while the server does not answer."""
        try:
            found = self.stand.read_newest(self.credential.backend_path)
        except (BackendError, requests.RequestException):
            return
        if found is not None:
            self.in_hand, self.strings[found[0]] = found

    def _people_act(self) -> None:
        rotation, now = get_rotation(self.rotation_id), self.stand.clock()
        if rotation.state == self.aborted_in and not self.is_aborted:
            self.is_aborted = True
            abort_rotation(self._tam(now), rotation, "a bad day")
        elif rotation.state == S.AWAITING_PROOF and rotation.replacement_id == self.in_hand:
            scene.acknowledge_replacement(self.rotation_id, now)
        elif rotation.state == S.ROLLING_BACK and rotation.predecessor_id == self.in_hand:
            scene.use(self.stand.reporter, self.in_hand)

    def _tam(self, now: datetime) -> Grant:
        return authorize(scene.tam(), P.ROTATIONS_WRITE, self.credential.account, now=now)

    def _verify_all(self, times: int = 1) -> None:
        """What the merchant has read last is good at every moment; the old key until its quarantine, and on the way
        back."""
        state = get_rotation(self.rotation_id).current_state
        stalled_from = get_rotation(self.rotation_id).stalled_from
        is_old_good = self.is_aborted or (stalled_from or state) in _OLD_IS_GOOD
        good = {self.in_hand, *([next(iter(self.strings))] if is_old_good else [])}
        for key_id in good:
            for _ in range(times):
                is_allowed, code = self.stand.verify(self.strings[key_id])
                self.trial.asked += 1
                self.trial.verified += is_allowed
                self.trial.must_be(is_allowed, f"{key_id}, which is good, is refused in {state}: {code}")

    def _is_over(self) -> bool:
        """Closed, and nothing owed to any copy."""
        owed = {Material.DELETE_DUE, Material.RESTORE_DUE, Material.DESTROY_DUE}
        is_owed = Key.objects.filter(credential=self.credential, material__in=owed).exists()
        return get_rotation(self.rotation_id).closed_at is not None and not is_owed

    # --- the fault ------------------------------------------------------------------------------------------

    def _live_through(self, fault: Fault) -> None:
        self._verify_all(times=VERIFIED_IN_FAULT)
        self._revoke_bystander()
        if fault.lasts:
            self.stand.proxy.wait_until_idle()
            for _ in range(TURNS_IN_FAULT):
                # Mended at the worst moment: just after it was tried.
                self._move_on_to(self._next_due() or self.stand.clock())
                self._beat()
                self._verify_all(times=VERIFIED_IN_FAULT)
        fault.mend(self.stand)
        recovered_at = self.stand.clock()
        rotation = get_rotation(self.rotation_id)
        if rotation.state == S.STALLED:
            self.trial.stalled = rotation.why
            resume_rotation(self._tam(recovered_at), rotation)
        self.trial.must_be(fault.stalls or not self.trial.stalled, f"it stalled: {self.trial.stalled}")
        self._wait_until_resumed(recovered_at)

    def _revoke_bystander(self) -> None:
        """In the middle of the fault: committed, and refused at once."""
        self.trial.must_be(self.stand.verify(self.bystander_text)[0], "the bystander's key is refused")
        revoke(self.bystander, self.stand.clock)
        self.trial.must_be(
            self.stand.verify(self.bystander_text) == (False, "key_revoked"), "a revoked key is not refused at once"
        )

    def _wait_until_resumed(self, recovered_at: datetime) -> None:
        """Until no work that waits here has failed the last time."""
        while (due_at := self._next_due()) is not None:
            self._move_on_to(due_at)
            self.trial.pauses += 1
            assert self.trial.pauses < MOST_TURNS, "it is due, fails, and is due at once"
            if self.stand.clock() - recovered_at > RESUMES_WITHIN:
                self.trial.must_be(False, f"not resumed {self.stand.clock() - recovered_at} after the recovery")
                break
            self._beat()
            self._verify_all()
        self.trial.resumed_after = self.stand.clock() - recovered_at

    def _next_due(self) -> datetime | None:
        """When what failed is tried again."""
        failed = WorkLease.objects.exclude(last_error="").filter(subject__in=self._subjects())
        return failed.order_by("due_at").values_list("due_at", flat=True).first()

    def _subjects(self) -> list[str]:
        """Work that is still to be done: a copy that was to be hidden may be due to be destroyed by now."""
        owed = Key.objects.filter(credential=self.credential, material__in=[Material.DELETE_DUE, Material.RESTORE_DUE])
        return [subject_of(self.rotation_id), *map(copy_subject, owed)]

    def _move_on_to(self, at: datetime) -> None:
        self.stand.clock.now = max(self.stand.clock.now, at)

    # --- the end --------------------------------------------------------------------------------------------

    def _judge_end(self) -> None:
        """Its keys are as without the fault; what can be read belongs to a living key, and the other way round."""
        must_be, rotation = self.trial.must_be, get_rotation(self.rotation_id)
        end, survivor = S.COMPLETED, rotation.replacement_id
        if self.is_aborted:
            end, survivor = S.ROLLED_BACK, rotation.predecessor_id
        must_be(rotation.state == end, f"it ends {rotation.state} {rotation.why}")
        keys = list(Key.objects.filter(credential=self.credential))
        living = [key for key in keys if key.state not in DEAD_STATES]
        must_be([key.state for key in living] == [KeyState.ACTIVE], f"living at the end: {living}")
        must_be([key.key_id for key in living] == [survivor], f"{living} is good, not {survivor}")
        expected = {key.backend_version: key.key_id for key in living if key.material == Material.HELD}
        stored = self.stand.live_versions(self.credential.backend_path)
        must_be(stored == expected, f"the server has {stored}, the rows say {expected}")
        self._merchant_reads()
        ungiven = [key.key_id for key in living if key.key_id not in self.strings]
        must_be(not ungiven, f"nobody was given {ungiven}")
        for key_id, text in self.strings.items():
            is_good = key_id in {key.key_id for key in living}
            must_be(self.stand.verify(text)[0] is is_good, f"{key_id} at the end: good is not {is_good}")
        self._judge_bystander()

    def _judge_bystander(self) -> None:
        """Its copy goes within that time too."""
        fresh = get_key(self.bystander.key_id)
        assert fresh is not None
        if fresh.state in DEAD_STATES:
            self.stand.clock.tick(RESUMES_WITHIN.total_seconds())
            maintenance.destroy_due()
            stored = self.stand.live_versions(fresh.credential.backend_path)
            self.trial.must_be(stored == {}, f"the revoked key's copy is still there: {stored}")
