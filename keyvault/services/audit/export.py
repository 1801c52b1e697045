"""Export of the audit log for an auditor's machine, in an order that can be verified in one pass."""

from collections.abc import Callable, Generator, Iterator, Sequence
from datetime import datetime

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.access.principals import OperatorPrincipal
from keyvault.access.scopes import AccessScope
from keyvault.domain.audit_records import ChainHead, ExportEnd, ExportRecord, ExportStart
from keyvault.domain.canonical import JsonValue
from keyvault.domain.checkpoints import Head, SignedCheckpoint, parse_checkpoint
from keyvault.domain.errors import StateConflictError
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import AuditCheckpoint
from keyvault.services.audit.checkpoints import find_newest, list_checkpoints, read_heads
from keyvault.services.recording.audit_chain import read_entries
from keyvault.services.recording.transaction import recorded
from keyvault.services.work.clock import host_time
from keyvault.services.work.leases import LEASE, Lease, claim, make_subject, release, renew

_RENEW_AFTER = LEASE / 3
"""Age of a lease after which an export renews it."""


def export_log(scopes: Sequence[str], since: datetime | None, now: datetime) -> Iterator[ExportRecord]:
    """Iterate over all entries and checkpoints of the scopes as stored, even invalid ones, in bounded memory.

    `since`: omit the entries that a checkpoint before the scope's first one after that time signs. No checkpoint is
    omitted. Concurrent writes may or may not be included.
    """
    yield ExportStart(now, tuple(scopes), since)
    entries = checkpoints = 0
    for scope in scopes:
        for record in _export_scope(scope, since):
            checkpoints += isinstance(record, SignedCheckpoint)
            entries += not isinstance(record, SignedCheckpoint | ChainHead)
            yield record
    yield ExportEnd(entries, checkpoints)


def begin_export(grant: Grant, scopes: Sequence[str], since: datetime, within: AccessScope) -> Lease:
    """Record that the operator exports the log, and claim the one export that an operator may run at a time.

    Pass the lease to `export_claimed`, which releases it. `within`: the operator's scope. Raises StateConflictError
    while another export of the operator runs.
    """
    operator = grant.principal
    if not isinstance(operator, OperatorPrincipal):
        raise TypeError("only an operator exports the log in the console")
    lease = claim(make_subject(f"audit:export:{operator.person}"), grant.at, ignore_due_at=True)
    if lease is None:
        raise StateConflictError(
            f"Another export of yours runs. Wait until it has ended; a canceled one ends within "
            f"{LEASE.total_seconds():.0f} seconds."
        )
    try:
        details: dict[str, JsonValue] = {"scopes": [*scopes], "since": format_timestamp(since)}
        with recorded(grant, Permission.AUDIT_READ, "audit.exported", account=within, **details):
            pass
    except BaseException:
        release(lease)
        raise
    return lease


def export_claimed(
    lease: Lease, scopes: Sequence[str], since: datetime, now: datetime, clock: Callable[[], datetime] = host_time
) -> Generator[ExportRecord, None, None]:
    """Iterate as `export_log` does, and hold the lease until the end or until the iterator is closed.

    Raises StateConflictError if the reader paused for so long that another export of the operator has begun.
    """
    renewed_at = now
    try:
        for record in export_log(scopes, since, now):
            if clock() - renewed_at > _RENEW_AFTER:
                renewed_at = clock()
                renew(lease, renewed_at)
            yield record
    finally:
        release(lease)


def export_newest(scopes: Sequence[str]) -> Iterator[ExportRecord]:
    """Return the newest checkpoint of each scope; an auditor keeps them to detect a later rollback of the log."""
    return (signed for scope in scopes if (signed := find_newest(scope)) is not None)


def _export_scope(scope: str, since: datetime | None) -> Iterator[ExportRecord]:
    omitted = 0 if since is None else _find_base(scope, since)
    written: dict[str, int] = {}
    for signed in list_checkpoints(scope):
        signs = _heads(signed)
        if signed.number <= omitted:
            written |= {chain: head.sequence for chain, head in signs.items()}
        else:
            yield from _export_entries(signs, written)
        yield signed
    heads = read_heads(scope)
    yield from _export_entries(heads, written)
    yield from (ChainHead(chain, head) for chain, head in heads.items())


def _export_entries(heads: dict[str, Head], written: dict[str, int]) -> Iterator[ExportRecord]:
    """Iterate over the entries up to the heads that are not `written` yet, and update `written`."""
    for chain, head in heads.items():
        after = written.get(chain, 0)
        if head.sequence <= after:
            continue
        for entry in read_entries(chain, after=after, last=head.sequence):
            written[chain] = entry.sequence
            yield entry


def _find_base(scope: str, since: datetime) -> int:
    """Return the number of the last checkpoint before the first one after a time; 0: there is none.

    The clock may have been set back, so a checkpoint with a higher number can have an earlier time.
    """
    rows = AuditCheckpoint.objects.filter(scope=scope)
    after = rows.filter(at__gt=since).order_by("number").values_list("number", flat=True).first()
    if after is not None:
        return after - 1
    return rows.order_by("-number").values_list("number", flat=True).first() or 0


def _heads(signed: SignedCheckpoint) -> dict[str, Head]:
    """Return a checkpoint's heads; none if its body is invalid, which the auditor's verification reports."""
    try:
        return dict(parse_checkpoint(signed.body).heads)
    except ValueError:
        return {}
