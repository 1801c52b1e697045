"""Totals of all uses by environment, outcome and time, for the console's charts.

The buckets of one minute are as many as the keys in use. Each run adds those of the last minutes up, so that no page
reads them. A run reads the minutes that reporters may still change, and replaces their totals.
"""

from collections import Counter
from collections.abc import Collection
from datetime import UTC, datetime, timedelta

from django.db.models import Sum

from keyvault.domain.environments import Environment
from keyvault.models import UsageTotal, UseBucket
from keyvault.models.usage import UseOutcome, UseSpan
from keyvault.services.work import leases
from keyvault.services.work.deletion import delete_batch

SLOT = timedelta(minutes=15)
"""Length of a slot."""

KEPT_FOR = timedelta(days=8)
"""Retention: the last day is compared with the one before, and a week is shown."""

_READ_AGAIN = timedelta(minutes=5)
"""How long a reporter's late counts may change a slot after its end. Later ones are not in the totals."""

_COUNTED = (UseOutcome.ALLOWED, UseOutcome.DENIED, UseOutcome.REFUSED)


def total_due(now: datetime) -> None:
    """Write the totals of the slots that may have changed, unless another worker does."""
    lease = leases.claim("usage:totals", now)
    if lease is not None:
        try:
            write_totals(now)
        finally:
            leases.release(lease)


def write_totals(now: datetime) -> None:
    """Replace the totals of the current slot, and of the one before while counts may arrive late."""
    first = start_of_slot(now - _READ_AGAIN)
    minutes = UseBucket.objects.filter(is_exposure=False, span=UseSpan.MINUTE, minute__gte=first)
    rows = (
        minutes.filter(context__outcome__in=_COUNTED)
        .values_list("minute", "context__outcome", "context__key__account_environment")
        .annotate(total=Sum("count"))
        .order_by()
    )
    totals: Counter[tuple[datetime, str, str]] = Counter()
    for minute, outcome, environment, total in rows:
        totals[start_of_slot(minute), environment, outcome] += total
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
