"""Uses of a key over time, for charts."""

from collections.abc import Collection
from datetime import UTC, datetime, timedelta

from django.conf import settings
from django.db.models import Sum

from keyvault.models import UseBucket, UseContext
from keyvault.models.usage import SIGNS_OF_LIFE, UseOutcome, UseSpan

MAX_CONTEXTS = 200
"""Maximum kinds of use of a key that a chart adds up, the newest. A holder of the key can add any number."""

_PARTS = 60
"""Approximate number of values of a chart."""

_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1_440, 2_880, 10_080)
"""Lengths of a step in minutes, each a whole number of buckets."""


def choose_step(since: datetime, until: datetime, now: datetime) -> timedelta:
    """Return the length of a step, so that about 60 steps cover the period.

    A step is not shorter than the buckets that are kept for the beginning of the period: minutes roll up into hours,
    and hours into days.
    """
    shortest = UseSpan.MINUTE
    for span, days in ((UseSpan.HOUR, settings.USAGE_MINUTE_DAYS), (UseSpan.DAY, settings.USAGE_HOUR_DAYS)):
        if since < now - timedelta(days=days):
            shortest = span
    wanted = max((until - since) / timedelta(minutes=_PARTS), shortest)
    return timedelta(minutes=next((step for step in _STEPS if step >= wanted), _STEPS[-1]))


def floor(at: datetime, step: timedelta) -> datetime:
    """Return the beginning of the step that the time is in. Steps are counted from the epoch."""
    seconds = int(step.total_seconds())
    return datetime.fromtimestamp(int(at.timestamp()) // seconds * seconds, UTC)


def count_uses(
    key_id: str, since: datetime, until: datetime, step: timedelta, outcomes: Collection[UseOutcome] = SIGNS_OF_LIFE
) -> list[int]:
    """Return the number of uses in each step from `since`, which `floor` returned, to the one of `until`."""
    counts = [0] * (int((floor(until, step) - since) / step) + 1)
    contexts = UseContext.objects.filter(key=key_id, outcome__in=outcomes).order_by("-pk").values("pk")[:MAX_CONTEXTS]
    buckets = UseBucket.objects.filter(
        context__in=list(contexts.values_list("pk", flat=True)), minute__gte=since, minute__lte=until
    )
    for minute, count in buckets.order_by().values_list("minute").annotate(Sum("count")):
        counts[int((minute - since) / step)] += count
    return counts


def count_uses_by_key(
    key_ids: Collection[str], since: datetime, until: datetime, step: timedelta
) -> dict[str, list[int]]:
    """Return the uses of each of these keys, as `count_uses` does, in two queries for all keys."""
    steps = int((floor(until, step) - since) / step) + 1
    counts = {key_id: [0] * steps for key_id in key_ids}
    newest = UseContext.objects.filter(key__in=key_ids, outcome__in=SIGNS_OF_LIFE).order_by("-pk")
    key_of = dict(newest.values_list("pk", "key_id")[: MAX_CONTEXTS * 5])
    buckets = UseBucket.objects.filter(context__in=list(key_of), minute__gte=since, minute__lte=until)
    for context_id, minute, count in buckets.values_list("context_id", "minute", "count"):
        counts[key_of[context_id]][int((minute - since) / step)] += count
    return counts
