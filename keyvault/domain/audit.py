"""The chain of audit entries: what an entry's bytes are, how one leans on the one before, how to check.

Each chain (one per account, one for the platform) counts from 1. An entry's hash covers the *stored* bytes,
so that no later change of code or library can make an old entry look different from what was written.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from keyvault.domain.canonical import JsonValue, canonical_bytes

PLATFORM_CHAIN = "platform"
GENESIS = bytes(32)
"""What the first entry of a chain leans on."""


def account_chain(merchant_id: str, environment: str) -> str:
    return f"account:{merchant_id}/{environment}"


def entry_bytes(
    *,
    chain: str,
    sequence: int,
    at: datetime,
    event: str,
    actor: str,
    channel: str,
    details: JsonValue,
) -> bytes:
    """The canonical bytes of an entry. `details` is redacted text by then: no plaintext type fits in it."""
    return canonical_bytes(
        {
            "chain": chain,
            "sequence": sequence,
            "at": at.isoformat(timespec="microseconds"),
            "event": event,
            "actor": actor,
            "channel": channel,
            "details": details,
        }
    )


def entry_hash(previous: bytes, body: bytes) -> bytes:
    return hashlib.sha256(b"keyvault/audit/v1\0" + previous + body).digest()


@dataclass(frozen=True, slots=True)
class ChainedEntry:
    """A stored entry as the checker sees it. `columns_agree`: its searchable copies equal its bytes."""

    chain: str
    sequence: int
    body: bytes
    previous: bytes
    hash: bytes
    columns_agree: bool = True


@dataclass(frozen=True, slots=True)
class Break:
    """The first entry that does not hold, and why."""

    chain: str
    sequence: int
    why: str


def find_fault(entry: ChainedEntry, *, chain: str, sequence: int, previous: bytes) -> str | None:
    """Why the entry is not the one of that number in that chain, after the one with the hash `previous`; or None."""
    if entry.chain != chain:
        return f"belongs to {entry.chain}"
    if entry.sequence != sequence:
        return f"entry {sequence} is missing; {entry.sequence} follows"
    if entry.previous != previous:
        return "does not lean on the entry before it"
    if entry_hash(previous, entry.body) != entry.hash:
        return "its bytes do not match its hash"
    return None if entry.columns_agree else "its columns differ from its bytes"


def verify_chain(chain: str, entries: Iterable[ChainedEntry], head_sequence: int, head_hash: bytes) -> Break | None:
    """The first broken entry, or None.

    Finds edits, gaps, reordering, another chain's entries, and a tail that the head does not bear out.
    """
    previous, sequence = GENESIS, 0
    for entry in entries:
        sequence += 1
        why = find_fault(entry, chain=chain, sequence=sequence, previous=previous)
        if why is not None:
            return Break(chain, sequence, why)
        previous = entry.hash
    if sequence != head_sequence:
        return Break(chain, sequence + 1, f"the chain ends at {sequence}, its head says {head_sequence}")
    if previous != head_hash:
        return Break(chain, sequence, "its head has another hash: what leads up to it was written anew")
    return None
