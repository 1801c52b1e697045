"""Reject the request of a standing approval."""

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from rotation.management.standing_approval import EndingCommand
from rotation.models import StandingApproval
from rotation.services.schedules.standing_approvals import reject_standing_approval


class Command(EndingCommand):
    help = "Reject the request of a standing approval: each rotation of the schedule needs its own approval."
    permission = Permission.ROTATIONS_APPROVE

    def end(self, grant: Grant, standing: StandingApproval, reason: str) -> StandingApproval:
        return reject_standing_approval(grant, standing, reason)
