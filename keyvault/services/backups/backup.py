"""Back up the database, and the local keystore or the name of the Vault's snapshot, in one encrypted archive.

The database comes first. The secret backend is copied afterwards, so that the copy has every secret that the database
names. Neither the revocation log nor the anchor is in the archive: they must outlive a restored database, because they
are what shows which revocations it has lost. The master key is not in it either.
"""

from datetime import datetime
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import connection

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.backends.backup_archive import ArchiveReader, ArchiveWriter, writing_archive
from keyvault.domain.errors import RequestInvalidError
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.releases import RELEASE
from keyvault.domain.timestamps import format_timestamp
from keyvault.services.backups.databases import DatabaseFacts, copying_database
from keyvault.services.backups.keystores import copy_keystore
from keyvault.services.backups.work_folder import work_folder
from keyvault.services.recording.transaction import recorded

DATABASE = "database"
KEYSTORE = "keystore"
"""Members of the archive."""

MIN_PASSPHRASE_CHARACTERS = 16


def require_passphrase(text: str) -> Plaintext:
    """Raises RequestInvalidError for a passphrase that is too short."""
    if len(text) < MIN_PASSPHRASE_CHARACTERS:
        raise RequestInvalidError(
            f"The passphrase has {len(text)} characters, and needs {MIN_PASSPHRASE_CHARACTERS} or more. Create one: "
            "openssl rand -base64 32"
        )
    return Plaintext(text)


def make_backup(grant: Grant, path: Path, passphrase: Plaintext, vault_snapshot: str) -> dict[str, Any]:
    """Write the archive and return its manifest. The audit entry comes first, and so it is in the archive.

    Decrypts the finished archive once, to check it. The service may run meanwhile.

    Raises:
        StateConflictError: the file exists, or another backup runs.
        IntegrityError: the service was not set up, or the keystore lacks a pepper.
        DependencyUnavailableError: the database or the keystore cannot be copied.
        OSError: the file cannot be written.
    """
    with work_folder() as folder, writing_archive(path, passphrase) as archive:
        with recorded(
            grant, Permission.INSTALLATION_MAINTAIN, "backup.started", path=str(path), vault_snapshot=vault_snapshot
        ):
            pass
        with copying_database(folder) as (facts, stream):
            archive.add(DATABASE, stream)
        if not settings.IS_VAULT:
            _add_keystore(archive, folder, facts)
        archive.finish(_describe(facts, grant.at, vault_snapshot))
    reader = ArchiveReader(path, passphrase)
    try:
        reader.check()
        return reader.manifest
    finally:
        reader.close()


def _add_keystore(archive: ArchiveWriter, folder: Path, facts: DatabaseFacts) -> None:
    with copy_keystore(folder, facts.peppers).open("rb") as file:
        archive.add(KEYSTORE, file)


def _describe(facts: DatabaseFacts, at: datetime, vault_snapshot: str) -> dict[str, Any]:
    backend: dict[str, str] = {"kind": "local"}
    if settings.IS_VAULT:
        backend = {
            "kind": "vault",
            "address": settings.VAULT_ADDRESS,
            "prefix": settings.VAULT_PREFIX,
            "snapshot": vault_snapshot,
        }
    return {
        "at": format_timestamp(at),
        "release": RELEASE,
        "oldest_compatible_release": facts.oldest_compatible_release,
        "installation": facts.installation_id,
        "change_sequence": facts.change_sequence,
        "database": connection.vendor,
        "backend": backend,
        "peppers": [list(pepper) for pepper in facts.peppers],
    }
