"""A Vault server with this installation on it, one per test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.openbao import VaultOnDisk

from .harness import VaultHarness, running_harness


@pytest.fixture
def harness(vault_on_disk: VaultOnDisk, tmp_path: Path, db: None) -> Iterator[VaultHarness]:
    folder = tmp_path / "vault-logins"
    folder.mkdir(mode=0o700)
    with running_harness(vault_on_disk, folder) as made:
        yield made
