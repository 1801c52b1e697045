"""Export the audit log as JSON lines for the auditor's checker (`keyvault_client.audit_check`)."""

from argparse import ArgumentTypeError
from datetime import UTC, datetime
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import OperationalError, ProgrammingError

from keyvault.domain.audit_records import record_line
from keyvault.domain.digests import PepperSet
from keyvault.services.audit.export import export_log, export_newest


class Command(BaseCommand):
    help = "Write the audit log and its signed checkpoints to standard output, one JSON record per line."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--scope", action="append", choices=[scope.value for scope in PepperSet], help="repeatable")
        parser.add_argument(
            "--since", type=_moment, help="omit entries that a checkpoint until this time signs (ISO 8601)"
        )
        parser.add_argument("--newest", action="store_true", help="only the newest checkpoint of each scope")

    def handle(self, *args: Any, **options: Any) -> None:
        scopes = options["scope"] or [scope.value for scope in PepperSet]
        scopes = list(dict.fromkeys(scopes))
        if options["newest"]:
            records = export_newest(scopes)
        else:
            records = export_log(scopes, options["since"], datetime.now(UTC))
        try:
            for record in records:
                self.stdout.write(record_line(record))
        except (OperationalError, ProgrammingError) as error:
            raise CommandError(f"the database is unavailable or not set up (run manage.py setup): {error}") from error


def _moment(text: str) -> datetime:
    """Parse an ISO 8601 time; without a zone it is UTC. Raises ArgumentTypeError."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not an ISO 8601 time such as 2026-11-21T18:00") from None
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)
