"""Keep the usage tables small: minutes become hours, hours become days, and old days are deleted.

Each batch is one transaction and moves counts from finer buckets to coarser ones, so that no use is counted twice or
lost. A batch that was killed is repeated. Concurrent workers take different rows.
"""

import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from django.conf import settings
from django.db import transaction
from django.db.models import Max, Q

from keyvault.domain.sources import network_of, product_of
from keyvault.models import KeySource, UsageReporter, UseBucket
from keyvault.models.usage import EXPOSURES, UseOutcome, UseSpan
from keyvault.services.usage.recorder import add_to_buckets
from keyvault.services.work.deletion import MAX_DELETED

_GONE_KEPT_FOR = timedelta(days=7)
"""Retention of reporters that deregistered or were lost."""

_MAX_ROLLED_UP = 5_000
"""Maximum buckets that one batch moves."""

_MAX_KEYS = 200
"""Maximum keys of one batch. It takes the buckets of a key together, because they move to the same coarser ones."""

_ROLL_UP_SECONDS = 5.0
"""Time during which one run starts new batches, in seconds."""


class _Level(NamedTuple):
    """One step of the rollup. `is_exact`: the coarser buckets keep addresses and user agents as they are."""

    span: UseSpan
    into: UseSpan
    kept_days: int
    is_exact: bool


def _levels() -> tuple[_Level, ...]:
    return (
        _Level(UseSpan.MINUTE, UseSpan.HOUR, settings.USAGE_MINUTE_DAYS, is_exact=True),
        _Level(UseSpan.HOUR, UseSpan.DAY, settings.USAGE_HOUR_DAYS, is_exact=False),
    )


def roll_up(now: datetime) -> int:
    """Roll up buckets that are old enough, for some seconds. Return how many; the next run continues."""
    ends_at = time.monotonic() + _ROLL_UP_SECONDS
    moved = 0
    while found := sum(_roll_up_batch(outcome, level, now) for level in _levels() for outcome in UseOutcome):
        moved += found
        if time.monotonic() >= ends_at:
            break
    return moved


def _roll_up_batch(outcome: UseOutcome, level: _Level, now: datetime) -> int:
    """Move some buckets of one coarser period. Return how many were moved; other workers may hold the rest."""
    before = _floor(now - timedelta(days=level.kept_days), level.into)
    fine = UseBucket.objects.filter(outcome=outcome, span=level.span)
    oldest = list(fine.filter(minute__lt=before).order_by("minute").values_list("key_id", "minute")[:_MAX_KEYS])
    if not oldest:
        return 0
    begins_at = _floor(oldest[0][1], level.into)
    ends_at = begins_at + timedelta(minutes=level.into)
    of_keys = fine.filter(key__in={key_id for key_id, _ in oldest}, minute__gte=begins_at, minute__lt=ends_at)
    with transaction.atomic():
        # PostgreSQL: another worker's rows are skipped. SQLite: only one transaction writes.
        rows = of_keys.order_by("key_id", "minute").select_for_update(skip_locked=True)
        found = list(rows.values_list("pk", *_COLUMNS)[:_MAX_ROLLED_UP])
        add_to_buckets(_merge((row[1:] for row in found), level), level.into)
        UseBucket.objects.filter(pk__in=[row[0] for row in found]).delete()
    return len(found)


_COLUMNS = ("key_id", "endpoint", "source", "user_agent", "origin", "outcome", "count", "first_at", "last_at", "minute")


def _merge(rows: Iterable[Any], level: _Level) -> list[tuple[Any, ...]]:
    """Return the coarser buckets of these finer ones, in an order that all workers share."""
    merged: dict[tuple[Any, ...], list[Any]] = {}
    for key_id, endpoint, source, user_agent, origin, outcome, count, first_at, last_at, minute in rows:
        client = (source, user_agent) if level.is_exact else (network_of(source), product_of(user_agent))
        use = (key_id, _floor(minute, level.into), *client, endpoint, origin, outcome)
        known = merged.setdefault(use, [0, first_at, last_at])
        known[:] = known[0] + count, min(known[1], first_at), max(known[2], last_at)
    return [
        (key_id, endpoint, source, user_agent, origin, outcome, *merged[use], minute)
        for use in sorted(merged)
        for key_id, minute, source, user_agent, endpoint, origin, outcome in [use]
    ]


def _floor(at: datetime, span: UseSpan) -> datetime:
    """Return the beginning of the period of this span, which begins at midnight UTC or a multiple of it later."""
    seconds = 60 * span
    return datetime.fromtimestamp(at.timestamp() // seconds * seconds, UTC)


def forget_old(now: datetime) -> None:
    """Delete buckets older than the retention, some thousands at a time, sources without any, and old reporters.

    Kept permanently: a key's total with its first and last use, suspected exposures, and when a reporter was last lost,
    because that restarts a silence. Evidence stores its own copy of what it relies on.
    """
    oldest = now - timedelta(days=settings.USAGE_DAYS)
    found: list[tuple[int, str]] = []
    for outcome in UseOutcome:
        if outcome not in EXPOSURES:
            # The last use decides: a coarse bucket begins before it.
            old = UseBucket.objects.filter(
                outcome=outcome, span__in=UseSpan, minute__lt=oldest, last_at__lt=oldest
            ).values_list("pk", "key_id")
            found += old[: MAX_DELETED - len(found)]
    # Before their buckets, by which a run that is repeated after a failure finds them.
    is_silent = ~Q(last_at__gte=oldest) & ~Q(denied_at__gte=oldest)
    KeySource.objects.filter(is_silent, key__in={key_id for _, key_id in found}).delete()
    UseBucket.objects.filter(pk__in=[pk for pk, _ in found]).delete()
    long_ago = now - _GONE_KEPT_FOR
    UsageReporter.objects.filter(stopped_at__lt=long_ago).delete()
    lost = UsageReporter.objects.filter(lost_at__isnull=False)
    for environment, last_at in lost.values_list("environment").annotate(at=Max("lost_at")):
        lost.filter(environment=environment, lost_at__lt=min(long_ago, last_at)).delete()
