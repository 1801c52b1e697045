"""Replace the key that signs the console's sessions."""

from collections.abc import Mapping
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser

from keyvault.access.permissions import Permission
from keyvault.access.principals import HOST
from keyvault.management.json_command import JsonCommand
from keyvault.services.recording.authorization import authorize
from keyvault.services.sessions.session_key import FALLBACK_NAME, KEY_NAME, rotate_session_key


class Command(JsonCommand):
    help = (
        "Replace the key in the data folder that signs the console's sessions. Restart the servers afterwards. "
        "Sessions signed with the former key stay valid until they end, within 8 hours. Until then the command refuses "
        "to replace the key again. With --end-sessions all end."
    )

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--end-sessions", action="store_true", help="end all sessions: the former key no longer verifies any"
        )

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        grant = authorize(HOST, Permission.INSTALLATION_MAINTAIN, now=self.now)
        try:
            rotate_session_key(grant, ends_sessions=options["end_sessions"])
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
        folders = "to the data folder of each"
        # A fallback that an earlier rotation left on another host would still verify the leaked key's sessions.
        copying = (
            f"copy {KEY_NAME} {folders}, and delete {FALLBACK_NAME} there"
            if options["end_sessions"]
            else f"copy {KEY_NAME} and {FALLBACK_NAME} {folders}"
        )
        return {
            "ends_sessions": options["end_sessions"],
            "next": [f"with several hosts, {copying}", "restart every server"],
        }
