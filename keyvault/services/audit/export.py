"""Export of the audit log for an auditor's machine, in an order that can be verified in one pass."""

from collections.abc import Iterator, Sequence
from datetime import datetime

from keyvault.domain.audit_records import ChainHead, ExportEnd, ExportRecord, ExportStart
from keyvault.domain.checkpoints import Head, SignedCheckpoint, parse_checkpoint
from keyvault.models import AuditCheckpoint
from keyvault.services.audit.checkpoints import find_newest, list_checkpoints, read_heads
from keyvault.services.recording.audit_chain import read_entries


def export_log(scopes: Sequence[str], since: datetime | None, now: datetime) -> Iterator[ExportRecord]:
    """Iterate over all entries and checkpoints of the scopes as stored, even invalid ones, in bounded memory.

    `since`: omit the entries that were signed before the scope's first checkpoint after that time, but no checkpoint.
    Concurrent writes may or may not be included.
    """
    yield ExportStart(now, tuple(scopes), since)
    entries = checkpoints = 0
    for scope in scopes:
        for record in _export_scope(scope, since):
            checkpoints += isinstance(record, SignedCheckpoint)
            entries += not isinstance(record, SignedCheckpoint | ChainHead)
            yield record
    yield ExportEnd(entries, checkpoints)


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
