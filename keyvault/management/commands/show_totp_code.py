"""Print the current code of a TOTP secret, for the demo and for tests without an authenticator app."""

from collections.abc import Mapping
from typing import Any

from keyvault.domain.errors import RequestInvalidError
from keyvault.management.json_command import JsonCommand
from keyvault.management.passwords import read_password
from keyvault.services.sessions.second_factors import totp_code


class Command(JsonCommand):
    help = "Print the current code of a TOTP secret, which the command reads like a password. Each code works once."

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return {"code": totp_code(read_password(), self.now)}
        except ValueError:
            raise RequestInvalidError("This is not a TOTP secret, which is text in Base32.") from None

    def format_text(self, answer: Mapping[str, Any]) -> str:
        return str(answer["code"])
