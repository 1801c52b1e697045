"""Verifiers, which decide from memory, their progress in the change feed, and those that read it over HTTP."""

from django.db import models

from keyvault.models.columns import at


class Verifier(models.Model):
    """One verifying process.

    `entry_point`: the one that it serves, shown in receipts.
    `confirmed_sequence`: it has applied every change up to this number, and no lower number can still appear.
    `seen_at`: when it last confirmed, by the database's clock. After `staleness_ms` without a confirmation it no
    longer allows requests from memory, so that receipts need not wait for it.
    """

    verifier_id = models.CharField(primary_key=True, max_length=64)
    entry_point = models.CharField(max_length=16, db_column="door")  # the name that version 0.2.0 knows
    started_at = models.DateTimeField()
    confirmed_sequence = models.PositiveBigIntegerField(default=0)
    seen_at = models.DateTimeField()
    staleness_ms = models.PositiveIntegerField()
    stopped_at = at()

    class Meta:
        # Without the columns that each report changes, so that a report writes no index.
        indexes = [models.Index(fields=["stopped_at"], name="verifier_stopped")]

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


class FeedReader(models.Model):
    """A verifier that reads the feed over HTTP, with a row in `Verifier` and `UsageReporter` under the same id.

    `lineage`: of the service token that it reads with. `offered_sequence`: the highest sequence that a response has
    offered for confirmation. A reader that has a higher one knows more than this database, which was restored.
    `awaited_sequence`: the one that the reader must confirm next, since `awaited_since` by the database's clock; none
    if it is confirmed.
    """

    reader_id = models.CharField(primary_key=True, max_length=64)
    lineage = models.CharField(max_length=16)
    offered_sequence = models.PositiveBigIntegerField(default=0)
    awaited_sequence = models.PositiveBigIntegerField(default=0, db_default=0)
    awaited_since = at()
    created_at = models.DateTimeField()

    class Meta:
        indexes = [
            models.Index(fields=["lineage"], name="feed_reader_lineage"),
            models.Index(fields=["created_at"], name="feed_reader_created"),
        ]

    def __str__(self) -> str:
        return f"{self.reader_id}: {self.offered_sequence}"
