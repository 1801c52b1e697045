"""Reset an operator's second factors."""

from collections.abc import Mapping
from typing import Any

from keyvault.management.mixins import OperatorChangeMixin
from keyvault.services.operator_changes import request_factor_reset
from keyvault.services.operators.operators import get_operator


class Command(OperatorChangeMixin):
    help = (
        "Remove all second factors of an operator and end all sessions of the operator. Then run invite_operator. The "
        "reset requires two operators and a reason. Two persons then review the approval in the console."
    )

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        operator = get_operator(options["username"])
        change = request_factor_reset(self.requester_grant(options), operator, options["reason"] or "")
        return {"username": operator.username, **self.decide(change, options)}
