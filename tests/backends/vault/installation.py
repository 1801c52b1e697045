"""This project's mounts, policies and roles on a running server, under a prefix unique to the test."""

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
from keyvault.backends.vault.capabilities import ROLES_OF_HOST
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
    """A server of `tests.servers.openbao`, of either kind."""

    @property
    def address(self) -> str: ...

    @property
    def root_token(self) -> str: ...


@dataclass(frozen=True)
class InstalledVault:
    """`backend` uses all logins of the folder `logins`; `admin` has every permission on the server."""

    backend: VaultBackend
    layout: Layout
    server: VaultServer
    logins: Path
    auth: str
    admin: hvac.Client


@contextmanager
def installed(running: Reachable, folder: Path) -> Iterator[InstalledVault]:
    """Install with `bootstrap_vault`'s own code and a secret id per login; uninstall everything afterwards."""
    layout = Layout(f"t{secrets.token_hex(4)}")
    server = VaultServer(running.address)
    admin = open_client(server, Plaintext(running.root_token))
    environments = [environment.value for environment in Environment]
    try:
        bootstrap(admin, layout, environments, lambda _: None)
        logins = list_logins(list_scopes(environments))
        names = [layout.login(role, scope) for role, scope in logins if role in ROLES_OF_HOST["all"]]
        make_logins(admin, layout, names, folder, wrap_seconds=None)
        yield InstalledVault(opened(server, folder, layout), layout, server, folder, "approle", admin)
    finally:
        _uninstall(admin, layout)


def opened(server: VaultServer, folder: Path, layout: Layout) -> VaultBackend:
    """Open the backend as a process does."""
    return VaultBackend(server, lambda name: AppRoleLogin(folder, name), layout)


@contextmanager
def serving_from(made: InstalledVault) -> Iterator[None]:
    """Point this process's settings at that Vault and copy this database's peppers there from the local keystore."""
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
        VAULT_CREDENTIALS_DIR=made.logins,
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
