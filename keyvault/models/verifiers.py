"""Processes that answer from memory: how far each has followed the change feed, and when it got there."""

from django.db import models

from keyvault.models.columns import at


class Verifier(models.Model):
    """One process that judges keys. `confirmed_sequence`: it has applied every change up to there, and none that is
    lower can still appear.

    `seen_at` is when it last said so, by the database's clock: `staleness_ms` later it no longer says yes from
    memory, whatever became of it, so that nobody has to wait for it any longer.
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
    """When a verifier got as far as this sequence: one row for each step that it took. Kept for a while."""

    verifier = models.ForeignKey(Verifier, models.CASCADE, related_name="confirmations")
    sequence = models.PositiveBigIntegerField()
    at = models.DateTimeField(db_index=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["verifier", "sequence"], name="confirmation_unique")]

    def __str__(self) -> str:
        return f"{self.verifier_id}: {self.sequence}"
