"""End a rotation: cancel it before delivery, roll it back afterwards."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.decision import Grant
from rotation.management.intervention import InterventionCommand
from rotation.models import Rotation
from rotation.services.rotations.interventions import abort_rotation


class Command(InterventionCommand):
    help = "End a rotation: cancel it before delivery; afterwards deliver the old key again while both keys verify."

    def add_options(self, parser: CommandParser) -> None:
        super().add_options(parser)
        parser.add_argument("--reason", required=True)

    def intervene(self, grant: Grant, rotation: Rotation, options: Mapping[str, Any]) -> None:
        abort_rotation(grant, rotation, options["reason"])
