"""Tests of the Vault fixtures."""

from django.conf import settings

from keyvault.backends.base import Mount
from keyvault.domain.digests import PepperSet
from keyvault.domain.plaintext import Plaintext
from keyvault.services.peppers.ring import load_peppers
from keyvault.services.secrets.backend import secret_backend, vault_backend

from .installation import InstalledVault


def test_installed_vault_writes_and_reads(installed_vault: InstalledVault) -> None:
    backend = installed_vault.backend
    assert backend.put(Mount.SANDBOX, "1/crd_a", Plaintext("one"), {"key_id": "k"}, expected_version=0) == 1
    assert backend.read(Mount.SANDBOX, "1/crd_a").secret.reveal() == "one"


def test_vault_service_has_the_peppers_of_the_database(vault_service: InstalledVault) -> None:
    assert settings.IS_VAULT
    assert secret_backend() is vault_backend()
    assert [load_peppers(each).current_version for each in PepperSet] == [1, 1, 1]
    assert len(secret_backend().versions(Mount.PEPPERS, PepperSet.SERVICE)) == 1
