"""Signers of audit checkpoints: a key inside Vault, or one in this machine's local keystore.

Vault's key never leaves Vault, and its login may only sign. An attacker with the database, or even this host's files,
cannot forge past checkpoints. The local key protects against an attacker without the keystore, such as a database
administrator or a person who swaps a backup. It does not protect against the owner of this host.
"""

import base64
import secrets
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from django.conf import settings

from keyvault.backends.base import BackendConflictError, BackendMissingError, Mount, SecretBackend
from keyvault.backends.vault import transit
from keyvault.backends.vault.kv import VaultBackend
from keyvault.backends.vault.layout import SIGNING_KEY, SecretsEngine
from keyvault.backends.vault.transit import Signature
from keyvault.domain.errors import IntegrityError
from keyvault.domain.plaintext import Plaintext
from keyvault.models import AuditCheckpoint
from keyvault.services.secrets.backend import secret_backend, vault_backend

LOCAL = "local"
_KEY_BYTES = 32


class AuditSigner(Protocol):
    """Signs checkpoints.

    Every method but `name` may raise BackendUnavailableError, BackendDeniedError, BackendInvalidError.
    """

    def name(self, scope: str) -> str:
        """Return the signer's permanent name in checkpoints."""

    def sign(self, scope: str, message: bytes) -> Signature:
        """Return an Ed25519 signature by the scope's own key."""

    def read_public_keys(self, scope: str) -> dict[int, bytes]:
        """Return the raw public key of every version, by version."""


@dataclass(frozen=True, slots=True)
class TransitSigner:
    """Signs with the key `audit` of the scope's own transit mount."""

    backend: VaultBackend

    def name(self, scope: str) -> str:
        return f"vault:{self.backend.layout.mount(SecretsEngine.ANCHOR, scope)}/{SIGNING_KEY}"

    def sign(self, scope: str, message: bytes) -> Signature:
        return transit.sign(self.backend, scope, message)

    def read_public_keys(self, scope: str) -> dict[int, bytes]:
        return transit.read_public_keys(self.backend, scope)


@dataclass(frozen=True, slots=True)
class LocalSigner:
    """Signs with one key per scope, created at its first signature and never replaced: version 1."""

    keystore: SecretBackend

    def name(self, scope: str) -> str:
        return LOCAL

    def sign(self, scope: str, message: bytes) -> Signature:
        try:
            key = self._read(scope)
        except BackendMissingError:
            key = self._make(scope)
        return Signature(key.sign(message), 1)

    def read_public_keys(self, scope: str) -> dict[int, bytes]:
        try:
            return {1: self._read(scope).public_key().public_bytes_raw()}
        except BackendMissingError:
            return {}

    def _read(self, scope: str) -> Ed25519PrivateKey:
        stored = self.keystore.read(Mount.AUDIT, f"audit-{scope}")
        return Ed25519PrivateKey.from_private_bytes(base64.b64decode(stored.secret.reveal()))

    def _make(self, scope: str) -> Ed25519PrivateKey:
        """Create the scope's key. Raises IntegrityError when a lost key has already signed checkpoints."""
        if AuditCheckpoint.objects.filter(scope=scope, signer=LOCAL).exists():
            raise IntegrityError(
                "The key that signs the audit log is gone.",
                internal=f"the keystore has no audit-{scope}: restore the one that belongs to this database",
            )
        new_key = Plaintext(base64.b64encode(secrets.token_bytes(_KEY_BYTES)).decode())
        # On a conflict another worker was first; use its key.
        with suppress(BackendConflictError):
            self.keystore.put(Mount.AUDIT, f"audit-{scope}", new_key, {"scope": scope}, expected_version=0)
        return self._read(scope)


def audit_signer() -> AuditSigner:
    """Return the configured signer. Raises ImproperlyConfigured when the keystore must not be opened."""
    return TransitSigner(vault_backend()) if settings.IS_VAULT else LocalSigner(secret_backend())
