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
        return f"vault:{self.backend.layout.mount(SecretsEngine.SIGNING, scope)}/{SIGNING_KEY}"

    def sign(self, scope: str, message: bytes) -> Signature:
        return transit.sign(self.backend, scope, message)

    def read_public_keys(self, scope: str) -> dict[int, bytes]:
        return transit.read_public_keys(self.backend, scope)


@dataclass(frozen=True, slots=True)
class LocalSigner:
    """Signs with the newest version of one key per scope. The first signature creates version 1.

    Former versions stay: their public keys verify what they signed.
    """

    keystore: SecretBackend

    def name(self, scope: str) -> str:
        return LOCAL

    def sign(self, scope: str, message: bytes) -> Signature:
        try:
            version, key = self._read(scope)
        except BackendMissingError:
            version, key = self._make(scope)
        return Signature(key.sign(message), version)

    def read_public_keys(self, scope: str) -> dict[int, bytes]:
        keys = [self._read(scope, stored.version) for stored in self.keystore.versions(Mount.AUDIT, _path(scope))]
        return {version: key.public_key().public_bytes_raw() for version, key in keys}

    def rotate(self, scope: str) -> int:
        """Create the next version, which signs from now on, and return its number.

        Raises BackendConflictError if another process creates it, and IntegrityError if a key that has signed
        checkpoints is gone.
        """
        stored = self.keystore.versions(Mount.AUDIT, _path(scope))
        if not stored:
            return self._make(scope)[0]
        newest = stored[-1].version
        if AuditCheckpoint.objects.filter(scope=scope, signer=LOCAL, key_version__gt=newest).exists():
            raise _gone_error(scope, f"version {newest + 1}")
        return self._put(scope, newest)

    def _read(self, scope: str, version: int | None = None) -> tuple[int, Ed25519PrivateKey]:
        stored = self.keystore.read(Mount.AUDIT, _path(scope), version)
        return stored.version, Ed25519PrivateKey.from_private_bytes(base64.b64decode(stored.secret.reveal()))

    def _make(self, scope: str) -> tuple[int, Ed25519PrivateKey]:
        """Create the scope's key. Raises IntegrityError when a lost key has already signed checkpoints."""
        if AuditCheckpoint.objects.filter(scope=scope, signer=LOCAL).exists():
            raise _gone_error(scope, "key")
        # On a conflict another worker was first; use its key.
        with suppress(BackendConflictError):
            self._put(scope, 0)
        return self._read(scope)

    def _put(self, scope: str, newest: int) -> int:
        new_key = Plaintext(base64.b64encode(secrets.token_bytes(_KEY_BYTES)).decode())
        return self.keystore.put(Mount.AUDIT, _path(scope), new_key, {"scope": scope}, expected_version=newest)


def _gone_error(scope: str, what: str) -> IntegrityError:
    return IntegrityError(
        "The key that signs the audit log is gone.",
        internal=f"the keystore has no {what} of audit-{scope}: restore the one that belongs to this database",
    )


def _path(scope: str) -> str:
    return f"audit-{scope}"


def audit_signer() -> AuditSigner:
    """Return the configured signer. Raises ImproperlyConfigured when the keystore must not be opened."""
    return TransitSigner(vault_backend()) if settings.IS_VAULT else LocalSigner(secret_backend())
