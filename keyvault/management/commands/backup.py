"""Write an encrypted backup of the database and of the local keystore."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import CommandError, CommandParser

from keyvault.access.permissions import Permission
from keyvault.access.principals import HOST
from keyvault.backends.private_files import read_private_file
from keyvault.management.json_command import JsonCommand
from keyvault.services.backups.backup import make_backup, require_passphrase
from keyvault.services.recording.authorization import authorize


class Command(JsonCommand):
    help = (
        "Write an encrypted, checked archive of the database and of the local keystore, while the service runs. It "
        "contains neither the master key nor the revocation log: keep these apart from it."
    )

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("--to", metavar="FILE", type=Path, required=True, help="the archive, a new file")
        parser.add_argument(
            "--passphrase-file", metavar="FILE", type=Path, required=True, help="a file that only its owner may read"
        )
        parser.add_argument(
            "--vault-snapshot", metavar="NAME", default="", help="with a Vault: the snapshot that you take afterwards"
        )

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        if bool(options["vault_snapshot"]) != settings.IS_VAULT:
            needed = (
                "KEYVAULT_BACKEND=vault requires --vault-snapshot NAME"
                if settings.IS_VAULT
                else ("--vault-snapshot needs KEYVAULT_BACKEND=vault: the local keystore is in the archive")
            )
            raise CommandError(needed, returncode=2)
        grant = authorize(HOST, Permission.INSTALLATION_MAINTAIN, now=self.now)
        passphrase = require_passphrase(read_private_file(options["passphrase_file"]))
        try:
            manifest = make_backup(grant, options["to"].absolute(), passphrase, options["vault_snapshot"])
        except OSError as error:
            raise CommandError(f"{error.filename or options['to']}: {error.strerror}") from error
        return {"file": str(options["to"]), **manifest, "next": self._next(options["vault_snapshot"])}

    def _next(self, snapshot: str) -> list[str]:
        if settings.IS_VAULT:
            return [f"take the Vault's snapshot {snapshot} now, after the database"]
        return ["keep the master key and the passphrase, each apart from the archive"]
