"""Signed checkpoints of the audit chains: what is signed, and how whoever has the public key checks it.

A checkpoint says of every chain of its scope how far it was and which hash its newest entry had, and leans on the
checkpoint before it. The chains alone show an edit in the middle; that somebody wrote a chain anew from some entry on,
or cut its tail off and moved its head back, only a signature shows whose key the owner of the database does not hold.

Signatures are Ed25519 (RFC 8032) over the body's bytes as they are stored.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from keyvault.domain.audit import PLATFORM_CHAIN
from keyvault.domain.canonical import canonical_bytes
from keyvault.domain.digests import PepperSet

FORMAT = "keyvault/checkpoint/v1"
FIRST = bytes(32)
"""What the first checkpoint of a scope leans on."""

HASH_BYTES = 32

KeyName = tuple[str, str, int]
"""Scope, signer, version."""
PublicKeys = Mapping[KeyName, bytes]
"""Raw Ed25519 public keys, 32 bytes each."""
Kept = Mapping[tuple[str, int], frozenset[bytes]]
"""By scope and number, the digests of the checkpoints that an auditor has from earlier: one each, if nobody forked."""
FindHash = Callable[[str, int], bytes | None]
"""The hash of the entry with that number in that chain, as the log has it now; None where there is none."""


@dataclass(frozen=True, slots=True)
class Head:
    """The newest entry of a chain."""

    sequence: int
    hash: bytes


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a body says."""

    scope: str
    number: int
    at: datetime
    previous: bytes
    heads: Mapping[str, Head]


@dataclass(frozen=True, slots=True)
class SignedCheckpoint:
    """A checkpoint as it is stored. `at`: the column beside the body, where there is one."""

    scope: str
    number: int
    body: bytes
    signature: bytes
    signer: str
    key_version: int
    at: datetime | None = None

    @property
    def digest(self) -> bytes:
        """What the next one leans on."""
        return hashlib.sha256(f"{FORMAT}\0".encode() + hashlib.sha256(self.body).digest() + self.signature).digest()


def scope_of(chain: str) -> str | None:
    """An account's chain is in the scope of its environment, the platform's in `service`; None: no chain of ours."""
    if chain == PLATFORM_CHAIN:
        return PepperSet.SERVICE
    environment = chain.rpartition("/")[2]
    return environment if environment in {PepperSet.SANDBOX, PepperSet.PRODUCTION} else None


def checkpoint_bytes(checkpoint: Checkpoint) -> bytes:
    """The canonical body: what is signed."""
    return canonical_bytes(
        {
            "format": FORMAT,
            "scope": checkpoint.scope,
            "number": checkpoint.number,
            "at": checkpoint.at.isoformat(timespec="microseconds"),
            "previous": checkpoint.previous.hex(),
            "heads": {chain: [head.sequence, head.hash.hex()] for chain, head in checkpoint.heads.items()},
        }
    )


def parse_checkpoint(body: bytes) -> Checkpoint:
    """Raises ValueError on whatever `checkpoint_bytes` would not have written."""
    try:
        told: Any = json.loads(body.decode())
        checkpoint = Checkpoint(
            scope=str(told["scope"]),
            number=int(told["number"]),
            at=datetime.fromisoformat(told["at"]),
            previous=bytes.fromhex(told["previous"]),
            heads={
                chain: Head(int(sequence), bytes.fromhex(digest)) for chain, (sequence, digest) in told["heads"].items()
            },
        )
        is_ours = checkpoint_bytes(checkpoint) == body
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        raise ValueError("no checkpoint") from None
    heads = checkpoint.heads.items()
    if not is_ours or any(scope_of(chain) != checkpoint.scope or head.sequence < 1 for chain, head in heads):
        raise ValueError("no checkpoint")
    return checkpoint


def find_signature_fault(signed: SignedCheckpoint, keys: PublicKeys) -> str | None:
    """Why the signature does not stand, or None."""
    key = keys.get((signed.scope, signed.signer, signed.key_version))
    if key is None:
        return f"there is no public key of {signed.signer} (version {signed.key_version}) to check its signature with"
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signed.signature, signed.body)
    except (InvalidSignature, ValueError):
        return "its signature is not the signer's"
    return None


@dataclass(slots=True)
class CheckpointWalk:
    """The checkpoints of one scope, taken one by one in their order.

    `keys` None: nobody can say whose the signatures are. `may_begin_later`: the first one taken may have any number,
    and what it says is where everything begins.
    """

    scope: str
    keys: PublicKeys | None
    kept: Kept = field(default_factory=dict)
    may_begin_later: bool = False
    count: int = 0
    first: Checkpoint | None = None
    newest: Checkpoint | None = None
    newest_signed: SignedCheckpoint | None = None

    def take(self, signed: SignedCheckpoint, find_hash: FindHash) -> str | None:
        """Why the checkpoint does not hold against those before it and the entries; or None, and it is the newest."""
        try:
            checkpoint = parse_checkpoint(signed.body)
        except ValueError:
            return "its bytes are no checkpoint"
        why = (
            self._find_own_fault(signed, checkpoint)
            or self._find_place_fault(signed, checkpoint)
            or self._find_head_fault(checkpoint, find_hash)
        )
        if why is not None:
            return why
        kept = self.kept.get((signed.scope, signed.number), frozenset())
        if kept - {signed.digest}:
            return "it is another one than the auditor kept: the log was written anew"
        self.count += 1
        self.first = self.first or checkpoint
        self.newest, self.newest_signed = checkpoint, signed
        return None

    def find_end_fault(self) -> tuple[int, str] | None:
        """The first number that the auditor has and this log has not, and what that means; after the last `take`."""
        last = 0 if self.newest is None else self.newest.number
        beyond = min((number for scope, number in self.kept if scope == self.scope and number > last), default=None)
        if beyond is None:
            return None
        return beyond, f"the auditor kept it, and the checkpoints here end at {last}: the log was set back"

    def _find_own_fault(self, signed: SignedCheckpoint, checkpoint: Checkpoint) -> str | None:
        columns = (self.scope, signed.number, signed.at or checkpoint.at)
        if (checkpoint.scope, checkpoint.number, checkpoint.at) != columns or signed.scope != self.scope:
            return "its columns differ from its bytes"
        return None if self.keys is None else find_signature_fault(signed, self.keys)

    def _find_place_fault(self, signed: SignedCheckpoint, checkpoint: Checkpoint) -> str | None:
        if self.newest is None or self.newest_signed is None:
            if self.may_begin_later:
                return None
            if signed.number != 1:
                return f"checkpoint 1 is missing; {signed.number} follows"
            return None if checkpoint.previous == FIRST else "it is the first and leans on another"
        if signed.number != self.newest.number + 1:
            return f"checkpoint {self.newest.number + 1} is missing; {signed.number} follows"
        if checkpoint.previous != self.newest_signed.digest:
            return "it does not lean on the checkpoint before it"
        return None

    def _find_head_fault(self, checkpoint: Checkpoint, find_hash: FindHash) -> str | None:
        before = {} if self.newest is None else self.newest.heads
        for chain, head in before.items():
            if chain not in checkpoint.heads or checkpoint.heads[chain].sequence < head.sequence:
                return f"chain {chain} was longer at the checkpoint before it"
        if self.newest is None and self.may_begin_later:
            return None
        for chain, head in checkpoint.heads.items():
            if before.get(chain) == head:
                continue
            found = find_hash(chain, head.sequence)
            if found is None:
                return f"entry {head.sequence} of chain {chain}, which it signs, is not there"
            if found != head.hash:
                return f"entry {head.sequence} of chain {chain} is another one than it signs"
        return None
