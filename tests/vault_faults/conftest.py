"""A server of the test's own with everything of ours on it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.openbao import VaultOnDisk

from .stand import Stand, standing


@pytest.fixture
def stand(vault_on_disk: VaultOnDisk, tmp_path: Path, db: None) -> Iterator[Stand]:
    folder = tmp_path / "vault-logins"
    folder.mkdir(mode=0o700)
    with standing(vault_on_disk, folder) as made:
        yield made
