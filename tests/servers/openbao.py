"""A temporary OpenBao or Vault: one in dev mode without storage, and one on disk that can be sealed and killed.

Both use plain HTTP on loopback. `KEYVAULT_TEST_VAULT_BIN` names the binary; the default is `bao`, else `vault`, on
PATH.
"""

import os
import secrets
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from .throwaway import (
    READY_WITHIN_SECONDS,
    FailedServerError,
    MissingServerError,
    Place,
    Plan,
    free_port,
    new_directory,
    running,
    unprivileged_owner,
)

BINARY = "KEYVAULT_TEST_VAULT_BIN"
ADDRESS = "KEYVAULT_TEST_VAULT_ADDR"
TOKEN = "KEYVAULT_TEST_VAULT_TOKEN"

# Without this option, recent OpenBao accepts audit devices in its configuration only. Vault has only the API.
DEV_SETTINGS = "unsafe_allow_api_audit_creation = true\n"

# A file, because a process's arguments can be read by every local user. Each server reads the variable of its own name.
DEV_START = """\
token="$(cat "$2")"
export BAO_DEV_ROOT_TOKEN_ID="$token" VAULT_DEV_ROOT_TOKEN_ID="$token"
exec "$1" server -dev -dev-no-store-token -dev-listen-address="$3" -config="$4"
"""

DISK_SETTINGS = """\
storage "file" {{ path = "{directory}/data" }}
listener "tcp" {{
  address = "127.0.0.1:{port}"
  tls_disable = true
}}
api_addr = "http://127.0.0.1:{port}"
disable_mlock = true
ui = false
unsafe_allow_api_audit_creation = true
"""


@dataclass(frozen=True)
class RunningVault:
    """A ready server, with its root token."""

    address: str
    root_token: str


class VaultOnDisk:
    """A server with one key share and an audit device that writes `audit_log`. Its data survives `kill` and `start`."""

    def __init__(self, place: Place, binary: Path) -> None:
        # Above `tests.servers`, and only this server needs it.
        from tests.faults.servers import Restartable

        self.address = f"http://127.0.0.1:{place.port}"
        self.audit_log = place.directory / "audit.log"
        settings = place.write("server.hcl", DISK_SETTINGS.format(directory=place.directory, port=place.port))
        self._process = Restartable(
            Plan(
                url=self.address,
                serve=[str(binary), "server", f"-config={settings}"],
                is_ready=lambda: _status(f"{self.address}/v1/sys/seal-status") == 200,
                stop_signal=signal.SIGTERM,
            ),
            place,
        )
        self.root_token = ""
        self._key = ""

    def set_up(self) -> None:
        """Initialize and unseal the server, and enable its audit log."""
        self._process.wait_until_ready()
        made = self._put("sys/init", {"secret_shares": 1, "secret_threshold": 1})
        self.root_token, self._key = made["root_token"], made["keys"][0]
        self.unseal()
        self._put("sys/audit/file", {"type": "file", "options": {"file_path": str(self.audit_log)}})

    def seal(self) -> None:
        self._put("sys/seal", {})

    def unseal(self) -> None:
        """Return when the server answers again."""
        self._put("sys/unseal", {"key": self._key})
        deadline = time.monotonic() + READY_WITHIN_SECONDS
        while _status(f"{self.address}/v1/sys/health") != 200:
            if time.monotonic() > deadline:
                raise FailedServerError("the unsealed server does not become active")
            time.sleep(0.03)

    def kill(self) -> None:
        """Kill the server like a crash (SIGKILL), and return when the process is gone."""
        self._process.stop(signal.SIGKILL)

    def start(self) -> None:
        """Start after `kill` on the same data and port. The server then answers, but is sealed."""
        self._process.start()

    def end(self) -> None:
        """Stop the server and remove its directory."""
        self._process.end()

    def _put(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"X-Vault-Token": self.root_token} if self.root_token else {}
        answer = requests.put(f"{self.address}/v1/{path}", json=body, headers=headers, timeout=30)
        answer.raise_for_status()
        return answer.json() if answer.content else None


def find_vault() -> Path | None:
    """Return the `bao` or `vault` binary; None without one."""
    found = os.environ.get(BINARY) or shutil.which("bao") or shutil.which("vault")
    return Path(found) if found else None


@contextmanager
def openbao_server() -> Iterator[RunningVault]:
    """Yield the server that the environment names, or else a new one in dev mode: unsealed, in memory."""
    if address := os.environ.get(ADDRESS):
        yield RunningVault(address, os.environ.get(TOKEN, ""))
        return
    binary, token = _binary(), secrets.token_urlsafe(16)
    with running("kv-openbao-", lambda place: _dev_plan(binary, place, token)) as url:
        yield RunningVault(url, token)


@contextmanager
def openbao_on_disk() -> Iterator[VaultOnDisk]:
    """Run a server with file storage, initialized and unsealed."""
    binary, owner = _binary(), unprivileged_owner()
    with ExitStack() as stack:
        place = Place(new_directory("kv-openbao-", owner), free_port(), owner)
        # Until the server's own guard takes over.
        stack.callback(shutil.rmtree, place.directory, ignore_errors=True)
        server = VaultOnDisk(place, binary)
        stack.callback(server.end)
        server.set_up()
        yield server


def _binary() -> Path:
    binary = find_vault()
    if binary is None:
        raise MissingServerError(f"no OpenBao or Vault on this machine (looked for bao and vault on PATH; {BINARY})")
    return binary


def _dev_plan(binary: Path, place: Place, token: str) -> Plan:
    settings, start = place.write("dev.hcl", DEV_SETTINGS), place.write("start.sh", DEV_START)
    address = f"127.0.0.1:{place.port}"
    return Plan(
        url=f"http://{address}",
        serve=["/bin/sh", str(start), str(binary), str(place.write("token", token)), address, str(settings)],
        is_ready=lambda: _status(f"http://{address}/v1/sys/health") == 200,
        stop_signal=signal.SIGTERM,
    )


def _status(url: str) -> int | None:
    try:
        return requests.get(url, timeout=2).status_code
    except requests.exceptions.RequestException:
        return None
