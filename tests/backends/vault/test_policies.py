"""The policies of deploy/vault on a real server: every role may do its own calls and nothing else."""

import base64
import json
from collections.abc import Callable, Iterator
from typing import Any, cast

import hvac
import pytest

from keyvault.backends.base import BackendDeniedError, BackendInvalidError
from keyvault.backends.vault.bootstrap import list_logins, make_logins, read_path
from keyvault.backends.vault.capabilities import list_deviations, wanted_capabilities
from keyvault.backends.vault.client import open_client
from keyvault.backends.vault.layout import SCOPES, Layout, SecretsEngine, VaultRole, scopes_of
from keyvault.backends.vault.logins import AppRoleLogin

from .installation import InstalledVault

Act = Callable[[hvac.Client, str], object]
Merchant = Callable[[str, str | None], hvac.Client]
"""Merchant clients by environment and by the account that their entity names."""

KEYS: dict[str, Act] = {
    "create": lambda client, mount: _put(client, mount, "1/new", 0),
    "replace": lambda client, mount: _put(client, mount, "1/replaced", 1),
    "read": lambda client, mount: client.read(f"{mount}/data/1/kept"),
    "see versions": lambda client, mount: client.read(f"{mount}/metadata/1/kept"),
    "configure path": lambda client, mount: client.write_data(f"{mount}/metadata/1/kept", data={"max_versions": 1}),
    "list": lambda client, mount: client.list(f"{mount}/metadata/1"),
    "delete newest": lambda client, mount: client.delete(f"{mount}/data/1/kept"),
    "delete": lambda client, mount: client.write_data(f"{mount}/delete/1/deleted", data={"versions": [1]}),
    "undelete": lambda client, mount: client.write_data(f"{mount}/undelete/1/deleted", data={"versions": [1]}),
    "destroy": lambda client, mount: client.write_data(f"{mount}/destroy/1/destroyed", data={"versions": [1]}),
    "forget": lambda client, mount: client.delete(f"{mount}/metadata/1/forgotten"),
    "configure": lambda client, mount: client.write_data(f"{mount}/config", data={"cas_required": False}),
    "see configuration": lambda client, mount: client.read(f"{mount}/config"),
}
PEPPERS: dict[str, Act] = {
    "replace": lambda client, mount: _put(client, mount, "hmac", 1),
    "read": lambda client, mount: client.read(f"{mount}/data/hmac"),
    "see versions": lambda client, mount: client.read(f"{mount}/metadata/hmac"),
    "read elsewhere": lambda client, mount: client.read(f"{mount}/data/other"),
    "list": lambda client, mount: client.list(f"{mount}/metadata"),
    "delete": lambda client, mount: client.write_data(f"{mount}/delete/hmac", data={"versions": [1]}),
    "forget": lambda client, mount: client.delete(f"{mount}/metadata/hmac"),
    "destroy": lambda client, mount: client.write_data(f"{mount}/destroy/hmac", data={"versions": [1]}),
    "see configuration": lambda client, mount: client.read(f"{mount}/config"),
}
SIGNING: dict[str, Act] = {
    "sign": lambda client, mount: client.write_data(f"{mount}/sign/audit", data={"input": "AAAA"}),
    "see public key": lambda client, mount: client.read(f"{mount}/keys/audit"),
    "rotate": lambda client, mount: client.write_data(f"{mount}/keys/audit/rotate", data={}),
    "allow deletion": lambda client, mount: client.write_data(
        f"{mount}/keys/audit/config", data={"deletion_allowed": True}
    ),
    "take out": lambda client, mount: client.read(f"{mount}/export/signing-key/audit"),
    "other key": lambda client, mount: client.write_data(f"{mount}/keys/other", data={"type": "ed25519"}),
}
EVIDENCE: dict[str, Act] = {
    "record": lambda client, mount: _put(client, mount, "checkpoint", 1),
    "record revocations": lambda client, mount: _put(client, mount, "revocations", 1),
    "add segment": lambda client, mount: _put(client, mount, "revocations/new", 0),
    "replace segment": lambda client, mount: _put(client, mount, "revocations/old", 1),
    "read revocations": lambda client, mount: client.read(f"{mount}/data/revocations"),
    "read segment": lambda client, mount: client.read(f"{mount}/data/revocations/old"),
    "record elsewhere": lambda client, mount: _put(client, mount, "other", 0),
    "read evidence": lambda client, mount: client.read(f"{mount}/data/checkpoint"),
    "list": lambda client, mount: client.list(f"{mount}/metadata"),
    "delete newest": lambda client, mount: client.delete(f"{mount}/data/checkpoint"),
    "delete": lambda client, mount: client.write_data(f"{mount}/delete/checkpoint", data={"versions": [1]}),
    "forget": lambda client, mount: client.delete(f"{mount}/metadata/checkpoint"),
    "destroy": lambda client, mount: client.write_data(f"{mount}/destroy/checkpoint", data={"versions": [1]}),
    "configure": lambda client, mount: client.write_data(f"{mount}/config", data={"cas_required": False}),
    "see configuration": lambda client, mount: client.read(f"{mount}/config"),
}
SERVER: dict[str, Act] = {
    "make a token": lambda client, own: client.write_data("auth/token/create", data={}),
    "widen its policy": lambda client, own: client.write_data(f"sys/policies/acl/{own}", data={"policy": ""}),
    "see its policy": lambda client, own: client.read(f"sys/policies/acl/{own}"),
    "widen its role": lambda client, own: client.write_data(f"auth/approle/role/{own}", data={"token_num_uses": 0}),
    "make a secret id": lambda client, own: client.write_data(f"auth/approle/role/{own}/secret-id", data={}),
    "list mounts": lambda client, own: client.read("sys/mounts"),
    "list tokens": lambda client, own: client.list("auth/token/accessors"),
    "look at entities": lambda client, own: client.list("identity/entity/id"),
}
ACTS = {SecretsEngine.KEYS: KEYS, SecretsEngine.PEPPERS: PEPPERS, SecretsEngine.SIGNING: SIGNING}
FACTORS: dict[str, Act] = {
    "encrypt": lambda client, mount: client.write_data(f"{mount}/encrypt/seeds", data={"plaintext": "AAAA"}),
    "decrypt": lambda client, mount: client.write_data(f"{mount}/decrypt/seeds", data={"ciphertext": "vault:v1:AAAA"}),
    "rotate": lambda client, mount: client.write_data(f"{mount}/keys/seeds/rotate", data={}),
    "see key": lambda client, mount: client.read(f"{mount}/keys/seeds"),
    "allow deletion": lambda client, mount: client.write_data(
        f"{mount}/keys/seeds/config", data={"deletion_allowed": True}
    ),
    "take out": lambda client, mount: client.read(f"{mount}/export/encryption-key/seeds"),
    "other key": lambda client, mount: client.write_data(f"{mount}/encrypt/other", data={"plaintext": "AAAA"}),
}
WRAPPING: dict[str, Act] = {
    "unwrap": lambda client, mount: client.write_data(f"{mount}/decrypt/master", data={"ciphertext": "vault:v1:AAAA"}),
    "make wrapped": lambda client, mount: client.write_data(f"{mount}/datakey/wrapped/master", data={}),
    "make readable": lambda client, mount: client.write_data(f"{mount}/datakey/plaintext/master", data={}),
    "wrap": lambda client, mount: client.write_data(f"{mount}/encrypt/master", data={"plaintext": "AAAA"}),
    "rotate": lambda client, mount: client.write_data(f"{mount}/keys/master/rotate", data={}),
    "see key": lambda client, mount: client.read(f"{mount}/keys/master"),
    "take out": lambda client, mount: client.read(f"{mount}/export/encryption-key/master"),
    "other key": lambda client, mount: client.write_data(f"{mount}/datakey/wrapped/other", data={}),
}
ACTS[SecretsEngine.EVIDENCE] = EVIDENCE
ACTS[SecretsEngine.FACTORS] = FACTORS
ACTS[SecretsEngine.WRAPPING] = WRAPPING

ALLOWED: dict[VaultRole, set[str]] = {
    VaultRole.ISSUER: {"create", "replace"},
    VaultRole.READER: {"read", "see versions", "see configuration"},
    VaultRole.RETIRER: {"delete", "undelete"},
    VaultRole.DESTROYER: {"destroy"},
    VaultRole.OFFBOARDER: {"forget"},
    VaultRole.RECONCILER: {"list"},
    VaultRole.LOOKUP: {"read", "see versions", "see configuration"},
    VaultRole.KEEPER: {"replace", "destroy"},
    VaultRole.SIGNING: {"sign"},
    VaultRole.FACTORS: {"encrypt", "decrypt"},
    VaultRole.UNWRAPPER: {"unwrap", "make wrapped"},
}
"""Acts on the role's own mount. On others, `lookup` reads public keys and evidence, and `anchor` writes evidence."""

LOGINS = list_logins(SCOPES)


def _put(client: hvac.Client, mount: str, path: str, version: int) -> object:
    return client.write_data(f"{mount}/data/{path}", data={"data": {"secret": "x"}, "options": {"cas": version}})


def _fill(made: InstalledVault) -> None:
    """Put one version at each path that an act uses."""
    for scope in scopes_of(SecretsEngine.KEYS):
        for path in ("kept", "replaced", "deleted", "destroyed", "forgotten"):
            _put(made.admin, made.layout.mount(SecretsEngine.KEYS, scope), f"1/{path}", 0)
    for scope in scopes_of(SecretsEngine.PEPPERS):
        _put(made.admin, made.layout.mount(SecretsEngine.PEPPERS, scope), "hmac", 0)
    for scope in scopes_of(SecretsEngine.EVIDENCE):
        for path in ("checkpoint", "revocations", "revocations/old"):
            _put(made.admin, made.layout.mount(SecretsEngine.EVIDENCE, scope), path, 0)


def _logged_in(made: InstalledVault, name: str) -> hvac.Client:
    make_logins(made.admin, made.layout, [name], made.logins, wrap_seconds=None)
    client = open_client(made.server)
    client.token = AppRoleLogin(made.logins, name).log_in(client).text.reveal()
    return client


def _places(layout: Layout) -> Iterator[tuple[SecretsEngine, str, str]]:
    for engine in SecretsEngine:
        for scope in scopes_of(engine):
            yield engine, scope, layout.mount(engine, scope)


def _may(act: Act, client: hvac.Client, where: str) -> bool:
    try:
        act(client, where)
    except BackendDeniedError as error:
        if error.status != 403:  # Not installed, which is no denial.
            raise
        return False
    except BackendInvalidError:  # The call was allowed, and its made-up ciphertext was refused.
        return True
    return True


@pytest.mark.parametrize(("role", "scope"), LOGINS, ids=lambda part: str(part))
def test_policy_of_a_role_allows_only_its_own_calls(
    installed_vault: InstalledVault, role: VaultRole, scope: str
) -> None:
    """A stolen login allows one kind of call in one environment and cannot extend its rights."""
    _fill(installed_vault)
    name = installed_vault.layout.login(role, scope)
    client = _logged_in(installed_vault, name)
    wanted = {(installed_vault.layout.mount(_engine(role), scope), act) for act in ALLOWED[role]}
    if role is VaultRole.LOOKUP:
        wanted.add((installed_vault.layout.mount(SecretsEngine.SIGNING, scope), "see public key"))
        evidence = installed_vault.layout.mount(SecretsEngine.EVIDENCE, scope)
        acts = ("read evidence", "read revocations", "read segment", "see configuration")
        wanted |= {(evidence, act) for act in acts}
    if role is VaultRole.SIGNING:
        evidence = installed_vault.layout.mount(SecretsEngine.EVIDENCE, scope)
        wanted |= {(evidence, act) for act in ("record", "record revocations", "add segment")}
    found = {
        (mount, act)
        for engine, _, mount in _places(installed_vault.layout)
        for act, run in ACTS[engine].items()
        if _may(run, client, mount)
    }
    assert found == wanted
    assert {act for act, run in SERVER.items() if _may(run, client, name)} == set()


def _engine(role: VaultRole) -> SecretsEngine:
    return {
        VaultRole.LOOKUP: SecretsEngine.PEPPERS,
        VaultRole.KEEPER: SecretsEngine.PEPPERS,
        VaultRole.SIGNING: SecretsEngine.SIGNING,
        VaultRole.FACTORS: SecretsEngine.FACTORS,
        VaultRole.UNWRAPPER: SecretsEngine.WRAPPING,
    }.get(role, SecretsEngine.KEYS)


def test_policy_of_the_issuer_without_check_and_set_writes_nothing(installed_vault: InstalledVault) -> None:
    """The mount itself requires check-and-set, so no writer overwrites an unseen version."""
    mount = installed_vault.layout.mount(SecretsEngine.KEYS, "sandbox")
    client = _logged_in(installed_vault, installed_vault.layout.login(VaultRole.ISSUER, "sandbox"))
    with pytest.raises(BackendInvalidError) as refused:
        client.write_data(f"{mount}/data/1/new", data={"data": {"secret": "x"}})
    assert "check-and-set parameter required" in refused.value.internal


def test_capabilities_equal_the_doctors_table(installed_vault: InstalledVault) -> None:
    """The table of the diagnosis and the policies agree in both directions."""
    for role, scope in LOGINS:
        client = _logged_in(installed_vault, installed_vault.layout.login(role, scope))
        wanted = wanted_capabilities(installed_vault.layout, role, scope)
        found = _write(client, "sys/capabilities-self", paths=list(wanted))
        assert list_deviations(wanted, found) == []


# --- merchants ----------------------------------------------------------------------------------------------


@pytest.fixture
def merchant(installed_vault: InstalledVault) -> Iterator[Merchant]:
    """Return a function that creates a merchant's backend, logged in; everything on the server is removed
    afterwards.
    """
    made: list[str] = []
    yield lambda scope, account_id: _make_merchant(installed_vault, scope, account_id, made)
    for entity in made:
        installed_vault.admin.delete(f"identity/entity/id/{entity}")


def _make_merchant(made: InstalledVault, scope: str, account_id: str | None, entities: list[str]) -> hvac.Client:
    """Create a merchant as deploy/vault/README.md describes: its own role, and an entity with the account id."""
    admin, name = made.admin, made.layout.policy(f"shop{account_id}", scope)
    policy = made.layout.policy("merchant", scope)
    admin.write_data(f"auth/approle/role/{name}", data={"token_policies": [policy], "token_period": 3600})
    role_id = read_path(admin, f"auth/approle/role/{name}/role-id")["role_id"]
    metadata = {} if account_id is None else {"account_id": account_id}
    entities.append(_write(admin, "identity/entity", name=name, metadata=metadata)["id"])
    accessor = read_path(admin, "sys/auth")["approle/"]["accessor"]
    _write(admin, "identity/entity-alias", name=role_id, canonical_id=entities[-1], mount_accessor=accessor)
    secret_id = admin.auth.approle.generate_secret_id(name)["data"]["secret_id"]
    client = open_client(made.server)
    client.auth.approle.login(role_id, secret_id)
    return client


def _write(client: hvac.Client, path: str, **data: object) -> Any:
    return cast("Any", client.write_data(path, data=data))["data"]


def _reads(client: hvac.Client, path: str) -> bool:
    return _may(lambda asking, where: asking.read(where), client, path)


def test_policy_of_merchants_allows_only_own_paths_in_the_own_environment(
    installed_vault: InstalledVault, merchant: Merchant
) -> None:
    """A merchant's backend never sees another merchant's key, nor its own key of the other environment."""
    layout = installed_vault.layout
    mounts = {scope: layout.mount(SecretsEngine.KEYS, scope) for scope in scopes_of(SecretsEngine.KEYS)}
    paths = [f"{mount}/data/{account}/crd" for mount in mounts.values() for account in ("1", "12", "2")]
    for mount in mounts.values():
        for account in ("1", "12", "2"):
            _put(installed_vault.admin, mount, f"{account}/crd", 0)
    for scope, mount in mounts.items():
        for account in ("1", "2"):
            client = merchant(scope, account)
            assert [path for path in paths if _reads(client, path)] == [f"{mount}/data/{account}/crd"]
            for refused in ("create", "replace", "delete newest", "delete", "destroy", "forget"):
                assert not _may(KEYS[refused], client, mount)
            for path in (f"metadata/{account}", f"metadata/{account}/crd", "metadata/"):
                assert not _may(lambda asking, where: asking.list(where), client, f"{mount}/{path}")
                assert not _reads(client, f"{mount}/{path}")


def test_policy_of_merchants_without_an_account_id_reads_nothing(
    installed_vault: InstalledVault, merchant: Merchant
) -> None:
    """An entity without an account id has access to nothing, not to everything."""
    mount = installed_vault.layout.mount(SecretsEngine.KEYS, "sandbox")
    _put(installed_vault.admin, mount, "1/crd", 0)
    client = merchant("sandbox", None)
    assert not _reads(client, f"{mount}/data/1/crd")
    assert not _reads(client, f"{mount}/data//crd")


def test_signing_key_exposes_its_public_half_only(installed_vault: InstalledVault) -> None:
    client = _logged_in(installed_vault, installed_vault.layout.login(VaultRole.LOOKUP, "service"))
    mount = installed_vault.layout.mount(SecretsEngine.SIGNING, "service")
    about = read_path(client, f"{mount}/keys/audit")
    assert (about["type"], about["exportable"], about["deletion_allowed"]) == ("ed25519", False, False)
    assert len(base64.b64decode(about["keys"]["1"]["public_key"])) == 32
    assert json.dumps(about).find("private") == -1
