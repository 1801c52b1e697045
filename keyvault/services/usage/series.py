"""Uses of keys over time, for charts."""

from collections.abc import Collection
from datetime import UTC, datetime, timedelta

from django.conf import settings
from django.db.models import Sum

from keyvault.models import UseBucket, UseContext
from keyvault.models.usage import SIGNS_OF_LIFE, UseSpan

MAX_CONTEXTS = 200
"""Maximum rows of `UseContext` that one chart adds up. Each key and outcome has an equal share, for its newest rows.

The holder of a key can cause any number of rows. They displace none of another key.
"""

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


def count_uses(key_ids: Collection[str], since: datetime, until: datetime, step: timedelta) -> dict[str, list[int]]:
    """Return the uses of each key, allowed or denied, in each step from that of `since` to that of `until`.

    Two queries for all keys.
    """
    begin = floor(since, step)
    counts = {key_id: [0] * (int((floor(until, step) - begin) / step) + 1) for key_id in key_ids}
    key_of = _find_contexts(key_ids)
    buckets = UseBucket.objects.filter(context__in=list(key_of), minute__gte=begin, minute__lte=until).order_by()
    for context_id, minute, count in buckets.values_list("context_id", "minute").annotate(Sum("count")):
        counts[key_of[context_id]][int((minute - begin) / step)] += count
    return counts


def _find_contexts(key_ids: Collection[str]) -> dict[int, str]:
    """Return the contexts that count, each with its key."""
    pairs = [(key_id, outcome) for key_id in key_ids for outcome in SIGNS_OF_LIFE]
    if not pairs:
        return {}
    share = max(MAX_CONTEXTS // len(pairs), 1)
    newest = (
        UseContext.objects.filter(key=key_id, outcome=outcome).order_by("-pk").values("pk")[:share]
        for key_id, outcome in pairs
    )
    # The limit is in a subquery: SQLite allows none in a part of a union.
    parts = [UseContext.objects.filter(pk__in=ids).order_by().values_list("pk", "key_id") for ids in newest]
    return dict(parts[0].union(*parts[1:], all=True))
