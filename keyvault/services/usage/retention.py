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
from django.db.models import Max, OuterRef, Q, Subquery

from keyvault.domain.sources import network_of, product_of
from keyvault.models import KeySource, UsageReporter, UseBucket, UseContext
from keyvault.models.usage import UseSpan
from keyvault.services.usage.recorder import add_to_buckets
from keyvault.services.work.deletion import MAX_DELETED

_GONE_KEPT_FOR = timedelta(days=7)
"""Retention of reporters that deregistered or were lost."""

_MAX_ROLLED_UP = 5_000
"""Maximum buckets that one batch moves."""

_MAX_CONTEXTS = 1_000
"""Maximum contexts of one batch. It takes the buckets of a context together, because they move to the same coarser one.
"""

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
    while found := sum(_roll_up_batch(is_exposure, level, now) for level in _levels() for is_exposure in (False, True)):
        moved += found
        if time.monotonic() >= ends_at:
            break
    return moved


def _roll_up_batch(is_exposure: bool, level: _Level, now: datetime) -> int:
    """Move some buckets of one coarser period. Return how many were moved; other workers may hold the rest."""
    before = _floor(now - timedelta(days=level.kept_days), level.into)
    fine = UseBucket.objects.filter(is_exposure=is_exposure, span=level.span)
    of_age = fine.filter(minute__lt=before).order_by("minute").values_list("context_id", "minute")
    oldest = list(of_age[:_MAX_CONTEXTS])
    if not oldest:
        return 0
    begins_at = _floor(oldest[0][1], level.into)
    ends_at = begins_at + timedelta(minutes=level.into)
    of_contexts = fine.filter(context__in={pk for pk, _ in oldest}, minute__gte=begins_at, minute__lt=ends_at)
    with transaction.atomic():
        # PostgreSQL: another worker's rows are skipped. SQLite: only one transaction writes.
        rows = of_contexts.order_by("context_id", "minute").select_for_update(skip_locked=True)
        found = list(rows.values_list("pk", "context_id", "count", "first_at", "last_at", "minute")[:_MAX_ROLLED_UP])
        contexts = UseContext.objects.in_bulk({row[1] for row in found})
        add_to_buckets(_merge(((contexts[row[1]], *row[2:]) for row in found), level), level.into)
        UseBucket.objects.filter(pk__in=[row[0] for row in found]).delete()
        if not level.is_exact:
            _delete_unused(contexts)
    return len(found)


def _delete_unused(contexts: Iterable[int]) -> None:
    """Delete those of the contexts that have no bucket any more. Call it in the transaction that deleted buckets.

    The lock orders it with other workers, of which the last one sees that no bucket is left. A reporter that begins to
    use a context meanwhile cannot commit, and repeats its report.
    """
    touched = UseContext.objects.filter(pk__in=list(contexts))
    if locked := list(touched.order_by("pk").select_for_update().values_list("pk", flat=True)):
        # A scalar subquery: PostgreSQL may turn NOT EXISTS into a join that reads every bucket.
        bucket = Subquery(UseBucket.objects.filter(context=OuterRef("pk")).values("pk")[:1])
        unused = UseContext.objects.filter(pk__in=locked).annotate(bucket=bucket).filter(bucket__isnull=True)
        UseContext.objects.filter(pk__in=list(unused.values_list("pk", flat=True))).delete()


def _merge(rows: Iterable[Any], level: _Level) -> list[tuple[Any, ...]]:
    """Return the coarser buckets of these finer ones, in an order that all workers share."""
    merged: dict[tuple[Any, ...], list[Any]] = {}
    for context, count, first_at, last_at, minute in rows:
        client = context.source, context.user_agent
        if not level.is_exact:
            client = network_of(context.source), product_of(context.user_agent)
        use = (
            context.key_id, _floor(minute, level.into), *client, context.endpoint, context.origin, context.outcome
        )  # fmt: skip
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
    # The last use decides: a coarse bucket begins before it.
    old = UseBucket.objects.filter(is_exposure=False, span__in=UseSpan, minute__lt=oldest, last_at__lt=oldest)
    if found := list(old.values_list("pk", "context_id", "context__key_id")[:MAX_DELETED]):
        is_silent = ~Q(last_at__gte=oldest) & ~Q(denied_at__gte=oldest)
        with transaction.atomic():
            KeySource.objects.filter(is_silent, key__in={key_id for *_, key_id in found}).delete()
            UseBucket.objects.filter(pk__in=[pk for pk, *_ in found]).delete()
            _delete_unused({context_id for _, context_id, _ in found})
    long_ago = now - _GONE_KEPT_FOR
    UsageReporter.objects.filter(stopped_at__lt=long_ago).delete()
    lost = UsageReporter.objects.filter(lost_at__isnull=False)
    for environment, last_at in lost.values_list("environment").annotate(at=Max("lost_at")):
        lost.filter(environment=environment, lost_at__lt=min(long_ago, last_at)).delete()
