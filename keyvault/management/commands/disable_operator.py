"""Disable an operator permanently."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.permissions import Permission
from keyvault.access.principals import HOST
from keyvault.management.json_command import JsonCommand
from keyvault.services.merchants.operators import disable_operator, get_operator
from keyvault.services.recording.authorization import authorize


class Command(JsonCommand):
    help = (
        "Disable an operator permanently and end their sessions immediately. The last active key_administrator cannot "
        "be disabled."
    )

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("username")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        operator = get_operator(options["username"])
        disable_operator(authorize(HOST, Permission.OPERATORS_WRITE, now=self.now), operator)
        return {"username": operator.username, "is_active": operator.is_active}
