"""The secret backend that this process is configured with."""

from functools import cache

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from keyvault.backends.base import Mount, SecretBackend
from keyvault.backends.local import LocalKeystore
from keyvault.backends.vault.client import VaultServer
from keyvault.backends.vault.kv import VaultBackend
from keyvault.backends.vault.layout import Layout
from keyvault.backends.vault.logins import AppRoleLogin, KubernetesLogin, Login, TokenFileLogin
from keyvault.domain.environments import Environment

MOUNT = {Environment.SANDBOX: Mount.SANDBOX, Environment.PRODUCTION: Mount.PRODUCTION}


@cache
def secret_backend() -> SecretBackend:
    """Return the backend, opened at the first call. Raises ImproperlyConfigured when it cannot be opened safely."""
    if settings.IS_VAULT:
        return vault_backend()
    return LocalKeystore(settings.DATA_DIR, settings.MASTER_KEY)


@cache
def vault_backend() -> VaultBackend:
    """Return the configured Vault, regardless of KEYVAULT_BACKEND. Makes no call yet."""
    return VaultBackend(vault_server(), choose_login, vault_layout())


def vault_server() -> VaultServer:
    """Return the configured Vault server. Raises ImproperlyConfigured without an address."""
    if not settings.VAULT_ADDRESS:
        raise ImproperlyConfigured("VAULT_ADDR: KEYVAULT_BACKEND=vault requires the address of Vault")
    return VaultServer(settings.VAULT_ADDRESS.rstrip("/"), settings.VAULT_CA_FILE)


def vault_layout() -> Layout:
    return Layout(settings.VAULT_PREFIX)


def choose_login(name: str) -> Login:
    """Return the login of this host for a policy name of the layout."""
    if settings.VAULT_AUTH == "kubernetes":
        return KubernetesLogin(name, settings.VAULT_JWT_FILE)
    if settings.VAULT_AUTH == "token_file":
        return TokenFileLogin(settings.VAULT_CREDENTIALS_DIR, name)
    return AppRoleLogin(settings.VAULT_CREDENTIALS_DIR, name)


def find_backend_location(environment: Environment, path: str) -> dict[str, str]:
    """Return the mount and path at which a merchant's own backend reads a path of the environment's keys.

    Empty with the local keystore, which only Keyvault's processes can read.
    """
    if not settings.IS_VAULT:
        return {}
    _, mount, place = vault_layout().place(MOUNT[environment], path)
    return {"backend_mount": mount, "backend_path": place}
