"""Totals of all uses by environment, outcome and time, for the console's charts.

A minute has a bucket for each active client, so no page reads buckets. The worker adds up each slot once, shortly after
its end. It adds up the current slot, too, while that has few buckets.
"""

from collections import Counter
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from itertools import islice

from django.db.models import QuerySet

from keyvault.domain.environments import Environment
from keyvault.models import UsageTotal, UseBucket, UseContext
from keyvault.models.usage import NO_EXPOSURE, UseOutcome, UseSpan
from keyvault.services.work import leases
from keyvault.services.work.deletion import delete_batch

SLOT = timedelta(minutes=15)
"""Length of a slot."""

KEPT_FOR = timedelta(days=8)
"""Retention: the last day is compared with the one before, and a week is shown."""

_READ_AGAIN = timedelta(minutes=1)
"""How long after its end a slot is added up again, for counts that arrive late. Counts after that are not included."""

_EVERY = timedelta(minutes=1)
"""Interval of the job."""

_MAX_LIVE = 20_000
"""Maximum buckets of a slot that is added up before its end."""

_MAX_PER_MINUTE = 2_000_000
"""Maximum buckets of one minute that are added up. With more, the total is a lower bound."""

_BATCH = 2_000
"""Number of buckets whose contexts are read by one query."""

_COUNTED = (UseOutcome.ALLOWED, UseOutcome.DENIED, UseOutcome.REFUSED)


def total_due(now: datetime) -> None:
    """Write the totals of the slots that may have changed, unless another worker does."""
    lease = leases.claim("usage:totals", now)
    if lease is not None:
        try:
            write_totals(now)
        finally:
            leases.release(lease)


def _buckets(at: datetime, length: timedelta) -> QuerySet[UseBucket]:
    return UseBucket.objects.filter(
        is_exposure__in=NO_EXPOSURE, span=UseSpan.MINUTE, minute__gte=at, minute__lt=at + length
    ).order_by()


def _add_up(slot: datetime, totals: "Counter[tuple[datetime, str, str]]") -> None:
    """Add the uses of a slot to the totals, minute by minute and in batches: a join would read whole tables."""
    minute = timedelta(minutes=1)
    for number in range(int(SLOT / minute)):
        found = _buckets(slot + number * minute, minute).values_list("context_id", "count")[:_MAX_PER_MINUTE]
        rows = found.iterator(_BATCH)
        while batch := list(islice(rows, _BATCH)):
            contexts = UseContext.objects.filter(pk__in=[pk for pk, _ in batch], outcome__in=_COUNTED)
            of = {
                pk: (outcome, environment)
                for pk, outcome, environment in contexts.values_list("pk", "outcome", "key__account_environment")
            }
            for pk, count in batch:
                if pk in of:
                    outcome, environment = of[pk]
                    totals[slot, environment, outcome] += count


def write_totals(now: datetime) -> None:
    """Replace the totals of the current slot, if it is small, and of the one before while counts may arrive late."""
    current = start_of_slot(now)
    totals: Counter[tuple[datetime, str, str]] = Counter()
    if now < current + _READ_AGAIN + _EVERY:
        _add_up(current - SLOT, totals)
    if _buckets(current, SLOT).values("pk")[: _MAX_LIVE + 1].count() <= _MAX_LIVE:
        _add_up(current, totals)
    UsageTotal.objects.bulk_create(
        [
            UsageTotal(at=at, environment=environment, outcome=outcome, count=count)
            for (at, environment, outcome), count in sorted(totals.items())
        ],
        update_conflicts=True,
        update_fields=["count"],
        unique_fields=["at", "environment", "outcome"],
    )


def read_totals(environments: Collection[Environment], since: datetime) -> dict[datetime, dict[str, int]]:
    """Return the totals of these environments by slot and outcome. A slot without uses is absent."""
    rows = UsageTotal.objects.filter(at__gte=since, environment__in=environments).order_by()
    found: dict[datetime, dict[str, int]] = {}
    for at, outcome, count in rows.values_list("at", "outcome", "count"):
        slot = found.setdefault(at, {})
        slot[outcome] = slot.get(outcome, 0) + count
    return found


def start_of_slot(at: datetime) -> datetime:
    """Return when the slot of a moment begins."""
    seconds = int(at.timestamp())
    return datetime.fromtimestamp(seconds - seconds % int(SLOT.total_seconds()), UTC)


def forget_old(now: datetime) -> int:
    """Delete old totals. Return how many."""
    return delete_batch(UsageTotal.objects.filter(at__lt=now - KEPT_FOR).order_by("at"))
