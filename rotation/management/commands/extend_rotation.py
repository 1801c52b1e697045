"""Extend the deadline of a rotation."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.permissions import Permission
from keyvault.management.json_command import JsonCommand
from rotation.management.plan_options import read_time
from rotation.services.rotations.interventions import extend_rotation
from rotation.services.rotations.reports import get_rotation


class Command(JsonCommand):
    help = "Extends the deadline of a rotation, and resumes it if it stalled at the deadline."

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("rotation_id")
        parser.add_argument("--by", required=True, metavar="OPERATOR")
        parser.add_argument("--deadline", required=True, metavar="TIME", help="ISO 8601, UTC without an offset")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        rotation = get_rotation(options["rotation_id"])
        grant = self.grant(self.operator(options["by"]), Permission.ROTATIONS_WRITE, rotation.credential.account)
        extend_rotation(grant, rotation, read_time("deadline", options["deadline"]))
        return {"rotation_id": rotation.rotation_id, "state": get_rotation(rotation.rotation_id).state}
