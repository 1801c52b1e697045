"""Signed checkpoints of the audit chains: the signed bytes, and their verification with the public key.

A checkpoint lists the chains that have changed since the previous checkpoint of its scope, each with its length and the
hash of its newest entry. It also contains the digest of the previous checkpoint. So the newest checkpoint commits to
the heads of all chains. The hash chains alone reveal an edit in the middle. They do not reveal a chain that was
rewritten from some entry on, or truncated together with its head. Only a signature does, because its private key is
outside the database.

Signatures are Ed25519 (RFC 8032) over the stored bytes of the body.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from keyvault.domain.audit import PLATFORM_CHAIN
from keyvault.domain.canonical import canonical_bytes
from keyvault.domain.digests import PepperSet

FORMAT = "keyvault/checkpoint/v1"
ROLLED_BACK = "the log was rolled back"
FIRST = bytes(32)
"""Previous digest of the first checkpoint of a scope, 32 bytes."""

HASH_BYTES = 32

KeyName = tuple[str, str, int]
"""Scope, signer, version."""
PublicKeys = Mapping[KeyName, bytes]
"""Raw Ed25519 public keys, 32 bytes each."""
KeptCheckpoints = Mapping[tuple[str, int], frozenset[bytes]]
"""Digests of the checkpoints that an auditor kept, by scope and number. More than one digest means a forked log."""
FindHash = Callable[[str, int], bytes | None]
"""Looks up the current hash of an entry by chain and number; None when the entry does not exist."""
FindTime = Callable[[str, int], datetime | None]
"""Looks up when an entry was written, by chain and number; None when that is unknown."""

UNSIGNED_FOR = timedelta(hours=1)
"""Maximum age of an unsigned entry. Until it is signed, a database writer can change it unnoticed."""


@dataclass(frozen=True, slots=True)
class Head:
    """The newest entry of a chain."""

    sequence: int
    hash: bytes


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of a checkpoint's body.

    `heads`: the heads of the chains that have changed. The signer compares the chains of all accounts with their newest
    checkpoints, a few accounts at a time. `checked_through`: id of the last account that it has compared; 0: it begins
    again with the first account.
    """

    scope: str
    number: int
    at: datetime
    previous: bytes
    heads: Mapping[str, Head]
    checked_through: int = 0


@dataclass(frozen=True, slots=True)
class SignedCheckpoint:
    """A stored checkpoint. `at`: the value of the timestamp column, None in an export."""

    scope: str
    number: int
    body: bytes
    signature: bytes
    signer: str
    key_version: int
    at: datetime | None = None

    @property
    def digest(self) -> bytes:
        """SHA-256 over format, body and signature; the next checkpoint contains it as `previous`."""
        return hashlib.sha256(f"{FORMAT}\0".encode() + hashlib.sha256(self.body).digest() + self.signature).digest()


@dataclass(frozen=True, slots=True)
class CheckpointMark:
    """The newest checkpoint of a scope, recorded outside the database.

    `number` 0: an operator accepted that there is none. `digest`: hexadecimal. `at`: when this was recorded.
    """

    scope: str
    number: int
    digest: str
    at: datetime


def scope_of(chain: str) -> str | None:
    """Return a chain's scope: an account's environment, or `service` for the platform. None: not a chain's name."""
    if chain == PLATFORM_CHAIN:
        return PepperSet.SERVICE
    environment = chain.rpartition("/")[2]
    return environment if environment in {PepperSet.SANDBOX, PepperSet.PRODUCTION} else None


def checkpoint_bytes(checkpoint: Checkpoint) -> bytes:
    """Return the canonical body, which the signature covers."""
    return canonical_bytes(
        {
            "format": FORMAT,
            "scope": checkpoint.scope,
            "number": checkpoint.number,
            "at": checkpoint.at.isoformat(timespec="microseconds"),
            "previous": checkpoint.previous.hex(),
            "heads": {chain: [head.sequence, head.hash.hex()] for chain, head in checkpoint.heads.items()},
            "checked_through": checkpoint.checked_through,
        }
    )


def parse_checkpoint(body: bytes) -> Checkpoint:
    """Parse a checkpoint's body. Raises ValueError on anything that `checkpoint_bytes` would not write."""
    try:
        data: Any = json.loads(body.decode())
        checkpoint = Checkpoint(
            scope=str(data["scope"]),
            number=int(data["number"]),
            at=datetime.fromisoformat(data["at"]),
            previous=bytes.fromhex(data["previous"]),
            heads={
                chain: Head(int(sequence), bytes.fromhex(digest)) for chain, (sequence, digest) in data["heads"].items()
            },
            checked_through=int(data["checked_through"]),
        )
        is_canonical = checkpoint_bytes(checkpoint) == body
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        raise ValueError("not a checkpoint") from None
    heads = checkpoint.heads.items()
    if not is_canonical or any(scope_of(chain) != checkpoint.scope or head.sequence < 1 for chain, head in heads):
        raise ValueError("not a checkpoint")
    return checkpoint


class Signed(Protocol):
    """What a signer has signed: `body`, with a key of its scope."""

    @property
    def scope(self) -> str: ...
    @property
    def body(self) -> bytes: ...
    @property
    def signature(self) -> bytes: ...
    @property
    def signer(self) -> str: ...
    @property
    def key_version(self) -> int: ...


def find_signature_fault(signed: Signed, keys: PublicKeys) -> str | None:
    """Return why the signature is not valid, or None."""
    key = keys.get((signed.scope, signed.signer, signed.key_version))
    if key is None:
        return f"there is no public key of {signed.signer} (version {signed.key_version}) to check its signature with"
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signed.signature, signed.body)
    except (InvalidSignature, ValueError):
        return "its signature is not the signer's"
    return None


def find_version_fault(signed: Signed, highest: int) -> str | None:
    """Return why the version of the key is refused: it is older than one that signed before it. None: it is valid.

    `highest`: the highest version of the same signer's key that signed an earlier checkpoint; 0: there is none. A key
    is rotated because it may have leaked. So a later checkpoint of a former version may be forged.
    """
    if signed.key_version >= highest:
        return None
    return f"version {signed.key_version} of the key signs it, after version {highest}"


@dataclass(slots=True)
class CheckpointWalk:
    """Incremental verification of one scope's checkpoints, in their order.

    `keys` None: signatures are not checked. `heads`: the head of each chain in the newest checkpoint that signs the
    chain. `late`: number of checkpoints that sign an entry older than UNSIGNED_FOR; `first_late` describes the first
    one.
    """

    scope: str
    keys: PublicKeys | None
    kept: KeptCheckpoints = field(default_factory=dict)
    count: int = 0
    heads: dict[str, Head] = field(default_factory=dict)
    newest: Checkpoint | None = None
    newest_signed: SignedCheckpoint | None = None
    late: int = 0
    first_late: str | None = None
    _versions: dict[str, int] = field(default_factory=dict)
    """The highest version of each signer's key so far."""

    def take(
        self, signed: SignedCheckpoint, find_hash: FindHash, find_time: FindTime, *, has_entries: bool = True
    ) -> str | None:
        """Verify the next checkpoint against its predecessors and the entries.

        `has_entries` False: the entries that it signs are not available, so its heads are not compared with them.
        Returns why it is not valid, or None after making it the newest.
        """
        try:
            checkpoint = parse_checkpoint(signed.body)
        except ValueError:
            return "its bytes are not a checkpoint"
        why = (
            self._find_content_fault(signed, checkpoint)
            or self._find_order_fault(signed, checkpoint)
            or self._find_head_fault(checkpoint, find_hash if has_entries else None)
        )
        if why is not None:
            return why
        kept = self.kept.get((signed.scope, signed.number), frozenset())
        if kept - {signed.digest}:
            return "it differs from the one that was recorded outside the database: the log was rewritten"
        if has_entries:
            self._note_late(checkpoint, find_time)
        self.count += 1
        self.heads.update(checkpoint.heads)
        self.newest, self.newest_signed = checkpoint, signed
        self._versions[signed.signer] = signed.key_version
        return None

    def find_end_fault(self) -> tuple[int, str] | None:
        """Return the number of the first kept checkpoint that this log lacks, with the fault. Call it last."""
        last = 0 if self.newest is None else self.newest.number
        beyond = min((number for scope, number in self.kept if scope == self.scope and number > last), default=None)
        if beyond is None:
            return None
        return beyond, f"it was recorded outside the database, but the checkpoints here end at {last}: {ROLLED_BACK}"

    def note_unsigned(self, unsigned_since: Mapping[str, datetime]) -> None:
        """Note the oldest entry that the newest checkpoint should have signed. Call it last.

        `unsigned_since`: by chain, when the oldest entry that no checkpoint signs was written.
        """
        oldest = min(unsigned_since, key=lambda chain: unsigned_since[chain], default=None)
        if self.newest is not None and oldest is not None and self.newest.at - unsigned_since[oldest] > UNSIGNED_FOR:
            self.late += 1
            self.first_late = self.first_late or (
                f"checkpoint {self.newest.number} of {self.newest.at:%Y-%m-%d %H:%M} UTC does not sign an entry of "
                f"chain {oldest}, written {unsigned_since[oldest]:%Y-%m-%d %H:%M} UTC"
            )

    def _note_late(self, checkpoint: Checkpoint, find_time: FindTime) -> None:
        """Note a checkpoint that signs an entry older than UNSIGNED_FOR."""
        for chain, head in checkpoint.heads.items():
            first = self.heads[chain].sequence + 1 if chain in self.heads else 1
            written_at = find_time(chain, first) if first <= head.sequence else None
            if written_at is not None and checkpoint.at - written_at > UNSIGNED_FOR:
                self.late += 1
                self.first_late = self.first_late or (
                    f"checkpoint {checkpoint.number} of {checkpoint.at:%Y-%m-%d %H:%M} UTC signs entry {first} of "
                    f"chain {chain}, written {written_at:%Y-%m-%d %H:%M} UTC"
                )
                return

    def _find_content_fault(self, signed: SignedCheckpoint, checkpoint: Checkpoint) -> str | None:
        columns = (self.scope, signed.number, signed.at or checkpoint.at)
        if (checkpoint.scope, checkpoint.number, checkpoint.at) != columns or signed.scope != self.scope:
            return "its columns differ from its bytes"
        return None if self.keys is None else find_signature_fault(signed, self.keys)

    def _find_order_fault(self, signed: SignedCheckpoint, checkpoint: Checkpoint) -> str | None:
        if self.newest is None or self.newest_signed is None:
            if signed.number != 1:
                return f"checkpoint 1 is missing; {signed.number} follows"
            return None if checkpoint.previous == FIRST else "it is the first but contains a previous digest"
        if signed.number != self.newest.number + 1:
            return f"checkpoint {self.newest.number + 1} is missing; {signed.number} follows"
        if checkpoint.previous != self.newest_signed.digest:
            return "it does not contain the digest of the checkpoint before it"
        return find_version_fault(signed, self._versions.get(signed.signer, 0))

    def _find_head_fault(self, checkpoint: Checkpoint, find_hash: FindHash | None) -> str | None:
        for chain, head in checkpoint.heads.items():
            before = self.heads.get(chain)
            if before is not None and head.sequence < before.sequence:
                return f"chain {chain} was longer at an earlier checkpoint"
            if find_hash is None or before == head:
                continue
            found = find_hash(chain, head.sequence)
            if found is None:
                return f"entry {head.sequence} of chain {chain}, which it signs, is missing"
            if found != head.hash:
                return f"entry {head.sequence} of chain {chain} differs from the one that it signs"
        return None
