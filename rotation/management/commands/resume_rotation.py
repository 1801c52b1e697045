"""Resume a stalled rotation where it stalled."""

from collections.abc import Mapping
from typing import Any

from keyvault.access.decision import Grant
from rotation.management.intervention import InterventionCommand
from rotation.models import Rotation
from rotation.services.rotations.interventions import resume_rotation


class Command(InterventionCommand):
    help = "Resume a stalled rotation where it stalled, with its timers restarted. Fix the cause first."

    def intervene(self, grant: Grant, rotation: Rotation, options: Mapping[str, Any]) -> None:
        resume_rotation(grant, rotation)
