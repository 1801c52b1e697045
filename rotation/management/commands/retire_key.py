"""Set the date on which an old public key is taken out of service."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.permissions import Permission
from keyvault.domain.errors import StateConflictError
from keyvault.domain.timestamps import format_timestamp
from keyvault.management.mixins import ApprovalMixin
from rotation.management.plan_options import read_time
from rotation.models import Retirement
from rotation.services.rotations.interventions import approve_retirement, request_retirement
from rotation.services.rotations.reports import get_rotation


class Command(ApprovalMixin):
    help = "Set the date on which the old public key of a rotation is taken out of service, even if it is still in use."

    def add_options(self, parser: CommandParser) -> None:
        super().add_options(parser)
        parser.add_argument("rotation_id")
        parser.add_argument("--at", required=True, metavar="TIME", help="ISO 8601, UTC without an offset")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        rotation = get_rotation(options["rotation_id"])
        account = rotation.credential.account
        grant = self.grant(self.requester(options), Permission.ROTATIONS_WRITE, account)
        retirement = request_retirement(grant, rotation, read_time("at", options["at"]))
        if retirement.approved_at is None:
            retirement = self._approve(retirement, account, options)
        return {
            "rotation_id": rotation.rotation_id,
            "retire_at": format_timestamp(retirement.retire_at),
            "approved": retirement.approved_at is not None,
        }

    def _approve(self, retirement: Retirement, account: Any, options: Mapping[str, Any]) -> Retirement:
        if not options["approved_by"]:
            raise StateConflictError(
                "Requested. A second person must approve it: name one with --approved-by, or use the console."
            )
        approver = self.approver(options)
        grant = self.grant(approver, Permission.ROTATIONS_APPROVE, account, retirement.requester_person)
        return approve_retirement(grant, retirement)
