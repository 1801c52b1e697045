"""A log in memory with its checkpoints, for tests that tamper with it: written, signed and exported as by the service.

The attacker controls the database and knows the code, but does not have the signing key.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from keyvault.domain.audit import GENESIS, PLATFORM_CHAIN, ChainedEntry, entry_bytes, entry_hash
from keyvault.domain.audit_records import ChainHead, ExportEnd, ExportRecord, ExportStart, record_line
from keyvault.domain.checkpoints import (
    FIRST,
    Checkpoint,
    Head,
    KeyName,
    SignedCheckpoint,
    checkpoint_bytes,
    parse_checkpoint,
    scope_of,
)

AT = datetime(2026, 11, 21, 12, tzinfo=UTC)
ACME, GLOBEX = "account:acme/sandbox", "account:globex/sandbox"
CHAINS = (ACME, GLOBEX, PLATFORM_CHAIN)
SCOPES = ("sandbox", "service")
SIGNER = "vault:keyvault-anchor/audit"

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
PUBLIC_KEYS: dict[KeyName, bytes] = {(scope, SIGNER, 1): KEY.public_key().public_bytes_raw() for scope in SCOPES}


@dataclass
class Logbook:
    """`chains` and `checkpoints` are what is stored: a test changes them at will."""

    chains: dict[str, list[ChainedEntry]] = field(default_factory=lambda: {chain: [] for chain in CHAINS})
    checkpoints: dict[str, list[SignedCheckpoint]] = field(default_factory=lambda: {scope: [] for scope in SCOPES})

    def write(self, chain: str, text: str = "x") -> None:
        entries = self.chains[chain]
        sequence, previous = len(entries) + 1, entries[-1].hash if entries else GENESIS
        body = entry_bytes(
            chain=chain,
            sequence=sequence,
            at=AT,
            event="key.revoked",
            actor="operator:tam",
            channel="console",
            details={"text": text},
        )
        entries.append(ChainedEntry(chain, sequence, body, previous, entry_hash(previous, body)))

    def sign(self, scope: str, key: Ed25519PrivateKey = KEY) -> None:
        """The next checkpoint of the chains that have changed, as the service would sign it."""
        before = self.checkpoints[scope]
        number, previous = len(before) + 1, before[-1].digest if before else FIRST
        last = self.signed_heads(scope)
        heads = {chain: head for chain, head in self.heads(scope).items() if last.get(chain) != head}
        checkpoint = Checkpoint(scope, number, AT + timedelta(minutes=number), previous, heads)
        self.checkpoints[scope].append(signed(checkpoint, key))

    def signed_heads(self, scope: str) -> dict[str, Head]:
        """Return the head of each chain in the checkpoint that signed it last."""
        found: dict[str, Head] = {}
        for checkpoint in self.checkpoints[scope]:
            found |= parse_checkpoint(checkpoint.body).heads
        return found

    def heads(self, scope: str) -> dict[str, Head]:
        return {
            chain: Head(entries[-1].sequence, entries[-1].hash)
            for chain, entries in self.chains.items()
            if scope_of(chain) == scope and entries
        }

    def rechain(self, chain: str) -> None:
        """Renumber and rehash the entries, so that the chain itself is intact."""
        entries, self.chains[chain] = self.chains[chain], []
        for entry in entries:
            done = self.chains[chain]
            previous = done[-1].hash if done else GENESIS
            self.chains[chain].append(
                replace(entry, sequence=len(done) + 1, previous=previous, hash=entry_hash(previous, entry.body))
            )

    def signed_length(self, chain: str) -> int:
        """Return the number of entries that a checkpoint signs."""
        heads = self.signed_heads(scope_of(chain) or "")
        return heads[chain].sequence if chain in heads else 0

    def copied(self) -> "Logbook":
        return copy.deepcopy(self)

    def records(self) -> Iterator[ExportRecord]:
        """Yield the records in the order of `keyvault.services.audit.export`."""
        yield ExportStart(AT + timedelta(hours=1), SCOPES, None)
        for scope in SCOPES:
            yield from self._records_of(scope)
        yield ExportEnd(
            sum(len(entries) for entries in self.chains.values()), sum(len(each) for each in self.checkpoints.values())
        )

    def lines(self) -> list[bytes]:
        return [record_line(record).encode() + b"\n" for record in self.records()]

    def _records_of(self, scope: str) -> Iterator[ExportRecord]:
        written = {chain: 0 for chain in self.chains if scope_of(chain) == scope}
        for checkpoint in self.checkpoints[scope]:
            for chain, head in parse_checkpoint(checkpoint.body).heads.items():
                yield from self.chains[chain][written[chain] : head.sequence]
                written[chain] = max(written[chain], head.sequence)
            yield checkpoint
        for chain, count in written.items():
            yield from self.chains[chain][count:]
        for chain, head in self.heads(scope).items():
            yield ChainHead(chain, head)


def signed(checkpoint: Checkpoint, key: Ed25519PrivateKey = KEY) -> SignedCheckpoint:
    body = checkpoint_bytes(checkpoint)
    return SignedCheckpoint(checkpoint.scope, checkpoint.number, body, key.sign(body), SIGNER, 1)
