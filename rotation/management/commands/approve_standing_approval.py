"""Approve the standing approval of a schedule that another person has requested."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.permissions import Permission
from keyvault.management.mixins import OperatorMixin
from rotation.services.schedules.reports import describe_standing_approval
from rotation.services.schedules.schedules import scope_of
from rotation.services.schedules.standing_approvals import approve_standing_approval, get_standing_approval


class Command(OperatorMixin):
    help = "Approve a standing approval as shown by list_schedules: its digest covers the plan and the selection."

    operator_help = "approver, a second person"

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("approval_id")
        parser.add_argument("--digest", required=True, metavar="SHA256", help="the digest that was reviewed")
        super().add_options(parser)

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        standing = get_standing_approval(options["approval_id"])
        scope, person = scope_of(standing.schedule), standing.requester_person
        operator = self.operator(options["by"])
        grant = self.grant(operator, Permission.ROTATIONS_APPROVE, scope.place, person, scope.within)
        return describe_standing_approval(approve_standing_approval(grant, standing, options["digest"]), self.now)
