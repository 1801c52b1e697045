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
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import chain, islice
from multiprocessing.util import Finalize
from time import sleep
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from django.db import InterfaceError, OperationalError, close_old_connections, connection, connections, transaction
from django.db.models import Max, Min, Q, QuerySet

from keyvault.domain.free_text import MAX_REDACTED_LENGTH, MAX_STORED_LENGTH, clean_text
from keyvault.models import UsageReporter, UseBucket
from keyvault.models.usage import EXPOSURES, UseOutcome
from keyvault.services.idempotency import shred_used
from keyvault.services.keys.rehashing import pending_rehashes
from keyvault.services.peppers.ring import load_peppers
from keyvault.services.postgres.raw_queries import ask
from keyvault.services.work.thread_priority import lower_priority

_log = logging.getLogger(__name__)

FLUSH_SECONDS = 1.0
LOST_AFTER = timedelta(seconds=10)
"""A live reporter reports every FLUSH_SECONDS; one this late, or this far ahead, is taken for dead."""

KEPT_FOR = timedelta(days=400)
"""More than a year: what uses a key once a year is still known, and the pause between two such uses."""

_GONE_KEPT_FOR = timedelta(days=7)
_MOST_FORGOTTEN = 5_000

_MOST_BUCKETS = 20_000


def utc_now() -> datetime:
    return datetime.now(UTC)


Uses = Sequence[Any]
"""Of one bucket, without secrets: a key's id, an endpoint's name, the source (an address in its canonical form, or a
token's id), user agent, the page's origin, a word of Outcome, how many there were, and the first and the last, in
seconds of the epoch. The bucket's minute is that of the last.

Not by name: ten thousand a second are counted on the request path, and written as they are.
"""


class Use(NamedTuple):
    """One bucket: a key, seen in one minute from one source, on one endpoint, with one outcome."""

    key_id: str
    endpoint: str
    source: str
    user_agent: str
    origin: str
    outcome: str
    minute: float


@dataclass(slots=True)
class UsageLog:
    """The uses of this process that are not yet written. Made once for each process that verifies."""

    now: Callable[[], datetime] = utc_now
    reporter_id: str = field(
        default_factory=lambda: f"{socket.gethostname()[:30]}-{os.getpid()}-{secrets.token_hex(6)}"
    )
    _counts: dict[Use, Uses] = field(default_factory=dict)
    _secrets_used: set[str] = field(default_factory=set)
    _sources: list[Callable[[], Collection[Uses]]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _flushing: threading.Lock = field(default_factory=threading.Lock)
    _reports: int = 0
    _unsure: "_Report | None" = None
    """Not known to be written: it was refused, or its answer was lost."""
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def note(
        self, key_id: str, *, source: str, user_agent: str, endpoint: str, outcome: UseOutcome, origin: str = ""
    ) -> None:
        """Some microseconds and no I/O. Of a flood of distinct sources only the first are told apart.

        What a client says about itself is noted without the secrets that it may have put there. Never raises: a
        database that is away costs the client nothing, and the use is kept for the next try.

        The time is taken under the lock that `flush` takes its own under: no use is older than a watermark
        that was given without it.
        """
        source, user_agent, endpoint, origin = (
            clean_text(source[:MAX_REDACTED_LENGTH], 64),
            clean_text(user_agent[:MAX_REDACTED_LENGTH], MAX_STORED_LENGTH),
            clean_text(endpoint[:MAX_REDACTED_LENGTH], 100),
            clean_text(origin[:MAX_REDACTED_LENGTH], MAX_STORED_LENGTH),
        )
        with self._lock:
            at = self.now().timestamp()
            _add(self._counts, (key_id, endpoint, source, user_agent, origin, outcome.value, 1, at, at))

    def note_secret_use(self, token_id: str) -> None:
        """A customer token was accepted: its holder has it, so the answer that showed it need not be kept."""
        with self._lock:
            self._secrets_used.add(token_id)

    def add_source(self, take: Callable[[], Collection[Uses]]) -> None:
        """`take` is asked before each report for what it has counted since the last time, and lets go of it. It must
        hand over every use whose time is before its call: no use is older than a watermark that was given without
        it."""
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
            report=self._reports,
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

        One at a time: a second one's watermark would vouch for counts that the first may yet fail to write. What may
        have been written, but whose answer was lost, is told again as it was, and then not added again.
        """
        with self._flushing:
            report = self._take(farewell)
            try:
                self._send_unsure()
            except Exception:
                self._keep(report.counted, report.used)
                raise
            self._reports += 1
            self._unsure = report._replace(number=self._reports)
            self._send_unsure()

    def _take(self, farewell: bool) -> "_Report":
        """What there is to tell now."""
        with self._lock:
            through = self.now()
            noted, self._counts = self._counts, {}
            used, self._secrets_used = self._secrets_used, set()
        counted: list[Collection[Uses]] = [noted.values()]
        try:
            for take in self._sources:
                counted.append(take())  # noqa: PERF401  what one has told is kept when the next one cannot
        except Exception:
            self._keep(counted, used)
            raise
        return _Report(self.reporter_id, 0, through, farewell, counted, used)

    def _send_unsure(self) -> None:
        report = self._unsure
        if report is None:
            return
        is_known = _write(report)
        self._unsure = None
        # By itself: evidence never waits for it, and what it leaves is shredded when its time is over.
        if report.used or any(map(len, report.counted)):
            shred_used(chain(report.used, (row[0] for rows in report.counted for row in rows if row[5] == _ALLOWED)))
        if self.is_reporting and not is_known:
            # A host that slept for so long that its reporter was forgotten.
            self._introduce(report.through)

    def _keep(self, counted: Iterable[Collection[Uses]], used: set[str]) -> None:
        """For the next try. The lock, for which the request path waits, is held for what was noted meanwhile alone."""
        kept: dict[Use, Uses] = {}
        for some in _in_portions(chain.from_iterable(counted)):
            for row in some:
                _add(kept, row)
        with self._lock:
            late, self._counts = self._counts, kept
            for row in late.values():
                _add(kept, row)
            self._secrets_used |= used

    def _report(self) -> None:
        lower_priority()
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
        except (OperationalError, InterfaceError) as error:
            _log.warning("usage could not be written; it is kept for the next try", extra={"why": error})
        except Exception:  # noqa: BLE001  whatever it was, the next try may do better
            _log.exception("usage could not be written; it is kept for the next try")

    def _look_after_peppers(self) -> None:
        """What else of this process is done off the request path, and needs the database only."""
        try:
            pending_rehashes.write(self.now())
            load_peppers.look()
        except (OperationalError, InterfaceError) as error:
            _log.warning("peppers could not be looked after", extra={"why": error})
        except Exception:  # noqa: BLE001  whatever it was, the next try may do better
            _log.exception("peppers could not be looked after; digests are renewed at the next proof of each key")


T = TypeVar("T")


def _in_portions(all_of_them: Iterable[T]) -> Iterator[list[T]]:
    """Some hundred at a time, each a tenth of a millisecond's work, with a pause after each: a request waits for what
    holds the interpreter, and those behind it until there was time to spare again."""
    left = iter(all_of_them)
    while portion := list(islice(left, _AT_ONCE)):
        yield portion
        sleep(_PAUSE_SECONDS)


def _add(counts: dict[Use, Uses], row: Uses) -> None:
    """Bounded: beyond that who it was is no longer told apart; how many there were is."""
    *bucket, times, first, last = row
    use = Use._make((*bucket, last // 60))
    known = counts.get(use)
    if known is None and len(counts) >= _MOST_BUCKETS:
        use = use._replace(source="", user_agent="", origin="")
        known = counts.get(use)
    if known is not None:
        before, known_first, known_last = known[6:]
        times, first, last = before + times, min(known_first, first), max(known_last, last)
    counts[use] = (*use[:6], times, first, last)


class _Report(NamedTuple):
    """What a reporter says: its counts, `through` when these are all, and whether that is its last word. `used` are
    secrets that were used."""

    reporter_id: str
    number: int
    through: datetime
    is_farewell: bool
    counted: Sequence[Collection[Uses]]
    used: set[str]


def _write(report: _Report) -> bool:
    """Adds to what stands there; order-independent, so that late and early reporters agree. Whether the reporter is
    known; all in one transaction. A report that was written before adds nothing.

    Every reporter takes its own row first and then the others in the same order, all buckets before all keys, so that
    none waits in a ring.
    """
    stopped_at = report.through if report.is_farewell else None
    peppers = load_peppers.newest_versions()
    rows = chain.from_iterable(report.counted)
    if connection.vendor == "postgresql":
        pieces = [_encode(portion) for portion in _in_portions(rows)]
        (told,) = ask(
            _REPORT.encode(),
            [
                report.reporter_id.encode(),
                str(report.number).encode(),
                report.through.isoformat().encode(),
                None if stopped_at is None else stopped_at.isoformat().encode(),
                _encode(peppers),
                b"[%b]" % b",".join(pieces),
            ],
        )
        return told.ntuples > 0
    with transaction.atomic():
        reporter = UsageReporter.objects.filter(reporter_id=report.reporter_id)
        if not reporter.filter(report__gte=report.number).exists():
            _add_to_rows(list(rows))
        known = reporter.update(
            report=report.number,
            flushed_through_at=report.through,
            peppers=peppers,
            stopped_at=stopped_at,
            lost_at=None,
        )
    return known > 0


def _add_to_rows(rows: Sequence[Uses]) -> None:
    with connection.cursor() as cursor:
        cursor.executemany(
            _ADD_TO_BUCKET.replace(_ROWS, f"VALUES ({', '.join(['%s'] * 10)})"),
            [(*row[:7], _at(row[7]), _at(row[8]), _at(row[8] // 60 * 60)) for row in rows],
        )
        cursor.executemany(
            _ADD_TO_KEY.replace(_ROWS, f"VALUES ({', '.join(['%s'] * 4)})"),
            [(row[0], row[6], _at(row[7]), _at(row[8])) for row in rows if row[5] == _ALLOWED],
        )


def _at(seconds: float) -> str | None:
    """As SQLite has it."""
    return connection.ops.adapt_datetimefield_value(datetime.fromtimestamp(seconds, UTC))


_ALLOWED: Final = UseOutcome.ALLOWED.value
"""An enum takes its time to find its members, and these are thousands of rows."""

_AT_ONCE: Final = 250
_PAUSE_SECONDS: Final = 0.001

_encode: Final = msgspec.json.Encoder().encode

_ROWS = "<rows>"
_ADD_TO_BUCKET = """
    INSERT INTO keyvault_usebucket AS was
        (key_id, endpoint, source, user_agent, origin, outcome, count, first_at, last_at, minute)
    <rows>
    ON CONFLICT (key_id, minute, source, user_agent, endpoint, origin, outcome) DO UPDATE SET
        count = was.count + excluded.count,
        first_at = CASE WHEN excluded.first_at < was.first_at THEN excluded.first_at ELSE was.first_at END,
        last_at = CASE WHEN excluded.last_at > was.last_at THEN excluded.last_at ELSE was.last_at END
"""
_ADD_TO_KEY = """
    INSERT INTO keyvault_keyuse AS was (key_id, count, first_at, last_at) <rows>
    ON CONFLICT (key_id) DO UPDATE SET
        count = was.count + excluded.count,
        first_at = CASE WHEN excluded.first_at < was.first_at THEN excluded.first_at ELSE was.first_at END,
        last_at = CASE WHEN excluded.last_at > was.last_at THEN excluded.last_at ELSE was.last_at END
"""
"""In SQL, which SQLite and PostgreSQL share here: Django adds to a row in several statements, each reporter does it
each second for every key in use, and SQLite would have no time left for other writers."""

_BUCKETS = """
    SELECT key_id, endpoint, source, user_agent, origin, outcome, count, first_at, last_at, minute FROM used
    ORDER BY key_id, minute, source, user_agent, endpoint, origin, outcome
"""
_KEYS = """
    SELECT key_id, sum(count), min(first_at), max(last_at) FROM used
    WHERE outcome = 'allowed' AND (SELECT count(*) FROM buckets) >= 0
    GROUP BY key_id
    ORDER BY key_id
"""
_REPORT = """
    WITH reporter AS MATERIALIZED (
        SELECT report FROM keyvault_usagereporter WHERE reporter_id = $1 FOR UPDATE
    ),
    used AS MATERIALIZED (
        SELECT
            (use ->> 0) COLLATE "C" AS key_id,
            (use ->> 1) COLLATE "C" AS endpoint,
            (use ->> 2) COLLATE "C" AS source,
            (use ->> 3) COLLATE "C" AS user_agent,
            (use ->> 4) COLLATE "C" AS origin,
            (use ->> 5) COLLATE "C" AS outcome,
            sum((use ->> 6)::bigint) AS count,
            to_timestamp(min((use ->> 7)::float8)) AS first_at,
            to_timestamp(max((use ->> 8)::float8)) AS last_at,
            to_timestamp(floor((use ->> 8)::float8 / 60) * 60) AS minute
        FROM jsonb_array_elements($6::jsonb) AS piece, jsonb_array_elements(piece) AS use
        WHERE NOT EXISTS (SELECT FROM reporter WHERE report >= $2::bigint)
        GROUP BY key_id, minute, source, user_agent, endpoint, origin, outcome
    ),
    buckets AS (<buckets> RETURNING 1),
    keys AS (<keys> RETURNING 1)
    UPDATE keyvault_usagereporter
    SET report = $2::bigint, flushed_through_at = $3::timestamptz, stopped_at = $4::timestamptz, peppers = $5::jsonb,
        lost_at = NULL
    WHERE reporter_id = $1 AND (SELECT count(*) FROM keys) >= 0
    RETURNING 1
"""
_REPORT = _REPORT.replace("<buckets>", _ADD_TO_BUCKET.replace(_ROWS, _BUCKETS))
_REPORT = _REPORT.replace("<keys>", _ADD_TO_KEY.replace(_ROWS, _KEYS))
"""In one statement, since each costs a wait and the interpreter's time; PostgreSQL unpacks the JSON, groups it (it adds
to no row twice in one statement) and sorts it, by bytes, as every reporter does whatever the database's own way is.

It promises no order between the parts of a statement but where one needs what another has done: each counts the rows
of the part before it, which has to be over then.
"""


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
    minutes = UseBucket.objects.filter(key_id=key_id, outcome=UseOutcome.ALLOWED).order_by("minute")
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
