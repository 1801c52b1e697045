"""Check an archive, and restore it: first the keystore, if this host has none, then the database in one transaction.

The restore does not change the revocation log and the anchor of this host. They show afterwards which revocations the
restored database lacks. It may be killed at any point and run again, with `is_replacing` if the database was written.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db import DatabaseError, connection

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.backends.backup_archive import ArchiveReader
from keyvault.domain.errors import RequestInvalidError, StateConflictError
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.releases import RELEASE, parse_release
from keyvault.models import ConsoleSession, Installation, ServiceProcess
from keyvault.services.backups.backup import DATABASE, KEYSTORE
from keyvault.services.backups.databases import is_database_empty, write_database
from keyvault.services.backups.keystores import check_keystore, extract_keystore, has_keystore, install_keystore
from keyvault.services.backups.work_folder import work_folder
from keyvault.services.recording.revocation_log import find_log_owner
from keyvault.services.recording.transaction import recorded


@dataclass(frozen=True, slots=True)
class Restored:
    """`keystore`: what became of the keystore."""

    manifest: dict[str, Any]
    keystore: str


@contextmanager
def checked_archive(path: Path, passphrase: Plaintext) -> Iterator[ArchiveReader]:
    """Open an archive and decrypt all of it once. Raises IntegrityError, and OSError."""
    with closing(ArchiveReader(path, passphrase)) as archive:
        archive.check()
        yield archive


def check_fit(manifest: dict[str, Any]) -> None:
    """Require that this release, this database and this host's log can take the backup. Writes nothing.

    Raises RequestInvalidError, and StateConflictError.
    """
    if manifest["database"] != connection.vendor:
        raise RequestInvalidError(
            f"The backup is of {manifest['database']}, and KEYVAULT_DATABASE_URL names {connection.vendor}. "
            "Set it to a database of the same kind."
        )
    if manifest["backend"]["kind"] != ("vault" if settings.IS_VAULT else "local"):
        raise RequestInvalidError(
            f"The backup's secret backend is {manifest['backend']['kind']}. Set KEYVAULT_BACKEND to the same."
        )
    if parse_release(RELEASE) < parse_release(manifest["oldest_compatible_release"]):
        raise RequestInvalidError(
            f"The backup needs release {manifest['oldest_compatible_release']} or a later one; this is {RELEASE}."
        )
    _require_own_log(manifest["installation"])


def restore_backup(path: Path, passphrase: Plaintext, *, is_replacing: bool) -> Restored:
    """Restore the archive. Before anything is written, all of it is decrypted and checked.

    Raises:
        StateConflictError: the database is not empty, other processes use it, or the host belongs to another
            installation.
        RequestInvalidError: the backup does not fit this configuration.
        IntegrityError: the archive cannot be decrypted or lacks something.
        DependencyUnavailableError: the database refuses the copy.
        ImproperlyConfigured: the master key is missing or another one.
        OSError: a file cannot be read or written.
    """
    with work_folder() as folder, checked_archive(path, passphrase) as archive:
        manifest = archive.manifest
        check_fit(manifest)
        if not is_database_empty():
            if not is_replacing:
                raise _not_empty_error(manifest["installation"])
            _require_own_tables()
        keystore = "in the Vault" if settings.IS_VAULT else _restore_keystore(archive, folder)
        # Last: a database that is in place shows that the restore is complete.
        write_database(folder, archive.read(DATABASE), is_replacing=is_replacing)
    return Restored(manifest, keystore)


def record_restore(grant: Grant, manifest: dict[str, Any]) -> None:
    """Write the audit entry into the restored database. End its sessions: some had ended since the backup.

    Forget its workers and beats: they are stopped, and a host of another name would report them as lost for days.
    """
    with recorded(
        grant,
        Permission.INSTALLATION_MAINTAIN,
        "backup.restored",
        backup_at=manifest["at"],
        change_sequence=manifest["change_sequence"],
    ):
        ConsoleSession.objects.all().delete()
        ServiceProcess.objects.all().delete()


def _require_own_tables() -> None:
    """Raise StateConflictError for a database of another service: some of its tables may have the names of ours."""
    if Installation._meta.db_table not in connection.introspection.table_names():
        raise StateConflictError(
            "The database has tables of another service, and none of this one. Restore into a database of its own."
        )


def _not_empty_error(installation: str) -> StateConflictError:
    again = ""
    with suppress(DatabaseError):  # It may be another service's database.
        if Installation.objects.filter(installation_id=installation).exists():
            again = "If a restore was interrupted, run it again with --replace. "
    return StateConflictError(
        f"The database is not empty. {again}Restore into a new database, or add --replace, which replaces the tables "
        "of this service."
    )


def _restore_keystore(archive: ArchiveReader, folder: Path) -> str:
    installation = archive.manifest["installation"]
    peppers = [(name, number) for name, number in archive.manifest["peppers"]]
    if has_keystore():
        check_keystore(settings.DATA_DIR, installation, peppers)
        return "kept, because this host has one"
    install_keystore(extract_keystore(archive, KEYSTORE, folder, installation, peppers))
    return "restored"


def _require_own_log(installation: str) -> None:
    """Raise StateConflictError if this host's revocation log is another installation's: it would hide revocations."""
    owner = find_log_owner()
    if owner is not None and owner != installation:
        raise StateConflictError(
            f"The revocation log {settings.REVOCATION_LOG} belongs to another installation. Set "
            "KEYVAULT_REVOCATION_LOG (or KEYVAULT_DATA_DIR) to this installation's own.",
            internal=f"the log belongs to {owner}, the backup to {installation}",
        )
