"""Waive a source that a rotation waits for."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.decision import Grant
from rotation.management.intervention import InterventionCommand
from rotation.models import Rotation
from rotation.services.rotations.interventions import waive_source


class Command(InterventionCommand):
    help = "Waive a source of the key that is being retired: the rotation no longer waits for its silence."

    def add_options(self, parser: CommandParser) -> None:
        super().add_options(parser)
        parser.add_argument("--source", required=True, help="the name that show_rotation prints")
        parser.add_argument("--reason", required=True, help="why it may be refused")

    def intervene(self, grant: Grant, rotation: Rotation, options: Mapping[str, Any]) -> None:
        waive_source(grant, rotation, options["source"], options["reason"])
