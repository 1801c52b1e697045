"""Write every revocation to a signed file, from which `replay_revocations` replaces a lost revocation log."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError, CommandParser

from keyvault.management.json_command import JsonCommand
from keyvault.services.revocations.log_export import write_export


class Command(JsonCommand):
    help = (
        "Write every revocation to a signed file, while the service runs, on a host with a worker. Keep it outside "
        "this host. If the revocation log is lost, replay_revocations --from FILE revokes again what the file names."
    )

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("--to", metavar="FILE", type=Path, required=True, help="the export, a new file")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        try:
            export = write_export(options["to"], self.now)
        except OSError as error:
            raise CommandError(f"{error.filename or options['to']}: {error.strerror}") from error
        return {"file": str(options["to"]), **asdict(export)}
