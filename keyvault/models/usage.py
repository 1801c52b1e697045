"""Counts of key uses by time and source, which rotation uses as evidence. Never part of a verdict."""

from django.db import models

from keyvault.domain.environments import Environment
from keyvault.domain.sources import MAX_NAME_LENGTH
from keyvault.models.columns import at, choice, choices_check
from keyvault.models.keys import Key


class UseOutcome(models.TextChoices):
    """The outcome for a presented key whose possession was proved.

    `denied`: the key was valid, but the request was refused for another reason; `refused`: the key was suspended.
    """

    ALLOWED = "allowed"
    DENIED = "denied"
    REFUSED = "refused"
    PROBED = "probed"
    EXPOSED_IN_URL = "exposed_in_url"
    EXPOSED_IN_BROWSER = "exposed_in_browser"


SIGNS_OF_LIFE = (UseOutcome.ALLOWED, UseOutcome.DENIED)
"""Outcomes that show that the key is still in use. Only allowed requests are proof of a rotation."""

EXPOSURES = (UseOutcome.EXPOSED_IN_URL, UseOutcome.EXPOSED_IN_BROWSER)


class UseSpan(models.IntegerChoices):
    """Length of a bucket, in minutes. Buckets roll up from each length to the next."""

    MINUTE = 1
    HOUR = 60
    DAY = 1_440


HAS_TRAFFIC = models.Q(first_minute__isnull=False)
"""Keys with uses other than acknowledgements and the like, see `keyvault.access.catalog.WITHOUT_TRAFFIC`."""


class KeyUse(models.Model):
    """The total of a key's allowed verifications, without dry runs and test calls.

    `acknowledgements`: the verifications that are no traffic, see `keyvault.access.catalog.WITHOUT_TRAFFIC`.
    `minutes`: the number of distinct minutes with traffic. `first_minute`, `last_minute`: the first and the last of
    these minutes, counted from the epoch. A late report may make `minutes` too small, never too large.
    """

    key = models.OneToOneField(Key, models.PROTECT, primary_key=True, related_name="use")
    first_at = models.DateTimeField()
    last_at = models.DateTimeField()
    count = models.PositiveBigIntegerField(default=0)
    acknowledgements = models.PositiveIntegerField(default=0)
    minutes = models.PositiveIntegerField(default=0)
    first_minute = models.PositiveIntegerField(null=True)
    last_minute = models.PositiveIntegerField(null=True)

    def __str__(self) -> str:
        return f"{self.key_id}: {self.count}"


class KeyAttempt(models.Model):
    """The last verification of a key with an outcome other than `allowed`. `KeyUse` has the allowed ones.

    `unknown_at`: the last refused attempt by a source without a row in `KeySource` when it was reported.
    """

    key = models.ForeignKey(Key, models.PROTECT, related_name="last_attempts", db_index=False)
    outcome = choice(UseOutcome)
    last_at = models.DateTimeField()
    unknown_at = at()

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["key", "outcome"], name="key_attempt_unique"),
            choices_check("attempt_outcome", "outcome", UseOutcome),
        ]

    def __str__(self) -> str:
        return f"{self.key_id} {self.outcome}"


class UseContext(models.Model):
    """A kind of use of a key: source, user agent, endpoint, the page's origin for a public key, and the outcome.

    Kept as long as its last bucket. A context of buckets of a day has a network (or token) as `source` and the name of
    a product as `user_agent`: a source's address is deleted with its last bucket of an hour.

    Other outcomes are counted, too: denials for reasons other than the key, attempts with a suspended key, test calls
    (`probed`), and suspected exposures. These are a proved key in a URL, or a private key from a browser.
    """

    key = models.ForeignKey(Key, models.PROTECT, related_name="use_contexts", db_index=False)
    outcome = choice(UseOutcome)
    source = models.CharField(max_length=64)
    user_agent = models.CharField(max_length=120, blank=True)
    endpoint = models.CharField(max_length=100, blank=True)
    origin = models.CharField(max_length=120, blank=True)

    class Meta:
        constraints = [
            # The condition is always true. Without one, PostgreSQL would treat the columns as a key that foreign keys
            # refer to. The reporters' upsert would then block the commits of new buckets of the row: they could
            # deadlock.
            models.UniqueConstraint(
                fields=["key", "outcome", "source", "user_agent", "endpoint", "origin"],
                name="use_context_unique",
                condition=models.Q(key__isnull=False),
            ),
            choices_check("use_outcome", "outcome", UseOutcome),
        ]
        indexes = [models.Index(fields=["key", "outcome", "-id"], name="use_context_newest")]

    def __str__(self) -> str:
        return f"{self.key_id} {self.source}: {self.outcome}"


NO_EXPOSURE = (False,)
"""For `is_exposure__in`. Django writes `is_exposure=False` as `NOT is_exposure`, for which SQLite uses no index."""


class UseBucket(models.Model):
    """Uses in one context by time. This is the largest table, so it repeats no text.

    `span`: the length of the bucket, which begins at `minute`. After some days minutes roll up into hours, and hours
    later into days. `is_exposure`: the context's outcome is one of EXPOSURES, whose buckets are kept.
    """

    # In this order PostgreSQL needs no padding between the columns.
    minute = models.DateTimeField()
    first_at = models.DateTimeField()
    last_at = models.DateTimeField()
    context = models.ForeignKey(UseContext, models.PROTECT, related_name="buckets", db_index=False)
    count = models.PositiveIntegerField(default=0)
    span = models.PositiveSmallIntegerField(choices=UseSpan, default=UseSpan.MINUTE)
    is_exposure = models.BooleanField(default=False)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["context", "span", "minute"], name="use_bucket_unique")]
        indexes = [
            # Columns that never change, so that incrementing a count updates no index (PostgreSQL: while the page has
            # free space, which the migration reserves).
            models.Index(fields=["is_exposure", "span", "minute"], name="use_by_age"),
        ]

    def __str__(self) -> str:
        return f"{self.context_id} {self.minute:%H:%M}: {self.count}"


class UsageTotal(models.Model):
    """The uses of all keys of an environment in one slot, which begins at `at`, for the console's charts.

    Derived from the buckets of a minute, so no evidence. `services.usage.totals` writes it. The row of sandbox and
    `probed`, with count 0, marks a slot whose totals are complete.
    """

    at = models.DateTimeField()
    environment = choice(Environment)
    outcome = choice(UseOutcome)
    count = models.PositiveBigIntegerField(default=0)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["at", "environment", "outcome"], name="usage_total_unique"),
            choices_check("usage_total_environment", "environment", Environment),
            choices_check("usage_total_outcome", "outcome", UseOutcome),
        ]

    def __str__(self) -> str:
        return f"{self.environment} {self.at:%H:%M} {self.outcome}: {self.count}"


class KeySource(models.Model):
    """Use of a private key by one source, kept as long as its last bucket.

    `last_at` and the minutes, counted from the epoch, cover allowed calls only. `longest_gap_minutes`: the longest gap
    so far between two consecutive minutes with such calls. `denied_at`: the last call that was denied for a reason
    other than the key. `refused_at`: the last call that was refused because the key was suspended.

    A refused call adds no row, so that a holder of a suspended key cannot add sources.
    """

    key = models.ForeignKey(Key, models.PROTECT, related_name="sources", db_index=False)
    name = models.CharField(max_length=MAX_NAME_LENGTH)
    first_minute = models.PositiveIntegerField(null=True)
    last_minute = models.PositiveIntegerField(null=True)
    longest_gap_minutes = models.PositiveIntegerField(default=0)
    last_at = at()
    denied_at = at()
    refused_at = at()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["key", "name"], name="key_source_unique")]
        indexes = [
            # Partial, so that the uses of an active key update no index.
            models.Index(
                fields=["key", "-refused_at"],
                name="key_source_refused",
                condition=models.Q(refused_at__isnull=False),
            ),
        ]

    def __str__(self) -> str:
        return f"{self.key_id} {self.name}"


class UsageReporter(models.Model):
    """A verifying process. The tables above contain all its uses up to `flushed_through_at`.

    A reporter that deregisters flushes first. A lost one may have unreported uses; `lost_at` is when the loss was
    detected. `report`: the number of the last stored report, so that a repeated report adds nothing. `peppers`: the
    newest loaded version of each served set, which implies the older ones, or 0 for none.
    `environment`: the only one whose keys it verifies; blank: it verifies those of every environment.
    `merchants`: ids of the only ones whose keys it verifies, each between commas; blank: those of every merchant.
    """

    reporter_id = models.CharField(primary_key=True, max_length=64)
    started_at = models.DateTimeField()
    flushed_through_at = models.DateTimeField()
    report = models.PositiveBigIntegerField(default=0, db_default=0)
    peppers = models.JSONField()
    environment = models.CharField(max_length=10, blank=True)
    merchants = models.TextField(blank=True, default="", db_default="")
    stopped_at = at()
    lost_at = at()

    def __str__(self) -> str:
        return self.reporter_id
