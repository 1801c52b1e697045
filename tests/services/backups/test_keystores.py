"""The local keystore in a backup."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from keyvault.backends.backup_archive import ArchiveReader, writing_archive
from keyvault.backends.base import BackendMissingError, Mount
from keyvault.backends.local import LocalKeystore
from keyvault.backends.local_rekeying import rekeying
from keyvault.backends.private_files import ensure_private_directory, write_private_file
from keyvault.domain.errors import DependencyUnavailableError, IntegrityError, StateConflictError
from keyvault.domain.plaintext import Plaintext
from keyvault.services.backups.keystores import check_keystore, copy_keystore, extract_keystore, has_keystore
from keyvault.services.backups.work_folder import work_folder

OWN, OTHER = "installation-a", "installation-b"
PEPPERS = [("production", 1), ("production", 2), ("sandbox", 1)]


@pytest.fixture
def folder(tmp_path: Path, settings: Any) -> Path:
    """The data folder of a host, and its keystore with peppers, a secret and a revocation anchor."""
    settings.DATA_DIR = tmp_path
    store = LocalKeystore(tmp_path)
    for name, number in PEPPERS:
        labels = {"installation": OWN}
        store.put(Mount.PEPPERS, name, Plaintext(f"{name} {number}"), labels, expected_version=number - 1)
    store.put(Mount.SANDBOX, "path", Plaintext("secret"), {}, expected_version=0)
    store.put(Mount.EVIDENCE, "service/revocations", Plaintext(""), {"lines": "anchored"}, expected_version=0)
    return tmp_path


def copy(folder: Path, peppers: Any = PEPPERS) -> Path:
    place = ensure_private_directory(folder / "copy")
    copy_keystore(place, peppers)
    return place


def test_copy_has_the_secrets_and_not_the_evidence(folder: Path) -> None:
    """Guarantee: the anchor is never restored together with the database, and so it always shows what that has lost."""
    place = copy(folder)
    store = LocalKeystore(place, (folder / "master.key").read_text())
    assert store.read(Mount.SANDBOX, "path").secret.reveal() == "secret"
    assert store.read(Mount.PEPPERS, "production", 1).secret.reveal() == "production 1"
    with pytest.raises(BackendMissingError):
        store.read(Mount.EVIDENCE, "service/revocations")
    assert b"service/revocations" not in (place / "keystore.sqlite3").read_bytes()
    assert LocalKeystore(folder).read(Mount.EVIDENCE, "service/revocations").version == 1


def test_copy_without_a_needed_pepper_is_refused(folder: Path) -> None:
    with pytest.raises(IntegrityError, match="lacks a pepper") as caught:
        copy(folder, [*PEPPERS, ("sandbox", 2)])
    assert "sandbox 2" in caught.value.internal


def test_copy_of_a_half_encrypted_keystore_is_refused(folder: Path) -> None:
    with rekeying(folder, (folder / "master.key").read_text(), lambda: "A" * 43 + "=") as keystore:
        keystore.begin()
    with pytest.raises(StateConflictError, match="rotate_master_key"):
        copy(folder)


def test_copy_of_a_damaged_keystore_is_refused(folder: Path) -> None:
    path = folder / "keystore.sqlite3"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = bytearray(path.read_bytes())
    content[4096:4200] = bytes(104)
    path.write_bytes(content)
    with pytest.raises((IntegrityError, DependencyUnavailableError)):
        copy(folder)


def test_keystore_of_another_installation_or_without_a_pepper_is_refused(folder: Path) -> None:
    check_keystore(folder, OWN, PEPPERS)
    with pytest.raises(StateConflictError, match="another installation"):
        check_keystore(folder, OTHER, PEPPERS)
    with pytest.raises(IntegrityError, match="lacks peppers"):
        check_keystore(folder, OWN, [("sandbox", 7)])


def test_archive_of_another_master_key_names_the_key_of_this_host(folder: Path, tmp_path_factory: Any) -> None:
    """The keystore of the archive is in a folder that is emptied afterwards, and has no key beside it."""
    archive, path = tmp_path_factory.mktemp("archive") / "archive", copy(folder) / "keystore.sqlite3"
    passphrase = Plaintext("correct horse battery staple")
    with writing_archive(archive, passphrase) as writer, path.open("rb") as source:
        writer.add("keystore", source)
        writer.finish({})
    with closing(ArchiveReader(archive, passphrase)) as reader:
        extract_keystore(reader, "keystore", ensure_private_directory(folder / "first"), OWN, PEPPERS)
        write_private_file(folder / "master.key", "A" * 43 + "=")
        with pytest.raises(ImproperlyConfigured, match="is not the one of the archive") as refused:
            extract_keystore(reader, "keystore", ensure_private_directory(folder / "second"), OWN, PEPPERS)
    assert str(folder / "master.key") in str(refused.value)
    assert "second" not in str(refused.value)


def test_keystore_without_peppers_counts_as_absent(tmp_path: Path, settings: Any) -> None:
    """Any command creates an empty keystore, which holds nothing to keep."""
    settings.DATA_DIR = tmp_path
    assert not has_keystore()
    (tmp_path / "keystore.sqlite3").touch()
    assert not has_keystore()
    (tmp_path / "keystore.sqlite3").unlink()
    store = LocalKeystore(tmp_path)
    assert not has_keystore()
    store.put(Mount.PEPPERS, "sandbox", Plaintext("p"), {"installation": OWN}, expected_version=0)
    assert has_keystore()


def test_work_folder_is_for_one_run_and_empty(tmp_path: Path, settings: Any) -> None:
    settings.DATA_DIR = tmp_path
    with work_folder() as folder:
        (folder / "left").write_text("plaintext of a killed run")
        (folder / "sub").mkdir()
        with pytest.raises(StateConflictError, match="Another backup"), work_folder():
            pass
        assert (folder / "left").exists(), "the second one must not empty it"
    (folder / "left").write_text("plaintext of a killed run")
    with work_folder() as again:
        assert list(again.iterdir()) == []
    assert list(folder.iterdir()) == []
