"""A secret id delivered wrapped: unwrapped once, by this service, and by no one before."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from keyvault.backends.base import BackendDeniedError, BackendError, BackendUnavailableError, Mount
from keyvault.backends.vault.bootstrap import make_logins
from keyvault.backends.vault.client import VaultClient
from keyvault.backends.vault.kv import VaultBackend
from keyvault.backends.vault.logins import InterceptedLoginError
from tests.backends.stores import CONNECTION, write_connection
from tests.environment import ROOT

from .conftest import ROLE
from .fake import FakeVault, Fault, lost_reply, refused
from .installation import InstalledVault, opened
from .test_client import count, lookup_self

CREATION_PATH = f"auth/approle/role/{ROLE}/secret-id"
READER = """
import sys
from pathlib import Path
from keyvault.backends.base import Mount
from tests.backends.stores import open_vault
store = open_vault(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
print(store.versions(Mount.SANDBOX, "1/crd_a"), flush=True)
"""


@pytest.fixture
def wrapped(fake: FakeVault, logins: Path) -> Path:
    """Return the file with the wrapping token of the reader's secret id, not yet unwrapped on this host."""
    (logins / f"{ROLE}.secret_id").unlink()
    _, secret_id = fake.make_role(ROLE)
    file = logins / f"{ROLE}.wrapped_secret_id"
    file.write_text(fake.wrap({"data": {"secret_id": secret_id}}, CREATION_PATH))
    return file


def test_wrapped_secret_id_is_unwrapped_once_and_stored(fake: FakeVault, client: VaultClient, wrapped: Path) -> None:
    lookup_self(client)
    fake.revoke_all()
    lookup_self(client)
    assert (count(fake, "wrapping/lookup"), count(fake, "unwrap")) == (1, 1)
    assert not wrapped.exists()
    assert stat.S_IMODE(wrapped.with_name(f"{ROLE}.secret_id").stat().st_mode) == 0o600


def test_wrapped_secret_id_left_by_a_killed_process_is_no_theft(
    fake: FakeVault, client: VaultClient, wrapped: Path
) -> None:
    """The process was killed, or lost power, right after it stored the secret id."""
    token = wrapped.read_text()
    lookup_self(client)
    kept = wrapped.with_name(f"{ROLE}.secret_id")
    wrapped.write_text(token)
    os.utime(wrapped, ns=(kept.stat().st_mtime_ns - 1,) * 2)
    fake.revoke_all()
    lookup_self(client)
    assert (count(fake, "unwrap"), wrapped.exists()) == (1, False)


def test_wrapped_secret_id_newer_than_the_stored_one_replaces_it(
    fake: FakeVault, client: VaultClient, logins: Path, wrapped: Path
) -> None:
    kept = logins / f"{ROLE}.secret_id"
    kept.write_text("that of last year")
    os.utime(kept, ns=(wrapped.stat().st_mtime_ns - 1,) * 2)
    lookup_self(client)
    assert count(fake, "unwrap") == 1
    assert kept.read_text() != "that of last year"


def _read_by_two(folder: Path) -> list[tuple[str, int]]:
    """Return the output and exit codes of two processes that start at the same moment."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", READER, str(folder)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    return [(process.communicate()[0], process.returncode) for process in processes]


def test_wrapped_secret_id_of_two_processes_is_unwrapped_by_one(fake: FakeVault, logins: Path, wrapped: Path) -> None:
    """Web and worker of one host start together: neither takes the other for an attacker."""
    assert _read_by_two(logins.parent) == [("[]\n", 0)] * 2
    assert (count(fake, "unwrap"), count(fake)) == (1, 2)


def taken(client: VaultClient) -> InterceptedLoginError:
    with pytest.raises(BackendError) as raised:
        lookup_self(client)
    assert isinstance(raised.value, InterceptedLoginError)
    return raised.value


def test_wrapped_secret_id_unwrapped_by_another_party_is_reported(
    fake: FakeVault, client: VaultClient, wrapped: Path
) -> None:
    """The login may be compromised: this is never mistaken for an outage and never silently retried."""
    fake._tokens.pop(wrapped.read_text())
    error = taken(client)
    assert "unwrapped already" in error.internal
    assert wrapped.read_text() not in f"{error!r} {vars(error)}"
    assert wrapped.exists()


def test_wrapped_secret_id_expired_is_reported(fake: FakeVault, client: VaultClient, wrapped: Path) -> None:
    fake.advance(61)
    assert "expired" in taken(client).internal


@pytest.mark.parametrize("path", ["sys/wrapping/wrap", "auth/approle/role/kv-issuer-sandbox/secret-id", "", None])
def test_wrapped_secret_id_of_foreign_origin_is_reported_and_not_unwrapped(
    fake: FakeVault, client: VaultClient, wrapped: Path, path: str | None
) -> None:
    """A thief of the original token may have replaced it by another to stay unnoticed."""
    wrapped.write_text(fake.wrap({"data": {"secret_id": "planted"}}, path))  # type: ignore[arg-type]  # None is a case
    assert "created by" in taken(client).internal
    assert count(fake, "unwrap") == 0
    assert wrapped.exists()


def test_wrapped_secret_id_with_a_lost_unwrap_reply_is_reported(
    fake: FakeVault, client: VaultClient, wrapped: Path
) -> None:
    """No party has it, but that is indistinguishable from a theft."""
    fake.fail(lost_reply(), "unwrap")
    with pytest.raises(BackendUnavailableError):
        lookup_self(client)
    assert count(fake, "unwrap") == 1
    taken(client)


@pytest.mark.parametrize("path", ["wrapping/lookup", "login"])
@pytest.mark.parametrize("fault", [refused(503, "Vault is sealed"), Fault(), Fault(200, b"{}"), Fault(200, b"page")])
def test_wrapped_secret_id_survives_an_outage(
    fake: FakeVault, client: VaultClient, wrapped: Path, path: str, fault: Fault
) -> None:
    fake.fail(fault, path)
    with pytest.raises(BackendUnavailableError):
        lookup_self(client)
    lookup_self(client)
    assert count(fake, "unwrap") == 1


def test_wrapped_secret_id_that_cannot_be_stored_is_not_unwrapped(
    fake: FakeVault, client: VaultClient, wrapped: Path
) -> None:
    """A folder that is not writable would lose the secret id with the process."""
    (wrapped.parent / f"{ROLE}.lock").mkdir()
    with pytest.raises(BackendDeniedError) as raised:
        lookup_self(client)
    assert "cannot be written" in raised.value.internal
    assert fake.calls == []


# --- the real server --------------------------------------------------------------------------------------


def _reader(made: InstalledVault) -> str:
    return f"{made.layout.prefix}-reader-sandbox"


def test_real_wrapped_secret_id_of_two_processes_is_unwrapped_by_one(
    installed_vault: InstalledVault, tmp_path: Path
) -> None:
    logins = write_connection(tmp_path, installed_vault.server.address, installed_vault.layout.prefix)
    name = _reader(installed_vault)
    make_logins(installed_vault.admin, installed_vault.layout, [name], logins, wrap_seconds=60)
    assert _read_by_two(tmp_path) == [("[]\n", 0)] * 2
    assert sorted(path.suffix for path in logins.iterdir()) == [".lock", ".role_id", ".secret_id"]
    assert (tmp_path / CONNECTION).exists()


@pytest.mark.parametrize("how", ["opened", "revoked", "made elsewhere"])
def test_real_wrapped_secret_id_invalid_is_reported(installed_vault: InstalledVault, tmp_path: Path, how: str) -> None:
    admin, name = installed_vault.admin, _reader(installed_vault)
    make_logins(admin, installed_vault.layout, [name], tmp_path, wrap_seconds=60)
    file = tmp_path / f"{name}.wrapped_secret_id"
    if how == "opened":
        admin.adapter.post("/v1/sys/wrapping/unwrap", json={"token": file.read_text()})
    elif how == "revoked":
        admin.auth.token.revoke(file.read_text())
    else:
        made = admin.adapter.post("/v1/sys/wrapping/wrap", json={"secret_id": "planted"}, wrap_ttl="60s")
        file.write_text(made["wrap_info"]["token"])
    store: VaultBackend = opened(installed_vault.server, tmp_path, installed_vault.layout)
    with pytest.raises(InterceptedLoginError):
        store.versions(Mount.SANDBOX, "1/crd_a")
    assert file.exists()
