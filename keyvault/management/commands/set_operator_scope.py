"""Replace the merchants and environments of an operator."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandError, CommandParser

from keyvault.access.permissions import Permission
from keyvault.access.scopes import EVERYWHERE
from keyvault.management.mixins import HostOperatorMixin, add_scope_options, read_scope
from keyvault.services.operators.operators import get_operator, set_scope


class Command(HostOperatorMixin):
    help = (
        "Replace an operator's scope, the merchants and environments on which it may act, and end all its sessions. "
        "The operator does not find objects outside the scope."
    )

    def add_options(self, parser: CommandParser) -> None:
        super().add_options(parser)
        parser.add_argument("username")
        add_scope_options(parser, required=False)
        parser.add_argument("--all", action="store_true", help="all merchants and environments")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        if options["all"] == bool(options["merchant"] or options["environment"]):
            raise CommandError("give --all, or --merchant, --environment or both", returncode=2)
        scope = EVERYWHERE if options["all"] else read_scope(options)
        operator = get_operator(options["username"])
        set_scope(self.operator_grant(options, Permission.OPERATORS_WRITE), operator, scope)
        return {"username": operator.username, **scope.as_json()}
