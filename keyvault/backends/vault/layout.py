"""Names of our mounts, policies, roles and keys in Vault or OpenBao.

The environments share nothing: no mount, policy, role or signing key. A role allows one kind of call, and so
does a stolen login, in one environment only.
"""

from dataclasses import dataclass
from enum import StrEnum

from keyvault.backends.base import Mount
from keyvault.domain.digests import PepperSet

SCOPES = tuple(scope.value for scope in PepperSet)
"""`sandbox`, `production`, and `service` for service tokens and the platform's own audit chain."""

SIGNING_KEY = "audit"
"""Name of the key in each signing mount: Ed25519, not exportable."""

ENCRYPTION_KEY = "seeds"
"""Name of the key that encrypts the seeds of operators' second factors: AES-256-GCM, not exportable."""

WRAPPING_KEY = "master"
"""Name of the key that wraps the master key of a local keystore: AES-256-GCM, not exportable."""

PEPPER_PATH = "hmac"
CHECKPOINT_PATH = "checkpoint"
"""Path of the newest checkpoint's number and digest in each mount of evidence."""
REVOCATIONS_PATH = "revocations"
"""Path of the newest revocations in the mount of evidence; the segments of older ones are below it."""


class SecretsEngine(StrEnum):
    """Kinds of mount: one of each per scope. Only the environments have `keys`, and only scope `service` the last two.

    SIGNING signs audit checkpoints; Vaults in service have its name `anchor`. `evidence` holds the number and digest of
    the newest one, and the revocations. `factors` encrypts the seeds of operators' second factors. `wrapping` wraps the
    master key of a local keystore, for an installation whose secret backend is not the Vault.
    """

    KEYS = "keys"
    PEPPERS = "peppers"
    SIGNING = "anchor"
    EVIDENCE = "evidence"
    FACTORS = "factors"
    WRAPPING = "wrapping"


TRANSIT_ENGINES = frozenset({SecretsEngine.SIGNING, SecretsEngine.FACTORS, SecretsEngine.WRAPPING})
"""Mounts of keys that never leave the server; the others are KV version 2."""


class VaultRole(StrEnum):
    """Roles of logins. A login and its policy are named `<prefix>-<role>-<scope>`."""

    ISSUER = "issuer"
    READER = "reader"
    RETIRER = "retirer"
    DESTROYER = "destroyer"
    OFFBOARDER = "offboarder"
    RECONCILER = "reconciler"
    LOOKUP = "lookup"
    KEEPER = "keeper"
    SIGNING = "anchor"
    FACTORS = "factors"
    UNWRAPPER = "unwrapper"


ENGINE_OF: dict[VaultRole, SecretsEngine] = {
    VaultRole.ISSUER: SecretsEngine.KEYS,
    VaultRole.READER: SecretsEngine.KEYS,
    VaultRole.RETIRER: SecretsEngine.KEYS,
    VaultRole.DESTROYER: SecretsEngine.KEYS,
    VaultRole.OFFBOARDER: SecretsEngine.KEYS,
    VaultRole.RECONCILER: SecretsEngine.KEYS,
    VaultRole.LOOKUP: SecretsEngine.PEPPERS,
    VaultRole.KEEPER: SecretsEngine.PEPPERS,
    VaultRole.SIGNING: SecretsEngine.SIGNING,
    VaultRole.FACTORS: SecretsEngine.FACTORS,
    VaultRole.UNWRAPPER: SecretsEngine.WRAPPING,
}

MERCHANT_POLICY = "merchant"
"""Policy template for a merchant's own backend, to read its own paths; none of our logins has it."""


def scopes_of(engine: SecretsEngine) -> tuple[str, ...]:
    if engine in {SecretsEngine.FACTORS, SecretsEngine.WRAPPING}:
        return (PepperSet.SERVICE.value,)
    return tuple(scope for scope in SCOPES if engine is not SecretsEngine.KEYS or scope != PepperSet.SERVICE)


@dataclass(frozen=True, slots=True)
class Layout:
    """All names of one installation. Installations with different prefixes can share a server."""

    prefix: str = "keyvault"

    def mount(self, engine: SecretsEngine, scope: str) -> str:
        return f"{self.prefix}-{engine}-{scope}"

    def login(self, role: VaultRole, scope: str) -> str:
        """Return the name of the role in every authentication method, and of its policy."""
        return f"{self.prefix}-{role}-{scope}"

    def policy(self, name: str, scope: str) -> str:
        return f"{self.prefix}-{name}-{scope}"

    def place(self, mount: Mount, path: str) -> tuple[str, str, str]:
        """Return scope, mount and path in the server. Each pepper set and each scope's evidence has its own mount."""
        if mount is Mount.PEPPERS:
            return path, self.mount(SecretsEngine.PEPPERS, path), PEPPER_PATH
        if mount is Mount.EVIDENCE:
            scope, _, place = path.partition("/")
            return scope, self.mount(SecretsEngine.EVIDENCE, scope), place
        return mount.value, self.mount(SecretsEngine.KEYS, mount.value), path
