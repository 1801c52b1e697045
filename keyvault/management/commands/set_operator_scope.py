"""Replace the merchants and environments of an operator."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from django.core.management.base import CommandParser
from django.db import transaction

from keyvault.management.mixins import OperatorChangeMixin, add_operator_scope_options, read_operator_scope
from keyvault.services.operator_changes import change_scope
from keyvault.services.operators.operators import get_operator, link_person


class Command(OperatorChangeMixin):
    help = (
        "Replace an operator's scope, the merchants and environments on which it may act, and end all its sessions. "
        "The operator does not find objects outside the scope. Any addition to the scope requires two operators and a "
        "reason. Two persons then review the approval in the console."
    )

    def add_options(self, parser: CommandParser) -> None:
        super().add_options(parser)
        add_operator_scope_options(parser)
        parser.add_argument(
            "--same-person-as",
            metavar="USERNAME",
            help="also link the operator, which must have no scope yet, to the person of this operator",
        )

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        scope = read_operator_scope(options)
        operator, grant = get_operator(options["username"]), self.requester_grant(options)
        answer: dict[str, Any] = {"username": operator.username}
        # The person is linked only if the scope is approved: one user of the host's shell cannot decide on either.
        with transaction.atomic() if options["same_person_as"] else nullcontext():
            if options["same_person_as"]:
                link_person(grant, operator, get_operator(options["same_person_as"]))
            change = change_scope(grant, operator, scope, options["reason"] or "")
            if change is not None:
                answer |= self.decide(change, options)
        operator.refresh_from_db()
        return answer | operator.access_scope.as_json()
