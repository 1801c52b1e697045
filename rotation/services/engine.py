"""Moving a rotation on: what a worker runs, as often as it likes, and may be killed in.

`advance_rotation` holds a lease, looks at the facts, asks `states.next_step`, and does that one thing. The
secret backend is called between two short transactions, with a ledger row before the call. The replacement's
string lives in this process's memory between its making and its delivery; a process that dies there leaves a
digest of a key that nobody ever held, which the next one burns and makes anew.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.conf import settings
from django.db.models import QuerySet

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER
from keyvault.domain.canonical import JsonValue
from keyvault.domain.digests import PEPPER_SET
from keyvault.domain.errors import DependencyUnavailableError, KeyvaultError, StateConflictError
from keyvault.domain.keys import KeyState
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Account, Key, Material
from keyvault.services import leases
from keyvault.services.authorization import authorize
from keyvault.services.keys import activate_key, burn_key, note_stored, resume_key, revoke_key, stage_key, suspend_key
from keyvault.services.leases import Lease
from keyvault.services.material import (
    ForeignWriterError,
    destroy_string,
    find_stored,
    forget_string,
    newest_version,
    read_string,
    store_string,
)
from keyvault.services.peppers import load_peppers
from keyvault.services.recording import recorded
from keyvault.services.usage import note_lost, utc_now
from rotation.models import EvidenceKind, LedgerEntry, LedgerState, Rotation
from rotation.services.facts import gather_facts, note_evidence, proof_seen, silence_seen
from rotation.services.requests import get_rotation, list_open, subject_of
from rotation.states import CLOSED, TRANSITIONS, Facts, Move, RotationState, Wait, next_step

S = RotationState

_log = logging.getLogger(__name__)

LOOK_AGAIN = timedelta(seconds=2)
"""A waiting rotation is looked at this often, for what happens without telling us."""

MOST_ATTEMPTS = 12
"""Failures of one step in a row, but for an unavailable backend, before the rotation stalls by name."""

_MOST_STEPS = 20


def list_due(now: datetime) -> list[str]:
    """The open rotations of what this process serves that nobody is at work on and whose time has come."""
    still_open = list_open()
    served = set(_served().filter(pk__in=still_open).values_list("pk", flat=True))
    subjects = {subject_of(rotation_id): rotation_id for rotation_id in still_open if rotation_id in served}
    return [subjects[subject] for subject in leases.list_due(subjects, now)]


def _served() -> QuerySet[Rotation]:
    """Without an environment's peppers (KEYVAULT_ENVIRONMENTS) its rotations cannot be moved on."""
    return Rotation.objects.filter(credential__account__environment__in=settings.ENVIRONMENTS)


def advance_rotation(rotation_id: str, clock: Callable[[], datetime] = utc_now) -> Wait | None:
    """Moves the rotation on as far as it goes now, and says what it waits for.

    None: another worker holds it, it is not due, or its environment is not served here. A failure is noted
    and tried again later; a step that keeps failing, or meets a foreign writer, stalls the rotation, with both
    keys as they are.
    """
    if not _served().filter(pk=rotation_id).exists():
        return None
    lease = leases.claim(subject_of(rotation_id), clock())
    if lease is None:
        return None
    run = _Run(lease, clock)
    try:
        wait = run.to_the_next_wait(rotation_id)
    except DependencyUnavailableError as error:
        # Not a failure: nothing is used up, and verification goes on without the backend.
        _log.warning("rotation paused", extra={"rotation_id": rotation_id, "why": error.internal})
        leases.pause(lease, clock(), error.internal or error.detail)
    except KeyvaultError as error:
        # Often somebody was merely faster, and the next look finds what is true now.
        run.give_up_or_try_again(rotation_id, error)
    else:
        now = clock()
        due_at = now + LOOK_AGAIN
        leases.release(lease, due_at=due_at if wait.until is None else min(due_at, max(wait.until, now)))
        return wait
    return None


@dataclass(frozen=True, slots=True)
class _Held:
    """A replacement's string between its making and its delivery; it goes `after` that version of the backend."""

    key_id: str
    text: Plaintext
    after: int


class _Run:
    """One worker's turn on one rotation: its lease, its clock, and the string it may hold for a moment."""

    def __init__(self, lease: Lease, clock: Callable[[], datetime]) -> None:
        self.lease = lease
        self.clock = clock
        self.held: _Held | None = None

    def to_the_next_wait(self, rotation_id: str) -> Wait:
        for _ in range(_MOST_STEPS):
            now = self.clock()
            note_lost(now)
            rotation = get_rotation(rotation_id)
            facts = gather_facts(rotation, now)
            step = next_step(facts, now)
            if isinstance(step, Wait):
                return step
            grant = authorize(WORKER, P.ROTATIONS_ADVANCE, rotation.credential.account, now=now)
            if isinstance(step, Move):
                if step.to is S.CANCELLED:
                    self._write_back(grant, rotation)
                self._move(grant, rotation, facts, step)
            else:
                self._act(grant, rotation)
        return Wait("its next turn")

    # --- side effects -------------------------------------------------------------------------------------

    def _act(self, grant: Grant, rotation: Rotation) -> None:
        if rotation.state == S.SCHEDULED:
            self._stage(grant, rotation)
        elif rotation.state == S.PUBLISHING:
            self._publish(grant, rotation)
        else:
            entry = self._begin(rotation, rotation.predecessor, grant.at)
            destroy_string(grant, rotation.predecessor)
            self._finish(entry, "destroyed")

    def _stage(self, grant: Grant, rotation: Rotation) -> None:
        """Makes a replacement, and burns the one before it, if any, that was never delivered."""
        newest = newest_version(rotation.credential)
        load_peppers(PEPPER_SET[rotation.credential.environment])  # before the transaction needs them
        with recorded(grant, P.ROTATIONS_ADVANCE, "rotation.staged", account=_account(rotation), **_about(rotation)):
            leases.hold(self.lease)
            if rotation.replacement is not None:
                burn_key(grant, rotation.replacement)
            key, text = stage_key(grant, rotation.credential, expires_in_days=rotation.approved_plan.expires_in_days)
            # Good before anybody can hold it: the merchant may use it the moment it is delivered.
            activate_key(grant, key)
            rotation.compare_and_swap(state=S.STAGED, replacement=key, entered_at=grant.at, accepted_at=None)
        self.held = _Held(key.key_id, text, newest)

    def _publish(self, grant: Grant, rotation: Rotation) -> None:
        """Delivers the replacement; one whose string died with its maker is replaced by a new one."""
        key = _replacement(rotation)
        entry = self._begin(rotation, key, grant.at)
        try:
            if self.held is not None and self.held.key_id == key.key_id:
                version = store_string(key, self.held.text, purpose=rotation.rotation_id, after=self.held.after)
            else:
                stored = find_stored(rotation.credential)
                if stored is None or stored.labels.get("key_id") != key.key_id:
                    self._finish(entry, "its string is lost; burned and made anew", LedgerState.FAILED)
                    self._stage(grant, rotation)
                    return
                version = stored.version
        except KeyvaultError as error:
            self._finish(entry, error.internal or error.detail, LedgerState.FAILED)
            raise
        with recorded(grant, P.ROTATIONS_ADVANCE, "rotation.delivered", account=_account(rotation), **_about(rotation)):
            leases.hold(self.lease)
            note_stored(grant, key, version)
            rotation.compare_and_swap(delivered_at=grant.at)
            seen: dict[str, JsonValue] = {"key_id": key.key_id, "backend_version": version}
            note_evidence(rotation, EvidenceKind.DELIVERED, seen, grant.at)
        self._finish(entry, f"stored as version {version}")

    def _write_back(self, grant: Grant, rotation: Rotation) -> None:
        """Before a rotation is cancelled: what the merchant reads from the backend is the predecessor again.

        The replacement may be there (a worker died before it could say so); it is dead, and is noted so that
        its copy is destroyed. May be killed anywhere: the newest version says how far it came.
        """
        predecessor, replacement = rotation.predecessor, rotation.replacement
        stored = None if replacement is None else find_stored(rotation.credential)
        if replacement is None or stored is None:
            return
        entry = self._begin(rotation, predecessor, grant.at)
        version = stored.version
        if stored.labels.get("key_id") == replacement.key_id:
            if replacement.backend_version is None:
                self._note(grant, rotation, replacement, version)
            if predecessor.material != Material.HELD:
                self._finish(entry, "the predecessor was never in the backend, or is dead")
                return
            text = read_string(predecessor)
            version = store_string(predecessor, text, purpose=rotation.rotation_id, after=version)
        if version != predecessor.backend_version:
            # The older copy goes before its number is forgotten.
            forget_string(predecessor)
            self._note(grant, rotation, predecessor, version)
        self._finish(entry, f"the predecessor is version {version}")

    def _note(self, grant: Grant, rotation: Rotation, key: Key, version: int) -> None:
        with recorded(
            grant, P.ROTATIONS_ADVANCE, "rotation.written_back", account=_account(rotation), **_about(rotation)
        ):
            leases.hold(self.lease)
            note_stored(grant, key, version)

    def _begin(self, rotation: Rotation, key: Key, now: datetime) -> LedgerEntry:
        """The ledger row precedes the side effect, in a transaction of its own."""
        return LedgerEntry.objects.create(rotation=rotation, step=rotation.state, key=key, started_at=now)

    def _finish(self, entry: LedgerEntry, detail: str, state: LedgerState = LedgerState.DONE) -> None:
        LedgerEntry.objects.filter(pk=entry.pk).update(state=state, finished_at=self.clock(), detail=detail[:300])

    # --- transitions --------------------------------------------------------------------------------------

    def _move(self, grant: Grant, rotation: Rotation, facts: Facts, step: Move) -> None:
        if step.to not in TRANSITIONS[rotation.current_state]:
            raise StateConflictError(
                "That is no way forward.", internal=f"{rotation.rotation_id}: {rotation.state} to {step.to}"
            )
        details: dict[str, JsonValue] = {"was": rotation.state, "why": step.why}
        event = f"rotation.{step.to}"
        with recorded(grant, P.ROTATIONS_ADVANCE, event, account=_account(rotation), **_about(rotation), **details):
            leases.hold(self.lease)
            changes = self._enter(grant, rotation, facts, step.to)
            if step.to in CLOSED:
                changes["closed_at"] = grant.at
            rotation.compare_and_swap(state=step.to, entered_at=grant.at, why=step.why, **changes)
        _log.info(
            "rotation moved",
            extra={"rotation_id": rotation.rotation_id, "was": details["was"], "to": step.to, "why": step.why},
        )

    def _enter(self, grant: Grant, rotation: Rotation, facts: Facts, to: RotationState) -> dict[str, object]:
        """What entering a state does, in the transaction of the transition; the columns it fills in."""
        now = grant.at
        if to is S.PUBLISHING:
            seen: dict[str, JsonValue] = {"key_id": rotation.replacement_id}
            note_evidence(rotation, EvidenceKind.ACCEPTED, seen, now)
            return {"accepted_at": now}
        if to is S.OVERLAP:
            note_evidence(rotation, EvidenceKind.USED, proof_seen(rotation, facts), now)
            return {"used_at": now}
        if to is S.QUARANTINE:
            _require_living_replacement(rotation, now)
            last_at = facts.predecessor.last_used_at
            seen = silence_seen(rotation, facts, facts.plan.quiet_seconds, last_at)
            note_evidence(rotation, EvidenceKind.SILENT, seen, now)
            suspend_key(grant, rotation.predecessor)
            return {"silent_at": now}
        if to is S.REVOKING:
            _require_living_replacement(rotation, now)
            last_at = facts.predecessor.refused_at
            seen = silence_seen(rotation, facts, facts.plan.quarantine_seconds, last_at)
            note_evidence(rotation, EvidenceKind.UNTRIED, seen, now)
            cited = list(rotation.evidence.order_by("created_at").values_list("evidence_id", flat=True))
            revoke_key(grant, rotation.predecessor, RevocationReason.SUPERSEDED, evidence=cited)
        if to is S.CANCELLED:
            self._restore(grant, rotation)
        if to is S.STALLED:
            # With both keys good: a quarantine that cannot go on is undone, and silence is waited for anew.
            self._restore(grant, rotation)
            return {"stalled_from": S.OVERLAP if rotation.state == S.QUARANTINE else rotation.state}
        return {}

    def _restore(self, grant: Grant, rotation: Rotation) -> None:
        """A predecessor that we had merely suspended is good again; a dead one never."""
        predecessor = rotation.predecessor
        if (
            rotation.state == S.QUARANTINE
            and predecessor.state == KeyState.SUSPENDED
            and not _is_expired(predecessor, grant.at)
        ):
            resume_key(grant, predecessor)

    def give_up_or_try_again(self, rotation_id: str, error: KeyvaultError) -> None:
        """A foreign writer, or a step that keeps failing, stalls the rotation by name, for a person to look at."""
        why = error.internal or error.detail
        _log.warning("rotation step failed", extra={"rotation_id": rotation_id, "why": why})
        is_foreign = isinstance(error, ForeignWriterError)
        if is_foreign or self.lease.attempts >= MOST_ATTEMPTS:
            try:
                self._stall(rotation_id, error.detail if is_foreign else f"a step kept failing: {why}")
            except KeyvaultError as second:
                why = second.internal or second.detail
            else:
                return
        leases.postpone(self.lease, self.clock(), why)

    def _stall(self, rotation_id: str, why: str) -> None:
        """Raises StateConflictError in a state that cannot stall."""
        rotation = get_rotation(rotation_id)
        grant = authorize(WORKER, P.ROTATIONS_ADVANCE, rotation.credential.account, now=self.clock())
        self._move(grant, rotation, gather_facts(rotation, grant.at), Move(S.STALLED, why[:300]))
        leases.release(self.lease)


def _require_living_replacement(rotation: Rotation, now: datetime) -> None:
    """Inside the transaction that takes the predecessor away: the replacement is good, and stays so until commit.

    The row is locked, so that a revocation of the replacement comes either before (and this stops) or after.
    """
    key = Key.objects.select_for_update().get(pk=_replacement(rotation).pk)
    if key.state != KeyState.ACTIVE or _is_expired(key, now):
        raise StateConflictError(
            "The replacement is no longer good.", internal=f"{rotation.rotation_id}: {key.key_id} is {key.state}"
        )


def _is_expired(key: Key, now: datetime) -> bool:
    return key.expires_at is not None and now >= key.expires_at


def _replacement(rotation: Rotation) -> Key:
    if rotation.replacement is None:
        raise StateConflictError("There is no replacement yet.", internal=rotation.rotation_id)
    return rotation.replacement


def _account(rotation: Rotation) -> Account:
    return rotation.credential.account


def _about(rotation: Rotation) -> dict[str, JsonValue]:
    return {"rotation_id": rotation.rotation_id, "credential_id": rotation.credential_id}
