"""List the operators."""

from collections.abc import Mapping
from typing import Any

from keyvault.management.json_command import JsonCommand
from keyvault.services.operators.operators import list_operators


class Command(JsonCommand):
    help = (
        "List every operator with roles, scope, state and last sign-in. Operators of one human have the same `person`."
    )

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "operators": [
                {
                    "username": operator.username,
                    "roles": sorted(group.name for group in operator.groups.all()),
                    **operator.access_scope.as_json(),
                    "is_active": operator.is_active,
                    "last_sign_in_at": operator.last_login,
                    "person": operator.person,
                }
                for operator in list_operators()
            ]
        }
