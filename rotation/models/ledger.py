"""The ledger of side effects."""

from django.db import models
from django.db.models import Q

from keyvault.models.columns import at, choice, choices_check
from keyvault.models.keys import Key
from rotation.domain.events import RotationState
from rotation.models.rotations import Rotation


class LedgerState(models.TextChoices):
    STARTED = "started"
    DONE = "done"
    FAILED = "failed"


class LedgerEntry(models.Model):
    """One attempt of one side effect, written before it, so that a dead worker's intent is known."""

    rotation = models.ForeignKey(Rotation, models.PROTECT, related_name="ledger")
    step = choice(RotationState)
    key = models.ForeignKey(Key, models.PROTECT, null=True, blank=True, related_name="ledger")
    state = choice(LedgerState, default=LedgerState.STARTED)
    started_at = models.DateTimeField()
    finished_at = at()
    detail = models.CharField(max_length=300, blank=True)

    class Meta:
        constraints = [choices_check("ledger_state", "state", LedgerState)]
        indexes = [
            models.Index(fields=["rotation", "started_at"], name="ledger_by_rotation"),
            # Pending copies that may exist.
            models.Index(fields=["started_at"], name="ledger_pending", condition=Q(step="staged", state="started")),
        ]

    def __str__(self) -> str:
        return f"{self.rotation_id} {self.step} {self.state}"
