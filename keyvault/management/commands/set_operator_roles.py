"""Replace an operator's roles."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.permissions import Permission
from keyvault.access.principals import HOST
from keyvault.access.roles import Role
from keyvault.management.json_command import JsonCommand
from keyvault.services.merchants.operators import get_operator, set_roles
from keyvault.services.recording.authorization import authorize


class Command(JsonCommand):
    help = "Replace an operator's roles and end their sessions, so that they sign in again."

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("username")
        parser.add_argument(
            "--role", action="append", required=True, choices=[role.value for role in Role], help="repeatable"
        )

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        operator = get_operator(options["username"])
        grant = authorize(HOST, Permission.OPERATORS_WRITE, now=self.now)
        set_roles(grant, operator, map(Role, options["role"]))
        return {"username": operator.username, "roles": sorted(operator.roles)}
