"""Who used which key, when: noted in memory on the request path, written a moment later by a thread.

Silence is observed, not assumed: each process that verifies is a reporter, and says in the same transaction
as its counts up to when it has reported. A reporter that goes without a farewell is lost, and with it
perhaps some uses; whoever waits for silence starts again from that moment.
"""

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, field
from datetime import UTC, datetime, timedelta
from multiprocessing.util import Finalize

from django.db import close_old_connections, connections, transaction
from django.db.models import F, Max, Min, QuerySet
from django.db.models.functions import Greatest, Least

from keyvault.domain.free_text import clean_text
from keyvault.models import KeyUse, UsageReporter, UseBucket
from keyvault.models.usage import Outcome
from keyvault.services.idempotency import shred_used

_log = logging.getLogger(__name__)

FLUSH_SECONDS = 0.5
LOST_AFTER = timedelta(seconds=10)
"""A live reporter reports every FLUSH_SECONDS; one this late is taken for dead."""

_MOST_BUCKETS = 20_000

_READ = 512
"""Of what a client says about itself no more than this is looked at: a longer text costs the request path nothing."""


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class Use:
    """One bucket: a key, seen in one minute from one source, on one endpoint."""

    key_id: str
    minute: datetime
    source: str
    user_agent: str
    endpoint: str
    outcome: Outcome


@dataclass(slots=True)
class _Count:
    count: int
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
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _flushing: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def note(self, key_id: str, *, source: str, user_agent: str, endpoint: str, outcome: Outcome) -> None:
        """Some microseconds and no I/O, but for a flood of distinct sources, which is written at once.

        What a client says about itself is noted without the secrets that it may have put there.

        The time is taken under the lock that `flush` takes its own under: no use is older than a watermark
        that was given without it.
        """
        source, user_agent, endpoint = (
            clean_text(source[:_READ], 64),
            clean_text(user_agent[:_READ], 120),
            clean_text(endpoint[:_READ], 100),
        )
        with self._lock:
            at = self.now()
            minute = at.replace(second=0, microsecond=0)
            use = Use(key_id, minute, source, user_agent, endpoint, outcome)
            count = self._counts.get(use)
            if count is None:
                self._counts[use] = _Count(1, at, at)
            else:
                count.count += 1
                count.first_at, count.last_at = min(count.first_at, at), max(count.last_at, at)
            is_full = len(self._counts) >= _MOST_BUCKETS
        if is_full:
            self.flush()

    def note_secret_use(self, token_id: str) -> None:
        """A customer token was accepted: its holder has it, so the answer that showed it need not be kept."""
        with self._lock:
            self._secrets_used.add(token_id)

    def start(self) -> None:
        """Reports from now on, before the first verdict is given. Repeatable."""
        with self._lock:
            if self._thread is not None:
                return
            now = self.now()
            UsageReporter.objects.create(reporter_id=self.reporter_id, started_at=now, flushed_through_at=now)
            self._thread = threading.Thread(target=self._report, name="usage", daemon=True)
            self._thread.start()
        # Not atexit, which is not called in Granian's forked worker; this is called there and everywhere else.
        Finalize(None, self.stop, exitpriority=0)

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
            with transaction.atomic():
                _write(counts)
                UsageReporter.objects.filter(reporter_id=self.reporter_id).update(
                    flushed_through_at=through, stopped_at=through if farewell else None, lost_at=None
                )
        except Exception:
            with self._lock:
                for use, count in counts.items():
                    newer = self._counts.get(use)
                    self._counts[use] = count if newer is None else _merged(count, newer)
                self._secrets_used |= used
            raise
        # By itself: evidence never waits for it, and what it leaves is shredded when its time is over.
        shred_used(used | {use.key_id for use in counts if use.outcome is Outcome.ALLOWED})

    def _report(self) -> None:
        try:
            while not self._stop.wait(FLUSH_SECONDS):
                try:
                    self.flush()
                except Exception:  # noqa: BLE001  whatever it was, the next try may do better
                    _log.exception("usage could not be written; it is kept for the next try")
                finally:
                    close_old_connections()
        finally:
            connections.close_all()  # this thread's own


def _merged(one: _Count, other: _Count) -> _Count:
    return _Count(one.count + other.count, min(one.first_at, other.first_at), max(one.last_at, other.last_at))


def _write(counts: dict[Use, _Count]) -> None:
    """Adds to what stands there; order-independent, so that late and early reporters agree.

    Every reporter takes the rows in the same order, all buckets before all keys, so that none waits in a ring.
    """
    keys: dict[str, _Count] = {}
    for use, count in sorted(counts.items(), key=lambda item: astuple(item[0])):
        place = asdict(use)
        UseBucket.objects.update_or_create(**place, defaults=_added(count), create_defaults=place | asdict(count))
        if use.outcome is Outcome.ALLOWED:
            known = keys.get(use.key_id)
            keys[use.key_id] = count if known is None else _merged(known, count)
    for key_id, count in sorted(keys.items()):
        fresh = {"key_id": key_id, **asdict(count)}
        KeyUse.objects.update_or_create(key_id=key_id, defaults=_added(count), create_defaults=fresh)


def _added(count: _Count) -> dict[str, object]:
    return {
        "count": F("count") + count.count,
        "first_at": Least(F("first_at"), count.first_at),
        "last_at": Greatest(F("last_at"), count.last_at),
    }


@dataclass(frozen=True, slots=True)
class Observation:
    """Up to when every live reporter has reported (None: none is live), and when one was last found lost."""

    through: datetime | None
    lost_at: datetime | None


def note_lost(now: datetime) -> None:
    """Marks overdue reporters as lost: a dead one must not hold up silence for ever. For the engine's turn."""
    _live().filter(flushed_through_at__lt=now - LOST_AFTER).update(lost_at=now)


def observe() -> Observation:
    """Reads only."""
    return Observation(
        _live().aggregate(through=Min("flushed_through_at"))["through"],
        UsageReporter.objects.aggregate(at=Max("lost_at"))["at"],
    )


def _live() -> QuerySet[UsageReporter]:
    return UsageReporter.objects.filter(stopped_at__isnull=True, lost_at__isnull=True)


def longest_gap_seconds(key_id: str) -> int:
    """The longest pause between two minutes in which the key was used; 0 when it was not."""
    minutes = UseBucket.objects.filter(key_id=key_id, outcome=Outcome.ALLOWED).order_by("minute")
    longest, before = 0, None
    for minute in minutes.values_list("minute", flat=True).distinct().iterator():
        if before is not None:
            longest = max(longest, int((minute - before).total_seconds()))
        before = minute
    return longest


usage_log = UsageLog()
"""This process's own."""
