"""Base class of the commands with which an operator ends a standing approval or its request."""

from collections.abc import Mapping
from typing import Any, ClassVar

from django.core.management.base import CommandParser

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.management.mixins import OperatorMixin
from rotation.models import StandingApproval
from rotation.services.schedules.reports import describe_standing_approval
from rotation.services.schedules.schedules import scope_of
from rotation.services.schedules.standing_approvals import get_standing_approval


class EndingCommand(OperatorMixin):
    """A subclass defines `permission` and `end`."""

    permission: ClassVar[Permission]

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("approval_id")
        parser.add_argument("--reason", required=True, help="shown to the requester")
        super().add_options(parser)

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        standing = get_standing_approval(options["approval_id"])
        scope, operator = scope_of(standing.schedule), self.operator(options["by"])
        grant = self.grant(operator, self.permission, scope.place, standing.requester_person, scope.within)
        return describe_standing_approval(self.end(grant, standing, options["reason"]), self.now)

    def end(self, grant: Grant, standing: StandingApproval, reason: str) -> StandingApproval:
        raise NotImplementedError
