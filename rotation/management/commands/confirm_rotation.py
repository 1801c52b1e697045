"""Confirm for the merchant that the replacement is in use."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.permissions import Permission
from keyvault.management.json_command import JsonCommand
from rotation.services.rotations.interventions import confirm_rotation
from rotation.services.rotations.reports import get_rotation


class Command(JsonCommand):
    help = (
        "Confirms for the merchant that the replacement of a public key, or of a credential without traffic, is in use."
    )

    def add_options(self, parser: CommandParser) -> None:
        parser.add_argument("rotation_id")
        parser.add_argument("--by", required=True, metavar="OPERATOR")
        parser.add_argument("--reason", required=True, help="who informed you, and how")

    def answer(self, options: Mapping[str, Any]) -> dict[str, Any]:
        rotation = get_rotation(options["rotation_id"])
        grant = self.grant(self.operator(options["by"]), Permission.ROTATIONS_WRITE, rotation.credential.account)
        confirm_rotation(grant, rotation, options["reason"])
        return {"rotation_id": rotation.rotation_id, "state": get_rotation(rotation.rotation_id).state}
