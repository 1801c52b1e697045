"""The local keystore in a backup.

Its evidence is left out: the revocation anchor and the marks of the newest checkpoints. Restored together with the
database they would be as old as it is, and hide what it has lost. A keystore that is in place is never replaced. It is
newer, it has the evidence, and an older one would contain secrets that were destroyed since.
"""

import sqlite3
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from keyvault.backends.backup_archive import ArchiveReader
from keyvault.backends.base import BackendMissingError, Mount
from keyvault.backends.local import KEYSTORE_NAME, SCHEMA, WrongMasterKeyError
from keyvault.backends.private_files import (
    ensure_private_directory,
    ensure_private_file,
    sync_folder,
)
from keyvault.domain.errors import IntegrityError, StateConflictError
from keyvault.services.backups.databases import copy_sqlite
from keyvault.services.peppers.installation import LABEL
from keyvault.services.secrets.backend import open_keystore, read_master_key_text

PepperNames = Sequence[tuple[str, int]]


def copy_keystore(folder: Path, peppers: PepperNames) -> Path:
    """Copy the keystore without its evidence.

    Raises IntegrityError if it lacks one of the peppers, and StateConflictError in a rotation of the master key.
    """
    path = folder / KEYSTORE_NAME
    copy_sqlite(settings.DATA_DIR / KEYSTORE_NAME, path)
    with closing(sqlite3.connect(path, isolation_level=None)) as copy:
        # A keystore of an earlier release lacks the table of the rotation.
        copy.executescript(SCHEMA)
        if copy.execute("SELECT 1 FROM master_key_rotation").fetchone() is not None:
            raise StateConflictError(
                "A rotation of the master key is unfinished. Finish it: manage.py rotate_master_key"
            )
        copy.execute("PRAGMA secure_delete=ON")
        copy.execute("DELETE FROM records WHERE mount = ?", (Mount.EVIDENCE,))
        rows = copy.execute("SELECT path, version FROM records WHERE mount = ? AND state = 'live'", (Mount.PEPPERS,))
        missing = set(peppers) - {(name, version) for name, version in rows}
    if missing:
        raise IntegrityError(
            "The keystore lacks a pepper that the database needs. If one was retired meanwhile, run it again.",
            internal=f"missing: {_format(missing)}",
        )
    return path


def has_keystore() -> bool:
    """Whether this data folder has a keystore with peppers. The first command creates one without any."""
    path = settings.DATA_DIR / KEYSTORE_NAME
    if not path.exists():
        return False
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=20)) as reader:
        if reader.execute("SELECT 1 FROM sqlite_master WHERE name = 'records'").fetchone() is None:
            return False
        found = reader.execute("SELECT 1 FROM records WHERE mount = ? LIMIT 1", (Mount.PEPPERS,)).fetchone()
    return found is not None


def check_keystore(folder: Path, installation: str, peppers: PepperNames) -> None:
    """Open a folder's keystore with this host's master key, and read every pepper.

    Raises IntegrityError if it is another installation's or lacks a pepper, and ImproperlyConfigured if the master key
    is missing or another one.
    """
    keystore = open_keystore(folder, read_master_key_text())
    missing = set()
    for name, number in peppers:
        try:
            labels = keystore.read(Mount.PEPPERS, name, number).labels
        except BackendMissingError:
            missing.add((name, number))
            continue
        _require_installation(labels, installation, folder)
    if missing:
        raise IntegrityError(
            "The keystore lacks peppers of this backup, so that keys could not be verified.",
            internal=f"{folder / KEYSTORE_NAME} lacks {_format(missing)}; move it away to restore the archive's",
        )


def _require_installation(labels: Mapping[str, str], installation: str, folder: Path) -> None:
    if labels.get(LABEL) != installation:
        raise StateConflictError(
            "The keystore belongs to another installation.",
            internal=f"{folder / KEYSTORE_NAME} belongs to installation {labels.get(LABEL)}, the backup to "
            f"{installation}: move it and its master.key away, or set KEYVAULT_DATA_DIR to another folder",
        )


def extract_keystore(archive: ArchiveReader, name: str, folder: Path, installation: str, peppers: PepperNames) -> Path:
    """Decrypt the archive's keystore to a folder of its own, and check it there. Raises as `check_keystore`."""
    place = ensure_private_directory(folder / "keystore")
    path = place / KEYSTORE_NAME
    ensure_private_file(path)
    with path.open("wb") as file:
        archive.extract(name, file)
    try:
        check_keystore(place, installation, peppers)
    except WrongMasterKeyError:
        # Its text names this folder, which is emptied.
        raise ImproperlyConfigured(
            f"the master key of this host (KEYVAULT_MASTER_KEY, or {settings.DATA_DIR / 'master.key'}) is not the one "
            "of the archive"
        ) from None
    return path


def install_keystore(path: Path) -> None:
    """Put a checked keystore in place, durably."""
    target = settings.DATA_DIR / KEYSTORE_NAME
    for ending in ("-wal", "-shm"):
        target.with_name(target.name + ending).unlink(missing_ok=True)
    copy_sqlite(path, path.with_name("whole"))
    path.with_name("whole").replace(target)
    sync_folder(settings.DATA_DIR)


def _format(peppers: Collection[tuple[str, int]]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(peppers))
