"""Write and verify the audit chains."""

import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from django.db import IntegrityError as DatabaseIntegrityError
from django.db import transaction
from django.db.models import QuerySet
from django.db.models.functions import Now

from keyvault.domain.audit import (
    GENESIS,
    PLATFORM_CHAIN,
    Break,
    ChainedEntry,
    account_chain,
    chains_with,
    entry_bytes,
    entry_hash,
    verify_chain,
)
from keyvault.domain.canonical import JsonValue
from keyvault.domain.checkpoints import scope_of
from keyvault.domain.errors import IntegrityError
from keyvault.models import Account, AuditChain, AuditEntry
from keyvault.services.work.clock import MAX_DIFFERENCE


def open_chain(name: str) -> None:
    """Create a chain, inside the transaction that creates its account."""
    AuditChain.objects.create(name=name, scope=scope_of(name), sequence=0, head_hash=GENESIS)


def choose_slot(chains: Sequence[str]) -> str:
    """Lock and return a chain that no other transaction holds; if there is none, return any of them without a lock."""
    free = AuditChain.objects.select_for_update(skip_locked=True).filter(name__in=chains)
    return next(iter(free.values_list("name", flat=True)[:1]), None) or secrets.choice(chains)


@dataclass(frozen=True, slots=True)
class NewEntry:
    """The content of an entry that is not in its chain yet."""

    at: datetime
    event: str
    actor: str
    channel: str
    details: dict[str, JsonValue]


def append_entries(*, chain: str, entries: Sequence[NewEntry]) -> None:
    """Append entries to one chain. Only `services.recording` calls this, inside the transaction of the change.

    The time of an entry is its `at`, or that of the entry before it if later: the time of a chain never runs backwards.
    Where `at` is more than MAX_DIFFERENCE ahead of the database's clock, the database's time replaces it. Otherwise one
    host with a fast clock would give the entries of all hosts its own time.

    Locks the chain's head row until the commit: writers of one chain are serialized, writers of others do not wait.
    (On SQLite the transaction holds the lock of the whole database.)
    """
    chains = AuditChain.objects.select_for_update().annotate(database_at=Now())
    try:
        head = chains.get(name=chain)
    except AuditChain.DoesNotExist:
        if chain != PLATFORM_CHAIN or AuditEntry.objects.exists():
            raise IntegrityError("The audit log is damaged.", internal=f"chain {chain} is missing") from None
        # A concurrent first writer may have created the chain.
        with suppress(DatabaseIntegrityError), transaction.atomic():
            open_chain(chain)
        head = chains.get(name=chain)
    for new in entries:
        sequence, previous = head.sequence + 1, bytes(head.head_hash)
        at = new.at if new.at <= head.database_at + MAX_DIFFERENCE else head.database_at
        if head.newest_at is not None:
            # Clocks of several hosts differ, and a writer that waited for the lock chose its time before.
            at = max(at, head.newest_at)
        body = entry_bytes(
            chain=chain,
            sequence=sequence,
            at=at,
            event=new.event,
            actor=new.actor,
            channel=new.channel,
            details=new.details,
        )
        digest = entry_hash(previous, body)
        AuditEntry.objects.create(
            chain_id=chain,
            scope=head.scope,
            sequence=sequence,
            at=at,
            event=new.event,
            actor=new.actor,
            body=body,
            previous=previous,
            hash=digest,
        )
        head.sequence, head.head_hash, head.newest_at = sequence, digest, at
        head.unsigned_since = head.unsigned_since or at
        head.save(update_fields=["sequence", "head_hash", "newest_at", "unsigned_since"])


@dataclass(frozen=True, slots=True)
class AuditReport:
    """Result of an audit check. `first_broken` is None when every expected chain exists and is intact."""

    entries: int
    first_broken: Break | None


def verify_audit() -> AuditReport:
    """Verify every chain, the platform's first, in bounded memory; concurrent writes are allowed."""
    expected = _expected_chains()
    written = set(AuditEntry.objects.order_by().values_list("chain_id", flat=True).distinct())
    written |= set(AuditChain.objects.values_list("name", flat=True))
    entries, first_broken = 0, None
    for name in [*expected, *sorted(written.difference(expected))]:
        count, broken = _verify_stored(name)
        entries += count
        first_broken = first_broken or broken
    return AuditReport(entries, first_broken)


def _verify_stored(name: str) -> tuple[int, Break | None]:
    """Verify one chain. Its head moves in the transaction of each entry, so it must name the newest entry."""
    head = AuditChain.objects.filter(name=name).first()
    if head is None:
        return 0, Break(name, 0, "the chain is missing")
    entries = AuditEntry.objects.filter(chain_id=name)
    broken = verify_chain(
        name, _read_stored(entries.filter(sequence__lte=head.sequence)), head.sequence, bytes(head.head_hash)
    )
    newest = entries.order_by("-sequence").values_list("sequence", flat=True).first() or 0
    if broken is None and newest > AuditChain.objects.get(name=name).sequence:
        broken = Break(name, newest, "an entry has a higher sequence than the head of the chain")
    return head.sequence, broken


def read_entries(chain: str, *, after: int, last: int) -> Iterator[ChainedEntry]:
    """Iterate over entries with `after` < sequence <= `last`, in order and in bounded memory."""
    return _read_stored(AuditEntry.objects.filter(chain_id=chain, sequence__gt=after, sequence__lte=last))


def _expected_chains() -> list[str]:
    """Return the chains that must exist: each account's, and the platform's unless the database is empty."""
    accounts = [
        chain
        for merchant_id, environment in Account.objects.order_by("merchant_id", "environment").values_list(
            "merchant_id", "environment"
        )
        for chain in chains_with(account_chain(merchant_id, environment))
    ]
    written = bool(accounts) or AuditEntry.objects.exists() or AuditChain.objects.exists()
    return [PLATFORM_CHAIN, *accounts] if written else []


def _read_stored(entries: QuerySet[AuditEntry]) -> Iterator[ChainedEntry]:
    for entry in entries.order_by("sequence").iterator(chunk_size=500):
        body = stored_bytes(entry.body)
        yield ChainedEntry(
            chain=entry.chain_id,
            sequence=entry.sequence,
            body=body,
            previous=stored_bytes(entry.previous),
            hash=stored_bytes(entry.hash),
            columns_agree=_columns_agree(entry, body),
        )


def stored_bytes(stored: bytes | memoryview | str) -> bytes:
    """Return a stored value as bytes. SQLite keeps text that another program wrote, and verification must not stop."""
    return stored.encode() if isinstance(stored, str) else bytes(stored)


def _columns_agree(entry: AuditEntry, body: bytes) -> bool:
    try:
        written = json.loads(body)
        return bool(
            written["chain"] == entry.chain_id
            and scope_of(entry.chain_id) == entry.scope
            and written["sequence"] == entry.sequence
            and written["event"] == entry.event
            and written["actor"] == entry.actor
            and datetime.fromisoformat(written["at"]) == entry.at
        )
    except (ValueError, KeyError, TypeError):
        return False  # Keyvault did not write this body; its hash does not match either.
