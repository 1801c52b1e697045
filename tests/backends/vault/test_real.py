"""The real server in trouble: sealed, killed, tokens revoked, role deleted, policy narrowed, quota used up."""

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

from .conftest import SHORT_TIMEOUTS
from .fake import Fault, lost_reply, slow
from .faulty_proxy import behind_faulty_proxy
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


def test_server_sealed_killed_and_restarted_keeps_its_data(on_disk: InstalledVault, vault_on_disk: VaultOnDisk) -> None:
    """Sealed and unreachable are outages, distinguished in the log; acknowledged writes survive."""
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
    # Tokens survive the server's crash, as leases do.
    assert on_disk.backend.client(VaultRole.ISSUER, "sandbox")._held is token
    assert [each.version for each in on_disk.backend.versions(BOX, PATH)] == [1, 2, 3]


def test_server_audit_log_and_storage_contain_no_secret(on_disk: InstalledVault, vault_on_disk: VaultOnDisk) -> None:
    """A reader of the server's disk learns that the service was there, but neither secrets nor credentials."""
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


def test_server_with_revoked_tokens_gets_one_new_login(installed_vault: InstalledVault) -> None:
    put(installed_vault, 0)
    held = installed_vault.backend.client(VaultRole.ISSUER, "sandbox")._held
    assert held is not None
    installed_vault.admin.auth.token.revoke(held.token.text.reveal())
    assert put(installed_vault, 1) == 2
    assert installed_vault.backend.client(VaultRole.ISSUER, "sandbox")._held is not held


def test_server_with_a_deleted_role_denies(installed_vault: InstalledVault) -> None:
    name = installed_vault.layout.login(VaultRole.ISSUER, "sandbox")
    put(installed_vault, 0)
    held = installed_vault.backend.client(VaultRole.ISSUER, "sandbox")._held
    assert held is not None
    installed_vault.admin.auth.approle.delete_role(name)
    installed_vault.admin.auth.token.revoke(held.token.text.reveal())
    error = failure(installed_vault)
    assert isinstance(error, BackendDeniedError)
    assert error.status == 400


def test_server_with_a_narrowed_policy_denies_until_it_is_restored(installed_vault: InstalledVault) -> None:
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


def test_server_with_an_exhausted_quota_is_unavailable_for_a_while(installed_vault: InstalledVault) -> None:
    """429 is an outage with a known end; nothing was written."""
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


def test_server_without_the_mounts_denies_instead_of_appearing_empty(installed_vault: InstalledVault) -> None:
    """A removed mount is no evidence that a key never existed."""
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
def test_server_lost_reply_to_a_write_is_resolved_by_reading_back(
    installed_vault: InstalledVault, fault: Fault
) -> None:
    """The write happened once: the retry conflicts, and the labels identify the writer."""
    with behind_faulty_proxy(installed_vault) as (proxy, made):
        put(made, 0)
        proxy.fail(fault, "/data/", "POST")
        assert isinstance(failure(made), BackendUnavailableError)
        assert made.backend.read(BOX, PATH).labels == {"key_id": "k1"}
        assert isinstance(failure(made), BackendConflictError)
        assert len(proxy.calls_to("/data/", "POST")) == 3


def test_server_behind_a_slow_network_is_unavailable_and_its_late_write_is_found(
    installed_vault: InstalledVault,
) -> None:
    put(installed_vault, 0)
    until = threading.Event()
    with behind_faulty_proxy(installed_vault, SHORT_TIMEOUTS) as (proxy, made):
        proxy.fail(slow(until), "/data/", "POST")
        error = failure(made)
        assert isinstance(error, BackendUnavailableError)
        assert "Timeout" in error.internal
        assert installed_vault.backend.read(BOX, PATH).version == 1
        until.set()
        while installed_vault.backend.read(BOX, PATH).version == 1:
            pass  # The request is in transit and cannot be recalled.
    assert installed_vault.backend.read(BOX, PATH).labels == {"key_id": "k1"}
    assert isinstance(failure(installed_vault), BackendConflictError)
