"""Let the worker sign an audit log that was set back by restoring a backup."""

from collections.abc import Mapping
from typing import Any

from django.conf import settings
from django.core.management.base import CommandError, CommandParser

from keyvault.access.permissions import Permission
from keyvault.access.principals import HOST
from keyvault.management.json_command import JsonCommand
from keyvault.services.audit.rollback import accept_rollback
from keyvault.services.recording.authorization import authorize


class Command(JsonCommand):
    help = (
        "After restoring a backup: accept that the audit log lacks entries and checkpoints, with an audit entry and an "
        "alarm, so that the worker signs it again. First export and verify the log. Run it on each host with a worker. "
        "Two persons review the approval in the console, and the approver can be one of them."
    )

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("--by", metavar="NAME", required=True, help="the responsible operator")
        parser.add_argument("--approved-by", metavar="NAME", required=True, help="approver, a second person")
        parser.add_argument("--reason", metavar="WHY", required=True, help="for the audit log")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        grant = authorize(HOST, Permission.REVOCATIONS_REPLAY, now=self.now)
        operator, approver = self.unlimited_operator(options["by"]), self.unlimited_operator(options["approved_by"])
        try:
            scopes = accept_rollback(grant, operator, approver, options["reason"])
        except OSError as error:
            raise CommandError(
                f"the revocation log {settings.REVOCATION_LOG} cannot be used: {error.strerror}"
            ) from error
        return {"accepted": scopes}
