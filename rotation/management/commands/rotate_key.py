"""Request a rotation, and approve it where the policy requires that; the worker does the rest."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.permissions import Permission
from keyvault.domain.errors import NotFoundError, StateConflictError
from keyvault.management.mixins import ApprovalMixin
from keyvault.models import Credential
from rotation.domain.events import RotationState
from rotation.management.plan_options import add_plan_options, read_overrides
from rotation.services.rotations.interventions import abort_rotation
from rotation.services.rotations.requests import approve_rotation, bypass_rotation, request_rotation


class Command(ApprovalMixin):
    help = "Rotate a credential's key: the replacement is deployed and proved in use before the old one is revoked."

    def add_options(self, parser: CommandParser) -> None:
        super().add_options(parser)
        parser.add_argument("--credential", required=True, metavar="ID")
        parser.add_argument("--bypass", metavar="WHY", help="bypass the approval (break-glass), with a reason")
        add_plan_options(parser)

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        credential = (
            Credential.objects.select_related("account__merchant").filter(credential_id=options["credential"]).first()
        )
        if credential is None:
            raise NotFoundError(f"There is no credential {options['credential']}.")
        requester = self.requester(options)
        rotation = request_rotation(
            self.grant(requester, Permission.ROTATIONS_WRITE, credential.account),
            credential,
            read_overrides(options),
        )
        is_waiting = rotation.state == RotationState.AWAITING_APPROVAL
        if is_waiting and (options["bypass"] or rotation.approvals_needed == 1):
            self._approve(rotation, credential, options)
        elif is_waiting and options["approved_by"]:
            raise StateConflictError(
                f"{rotation.rotation_id} requires {rotation.approvals_needed} approvals. "
                "Each approver approves it in the console."
            )
        return {"rotation_id": rotation.rotation_id, "state": rotation.state}

    def _approve(self, rotation: Any, credential: Credential, options: Mapping[str, Any]) -> None:
        """Approve or bypass the rotation; abort it if that is refused, so that it does not block the next one."""
        try:
            if options["bypass"]:
                grant = self.grant(self.requester(options), Permission.ROTATIONS_BYPASS, credential.account)
                bypass_rotation(grant, rotation, rotation.plan_digest, options["bypass"])
                return
            if not options["approved_by"]:
                raise StateConflictError("A second person must approve this. Name one with --approved-by.")
            approver = self.approver(options)
            grant = self.grant(approver, Permission.ROTATIONS_APPROVE, credential.account, rotation.requester_person)
            approve_rotation(grant, rotation, rotation.plan_digest)
        except Exception:
            grant = self.grant(self.requester(options), Permission.ROTATIONS_WRITE, credential.account)
            abort_rotation(grant, rotation, "the approval on the command line was refused")
            raise
