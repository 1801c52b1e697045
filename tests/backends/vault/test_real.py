"""The real server in trouble: sealed, killed, its tokens revoked, a role gone, a policy narrowed, a quota used up."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from keyvault.backends.base import (
    BackendConflictError,
    BackendDeniedError,
    BackendError,
    BackendUnavailableError,
    Mount,
)
from keyvault.backends.vault.layout import SecretsEngine, VaultRole
from keyvault.domain.plaintext import Plaintext
from tests.servers.openbao import VaultOnDisk

from .between import between
from .conftest import IMPATIENT
from .fake import Fault, lost_reply, slow
from .installation import InstalledVault, installed

BOX = Mount.SANDBOX
PATH = "1/crd_a"
SECRET = "hunter2-the-secret"


@pytest.fixture
def on_disk(vault_on_disk: VaultOnDisk, tmp_path: Path) -> Iterator[InstalledVault]:
    with installed(vault_on_disk, tmp_path) as made:
        yield made


def put(made: InstalledVault, after: int) -> int:
    return made.backend.put(BOX, PATH, Plaintext(SECRET), {"key_id": f"k{after}"}, expected_version=after)


def failure(made: InstalledVault, after: int = 1) -> BackendError:
    with pytest.raises(BackendError) as raised:
        put(made, after)
    return raised.value


def test_server_sealed_killed_and_started_again_keeps_what_it_had(
    on_disk: InstalledVault, vault_on_disk: VaultOnDisk
) -> None:
    """Sealed and gone are outages, told apart in the log; what was acknowledged before is there afterwards."""
    assert put(on_disk, 0) == 1
    token = on_disk.backend.client(VaultRole.ISSUER, "sandbox")._held
    vault_on_disk.seal()
    error = failure(on_disk)
    assert isinstance(error, BackendUnavailableError)
    assert error.status == 503
    assert not on_disk.backend.health().ready
    assert "sealed" in on_disk.backend.health().detail
    vault_on_disk.unseal()
    assert put(on_disk, 1) == 2

    vault_on_disk.kill()
    error = failure(on_disk, 2)
    assert isinstance(error, BackendUnavailableError)
    assert error.status is None
    assert not on_disk.backend.health().ready
    vault_on_disk.start()
    assert failure(on_disk, 2).status == 503
    vault_on_disk.unseal()
    assert on_disk.backend.health().ready
    assert put(on_disk, 2) == 3
    # Tokens outlive the server's crash, as leases do.
    assert on_disk.backend.client(VaultRole.ISSUER, "sandbox")._held is token
    assert [each.version for each in on_disk.backend.versions(BOX, PATH)] == [1, 2, 3]


def test_server_s_audit_log_and_storage_hold_no_secret(on_disk: InstalledVault, vault_on_disk: VaultOnDisk) -> None:
    """Whoever reads its disk finds that we were there, and neither what was stored nor with what we came."""
    put(on_disk, 0)
    on_disk.backend.read(BOX, PATH)
    held = [client._held for client in on_disk.backend._clients.values()]
    planted = [SECRET, *[each.token.text.reveal() for each in held if each is not None]]
    planted += [path.read_text() for path in on_disk.logins.glob("*.secret_id")]
    written = vault_on_disk.audit_log.read_text()
    assert f"{on_disk.layout.prefix}-keys-sandbox/data/{PATH}" in written
    files = [path for path in vault_on_disk.audit_log.parent.rglob("*") if path.is_file()]
    assert len(files) > 20
    for path in files:
        found = path.read_bytes()
        assert [text for text in planted if text.encode() in found] == [], path


def test_server_whose_tokens_were_revoked_gets_one_new_login(installed_vault: InstalledVault) -> None:
    put(installed_vault, 0)
    held = installed_vault.backend.client(VaultRole.ISSUER, "sandbox")._held
    assert held is not None
    installed_vault.admin.auth.token.revoke(held.token.text.reveal())
    assert put(installed_vault, 1) == 2
    assert installed_vault.backend.client(VaultRole.ISSUER, "sandbox")._held is not held


def test_server_whose_role_was_deleted_denies(installed_vault: InstalledVault) -> None:
    name = installed_vault.layout.login(VaultRole.ISSUER, "sandbox")
    put(installed_vault, 0)
    held = installed_vault.backend.client(VaultRole.ISSUER, "sandbox")._held
    assert held is not None
    installed_vault.admin.auth.approle.delete_role(name)
    installed_vault.admin.auth.token.revoke(held.token.text.reveal())
    error = failure(installed_vault)
    assert isinstance(error, BackendDeniedError)
    assert error.status == 400


def test_server_whose_policy_was_narrowed_denies_until_it_is_widened(installed_vault: InstalledVault) -> None:
    name = installed_vault.layout.login(VaultRole.ISSUER, "sandbox")
    put(installed_vault, 0)
    policy = installed_vault.admin.read(f"sys/policies/acl/{name}")
    assert isinstance(policy, dict)
    installed_vault.admin.sys.create_or_update_policy(
        name, 'path "auth/token/renew-self" { capabilities = ["update"] }'
    )
    error = failure(installed_vault)
    assert isinstance(error, BackendDeniedError)
    assert error.status == 403
    installed_vault.admin.sys.create_or_update_policy(name, policy["data"]["policy"])
    assert put(installed_vault, 1) == 2


def test_server_whose_quota_is_used_up_is_unavailable_for_a_while(installed_vault: InstalledVault) -> None:
    """429 is an outage that says when it ends; nothing was written."""
    put(installed_vault, 0)
    mount = installed_vault.layout.mount(SecretsEngine.KEYS, "sandbox")
    quota = f"sys/quotas/rate-limit/{installed_vault.layout.prefix}"
    installed_vault.admin.write_data(quota, data={"path": f"{mount}/", "rate": 1, "interval": "60s"})
    try:
        installed_vault.backend.versions(BOX, PATH)
        error = failure(installed_vault)
        assert isinstance(error, BackendUnavailableError)
        assert error.status == 429
        assert 1 <= error.retry_after_seconds <= 60
    finally:
        installed_vault.admin.delete(quota)
    assert put(installed_vault, 1) == 2


def test_server_without_our_mounts_denies_and_is_not_taken_for_an_empty_one(installed_vault: InstalledVault) -> None:
    """A mount that somebody removed is no reason to believe that there never was a key."""
    put(installed_vault, 0)
    installed_vault.admin.delete(f"sys/mounts/{installed_vault.layout.mount(SecretsEngine.KEYS, 'sandbox')}")
    for act in (
        lambda: installed_vault.backend.versions(BOX, PATH),
        lambda: installed_vault.backend.read(BOX, PATH),
        lambda: list(installed_vault.backend.list_paths(BOX)),
        lambda: installed_vault.backend.forget(BOX, PATH),
    ):
        with pytest.raises(BackendDeniedError):
            act()


@pytest.mark.parametrize("fault", [lost_reply(), Fault(is_reset=True, has_effect=True), Fault(502, has_effect=True)])
def test_server_s_lost_reply_to_a_write_is_settled_by_reading_back(
    installed_vault: InstalledVault, fault: Fault
) -> None:
    """It was written, once: the second try conflicts, and the labels say who won."""
    with between(installed_vault) as (proxy, made):
        put(made, 0)
        proxy.fail(fault, "/data/", "POST")
        assert isinstance(failure(made), BackendUnavailableError)
        assert made.backend.read(BOX, PATH).labels == {"key_id": "k1"}
        assert isinstance(failure(made), BackendConflictError)
        assert len(proxy.asked("/data/", "POST")) == 3


def test_server_behind_a_slow_network_is_unavailable_and_the_late_write_is_seen(
    installed_vault: InstalledVault,
) -> None:
    put(installed_vault, 0)
    until = threading.Event()
    with between(installed_vault, IMPATIENT) as (proxy, made):
        proxy.fail(slow(until), "/data/", "POST")
        error = failure(made)
        assert isinstance(error, BackendUnavailableError)
        assert "Timeout" in error.internal
        assert installed_vault.backend.read(BOX, PATH).version == 1
        until.set()
        while installed_vault.backend.read(BOX, PATH).version == 1:
            """It is on its way: nobody recalls what was sent."""
    assert installed_vault.backend.read(BOX, PATH).labels == {"key_id": "k1"}
    assert isinstance(failure(installed_vault), BackendConflictError)
