"""Request a key for a credential without a usable one, and approve it if an approver is named."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.permissions import Permission
from keyvault.domain.errors import NotFoundError
from keyvault.management.mixins import ApprovalMixin
from keyvault.models import Credential
from rotation.models import Rotation
from rotation.services.rotations.interventions import abort_rotation
from rotation.services.rotations.reports import describe
from rotation.services.rotations.requests import approve_rotation, is_undecided, reissue_key


class Command(ApprovalMixin):
    help = "Request a new key for a credential without a usable one; the worker creates and delivers it."

    approver_help = "default: approve it in the console"

    def add_options(self, parser: CommandParser) -> None:
        super().add_options(parser)
        parser.add_argument("--credential", required=True, metavar="ID")
        parser.add_argument("--reason", required=True)

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        credential = (
            Credential.objects.select_related("account__merchant").filter(credential_id=options["credential"]).first()
        )
        if credential is None:
            raise NotFoundError(f"There is no credential {options['credential']}.")
        requester = self.requester(options)
        grant = self.grant(requester, Permission.ROTATIONS_WRITE, credential.account)
        rotation = reissue_key(grant, credential, options["reason"])
        if options["approved_by"] and is_undecided(rotation):
            self._approve(rotation, credential, options)
        described = describe(rotation, self.now)
        return {name: described[name] for name in ("rotation_id", "state", "waiting_for")}

    def _approve(self, rotation: Rotation, credential: Credential, options: Mapping[str, Any]) -> None:
        """Approve the rotation; abort it if the approval is refused, so that it does not block the next one."""
        try:
            approver = self.approver(options)
            grant = self.grant(approver, Permission.ROTATIONS_APPROVE, credential.account, rotation.requester_person)
            approve_rotation(grant, rotation, rotation.plan_digest)
        except Exception:
            grant = self.grant(self.requester(options), Permission.ROTATIONS_WRITE, credential.account)
            abort_rotation(grant, rotation, "the approval on the command line was refused")
            raise
