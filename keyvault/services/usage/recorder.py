"""Record who used which key and when: counted in memory on the request path, written shortly after by a thread.

A key counts as silent only for times that every reporter covers. Each process that verifies keys is a reporter. It
writes its counts together with a watermark: the time up to which the counts are complete. If a reporter is killed,
another process of its host writes the unreported uses from a file. Without that file the reporter is marked lost, and
any wait for silence of the keys that it may have verified restarts from that moment.

A reporter uses its own host's clock, and the engine compares it with the engine's clock. Clocks must agree within
LOST_AFTER, as NTP ensures. A reporter whose clock differs by more, in either direction, is marked lost on every check.
Silence cannot be established until the clock is corrected. A smaller difference shifts times by that much.
"""

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import chain, islice
from pathlib import Path
from time import sleep
from typing import Any, ClassVar, Final, NamedTuple, Protocol, TypeVar

import msgspec
from django.conf import settings
from django.db import connection, transaction
from django.db.models import Max, Min, Q, QuerySet
from django.db.models.functions import Greatest

from keyvault.access.catalog import WITHOUT_TRAFFIC
from keyvault.domain.environments import Environment
from keyvault.domain.free_text import MAX_REDACTED_LENGTH, MAX_STORED_LENGTH, clean_text
from keyvault.domain.sources import name_source
from keyvault.models import UsageReporter
from keyvault.models.usage import EXPOSURES, SIGNS_OF_LIFE, UseOutcome, UseSpan
from keyvault.services.idempotency import shred_used
from keyvault.services.keys.rehashing import pending_rehashes
from keyvault.services.peppers.ring import load_peppers
from keyvault.services.postgres.raw_queries import execute
from keyvault.services.recording.signals import keys_refused
from keyvault.services.usage.unreported_uses import DeadFile, Entry, Mark, UnreportedUses, list_dead
from keyvault.services.work.background_thread import BackgroundThread, forget_at_fork, log_failure

_log = logging.getLogger(__name__)

FLUSH_SECONDS = 1.0
"""Interval between two reports, in seconds."""

LOST_AFTER = timedelta(seconds=10)
"""Maximum difference between a live reporter's watermark and now, late or early. It reports every FLUSH_SECONDS."""

_MAX_BUCKETS = 20_000
"""Maximum buckets in memory with a source each. Further uses are counted without source, user agent and origin."""


def utc_now() -> datetime:
    return datetime.now(UTC)


Uses = Sequence[Any]
"""One bucket's counts as a tuple, without secrets.

The items are: key id, endpoint name, source (canonical address or token id), user agent, page origin, outcome value,
count, first use and last use. Times are in seconds since the epoch. The minute of the last use is the bucket's minute.

Positional for speed: the request path counts ten thousand uses a second, and stores the tuples without conversion.
"""


class Use(NamedTuple):
    """Identity of a bucket: one key in one minute from one source, on one endpoint, with one outcome."""

    key_id: str
    endpoint: str
    source: str
    user_agent: str
    origin: str
    outcome: str
    minute: float


class UsageSink(Protocol):
    """Where reports are stored. `keeps_file`: unreported uses are kept in a file, for another process to report."""

    keeps_file: bool

    def register(self, reporter_id: str, now: datetime, report: int) -> None:
        """Register the reporter, before its first verdict. `report`: the number of its last report."""

    def store(self, report: "Report") -> bool:
        """Store a report; a number that is stored already adds nothing. Return whether the reporter is known."""

    def shred(self, report: "Report") -> None:
        """Shred the stored replies of secrets that were used."""

    def report_dead(self, now: datetime) -> None:
        """Send the last reports of killed processes of this host."""


class DatabaseSink:
    keeps_file = True

    def register(self, reporter_id: str, now: datetime, report: int) -> None:
        register_reporter(reporter_id, settings.ENVIRONMENTS, load_peppers.newest_versions(), now, report=report)

    def store(self, report: "Report") -> bool:
        is_known = _write(report, load_peppers.newest_versions())
        _notify_of_refused(report)
        return is_known

    def shred(self, report: "Report") -> None:
        if report.used or any(map(len, report.counted)):
            shred_used(chain(report.used, (row[0] for rows in report.counted for row in rows if row[5] == _ALLOWED)))

    def report_dead(self, now: datetime) -> None:
        report_dead(now)


@dataclass(slots=True, eq=False)
class UsageLog(BackgroundThread):
    """Unwritten uses of this process. Create one for each process that verifies keys.

    Start it before the first verdict. Stopping it deregisters the reporter.
    """

    thread_name: ClassVar[str] = "usage"

    now: Callable[[], datetime] = utc_now
    sink: UsageSink = field(default_factory=DatabaseSink)
    reporter_id: str = field(
        default_factory=lambda: f"{socket.gethostname()[:30]}-{os.getpid()}-{secrets.token_hex(6)}"
    )
    _counts: dict[Use, Uses] = field(default_factory=dict)
    _secrets_used: set[str] = field(default_factory=set)
    _counters: list[Callable[[], Collection[Uses]]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _flushing: threading.Lock = field(default_factory=threading.Lock)
    _reports: int = 0
    _file: UnreportedUses | None = None
    """Uses that another process reports if this one is killed; None before the start, or without a writable file."""
    _unconfirmed: "Report | None" = None
    """The last report, if its write failed or its outcome is unknown."""

    def note(
        self, key_id: str, *, source: str, user_agent: str, endpoint: str, outcome: UseOutcome, origin: str = ""
    ) -> None:
        """Count one use. Takes microseconds, performs no I/O and never raises.

        In a flood of distinct sources only the first _MAX_BUCKETS are distinguished. Secrets in client-supplied text
        are redacted. If the database is unavailable the use is kept for the next flush.

        The lock orders this timestamp and the watermark in `_take`: a use that is not in a report is not older than the
        report's watermark.
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
        self.protect(key_id, endpoint, source, user_agent, origin, outcome.value, at)

    def protect(self, *entry: *Entry) -> None:
        """Keep a use for a successor, after the first count of its bucket. Takes microseconds and never raises."""
        file = self._file
        if file is not None:
            file.note(*entry)

    def note_secret_use(self, token_id: str) -> None:
        """Note that a customer token was accepted: its holder has it, so the stored reply with it may be shredded."""
        with self._lock:
            self._secrets_used.add(token_id)

    def add_counter(self, take: Callable[[], Collection[Uses]]) -> None:
        """Register a callable that returns, and releases, what it counted since its last call.

        `take` runs before each report. It must return every use with a time before the call, because the watermark
        covers them.
        """
        self._counters.append(take)

    def _prepare(self) -> None:
        with self._lock:
            self.sink.register(self.reporter_id, self.now(), self._reports)
        self._file = self._open_file() if self.sink.keeps_file else None

    def _open_file(self) -> UnreportedUses | None:
        try:
            return UnreportedUses(_folder(), self.reporter_id)
        except OSError:
            _log.exception("unreported uses cannot be kept in a file; if this process is killed, silence restarts")
            return None

    @property
    def is_reporting(self) -> bool:
        """Whether the reporting thread is running."""
        return self._thread is not None

    def _finish(self) -> None:
        file, is_reported = self._file, False
        try:
            with log_failure(_log, "the last uses could not be written; another process writes those in its file"):
                self.flush(is_final=True)
                is_reported = True
        finally:
            self._file = None
            if file is not None:
                file.close(is_reported=is_reported)

    def forget(self) -> None:
        """Reset in a forked child, which is a reporter of its own. The parent writes its own pending counts."""
        if self._file is not None:
            self._file.forget()
        self.__init__(self.now, self.sink, _counters=self._counters)  # type: ignore[misc]  # a dataclass's own, with its fields

    def flush(self, *, is_final: bool = False) -> None:
        """Write the counts and the watermark in one transaction. A failed flush keeps the counts.

        One flush runs at a time: a second one's watermark would cover counts that the first may still fail to write. A
        report that may have been written is sent again unchanged, and the database ignores a report it already has.
        """
        with self._flushing:
            report = self._take(is_final)
            try:
                self._send_unconfirmed()
            except Exception:
                self._keep(report)
                raise
            self._reports += 1
            self._unconfirmed = report._replace(number=self._reports)
            if self._file is not None and report.mark is not None:
                self._file.send(self._reports, report.mark)
            self._send_unconfirmed()

    def _take(self, is_final: bool) -> "Report":
        """Take everything that is pending."""
        mark = None if self._file is None else self._file.mark()
        with self._lock:
            through = self.now()
            noted, self._counts = self._counts, {}
            used, self._secrets_used = self._secrets_used, set()
        counted: list[Collection[Uses]] = [noted.values()]
        try:
            for take in self._counters:
                counted.append(take())  # noqa: PERF401  earlier counts are kept when a later counter raises
        except Exception:
            self._keep(Report(self.reporter_id, 0, through, is_final, counted, used, mark))
            raise
        return Report(self.reporter_id, 0, through, is_final, counted, used, mark)

    def _send_unconfirmed(self) -> None:
        report = self._unconfirmed
        if report is None:
            return
        is_known = self.sink.store(report)
        self._unconfirmed = None
        if self._file is not None and report.mark is not None:
            self._file.confirm()
        # Separate from the report: evidence never waits for it, and a secret it misses is shredded when it expires.
        self.sink.shred(report)
        if self.is_reporting and not is_known:
            # The host slept for so long that this reporter's row was deleted.
            self.sink.register(self.reporter_id, report.through, self._reports)

    def _keep(self, report: "Report") -> None:
        """Put counts back for the next flush.

        Holds the lock, which the request path needs, only while it adds the newest counts.
        """
        kept: dict[Use, Uses] = {}
        for portion in _in_portions(chain.from_iterable(report.counted)):
            for row in portion:
                _add(kept, row)
        with self._lock:
            late, self._counts = self._counts, kept
            for row in late.values():
                _add(kept, row)
            self._secrets_used |= report.used
        if self._file is not None and report.mark is not None:
            self._file.keep(report.mark)

    def _loop(self) -> None:
        self._repeat(self._work, FLUSH_SECONDS)

    def _work(self) -> None:
        self._try_flush()
        self.sink.report_dead(self.now())
        self._maintain_peppers()

    def _try_flush(self) -> None:
        with log_failure(_log, "usage could not be written; it is kept for the next attempt"):
            self.flush()

    def _maintain_peppers(self) -> None:
        """Write pending rehashes and check for new peppers. A failure of one does not stop the other."""
        failure = "rehashes could not be written; each key's digest is renewed when the key is next proved"
        with log_failure(_log, failure, outage="rehashes could not be written"):
            pending_rehashes.write(self.now())
        with log_failure(_log, "the check for new peppers failed; it is repeated with the next report"):
            load_peppers.poll()


T = TypeVar("T")


def _in_portions(items: Iterable[T]) -> Iterator[list[T]]:
    """Yield some hundred items at a time, with a pause after each portion.

    A portion takes a tenth of a millisecond. The pause releases the interpreter, which requests wait for.
    """
    remaining = iter(items)
    while portion := list(islice(remaining, _PORTION_SIZE)):
        yield portion
        sleep(_PAUSE_SECONDS)


def _add(counts: dict[Use, Uses], row: Uses) -> None:
    """Add one row to the counts, with bounded memory. Beyond the bound only totals are kept, not their sources."""
    *bucket, times, first, last = row
    use = Use._make((*bucket, last // 60))
    known = counts.get(use)
    if known is None and len(counts) >= _MAX_BUCKETS:
        use = use._replace(source="", user_agent="", origin="")
        known = counts.get(use)
    if known is not None:
        before, known_first, known_last = known[6:]
        times, first, last = before + times, min(known_first, first), max(known_last, last)
    counts[use] = (*use[:6], times, first, last)


def register_reporter(
    reporter_id: str,
    environments: Collection[str],
    peppers: Mapping[str, int],
    now: datetime,
    *,
    merchants: Collection[str] | None = None,
    report: int = 0,
) -> None:
    """Register a process that reports uses. It verifies keys of the merchants (None: all) in the environments."""
    UsageReporter.objects.create(
        reporter_id=reporter_id,
        started_at=now,
        flushed_through_at=now,
        report=report,
        peppers=peppers,
        environment=next(iter(environments)) if len(environments) == 1 else "",
        merchants="" if merchants is None else f",{','.join(sorted(merchants))},",
    )


class Report(NamedTuple):
    """One report: its counts, the watermark `through`, and whether the reporter deregisters with it (`is_final`).

    `used`: ids of customer tokens whose secrets were used. `mark`: the part of the file of unreported uses that it
    covers.
    """

    reporter_id: str
    number: int
    through: datetime
    is_final: bool
    counted: Sequence[Collection[Uses]]
    used: set[str]
    mark: Mark | None = None


def _folder() -> Path:
    return Path(settings.DATA_DIR) / "uses"


def report_dead(now: datetime) -> None:
    """Send the last reports of killed processes of this host: the uses that they had not reported.

    Each use in a file counts once. A file that may lack uses is deleted: its reporter is then marked lost.
    """
    for file in list_dead(_folder()):
        with log_failure(_log, "uses of a killed process could not be reported; the next round repeats it"):
            _report_dead_file(file, now)


def _report_dead_file(file: DeadFile, now: datetime) -> None:
    row = UsageReporter.objects.filter(pk=file.reporter_id, stopped_at__isnull=True).first()
    entries = None if row is None else file.read(row.report)
    if row is not None and entries is not None:
        uses = [(*entry[:6], 1, entry[6], entry[6]) for entry in entries]
        number = max(row.report, file.last_number) + 1
        report = Report(file.reporter_id, number, now, is_final=True, counted=[uses], used=set())
        _write(report, load_peppers.newest_versions())
        _notify_of_refused(report)
        _log.warning("reported the uses of a killed process", extra={"count": len(uses)})
    file.delete()


def store_report(
    reporter_id: str,
    number: int,
    through: datetime,
    uses: Sequence[Uses],
    peppers: Mapping[str, int],
    *,
    is_final: bool,
) -> bool:
    """Store the report of a process without a log-in to the database. Return whether the reporter's row exists.

    A number that is stored already adds nothing. `peppers`: its newest loaded version of each set; empty: it has none.
    """
    report = Report(reporter_id, number, through, is_final, [uses], set())
    is_known = _write(report, peppers)
    _notify_of_refused(report)
    return is_known


def _notify_of_refused(report: Report) -> None:
    """Notify the receivers of refused keys in a stored report. One that fails must not stop the reports."""
    if refused := {row[0] for rows in report.counted for row in rows if row[5] == _REFUSED}:
        with log_failure(_log, "receivers were not notified of refused keys"):
            keys_refused.send(None, key_ids=refused, now=report.through)


def _write(report: Report, peppers: Mapping[str, int]) -> bool:
    """Add a report to the stored counts in one transaction. Return whether the reporter's row exists.

    Additions commute, so late and early reporters agree. A report that was already written adds nothing.

    To prevent deadlocks, each reporter locks its own row first and then the others in one fixed order: all contexts
    before all buckets, these before all sources, and these before all keys.
    """
    stopped_at = report.through if report.is_final else None
    rows = chain.from_iterable(report.counted)
    if connection.vendor == "postgresql":
        pieces = [_encode([(*row, name_source(row[2], row[3])) for row in portion]) for portion in _in_portions(rows)]
        (reply,) = execute(
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
        return reply.ntuples > 0
    with transaction.atomic():
        reporter = UsageReporter.objects.filter(reporter_id=report.reporter_id)
        if not reporter.filter(report__gte=report.number).exists():
            _add_to_rows(list(rows))
        known = reporter.update(
            report=Greatest("report", report.number),
            flushed_through_at=report.through,
            peppers=peppers,
            stopped_at=stopped_at,
            lost_at=None,
        )
    return known > 0


def _add_to_rows(rows: Sequence[Uses]) -> None:
    lock_contexts({tuple(row[:6]) for row in rows})
    with connection.cursor() as cursor:
        cursor.executemany(
            _ADD_TO_BUCKET.replace(_ROWS, _BUCKET_ROW),
            [(row[6], _at(row[7]), _at(row[8]), _at(row[8] // 60 * 60), *row[:6]) for row in rows],
        )
        cursor.executemany(
            _ADD_TO_SOURCE.replace(_ROWS, _SOURCE_ROW),
            [_source_row(row) for row in sorted(rows, key=lambda row: row[8]) if row[5] in SIGNS_OF_LIFE],
        )
        cursor.executemany(
            _ADD_TO_SOURCE.replace(_ROWS, _REFUSED_ROW), [_refused_row(row) for row in rows if row[5] == _REFUSED]
        )
        cursor.executemany(
            _ADD_ATTEMPT.replace(_ROWS, _ATTEMPT_ROW), [_attempt_row(row) for row in rows if row[5] != _ALLOWED]
        )
        cursor.executemany(
            _ADD_TO_KEY.replace(_ROWS, f"VALUES ({', '.join(['%s'] * 8)})"),
            [_key_row(row) for row in sorted(rows, key=lambda row: row[8]) if row[5] == _ALLOWED],
        )


def lock_contexts(contexts: Collection[tuple[str, ...]]) -> None:
    """Add the contexts that are missing, and lock all of them until the commit, in the order of every reporter.

    The items of a context are the first six of Uses.
    """
    with connection.cursor() as cursor:
        cursor.executemany(_ADD_CONTEXT.replace(_ROWS, f"VALUES ({', '.join(['%s'] * 6)})"), sorted(contexts))


def add_to_buckets(rows: Iterable[Sequence[Any]], span: UseSpan, *, is_exposure: bool) -> None:
    """Add counts to buckets of one span. Call it in a transaction.

    The items of a row are: count, first use, last use, when the bucket begins, and the context's id.
    """
    adapt = connection.ops.adapt_datetimefield_value
    values = f"VALUES (%s, %s, %s, %s, %s, {is_exposure}, {span:d})"
    with connection.cursor() as cursor:
        cursor.executemany(
            _ADD_TO_BUCKET.replace(_ROWS, values), [(row[0], *map(adapt, row[1:4]), row[4]) for row in rows]
        )


def _key_row(row: Uses) -> tuple[Any, ...]:
    """Return the values of `_ADD_TO_KEY`: one minute of a key."""
    minute = int(row[8] // 60)
    minutes = (row[6], 0, None, None) if row[1] in WITHOUT_TRAFFIC else (0, 1, minute, minute)
    return (row[0], row[6], _at(row[7]), _at(row[8]), *minutes)


def _source_row(row: Uses) -> tuple[Any, ...]:
    """Return the values of `_SOURCE_ROW`: one minute of one source."""
    is_allowed = row[5] == _ALLOWED
    minute, at = int(row[8] // 60), _at(row[8])
    times = (minute, minute, at, None) if is_allowed else (None, None, None, at)
    return (row[0], name_source(row[2], row[3]), *times, row[0])


def _refused_row(row: Uses) -> tuple[Any, ...]:
    """Return the values of `_REFUSED_ROW`."""
    name = name_source(row[2], row[3])
    return (row[0], name, _at(row[8]), row[0], name)


def _attempt_row(row: Uses) -> tuple[Any, ...]:
    """Return the values of `_ATTEMPT_ROW`."""
    at = _at(row[8])
    return (row[0], row[5], at, row[5], row[0], name_source(row[2], row[3]), at)


def _at(seconds: float) -> str | None:
    """Convert epoch seconds to SQLite's datetime representation."""
    return connection.ops.adapt_datetimefield_value(datetime.fromtimestamp(seconds, UTC))


_ALLOWED: Final = UseOutcome.ALLOWED.value
_REFUSED: Final = UseOutcome.REFUSED.value
"""A plain string: looking up an enum member is too slow for thousands of rows."""

_PORTION_SIZE: Final = 250
_PAUSE_SECONDS: Final = 0.001

_encode: Final = msgspec.json.Encoder().encode

_ROWS = "<rows>"
_ADD_CONTEXT = """
    INSERT INTO keyvault_usecontext AS was (key_id, endpoint, source, user_agent, origin, outcome)
    <rows>
    ON CONFLICT (key_id, outcome, source, user_agent, endpoint, origin) WHERE key_id IS NOT NULL
    DO UPDATE SET origin = was.origin
"""
"""The update changes nothing. It locks the row until the commit, so that retention does not delete it meanwhile.

Other reporters may still refer to the row: the index is partial, so that the lock is a FOR NO KEY UPDATE.
"""

_IS_EXPOSURE = f"outcome IN ({', '.join(repr(outcome.value) for outcome in EXPOSURES)})"

_ADD_TO_BUCKET = """
    INSERT INTO keyvault_usebucket AS was (count, first_at, last_at, minute, context_id, is_exposure, span)
    <rows>
    ON CONFLICT (context_id, span, minute) DO UPDATE SET
        count = was.count + excluded.count,
        first_at = CASE WHEN excluded.first_at < was.first_at THEN excluded.first_at ELSE was.first_at END,
        last_at = CASE WHEN excluded.last_at > was.last_at THEN excluded.last_at ELSE was.last_at END
"""
_ADD_TO_SOURCE = """
    INSERT INTO keyvault_keysource AS was
        (key_id, name, first_minute, last_minute, last_at, denied_at, refused_at, longest_gap_minutes)
    <rows>
    ON CONFLICT (key_id, name) DO UPDATE SET
        first_minute = CASE
            WHEN was.first_minute IS NULL OR excluded.first_minute < was.first_minute THEN excluded.first_minute
            ELSE was.first_minute END,
        last_minute = CASE
            WHEN was.last_minute IS NULL OR excluded.last_minute > was.last_minute THEN excluded.last_minute
            ELSE was.last_minute END,
        last_at = CASE
            WHEN was.last_at IS NULL OR excluded.last_at > was.last_at THEN excluded.last_at ELSE was.last_at END,
        denied_at = CASE
            WHEN was.denied_at IS NULL OR excluded.denied_at > was.denied_at THEN excluded.denied_at
            ELSE was.denied_at END,
        refused_at = CASE
            WHEN was.refused_at IS NULL OR excluded.refused_at > was.refused_at THEN excluded.refused_at
            ELSE was.refused_at END,
        longest_gap_minutes = CASE
            WHEN excluded.first_minute - was.last_minute > was.longest_gap_minutes
                AND excluded.first_minute - was.last_minute > excluded.longest_gap_minutes
                THEN excluded.first_minute - was.last_minute
            WHEN excluded.longest_gap_minutes > was.longest_gap_minutes THEN excluded.longest_gap_minutes
            ELSE was.longest_gap_minutes END
"""
_ADD_ATTEMPT = """
    INSERT INTO keyvault_keyattempt AS was (key_id, outcome, last_at, unknown_at)
    <rows>
    ON CONFLICT (key_id, outcome) DO UPDATE SET
        last_at = CASE WHEN excluded.last_at > was.last_at THEN excluded.last_at ELSE was.last_at END,
        unknown_at = CASE
            WHEN was.unknown_at IS NULL OR excluded.unknown_at > was.unknown_at THEN excluded.unknown_at
            ELSE was.unknown_at END
"""
_ADD_TO_KEY = """
    INSERT INTO keyvault_keyuse AS was
        (key_id, count, first_at, last_at, acknowledgements, minutes, first_minute, last_minute)
    <rows>
    ON CONFLICT (key_id) DO UPDATE SET
        count = was.count + excluded.count,
        acknowledgements = was.acknowledgements + excluded.acknowledgements,
        minutes = was.minutes + CASE
            WHEN was.last_minute IS NULL OR excluded.first_minute > was.last_minute THEN excluded.minutes
            WHEN excluded.last_minute > was.last_minute THEN 1
            ELSE 0 END,
        first_minute = CASE
            WHEN was.first_minute IS NULL OR excluded.first_minute < was.first_minute THEN excluded.first_minute
            ELSE was.first_minute END,
        last_minute = CASE
            WHEN was.last_minute IS NULL OR excluded.last_minute > was.last_minute THEN excluded.last_minute
            ELSE was.last_minute END,
        first_at = CASE WHEN excluded.first_at < was.first_at THEN excluded.first_at ELSE was.first_at END,
        last_at = CASE WHEN excluded.last_at > was.last_at THEN excluded.last_at ELSE was.last_at END
"""
"""Upserts in SQL that SQLite and PostgreSQL share.

Django needs several statements per row. Each reporter does this every second for every key in use, and SQLite would
have no time left for other writers.
"""

_BUCKET_ROW = """
    SELECT %s, %s, %s, %s, id, <is_exposure>, 1 FROM keyvault_usecontext
    WHERE key_id = %s AND endpoint = %s AND source = %s AND user_agent = %s AND origin = %s AND outcome = %s
""".replace("<is_exposure>", _IS_EXPOSURE)

_IS_PRIVATE = """(
    SELECT c.kind FROM keyvault_key k JOIN keyvault_credential c ON c.credential_id = k.credential_id
    WHERE k.key_id = <key_id>) = 'private'"""
"""Shoppers are the sources of a public key. Silence does not retire it, so they are not kept.

A scalar subquery, because PostgreSQL may turn EXISTS into a join that reads every key.
"""

_SOURCE_ROW = f"SELECT {', '.join(['%s'] * 6)}, NULL, 0 WHERE {_IS_PRIVATE.replace('<key_id>', '%s')}"

_SOURCE = "SELECT id FROM keyvault_keysource known WHERE known.key_id = <key_id> AND known.name = <name>"
_SOURCE_OF_ROW = _SOURCE.replace("<key_id>", "%s").replace("<name>", "%s")
_REFUSED_ROW = f"SELECT %s, %s, NULL, NULL, NULL, NULL, %s, 0 WHERE ({_SOURCE_OF_ROW}) IS NOT NULL"
_ATTEMPT_ROW = f"SELECT %s, %s, %s, CASE WHEN %s = '{_REFUSED}' AND ({_SOURCE_OF_ROW}) IS NULL THEN %s END WHERE true"

_CONTEXT = "key_id, endpoint, source, user_agent, origin, outcome"
_CONTEXTS = "SELECT DISTINCT <context> FROM placed WHERE context_id IS NULL ORDER BY <context>"
_BUCKETS = """
    SELECT
        count, first_at, last_at, minute, coalesce(placed.context_id, contexts.id) AS context_id, <is_exposure>, 1
    FROM placed LEFT JOIN contexts USING (<context>)
    ORDER BY context_id, minute
""".replace("<is_exposure>", _IS_EXPOSURE)
_SOURCES = """
    SELECT
        key_id, name, min(number), max(number), max(allowed_at), max(denied_at), max(refused_at),
        coalesce(max(gap), 0)
    FROM (
        SELECT
            key_id, name, number, allowed_at, denied_at, refused_at,
            number - lag(number) OVER (PARTITION BY key_id, name ORDER BY number) AS gap
        FROM (
            SELECT
                key_id, name,
                CASE WHEN outcome = 'allowed' THEN (extract(epoch FROM minute) / 60)::int END AS number,
                max(last_at) FILTER (WHERE outcome = 'allowed') AS allowed_at,
                max(last_at) FILTER (WHERE outcome = 'denied') AS denied_at,
                max(last_at) FILTER (WHERE outcome = 'refused') AS refused_at
            FROM used
            WHERE outcome IN ('allowed', 'denied', 'refused')
            GROUP BY key_id, name, number
        ) AS minutes
    ) AS gaps
    WHERE (SELECT count(*) FROM buckets) >= 0
    GROUP BY key_id, name
    HAVING key_id IN (SELECT key_id FROM private)
        AND (max(allowed_at) IS NOT NULL OR max(denied_at) IS NOT NULL OR (<source>) IS NOT NULL)
    ORDER BY key_id, name
"""
_SOURCES = _SOURCES.replace("<source>", _SOURCE.replace("<key_id>", 'gaps.key_id COLLATE "default"'))
_SOURCES = _SOURCES.replace("<name>", 'gaps.name COLLATE "default"')
"""The private keys are in HAVING, where PostgreSQL looks each key up in a hash table.

As a condition of WHERE they would be a join. PostgreSQL expects one of them, and would compare each row with each key.
"""

_ATTEMPTS = """
    SELECT
        used.key_id, outcome, max(last_at), max(last_at) FILTER (WHERE outcome = 'refused' AND sources.name IS NULL)
    FROM used LEFT JOIN sources ON sources.key_id = used.key_id AND sources.name = used.name
    WHERE outcome <> 'allowed' AND (SELECT count(*) FROM sources) >= 0
    GROUP BY used.key_id, outcome
    ORDER BY used.key_id, outcome
"""
_KEYS = """
    SELECT
        key_id, sum(count), min(first_at), max(last_at),
        coalesce(sum(count) FILTER (WHERE number IS NULL), 0), count(DISTINCT number), min(number), max(number)
    FROM (
        SELECT
            *, CASE WHEN endpoint NOT IN (<without_traffic>) THEN (extract(epoch FROM minute) / 60)::int END AS number
        FROM used
        WHERE outcome = 'allowed'
    ) AS allowed
    WHERE (SELECT count(*) FROM attempts) >= 0
    GROUP BY key_id
    ORDER BY key_id
""".replace("<without_traffic>", ", ".join(f"'{name}'" for name in WITHOUT_TRAFFIC))
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
            (use ->> 9) COLLATE "C" AS name,
            sum((use ->> 6)::bigint) AS count,
            to_timestamp(min((use ->> 7)::float8)) AS first_at,
            to_timestamp(max((use ->> 8)::float8)) AS last_at,
            to_timestamp(floor((use ->> 8)::float8 / 60) * 60) AS minute
        FROM jsonb_array_elements($6::jsonb) AS piece, jsonb_array_elements(piece) AS use
        WHERE NOT EXISTS (SELECT FROM reporter WHERE report >= $2::bigint)
        GROUP BY key_id, minute, source, user_agent, endpoint, origin, outcome, name
    ),
    placed AS MATERIALIZED (
        SELECT used.*, (
            SELECT id FROM keyvault_usecontext AS known
            WHERE known.key_id = used.key_id COLLATE "default" AND known.outcome = used.outcome COLLATE "default"
                AND known.source = used.source COLLATE "default"
                AND known.user_agent = used.user_agent COLLATE "default"
                AND known.endpoint = used.endpoint COLLATE "default" AND known.origin = used.origin COLLATE "default"
        ) AS context_id
        FROM used
    ),
    private AS MATERIALIZED (SELECT key_id FROM (SELECT DISTINCT key_id FROM used) AS one WHERE <is_private>),
    contexts AS (<contexts> RETURNING id, <context>),
    buckets AS (<buckets> RETURNING 1),
    sources AS (<sources> RETURNING key_id, name),
    attempts AS (<attempts> RETURNING 1),
    keys AS (<keys> RETURNING 1)
    UPDATE keyvault_usagereporter
    SET report = greatest(report, $2::bigint), flushed_through_at = $3::timestamptz, stopped_at = $4::timestamptz,
        peppers = $5::jsonb, lost_at = NULL
    WHERE reporter_id = $1 AND (SELECT count(*) FROM keys) >= 0
    RETURNING 1
"""
_REPORT = _REPORT.replace("<contexts>", _ADD_CONTEXT.replace(_ROWS, _CONTEXTS))
_REPORT = _REPORT.replace("<is_private>", _IS_PRIVATE.replace("<key_id>", 'one.key_id COLLATE "default"'))
_REPORT = _REPORT.replace("<buckets>", _ADD_TO_BUCKET.replace(_ROWS, _BUCKETS)).replace("<context>", _CONTEXT)
_REPORT = _REPORT.replace("<sources>", _ADD_TO_SOURCE.replace(_ROWS, _SOURCES))
_REPORT = _REPORT.replace("<attempts>", _ADD_ATTEMPT.replace(_ROWS, _ATTEMPTS))
_REPORT = _REPORT.replace("<keys>", _ADD_TO_KEY.replace(_ROWS, _KEYS))
"""The whole report in one statement, because each statement costs a round trip and interpreter time.

PostgreSQL unpacks the JSON and groups it, because one statement cannot update a row twice. It sorts bytewise, so that
every reporter uses the same order whatever the database's collation is. Comparisons with a table name the collation of
its indexes.

PostgreSQL does not order the parts of a statement unless one depends on another. Each part therefore counts the rows of
the part before it.
"""


@dataclass(frozen=True, slots=True)
class Observation:
    """The time up to which every live reporter has reported (None: no live reporter), and when one was last lost.

    Reporters that verify no keys of the merchant and the environment in question do not count.
    """

    through: datetime | None
    lost_at: datetime | None


def note_lost(now: datetime) -> None:
    """Mark reporters as lost whose watermark is too old or in the future. The engine calls this on each run.

    A dead reporter must not block silence forever, and one with a fast clock must not cover time that has not passed. A
    live reporter clears the mark with its next report, which has all its counts.
    """
    is_clock_off = Q(flushed_through_at__lt=now - LOST_AFTER) | Q(flushed_through_at__gt=now + LOST_AFTER)
    lost = live_reporters().filter(is_clock_off)
    # Check first: an update takes SQLite's only write lock, and usually there is nothing to update.
    if lost.exists() and (count := lost.update(lost_at=now)):
        _log.warning("usage reporters are lost, or their clocks differ", extra={"count": count})


def observe(now: datetime, merchant_id: str, environment: Environment) -> Observation:
    """Return the observation. Reads only. It never extends past `now`, whatever a reporter's clock shows."""
    has_merchant = Q(merchants="") | Q(merchants__contains=f",{merchant_id},")
    reporters = UsageReporter.objects.filter(has_merchant, environment__in=("", environment))
    seen = reporters.aggregate(through=Min("flushed_through_at", filter=_LIVE), lost_at=Max("lost_at"))
    return Observation(None if seen["through"] is None else min(seen["through"], now), seen["lost_at"])


def live_reporters() -> QuerySet[UsageReporter]:
    """Select reporters that have neither deregistered nor been marked lost."""
    return UsageReporter.objects.filter(_LIVE)


_LIVE = Q(stopped_at__isnull=True, lost_at__isnull=True)


usage_log = UsageLog()
"""This process's usage log."""

forget_at_fork(usage_log)
