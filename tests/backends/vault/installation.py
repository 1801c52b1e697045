"""Our mounts, policies and roles on a running server, under a prefix that no other test has."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import hvac
from django.test import override_settings

from keyvault.backends.base import BackendMissingError, Mount
from keyvault.backends.vault.bootstrap import bootstrap, list_logins, list_scopes, make_logins
from keyvault.backends.vault.client import VaultServer, open_client
from keyvault.backends.vault.kv import VaultBackend
from keyvault.backends.vault.layout import Layout
from keyvault.backends.vault.logins import AppRoleLogin
from keyvault.domain.digests import PepperSet
from keyvault.domain.environments import Environment
from keyvault.domain.plaintext import Plaintext
from keyvault.services.secrets.backend import secret_backend, vault_backend
from tests.factories import forget_keystore, have_peppers


class Reachable(Protocol):
    """Of `tests.servers.openbao`, either kind."""

    @property
    def address(self) -> str: ...

    @property
    def root_token(self) -> str: ...


@dataclass(frozen=True)
class InstalledVault:
    """`backend` with all logins of the folder `logins`; `admin` may do everything on the server."""

    backend: VaultBackend
    layout: Layout
    server: VaultServer
    logins: Path
    auth: str
    admin: hvac.Client

    def again(self) -> VaultBackend:
        """As another process would open it: nothing is logged in."""
        return opened(self.server, self.logins, self.layout)


@contextmanager
def installed(running: Reachable, folder: Path) -> Iterator[InstalledVault]:
    """Installed with `vault_bootstrap`'s own code, each login with a secret id; nothing is on the server afterwards."""
    layout = Layout(f"t{secrets.token_hex(4)}")
    server = VaultServer(running.address)
    admin = open_client(server, Plaintext(running.root_token))
    environments = [environment.value for environment in Environment]
    try:
        bootstrap(admin, layout, environments, lambda _: None)
        names = [layout.login(role, scope) for role, scope in list_logins(list_scopes(environments))]
        make_logins(admin, layout, names, folder, wrap_seconds=None)
        yield InstalledVault(opened(server, folder, layout), layout, server, folder, "approle", admin)
    finally:
        _uninstall(admin, layout)


def opened(server: VaultServer, folder: Path, layout: Layout) -> VaultBackend:
    """As a process opens it."""
    return VaultBackend(server, lambda name: AppRoleLogin(folder, name), layout)


@contextmanager
def serving_from(made: InstalledVault) -> Iterator[None]:
    """This process's settings name that Vault, which has got the peppers of this database from the local keystore."""
    have_peppers()
    local = secret_backend()
    for pepper_set in PepperSet:
        for each in local.versions(Mount.PEPPERS, pepper_set):
            stored = local.read(Mount.PEPPERS, pepper_set, each.version)
            made.backend.put(Mount.PEPPERS, pepper_set, stored.secret, stored.labels, expected_version=each.version - 1)
    with override_settings(
        IS_VAULT=True,
        VAULT_ADDRESS=made.server.address,
        VAULT_CA_FILE=made.server.ca_file,
        VAULT_PREFIX=made.layout.prefix,
        VAULT_AUTH=made.auth,
        VAULT_LOGINS=made.logins,
    ):
        _forget()
        try:
            yield
        finally:
            _forget()


def _forget() -> None:
    forget_keystore()
    vault_backend.cache_clear()


def _uninstall(admin: Any, layout: Layout) -> None:
    for mount in admin.sys.list_mounted_secrets_engines()["data"]:
        if mount.startswith(f"{layout.prefix}-"):
            admin.sys.disable_secrets_engine(mount.rstrip("/"))
    for policy in admin.sys.list_policies()["data"]["policies"]:
        if policy.startswith(f"{layout.prefix}-"):
            admin.sys.delete_policy(policy)
    for role in _approles(admin):
        if role.startswith(f"{layout.prefix}-"):
            admin.auth.approle.delete_role(role)


def _approles(admin: Any) -> list[str]:
    if "approle/" not in admin.sys.list_auth_methods()["data"]:
        return []
    try:
        return list(admin.auth.approle.list_roles()["data"]["keys"])
    except BackendMissingError:
        return []
