"""Base class of the commands with which an operator intervenes in a rotation."""

from collections.abc import Mapping
from typing import Any, ClassVar

from django.core.management.base import CommandParser

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.management.mixins import OperatorMixin
from rotation.models import Rotation
from rotation.services.rotations.reports import get_rotation


class InterventionCommand(OperatorMixin):
    """A subclass defines `intervene`. The command prints the state that the rotation is in afterwards."""

    permission: ClassVar = Permission.ROTATIONS_WRITE

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("rotation_id")
        super().add_options(parser)

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        rotation = get_rotation(options["rotation_id"])
        grant = self.operator_grant(options, self.permission, rotation.credential.account)
        self.intervene(grant, rotation, options)
        return {"rotation_id": rotation.rotation_id, "state": get_rotation(rotation.rotation_id).state}

    def intervene(self, grant: Grant, rotation: Rotation, options: Mapping[str, Any]) -> None:
        raise NotImplementedError
