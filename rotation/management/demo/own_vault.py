"""A private in-memory OpenBao or Vault for the demo, with the roles and policies of deploy/vault and an audit log.

VAULT_ADDR is ignored: a demo must not write to an existing secrets manager.
"""

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from keyvault.backends.private_files import write_private_file
from keyvault.backends.vault.bootstrap import bootstrap, list_logins, list_scopes, make_logins
from keyvault.backends.vault.client import VaultServer, open_client
from keyvault.backends.vault.kv import read_health
from keyvault.backends.vault.layout import Layout
from keyvault.domain.environments import Environment
from keyvault.domain.plaintext import Plaintext
from keyvault.management.service import ADDRESS, CHECKOUT, ServiceError, find_free_port
from keyvault.management.supervisor import start_child_process

AUDIT_LOG = "vault-audit.log"
"""File name of the audit log in the demo's folder, where it is searched for secrets, too."""

LOGINS = "vault"

READY_SECONDS = 20.0
END_SECONDS = 10.0

# Without this OpenBao accepts audit devices only in its configuration. Vault does not know the setting and warns.
_SETTINGS = "unsafe_allow_api_audit_creation = true\n"


@contextmanager
def own_vault(folder: Path) -> Iterator[dict[str, str]]:
    """Start the server and yield the environment variables to use it. Raises ServiceError if PATH has no binary."""
    binary = shutil.which("bao") or shutil.which("vault")
    if binary is None:
        raise ServiceError(
            "KEYVAULT_BACKEND=vault: the demo needs OpenBao or Vault, and found no bao or vault on PATH. Install one."
        )
    address, token = f"{ADDRESS}:{find_free_port()}", Plaintext(secrets.token_urlsafe(24))
    server = VaultServer(f"http://{address}")
    process = _start(binary, address, token, folder)
    try:
        _wait_until_ready(server, process, folder)
        admin = open_client(server, token)
        options = {"file_path": str(folder / AUDIT_LOG)}
        admin.sys.enable_audit_device("file", options=options, path="file")  # type: ignore[no-untyped-call]  # hvac's
        layout, environments = Layout(), [environment.value for environment in Environment]
        bootstrap(admin, layout, environments, lambda change: None)
        names = [layout.login(role, scope) for role, scope in list_logins(list_scopes(environments))]
        make_logins(admin, layout, names, folder / LOGINS, wrap_seconds=300)
        yield {"KEYVAULT_BACKEND": "vault", "VAULT_ADDR": server.address, "KEYVAULT_VAULT_CREDENTIALS_DIR": LOGINS}
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _start(binary: str, address: str, token: Plaintext, folder: Path) -> "subprocess.Popen[bytes]":
    settings = folder / "vault.hcl"
    write_private_file(settings, _SETTINGS)
    # Not passed as an argument, which every user of the machine can read. Each server reads the variable of its name.
    root_token = {"BAO_DEV_ROOT_TOKEN_ID": token.reveal(), "VAULT_DEV_ROOT_TOKEN_ID": token.reveal()}
    with (folder / "vault.log").open("wb") as log:
        return start_child_process(
            (
                *(binary, "server", "-dev", "-dev-no-store-token"),
                *(f"-dev-listen-address={address}", f"-config={settings}"),
            ),
            environ=_without_settings(os.environ) | root_token,
            folder=CHECKOUT,
            output=log.fileno(),
        )


def _without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in environ.items() if not name.startswith(("KEYVAULT_", "VAULT_", "BAO_"))}


def _wait_until_ready(server: VaultServer, process: "subprocess.Popen[bytes]", folder: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while not read_health(server).ready:
        if process.poll() is not None or time.monotonic() > deadline:
            # The log's content is withheld: in dev mode it holds the unseal key and the root token.
            raise ServiceError(f"The secrets manager did not start; see its log, {folder / 'vault.log'}.")
        time.sleep(0.05)
