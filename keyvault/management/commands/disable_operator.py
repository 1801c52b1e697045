"""Disable an operator permanently."""

from collections.abc import Mapping
from typing import Any

from keyvault.management.mixins import UsernameMixin
from keyvault.services.operators.operators import disable_operator, get_operator


class Command(UsernameMixin):
    help = (
        "Disable an operator permanently and end their sessions immediately. The last active key_administrator cannot "
        "be disabled."
    )

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        operator = get_operator(options["username"])
        disable_operator(self.operators_grant(), operator)
        return {"username": operator.username, "is_active": operator.is_active}
