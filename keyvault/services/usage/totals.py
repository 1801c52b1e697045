"""Totals of all uses by environment, outcome and time, for the console's charts.

A minute has a bucket for each active client, so no page reads buckets. The worker adds up each slot once, shortly after
its end, or later if no worker ran then. It adds up the current slot, too, while that has few buckets.
"""

from collections import Counter
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from itertools import islice
from time import monotonic

from django.conf import settings
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

_LATE = timedelta(minutes=1)
"""Delay between the end of a slot and its total, for counts that arrive late. Later counts are not included."""

_ROLL_UP_MARGIN = timedelta(hours=1)
"""Distance from the retention of minutes within which a slot is not added up: a concurrent rollup moves whole hours."""

_RUN_SECONDS = 5.0
"""Time after which a run begins with no further slot that has ended, in seconds."""

_ENDED = (Environment.SANDBOX, UseOutcome.PROBED)
"""Environment and outcome of the row, without uses, that marks a slot as added up after its end. Probes have no totals.
"""

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


def _add_up(slot: datetime) -> Counter[tuple[str, str]]:
    """Return the uses of a slot by environment and outcome.

    Reads minute by minute and in batches: a join would read whole tables.
    """
    totals: Counter[tuple[str, str]] = Counter()
    minute = timedelta(minutes=1)
    for number in range(int(SLOT / minute)):
        found = _buckets(slot + number * minute, minute).values_list("context_id", "count")[:_MAX_PER_MINUTE]
        rows = found.iterator(_BATCH)
        while batch := list(islice(rows, _BATCH)):
            contexts = UseContext.objects.filter(pk__in=[pk for pk, _ in batch], outcome__in=_COUNTED)
            of = {
                pk: (environment, outcome)
                for pk, environment, outcome in contexts.values_list("pk", "key__account_environment", "outcome")
            }
            for pk, count in batch:
                if pk in of:
                    totals[of[pk]] += count
    return totals


def write_totals(now: datetime) -> None:
    """Replace the totals of the slots that have ended since the last run, and of the current slot if it is small.

    Begins with the oldest slot. After some seconds it begins with no further one; the next run continues.
    """
    ends_at = monotonic() + _RUN_SECONDS
    for slot in _list_ended(now):
        _replace(slot, _add_up(slot), is_ended=True)
        if monotonic() >= ends_at:
            break
    current = start_of_slot(now)
    if _buckets(current, SLOT).values("pk")[: _MAX_LIVE + 1].count() <= _MAX_LIVE:
        _replace(current, _add_up(current))


def _list_ended(now: datetime) -> list[datetime]:
    """Return the slots to add up after their end, the oldest first: those after the last one that is marked.

    Without a marked one, only the last slot. Slots whose minutes may have been rolled up are left out.
    """
    end = start_of_slot(now - _LATE)
    environment, outcome = _ENDED
    marked = UsageTotal.objects.filter(at__lt=end, environment=environment, outcome=outcome).order_by("-at")
    last = marked.values_list("at", flat=True).first()
    if last is None:
        return [end - SLOT]
    kept_for = min(timedelta(days=settings.USAGE_MINUTE_DAYS) - _ROLL_UP_MARGIN, KEPT_FOR)
    first = max(last + SLOT, start_of_slot(now - kept_for))
    return [first + number * SLOT for number in range((end - first) // SLOT)]


def _replace(slot: datetime, totals: Counter[tuple[str, str]], *, is_ended: bool = False) -> None:
    if is_ended:
        totals[_ENDED] = 0
    UsageTotal.objects.bulk_create(
        [
            UsageTotal(at=slot, environment=environment, outcome=outcome, count=count)
            for (environment, outcome), count in sorted(totals.items())
        ],
        update_conflicts=True,
        update_fields=["count"],
        unique_fields=["at", "environment", "outcome"],
    )


def read_totals(environments: Collection[Environment], since: datetime) -> dict[datetime, dict[str, int]]:
    """Return the totals of these environments by slot and outcome. A slot without uses is absent."""
    rows = UsageTotal.objects.filter(at__gte=since, environment__in=environments, outcome__in=_COUNTED).order_by()
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
