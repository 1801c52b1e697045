"""Read who uses a key, for people and for the rotation engine. `usage.recorder` writes these rows."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import chain, product

from django.db.models import Count, Exists, Max, Min, OuterRef, Q, QuerySet, Sum

from keyvault.domain.canonical import JsonValue
from keyvault.domain.sources import OCCASION, OTHERS, name_source, network_of
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import Key, KeySource, KeyUse, UseBucket
from keyvault.models.usage import SIGNS_OF_LIFE, UseOutcome, UseSpan

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
    `denied_at`: the last time when it was denied. `longest_gap_seconds`: between two uses; None: it was seen only
    once, so that no gap is known.
    """

    name: str
    first_at: datetime | None
    last_at: datetime | None
    denied_at: datetime | None
    longest_gap_seconds: int | None

    @property
    def seen_at(self) -> datetime:
        """The last sign of life."""
        return max(at for at in (self.last_at, self.denied_at) if at is not None)


@dataclass(frozen=True, slots=True)
class UseAttempt:
    """Attempts to use a suspended key from one source. `is_known`: the source had really used the key before."""

    source: str
    count: int
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
    """Return how much a key was used, and the last time of each outcome."""
    use = KeyUse.objects.filter(key=key).first()
    return Usage(
        count=0 if use is None else use.count,
        first_at=None if use is None else use.first_at,
        last_at=None if use is None else use.last_at,
        denied_at=find_last(key.key_id, (UseOutcome.DENIED,)),
        tried_at=find_last(key.key_id, (UseOutcome.REFUSED,)),
        probed_at=find_last(key.key_id, (UseOutcome.PROBED,)),
    )


def list_users(key_id: str, *, outcomes: Collection[UseOutcome] = TRACES) -> list[JsonValue]:
    """Return `find_users` as JSON, for replies and evidence."""
    return [user.as_json() for user in find_users(key_id, outcomes=outcomes)]


def find_users(key_id: str, *, outcomes: Collection[UseOutcome] = TRACES, limit: int = 50) -> list[KeyUser]:
    """Return uses grouped by source, user agent, endpoint, origin and outcome, the latest first.

    Evidence passes the outcomes that it relies on. People see every outcome, with probes marked.
    """
    rows = (
        _buckets(key_id, outcomes)
        .values("source", "user_agent", "endpoint", "origin", "outcome")
        .annotate(total=Sum("count"), first=Min("first_at"), last=Max("last_at"))
        .order_by("-last", "source", "user_agent", "endpoint", "origin", "outcome")[:limit]
    )
    return [
        KeyUser(
            row["source"],
            row["user_agent"],
            row["endpoint"],
            row["origin"],
            UseOutcome(row["outcome"]),
            row["total"],
            row["first"],
            row["last"],
        )
        for row in rows
    ]


def list_networks(key_id: str, *, limit: int = 50) -> list[NetworkUse]:
    """Return the networks that really use a key, the latest first."""
    rows = (
        _buckets(key_id, SIGNS_OF_LIFE)
        .values("source")
        .annotate(total=Sum("count"), first=Min("first_at"), last=Max("last_at"))
    )
    found: dict[str, NetworkUse] = {}
    for row in rows.iterator():
        name = network_of(row["source"])
        one = NetworkUse(name, 1, row["total"], row["first"], row["last"])
        found[name] = _merge(found[name], one) if name in found else one
    return sorted(found.values(), key=lambda use: use.last_at, reverse=True)[:limit]


def _merge(one: NetworkUse, other: NetworkUse) -> NetworkUse:
    return NetworkUse(
        one.network,
        one.sources + other.sources,
        one.count + other.count,
        min(one.first_at, other.first_at),
        max(one.last_at, other.last_at),
    )


MAX_SOURCES = 1_000
"""Maximum distinct sources of a key. All others count as one source, which no rotation considers silent."""

_MAX_CLIENTS = 500
"""Maximum clients of waived sources whose attempts are recognized."""


def find_sources(key_id: str) -> dict[str, SourceUse]:
    """Return the sources of a private key by their names, the latest first. Beyond MAX_SOURCES they are OTHERS."""
    columns = ("name", "first_minute", "last_minute", "last_at", "denied_at", "longest_gap_minutes")
    rows = list(KeySource.objects.filter(key=key_id).order_by("name").values_list(*columns)[: MAX_SOURCES + 1])
    found = [
        SourceUse(
            name,
            None if first is None else datetime.fromtimestamp(first * 60, UTC),
            last_at,
            denied_at,
            None if _was_seen_once(first, last) else gap * 60,
        )
        for name, first, last, last_at, denied_at, gap in rows[:MAX_SOURCES]
    ]
    if len(rows) > MAX_SOURCES:
        last_at = find_last(key_id)
        found = [use for use in found if use.name != OTHERS]
        found.append(SourceUse(OTHERS, first_at=None, last_at=last_at, denied_at=last_at, longest_gap_seconds=None))
    return {use.name: use for use in sorted(found, key=lambda use: (use.seen_at, use.name), reverse=True)}


def find_last_of_sources(key_id: str, names: Collection[str]) -> dict[str, datetime]:
    """Return the last allowed use of a private key by each of these sources that has used it."""
    rows = KeySource.objects.filter(key=key_id, name__in=names, last_at__isnull=False)
    return dict(rows.values_list("name", "last_at"))


def _was_seen_once(first_minute: int | None, last_minute: int | None) -> bool:
    if first_minute is None or last_minute is None:
        return False
    return timedelta(minutes=last_minute - first_minute) <= OCCASION


def list_versions(key_id: str, *, limit: int = 50) -> list[VersionUse]:
    """Return the shop and app versions that use a public key, the latest first."""
    rows = (
        _buckets(key_id, SIGNS_OF_LIFE)
        .values("origin", "user_agent")
        .annotate(
            total=Sum("count"), sources=Count("source", distinct=True), first=Min("first_at"), last=Max("last_at")
        )
        .order_by("-last", "origin", "user_agent")[:limit]
    )
    return [
        VersionUse(row["origin"], row["user_agent"], row["sources"], row["total"], row["first"], row["last"])
        for row in rows
    ]


def find_last(key_id: str, outcomes: Iterable[UseOutcome] = SIGNS_OF_LIFE) -> datetime | None:
    """Return when the key was last seen with one of these outcomes. The latest bucket of a span has its latest time."""
    kinds = [(outcome.value, span.value) for outcome, span in product(outcomes, UseSpan)]
    sql = _LAST.format(kinds=", ".join(["(%s, %s)"] * len(kinds)))
    found = UseBucket.objects.raw(sql, [key_id, key_id, *chain.from_iterable(kinds)])
    return next((bucket.last_at for bucket in found), None)


_LAST = """
    SELECT id, last_at FROM keyvault_usebucket
    WHERE key_id = %s AND (outcome, span, minute) IN (
        SELECT kinds.column1, kinds.column2, (
            SELECT max(minute) FROM keyvault_usebucket AS bucket
            WHERE bucket.key_id = %s AND bucket.outcome = kinds.column1 AND bucket.span = kinds.column2
        )
        FROM (VALUES {kinds}) AS kinds
    )
    ORDER BY last_at DESC LIMIT 1
"""
"""The buckets of the last minute of each outcome and span, each a search of one index. A rotation asks this often."""


def list_attempts(key_id: str, since: datetime) -> list[UseAttempt]:
    """Return attempts to use a suspended key by source, the latest first. The service's own probes are excluded."""
    attempts = _attempts_since(key_id, since)
    if not attempts.exists():
        return []  # the usual case, without the searches for known sources
    rows = (
        attempts.values("source")
        .annotate(total=Sum("count"), last=Max("last_at"), is_known=_is_known(key_id, since))
        .order_by("-last", "source")[:50]
    )
    return [UseAttempt(row["source"], row["total"], row["last"], row["is_known"]) for row in rows]


def find_attempts(key_id: str, since: datetime, without: Collection[str] = ()) -> UseAttempts:
    """Return the latest attempts since a key was suspended, for its tripwire. Cheap however many sources there are.

    `without`: names of sources whose attempts do not count, for their first _MAX_CLIENTS clients.
    """
    attempts = _attempts_since(key_id, since)
    if without:
        clients = attempts.order_by("source", "user_agent").values_list("source", "user_agent").distinct()
        clients = clients[:_MAX_CLIENTS]
        for caller, user_agent in [client for client in clients if name_source(*client) in without]:
            attempts = attempts.exclude(source=caller, user_agent=user_agent)
    last_at = attempts.aggregate(at=Max("last_at"))["at"]
    if last_at is None:
        return UseAttempts()
    return UseAttempts(last_at, attempts.filter(_is_known(key_id, since)).aggregate(at=Max("last_at"))["at"])


def _attempts_since(key_id: str, since: datetime) -> QuerySet[UseBucket]:
    # A bucket that has rolled up begins up to a day before its uses.
    day = since.replace(hour=0, minute=0, second=0, microsecond=0)
    return _buckets(key_id, (UseOutcome.REFUSED,)).filter(minute__gte=day, last_at__gte=since)


def _is_known(key_id: str, before: datetime) -> Q:
    """Match attempts since this time by a source that really used the key before it.

    Old uses have only the network of their source. It is compared for at most _MAX_CLIENTS sources.
    """
    used = _buckets(key_id, SIGNS_OF_LIFE).filter(first_at__lt=before)
    tried = _attempts_since(key_id, before).order_by("source").values_list("source", flat=True).distinct()
    networks = {source: network_of(source) for source in tried[:_MAX_CLIENTS]}
    known = set(used.filter(source__in=set(networks.values())).values_list("source", flat=True).distinct())
    in_known = [source for source, network in networks.items() if network in known]
    return Q(Exists(used.filter(source=OuterRef("source")))) | Q(source__in=in_known)


def _buckets(key_id: str, outcomes: Iterable[UseOutcome]) -> QuerySet[UseBucket]:
    return UseBucket.objects.filter(key_id=key_id, outcome__in=list(outcomes))
