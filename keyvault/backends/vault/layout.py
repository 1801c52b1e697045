"""The names of everything of ours inside a Vault or OpenBao, and which role may do what.

Nothing is shared between the environments: no mount, no policy, no role, no signing key (D12). A role does one kind of
thing, so that whoever steals a login can do one kind of thing, in one environment.
"""

from dataclasses import dataclass
from enum import StrEnum

from keyvault.backends.base import Mount
from keyvault.domain.digests import PepperSet

SCOPES = tuple(scope.value for scope in PepperSet)
"""`sandbox` and `production`, and `service` for what is neither: service tokens, and the platform's own audit chain."""

SIGNING_KEY = "audit"
"""Of each signing mount: Ed25519, not exportable."""

PEPPER_PATH = "hmac"


class SecretsEngine(StrEnum):
    """One mount for each of these and each scope (no keys in scope `service`)."""

    KEYS = "keys"
    PEPPERS = "peppers"
    ANCHOR = "anchor"


class VaultRole(StrEnum):
    """A login's name is `<prefix>-<role>-<scope>`; its policy has the same name."""

    ISSUER = "issuer"
    READER = "reader"
    RETIRER = "retirer"
    DESTROYER = "destroyer"
    OFFBOARDER = "offboarder"
    RECONCILER = "reconciler"
    LOOKUP = "lookup"
    KEEPER = "keeper"
    ANCHOR = "anchor"


ENGINE_OF: dict[VaultRole, SecretsEngine] = {
    VaultRole.ISSUER: SecretsEngine.KEYS,
    VaultRole.READER: SecretsEngine.KEYS,
    VaultRole.RETIRER: SecretsEngine.KEYS,
    VaultRole.DESTROYER: SecretsEngine.KEYS,
    VaultRole.OFFBOARDER: SecretsEngine.KEYS,
    VaultRole.RECONCILER: SecretsEngine.KEYS,
    VaultRole.LOOKUP: SecretsEngine.PEPPERS,
    VaultRole.KEEPER: SecretsEngine.PEPPERS,
    VaultRole.ANCHOR: SecretsEngine.ANCHOR,
}

MERCHANT_POLICY = "merchant"
"""The template with which a merchant's own backend reads its own paths; no login of ours has it."""


def scopes_of(engine: SecretsEngine) -> tuple[str, ...]:
    return tuple(scope for scope in SCOPES if engine is not SecretsEngine.KEYS or scope != PepperSet.SERVICE)


@dataclass(frozen=True, slots=True)
class Layout:
    """All names of one installation. `prefix` lets several share a server."""

    prefix: str = "keyvault"

    def mount(self, engine: SecretsEngine, scope: str) -> str:
        return f"{self.prefix}-{engine}-{scope}"

    def login(self, role: VaultRole, scope: str) -> str:
        """The name of the role in every way of logging in, and of its policy."""
        return f"{self.prefix}-{role}-{scope}"

    def policy(self, name: str, scope: str) -> str:
        return f"{self.prefix}-{name}-{scope}"

    def place(self, mount: Mount, path: str) -> tuple[str, str, str]:
        """Scope, mount and path of what the service calls `mount` and `path`. A pepper set has a mount of its own."""
        if mount is Mount.PEPPERS:
            return path, self.mount(SecretsEngine.PEPPERS, path), PEPPER_PATH
        return mount.value, self.mount(SecretsEngine.KEYS, mount.value), path
