"""Roles of each kind of host, capabilities of each role, and how a token's capabilities deviate from them.

The policies in deploy/vault grant the same capabilities; a test compares the two. The server is queried for
representative paths in every scope, so that excess capabilities are found, too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from keyvault.backends.vault.layout import (
    CHECKPOINT_PATH,
    ENCRYPTION_KEY,
    ENGINE_OF,
    PEPPER_PATH,
    REVOCATIONS_PATH,
    SCOPES,
    SIGNING_KEY,
    WRAPPING_KEY,
    Layout,
    SecretsEngine,
    VaultRole,
    scopes_of,
)

ROLES_OF_HOST: Final[Mapping[str, frozenset[VaultRole]]] = {
    "web": frozenset({VaultRole.LOOKUP, VaultRole.ISSUER, VaultRole.READER, VaultRole.FACTORS}),
    "worker": frozenset(VaultRole) - {VaultRole.KEEPER, VaultRole.FACTORS, VaultRole.UNWRAPPER},
    "setup": frozenset({VaultRole.LOOKUP, VaultRole.KEEPER, VaultRole.FACTORS}),
    "all": frozenset(VaultRole) - {VaultRole.UNWRAPPER},
    "keystore": frozenset({VaultRole.UNWRAPPER}),
}
"""`web` serves requests, `worker` runs Celery's worker and beat, `setup` runs setup, and the commands for peppers and
operators; `all` does all of it. `keystore` has a local keystore instead, with a wrapped master key."""

_OWN: Final[Mapping[VaultRole, Mapping[str, str]]] = {
    VaultRole.ISSUER: {"data": "create update"},
    VaultRole.READER: {"data": "read", "metadata": "read", "config": "read"},
    VaultRole.RETIRER: {"delete": "update", "undelete": "update"},
    VaultRole.DESTROYER: {"destroy": "update"},
    VaultRole.OFFBOARDER: {"metadata": "delete"},
    VaultRole.RECONCILER: {"metadata": "list"},
    VaultRole.LOOKUP: {"data": "read", "metadata": "read", "config": "read"},
    VaultRole.KEEPER: {"data": "create update", "destroy": "update"},
    VaultRole.SIGNING: {"sign": "update"},
    VaultRole.FACTORS: {"encrypt": "update", "decrypt": "update"},
    VaultRole.UNWRAPPER: {"decrypt": "update", "new wrapped": "update"},
}
"""Capabilities by kind of path in the role's own mount."""

_FURTHER: Final[Mapping[tuple[VaultRole, SecretsEngine], Mapping[str, str]]] = {
    (VaultRole.LOOKUP, SecretsEngine.SIGNING): {"keys": "read"},
    (VaultRole.LOOKUP, SecretsEngine.EVIDENCE): {"data": "read", "newest": "read", "segment": "read", "config": "read"},
    (VaultRole.SIGNING, SecretsEngine.EVIDENCE): {
        "data": "create update",
        "newest": "create update",
        "segment": "create",
    },
}
"""Capabilities in other mounts of the role's scope."""

_KV_KINDS: Final = ("data", "metadata", "delete", "undelete", "destroy")


@dataclass(frozen=True, slots=True)
class Deviation:
    """`missing` and `excess`: capabilities at `path`, in alphabetical order; one of the two may be empty."""

    path: str
    missing: tuple[str, ...]
    excess: tuple[str, ...]


def list_hosts(role: VaultRole) -> list[str]:
    """Return the kinds of host that need the role."""
    return [host for host, roles in ROLES_OF_HOST.items() if role in roles and host != "all"]


def wanted_capabilities(layout: Layout, role: VaultRole, scope: str) -> dict[str, frozenset[str]]:
    """Return the expected capabilities of a role for every queried path in all scopes; most are empty."""
    nothing: frozenset[str] = frozenset()
    wanted = dict.fromkeys(_server_paths(layout, role, scope), nothing)
    for engine in SecretsEngine:
        for other in scopes_of(engine):
            for kind, path in _mount_paths(layout, engine, other):
                own = _OWN[role] if engine is ENGINE_OF[role] else _FURTHER.get((role, engine), {})
                wanted[path] = frozenset(own.get(kind, "").split()) if other == scope else nothing
    return wanted


def list_deviations(wanted: Mapping[str, frozenset[str]], found: Mapping[str, Sequence[str]]) -> list[Deviation]:
    """Compare with the server's reply `found`; `deny` grants nothing, `root` everything."""
    deviations = []
    for path, should in wanted.items():
        may = frozenset(found.get(path, ())) - {"deny"}
        missing = frozenset() if "root" in may else should - may
        if missing or may - should:
            deviations.append(Deviation(path, tuple(sorted(missing)), tuple(sorted(may - should))))
    return deviations


def _mount_paths(layout: Layout, engine: SecretsEngine, scope: str) -> Iterator[tuple[str, str]]:
    """Yield kind and path of a mount's queried paths."""
    mount = layout.mount(engine, scope)
    if engine is SecretsEngine.SIGNING:
        yield "sign", f"{mount}/sign/{SIGNING_KEY}"
        yield "keys", f"{mount}/keys/{SIGNING_KEY}"
        yield "change", f"{mount}/keys/{SIGNING_KEY}/config"
        yield "take out", f"{mount}/export/signing-key/{SIGNING_KEY}"
        return
    if engine is SecretsEngine.FACTORS:
        yield from _encryption_paths(mount, ENCRYPTION_KEY)
        return
    if engine is SecretsEngine.WRAPPING:
        yield from _encryption_paths(mount, WRAPPING_KEY)
        return
    place = {SecretsEngine.PEPPERS: PEPPER_PATH, SecretsEngine.EVIDENCE: CHECKPOINT_PATH}.get(engine, "0/probe")
    for kind in _KV_KINDS:
        yield kind, f"{mount}/{kind}/{place}"
    if engine is SecretsEngine.EVIDENCE:
        yield "newest", f"{mount}/data/{REVOCATIONS_PATH}"
        yield "segment", f"{mount}/data/{REVOCATIONS_PATH}/probe"
    yield "config", f"{mount}/config"


def _encryption_paths(mount: str, key: str) -> Iterator[tuple[str, str]]:
    yield "encrypt", f"{mount}/encrypt/{key}"
    yield "decrypt", f"{mount}/decrypt/{key}"
    yield "new wrapped", f"{mount}/datakey/wrapped/{key}"
    yield "new readable", f"{mount}/datakey/plaintext/{key}"
    yield "keys", f"{mount}/keys/{key}"
    yield "change", f"{mount}/keys/{key}/config"
    yield "take out", f"{mount}/export/encryption-key/{key}"


def _server_paths(layout: Layout, role: VaultRole, scope: str) -> Iterator[str]:
    """Yield administrative paths, to which no role has access."""
    name = layout.login(role, scope)
    yield from ("auth/token/lookup-accessor", "auth/token/revoke-accessor")
    yield from ("auth/token/create", f"auth/approle/role/{name}", f"auth/approle/role/{name}/secret-id")
    yield from ("sys/audit", f"sys/policies/acl/{name}", "sys/seal")
    yield from (f"sys/mounts/{layout.mount(engine, other)}" for engine in SecretsEngine for other in SCOPES)
