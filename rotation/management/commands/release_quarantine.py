"""Release a key that an operator holds in quarantine."""

from collections.abc import Mapping
from typing import Any

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from rotation.management.intervention import InterventionCommand
from rotation.models import Rotation
from rotation.services.rotations.interventions import release_quarantine


class Command(InterventionCommand):
    help = "Release a key that an operator holds in quarantine; the quarantine begins again."
    permission = Permission.KEYS_RESUME

    def intervene(self, grant: Grant, rotation: Rotation, options: Mapping[str, Any]) -> None:
        release_quarantine(grant, rotation)
