"""The secret backend that this process is configured with."""

from functools import cache
from pathlib import Path

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from keyvault.backends.base import BackendInvalidError, Mount, SecretBackend
from keyvault.backends.local import LocalKeystore
from keyvault.backends.private_files import read_master_key_file
from keyvault.backends.vault import transit
from keyvault.backends.vault.client import VaultServer
from keyvault.backends.vault.kv import VaultBackend
from keyvault.backends.vault.layout import Layout
from keyvault.backends.vault.logins import AppRoleLogin, KubernetesLogin, Login, TokenFileLogin
from keyvault.domain.environments import Environment

MOUNT = {Environment.SANDBOX: Mount.SANDBOX, Environment.PRODUCTION: Mount.PRODUCTION}


@cache
def secret_backend() -> SecretBackend:
    """Return the backend, opened at the first call.

    Raises ImproperlyConfigured when it cannot be opened safely, and the errors of `unwrap_master_key`.
    """
    if settings.IS_VAULT:
        return vault_backend()
    return open_keystore(settings.DATA_DIR, settings.MASTER_KEY)


def read_master_key_text() -> str:
    """Return this host's master key, or the wrapped one. Raises ImproperlyConfigured if its file cannot be used."""
    return settings.MASTER_KEY or read_master_key_file(settings.DATA_DIR / "master.key")


def open_keystore(folder: Path, master_key_text: str) -> LocalKeystore:
    """Open a folder's keystore. Raises the errors of `secret_backend`.

    `master_key_text`: the key, or the wrapped one; empty: the text of the folder's `master.key`.
    """
    return LocalKeystore(folder, master_key_text, unwrap_master_key)


def unwrap_master_key(text: str) -> str:
    """Return the master key: decrypted by the Vault if `text` is wrapped, else `text` itself.

    Raises ImproperlyConfigured if the Vault cannot decrypt it, BackendUnavailableError and BackendDeniedError.
    """
    if not is_wrapped(text):
        return text
    try:
        return transit.unwrap_master_key(vault_backend(), text)
    except BackendInvalidError as error:
        raise ImproperlyConfigured(
            "the master key was wrapped with another Vault or prefix, or the Vault has lost the wrapping key; check "
            f"VAULT_ADDR and KEYVAULT_VAULT_PREFIX, then manage.py check_vault --host keystore ({error.internal})"
        ) from None


def make_wrapped_master_key() -> str:
    """Return a new master key that the Vault has wrapped. Raises ImproperlyConfigured, and the errors of a backend."""
    return transit.make_wrapped_master_key(vault_backend())


def is_wrapped(text: str) -> bool:
    return text.startswith(transit.WRAPPED)


@cache
def vault_backend() -> VaultBackend:
    """Return the configured Vault, regardless of KEYVAULT_BACKEND. Makes no call yet."""
    return VaultBackend(vault_server(), choose_login, vault_layout())


def vault_server() -> VaultServer:
    """Return the configured Vault server. Raises ImproperlyConfigured without an address."""
    if not settings.VAULT_ADDRESS:
        raise ImproperlyConfigured(
            "VAULT_ADDR: KEYVAULT_BACKEND=vault and a wrapped master key require the address of the Vault"
        )
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
