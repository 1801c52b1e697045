"""Follow the change feed in a thread, for a process that judges from memory, and report its position.

Each poll applies the changes that are visible. After a confirmed poll the process may answer from memory until
`settings.MAX_STALENESS_SECONDS` after the poll began. If the following polls fail, because the database is unavailable
or the connection hangs, that time runs out.

On PostgreSQL a process that cannot report its position also stops answering, because receipts then count it as expired.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Final
from weakref import WeakSet

import psycopg
from django.conf import settings
from django.db import DatabaseError, OperationalError, close_old_connections, connection, connections, transaction
from django.db.models import Exists, Min, OuterRef
from django.db.models.functions import Now
from psycopg import sql

from keyvault.domain.ids import Subject
from keyvault.models import Change, Confirmation, Verifier
from keyvault.services.postgres.connection_timeouts import ANSWER_SECONDS, abort_connection, use_short_timeouts
from keyvault.services.postgres.raw_queries import execute, wait_for_notice
from keyvault.services.recording.changes import (
    CHANNEL,
    OVERLAP,
    FeedRewoundError,
    Position,
    generation,
    poll_feed,
)
from keyvault.services.recording.signals import changes_confirmed
from keyvault.services.usage.recorder import usage_log
from keyvault.services.work.background_thread import BackgroundThread, forget_at_fork, log_failure
from keyvault.services.work.deletion import MAX_DELETED, delete_batch

_log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
"""Maximum wait between polls, in seconds; bounds the delay of a change whose notification was lost."""

_GENERATION_SECONDS = 0.05
"""Interval between two reads of the host's generation counter on SQLite, in seconds. It is shorter than
POLL_SECONDS, because a read of the counter makes no system call. Each statement of a poll takes the interpreter's lock
from the thread that answers requests."""

_TURN_SECONDS = ANSWER_SECONDS + POLL_SECONDS
"""Maximum duration of one poll and the wait after it, in seconds, when all replies arrive in time."""

_WATCH_SECONDS = 0.5

_NEVER = float("-inf")
"""Monotonic time of a confirmation that withdraws all earlier ones."""

CONFIRMATIONS_KEPT_FOR = timedelta(days=30)
GONE_KEPT_FOR = timedelta(days=7)


@dataclass(eq=False)
class Follower(BackgroundThread):
    """Follow the change feed and report how far this process has applied it.

    `apply` receives the changed subjects, or None to clear all cached state. `confirm` receives the monotonic and the
    wall clock time, in seconds, up to which everything was applied; a monotonic time of minus infinity withdraws all
    earlier ones. `lose` is called when the feed went back: neither the memory nor the database can be trusted any more.
    The follower's thread calls all three.

    `entry_point`: the one that the process serves, shown in receipts.

    Stopping deregisters the process: it no longer answers from memory, and receipts do not wait for it.
    """

    thread_name: ClassVar[str] = "feed"

    apply: Callable[[Collection[Subject] | None], None]
    confirm: Callable[[float, float], None]
    lose: Callable[[], None]
    entry_point: str
    _position: Position = field(default_factory=Position)
    _has_moved: bool = False
    _reported_at: float | None = None
    _reported_through: int | None = None
    _announced: int | None = None
    _confirmed_at: float | None = None
    _is_lost: bool = False
    _is_failing: bool = False
    _turn_began_at: float = float("inf")
    _polling: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        _followers.add(self)
        forget_at_fork(self)

    def forget(self) -> None:
        """Reset in a forked child, which must start its own thread. A lost feed stays lost."""
        is_lost = self._is_lost
        self.__init__(self.apply, self.confirm, self.lose, self.entry_point)  # type: ignore[misc]  # a dataclass's own
        self._is_lost = is_lost

    @property
    def is_following(self) -> bool:
        """Whether the thread was started and not stopped."""
        return self._thread is not None and not self._stop.is_set()

    @property
    def is_fresh(self) -> bool:
        """Whether the last confirmed poll is within the staleness bound."""
        at = self._confirmed_at
        return at is not None and time.monotonic() - at <= settings.MAX_STALENESS_SECONDS

    @property
    def confirmed(self) -> int:
        """The highest confirmed sequence, see `Position`."""
        return self._position.confirmed

    def poll_once(self) -> None:
        """Poll once: apply what is new, report and confirm.

        Raises database errors. After a FeedRewoundError every later call raises it too, because no poll makes the
        memory or the database trustworthy again.
        """
        with self._polling:
            if not self._poll():
                self._poll()

    def _poll(self) -> bool:
        """Poll the feed. False: the poll may not be confirmed, and the caller polls again."""
        monotonic, wall = time.monotonic(), time.time()
        if self._is_lost:
            raise FeedRewoundError("the change feed went back; restart this process")
        batch = poll_feed(self._position.floor)
        try:
            new = self._position.find_new(batch)
        except FeedRewoundError:
            self._is_lost = True
            self.lose()
            self._withdraw_confirmation()
            raise
        if new is None or new:
            self.apply(new)
        has_moved = self._position.advance(batch)
        self._has_moved |= has_moved
        if has_moved or new is None or new:
            _notify_listeners()
        is_due = self._reported_at is None or monotonic - self._reported_at >= _report_seconds()
        if (is_due or self._has_moved) and not self._report(monotonic):
            return False
        self._confirmed_at = monotonic
        self.confirm(monotonic, wall)
        return True

    def _report(self, monotonic: float) -> bool:
        """Report the position. Return whether the preceding poll may be confirmed.

        It may not if receipts did not wait for this process before the report, because it was not registered or had
        expired. The receipt of a change that this process has not applied may then be complete, so it must poll again.

        On SQLite the poll is confirmed even if another process holds the write lock and the report fails. All verifiers
        share one host and its generation counter, and do not depend on receipts. The next poll reports again.
        """
        before = self._reported_at
        # A process that cannot map its host's generation counter must not report or confirm anything.
        generation().remap()
        try:
            self._write_report()
        except OperationalError:
            if connection.vendor == "postgresql":
                raise
            return True
        self._has_moved, self._reported_at = False, monotonic
        self._reported_through = self._position.confirmed
        return before is not None and time.monotonic() - before <= _expires_after_seconds()

    def _announce_confirmed(self) -> None:
        """Send `changes_confirmed` for new confirmations. Call it after the poll, for which verdicts wait."""
        above, self._announced = self._announced, self._reported_through
        through = self._reported_through
        if above is not None and through is not None and above < through:
            with log_failure(_log, "receivers were not notified of confirmed changes"):
                changes_confirmed.send(None, above=above, through=through, now=datetime.now(UTC))

    def _write_report(self) -> None:
        reporter, confirmed = usage_log.reporter_id, self._position.confirmed
        if connection.vendor == "postgresql":
            self._write_report_postgresql(reporter, confirmed)
            return
        with transaction.atomic():
            known = Verifier.objects.filter(pk=reporter).update(
                confirmed_sequence=confirmed, seen_at=Now(), stopped_at=None
            )
            if not known:
                Verifier.objects.create(
                    verifier_id=reporter,
                    entry_point=self.entry_point,
                    started_at=Now(),
                    seen_at=Now(),
                    confirmed_sequence=confirmed,
                    staleness_ms=round(1000 * _expires_after_seconds()),
                )
            if self._has_moved:
                # The row may exist if an earlier reply was lost.
                Confirmation.objects.get_or_create(verifier_id=reporter, sequence=confirmed, defaults={"at": Now()})

    def _write_report_postgresql(self, reporter: str, confirmed: int) -> None:
        """Report in one round trip and one transaction, because receipts and verdicts wait for it.

        The commit is synchronous as usual: if a crash lost the report, receipts would not wait for this process while
        it still answers from memory.
        """
        statements = [_LOCK_TIMEOUT, _REPORT, _CONFIRM] if self._has_moved else [_LOCK_TIMEOUT, _REPORT]
        values = {
            "reporter": sql.Literal(reporter),
            "entry_point": sql.Literal(self.entry_point),
            "confirmed": sql.Literal(confirmed),
            "staleness": sql.Literal(round(1000 * _expires_after_seconds())),
        }
        execute(sql.SQL(";".join(statements)).format(**values).as_bytes())

    def _loop(self) -> None:
        stop = self._stop
        wake_up = _WakeUp(stop)
        try:
            use_short_timeouts()
            self._watch(wake_up)
            while not stop.is_set() and not self._is_lost:
                self._turn_began_at = time.monotonic()
                self._try_poll()
                self._announce_confirmed()
                close_old_connections()
                wake_up.wait()
            self._withdraw_confirmation()
            if not self._is_lost:
                self._deregister()
        finally:
            self._turn_began_at = float("inf")
            wake_up.close()

    def _watch(self, wake_up: "_WakeUp") -> None:
        """Watch the follower from another thread and abort its connections when a turn takes too long."""
        if connection.vendor != "postgresql":
            return
        watched, stop = connections["default"], self._stop

        def watch() -> None:
            while not stop.wait(_WATCH_SECONDS):
                if time.monotonic() - self._turn_began_at > _TURN_SECONDS:
                    abort_connection(watched.connection)
                    abort_connection(wake_up.connection)

        self._turn_began_at = time.monotonic()
        threading.Thread(target=watch, name="feed-watch", daemon=True).start()

    def _deregister(self) -> None:
        try:
            Verifier.objects.filter(pk=usage_log.reporter_id).update(stopped_at=Now())
        except DatabaseError as error:
            _log.warning("deregistration failed; receipts wait for this process until it expires", extra={"why": error})

    def _withdraw_confirmation(self) -> None:
        """Withdraw the confirmation, before receipts stop waiting for this process."""
        self._confirmed_at = self._reported_at = None
        self.confirm(_NEVER, 0.0)

    def _try_poll(self) -> None:
        try:
            self.poll_once()
        except FeedRewoundError as error:
            _log.critical(
                "the database lacks changes that this process has applied; the process denies all requests; "
                "replay the revocations, then restart the process",
                extra={"why": error},
            )
        except Exception as error:  # noqa: BLE001  the thread must survive; the next poll may succeed
            if not self._is_failing:
                _log.error("the change feed cannot be followed", exc_info=error)
            self._is_failing = True
        else:
            if self._is_failing:
                _log.warning("the change feed is followed again")
            self._is_failing = False


_LOCK_TIMEOUT: Final = "SET LOCAL lock_timeout = '200ms'"
_REPORT: Final = """
    INSERT INTO keyvault_verifier
        (verifier_id, door, started_at, confirmed_sequence, seen_at, staleness_ms, stopped_at)
    VALUES ({reporter}, {entry_point}, statement_timestamp(), {confirmed}, statement_timestamp(), {staleness}, NULL)
    ON CONFLICT (verifier_id) DO UPDATE SET
        confirmed_sequence = excluded.confirmed_sequence, seen_at = excluded.seen_at, stopped_at = NULL
"""
_CONFIRM: Final = """
    INSERT INTO keyvault_confirmation (verifier_id, sequence, at)
    VALUES ({reporter}, {confirmed}, statement_timestamp())
    ON CONFLICT (verifier_id, sequence) DO NOTHING
"""


class _WakeUp:
    """Wait for the next poll until a change is notified, at most for POLL_SECONDS.

    PostgreSQL notifies on a connection of its own. On SQLite all writers are on this host, whose generation counter
    grows with each change.
    """

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self.connection: psycopg.Connection[Any] | None = None
        self._is_failing = False
        self._seen_generation = 0

    def wait(self) -> None:
        if connection.vendor != "postgresql":
            self._wait_for_generation()
            return
        try:
            if self.connection is None:
                self._listen()
                # A notification sent before LISTEN is lost, so poll immediately.
            else:
                wait_for_notice(self.connection.pgconn, POLL_SECONDS)
        except psycopg.Error as error:
            if not self._is_failing:
                _log.warning("change notifications are unavailable; falling back to polling", extra={"why": error})
            self._is_failing = True
            self.close()
            self._stop.wait(POLL_SECONDS)
        else:
            self._is_failing = False

    def _wait_for_generation(self) -> None:
        until = time.monotonic() + POLL_SECONDS
        while not self._stop.wait(_GENERATION_SECONDS):
            current = generation().memory[0]
            if current != self._seen_generation or time.monotonic() >= until:
                # Read before the poll, which therefore finds every change that the counter has announced.
                self._seen_generation = current
                return

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.connection = None

    def _listen(self) -> None:
        parameters = connection.get_connection_params()
        for name in ("context", "cursor_factory", "server_side_binding"):
            parameters.pop(name, None)
        self.connection = psycopg.connect(**parameters, autocommit=True)
        self.connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(CHANNEL)))


def _report_seconds() -> float:
    return float(settings.MAX_STALENESS_SECONDS) / 4


def _expires_after_seconds() -> float:
    """Return how long after a report the process may answer: staleness bound plus report interval."""
    return float(settings.MAX_STALENESS_SECONDS) + _report_seconds()


_followers: "WeakSet[Follower]" = WeakSet()

_listeners: list[Callable[[], None]] = []


def on_new_changes(listener: Callable[[], None]) -> None:
    """Call a function, in the follower's thread, after each poll of this process that found something new."""
    _listeners.append(listener)


def _notify_listeners() -> None:
    for listener in _listeners:
        listener()


def find_confirmed_here() -> int:
    """Return the highest sequence that this process has confirmed and still follows from; 0: none."""
    return max((each.confirmed for each in _followers if each.is_following and each.is_fresh), default=0)


def is_feed_followed() -> bool | None:
    """Whether this process follows the feed and is fresh. None: no follower runs here, so nothing depends on it."""
    following = [follower for follower in _followers if follower.is_following]
    return all(follower.is_fresh for follower in following) if following else None


def forget_old(now: datetime) -> int:
    """Delete a batch of confirmations older than 30 days, and one of those of verifiers gone for 7 days.

    A verifier is deleted once it has no confirmations, because they would all be deleted with it. Return how many rows.
    """
    deleted = delete_batch(Confirmation.objects.filter(at__lt=now - CONFIRMATIONS_KEPT_FOR).order_by("at"))
    gone = Verifier.objects.filter(seen_at__lt=now - GONE_KEPT_FOR)
    # The last ones first: receipts show the time of the first one that is kept.
    deleted += delete_batch(Confirmation.objects.filter(verifier__in=gone).order_by("-verifier", "-sequence"))
    return deleted + delete_batch(
        gone.filter(~Exists(Confirmation.objects.filter(verifier=OuterRef("pk")))).order_by("pk")
    )


def forget_old_changes(now: datetime) -> int:
    """Delete a batch of old changes that every live verifier has confirmed. Return how many.

    A follower checks that the latest changes that it has applied still exist. The deletion therefore keeps the latest
    sequences below the slowest verifier's position, and the newest change there. A process that was suspended for
    longer than GONE_KEPT_FOR may not find its latest changes; restart it.
    """
    live = Verifier.objects.filter(stopped_at__isnull=True).aggregate(slowest=Min("confirmed_sequence"))["slowest"]
    newest = Change.objects.order_by("-sequence")
    if live is not None:
        newest = newest.filter(sequence__lte=live)
    last = newest.values_list("sequence", flat=True).first()
    if last is None:
        return 0
    oldest = now - timedelta(days=settings.CHANGE_DAYS)
    # In the order of the sequence, which has an index and increases with time.
    rows = Change.objects.filter(sequence__lte=last - OVERLAP).order_by("sequence").values_list("sequence", "at")
    old = [sequence for sequence, at in rows[:MAX_DELETED] if at < oldest]
    return delete_batch(Change.objects.filter(sequence__in=old))
