"""Signed checkpoints of the audit chains' heads, and verification of the log against them.

A checkpoint has no audit entry: each entry would be a change that needs another checkpoint. Its row is append-only,
and its signature is the evidence. An unavailable signer delays the next checkpoint and blocks nothing.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import IntegrityError as DatabaseIntegrityError
from django.db import transaction
from django.db.models import Q

from keyvault.access.permissions import Permission
from keyvault.access.principals import WORKER
from keyvault.backends import meters
from keyvault.domain.audit import PLATFORM_CHAIN, Break
from keyvault.domain.checkpoints import (
    FIRST,
    ROLLED_BACK,
    UNSIGNED_FOR,
    Checkpoint,
    CheckpointWalk,
    Head,
    KeptCheckpoints,
    KeyName,
    PublicKeys,
    SignedCheckpoint,
    checkpoint_bytes,
    find_signature_fault,
    parse_checkpoint,
)
from keyvault.domain.digests import PepperSet
from keyvault.domain.errors import IntegrityError, KeyvaultError
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import AuditChain, AuditCheckpoint, AuditEntry
from keyvault.services.audit.checkpoint_marks import CheckpointMarks, read_marks, write_marks
from keyvault.services.audit.signers import audit_signer
from keyvault.services.peppers.ring import list_served_sets
from keyvault.services.recording.audit_chain import stored_bytes
from keyvault.services.recording.authorization import authorize

CHECKPOINT_EVERY = timedelta(minutes=5)
"""Minimum interval between two checkpoints of a scope. An entry waits at most this plus one scheduler tick."""

_log = logging.getLogger(__name__)


def sign_due(now: datetime) -> int:
    """Sign the next checkpoint of each served scope whose chains have changed; return how many were stored.

    Safe to kill at any point and to run in several workers: one of them stores the checkpoint of a number, and the
    others discard theirs.
    """
    authorize(WORKER, Permission.AUDIT_SIGN, now=now)
    stored = sum(_sign_scope(scope, now) for scope in list_served_sets())
    for scope in list_served_sets():
        newest_at = _find_newest_at(scope)
        if newest_at is not None:
            meters.note_checkpoint(scope, newest_at)
    return stored


def find_newest(scope: str) -> SignedCheckpoint | None:
    row = AuditCheckpoint.objects.filter(scope=scope).order_by("-number").first()
    return None if row is None else _signed(row)


def find_checkpoint(scope: str, number: int) -> SignedCheckpoint | None:
    row = AuditCheckpoint.objects.filter(scope=scope, number=number).first()
    return None if row is None else _signed(row)


def list_checkpoints(scope: str, *, first: int = 0) -> Iterator[SignedCheckpoint]:
    """Iterate over the scope's checkpoints from number `first` on, oldest first, in bounded memory."""
    rows = AuditCheckpoint.objects.filter(scope=scope, number__gte=first).order_by("number")
    return (_signed(row) for row in rows.iterator(chunk_size=50))


def read_heads(scope: str) -> dict[str, Head]:
    """Return the head of every non-empty chain of the scope, in one query, so that they are consistent."""
    # The database selects: the other scopes may have most of the chains.
    of_scope = Q(name=PLATFORM_CHAIN) if scope == PepperSet.SERVICE else Q(name__endswith=f"/{scope}")
    rows = AuditChain.objects.filter(of_scope, sequence__gt=0).order_by("name")
    heads = rows.values_list("name", "sequence", "head_hash")
    return {name: Head(sequence, stored_bytes(digest)) for name, sequence, digest in heads}


def find_entry_hash(chain: str, sequence: int) -> bytes | None:
    found = AuditEntry.objects.filter(chain_id=chain, sequence=sequence).order_by("sequence")
    digest = found.values_list("hash", flat=True).first()
    return None if digest is None else stored_bytes(digest)


def find_entry_time(chain: str, sequence: int) -> datetime | None:
    found = AuditEntry.objects.filter(chain_id=chain, sequence=sequence).order_by("sequence")
    return found.values_list("at", flat=True).first()


def gather_public_keys(given: PublicKeys) -> tuple[dict[KeyName, bytes], dict[str, str]]:
    """Return the signers' public keys, overridden by `given`, and the reason for each scope that has neither."""
    known, unavailable = read_public_keys()
    files = {scope for scope, _, _ in given}
    return {**known, **given}, {scope: why for scope, why in unavailable.items() if scope not in files}


def read_public_keys() -> tuple[dict[KeyName, bytes], dict[str, str]]:
    """Return the public keys of this service's signers, and the reason for each scope whose signer is unavailable.

    Does not raise for an unavailable signer.
    """
    keys: dict[KeyName, bytes] = {}
    unavailable = {
        scope.value: "this process does not serve it" for scope in PepperSet if scope not in list_served_sets()
    }
    signer = audit_signer()
    for scope in list_served_sets():
        try:
            found = signer.read_public_keys(scope)
        except KeyvaultError as error:
            unavailable[scope.value] = error.internal or error.detail
        else:
            keys |= {(scope.value, signer.name(scope), version): key for version, key in found.items()}
    return keys, unavailable


# --- signing ----------------------------------------------------------------------------------------------------


def _sign_scope(scope: PepperSet, now: datetime) -> bool:
    try:
        return _sign_next(scope, now)
    except IntegrityError as error:
        _log.error("the audit log is damaged: no checkpoint is signed", extra=_log_fields(scope, error))
    except KeyvaultError as error:
        _log.warning("a checkpoint of the audit log is delayed", extra=_log_fields(scope, error))
    return False


def _sign_next(scope: PepperSet, now: datetime) -> bool:
    newest_at = _find_newest_at(scope)
    if newest_at is not None and timedelta(0) <= now - newest_at < CHECKPOINT_EVERY:
        return False
    # Read the marks before the newest checkpoint, and that before the heads, so that concurrent writes cannot put one
    # ahead of the next.
    marks = read_marks(scope)
    signed = find_newest(scope)
    heads = read_heads(scope)
    _require_marked(scope, signed, marks)
    before = None if signed is None else _require_intact(signed, heads)
    if signed is not None and (marks.stored is None or marks.stored.number < signed.number):
        if _is_own(signed):
            # A worker was killed between the two, or the backend is new. The next run signs.
            write_marks(signed, now, marks)
            return False
        _require_marked_entries(scope, marks, heads)
    if heads == ({} if before is None else before.heads):
        return False
    number, previous = (1, FIRST) if signed is None else (signed.number + 1, signed.digest)
    body = checkpoint_bytes(Checkpoint(scope, number, now, previous, heads))
    signer = audit_signer()
    result = signer.sign(scope, body)
    made = SignedCheckpoint(scope, number, body, result.signature, signer.name(scope), result.key_version)
    if not _store(made, now):
        return False
    write_marks(made, now, marks)
    return True


def _require_marked(scope: str, newest: SignedCheckpoint | None, marks: CheckpointMarks) -> None:
    """Require every checkpoint that was recorded outside the database. Raises IntegrityError.

    Otherwise the service would sign a log that was rewritten without its checkpoints.
    """
    why = find_mark_fault(scope, newest, marks)
    if why is not None:
        raise IntegrityError(
            "The audit log is damaged.",
            internal=f"{scope} {why}; after restoring a backup, run: manage.py accept_audit_rollback",
        )


def find_mark_fault(scope: str, newest: SignedCheckpoint | None, marks: CheckpointMarks) -> str | None:
    """Return how the checkpoints differ from the marks, or None."""
    for mark in marks:
        found = newest if newest is not None and newest.number == mark.number else find_checkpoint(scope, mark.number)
        if found is None:
            return f"checkpoint {mark.number} was recorded outside the database and is missing: {ROLLED_BACK}"
        if found.digest.hex() != mark.digest:
            return f"checkpoint {mark.number} differs from the one that was recorded outside the database"
    return None


def _is_own(signed: SignedCheckpoint) -> bool:
    """Whether this service's signer has signed a checkpoint; False: it names another signer, such as a replaced one.

    Only own checkpoints are recorded outside the database. Raises IntegrityError if it names this service's signer and
    the signature is not valid: a lost signing key must be restored, and the checkpoint may be forged.
    """
    signer = audit_signer()
    name = signer.name(signed.scope)
    if signed.signer != name:
        return False
    versions = signer.read_public_keys(signed.scope)
    why = find_signature_fault(signed, {(signed.scope, name, version): key for version, key in versions.items()})
    if why is not None:
        raise IntegrityError("The audit log is damaged.", internal=f"{signed.scope} checkpoint {signed.number}: {why}")
    return True


def find_newest_own(scope: str) -> SignedCheckpoint | None:
    """Return the newest checkpoint; None: there is none, or it names another signer.

    Raises IntegrityError if it may be forged, see `_is_own`, or the log differs from it.
    """
    signed = find_newest(scope)
    if signed is None or not _is_own(signed):
        return None
    _require_intact(signed, read_heads(scope))
    return signed


def _require_marked_entries(scope: str, marks: CheckpointMarks, heads: dict[str, Head]) -> None:
    """Require the entries that the checkpoints recorded outside the database sign. Raises IntegrityError.

    The newest checkpoint proves nothing about them if this service's signer did not sign it: a person who can write to
    the database may have forged it for a log that was rewritten.
    """
    for mark in marks:
        marked = find_checkpoint(scope, mark.number)
        if marked is not None:
            _require_intact(marked, heads)


def _require_intact(signed: SignedCheckpoint, heads: dict[str, Head]) -> Checkpoint:
    """Return a checkpoint, parsed. Raises IntegrityError when the log differs from it.

    A damaged log gets no further checkpoints.
    """
    try:
        checkpoint = parse_checkpoint(signed.body)
    except ValueError:
        why: str | None = "its bytes are no checkpoint"
    else:
        why = _find_mismatch(checkpoint, heads)
        if why is None:
            return checkpoint
    raise IntegrityError("The audit log is damaged.", internal=f"{signed.scope} checkpoint {signed.number}: {why}")


def _find_mismatch(checkpoint: Checkpoint, heads: dict[str, Head]) -> str | None:
    """Return how the log differs from a checkpoint, or None."""
    for chain, head in checkpoint.heads.items():
        now = heads.get(chain)
        if now is None or now.sequence < head.sequence:
            return f"chain {chain} ends before entry {head.sequence}, which it signs"
        if now != head and find_entry_hash(chain, head.sequence) != head.hash:
            return f"entry {head.sequence} of chain {chain} differs from the one that it signs"
    return None


def _store(signed: SignedCheckpoint, at: datetime) -> bool:
    """Store a checkpoint; return False when another worker was first."""
    try:
        with transaction.atomic():
            AuditCheckpoint.objects.create(
                scope=signed.scope,
                number=signed.number,
                at=at,
                body=signed.body,
                signature=signed.signature,
                signer=signed.signer,
                key_version=signed.key_version,
            )
    except DatabaseIntegrityError:
        if not AuditCheckpoint.objects.filter(scope=signed.scope, number=signed.number).exists():
            raise
        return False
    # Log collectors keep this line as independent evidence that the checkpoint existed.
    _log.info(
        "a checkpoint of the audit log was signed",
        extra={"scope": signed.scope, "number": signed.number, "digest": signed.digest.hex(), "signer": signed.signer},
    )
    return True


def _find_newest_at(scope: str) -> datetime | None:
    """Return the newest checkpoint's time without loading its body, which grows with the number of chains."""
    return AuditCheckpoint.objects.filter(scope=scope).order_by("-number").values_list("at", flat=True).first()


def _log_fields(scope: PepperSet, error: KeyvaultError) -> dict[str, str]:
    newest = _find_newest_at(scope)
    since = "none yet" if newest is None else format_timestamp(newest)
    return {"scope": scope.value, "why": error.internal or error.detail, "newest_checkpoint": since}


def _signed(row: AuditCheckpoint) -> SignedCheckpoint:
    body, signature = stored_bytes(row.body), stored_bytes(row.signature)
    return SignedCheckpoint(row.scope, row.number, body, signature, row.signer, row.key_version, row.at)


# --- checking ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScopeReport:
    """Result of verifying one scope.

    `unsigned`: number of entries after the newest checkpoint, which are chained only. `unchecked`: why the signatures
    could not be verified; None: all were. `unmarked`: why the checkpoints could not be compared with the newest one
    recorded outside the database; None: they were. `overdue`: which entries exceed UNSIGNED_FOR; None: none do.
    `late`: number of checkpoints that sign an entry older than that, which could have been changed until then.
    """

    scope: str
    checkpoints: int
    newest: SignedCheckpoint | None
    unsigned: int
    unchecked: str | None
    unmarked: str | None
    broken: Break | None
    overdue: str | None
    late: int
    first_late: str | None


def verify_checkpoints(
    keys: PublicKeys, kept: KeptCheckpoints, unchecked: Mapping[str, str], now: datetime
) -> list[ScopeReport]:
    """Verify every checkpoint: its signature, its predecessor, the entries, and the checkpoints recorded elsewhere.

    Those are the ones that an auditor kept, and the newest one that the service recorded outside the database.

    `unchecked`: why the signatures of a scope cannot be verified. Everything else in that scope is still verified.
    """
    return [_verify_scope(scope.value, keys, kept, unchecked.get(scope.value), now) for scope in PepperSet]


def _verify_scope(
    scope: str, keys: PublicKeys, kept: KeptCheckpoints, unchecked: str | None, now: datetime
) -> ScopeReport:
    # Read the marks first, so that concurrent signing cannot put them ahead.
    marks, unmarked = _read_available_marks(scope)
    walk = CheckpointWalk(scope, None if unchecked else keys, _add_marks(kept, marks))
    broken: tuple[int, str] | None = None
    for signed in list_checkpoints(scope):
        why = walk.take(signed, find_entry_hash, find_entry_time)
        if why is not None:
            broken = (signed.number, why)
            break
    else:
        broken = walk.find_end_fault()
    # Read the heads after the walk, so that concurrent writes are counted and none seems to be missing.
    heads = read_heads(scope)
    if broken is None and walk.newest is not None:
        why = _find_mismatch(walk.newest, heads)
        broken = None if why is None else (walk.newest.number, why)
    return ScopeReport(
        scope=scope,
        checkpoints=walk.count,
        newest=walk.newest_signed,
        unsigned=count_unsigned(walk.newest, heads),
        unchecked=unchecked,
        unmarked=unmarked,
        broken=None if broken is None else Break(f"checkpoints:{scope}", *broken),
        overdue=_find_overdue(walk.newest, heads, now) if broken is None else None,
        late=walk.late,
        first_late=walk.first_late,
    )


def _read_available_marks(scope: str) -> tuple[CheckpointMarks | None, str | None]:
    """Return the marks of a scope, or None and the reason why there is nothing to compare with."""
    if scope not in list_served_sets():
        return None, "this process does not serve it"
    try:
        # A new host has no revocation log until its first start; the secret backend's mark suffices.
        marks = read_marks(scope, needs_log=False)
    except KeyvaultError as error:
        return None, error.internal or error.detail
    return marks, None if list(marks) else "none is recorded yet"


def _add_marks(kept: KeptCheckpoints, marks: CheckpointMarks | None) -> KeptCheckpoints:
    merged = dict(kept)
    for mark in marks or ():
        name = (mark.scope, mark.number)
        merged[name] = merged.get(name, frozenset()) | {bytes.fromhex(mark.digest)}
    return merged


def _find_overdue(newest: Checkpoint | None, heads: dict[str, Head], now: datetime) -> str | None:
    """Return which entries exceed UNSIGNED_FOR, or None."""
    signed = {} if newest is None else newest.heads
    for chain, head in heads.items():
        first = signed[chain].sequence + 1 if chain in signed else 1
        if first > head.sequence:
            continue
        unsigned = AuditEntry.objects.filter(chain_id=chain, sequence=first).order_by("sequence")
        at = unsigned.values_list("at", flat=True).first()
        if at is not None and now - at > UNSIGNED_FOR:
            return (
                f"entry {first} of chain {chain} has been unsigned since {at:%Y-%m-%d %H:%M} UTC: the worker or its "
                "signer has been unavailable since, or checkpoints were deleted"
            )
    return None


def count_unsigned(newest: Checkpoint | None, heads: dict[str, Head]) -> int:
    """Return the number of entries after the newest checkpoint."""
    signed = {} if newest is None else newest.heads
    return sum(
        max(0, head.sequence - (signed[chain].sequence if chain in signed else 0)) for chain, head in heads.items()
    )


@dataclass(frozen=True, slots=True)
class CheckpointStatus:
    """The newest checkpoint of a scope and its fault, for the console. `fault` None: it is valid."""

    scope: str
    newest: SignedCheckpoint | None
    unsigned: int
    unchecked: str | None
    fault: str | None


def list_checkpoint_status() -> list[CheckpointStatus]:
    """Return the status of each served scope's newest checkpoint; `verify_checkpoints` verifies all of them."""
    keys, unavailable = read_public_keys()
    return [_checkpoint_status(scope.value, keys, unavailable.get(scope.value)) for scope in list_served_sets()]


def _checkpoint_status(scope: str, keys: PublicKeys, unchecked: str | None) -> CheckpointStatus:
    marks, unmarked = _read_available_marks(scope)
    signed = find_newest(scope)
    heads = read_heads(scope)
    fault = None if marks is None else find_mark_fault(scope, signed, marks)
    if signed is None:
        return CheckpointStatus(scope, None, count_unsigned(None, heads), unchecked, fault)
    if fault is not None:
        return CheckpointStatus(scope, signed, 0, unchecked, fault)
    try:
        checkpoint = _require_intact(signed, heads)
    except IntegrityError as error:
        return CheckpointStatus(scope, signed, 0, unchecked, error.internal)
    fault = None if unchecked else find_signature_fault(signed, keys)
    return CheckpointStatus(scope, signed, count_unsigned(checkpoint, heads), unchecked or unmarked, fault)
