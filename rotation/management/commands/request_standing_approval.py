"""Request the standing approval of a production schedule, and approve it if an approver is named."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.permissions import Permission
from keyvault.domain.errors import KeyvaultError
from keyvault.management.mixins import ApprovalMixin
from rotation.management.schedule_scope import ScopeMixin
from rotation.models import StandingApproval
from rotation.services.schedules.reports import describe_standing_approval
from rotation.services.schedules.schedules import scope_of
from rotation.services.schedules.standing_approvals import (
    DEFAULT_DAYS,
    approve_standing_approval,
    request_standing_approval,
    withdraw_standing_approval,
)


class Command(ApprovalMixin, ScopeMixin):
    help = "Request that the rotations of a production schedule need no approval of their own for some time."

    approver_help = "default: approve it in the console, or with approve_standing_approval"

    def add_options(self, parser: CommandParser) -> None:
        super().add_options(parser)
        parser.add_argument("--days", type=int, default=DEFAULT_DAYS, metavar="N", help=f"valid for ({DEFAULT_DAYS})")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        requester, schedule = self.requester(options), self.schedule(options)
        scope = scope_of(schedule)
        grant = self.grant(requester, Permission.SCHEDULES_WRITE, scope.place, within=scope.within)
        standing = request_standing_approval(grant, schedule, options["days"])
        if options["approved_by"]:
            self._approve(standing, options)
        return describe_standing_approval(standing, self.now)

    def _approve(self, standing: StandingApproval, options: Mapping[str, Any]) -> None:
        """Approve it; withdraw it if the approval is refused, since both were requested together."""
        scope, person = scope_of(standing.schedule), standing.requester_person
        try:
            approver = self.approver(options)
            grant = self.grant(approver, Permission.ROTATIONS_APPROVE, scope.place, person, scope.within)
            approve_standing_approval(grant, standing, standing.plan_digest)
        except KeyvaultError:
            grant = self.grant(self.requester(options), Permission.SCHEDULES_WRITE, scope.place, within=scope.within)
            withdraw_standing_approval(grant, standing, "the approval on the command line was refused")
            raise
