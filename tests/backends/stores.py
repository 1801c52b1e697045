"""The backends under test, and subprocesses that use one.

`python -m tests.backends.stores BACKEND FOLDER ACT …` opens the backend, reports it, and performs the act, with one
line of output per result.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from keyvault.backends.base import BackendConflictError, Mount, SecretBackend
from keyvault.backends.local import LocalKeystore
from keyvault.backends.vault.client import VaultServer
from keyvault.backends.vault.kv import VaultBackend
from keyvault.backends.vault.layout import Layout
from keyvault.backends.vault.logins import AppRoleLogin
from keyvault.domain.plaintext import Plaintext

CONNECTION = "vault.json"


def open_vault(folder: Path) -> VaultBackend:
    """Open the backend described by `write_connection` in the folder, with the logins there."""
    about = json.loads((folder / CONNECTION).read_text())
    server, logins = VaultServer(about["address"]), folder / "logins"
    return VaultBackend(server, lambda name: AppRoleLogin(logins, name), Layout(about["prefix"]))


def write_connection(folder: Path, address: str, prefix: str) -> Path:
    """Write the connection file and return the folder for its logins."""
    (folder / CONNECTION).write_text(json.dumps({"address": address, "prefix": prefix}))
    logins = folder / "logins"
    logins.mkdir(mode=0o700)
    return logins


BACKENDS: dict[str, Callable[[Path], SecretBackend]] = {
    "local": LocalKeystore,
    "fake": open_vault,
    "openbao": open_vault,
}
"""How each backend is opened in a folder. A new backend adds one line here and must pass the contract."""

ROOT = Path(__file__).resolve().parents[2]


def start_process(backend: str, folder: Path, *act: str) -> subprocess.Popen[str]:
    """Start a process that performs the act; it reads its cues from standard input."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.backends.stores", backend, str(folder), *act],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def read_line(process: subprocess.Popen[str]) -> str:
    """Return the next line of the process."""
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def send_cue(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def race(backend: SecretBackend, who: str) -> None:
    """At each cue, put the next version at the same path, or report a conflict."""
    for version, _ in enumerate(sys.stdin):
        try:
            backend.put(Mount.SANDBOX, "raced", Plaintext(f"by {who}"), {"who": who}, expected_version=version)
        except BackendConflictError:
            print("conflict", flush=True)  # noqa: T201  the process's output
        else:
            print("won", flush=True)  # noqa: T201  the process's output


def write_until_killed(backend: SecretBackend, path: str) -> None:
    """Put version after version until killed, and print each number once it is stored."""
    version = max((each.version for each in backend.versions(Mount.SANDBOX, path)), default=0)
    while True:
        secret = Plaintext(f"secret {version + 1} " + "x" * 3000)
        version = backend.put(Mount.SANDBOX, path, secret, {"number": str(version + 1)}, expected_version=version)
        print(version, flush=True)  # noqa: T201  the process's output


if __name__ == "__main__":
    print("ready", flush=True)  # noqa: T201  the process's output
    name, folder, act, *rest = sys.argv[1:]
    if act == "first":
        sys.stdin.readline()
    opened = BACKENDS[name](Path(folder))
    print("opened", flush=True)  # noqa: T201  the process's output
    {"race": race, "write_until_killed": write_until_killed, "first": race}[act](opened, *rest)
