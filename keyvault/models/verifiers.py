"""Verifiers, which decide from memory, and their progress in the change feed."""

from django.db import models

from keyvault.models.columns import at


class Verifier(models.Model):
    """One verifying process.

    `confirmed_sequence`: it has applied every change up to this number, and no lower number can still appear.
    `seen_at`: when it last confirmed, by the database's clock. After `staleness_ms` without a confirmation it no
    longer allows requests from memory, so that receipts need not wait for it.
    """

    verifier_id = models.CharField(primary_key=True, max_length=64)
    door = models.CharField(max_length=16)
    started_at = models.DateTimeField()
    confirmed_sequence = models.PositiveBigIntegerField(default=0)
    seen_at = models.DateTimeField()
    staleness_ms = models.PositiveIntegerField()
    stopped_at = at()

    def __str__(self) -> str:
        return f"{self.verifier_id}: {self.confirmed_sequence}"


class Confirmation(models.Model):
    """The time at which a verifier confirmed a sequence, stored for a limited time."""

    verifier = models.ForeignKey(Verifier, models.CASCADE, related_name="confirmations")
    sequence = models.PositiveBigIntegerField()
    at = models.DateTimeField(db_index=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["verifier", "sequence"], name="confirmation_unique")]

    def __str__(self) -> str:
        return f"{self.verifier_id}: {self.sequence}"
