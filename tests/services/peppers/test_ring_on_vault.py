"""Peppers in a real Vault: rotated, retired and destroyed there; loaded peppers survive a seal."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from keyvault.backends.base import BackendError, Mount, StoredVersion, VersionState
from keyvault.domain.digests import PepperSet
from keyvault.domain.errors import KeyvaultError
from keyvault.models import Key
from keyvault.services.peppers.ring import PepperRing, load_peppers, pepper_health
from keyvault.services.secrets.backend import secret_backend, vault_backend
from keyvault.services.startup.startup_checks import require_ready
from tests.backends.vault.installation import InstalledVault, installed, serving_from
from tests.factories import account, issue, make_merchant, own_keystore
from tests.servers.openbao import VaultOnDisk
from tests.services.keys.test_lifecycle import verdict
from tests.services.peppering import destroy, rehash, retire, rotate, skip_propagation

pytestmark = pytest.mark.django_db

SANDBOX = PepperSet.SANDBOX


@pytest.fixture(autouse=True)
def isolated_keystore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use a separate keystore for the first peppers."""
    skip_propagation(monkeypatch)
    folder = tmp_path / "keystore"
    folder.mkdir(mode=0o700)
    with own_keystore(folder):
        yield


def test_pepper_in_vault_is_rotated_retired_and_destroyed(
    isolated_keystore: None, vault_service: InstalledVault
) -> None:
    """Uses the logins of the bootstrap: the keeper writes and destroys, the lookup reads."""
    make_merchant("acme")
    key, text = issue(account())
    assert rotate().number == 2
    assert verdict(text) is None
    rehash()
    assert Key.objects.get(pk=key.pk).pepper_version == 2
    retire(SANDBOX, 1)
    destroy(SANDBOX, 1)
    stored = list(secret_backend().versions(Mount.PEPPERS, SANDBOX))
    assert stored == [StoredVersion(1, VersionState.DESTROYED), StoredVersion(2, VersionState.LIVE)]
    load_peppers.cache_clear()
    assert verdict(text) is None
    require_ready()


def test_peppers_loaded_from_vault_survive_its_seal(
    isolated_keystore: None, vault_on_disk: VaultOnDisk, tmp_path: Path
) -> None:
    """Verification continues while Vault is sealed; a new version is loaded after the unseal."""
    folder = tmp_path / "logins"
    folder.mkdir(mode=0o700)
    with installed(vault_on_disk, folder) as installation, serving_from(installation):
        make_merchant("acme")
        _, text = issue(account())
        late = PepperRing()
        late(SANDBOX)
        rotate()
        vault_on_disk.seal()
        for _ in range(20):
            assert verdict(text) is None
        late.refresh()
        assert sorted(late(SANDBOX).versions) == [1]
        assert set(pepper_health().values()) == {True}
        with pytest.raises(KeyvaultError):
            rotate()
        with pytest.raises(BackendError):
            PepperRing()(SANDBOX)
        vault_on_disk.unseal()
        secret_backend.cache_clear()
        vault_backend.cache_clear()
        late.refresh()
        assert sorted(late(SANDBOX).versions) == [1, 2]
        assert verdict(text) is None
