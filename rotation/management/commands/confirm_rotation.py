"""Confirm for the merchant that the replacement is in use."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.decision import Grant
from rotation.management.intervention import InterventionCommand
from rotation.models import Rotation
from rotation.services.rotations.interventions import confirm_rotation


class Command(InterventionCommand):
    help = (
        "Confirm for the merchant that the replacement of a public key, or of a credential without traffic, is in use."
    )

    def add_options(self, parser: CommandParser) -> None:
        super().add_options(parser)
        parser.add_argument("--reason", required=True, help="who informed you, and how")

    def intervene(self, grant: Grant, rotation: Rotation, options: Mapping[str, Any]) -> None:
        confirm_rotation(grant, rotation, options["reason"])
