"""The secret backend that this process was configured with."""

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
    """Opened at the first use. Raises ImproperlyConfigured when it must not be started with what is there."""
    if settings.IS_VAULT:
        return vault_backend()
    return LocalKeystore(settings.DATA_DIR, settings.MASTER_KEY)


@cache
def vault_backend() -> VaultBackend:
    """The Vault of the settings, whatever KEYVAULT_BACKEND says. No call is made yet."""
    return VaultBackend(vault_server(), choose_login, vault_layout())


def vault_server() -> VaultServer:
    """Raises ImproperlyConfigured without an address."""
    if not settings.VAULT_ADDRESS:
        raise ImproperlyConfigured("VAULT_ADDR: wants the address of the Vault that KEYVAULT_BACKEND=vault asks for")
    return VaultServer(settings.VAULT_ADDRESS.rstrip("/"), settings.VAULT_CA_FILE)


def vault_layout() -> Layout:
    return Layout(settings.VAULT_PREFIX)


def choose_login(name: str) -> Login:
    """How this host logs in as a name of the layout."""
    if settings.VAULT_AUTH == "kubernetes":
        return KubernetesLogin(name, settings.VAULT_JWT_FILE)
    if settings.VAULT_AUTH == "token_file":
        return TokenFileLogin(settings.VAULT_LOGINS, name)
    return AppRoleLogin(settings.VAULT_LOGINS, name)


def find_place(environment: Environment, path: str) -> dict[str, str]:
    """The mount and the path where a merchant's backend reads what is kept at that path of the environment's keys;
    nothing with a keystore of our own, which is read by our processes alone."""
    if not settings.IS_VAULT:
        return {}
    _, mount, place = vault_layout().place(MOUNT[environment], path)
    return {"backend_mount": mount, "backend_path": place}
