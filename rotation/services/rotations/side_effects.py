"""The side effects of a rotation: make, deliver and write back a key, and destroy a stored copy.

The secret backend is called between two short transactions; an open ledger row precedes the call. Two workers may share
the row, and the second one closes it. So each call that changes the backend renews the lease first, and a worker that
was overtaken changes nothing.

The replacement's string exists only in this process's memory, and as a pending copy in the backend while the rotation
waits for verifiers. If a process dies before it delivers or stores the string, only the key's digest remains, and no
client has the key. The next process discards that key and makes another. Every side effect may be killed at any point
and run again: the key id in the backend shows how far it came.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from django.conf import settings
from django.db.models import Exists, OuterRef, Q, QuerySet

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.backends.base import BackendConflictError, BackendError, BackendMissingError, StoredSecret
from keyvault.domain.canonical import JsonValue
from keyvault.domain.digests import PEPPER_SET
from keyvault.domain.errors import DependencyUnavailableError, KeyvaultError, StateConflictError
from keyvault.domain.issuance import Delivery
from keyvault.domain.keys import DEAD_STATES, KeyKind
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.recipient_keys import seal_to
from keyvault.models import Key
from keyvault.services.keys.lifecycle import activate_key, discard_key, get_key, note_stored, stage_key
from keyvault.services.keys.recipient_keys import find_recipient
from keyvault.services.peppers.ring import refresh_peppers
from keyvault.services.recording.notifications import announce
from keyvault.services.recording.transaction import recorded
from keyvault.services.secrets.pending_copies import PendingCopy, find_pending, forget_pending, keep_pending
from keyvault.services.secrets.stored_copies import (
    ForeignWriterError,
    destroy_string,
    find_stored,
    forget_string,
    is_in_backend,
    newest_version,
    recover_string,
    store_string,
)
from keyvault.services.work import leases
from keyvault.services.work.leases import Lease
from rotation.domain.events import RotationState
from rotation.models import EvidenceKind, LedgerEntry, LedgerState, Rotation
from rotation.services.rotations.facts import note_evidence
from rotation.services.rotations.reports import about

S = RotationState

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _HeldKey:
    """A replacement's string before its delivery; `after`: the backend's version that it is written on top of."""

    key_id: str
    text: Plaintext
    after: int | None


class Effects:
    """The side effects of one worker's turn, with its lease, its clock and the undelivered replacement's string."""

    def __init__(self, lease: Lease, clock: Callable[[], datetime]) -> None:
        self.lease = lease
        self.clock = clock
        self._held: _HeldKey | None = None

    def act(self, grant: Grant, rotation: Rotation) -> None:
        """Perform the side effect of the rotation's current state."""
        if rotation.state in {S.SCHEDULED, S.EMERGENCY}:
            self._stage(grant, rotation)
        elif rotation.state == S.PUBLISHING:
            self._publish(grant, rotation)
        elif rotation.state == S.ROLLING_BACK:
            self.write_back(grant, rotation)
        else:
            entry = self._begin(rotation, rotation.predecessor, grant.at)
            destroy_string(grant, rotation.predecessor, fence=self._fence)
            self._finish(entry, "destroyed")

    def keep(self, grant: Grant, rotation: Rotation) -> None:
        """Keep the string of a staged replacement that this turn does not deliver, so that a later turn can.

        If the backend is unavailable, seal the replacement now if it has a recipient key. Otherwise raise the error; a
        later turn makes the replacement again.
        """
        held = self._held
        if rotation.state != S.STAGED or held is None or held.key_id != rotation.replacement_id:
            return
        key = _replacement(rotation)
        # The entry stays open until the pending copy is erased, see `forget_due`.
        self._begin(rotation, key, grant.at)
        self._fence()
        try:
            keep_pending(key, PendingCopy(held.text, held.after))
        except DependencyUnavailableError:
            handover = self._sealed(rotation, _recipient_of(rotation), held.text)
            if handover is None:
                raise
            account = rotation.credential.account
            with recorded(grant, P.ROTATIONS_ADVANCE, "rotation.sealed", account=account, **about(rotation)):
                rotation.compare_and_swap(handover=handover)
                leases.hold(self.lease)

    # --- making the replacement -----------------------------------------------------------------------------

    def _stage(self, grant: Grant, rotation: Rotation) -> None:
        """Make a replacement and discard the previous one, if any, that was never delivered."""
        newest = self._newest_version(rotation)
        if newest and rotation.replacement is not None:
            # The previous replacement may have arrived there late, after it was given up.
            stored = find_stored(rotation.credential)
            if stored is not None:
                self._note_found(grant, rotation, stored)
        refresh_peppers(PEPPER_SET[rotation.credential.environment])  # before the transaction needs them
        account = rotation.credential.account
        with recorded(grant, P.ROTATIONS_ADVANCE, "rotation.staged", account=account, **about(rotation)):
            if rotation.replacement is not None:
                discard_key(grant, rotation.replacement)
            key, text = stage_key(grant, rotation.credential, expires_in_days=rotation.approved_plan.expires_in_days)
            # Active before delivery: the merchant may use it immediately.
            activate_key(grant, key)
            rotation.compare_and_swap(state=S.STAGED, replacement=key, entered_at=grant.at, accepted_at=None)
            leases.hold(self.lease)
        self._held = _HeldKey(key.key_id, text, newest)

    def _newest_version(self, rotation: Rotation) -> int | None:
        """Return the backend's newest version; None: it is down, but the replacement can be sealed to its recipient."""
        try:
            return newest_version(rotation.credential)
        except DependencyUnavailableError:
            if _recipient_of(rotation) is None:
                raise
            return None

    # --- delivering the replacement -------------------------------------------------------------------------

    def _publish(self, grant: Grant, rotation: Rotation) -> None:
        """Deliver the replacement; make another one if its string was lost with the process that made it."""
        key = _replacement(rotation)
        held = self._held if self._held is not None and self._held.key_id == key.key_id else None
        entry, is_settled = self._begin(rotation, key, grant.at), True
        recipient = _recipient_of(rotation)
        handover = self._sealed(rotation, recipient, held.text if held is not None else None)
        try:
            if held is None and _is_pending(rotation, key) and (pending := find_pending(key)) is not None:
                held = _HeldKey(key.key_id, pending.text, pending.after)
                handover = self._sealed(rotation, recipient, held.text)
            version = self._deploy(rotation, key, held)
            if handover is None and version is not None and recipient is not None:
                # Written by a worker that died before it recorded the delivery and the handover.
                handover = self._sealed(rotation, recipient, self._newest_text(key))
        except DependencyUnavailableError as error:
            # The entry of a write that may still arrive stays open, so that the end of the rotation prevents it.
            is_settled = not (isinstance(error, BackendError) and error.may_be_applied)
            if handover is None:
                if is_settled:
                    self._fail(entry, error.internal or error.detail, grant.at)
                raise
            version = None
        except KeyvaultError as error:
            self._fail(entry, error.internal or error.detail, grant.at)
            if held is None or entry.started_at < grant.at or not isinstance(error, BackendConflictError):
                raise
            # A version was written since the key was staged, so no later turn can write this one. It was never sent.
            self._stage(grant, rotation)
            return
        if version is None and handover is None:
            self._fail(entry, "its string is lost; discarded and made again", grant.at)
            self._stage(grant, rotation)
            return
        account = rotation.credential.account
        with recorded(grant, P.ROTATIONS_ADVANCE, "rotation.delivered", account=account, **about(rotation)):
            if version is not None and version != key.backend_version:
                note_stored(grant, key, version)
            rotation.compare_and_swap(
                delivered_at=grant.at,
                handover=handover or rotation.handover,
                awaits_requester=_is_shown_to_requester(rotation),
            )
            seen: dict[str, JsonValue] = {"key_id": key.key_id, "backend_version": version}
            note_evidence(rotation, EvidenceKind.DELIVERED, seen, grant.at)
            announce_replacement(grant, rotation)
            leases.hold(self.lease)
        if version is not None:
            # An older write expects an older version to be the newest, and fails.
            self._finish_deliveries(rotation, f"stored as version {version}")
        elif is_settled:
            self._finish(entry, "sealed to its recipient")
        for kept in list_pending(rotation, key):
            forget_copy(kept, self.clock())

    def _deploy(self, rotation: Rotation, key: Key, held: _HeldKey | None) -> int | None:
        """Return the backend's version that holds the key; None: its string is lost, and it was never delivered."""
        if held is not None:
            return store_string(key, held.text, purpose=rotation.rotation_id, after=held.after, fence=self._fence)
        stored = find_stored(key.credential)
        if stored is not None and stored.labels.get("key_id") == key.key_id:
            version = stored.version
        elif key.backend_version is None:
            return None
        else:
            # A rollback wrote the predecessor over the delivered replacement, and then the predecessor ended.
            try:
                text = recover_string(key, fence=self._fence)
                version = store_string(key, text, purpose=rotation.rotation_id, fence=self._fence)
            except BackendMissingError:
                return key.backend_version  # Collected and then destroyed: the merchant has it.
        if version != key.backend_version:
            # The older copy is destroyed before its version number is overwritten. A retry may find it destroyed.
            forget_string(key, fence=self._fence)
        return version

    def settle_delivery(self, grant: Grant, rotation: Rotation) -> None:
        """Record a copy whose writer died, before the rotation stalls. If the backend fails, a later step does."""
        if rotation.state == S.PUBLISHING and has_unsettled_delivery(rotation):
            # The stall needs only the database, and names its own reason.
            with suppress(DependencyUnavailableError, BackendError, ForeignWriterError):
                if (stored := find_stored(rotation.credential)) is not None:
                    self._note_found(grant, rotation, stored)

    def _newest_text(self, key: Key) -> Plaintext | None:
        newest = find_stored(key.credential)
        return newest.secret if newest is not None and newest.labels.get("key_id") == key.key_id else None

    def _sealed(self, rotation: Rotation, recipient: str | None, text: Plaintext | None) -> dict[str, str] | None:
        """Seal the replacement to its recipient key; None without one, or without the string."""
        if rotation.sealed_replacement is not None:
            return dict(rotation.sealed_replacement)
        if recipient is None or text is None or rotation.replacement_id is None:
            return None
        sealed = seal_to(recipient, text)
        return {"key_id": rotation.replacement_id, "enc": sealed.enc, "ciphertext": sealed.ciphertext}

    # --- delivering the predecessor again -------------------------------------------------------------------

    def write_back(self, grant: Grant, rotation: Rotation) -> None:
        """Make the predecessor what the merchant reads from the backend; a rollback records this as evidence.

        In a canceled rotation the backend may hold the dead replacement, since a worker died before it recorded the
        delivery. Its version is then recorded, so that the copy is destroyed.
        """
        number = None if rotation.replacement is None else newest_version(rotation.credential)
        if number:
            # None: a compromised replacement's copy may have been destroyed already.
            newest = find_stored(rotation.credential)
            entry = self._begin(rotation, rotation.predecessor, grant.at)
            self._finish(entry, self._predecessor_newest(grant, rotation, newest, number))
        if rotation.state == S.ROLLING_BACK and not _has_ended(rotation.predecessor, grant.at):
            self._note_written_back(grant, rotation)

    def _predecessor_newest(self, grant: Grant, rotation: Rotation, newest: StoredSecret | None, number: int) -> str:
        """Make the predecessor the newest version, record any other key of ours found there; return the outcome."""
        predecessor, version = rotation.predecessor, number if newest is None else newest.version
        is_predecessor = newest is not None and newest.labels.get("key_id") == predecessor.key_id
        if newest is not None and not is_predecessor:
            self._note_found(grant, rotation, newest)
        # A worker suspended during its write may still resume; the new version makes its check-and-set fail.
        is_needed = not is_predecessor or has_unsettled_delivery(rotation)
        if is_needed and not is_in_backend(predecessor):
            return "the predecessor was never in the backend, or is dead"
        if is_needed:
            text = recover_string(predecessor, fence=self._fence)
            # A new version even if the predecessor is the newest: a concurrent write on the older version then fails.
            version = store_string(
                predecessor, text, purpose=rotation.rotation_id, after=version, again=True, fence=self._fence
            )
        if version != predecessor.backend_version:
            # Destroy the older copy first: the row is about to name the new version only.
            forget_string(predecessor, fence=self._fence)
            self._note(grant, rotation, predecessor, version)
        return f"the predecessor is version {version}"

    def _note_found(self, grant: Grant, rotation: Rotation, stored: StoredSecret) -> None:
        """Record the version of a copy whose writer died or lost the reply, so that the copy is destroyed."""
        key_id, replacement = stored.labels.get("key_id"), rotation.replacement
        key = replacement if replacement is not None and replacement.key_id == key_id else get_key(key_id or "")
        if key is not None and key.credential_id == rotation.credential_id and key.backend_version != stored.version:
            forget_string(key, fence=self._fence)
            self._note(grant, rotation, key, stored.version)

    def _note_written_back(self, grant: Grant, rotation: Rotation) -> None:
        account = rotation.credential.account
        with recorded(grant, P.ROTATIONS_ADVANCE, "rotation.written_back", account=account, **about(rotation)):
            rotation.compare_and_swap(written_back_at=grant.at, entered_at=grant.at)
            seen: dict[str, JsonValue] = {
                "key_id": rotation.predecessor_id,
                "backend_version": rotation.predecessor.backend_version,
            }
            note_evidence(rotation, EvidenceKind.WRITTEN_BACK, seen, grant.at)
            announce(
                grant,
                NoticeKind.PREDECESSOR_AVAILABLE,
                account,
                rotation.rotation_id,
                **about(rotation),
                predecessor_key_id=rotation.predecessor_id,
                replacement_key_id=rotation.replacement_id,
                is_in_backend=is_in_backend(rotation.predecessor),
            )
            leases.hold(self.lease)

    def _note(self, grant: Grant, rotation: Rotation, key: Key, version: int) -> None:
        account = rotation.credential.account
        with recorded(grant, P.ROTATIONS_ADVANCE, "rotation.version_noted", account=account, **about(rotation)):
            note_stored(grant, key, version)
            leases.hold(self.lease)

    # --- the ledger -----------------------------------------------------------------------------------------

    def _begin(self, rotation: Rotation, key: Key, now: datetime) -> LedgerEntry:
        """Write the ledger row in its own transaction, before the side effect; a retry continues an open row."""
        of_step = {"rotation": rotation, "step": rotation.state, "key": key}
        unfinished = LedgerEntry.objects.filter(**of_step, state=LedgerState.STARTED)
        entry = unfinished.order_by("started_at").first()
        return entry or LedgerEntry.objects.create(**of_step, started_at=now)

    def _fail(self, entry: LedgerEntry, detail: str, began_at: datetime) -> None:
        """Record a failure. A row that an earlier attempt left open stays open: its write may still arrive.

        So does a row whose worker was overtaken: the other worker continues it.
        """
        if entry.started_at >= began_at and leases.is_held(self.lease):
            self._finish(entry, detail, LedgerState.FAILED)

    def _finish(self, entry: LedgerEntry, detail: str, state: LedgerState = LedgerState.DONE) -> None:
        LedgerEntry.objects.filter(pk=entry.pk).update(state=state, finished_at=self.clock(), detail=detail[:300])

    def _fence(self) -> None:
        """Renew the lease for one call that changes the backend. Raises StateConflictError when it is lost."""
        leases.renew(self.lease, self.clock())

    def _finish_deliveries(self, rotation: Rotation, detail: str) -> None:
        _open_deliveries(rotation).update(state=LedgerState.DONE, finished_at=self.clock(), detail=detail)


def _is_pending(rotation: Rotation, key: Key) -> bool:
    """Whether a key that was never delivered may have a pending copy. That of a delivered key only awaits erasure."""
    delivered = rotation.evidence.filter(kind=EvidenceKind.DELIVERED, seen__key_id=key.key_id)
    return list_pending(rotation, key).exists() and not delivered.exists()


def list_pending(rotation: Rotation, key: Key) -> QuerySet[LedgerEntry]:
    """List the entries of a key's pending copies that may still exist."""
    return rotation.ledger.filter(step=S.STAGED, key=key, state=LedgerState.STARTED).select_related(
        "key__credential__account"
    )


def forget_due(now: datetime) -> int:
    """Erase the pending copies of replacements that were delivered or discarded; return how many.

    A turn erases its own. This finds those that remain when a worker dies or the backend is unavailable.
    """
    undelivered = Q(state__in=_UNDELIVERED) | Q(stalled_from__in=_UNDELIVERED)
    rotations = Rotation.objects.filter(undelivered, pk=OuterRef("rotation"), delivered_at=None)
    needed = rotations.filter(replacement=OuterRef("key")).exclude(replacement__state__in=DEAD_STATES)
    due = LedgerEntry.objects.filter(~Exists(needed), step=S.STAGED, state=LedgerState.STARTED)
    erased = 0
    for environment in settings.ENVIRONMENTS:
        # An environment whose backend fails does not delay another.
        served = due.filter(key__credential__account__environment=environment)
        for entry in served.select_related("key__credential__account").order_by("started_at")[:_MAX_FORGOTTEN]:
            if not forget_copy(entry, now):
                break
            erased += 1
    return erased


_UNDELIVERED = [S.STAGED, S.PUBLISHING]
_MAX_FORGOTTEN = 100


def forget_copy(entry: LedgerEntry, now: datetime) -> bool:
    """Erase a pending copy and close its entry; False: the backend failed, and `forget_due` tries again."""
    if entry.key is not None:
        try:
            forget_pending(entry.key.credential.environment, entry.key.key_id)
        except BackendError as error:
            _log.warning("a pending copy is not erased yet", extra={"key_id": entry.key_id, "why": error.internal})
            return False
    LedgerEntry.objects.filter(pk=entry.pk).update(state=LedgerState.DONE, finished_at=now, detail="erased")
    return True


def has_unsettled_delivery(rotation: Rotation) -> bool:
    """Whether a write of the replacement, or of one that was discarded since, may still arrive in the backend."""
    return _open_deliveries(rotation).exists()


def _open_deliveries(rotation: Rotation) -> QuerySet[LedgerEntry]:
    deliveries = rotation.ledger.filter(step=S.PUBLISHING, state=LedgerState.STARTED)
    return deliveries.exclude(key=rotation.predecessor_id)  # written back by a cancellation


def announce_replacement(grant: Grant, rotation: Rotation) -> None:
    """Notify the merchant's webhook endpoints where the replacement is. Call it inside a `recorded` block.

    The message carries ids; it carries the replacement only if that is sealed to the recipient's key.
    """
    payload: dict[str, JsonValue] = {
        "rotation_id": rotation.rotation_id,
        "credential_id": rotation.credential_id,
        "replacement_key_id": rotation.replacement_id,
    }
    if rotation.handover is not None:
        payload["sealed"] = dict(rotation.handover)
    account = rotation.credential.account
    announce(grant, NoticeKind.REPLACEMENT_AVAILABLE, account, rotation.rotation_id, **payload)


def _recipient_of(rotation: Rotation) -> str | None:
    """Return the public key that the replacement is sealed to; None: it is not sealed."""
    return find_recipient(rotation.credential, rotation.created_at)


def _is_shown_to_requester(rotation: Rotation) -> bool:
    """Whether only the operator who requested the rotation receives the replacement, and has not collected it."""
    credential = rotation.credential
    if rotation.handover is not None or _recipient_of(rotation) is not None:
        return False
    is_shown_once = credential.delivery == Delivery.SHOW_ONCE and credential.kind == KeyKind.PRIVATE
    return is_shown_once and rotation.requested_via_id is None and rotation.collected_at is None


def _replacement(rotation: Rotation) -> Key:
    if rotation.replacement is None:
        raise StateConflictError("There is no replacement yet.", internal=rotation.rotation_id)
    return rotation.replacement


def _has_ended(key: Key, now: datetime) -> bool:
    return key.state in DEAD_STATES or (key.expires_at is not None and now >= key.expires_at)
