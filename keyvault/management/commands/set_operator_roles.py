"""Replace an operator's roles."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.roles import Role
from keyvault.management.mixins import UsernameMixin, add_role_option
from keyvault.services.merchants.operators import get_operator, set_roles


class Command(UsernameMixin):
    help = "Replace an operator's roles and end their sessions, so that they sign in again."

    def add_options(self, parser: CommandParser) -> None:
        super().add_options(parser)
        add_role_option(parser)

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        operator = get_operator(options["username"])
        set_roles(self.operators_grant(), operator, map(Role, options["role"]))
        return {"username": operator.username, "roles": sorted(operator.roles)}
