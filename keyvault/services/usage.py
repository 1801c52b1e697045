"""Who used which key, when: noted in memory on the request path, written a moment later by a thread.

Silence is observed, not assumed: each process that verifies is a reporter, and says in the same transaction
as its counts up to when it has reported. A reporter that goes without a farewell is lost, and with it
perhaps some uses; whoever waits for silence starts again from that moment.

Each reporter goes by its own host's clock, and is judged by the engine's: hosts are taken to agree within
LOST_AFTER, as any that keep time by NTP do. One that is further off, before or behind, is taken for lost at
every look, so that silence waits until its clock is right; a smaller error is at most an error of as much.
"""

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

from django.db import close_old_connections, connection, connections, transaction
from django.db.models import Max, Min, Q, QuerySet

from keyvault.domain.free_text import clean_text
from keyvault.models import UsageReporter, UseBucket
from keyvault.models.usage import EXPOSURES, Outcome
from keyvault.services.idempotency import shred_used
from keyvault.services.peppers import load_peppers
from keyvault.services.rehashing import pending_rehashes

_log = logging.getLogger(__name__)

FLUSH_SECONDS = 0.5
LOST_AFTER = timedelta(seconds=10)
"""A live reporter reports every FLUSH_SECONDS; one this late, or this far ahead, is taken for dead."""

KEPT_FOR = timedelta(days=400)
"""More than a year: what uses a key once a year is still known, and the pause between two such uses."""

_GONE_KEPT_FOR = timedelta(days=7)
_MOST_FORGOTTEN = 5_000

_MOST_BUCKETS = 20_000

_READ = 512
"""Of what a client says about itself no more than this is looked at: a longer text costs the request path nothing."""


def utc_now() -> datetime:
    return datetime.now(UTC)


class Use(NamedTuple):
    """One bucket: a key, seen in one minute from one source, on one endpoint, with one outcome."""

    key_id: str
    minute: datetime
    source: str
    user_agent: str
    endpoint: str
    origin: str
    outcome: Outcome


class _Count(NamedTuple):
    times: int
    first_at: datetime
    last_at: datetime


class SeenUse(NamedTuple):
    """Uses that a verifier allowed and has counted itself, of one source on one endpoint within a moment."""

    key_id: str
    endpoint: str
    source: str
    user_agent: str
    origin: str
    is_probe: bool
    times: int
    first_at: datetime
    last_at: datetime


@dataclass(slots=True)
class UsageLog:
    """The uses of this process that are not yet written. Made once for each process that verifies."""

    now: Callable[[], datetime] = utc_now
    reporter_id: str = field(
        default_factory=lambda: f"{socket.gethostname()[:30]}-{os.getpid()}-{secrets.token_hex(6)}"
    )
    _counts: dict[Use, _Count] = field(default_factory=dict)
    _secrets_used: set[str] = field(default_factory=set)
    _sources: list[Callable[[], Iterable[SeenUse]]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _flushing: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def note(
        self, key_id: str, *, source: str, user_agent: str, endpoint: str, outcome: Outcome, origin: str = ""
    ) -> None:
        """Some microseconds and no I/O. Of a flood of distinct sources only the first are told apart.

        What a client says about itself is noted without the secrets that it may have put there. Never raises: a
        database that is away costs the client nothing, and the use is kept for the next try.

        The time is taken under the lock that `flush` takes its own under: no use is older than a watermark
        that was given without it.
        """
        source, user_agent, endpoint, origin = (
            clean_text(source[:_READ], 64),
            clean_text(user_agent[:_READ], 120),
            clean_text(endpoint[:_READ], 100),
            clean_text(origin[:_READ], 120),
        )
        with self._lock:
            at = self.now()
            minute = at.replace(second=0, microsecond=0)
            _add(self._counts, Use(key_id, minute, source, user_agent, endpoint, origin, outcome), _Count(1, at, at))

    def note_secret_use(self, token_id: str) -> None:
        """A customer token was accepted: its holder has it, so the answer that showed it need not be kept."""
        with self._lock:
            self._secrets_used.add(token_id)

    def add_source(self, take: Callable[[], Iterable[SeenUse]]) -> None:
        """`take` is asked before each report for what it has counted since the last time. It must hand over every use
        whose time is before its call: no use is older than a watermark that was given without it."""
        self._sources.append(take)

    def start(self) -> None:
        """Reports from now on, before the first verdict is given. Repeatable."""
        with self._lock:
            if self._thread is not None:
                return
            self._introduce(self.now())
            self._thread = threading.Thread(target=self._report, name="usage", daemon=True)
            self._thread.start()
        # Not atexit, which is not called in Granian's forked worker; this is called there and everywhere else.
        Finalize(None, self.stop, exitpriority=0)

    def _introduce(self, now: datetime) -> None:
        UsageReporter.objects.create(
            reporter_id=self.reporter_id,
            started_at=now,
            flushed_through_at=now,
            peppers=load_peppers.newest_versions(),
        )

    @property
    def is_reporting(self) -> bool:
        """Whether its thread is at work."""
        return self._thread is not None

    def stop(self) -> None:
        """The farewell: writes what is left and says that nothing more will come."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
            self._thread = None
            self.flush(farewell=True)

    def forget(self) -> None:
        """In a forked child, which is a reporter of its own: what is pending is the parent's to write."""
        self.__init__(self.now, _sources=self._sources)  # type: ignore[misc]  # a dataclass's own, with its fields

    def flush(self, *, farewell: bool = False) -> None:
        """Writes the counts and the watermark in one transaction; a failed one keeps the counts for the next.

        One at a time: a second one's watermark would vouch for counts that the first may yet fail to write.
        """
        with self._flushing:
            self._flush(farewell)

    def _flush(self, farewell: bool) -> None:
        with self._lock:
            through = self.now()
            counts, self._counts = self._counts, {}
            used, self._secrets_used = self._secrets_used, set()
        try:
            for take in self._sources:
                _add_seen(counts, take())
            with transaction.atomic():
                _write(counts)
                is_known = UsageReporter.objects.filter(reporter_id=self.reporter_id).update(
                    flushed_through_at=through,
                    peppers=load_peppers.newest_versions(),
                    stopped_at=through if farewell else None,
                    lost_at=None,
                )
                if self.is_reporting and not is_known:
                    # A host that slept for so long that its reporter was forgotten.
                    self._introduce(through)
        except Exception:
            with self._lock:
                for use, count in counts.items():
                    _add(self._counts, use, count)
                self._secrets_used |= used
            raise
        # By itself: evidence never waits for it, and what it leaves is shredded when its time is over.
        shred_used(used | {use.key_id for use in counts if use.outcome is Outcome.ALLOWED})

    def _report(self) -> None:
        try:
            while not self._stop.wait(FLUSH_SECONDS):
                self._try_flush()
                self._look_after_peppers()
                close_old_connections()
        finally:
            connections.close_all()  # this thread's own

    def _try_flush(self) -> None:
        try:
            self.flush()
        except Exception:  # noqa: BLE001  whatever it was, the next try may do better
            _log.exception("usage could not be written; it is kept for the next try")

    def _look_after_peppers(self) -> None:
        """What else of this process is done off the request path, and needs the database only."""
        try:
            pending_rehashes.write(self.now())
            load_peppers.look()
        except Exception:  # noqa: BLE001  whatever it was, the next try may do better
            _log.exception("digests could not be renewed; the next proof of each key tries again")


def _add_seen(counts: dict[Use, _Count], seen: Iterable[SeenUse]) -> None:
    """Cleaned here, off the request path."""
    for each in seen:
        use = Use(
            each.key_id,
            each.last_at.replace(second=0, microsecond=0),
            _cleaned(each.source, 64),
            _cleaned(each.user_agent, 120),
            _cleaned(each.endpoint, 100),
            _cleaned(each.origin, 120),
            Outcome.PROBED if each.is_probe else Outcome.ALLOWED,
        )
        _add(counts, use, _Count(each.times, each.first_at, each.last_at))


@lru_cache(maxsize=8_192)
def _cleaned(text: str, longest: int) -> str:
    """The same few stand beside thousands of keys. (What looks like a secret does not come this way.)"""
    return clean_text(text[:_READ], longest)


def _add(counts: dict[Use, _Count], use: Use, count: _Count) -> None:
    """Bounded: beyond that who it was is no longer told apart; how many there were is."""
    known = counts.get(use)
    if known is None and len(counts) >= _MOST_BUCKETS:
        use = use._replace(source="", user_agent="", origin="")
        known = counts.get(use)
    counts[use] = count if known is None else _merged(known, count)


def _merged(one: _Count, other: _Count) -> _Count:
    return _Count(one.times + other.times, min(one.first_at, other.first_at), max(one.last_at, other.last_at))


def _write(counts: dict[Use, _Count]) -> None:
    """Adds to what stands there; order-independent, so that late and early reporters agree.

    Every reporter takes the rows in the same order, all buckets before all keys, so that none waits in a ring.
    """
    keys: dict[str, _Count] = {}
    for use, count in counts.items():
        if use.outcome is Outcome.ALLOWED:
            known = keys.get(use.key_id)
            keys[use.key_id] = count if known is None else _merged(known, count)
    _add_rows(_BUCKET_COLUMNS, _ADD_TO_BUCKET, [(*use, *count) for use, count in sorted(counts.items())])
    _add_rows(_KEY_COLUMNS, _ADD_TO_KEY, [(key_id, *count) for key_id, count in sorted(keys.items())])


def _add_rows(columns: Mapping[str, str], statement: str, rows: list[tuple[Any, ...]]) -> None:
    """On PostgreSQL all in one statement: thousands of keys are in use at once, and a statement for each would cost the
    verdicts beside it their time."""
    if not rows:
        return
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            arrays = ", ".join(f"%s::{kind}[]" for kind in columns.values())
            cursor.execute(
                statement.replace(_VALUES, f"SELECT * FROM unnest({arrays})"),  # noqa: S608  types of ours
                [list(column) for column in zip(*rows, strict=True)],
            )
        else:
            values = f"VALUES ({', '.join(['%s'] * len(columns))})"
            cursor.executemany(statement.replace(_VALUES, values), [_row(*row) for row in rows])


_VALUES = "<values>"
_BUCKET_COLUMNS = {
    "key_id": "text",
    "minute": "timestamptz",
    "source": "text",
    "user_agent": "text",
    "endpoint": "text",
    "origin": "text",
    "outcome": "text",
    "count": "int",
    "first_at": "timestamptz",
    "last_at": "timestamptz",
}
_KEY_COLUMNS = {"key_id": "text", "count": "bigint", "first_at": "timestamptz", "last_at": "timestamptz"}


_ADD_TO_BUCKET = """
    INSERT INTO keyvault_usebucket AS was
        (key_id, minute, source, user_agent, endpoint, origin, outcome, count, first_at, last_at)
    <values>
    ON CONFLICT (key_id, minute, source, user_agent, endpoint, origin, outcome) DO UPDATE SET
        count = was.count + excluded.count,
        first_at = CASE WHEN excluded.first_at < was.first_at THEN excluded.first_at ELSE was.first_at END,
        last_at = CASE WHEN excluded.last_at > was.last_at THEN excluded.last_at ELSE was.last_at END
"""
_ADD_TO_KEY = """
    INSERT INTO keyvault_keyuse AS was (key_id, count, first_at, last_at) <values>
    ON CONFLICT (key_id) DO UPDATE SET
        count = was.count + excluded.count,
        first_at = CASE WHEN excluded.first_at < was.first_at THEN excluded.first_at ELSE was.first_at END,
        last_at = CASE WHEN excluded.last_at > was.last_at THEN excluded.last_at ELSE was.last_at END
"""
"""In SQL, which SQLite and PostgreSQL share here: Django adds to a row in several statements, each reporter does it
twice a second for every key in use, and SQLite would have no time left for other writers."""


def _row(*values: Any) -> list[Any]:
    """As the database takes them."""
    adapted = connection.ops.adapt_datetimefield_value
    return [
        adapted(value) if isinstance(value, datetime) else value.value if isinstance(value, Outcome) else value
        for value in values
    ]


@dataclass(frozen=True, slots=True)
class Observation:
    """Up to when every live reporter has reported (None: none is live), and when one was last found lost."""

    through: datetime | None
    lost_at: datetime | None


def note_lost(now: datetime) -> None:
    """Marks reporters that cannot be believed as lost: a dead one must not hold up silence for ever, and one whose
    clock is ahead must not vouch for what has not been yet. For the engine's turn.

    One that is alive takes the mark away with its next report: it has kept its counts.
    """
    cannot_vouch = Q(flushed_through_at__lt=now - LOST_AFTER) | Q(flushed_through_at__gt=now + LOST_AFTER)
    lost = live_reporters().filter(cannot_vouch)
    # Asked first: a write takes SQLite's one lock, and mostly there is nothing to write.
    if lost.exists() and (count := lost.update(lost_at=now)):
        _log.warning("reporters of usage are lost, or their clocks are off", extra={"count": count})


def observe(now: datetime | None = None) -> Observation:
    """Reads only. Nothing is observed that lies after `now`, whatever a reporter's clock says."""
    through = live_reporters().aggregate(through=Min("flushed_through_at"))["through"]
    if through is not None and now is not None:
        through = min(through, now)
    return Observation(through, UsageReporter.objects.aggregate(at=Max("lost_at"))["at"])


def live_reporters() -> QuerySet[UsageReporter]:
    """Those that neither said farewell nor were found lost."""
    return UsageReporter.objects.filter(stopped_at__isnull=True, lost_at__isnull=True)


def longest_gap_seconds(key_id: str) -> int:
    """The longest pause between two minutes in which the key was used, of those kept; 0 when it was not.

    Of allowed uses alone: a client that is refused every minute says nothing of another that comes once a month.
    """
    minutes = UseBucket.objects.filter(key_id=key_id, outcome=Outcome.ALLOWED).order_by("minute")
    longest, before = 0, None
    for minute in minutes.values_list("minute", flat=True).distinct().iterator():
        if before is not None:
            longest = max(longest, int((minute - before).total_seconds()))
        before = minute
    return longest


def forget_old(now: datetime) -> None:
    """Deletes minutes of more than 400 days ago, some thousands at a time, and reporters that are long gone.

    Kept for good: a key's total with its first and last use, suspected exposures, and when a reporter was last
    lost, for that restarts a silence. Evidence has its own copy of what it rests on.
    """
    old = (
        UseBucket.objects.filter(minute__lt=now - KEPT_FOR).exclude(outcome__in=EXPOSURES).values_list("pk", flat=True)
    )
    UseBucket.objects.filter(pk__in=list(old[:_MOST_FORGOTTEN])).delete()
    long_ago, last_lost_at = now - _GONE_KEPT_FOR, observe().lost_at
    UsageReporter.objects.filter(stopped_at__lt=long_ago).delete()
    if last_lost_at is not None:
        UsageReporter.objects.filter(lost_at__lt=min(long_ago, last_lost_at)).delete()


usage_log = UsageLog()
"""This process's own."""

os.register_at_fork(after_in_child=usage_log.forget)
