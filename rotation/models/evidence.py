"""Evidence of the facts of a rotation."""

from django.db import models

from keyvault.models.columns import choice, choices_check, created_at
from keyvault.models.recording import RecordedModel
from rotation.models.rotations import Rotation


class EvidenceKind(models.TextChoices):
    ACCEPTED = "accepted"
    DELIVERED = "delivered"
    USED = "used"
    SILENT = "silent"
    UNTRIED = "untried"
    TRIED = "tried"
    CONFIRMED = "confirmed"
    WAIVED = "waived"
    SOURCE_WAIVED = "source_waived"
    WRITTEN_BACK = "written_back"


class Evidence(RecordedModel):
    """The observations that proved a fact; the revoking transaction cites these rows."""

    evidence_id = models.CharField(primary_key=True, max_length=32)
    rotation = models.ForeignKey(Rotation, models.PROTECT, related_name="evidence")
    kind = choice(EvidenceKind)
    seen = models.JSONField()
    created_at = created_at()

    class Meta:
        constraints = [choices_check("evidence_kind", "kind", EvidenceKind)]

    def __str__(self) -> str:
        return f"{self.kind} ({self.evidence_id})"

    def alters(self) -> None:
        return None
