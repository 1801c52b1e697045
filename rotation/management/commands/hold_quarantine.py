"""Hold the key in quarantine suspended."""

from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandParser

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from rotation.management.intervention import InterventionCommand
from rotation.models import Rotation
from rotation.services.rotations.interventions import hold_quarantine


class Command(InterventionCommand):
    help = "Hold the key in quarantine suspended: the rotation neither resumes nor revokes it until release_quarantine."
    permission = Permission.KEYS_SUSPEND

    def add_options(self, parser: CommandParser) -> None:
        super().add_options(parser)
        parser.add_argument("--reason", required=True, help="why it must stay suspended")

    def intervene(self, grant: Grant, rotation: Rotation, options: Mapping[str, Any]) -> None:
        hold_quarantine(grant, rotation, options["reason"])
