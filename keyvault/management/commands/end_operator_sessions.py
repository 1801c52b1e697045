"""End all sessions of an operator."""

from collections.abc import Mapping
from typing import Any

from keyvault.management.mixins import UsernameMixin
from keyvault.services.operators.operators import end_operator_sessions, get_operator


class Command(UsernameMixin):
    help = (
        "End all sessions of an operator immediately. To lock out an operator of single sign-on, first remove it from "
        "its groups at the identity provider."
    )

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        operator = get_operator(options["username"])
        end_operator_sessions(self.operators_grant(), operator)
        return {"username": operator.username}
