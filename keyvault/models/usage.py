"""Who used which key, when: facts that rotation takes as evidence. Counted, never part of a verdict."""

from django.db import models

from keyvault.models.columns import at, choice, choices_check
from keyvault.models.keys import Key


class Outcome(models.TextChoices):
    ALLOWED = "allowed"
    REFUSED = "refused"
    EXPOSED_IN_URL = "exposed_in_url"
    EXPOSED_IN_BROWSER = "exposed_in_browser"


class KeyUse(models.Model):
    """Real, allowed, non-dry verifications of a key, all told."""

    key = models.OneToOneField(Key, models.PROTECT, primary_key=True, related_name="use")
    first_at = models.DateTimeField()
    last_at = models.DateTimeField()
    count = models.PositiveBigIntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.key_id}: {self.count}"


class UseBucket(models.Model):
    """The same by minute, source, user agent and endpoint. Beside them, attempts on a suspended key, and suspected
    exposures: a key that was proved to stand in a URL, or a private one that came from a browser."""

    key = models.ForeignKey(Key, models.PROTECT, related_name="use_buckets")
    minute = models.DateTimeField()
    source = models.CharField(max_length=64)
    user_agent = models.CharField(max_length=120, blank=True)
    endpoint = models.CharField(max_length=100, blank=True)
    outcome = choice(Outcome)
    count = models.PositiveIntegerField(default=0)
    first_at = models.DateTimeField()
    last_at = models.DateTimeField()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["key", "minute", "source", "user_agent", "endpoint", "outcome"],
                name="use_bucket_unique",
            ),
            choices_check("use_outcome", "outcome", Outcome),
        ]

    def __str__(self) -> str:
        return f"{self.key_id} {self.minute:%H:%M} {self.source}: {self.count}"


class UsageReporter(models.Model):
    """A process that verifies. All its uses up to `flushed_through_at` are in the tables above.

    A reporter that stopped in good order flushed first; one that was lost may have taken uses with it, and
    `lost_at` is when that was noticed.
    """

    reporter_id = models.CharField(primary_key=True, max_length=64)
    started_at = models.DateTimeField()
    flushed_through_at = models.DateTimeField()
    stopped_at = at()
    lost_at = at()

    def __str__(self) -> str:
        return self.reporter_id
