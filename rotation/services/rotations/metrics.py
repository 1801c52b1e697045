"""Metrics of rotations that need the database."""

from keyvault.backends import meters
from rotation.domain.events import RotationState
from rotation.domain.states import CLOSED
from rotation.models import Rotation

_MAX_COUNTED = 10_000
"""Maximum rotations of a state that are counted."""


def measure_rotations() -> None:
    """Set the meters of open and stalled rotations. Each count ends at _MAX_COUNTED rows of the index by state."""
    for state in RotationState:
        if state not in CLOSED:
            meters.note_rotations(state, Rotation.objects.filter(state=state)[:_MAX_COUNTED].count())
