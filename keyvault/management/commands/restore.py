"""Check an encrypted backup, or restore it and revoke again what was revoked after it."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser

from keyvault.access.permissions import Permission
from keyvault.access.principals import HOST
from keyvault.backends.private_files import read_private_file
from keyvault.domain.plaintext import Plaintext
from keyvault.management.json_command import JsonCommand, call
from keyvault.services.backups.restore import check_fit, checked_archive, record_restore, restore_backup
from keyvault.services.recording.authorization import authorize
from keyvault.services.startup.migrating import ensure_migrated

_NEXT = [
    "on every other host with a revocation log: manage.py replay_revocations",
    "manage.py audit_verify; if only the log was rolled back: accept_audit_rollback on each host with a worker",
    "manage.py review_access: operators disabled or restricted after the backup are as before",
    "start the service",
]


class Command(JsonCommand):
    help = (
        "Restore an archive of `backup` into an empty database, set it up, and revoke again what this host's "
        "revocation log and the revocation anchor name. First stop every process on all hosts. The log is never "
        "replaced, and the keystore only where there is none. If it is killed, run it again, with --replace if it "
        "asks for it. --check writes nothing."
    )

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("--from", dest="archive", metavar="FILE", type=Path, required=True, help="the archive")
        parser.add_argument(
            "--passphrase-file", metavar="FILE", type=Path, required=True, help="a file that only its owner may read"
        )
        parser.add_argument("--check", action="store_true", help="check the archive without writing")
        parser.add_argument(
            "--replace", action="store_true", help="replace this service's tables in a database that is not empty"
        )

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        passphrase = Plaintext(read_private_file(options["passphrase_file"]))
        self.is_done = True
        try:
            if options["check"]:
                with checked_archive(options["archive"], passphrase) as archive:
                    check_fit(archive.manifest)
                    return {**archive.manifest, "checked": True}
            restored = restore_backup(options["archive"], passphrase, is_replacing=options["replace"])
        except OSError as error:
            raise CommandError(f"{error.filename or options['archive']}: {error.strerror}") from error
        except ImproperlyConfigured as error:
            raise CommandError(f"nothing was restored: {error}") from error
        return {**restored.manifest, "keystore": restored.keystore, **self._finish(restored.manifest)}

    def _finish(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Set the database up for this release, and replay. Each is a command that may be run again by hand.

        The sessions end first: what setup needs, such as the Vault, may be missing for long.
        """
        ensure_migrated()
        record_restore(authorize(HOST, Permission.INSTALLATION_MAINTAIN, now=self.now), manifest)
        fault = ""
        replay: dict[str, Any] = {"replayed": [], "unknown": []}
        try:
            call("setup")
            replay = call("replay_revocations")
        except (CommandError, ImproperlyConfigured) as error:
            fault = str(error)
        except SystemExit:
            fault = "work remains; run: manage.py replay_revocations"
        self.is_done = not fault
        steps = [f"the database is restored, and the service does not start yet: {fault}"] if fault else []
        return {
            "ready": self.is_done,
            "replayed": replay["replayed"],
            "unknown": replay["unknown"],
            "next": [*steps, *_NEXT],
        }

    def handle(self, *args: Any, **options: Any) -> None:
        super().handle(*args, **options)
        if not self.is_done:
            sys.exit(1)
