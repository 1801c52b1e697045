"""The hash chain of audit entries: their bytes, their links and their verification.

Each chain counts from 1. The platform has one chain. Each account has one, and a few more for its customer tokens, so
that issuing them does not wait for other writers of the account. An entry's hash covers the *stored* bytes, so a later
change of code or library does not invalidate an old entry.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from keyvault.domain.canonical import JsonValue, canonical_bytes

PLATFORM_CHAIN = "platform"
GENESIS = bytes(32)
"""Previous hash of the first entry of a chain, 32 bytes."""

APPROVAL_SUFFIX = "approved"
"""Suffix of the name of every event that is an approval. No other event has it."""

CUSTOMER_TOKEN_SLOTS = 4
"""Number of chains for the customer tokens of one account, to which as many transactions append concurrently."""

_ACCOUNT, _CUSTOMER_TOKENS = "account:", "customer_tokens."


def account_chain(merchant_id: str, environment: str) -> str:
    return f"{_ACCOUNT}{merchant_id}/{environment}"


def customer_token_chains(account: str) -> tuple[str, ...]:
    """Return the customer token chains of the account that has this chain."""
    slots = range(CUSTOMER_TOKEN_SLOTS)
    return tuple(f"{_CUSTOMER_TOKENS}{slot}:{account.removeprefix(_ACCOUNT)}" for slot in slots)


def chains_with(chain: str) -> tuple[str, ...]:
    """Return a chain and, if it is an account's, the account's customer token chains."""
    return (chain, *customer_token_chains(chain)) if chain.startswith(_ACCOUNT) else (chain,)


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
    """Return the canonical bytes of an entry. The caller has redacted `details`; its type excludes Plaintext."""
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
    """A stored entry to verify. `columns_agree`: the searchable columns equal the stored bytes."""

    chain: str
    sequence: int
    body: bytes
    previous: bytes
    hash: bytes
    columns_agree: bool = True


@dataclass(frozen=True, slots=True)
class Break:
    """The first entry that fails verification, and why."""

    chain: str
    sequence: int
    why: str


def find_fault(entry: ChainedEntry, *, chain: str, sequence: int, previous: bytes) -> str | None:
    """Return why the entry is not number `sequence` of `chain` after the hash `previous`; None: it is."""
    if entry.chain != chain:
        return f"belongs to {entry.chain}"
    if entry.sequence != sequence:
        return f"entry {sequence} is missing; {entry.sequence} follows"
    if entry.previous != previous:
        return "does not contain the hash of the entry before it"
    if entry_hash(previous, entry.body) != entry.hash:
        return "its bytes do not match its hash"
    return None if entry.columns_agree else "its columns differ from its bytes"


def verify_chain(chain: str, entries: Iterable[ChainedEntry], head_sequence: int, head_hash: bytes) -> Break | None:
    """Return the first broken entry, or None.

    Detects edits, gaps, reordering, entries of another chain, and a tail that does not match the head.
    """
    previous, sequence = GENESIS, 0
    for entry in entries:
        sequence += 1
        why = find_fault(entry, chain=chain, sequence=sequence, previous=previous)
        if why is not None:
            return Break(chain, sequence, why)
        previous = entry.hash
    if sequence != head_sequence:
        return Break(chain, sequence + 1, f"the chain ends at {sequence}, but its head is at {head_sequence}")
    if previous != head_hash:
        return Break(chain, sequence, "its head has another hash: the chain was rewritten")
    return None
