"""Keep the usage tables small: minutes become hours, hours become days, and old days are deleted.

Each batch is one transaction and moves counts from finer buckets to coarser ones, so that no use is counted twice or
lost. A batch that was killed is repeated. Concurrent workers take different rows.

A batch skips buckets and sources that a reporter has locked, and locks contexts in the same order as reporters: both
prevent deadlocks. Hours of exact addresses need no lock of their contexts, which stay the same.
"""

import time
from collections.abc import Collection, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from django.conf import settings
from django.db import transaction
from django.db.models import Exists, OuterRef, Q, Subquery

from keyvault.domain.sources import network_of, product_of
from keyvault.models import KeySource, UsageReporter, UseBucket, UseContext
from keyvault.models.usage import NO_EXPOSURE, UseSpan
from keyvault.services.usage.recorder import add_to_buckets, lock_contexts
from keyvault.services.work.deletion import MAX_DELETED, delete_batch

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
    fine = UseBucket.objects.filter(is_exposure__in=[is_exposure], span=level.span)
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
        found = list(rows.values_list("pk", "context_id", "count", "first_at", "last_at")[:_MAX_ROLLED_UP])
        if not found:
            return 0
        contexts = {row[1] for row in found}
        moved_to = {pk: pk for pk in contexts} if level.is_exact else _find_coarse(contexts)
        merged = _merge((moved_to[row[1]], *row[2:]) for row in found)
        add_to_buckets([(*merged[pk], begins_at, pk) for pk in sorted(merged)], level.into, is_exposure=is_exposure)
        UseBucket.objects.filter(pk__in=[row[0] for row in found]).delete()
        if not level.is_exact:
            _delete_unused(contexts)
    return len(found)


def _find_coarse(contexts: Collection[int]) -> dict[int, int]:
    """Return the id of the coarser context of each of these: it names the network and the product only.

    Locks all of them, also those that lose their buckets: concurrent workers then see each other's deletions.
    """
    fine = {row.pk: _identity(row) for row in UseContext.objects.filter(pk__in=contexts)}
    coarse = {
        pk: (key_id, endpoint, network_of(source), product_of(user_agent), origin, outcome)
        for pk, (key_id, endpoint, source, user_agent, origin, outcome) in fine.items()
    }
    lock_contexts({*fine.values(), *coarse.values()})
    keys, _, sources, user_agents, _, outcomes = map(set, zip(*coarse.values(), strict=True))
    rows = UseContext.objects.filter(key__in=keys, outcome__in=outcomes, source__in=sources, user_agent__in=user_agents)
    ids = {_identity(row): row.pk for row in rows}
    return {pk: ids[identity] for pk, identity in coarse.items()}


def _identity(context: UseContext) -> tuple[str, ...]:
    """Return a context's columns as `lock_contexts` takes them."""
    return (
        context.key_id, context.endpoint, context.source, context.user_agent, context.origin, context.outcome
    )  # fmt: skip


def _delete_unused(contexts: Collection[int]) -> None:
    """Delete those of the contexts that have no bucket any more.

    Call it in the transaction that locked the contexts and deleted buckets. A reporter that begins to use a context
    meanwhile cannot commit, and repeats its report. The rows are locked in the order in which reporters lock them when
    they commit.
    """
    # A scalar subquery: PostgreSQL may turn NOT EXISTS into a join that reads every bucket.
    bucket = Subquery(UseBucket.objects.filter(context=OuterRef("pk")).values("pk")[:1])
    unused = UseContext.objects.annotate(bucket=bucket).filter(bucket__isnull=True).values_list("pk", flat=True)
    found = list(unused.filter(pk__in=contexts))
    rows = UseContext.objects.filter(pk__in=found).order_by("pk").select_for_update()
    if locked := list(rows.values_list("pk", flat=True)):
        UseContext.objects.filter(pk__in=list(unused.filter(pk__in=locked))).delete()


def _merge(rows: Iterable[Any]) -> dict[int, tuple[int, datetime, datetime]]:
    """Return the count, first use and last use of each context, by its id."""
    merged: dict[int, tuple[int, datetime, datetime]] = {}
    for context_id, count, first_at, last_at in rows:
        total, first, last = merged.get(context_id, (0, first_at, last_at))
        merged[context_id] = total + count, min(first, first_at), max(last, last_at)
    return merged


def _floor(at: datetime, span: UseSpan) -> datetime:
    """Return the beginning of the period of this span, which begins at midnight UTC or a multiple of it later."""
    seconds = 60 * span
    return datetime.fromtimestamp(at.timestamp() // seconds * seconds, UTC)


def forget_old(now: datetime) -> int:
    """Delete buckets older than the retention, some thousands at a time, sources without any, and old reporters.

    Return how many buckets.

    Kept permanently: a key's total with its first and last use, suspected exposures, and when a reporter was last lost,
    because that restarts a silence. Evidence stores its own copy of what it relies on.
    """
    oldest = now - timedelta(days=settings.USAGE_DAYS)
    # The last use decides: a coarse bucket begins before it.
    old = UseBucket.objects.filter(is_exposure__in=NO_EXPOSURE, span__in=UseSpan, minute__lt=oldest, last_at__lt=oldest)
    ids = list(old.values_list("pk", flat=True)[:MAX_DELETED])
    deleted = _forget_buckets(ids, oldest) if ids else 0
    long_ago = now - _GONE_KEPT_FOR
    delete_batch(UsageReporter.objects.filter(stopped_at__lt=long_ago).order_by("stopped_at"))
    of_scope = UsageReporter.objects.filter(environment=OuterRef("environment"), merchants=OuterRef("merchants"))
    lost = UsageReporter.objects.filter(Exists(of_scope.filter(lost_at__gt=OuterRef("lost_at"))), lost_at__lt=long_ago)
    delete_batch(lost.order_by("lost_at"))
    return deleted


def _forget_buckets(ids: Collection[int], oldest: datetime) -> int:
    """Delete these buckets, then their keys' sources and their contexts without a newer use. Return how many buckets.

    Rows that another transaction has locked are in use, and stay.
    """
    is_silent = ~Q(last_at__gte=oldest) & ~Q(denied_at__gte=oldest) & ~Q(refused_at__gte=oldest)
    with transaction.atomic():
        buckets = UseBucket.objects.filter(pk__in=ids).select_for_update(skip_locked=True)
        found = dict(buckets.values_list("pk", "context_id"))
        contexts = {row.pk: _identity(row) for row in UseContext.objects.filter(pk__in=set(found.values()))}
        lock_contexts(set(contexts.values()))
        UseBucket.objects.filter(pk__in=found).delete()
        silent = KeySource.objects.filter(is_silent, key__in={key_id for key_id, *_ in contexts.values()})
        sources = silent.select_for_update(skip_locked=True).values_list("pk", flat=True)
        KeySource.objects.filter(pk__in=list(sources)).delete()
        _delete_unused(contexts)
    return len(found)
