"""Verification of an exported audit log in one pass over its entries, heads and checkpoints.

Memory use is one hash per chain, for any length of the log.
"""

from dataclasses import dataclass, field
from datetime import datetime

from keyvault.domain.audit import GENESIS, Break, ChainedEntry, find_fault
from keyvault.domain.audit_records import ChainHead, ExportEnd, ExportRecord, ExportStart, parse_time
from keyvault.domain.checkpoints import (
    CheckpointWalk,
    Head,
    KeptCheckpoints,
    PublicKeys,
    SignedCheckpoint,
    parse_checkpoint,
    scope_of,
)
from keyvault.domain.digests import PepperSet


class ExportError(ValueError):
    """The file is no complete export, so the log cannot be verified."""


@dataclass(slots=True)
class ScopeCheck:
    """The verification state of one scope. It stops at the first break.

    `begins_with`: number of the checkpoint after whose entries a partial export begins; None: it has every entry.
    `has_begun`: the entries that the further checkpoints sign must be in the export.
    `unsigned_since`: when the oldest entry of each chain was written that no checkpoint has signed yet.
    """

    walk: CheckpointWalk
    entries: int = 0
    has_begun: bool = False
    begins_with: int | None = None
    positions: dict[str, Head] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    unsigned_since: dict[str, datetime] = field(default_factory=dict)
    broken: Break | None = None

    @property
    def unsigned(self) -> int:
        """Entries after the newest checkpoint."""
        signed = self.walk.heads
        return sum(
            head.sequence - (signed[chain].sequence if chain in signed else 0) for chain, head in self.positions.items()
        )

    def take_entry(self, entry: ChainedEntry) -> None:
        before = self.positions.get(entry.chain, Head(0, GENESIS))
        sequence = before.sequence + 1
        why = find_fault(entry, chain=entry.chain, sequence=sequence, previous=before.hash)
        if why is None and entry.chain in self.ended:
            why = "it follows the head of the chain"
        if why is not None:
            self.broken = Break(entry.chain, sequence, why)
            return
        self.entries += 1
        if entry.chain not in self.unsigned_since and (at := parse_time(entry.body)) is not None:
            self.unsigned_since[entry.chain] = at
        self.positions[entry.chain] = Head(sequence, entry.hash)

    def take_checkpoint(self, signed: SignedCheckpoint, since: datetime | None) -> None:
        # A partial export has every checkpoint. It omits only the entries that the first ones sign, until `since`.
        if since is None or self.entries > 0 or not _is_until(signed, since):
            self.has_begun = True
        has_entries = self.has_begun
        why = self.walk.take(
            signed, self._find_hash, lambda chain, _: self.unsigned_since.get(chain), has_entries=has_entries
        )
        if why is not None:
            self.broken = Break(f"checkpoints:{self.walk.scope}", signed.number, why)
            return
        signs = {} if self.walk.newest is None else self.walk.newest.heads
        # Every checkpoint follows exactly the entries that it signs.
        for chain, head in signs.items():
            self.unsigned_since.pop(chain, None)
            if not has_entries:
                self.positions[chain] = head
        if not has_entries:
            self.begins_with = signed.number

    def take_head(self, stated: ChainHead) -> None:
        found = self.positions.get(stated.chain, Head(0, GENESIS))
        if found != stated.head:
            why = f"the chain ends at {found.sequence}, its head says {stated.head.sequence} or has another hash"
            self.broken = Break(stated.chain, found.sequence, why)
        self.ended.add(stated.chain)

    def finish(self) -> None:
        headless = sorted(self.positions.keys() - self.ended)
        at_end = self.walk.find_end_fault()
        checkpoints = f"checkpoints:{self.walk.scope}"
        if headless:
            self.broken = Break(headless[0], self.positions[headless[0]].sequence, "the chain has no head")
        elif at_end is not None:
            self.broken = Break(checkpoints, *at_end)
        elif self.walk.newest is None and self.positions:
            self.broken = Break(checkpoints, 1, "no checkpoint: no entry of this scope is signed")
        else:
            self.walk.note_unsigned(self.unsigned_since)

    def _find_hash(self, chain: str, sequence: int) -> bytes | None:
        head = self.positions.get(chain)
        return head.hash if head is not None and head.sequence == sequence else None


def _is_until(signed: SignedCheckpoint, since: datetime) -> bool:
    """Whether a checkpoint was signed at this time or before."""
    try:
        return parse_checkpoint(signed.body).at <= since
    except (ValueError, TypeError):  # The body is invalid, which the walk reports, or has no time zone.
        return False


@dataclass(slots=True)
class ExportCheck:
    """Incremental verification of one export, record by record. `start`: the export's first record."""

    keys: PublicKeys
    kept: KeptCheckpoints
    scopes: dict[str, ScopeCheck] = field(default_factory=dict)
    start: ExportStart | None = None
    is_ended: bool = False
    _entries: int = 0
    _checkpoints: int = 0

    @property
    def first_broken(self) -> Break | None:
        return next((scope.broken for scope in self.scopes.values() if scope.broken is not None), None)

    @property
    def since(self) -> datetime | None:
        return None if self.start is None else self.start.since

    @property
    def exported_at(self) -> datetime | None:
        return None if self.start is None else self.start.at

    def take(self, record: ExportRecord) -> None:
        """Verify the next record. Raises ExportError if it is not valid at this position."""
        if isinstance(record, ExportStart):
            self._begin(record)
            return
        if self.start is None:
            raise ExportError("the file is no export: its first record is missing")
        if self.is_ended:
            raise ExportError("there are records after the end of the export")
        if isinstance(record, ExportEnd):
            self._end(record)
            return
        self._entries += isinstance(record, ChainedEntry)
        self._checkpoints += isinstance(record, SignedCheckpoint)
        scope = self._scope_of(record)
        if scope.broken is not None:
            return
        match record:
            case ChainedEntry():
                scope.take_entry(record)
            case SignedCheckpoint():
                scope.take_checkpoint(record, self.start.since)
            case ChainHead():
                scope.take_head(record)

    def finish(self) -> None:
        """Finish after the last line. Raises ExportError when the file is truncated."""
        if not self.is_ended:
            raise ExportError("the file is truncated: the end of the export is missing")

    @property
    def is_partial(self) -> bool:
        """Whether the export is incomplete by its own first record."""
        return self.start is None or self.start.since is not None or not self.scopes.keys() >= set(PepperSet)

    def count_uncompared(self) -> int:
        """Return the number of kept checkpoints that are outside this export's scopes."""
        return sum(scope not in self.scopes for scope, _ in self.kept)

    def _begin(self, record: ExportStart) -> None:
        if self.start is not None:
            raise ExportError("a second export begins in the middle of the first")
        if not record.scopes:
            raise ExportError("the export names no scope")
        self.start = record
        self.scopes = {scope: ScopeCheck(CheckpointWalk(scope, self.keys, self.kept)) for scope in record.scopes}

    def _end(self, record: ExportEnd) -> None:
        self.is_ended = True
        for scope in self.scopes.values():
            if scope.broken is None:
                scope.finish()
        if self.first_broken is None and record != ExportEnd(self._entries, self._checkpoints):
            raise ExportError("records of the export are missing or added: their number differs from its last line")

    def _scope_of(self, record: ChainedEntry | SignedCheckpoint | ChainHead) -> ScopeCheck:
        name = record.scope if isinstance(record, SignedCheckpoint) else scope_of(record.chain)
        if name not in self.scopes:
            raise ExportError("a record belongs to no scope that the export names")
        return self.scopes[name]
