"""Who used which key, when: facts that rotation takes as evidence. Counted, never part of a verdict."""

from django.db import models

from keyvault.models.columns import at, choice, choices_check
from keyvault.models.keys import Key


class UseOutcome(models.TextChoices):
    """What became of a presented key, once possession was proved.

    `denied`: the key was good, but the request was refused for another reason; `refused`: the key was suspended.
    """

    ALLOWED = "allowed"
    DENIED = "denied"
    REFUSED = "refused"
    PROBED = "probed"
    EXPOSED_IN_URL = "exposed_in_url"
    EXPOSED_IN_BROWSER = "exposed_in_browser"


SIGNS_OF_LIFE = (UseOutcome.ALLOWED, UseOutcome.DENIED)
"""Somebody holds the key and goes on using it: no silence. Only what was allowed proves anything."""

EXPOSURES = (UseOutcome.EXPOSED_IN_URL, UseOutcome.EXPOSED_IN_BROWSER)


class KeyUse(models.Model):
    """Real, allowed, non-dry verifications of a key, all told."""

    key = models.OneToOneField(Key, models.PROTECT, primary_key=True, related_name="use")
    first_at = models.DateTimeField()
    last_at = models.DateTimeField()
    count = models.PositiveBigIntegerField(default=0)

    def __str__(self) -> str:
        return f"{self.key_id}: {self.count}"


class UseBucket(models.Model):
    """The same by minute, source, user agent, endpoint and, of a public key, the page's origin.

    Beside them, calls denied for other reasons than the key; attempts on a suspended key; test calls of our own,
    which count for nothing (`probed`); and suspected exposures: a key that was proved to stand in a URL, or a
    private one that came from a browser.
    """

    key = models.ForeignKey(Key, models.PROTECT, related_name="use_buckets", db_index=False)
    minute = models.DateTimeField()
    source = models.CharField(max_length=64)
    user_agent = models.CharField(max_length=120, blank=True)
    endpoint = models.CharField(max_length=100, blank=True)
    origin = models.CharField(max_length=120, blank=True)
    outcome = choice(UseOutcome)
    count = models.PositiveIntegerField(default=0)
    first_at = models.DateTimeField()
    last_at = models.DateTimeField()

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["key", "minute", "source", "user_agent", "endpoint", "origin", "outcome"],
                name="use_bucket_unique",
            ),
            choices_check("use_outcome", "outcome", UseOutcome),
        ]
        indexes = [
            # Of columns that never change, so that a count going up touches no index (PostgreSQL: as long as its page
            # has room, which migration 0008 leaves).
            models.Index(fields=["key", "outcome", "minute"], name="use_by_minute"),
            models.Index(fields=["key", "outcome", "source"], name="use_by_source"),
            models.Index(fields=["minute"], name="use_by_age"),
        ]

    def __str__(self) -> str:
        return f"{self.key_id} {self.minute:%H:%M} {self.source}: {self.count}"


class UsageReporter(models.Model):
    """A process that verifies. All its uses up to `flushed_through_at` are in the tables above.

    A reporter that stopped in good order flushed first; one that was lost may have taken uses with it, and
    `lost_at` is when that was noticed. `report`: the number of the last one that is written, so that one whose answer
    was lost adds nothing when it is told again. `peppers`: of each set that it serves the newest version that it has
    loaded, with all before it, and 0 for none; None: it is of a release that does not say.
    """

    reporter_id = models.CharField(primary_key=True, max_length=64)
    started_at = models.DateTimeField()
    flushed_through_at = models.DateTimeField()
    report = models.PositiveBigIntegerField(default=0, db_default=0)
    peppers = models.JSONField(null=True, blank=True)
    stopped_at = at()
    lost_at = at()

    def __str__(self) -> str:
        return self.reporter_id
