"""The backends that there are, and processes of their own that use one.

`python -m tests.backends.stores BACKEND FOLDER ACT …` is such a process: it opens the backend, says so, and
then does what it was started for, one line of output for each thing done.
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
    """The one that `leave_vault` left word of in the folder, with the logins that lie there."""
    about = json.loads((folder / CONNECTION).read_text())
    server, logins = VaultServer(about["address"]), folder / "logins"
    return VaultBackend(server, lambda name: AppRoleLogin(logins, name), Layout(about["prefix"]))


def leave_vault(folder: Path, address: str, prefix: str) -> Path:
    """Where its logins go."""
    (folder / CONNECTION).write_text(json.dumps({"address": address, "prefix": prefix}))
    logins = folder / "logins"
    logins.mkdir(mode=0o700)
    return logins


BACKENDS: dict[str, Callable[[Path], SecretBackend]] = {
    "local": LocalKeystore,
    "fake": open_vault,
    "openbao": open_vault,
}
"""How each is opened on a folder of its own. A new backend is one line here, and passes the contract."""

ROOT = Path(__file__).resolve().parents[2]


def started(backend: str, folder: Path, *act: str) -> subprocess.Popen[str]:
    """A process at work on the backend; it reads its cues from its standard input."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.backends.stores", backend, str(folder), *act],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def said(process: subprocess.Popen[str]) -> str:
    """The next line of a process."""
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def cue(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def race(backend: SecretBackend, who: str) -> None:
    """At each cue, puts the next version of the same path, or finds that somebody else did."""
    for version, _ in enumerate(sys.stdin):
        try:
            backend.put(Mount.SANDBOX, "raced", Plaintext(f"by {who}"), {"who": who}, expected_version=version)
        except BackendConflictError:
            print("conflict", flush=True)  # noqa: T201  the process's answer
        else:
            print("won", flush=True)  # noqa: T201  the process's answer


def pour(backend: SecretBackend, path: str) -> None:
    """Puts version upon version, naming each once it is stored, until somebody stops it."""
    version = max((each.version for each in backend.versions(Mount.SANDBOX, path)), default=0)
    while True:
        secret = Plaintext(f"secret {version + 1} " + "x" * 3000)
        version = backend.put(Mount.SANDBOX, path, secret, {"number": str(version + 1)}, expected_version=version)
        print(version, flush=True)  # noqa: T201  the process's answer


if __name__ == "__main__":
    print("ready", flush=True)  # noqa: T201  the process's answer
    name, folder, act, *rest = sys.argv[1:]
    if act == "first":
        sys.stdin.readline()
    opened = BACKENDS[name](Path(folder))
    print("opened", flush=True)  # noqa: T201  the process's answer
    {"race": race, "pour": pour, "first": race}[act](opened, *rest)
