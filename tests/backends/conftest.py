"""Fixtures that run each contract test once for every backend."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keyvault.backends.base import BackendMissingError, SecretBackend
from keyvault.backends.vault.layout import ENGINE_OF, PEPPER_PATH, SecretsEngine, VaultRole, scopes_of
from tests.servers.openbao import RunningVault

from .stores import BACKENDS, write_connection
from .vault.fake import FakeVault, running_fake
from .vault.installation import InstalledVault, installed

MARKS = {"openbao": pytest.mark.openbao}


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, ())) for name in BACKENDS])
def backend_name(request: pytest.FixtureRequest) -> str:
    name = request.param
    assert isinstance(name, str)
    return name


@pytest.fixture
def backend(backend_name: str, tmp_path: Path, request: pytest.FixtureRequest) -> SecretBackend:
    """Return an empty backend in the test's own folder."""
    if backend_name == "fake":
        fake: FakeVault = request.getfixturevalue("fake")
        write_fake_logins(fake, tmp_path)
    elif backend_name == "openbao":
        write_real_logins(request.getfixturevalue("shared_vault"), tmp_path)
    return BACKENDS[backend_name](tmp_path)


@pytest.fixture
def fake() -> Iterator[FakeVault]:
    with running_fake() as made:
        yield made


@pytest.fixture(scope="module")
def shared_vault(vault: RunningVault, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InstalledVault]:
    """Install once for all tests of a file; each test starts empty."""
    with installed(vault, tmp_path_factory.mktemp("logins")) as made:
        yield made


def write_fake_logins(fake: FakeVault, folder: Path) -> None:
    """Create a role and a login on the fake for every Vault role."""
    logins = write_connection(folder, fake.address, "kv")
    for role in VaultRole:
        for scope in scopes_of(ENGINE_OF[role]):
            name = f"kv-{role}-{scope}"
            role_id, secret_id = fake.make_role(name)
            (logins / f"{name}.role_id").write_text(role_id)
            (logins / f"{name}.secret_id").write_text(secret_id)


def write_real_logins(made: InstalledVault, folder: Path) -> None:
    logins = write_connection(folder, made.server.address, made.layout.prefix)
    shutil.copytree(made.logins, logins, dirs_exist_ok=True)
    for scope in scopes_of(SecretsEngine.KEYS):
        _empty(made.admin, made.layout.mount(SecretsEngine.KEYS, scope), "")
    for scope in scopes_of(SecretsEngine.PEPPERS):
        _forget(made.admin, made.layout.mount(SecretsEngine.PEPPERS, scope), PEPPER_PATH)
    for scope in scopes_of(SecretsEngine.EVIDENCE):
        _empty(made.admin, made.layout.mount(SecretsEngine.EVIDENCE, scope), "")


def _empty(admin: Any, mount: str, folder: str) -> None:
    try:
        names = admin.secrets.kv.v2.list_secrets(folder, mount_point=mount)["data"]["keys"]
    except BackendMissingError:
        return
    for name in names:
        if name.endswith("/"):
            _empty(admin, mount, folder + name)
        else:
            _forget(admin, mount, folder + name)


def _forget(admin: Any, mount: str, path: str) -> None:
    admin.secrets.kv.v2.delete_metadata_and_all_versions(path, mount_point=mount)
