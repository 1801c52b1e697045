"""Uses of keys over time, for charts."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from django.conf import settings
from django.db.models import DateTimeField, Max, Min, Sum, Value

from keyvault.models import UseBucket
from keyvault.models.usage import SIGNS_OF_LIFE, UseOutcome, UseSpan
from keyvault.services.usage.reports import (
    MAX_READ,
    ContextPart,
    KeyUser,
    list_context_users,
    parts_of_users,
    read_contexts,
)

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


@dataclass(frozen=True, slots=True)
class Traffic:
    """The uses of keys over time, and the users of some keys.

    `counts`: the uses of each key, allowed or denied, in each step from `begin` to `until`. `users`: of each key, the
    latest first. `has_more_users`: a key has more contexts than are read.
    """

    begin: datetime
    until: datetime
    step: timedelta
    counts: dict[str, list[int]]
    users: dict[str, list[KeyUser]]
    has_more_users: bool


def count_uses(key_ids: Collection[str], since: datetime, until: datetime, step: timedelta) -> dict[str, list[int]]:
    """Return the uses of each key, allowed or denied, in each step from that of `since` to that of `until`.

    Two queries for all keys.
    """
    return read_traffic(key_ids, since, until, step).counts


def read_traffic(
    key_ids: Collection[str],
    since: datetime,
    until: datetime,
    step: timedelta,
    *,
    users_of: Collection[str] = (),
    outcomes: Collection[UseOutcome] = (),
) -> Traffic:
    """Read what `count_uses` returns, and the users of keys that `read_users` does, by two queries for both.

    `users_of`: the keys whose users with these outcomes are read.
    """
    begin = floor(since, step)
    counts = {key_id: [0] * (int((floor(until, step) - begin) / step) + 1) for key_id in key_ids}
    pairs = [(key_id, outcome) for key_id in key_ids for outcome in SIGNS_OF_LIFE]
    share = max(MAX_CONTEXTS // len(pairs), 1) if pairs else 0
    # The newest contexts of the users that are listed include those that the chart adds up.
    others = [pair for pair in pairs if pair[0] not in users_of or pair[1] not in outcomes]
    newest = [ContextPart(*pair, share) for pair in others]
    parts = [part for key_id in users_of for part in parts_of_users(key_id, outcomes, spare=1)]
    contexts = read_contexts([*newest, *parts])
    groups: dict[tuple[str, UseOutcome], list[int]] = {}
    for pk in sorted(contexts):
        groups.setdefault((contexts[pk].key_id, UseOutcome(contexts[pk].outcome)), []).append(pk)
    charted = [pk for pair in pairs for pk in groups.get(pair, [])[-share:]]
    listed = {key_id: [groups.get((key_id, outcome), []) for outcome in outcomes] for key_id in users_of}
    has_more = any(len(each) > MAX_READ for of_key in listed.values() for each in of_key)
    listed_ids = {key_id: [pk for each in of_key for pk in each] for key_id, of_key in listed.items()}
    uses = dict[int, tuple[int, datetime, datetime]]()
    every_listed = [pk for ids in listed_ids.values() for pk in ids]
    for pk, minute, *use in _read_buckets(charted, (begin, until), every_listed):
        if minute is None:
            uses[pk] = (use[0], use[1], use[2])
        else:
            counts[contexts[pk].key_id][int((minute - begin) / step)] += use[0]
    users = {key_id: list_context_users((contexts[pk] for pk in ids), uses) for key_id, ids in listed_ids.items()}
    return Traffic(begin, until, step, counts, users, has_more)


def _read_buckets(
    charted: Collection[int], period: tuple[datetime, datetime], listed: Collection[int]
) -> Iterable[tuple[Any, ...]]:
    """Return rows of context, minute, number of uses, first use and last use.

    One row for each minute of a charted context in the period. One for each listed context, in total, with minute None.
    """
    uses = {"total": Sum("count"), "first": Min("first_at"), "last": Max("last_at")}
    buckets = UseBucket.objects.order_by()
    minutes = buckets.filter(context__in=charted, minute__range=period).values_list("context_id", "minute")
    totals = buckets.filter(context__in=listed).values_list("context_id", Value(None, DateTimeField()))
    parts = [minutes.annotate(**uses)] if charted else []
    parts += [totals.annotate(**uses)] if listed else []
    return parts[0].union(*parts[1:], all=True) if parts else ()
