"""An OpenBao or Vault of the demo's own, in memory, with the roles and policies of deploy/vault and an audit log.

Whatever VAULT_ADDR says is left alone: a story that is told twice must not write to anybody's secrets manager.
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
"""In the demo's folder, so that it is searched for secrets like everything else there."""

LOGINS = "vault"

READY_SECONDS = 20.0
END_SECONDS = 10.0

# OpenBao takes audit devices from its configuration unless this is said; Vault does not know it, and warns.
_SETTINGS = "unsafe_allow_api_audit_creation = true\n"


@contextmanager
def own_vault(folder: Path) -> Iterator[dict[str, str]]:
    """What the service's environment needs in order to use it. Raises ServiceError without one on PATH."""
    binary = shutil.which("bao") or shutil.which("vault")
    if binary is None:
        raise ServiceError(
            "KEYVAULT_BACKEND=vault: the demo starts an OpenBao or Vault, and found no bao or vault on PATH."
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
    # Not among its arguments, which every user of the machine can read. Each server knows the variable of its name.
    told = {"BAO_DEV_ROOT_TOKEN_ID": token.reveal(), "VAULT_DEV_ROOT_TOKEN_ID": token.reveal()}
    with (folder / "vault.log").open("wb") as log:
        return start_child_process(
            (
                *(binary, "server", "-dev", "-dev-no-store-token"),
                *(f"-dev-listen-address={address}", f"-config={settings}"),
            ),
            environ=_without_settings(os.environ) | told,
            folder=CHECKOUT,
            output=log.fileno(),
        )


def _without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in environ.items() if not name.startswith(("KEYVAULT_", "VAULT_", "BAO_"))}


def _wait_until_ready(server: VaultServer, process: "subprocess.Popen[bytes]", folder: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while not read_health(server).ready:
        if process.poll() is not None or time.monotonic() > deadline:
            # Not its log as it is: a server in dev mode prints its key and its root token there.
            raise ServiceError(f"The secrets manager did not start; {folder / 'vault.log'} was its log.")
        time.sleep(0.05)
