"""Replace an operator's roles."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.roles import Role
from keyvault.management.mixins import OperatorChangeMixin, add_role_option
from keyvault.services.operator_changes import change_roles
from keyvault.services.operators.operators import get_operator


class Command(OperatorChangeMixin):
    help = (
        "Replace an operator's roles and end all sessions of the operator. Adding approver or key_administrator "
        "requires two operators and a reason. Two persons then review the approval in the console."
    )

    def add_options(self, parser: CommandParser) -> None:
        super().add_options(parser)
        add_role_option(parser)

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        operator = get_operator(options["username"])
        change = change_roles(
            self.requester_grant(options), operator, map(Role, options["role"]), options["reason"] or ""
        )
        answer: dict[str, Any] = {"username": operator.username}
        if change is not None:
            answer |= self.decide(change, options)
        return answer | {"roles": sorted(operator.roles)}
