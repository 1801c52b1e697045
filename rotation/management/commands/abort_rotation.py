"""End a rotation: cancel it before delivery, roll it back afterwards."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.permissions import Permission
from keyvault.management.json_command import JsonCommand
from rotation.services.rotations.interventions import abort_rotation
from rotation.services.rotations.reports import get_rotation


class Command(JsonCommand):
    help = "Ends a rotation: cancels it before delivery; afterwards delivers the old key again while both verify."

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("rotation_id")
        parser.add_argument("--by", required=True, metavar="OPERATOR")
        parser.add_argument("--reason", required=True)

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        rotation = get_rotation(options["rotation_id"])
        grant = self.grant(self.operator(options["by"]), Permission.ROTATIONS_WRITE, rotation.credential.account)
        abort_rotation(grant, rotation, options["reason"])
        return {"rotation_id": rotation.rotation_id, "state": get_rotation(rotation.rotation_id).state}
