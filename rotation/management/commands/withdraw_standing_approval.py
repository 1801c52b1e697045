"""Withdraw a standing approval, or its request."""

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from rotation.management.standing_approval import EndingCommand
from rotation.models import StandingApproval
from rotation.services.schedules.standing_approvals import withdraw_standing_approval


class Command(EndingCommand):
    help = "Withdraw a standing approval, or its request: rotations requested from now on need their own approval."
    permission = Permission.SCHEDULES_WRITE

    def end(self, grant: Grant, standing: StandingApproval, reason: str) -> StandingApproval:
        return withdraw_standing_approval(grant, standing, reason)
