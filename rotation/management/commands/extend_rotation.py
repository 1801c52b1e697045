"""Extend the deadline of a rotation."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.decision import Grant
from rotation.management.intervention import InterventionCommand
from rotation.management.plan_options import read_time
from rotation.models import Rotation
from rotation.services.rotations.interventions import extend_rotation


class Command(InterventionCommand):
    help = "Extend the deadline of a rotation, and resume it if it stalled at the deadline."

    def add_options(self, parser: CommandParser) -> None:
        super().add_options(parser)
        parser.add_argument("--deadline", required=True, metavar="TIME", help="ISO 8601, UTC without an offset")

    def intervene(self, grant: Grant, rotation: Rotation, options: Mapping[str, Any]) -> None:
        extend_rotation(grant, rotation, read_time("deadline", options["deadline"]))
