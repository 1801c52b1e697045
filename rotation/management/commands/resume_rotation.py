"""Resume a stalled rotation where it stalled."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.permissions import Permission
from keyvault.management.json_command import JsonCommand
from rotation.services.rotations.interventions import resume_rotation
from rotation.services.rotations.reports import get_rotation


class Command(JsonCommand):
    help = "Resumes a stalled rotation where it stalled, with its timers restarted. Fix first what stalled it."

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("rotation_id")
        parser.add_argument("--by", required=True, metavar="OPERATOR")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        rotation = get_rotation(options["rotation_id"])
        grant = self.grant(self.operator(options["by"]), Permission.ROTATIONS_WRITE, rotation.credential.account)
        resume_rotation(grant, rotation)
        return {"rotation_id": rotation.rotation_id, "state": get_rotation(rotation.rotation_id).state}
