"""Read who uses a key, for people and for the rotation engine. `usage.recorder` writes these rows."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db.models import DateTimeField, F, Max, Min, OuterRef, Q, QuerySet, Subquery, Sum, Value

from keyvault.domain.canonical import JsonValue
from keyvault.domain.sources import OCCASION, OTHERS, Minutes, find_longest_gap, name_source, network_of
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import Key, KeyAttempt, KeySource, KeyUse, UseBucket, UseContext
from keyvault.models.union_parts import limit_part
from keyvault.models.usage import HAS_TRAFFIC, SIGNS_OF_LIFE, UseOutcome, UseSpan

TRACES = (UseOutcome.ALLOWED, UseOutcome.DENIED, UseOutcome.REFUSED, UseOutcome.PROBED)
"""Outcomes that show who holds a key. Suspected exposures are reported separately."""


@dataclass(frozen=True, slots=True)
class KeyUser:
    """One source that uses a key in one way. An `is_probe` use is the service's own test call and is not counted."""

    source: str
    user_agent: str
    endpoint: str
    origin: str
    outcome: UseOutcome
    count: int
    first_at: datetime
    last_at: datetime

    @property
    def network(self) -> str:
        return network_of(self.source)

    @property
    def is_probe(self) -> bool:
        return self.outcome is UseOutcome.PROBED

    def as_json(self) -> JsonValue:
        return {
            "source": self.source,
            "network": self.network,
            "user_agent": self.user_agent,
            "endpoint": self.endpoint,
            "origin": self.origin,
            "outcome": self.outcome.value,
            "is_probe": self.is_probe,
            "count": self.count,
            "first_at": format_timestamp(self.first_at),
            "last_at": format_timestamp(self.last_at),
        }


@dataclass(frozen=True, slots=True)
class NetworkUse:
    """Real use of a key from one network, or by one calling token. `sources`: distinct sources seen in it."""

    network: str
    sources: int
    count: int
    first_at: datetime
    last_at: datetime


@dataclass(frozen=True, slots=True)
class VersionUse:
    """Real use of a key by one version of a shop or app.

    The origin identifies web pages. The user agent identifies apps.
    """

    origin: str
    user_agent: str
    sources: int
    count: int
    first_at: datetime
    last_at: datetime


@dataclass(frozen=True, slots=True)
class SourceUse:
    """Use of a private key by one source.

    `first_at`: when its first minute of allowed use began; `last_at`: its last allowed use; None: it had none.
    `denied_at`: the last time when it was denied; `refused_at`: when it was refused because the key was suspended.
    `longest_gap_seconds`: between two uses, or from its last use to a later refusal; None: it was seen only once, so
    that no gap is known. `moved_at`: its last allowed use of the key that the rotation keeps.
    """

    name: str
    first_at: datetime | None
    last_at: datetime | None
    denied_at: datetime | None
    longest_gap_seconds: int | None
    moved_at: datetime | None = None
    refused_at: datetime | None = None

    @property
    def seen_at(self) -> datetime:
        """The last use: allowed, denied, or refused because the key was suspended."""
        return max(at for at in (self.last_at, self.denied_at, self.refused_at) if at is not None)


@dataclass(frozen=True, slots=True)
class UseAttempt:
    """Attempts to use a suspended key by one source. `is_known`: the source had really used the key before."""

    source: str
    last_at: datetime
    is_known: bool


@dataclass(frozen=True, slots=True)
class UseAttempts:
    """The last attempt since a key was suspended, and the last one from a source that had used it before."""

    last_at: datetime | None = None
    last_known_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Total use of a key. `count`, `first_at` and `last_at` cover allowed calls only."""

    count: int
    first_at: datetime | None
    last_at: datetime | None
    denied_at: datetime | None
    tried_at: datetime | None
    probed_at: datetime | None


def describe_use(key: Key) -> Usage:
    """Return how much a key was used, by its row of use as it was read, and the last time of each outcome."""
    use: KeyUse | None = getattr(key, "use", None)
    attempts = dict(KeyAttempt.objects.filter(key=key).values_list("outcome", "last_at"))
    return Usage(
        count=0 if use is None else use.count,
        first_at=None if use is None else use.first_at,
        last_at=None if use is None else use.last_at,
        denied_at=attempts.get(UseOutcome.DENIED),
        tried_at=attempts.get(UseOutcome.REFUSED),
        probed_at=attempts.get(UseOutcome.PROBED),
    )


def list_users(key_id: str) -> list[JsonValue]:
    """Return `find_users` as JSON, for replies and evidence."""
    return [user.as_json() for user in find_users(key_id)]


MAX_READ = 200
"""Maximum contexts that are listed of a key and an outcome: the oldest half and the newest half.

A holder of the key can add any number of contexts. They must not hide older ones or those of another outcome. The
rollup into days adds rows, too. The retention limits the buckets of each context.
"""


MAX_USERS = 50
"""Maximum users of each outcome that are returned by default."""


def find_users(key_id: str, *, outcomes: Collection[UseOutcome] = TRACES, limit: int = MAX_USERS) -> list[KeyUser]:
    """Return uses grouped by source, user agent, endpoint, origin and outcome, the latest first.

    Evidence passes the outcomes that it relies on. People see every outcome, with probes marked. `limit`: the maximum
    for each outcome, so that refused attempts do not displace real use.
    """
    return first_of_each_outcome(read_users(key_id, outcomes), limit)


def first_of_each_outcome(users: Iterable[KeyUser], limit: int) -> list[KeyUser]:
    """Return the first users of each outcome."""
    left = dict.fromkeys(UseOutcome, limit)
    found: list[KeyUser] = []
    for user in users:
        left[user.outcome] -= 1
        if left[user.outcome] >= 0:
            found.append(user)
    return found


def has_more_users(key_id: str, *, outcomes: Collection[UseOutcome] = TRACES, limit: int | None = None) -> bool:
    """Whether a key has more contexts of one of these outcomes than `limit`; None: than the lists read."""
    limit = MAX_READ if limit is None else limit
    found = read_contexts([ContextPart(key_id, outcome, limit + 1) for outcome in outcomes])
    return any(count > limit for count in Counter(each.outcome for each in found.values()).values())


def networks_of(users: Iterable[KeyUser], *, limit: int = 50) -> list[NetworkUse]:
    """Return the networks that really use a key, the latest first. `users`: of `read_users`."""
    found: dict[str, list[KeyUser]] = {}
    for user in users:
        if user.outcome in SIGNS_OF_LIFE:
            found.setdefault(user.network, []).append(user)
    return [NetworkUse(network, *_sum(users)) for network, users in found.items()][:limit]


def _sum(users: Collection[KeyUser]) -> tuple[int, int, datetime, datetime]:
    """Return the number of sources, the number of uses, and the first and last use."""
    return (
        len({user.source for user in users}),
        sum(user.count for user in users),
        min(user.first_at for user in users),
        max(user.last_at for user in users),
    )


def read_users(key_id: str, outcomes: Collection[UseOutcome] = TRACES) -> list[KeyUser]:
    """Return the users among MAX_READ contexts of each of these outcomes, the latest first. Two queries."""
    contexts = read_contexts(parts_of_users(key_id, outcomes))
    return list_context_users(contexts.values(), sum_uses(contexts))


ContextUses = Mapping[int, tuple[int, datetime, datetime]]
"""The number of uses, the first and the last use of each context that has any."""


def sum_uses(contexts: Collection[int]) -> dict[int, tuple[int, datetime, datetime]]:
    """Sum the uses of each context."""
    rows = UseBucket.objects.filter(context__in=contexts).order_by().values_list("context_id")
    totals = rows.annotate(total=Sum("count"), first=Min("first_at"), last=Max("last_at"))
    return {pk: (total, first, last) for pk, total, first, last in totals}


def list_context_users(contexts: Iterable[UseContext], uses: ContextUses) -> list[KeyUser]:
    """Return the users of these contexts, the latest first."""
    users = [
        KeyUser(each.source, each.user_agent, each.endpoint, each.origin, UseOutcome(each.outcome), *uses[each.pk])
        for each in contexts
        if each.pk in uses
    ]
    users.sort(key=lambda user: (user.source, user.user_agent, user.endpoint, user.origin, user.outcome))
    users.sort(key=lambda user: user.last_at, reverse=True)
    return users


@dataclass(frozen=True, slots=True)
class ContextPart:
    """Which contexts of a key and an outcome to read: the newest or the oldest, up to `most`."""

    key_id: str
    outcome: UseOutcome
    most: int
    is_newest: bool = True


def parts_of_users(key_id: str, outcomes: Collection[UseOutcome], *, spare: int = 0) -> list[ContextPart]:
    """Select the contexts of a key that are listed: MAX_READ of each outcome, and `spare` more of the newest."""
    half = MAX_READ // 2
    oldest = [ContextPart(key_id, outcome, half, is_newest=False) for outcome in outcomes]
    return [*oldest, *(ContextPart(key_id, outcome, half + spare) for outcome in outcomes)]


# An index has a key's contexts of one outcome in the order of their ids.
_PART = """
    SELECT * FROM (
        SELECT id, key_id, outcome, source, user_agent, endpoint, origin FROM keyvault_usecontext
        WHERE key_id = %s AND outcome = %s ORDER BY id {order} LIMIT %s
    ) AS part
"""
_NEWEST, _OLDEST = _PART.format(order="DESC"), _PART.format(order="ASC")


def read_contexts(parts: Iterable[ContextPart]) -> dict[int, UseContext]:
    """Read the contexts of each part, by their ids, by one query.

    A chart has many parts: Django would take longer to compile their union than the database to run it.
    """
    statements, values = list[str](), list[str | int]()
    for part in parts:
        statements.append(_NEWEST if part.is_newest else _OLDEST)
        values += [part.key_id, part.outcome.value, part.most]
    if not statements:
        return {}
    return {row.pk: row for row in UseContext.objects.raw(" UNION ALL ".join(statements), values)}


MAX_SOURCES = 1_000
"""Maximum distinct sources of a key. All others count as one source, which no rotation considers silent."""

_MAX_ATTEMPTS = 50
"""Maximum known sources, and maximum unknown sources, whose attempts are listed."""


_MAX_EARLIER = 50
"""Maximum earlier keys of a credential whose sources count: a year of rotations with production's quiet period."""


def find_sources(key_id: str, staying_id: str = "") -> dict[str, SourceUse]:
    """Return the sources of a private key by their names, the latest first. Beyond MAX_SOURCES they are OTHERS.

    A longest gap covers the uses of the credential's earlier keys by the same source: a rotation does not change when
    a client calls. One query. `staying_id`: the key of which `moved_at` is the last use; empty: none.
    """
    own, earlier = _read_sources(key_id, staying_id)
    found = [
        SourceUse(
            name,
            None if first is None else datetime.fromtimestamp(first * 60, UTC),
            last_at,
            denied_at,
            _gap_seconds((first, last, gap), refused_at, earlier.get(name, [])),
            moved_at,
            refused_at,
        )
        for name, first, last, gap, last_at, denied_at, refused_at, moved_at in sorted(own)[:MAX_SOURCES]
    ]
    if len(own) > MAX_SOURCES:
        last_at = find_last(key_id)
        found = [use for use in found if use.name != OTHERS]
        found.append(SourceUse(OTHERS, first_at=None, last_at=last_at, denied_at=last_at, longest_gap_seconds=None))
    return {use.name: use for use in sorted(found, key=lambda use: (use.seen_at, use.name), reverse=True)}


def _read_sources(key_id: str, staying_id: str) -> tuple[list[Any], dict[str, list[Minutes]]]:
    """Read the first sources of a key by name, and the uses of the credential's earlier keys by these, by source."""
    first = KeySource.objects.filter(key=key_id).order_by("name")
    issued_at = Key.objects.filter(pk=key_id).values("created_at")
    keys = Key.objects.filter(credential__keys=key_id, created_at__lt=issued_at).order_by("-created_at")
    own = limit_part(first, MAX_SOURCES + 1)
    earlier = KeySource.objects.filter(
        key__in=keys.values("pk")[:_MAX_EARLIER],
        name__in=first.values("name")[: MAX_SOURCES + 1],
        first_minute__isnull=False,
    )
    moved = KeySource.objects.filter(key=staying_id, name=OuterRef("name")).values("last_at")
    minutes, times = ("first_minute", "last_minute", "longest_gap_minutes"), ("last_at", "denied_at", "refused_at")
    columns = ("key_id", "name", *minutes, *times)
    rows = own.values_list(*columns, Subquery(moved)).union(
        earlier.values_list(*columns, Value(None, DateTimeField())), all=True
    )
    found_own, found_earlier = [], dict[str, list[Minutes]]()
    for source_key_id, name, *rest in rows:
        if source_key_id == key_id:
            found_own.append((name, *rest))
        else:
            found_earlier.setdefault(name, []).append((rest[0], rest[1], rest[2]))
    return found_own, found_earlier


def _gap_seconds(
    use: tuple[int | None, int | None, int], refused_at: datetime | None, earlier: list[Minutes]
) -> int | None:
    """Return a source's longest gap in seconds; None: it was seen only once with the key that it uses now.

    A refusal after its last allowed use ends a gap, because the source called.
    """
    first, last, gap = use
    if first is None or last is None:
        return gap * 60
    if refused_at is not None:
        refused = int(refused_at.timestamp() // 60)
        gap, last = max(gap, refused - last), max(last, refused)
    if timedelta(minutes=last - first) <= OCCASION:
        return None
    return find_longest_gap(sorted([*earlier, (first, last, gap)])) * 60


def find_last_of_sources(key_id: str, names: Collection[str]) -> dict[str, datetime]:
    """Return the last allowed use of a private key by each of these sources that has used it."""
    rows = KeySource.objects.filter(key=key_id, name__in=names, last_at__isnull=False)
    return dict(rows.values_list("name", "last_at"))


def versions_of(users: Iterable[KeyUser], *, limit: int = 50) -> list[VersionUse]:
    """Return the shop and app versions that use a public key, the latest first. `users`: of `read_users`."""
    found: dict[tuple[str, str], list[KeyUser]] = {}
    for user in users:
        if user.outcome in SIGNS_OF_LIFE:
            found.setdefault((user.origin, user.user_agent), []).append(user)
    return [VersionUse(origin, agent, *_sum(users)) for (origin, agent), users in found.items()][:limit]


def find_last(key_id: str, outcomes: Collection[UseOutcome] = SIGNS_OF_LIFE) -> datetime | None:
    """Return when the key was last seen with one of these outcomes. A rotation asks this often."""
    return find_last_of_keys([key_id], outcomes).get(key_id)


def find_last_of_keys(
    key_ids: Collection[str], outcomes: Collection[UseOutcome] = SIGNS_OF_LIFE
) -> dict[str, datetime]:
    """Return when each of these keys was last seen with one of these outcomes, by one query."""
    seen = KeyAttempt.objects.filter(key__in=key_ids, outcome__in=outcomes).values_list("key_id", "last_at")
    if UseOutcome.ALLOWED in outcomes:
        seen = seen.union(KeyUse.objects.filter(key__in=key_ids).values_list("key_id", "last_at"), all=True)
    found: dict[str, datetime] = {}
    for key_id, at in seen:
        found[key_id] = max(at, found.get(key_id, at))
    return found


def has_traffic(key_id: str) -> bool:
    """Whether the key had an allowed call, other than acknowledgements and the like; see `HAS_TRAFFIC`."""
    return KeyUse.objects.filter(HAS_TRAFFIC, key=key_id).exists()


def list_attempts(key_id: str, since: datetime) -> list[UseAttempt]:
    """Return the sources that tried to use a key since it was suspended, the latest first.

    At most _MAX_ATTEMPTS known ones and as many unknown ones, so that neither kind displaces the other. Reads
    only the latest MAX_SOURCES sources of `KeySource`, and OTHERS.
    """
    attempts = KeyAttempt.objects.filter(key=key_id, outcome=UseOutcome.REFUSED, last_at__gte=since)
    unknown = list(attempts.values_list("unknown_at", flat=True))
    if not unknown:
        return []  # the usual case, without the searches for sources
    refused = KeySource.objects.filter(key=key_id, refused_at__gte=since)
    columns = refused.annotate(is_known=_is_known(since)).values_list("name", "refused_at", "is_known")
    latest = list(columns.order_by("-refused_at")[:MAX_SOURCES])
    if len(latest) == MAX_SOURCES:
        # Many sources in one row, so it must not be missing.
        latest += [each for each in columns.filter(name=OTHERS) if each not in latest]
    found = [UseAttempt(name, at, bool(is_known)) for name, at, is_known in latest]
    if unknown[0] is not None and unknown[0] >= since:
        found += _list_unknown(key_id, since) or [UseAttempt(OTHERS, unknown[0], is_known=False)]
    return list_latest(found)


def list_latest(found: Iterable[UseAttempt]) -> list[UseAttempt]:
    """Return the latest attempt of each source, the latest first: at most _MAX_ATTEMPTS known and unknown ones each."""
    latest = {attempt.source: attempt for attempt in sorted(found, key=lambda attempt: attempt.last_at)}
    ordered = sorted(latest.values(), key=lambda attempt: attempt.source)
    ordered.sort(key=lambda attempt: attempt.last_at, reverse=True)
    left = {True: _MAX_ATTEMPTS, False: _MAX_ATTEMPTS}
    listed: list[UseAttempt] = []
    for attempt in ordered:
        left[attempt.is_known] -= 1
        if left[attempt.is_known] >= 0:
            listed.append(attempt)
    return listed


def find_attempts(key_id: str, since: datetime, without: Collection[str] = ()) -> UseAttempts:
    """Return the latest attempts since a key was suspended, for its tripwire. Cheap however many sources there are.

    `without`: names of sources whose attempts do not count.
    """
    refused = KeySource.objects.filter(key=key_id, refused_at__gte=since).exclude(name__in=without)
    latest = refused.order_by("-refused_at").values("refused_at")
    attempt = KeyAttempt.objects.filter(key=key_id, outcome=UseOutcome.REFUSED, last_at__gte=since)
    columns = ("unknown_at", Subquery(latest[:1]), Subquery(latest.filter(_is_known(since))[:1]))
    unknown_at, tried_at, known_at = next(iter(attempt.values_list(*columns)), (None, None, None))
    tried = [at for at in (tried_at, unknown_at) if at is not None and at >= since]
    return UseAttempts(max(tried, default=None), known_at)


def find_late_uses(key_id: str, after: datetime, suspended_at: datetime, without: Collection[str] = ()) -> UseAttempts:
    """Return the last uses, allowed or denied, after this time of a key that was suspended later.

    `without`: names of sources whose uses do not count. Most calls read no source: the key had no use after this time.
    """
    known = _is_known(suspended_at)
    times = (
        _late_sources(key_id, after)
        .exclude(name__in=without)
        .aggregate(
            allowed=Max("last_at"),
            denied=Max("denied_at"),
            known_allowed=Max("last_at", filter=known),
            known_denied=Max("denied_at", filter=known),
        )
    )
    return UseAttempts(
        _latest(times["allowed"], times["denied"]), _latest(times["known_allowed"], times["known_denied"])
    )


def list_late_uses(
    key_id: str, after: datetime, suspended_at: datetime, without: Collection[str] = ()
) -> list[UseAttempt]:
    """List the sources of the uses of `find_late_uses`, those that are unknown first; at most MAX_SOURCES."""
    late = _late_sources(key_id, after).exclude(name__in=without).annotate(is_known=_is_known(suspended_at))
    # In SQL `is_known` is NULL for a source that was never denied and is not known otherwise.
    unknown_first = late.order_by(F("is_known").asc(nulls_first=True))
    rows = unknown_first.values_list("name", "is_known", "last_at", "denied_at")[:MAX_SOURCES]
    return [
        UseAttempt(name, max(at for at in ends if at is not None), bool(is_known)) for name, is_known, *ends in rows
    ]


def _late_sources(key_id: str, after: datetime) -> QuerySet[KeySource]:
    last_at = find_last(key_id)
    late = KeySource.objects.filter(Q(last_at__gt=after) | Q(denied_at__gt=after), key=key_id)
    return late.none() if last_at is None or last_at <= after else late


def _latest(*times: datetime | None) -> datetime | None:
    return max(filter(None, times), default=None)


def _is_known(before: datetime) -> Q:
    """Match sources that really used the key before this time.

    A first minute counts if it ended before. OTHERS is never known: it can be any client.
    """
    minute = int(before.timestamp() // 60)
    was_used = Q(first_minute__lt=minute) | Q(last_at__lt=before) | Q(denied_at__lt=before)
    return was_used & ~Q(name=OTHERS)


def _list_unknown(key_id: str, since: datetime) -> list[UseAttempt]:
    """List the sources without a row in `KeySource` among the MAX_READ newest contexts with refused attempts."""
    buckets = UseBucket.objects.filter(context=OuterRef("pk")).order_by("-minute").values("last_at")
    spans = [Subquery(buckets.filter(span=span)[:1]) for span in UseSpan]
    contexts = UseContext.objects.filter(key=key_id, outcome=UseOutcome.REFUSED).order_by("-pk")
    latest: dict[str, datetime] = {}
    for caller, user_agent, *ends in contexts.values_list("source", "user_agent", *spans)[:MAX_READ]:
        name, in_time = name_source(caller, user_agent), [at for at in ends if at is not None and at >= since]
        if in_time:
            latest[name] = max(*in_time, latest.get(name, since))
    with_row = set(KeySource.objects.filter(key=key_id, name__in=latest).values_list("name", flat=True))
    return [UseAttempt(name, at, is_known=False) for name, at in latest.items() if name not in with_row]
