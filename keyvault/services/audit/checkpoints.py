"""Signed checkpoints of the audit chains' heads, and verification of the log against them.

A checkpoint has no audit entry: each entry would be a change that needs another checkpoint. Its row is append-only,
and its signature is the evidence. An unavailable signer delays the next checkpoint and blocks nothing.

A checkpoint signs the heads of the chains that have changed. Before it signs, the worker compares the entries of these
chains and of some others, in turn, with the checkpoints that their rows name. These rows can be forged together
with the entries, so it also compares the entries with some other checkpoints in turn. If they differ, it signs nothing.
Only `verify_checkpoints` reads all checkpoints.
"""

import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import IntegrityError as DatabaseIntegrityError
from django.db import connection, transaction
from django.db.models import F, OuterRef, Q, QuerySet, Subquery
from django.db.models.functions import Coalesce

from keyvault.access.permissions import Permission
from keyvault.access.principals import WORKER
from keyvault.backends import meters
from keyvault.domain.audit import PLATFORM_CHAIN, Break, account_chain, chains_with
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
    find_version_fault,
    parse_checkpoint,
    scope_of,
)
from keyvault.domain.digests import PepperSet
from keyvault.domain.errors import IntegrityError, KeyvaultError
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import Account, AuditChain, AuditCheckpoint, AuditEntry
from keyvault.models.union_parts import limit_part
from keyvault.services.audit.checkpoint_marks import CheckpointMarks, read_marks, write_marks
from keyvault.services.audit.signers import audit_signer
from keyvault.services.peppers.ring import list_served_sets
from keyvault.services.recording.audit_chain import stored_bytes
from keyvault.services.recording.authorization import authorize
from keyvault.services.work import leases

CHECKPOINT_EVERY = timedelta(minutes=5)
"""Minimum interval between two checkpoints of a scope. An entry waits at most this plus one scheduler tick."""

MAX_HEADS = 500
"""Maximum number of chains that a checkpoint signs; further ones are signed by the next one."""

MAX_CHECKPOINTS = 20
"""Maximum number of checkpoints of a scope in one run. The next run continues."""

CHECKED_ACCOUNTS = 100
"""Number of accounts whose chains are compared with their checkpoints, in turn, before each signature."""

READ_CHECKPOINTS = 5
"""Number of different checkpoints after which the comparison stops. The chains of CHECKED_ACCOUNTS may name more."""

WALKED_CHECKPOINTS = 20
"""Maximum number of checkpoints whose heads are compared with the entries, in turn, in each run.

After MAX_HEADS heads the next run continues.
"""

HEADS_TOGETHER = 100
"""Number of heads whose entries one query reads."""

NOTED_TOGETHER = 50
"""Number of chains whose rows one transaction updates after a signature."""

_log = logging.getLogger(__name__)


def sign_due(now: datetime) -> int:
    """Sign the next checkpoint of each served scope whose chains have changed; return how many were stored.

    Safe to kill at any point and to run in several workers: one of them has the lease of a scope. If its lease is
    lost, one worker stores the checkpoint of a number, and the other discards its own.
    """
    authorize(WORKER, Permission.AUDIT_SIGN, now=now)
    stored = sum(_sign_scope(scope, now) for scope in list_served_sets())
    for scope in list_served_sets():
        newest_at = _find_newest_at(scope)
        if newest_at is not None:
            meters.note_checkpoint(scope, newest_at)
        oldest = _list_unsigned(scope).values_list("unsigned_since", flat=True).first()
        meters.note_unsigned(scope, oldest)
    return stored


def find_newest(scope: str) -> SignedCheckpoint | None:
    row = AuditCheckpoint.objects.filter(scope=scope).order_by("-number").first()
    return None if row is None else _signed(row)


def find_checkpoint(scope: str, number: int) -> SignedCheckpoint | None:
    row = AuditCheckpoint.objects.filter(scope=scope, number=number).first()
    return None if row is None else _signed(row)


def list_checkpoints(scope: str) -> Iterator[SignedCheckpoint]:
    """Iterate over the scope's checkpoints, oldest first, in bounded memory."""
    rows = AuditCheckpoint.objects.filter(scope=scope).order_by("number")
    return (_signed(row) for row in rows.iterator(chunk_size=50))


def read_heads(scope: str) -> dict[str, Head]:
    """Return the head of every non-empty chain of the scope, in one query, so that they are consistent."""
    return _as_heads(_list_chains(scope).filter(sequence__gt=0).order_by("name").only("name", "sequence", "head_hash"))


def _list_chains(scope: str) -> QuerySet[AuditChain]:
    """Return the chains of a scope by their names, because the column may have been forged."""
    # The database selects: the other scopes may have most of the chains.
    return AuditChain.objects.filter(
        Q(name=PLATFORM_CHAIN) if scope == PepperSet.SERVICE else Q(name__endswith=f"/{scope}")
    )


def _as_heads(chains: Iterable[AuditChain]) -> dict[str, Head]:
    return {chain.name: Head(chain.sequence, stored_bytes(chain.head_hash)) for chain in chains}


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


def signing_lease(scope: str) -> str:
    """Return the lease of a scope's signature. Its row has an error while the audit log is damaged."""
    return f"audit:sign:{scope}"


def _sign_scope(scope: PepperSet, now: datetime) -> int:
    """Sign the scope's changed chains, MAX_HEADS at a time; return the number of checkpoints."""
    newest_at = _find_newest_at(scope)
    if newest_at is not None and timedelta(0) <= now - newest_at < CHECKPOINT_EVERY:
        return 0
    lease = leases.claim(signing_lease(scope), now)
    if lease is None:
        return 0
    count = 0
    try:
        _require_next_checkpoints(scope)
        for _ in range(MAX_CHECKPOINTS):
            heads = _sign_next(scope, now, lease)
            count += heads > 0
            if heads < MAX_HEADS:
                break
    except IntegrityError as error:
        _log.error("the audit log is damaged: no checkpoint is signed", extra=_log_fields(scope, error))
        leases.fail(lease, now, error.internal or error.detail)  # The console shows it.
    except KeyvaultError as error:
        _log.warning("a checkpoint of the audit log is delayed", extra=_log_fields(scope, error))
    finally:
        leases.release(lease)
    return count


def _sign_next(scope: PepperSet, now: datetime, lease: leases.Lease) -> int:
    """Compare the next chains, and sign those that have changed; return their number, 0 if no checkpoint was stored."""
    leases.renew(lease, datetime.now(UTC))
    # Read the marks, then the newest checkpoint, then the heads. In another order, a checkpoint or an entry that is
    # written meanwhile would seem to be missing.
    marks = read_marks(scope)
    signed = find_newest(scope)
    _require_marked(scope, signed, marks)
    is_marked = signed is None or (marks.stored is not None and marks.stored.number >= signed.number)
    if signed is not None and not is_marked and _is_own(signed, _read_own_keys(scope)):
        # A worker was killed between the two, or the backend is new. The next run signs.
        write_marks(signed, now, marks)
        return 0
    chains = list(_list_unsigned(scope))
    if chains and not is_marked:
        # The newest checkpoint proves nothing if this service's signer did not sign it: a person who can write to the
        # database may have forged it for a log that was rewritten.
        _require_complete(scope, marks, lease)
    checked, checked_through = _list_next_checked(scope, signed)
    # Use one reading of each row: another worker may sign its chain meanwhile.
    _require_signed_entries(scope, list({chain.name: chain for chain in [*chains, *checked]}.values()))
    if not chains:
        if signed is not None:
            _positions[scope] = signed.digest, checked_through
        return 0
    number, previous = (1, FIRST) if signed is None else (signed.number + 1, signed.digest)
    heads = _as_heads(chains)
    body = checkpoint_bytes(Checkpoint(scope, number, now, previous, heads, checked_through))
    signer = audit_signer()
    result = signer.sign(scope, body)
    made = SignedCheckpoint(scope, number, body, result.signature, signer.name(scope), result.key_version)
    if not _store(made, now, heads):
        return 0
    write_marks(made, now, marks)
    return len(heads)


def _list_unsigned(scope: str) -> QuerySet[AuditChain]:
    """Return the chains with unsigned entries, at most MAX_HEADS, those that have waited longest first."""
    return _order_unsigned(scope)[:MAX_HEADS]


def _order_unsigned(scope: str) -> QuerySet[AuditChain]:
    unsigned = AuditChain.objects.filter(scope=scope, unsigned_since__isnull=False)
    return unsigned.order_by("unsigned_since")


_positions: dict[str, tuple[bytes, int]] = {}
"""For each scope, the digest of its newest checkpoint, and how far this process has come through the accounts since."""


def _list_next_checked(scope: str, signed: SignedCheckpoint | None) -> tuple[list[AuditChain], int]:
    """Return the chains of the next accounts in turn, and the id of the last account; 0: every account had its turn.

    The scope of the service has only the platform's chain. Raises IntegrityError when one of these chains is missing.
    """
    if scope == PepperSet.SERVICE:
        names_of = {0: {PLATFORM_CHAIN}}
    else:
        after = Account.objects.filter(environment=scope, pk__gt=_find_position(signed)).order_by("pk")
        names_of = {
            each.pk: set(chains_with(account_chain(each.merchant_id, each.environment)))
            for each in after[:CHECKED_ACCOUNTS]
        }
    found = {chain.name: chain for chain in AuditChain.objects.filter(name__in=set().union(*names_of.values()))}
    chains, read = list[AuditChain](), set[int]()
    for checked_through, names in names_of.items():
        missing = sorted(names - found.keys())
        if missing and not (signed is None and scope == PepperSet.SERVICE):  # The first entry creates the platform's.
            raise IntegrityError("The audit log is damaged.", internal=f"chain {missing[0]} is missing")
        compared = [found[name] for name in names if name in found]
        chains += compared
        read |= {chain.signed_in for chain in compared if chain.signed_in}
        if len(read) >= READ_CHECKPOINTS:
            return chains, checked_through
    return chains, max(names_of) if len(names_of) == CHECKED_ACCOUNTS else 0


def _find_position(signed: SignedCheckpoint | None) -> int:
    """Return the id of the account after which the next comparison begins."""
    if signed is None:
        return 0
    digest, position = _positions.get(signed.scope, (b"", 0))
    return position if digest == signed.digest else _parse(signed).checked_through


def _require_signed_entries(scope: str, chains: Sequence[AuditChain]) -> None:
    """Require that each chain agrees with the checkpoint that its row names. Raises IntegrityError.

    A forged row can name an older checkpoint than the chain's last one; `verify_checkpoints` finds that.
    """
    signed = _read_signed_heads(scope, chains)
    faults = (_find_row_fault(scope, chain, signed.get(chain.name)) for chain in chains)
    why = next((fault for fault in faults if fault is not None), None) or _find_mismatch(signed, _as_heads(chains))
    if why is not None:
        raise IntegrityError("The audit log is damaged.", internal=f"{scope}: {why}")


def _read_signed_heads(scope: str, chains: Sequence[AuditChain]) -> dict[str, Head]:
    """Return the head of each chain in the checkpoint that its row names. Raises IntegrityError if that is forged."""
    names: dict[int, list[str]] = {}
    for chain in chains:
        if chain.signed_in:
            names.setdefault(chain.signed_in, []).append(chain.name)
    if not names:
        return {}
    keys, found, foreign = _read_own_keys(scope), dict[str, Head](), list[int]()
    for row in AuditCheckpoint.objects.filter(scope=scope, number__in=names).iterator(chunk_size=50):
        signed = _signed(row)
        if not _is_own(signed, keys):
            foreign.append(signed.number)
        heads = _parse(signed).heads
        found |= {name: heads[name] for name in names[signed.number] if name in heads}
    if foreign:
        _require_former_signer(scope, foreign)
    return found


def _require_former_signer(scope: str, foreign: Sequence[int]) -> None:
    """Require that another signer's checkpoints were signed before this service's signer began. Raises IntegrityError.

    Their signatures cannot be verified here. Compares with the first checkpoint and the ones before them.
    """
    before = AuditCheckpoint.objects.filter(scope=scope, number__in={1, *(number - 1 for number in foreign)})
    own = before.filter(signer=audit_signer().name(scope)).order_by("number").values_list("number", flat=True).first()
    if own is not None and max(foreign) > own:
        why = "it names another signer, but this service's signer has signed an earlier one"
        raise IntegrityError("The audit log is damaged.", internal=f"{scope} checkpoint {max(foreign)}: {why}")


_walked: dict[str, int] = {}
"""Number of the checkpoint of each scope that this process compared last. It begins at a random one."""


def _require_next_checkpoints(scope: str) -> None:
    """Compare what the next checkpoints in turn sign with the entries. Raises IntegrityError.

    A checkpoint of this service's signer cannot be forged with the database alone. The next run compares a damaged
    one again.
    """
    newest = find_newest(scope)
    if newest is None:
        return
    last = _walked.setdefault(scope, secrets.randbelow(newest.number))
    if last >= newest.number:
        last = 0
    keys, compared = _read_own_keys(scope), 0
    for number in range(last + 1, min(last + WALKED_CHECKPOINTS, newest.number) + 1):
        signed = find_checkpoint(scope, number)
        if signed is None:
            why = f"{scope} checkpoint {number} is missing"
            raise IntegrityError("The audit log is damaged.", internal=why)
        heads = _parse(signed).heads
        difference = _find_difference(heads) if _is_own(signed, keys) else None
        if difference is not None:
            why = f"{scope} checkpoint {number}: {difference}"
            raise IntegrityError("The audit log is damaged.", internal=why)
        _walked[scope] = number
        compared += len(heads)
        if compared >= MAX_HEADS:
            return


def _find_difference(heads: Mapping[str, Head]) -> str | None:
    """Return how the entries differ from the heads that a checkpoint signs, or None."""
    signed = list(heads.items())
    for start in range(0, len(signed), HEADS_TOGETHER):
        some = signed[start : start + HEADS_TOGETHER]
        found = _find_hashes([(chain, head.sequence) for chain, head in some])
        for chain, head in some:
            if found.get(chain) != head.hash:
                return f"entry {head.sequence} of chain {chain} differs from the one that it signs"
    return None


_FIND_HASHES = "SELECT chain_id, hash FROM keyvault_auditentry WHERE (chain_id, sequence) IN (VALUES %PLACES)"


def _find_hashes(entries: Sequence[tuple[str, int]]) -> dict[str, bytes]:
    """Return the hash of each chain's entry of this number; without the missing ones."""
    # The ORM has no row values, and takes longer to build a list of conditions than the database takes to answer.
    places = ", ".join(["(%s, %s)"] * len(entries))
    with connection.cursor() as cursor:
        cursor.execute(_FIND_HASHES.replace("%PLACES", places), [value for entry in entries for value in entry])
        return {chain: stored_bytes(digest) for chain, digest in cursor}


def _find_row_fault(scope: str, chain: AuditChain, signed: Head | None) -> str | None:
    """Return why the chain's row may keep entries from being signed, or None. `signed`: the head signed last."""
    if chain.scope != scope or scope_of(chain.name) != scope:
        return f"chain {chain.name} is recorded in the scope {chain.scope}"
    if chain.signed_sequence > (0 if signed is None else signed.sequence):
        return (
            f"chain {chain.name} is recorded as signed up to entry {chain.signed_sequence}, which no checkpoint signs"
        )
    if chain.sequence > chain.signed_sequence and chain.unsigned_since is None:
        return f"chain {chain.name} has unsigned entries, but is recorded as signed"
    return None


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


def _read_own_keys(scope: str) -> PublicKeys:
    """Return the public keys of this service's signer."""
    signer = audit_signer()
    return {(scope, signer.name(scope), version): key for version, key in signer.read_public_keys(scope).items()}


def _is_own(signed: SignedCheckpoint, keys: PublicKeys) -> bool:
    """Whether this service's signer has signed a checkpoint; False: it names another signer, such as a replaced one.

    Only own checkpoints are recorded outside the database. Raises IntegrityError if it names this service's signer and
    the signature or the key's version is not valid: a lost signing key must be restored, and the checkpoint may be
    forged.
    """
    if signed.signer != audit_signer().name(signed.scope):
        return False
    why = _find_key_fault(signed, keys)
    if why is not None:
        raise IntegrityError("The audit log is damaged.", internal=f"{signed.scope} checkpoint {signed.number}: {why}")
    return True


def _find_key_fault(signed: SignedCheckpoint, keys: PublicKeys) -> str | None:
    """Return why the signature, or the version of the key that made it, is not valid, or None."""
    return find_signature_fault(signed, keys) or find_version_fault(signed, _highest_version_before(signed, keys))


def _highest_version_before(signed: SignedCheckpoint, keys: PublicKeys) -> int:
    """Return the highest version that signed an earlier checkpoint, if it is higher than the checkpoint's; 0: none.

    The checkpoint before it proves nothing: it may name another signer, or be forged with a former version, too.
    """
    own = {version for scope, signer, version in keys if (scope, signer) == (signed.scope, signed.signer)}
    rows = AuditCheckpoint.objects.filter(scope=signed.scope, signer=signed.signer)
    # The order is that of the index. Without it, PostgreSQL may read all rows to find one of a frequent version.
    firsts = rows.order_by("key_version", "number").values_list("key_version", "number")
    for version in sorted(own, reverse=True):
        if version <= signed.key_version:
            break
        first = firsts.filter(key_version__gte=version).first()
        if first is not None and first[1] < signed.number:
            return int(first[0])
    return 0


def find_newest_own(scope: str) -> SignedCheckpoint | None:
    """Return the newest checkpoint; None: there is none, or it names another signer.

    Raises IntegrityError if it may be forged, see `_is_own`, or the log differs from the checkpoints.
    """
    signed = find_newest(scope)
    if signed is None or not _is_own(signed, _read_own_keys(scope)):
        return None
    _require_complete(scope, None)
    return signed


def forget_missing_checkpoints(scope: str) -> None:
    """Record the chains as unsigned from their first entry that a missing checkpoint signed."""
    newest = AuditCheckpoint.objects.filter(scope=scope).order_by("-number").values_list("number", flat=True).first()
    chains = AuditChain.objects.filter(scope=scope, signed_in__gt=newest or 0)
    first = AuditEntry.objects.filter(chain_id=OuterRef("name"), sequence=1).values("at")
    chains.update(signed_in=0, signed_sequence=0, unsigned_since=Coalesce(Subquery(first), F("newest_at")))


def _require_complete(scope: str, marks: CheckpointMarks | None, lease: leases.Lease | None = None) -> None:
    """Require every checkpoint, those recorded outside the database, and the entries. Raises IntegrityError.

    Reads all checkpoints, so call it only in rare cases. Renews the lease; raises StateConflictError when it is lost.
    """
    walk, broken = _walk(scope, None, _add_marks({}, marks), lease)
    if broken is not None:
        raise IntegrityError("The audit log is damaged.", internal=f"{scope} checkpoint {broken[0]}: {broken[1]}")
    why = _find_mismatch(walk.heads, read_heads(scope))
    if why is not None:
        raise IntegrityError("The audit log is damaged.", internal=f"{scope}: {why}")


def _parse(signed: SignedCheckpoint) -> Checkpoint:
    """Return a checkpoint, parsed. Raises IntegrityError."""
    try:
        checkpoint = parse_checkpoint(signed.body)
    except ValueError:
        why = "its bytes are not a checkpoint"
    else:
        if (checkpoint.scope, checkpoint.number) == (signed.scope, signed.number):
            return checkpoint
        why = "its columns differ from its bytes"
    raise IntegrityError("The audit log is damaged.", internal=f"{signed.scope} checkpoint {signed.number}: {why}")


def _find_mismatch(signed: Mapping[str, Head], heads: Mapping[str, Head]) -> str | None:
    """Return how the log differs from the signed heads, or None."""
    for chain, head in signed.items():
        now = heads.get(chain)
        if now is None or now.sequence < head.sequence:
            return f"chain {chain} ends before entry {head.sequence}, which it signs"
    return _find_difference({chain: head for chain, head in signed.items() if heads[chain] != head})


def _store(signed: SignedCheckpoint, at: datetime, heads: Mapping[str, Head]) -> bool:
    """Store a checkpoint, then note it in the rows of its chains; return False when another worker was first."""
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
    _note_signed(signed.number, heads)
    return True


def _note_signed(number: int, heads: Mapping[str, Head]) -> None:
    """Note in the rows of its chains what a checkpoint signs, in short transactions, because writers wait for the rows.

    Skips rows that a writer has locked. Such a chain is signed once more, and so are those that a killed worker left.
    """
    names = sorted(heads)
    for start in range(0, len(names), NOTED_TOGETHER):
        with transaction.atomic():
            _note_chains(number, {name: heads[name] for name in names[start : start + NOTED_TOGETHER]})


def _note_chains(number: int, heads: Mapping[str, Head]) -> None:
    rows = AuditChain.objects.filter(name__in=heads, signed_in__lt=number)
    complete = []
    for chain in rows.select_for_update(skip_locked=True):
        signed = heads[chain.name].sequence
        if chain.sequence == signed:
            complete.append(chain.name)
            continue
        chain.signed_in, chain.signed_sequence = number, signed
        chain.unsigned_since = find_entry_time(chain.name, signed + 1)
        chain.save(update_fields=["signed_in", "signed_sequence", "unsigned_since"])
    # One statement, because most chains have no newer entry.
    AuditChain.objects.filter(name__in=complete).update(
        signed_in=number, signed_sequence=F("sequence"), unsigned_since=None
    )


def _find_newest_at(scope: str) -> datetime | None:
    """Return the newest checkpoint's time without loading its body."""
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
    # Read the marks and the rows first, so that concurrent signing cannot put them ahead.
    marks, unmarked = _read_available_marks(scope)
    chains = list(_list_chains(scope))
    walk, broken_at = _walk(scope, None if unchecked else keys, _add_marks(kept, marks))
    # Read the heads after the walk, so that concurrent writes are counted and none seems to be missing.
    heads = read_heads(scope)
    if broken_at is None and walk.newest is not None:
        why = _find_mismatch(walk.heads, heads)
        broken_at = None if why is None else (walk.newest.number, why)
    broken = None if broken_at is None else Break(f"checkpoints:{scope}", *broken_at)
    return ScopeReport(
        scope=scope,
        checkpoints=walk.count,
        newest=walk.newest_signed,
        unsigned=count_unsigned(walk.heads, heads),
        unchecked=unchecked,
        unmarked=unmarked,
        broken=broken or _find_forged_row(scope, chains, walk.heads),
        overdue=_find_overdue(walk.heads, heads, now) if broken is None else None,
        late=walk.late,
        first_late=walk.first_late,
    )


def _walk(
    scope: str, keys: PublicKeys | None, kept: KeptCheckpoints, lease: leases.Lease | None = None
) -> tuple[CheckpointWalk, tuple[int, str] | None]:
    """Verify all checkpoints of a scope; return the walk and the first broken number with its fault, or None."""
    walk = CheckpointWalk(scope, keys, kept)
    for signed in list_checkpoints(scope):
        if lease is not None:
            leases.renew(lease, datetime.now(UTC))
        why = walk.take(signed, find_entry_hash, find_entry_time)
        if why is not None:
            return walk, (signed.number, why)
    return walk, walk.find_end_fault()


def _find_forged_row(scope: str, chains: Iterable[AuditChain], signed: Mapping[str, Head]) -> Break | None:
    """Return the first chain whose row keeps it from being signed, or None."""
    for chain in chains:
        why = _find_row_fault(scope, chain, signed.get(chain.name))
        if why is not None:
            return Break(chain.name, chain.signed_sequence, why)
    return None


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


def _find_overdue(signed: Mapping[str, Head], heads: Mapping[str, Head], now: datetime) -> str | None:
    """Return which entries exceed UNSIGNED_FOR, or None."""
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


def count_unsigned(signed: Mapping[str, Head], heads: Mapping[str, Head]) -> int:
    """Return the number of entries after the signed heads."""
    return sum(
        max(0, head.sequence - (signed[chain].sequence if chain in signed else 0)) for chain, head in heads.items()
    )


@dataclass(frozen=True, slots=True)
class CheckpointStatus:
    """The newest checkpoint of a scope and its fault, for the console. `fault` None: it is valid.

    `unsigned`: number of unsigned entries, of at most MAX_HEADS chains.
    """

    scope: str
    newest: SignedCheckpoint | None
    unsigned: int
    unchecked: str | None
    fault: str | None


def list_checkpoint_status() -> list[CheckpointStatus]:
    """Return the status of each served scope's newest checkpoint; `verify_checkpoints` verifies all of them.

    What it reads of each kind, it reads for all scopes by one query. A newest checkpoint of a former version of the key
    takes one more for each later version.
    """
    scopes = [scope.value for scope in list_served_sets()]
    # The marks first, so that concurrent signing cannot put them ahead.
    marks = {scope: _read_available_marks(scope) for scope in scopes}
    newest, unsigned = _find_newest_of(scopes), _count_unsigned_of(scopes)
    parsed = {scope: _parse_or_find_fault(signed) for scope, signed in newest.items()}
    names = {name for each in parsed.values() if isinstance(each, Checkpoint) for name in each.heads}
    heads = _as_heads(AuditChain.objects.filter(name__in=names))
    keys, unavailable = read_public_keys()

    def status_of(scope: str) -> CheckpointStatus:
        (known, unmarked), unchecked, signed = marks[scope], unavailable.get(scope), newest.get(scope)
        fault = None if known is None else find_mark_fault(scope, signed, known)
        if signed is None:
            return CheckpointStatus(scope, None, unsigned[scope], unchecked, fault)
        fault = fault or _find_content_fault(signed, parsed[scope], heads)
        if fault is not None:
            return CheckpointStatus(scope, signed, 0, unchecked, fault)
        fault = None if unchecked else _find_key_fault(signed, keys)
        return CheckpointStatus(scope, signed, unsigned[scope], unchecked or unmarked, fault)

    return [status_of(scope) for scope in scopes]


def _find_newest_of(scopes: Iterable[str]) -> dict[str, SignedCheckpoint]:
    """Return the newest checkpoint of each scope that has one."""
    parts = [limit_part(AuditCheckpoint.objects.filter(scope=scope).order_by("-number"), 1) for scope in scopes]
    return {row.scope: _signed(row) for row in _unite(parts)}


def _count_unsigned_of(scopes: Iterable[str]) -> dict[str, int]:
    """Return the number of unsigned entries of each scope, of at most MAX_HEADS chains."""
    counts = dict.fromkeys(scopes, 0)
    for chain in _unite([limit_part(_order_unsigned(scope), MAX_HEADS) for scope in counts]):
        counts[chain.scope] += chain.sequence - chain.signed_sequence
    return counts


def _unite(parts: Sequence[QuerySet[Any]]) -> Iterable[Any]:
    return parts[0].union(*parts[1:], all=True) if parts else ()


def _parse_or_find_fault(signed: SignedCheckpoint) -> Checkpoint | str:
    try:
        return _parse(signed)
    except IntegrityError as error:
        return error.internal or error.detail


def _find_content_fault(signed: SignedCheckpoint, parsed: Checkpoint | str, heads: Mapping[str, Head]) -> str | None:
    """Return how the log differs from a checkpoint, or None. `heads`: of at least its chains, those that exist."""
    if isinstance(parsed, str):
        return parsed
    why = _find_mismatch(parsed.heads, heads)
    return None if why is None else f"{signed.scope} checkpoint {signed.number}: {why}"
