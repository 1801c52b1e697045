"""The change feed: one row per subject that a transaction altered, written in that transaction.

A follower sees every committed change.

**Guarantee.** A sequence is drawn before its transaction commits, so a higher one may become visible before a lower
one. Followers therefore apply rows as soon as they are visible, in any order. Only the *confirmed* sequence waits: it
is L when every change up to L has been applied and no other can still appear.

**Mechanism.** On PostgreSQL a writer takes an advisory lock before it draws its sequences. The lock is shared, so no
writer waits for another, and ends with the transaction. PostgreSQL waits for synchronous standbys, makes the commit
visible, and only then releases the locks (CommitTransaction: ProcArrayEndTransaction before ResourceOwnerRelease).

A poll reads three things in this order, each in a snapshot of its own (READ COMMITTED): the last sequence drawn, L;
the holders of the lock; the rows. A transaction that drew a sequence up to L held the lock by then. Either it is among
those holders, or it has ended and the rows show its changes. So the first poll that finds none of those holders any
more confirms L. Later holders draw above L, and transactions that alter no verdict never hold the lock: neither delays
anything. A transaction that has drawn and stays open delays the confirmation, never a visible change.

This needs a sequence without a cache, which is Django's default, and the primary: a standby does not know the holders.
SQLite has one writer at a time, so its highest row is confirmed.
"""

import logging
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cache, partial
from typing import NamedTuple

from django.conf import settings
from django.db import OperationalError, connection, transaction
from msgspec.json import Decoder

from keyvault.domain.ids import Subject
from keyvault.models import Change
from keyvault.services.postgres.raw_queries import execute
from keyvault.services.recording.host_generation import HostGeneration
from keyvault.services.work.background_thread import forget_at_fork

_log = logging.getLogger(__name__)

CHANNEL = "keyvault_changes"
"""NOTIFY channel that wakes the followers. Without a notice they find a change at their next poll."""

_MERGE_SECONDS = 0.005
"""Minimum time between two wake-ups by one process, in seconds. The commits within it share one wake-up."""

MAX_ROWS = 10_000
"""Maximum rows of one poll. A follower that is further behind drops its whole cache."""

OVERLAP = 64
"""Number of the latest sequences that each poll reads again, to check that their rows still exist."""

_MAX_STALENESS = timedelta(minutes=1)
"""Maximum age of a verdict that a verifier may still serve; an upper bound of `KEYVAULT_MAX_STALENESS`."""

_LOCK = (0x4B_56, 0x66_65_65_64)
_HOLD = """
    SELECT pg_advisory_xact_lock_shared(%s, %s),
        CASE WHEN current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
        THEN set_config('synchronous_commit', 'on', true) END
"""
"""Takes the shared lock. Forces a synchronous commit too, so that an acknowledged change is durable."""

_SNAPSHOTS = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"
_LAST_DRAWN = """
    SELECT CASE WHEN is_called THEN last_value ELSE 0 END, pg_is_in_recovery() FROM keyvault_change_sequence_seq
"""
_HOLDERS = f"""
    SELECT virtualtransaction FROM pg_locks
    WHERE locktype = 'advisory' AND classid = {_LOCK[0]} AND objid = {_LOCK[1]} AND objsubid = 2
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""  # noqa: S608  our own integer constants
_ROWS = """
    SELECT sequence, subject_kind, subject_id, at FROM keyvault_change
    WHERE sequence > {above} ORDER BY sequence LIMIT {most}
"""
_ROWS_AS_JSON = """
    SELECT coalesce(json_agg(json_build_array(
        sequence, json_build_array(subject_kind, subject_id), extract(epoch FROM at)::text
    )), '[]') FROM ({rows}) AS found
"""
"""The rows as one value, which libpq reads in one step. Polls run several times a second and mostly find no change."""


@cache
def generation() -> HostGeneration:
    """Return this process's host generation. Raises OSError when the file cannot be opened or created."""
    return HostGeneration(settings.DATA_DIR / "generation")


def announce_changes(subjects: Mapping[Subject, bool], now: datetime) -> int | None:
    """Write the change rows of an open transaction; return the last sequence, or None when no verdict is altered.

    Notifies the processes of this host after the commit and before the caller gets its response.
    """
    if not subjects:
        return None
    is_postgres = connection.vendor == "postgresql"
    if is_postgres:
        with connection.cursor() as cursor:
            cursor.execute(_HOLD, _LOCK)
    sequence = None
    for kind, identity in subjects:
        sequence = Change.objects.create(subject_kind=kind, subject_id=identity, at=now).sequence
    transaction.on_commit(partial(notify_host, tuple(subjects)))
    if is_postgres:
        transaction.on_commit(_notice_sender.send, robust=True)
    return sequence


def notify_host(subjects: Collection[Subject]) -> None:
    """Notify the processes of this host. Never raises: the change is committed, and the feed reports it too."""
    try:
        generation().announce(subjects)
    except Exception:  # noqa: BLE001  the change is committed, so no failure here may reach the caller
        _log.critical(
            "could not notify this host's processes of a change; they read it from the change feed", exc_info=True
        )


def notify_host_again(subject: Subject, changed_at: datetime | None, now: datetime) -> None:
    """Notify the processes of this host of a repeated revocation: the first notification may have been lost.

    Not once every verdict from before the revocation is too old to be served, because a notification costs each
    verifier work. `changed_at`: time of the revocation; None: unknown. Never raises.
    """
    if changed_at is None or now - changed_at < _MAX_STALENESS:
        notify_host([subject])


@dataclass(slots=True, eq=False, weakref_slot=True)
class _NoticeSender:
    """Wake the followers on all hosts after a commit: immediately, or together with the next commits.

    PostgreSQL commits transactions with a NOTIFY one after the other, so a change is committed without one. If the
    process dies before the NOTIFY, followers find the change at their next poll.
    """

    _sent_at: float = float("-inf")
    _is_pending: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        forget_at_fork(self)

    def forget(self) -> None:
        """Reset in a forked child, which has no thread that would send."""
        self._sent_at, self._is_pending, self._lock = float("-inf"), False, threading.Lock()

    def send(self) -> None:
        """Wake the followers, unless another thread is about to. Never raises: the change is committed."""
        with self._lock:
            if self._is_pending:
                return
            self._is_pending = True
            pause = self._sent_at + _MERGE_SECONDS - time.monotonic()
        try:
            if pause > 0:
                time.sleep(pause)
        finally:
            # Before the notice: a commit from here on needs a notice of its own.
            with self._lock:
                self._is_pending, self._sent_at = False, time.monotonic()
        try:
            execute(_NOTIFY.format(channel=CHANNEL).encode())
        except Exception:  # noqa: BLE001  the change is committed, so no failure here may reach the caller
            _log.warning("could not wake other hosts; they find the change at their next poll", exc_info=True)


_NOTIFY = "SET LOCAL synchronous_commit = off; NOTIFY {channel}"
"""A crash that loses the notice also ends its listeners' connections, so it need not be durable."""

_notice_sender = _NoticeSender()


class Row(NamedTuple):
    """One change row. `at` is the database's own text: it distinguishes sequences that a restored database reuses."""

    sequence: int
    subject: Subject
    at: str


@dataclass(frozen=True, slots=True)
class ChangeBatch:
    """Result of one poll.

    `drawn`: the last sequence drawn when the poll began. `holders`: transactions that may have drawn it or a lower
    one. `rows`: the rows visible after that, or the first MAX_ROWS + 1 of them.
    """

    drawn: int
    holders: frozenset[str]
    rows: list[Row]


def poll_feed(above: int) -> ChangeBatch:
    """Read the rows above a sequence in one round trip. Raises OperationalError, also on a standby."""
    rows = _ROWS.format(above=int(above), most=MAX_ROWS + 1)
    if connection.vendor != "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SELECT coalesce(max(sequence), 0) FROM keyvault_change")
            drawn = cursor.fetchone()[0]
            cursor.execute(rows)
            found = [Row(sequence, (kind, identity), at) for sequence, kind, identity, at in cursor.fetchall()]
            return ChangeBatch(drawn, frozenset(), found)
    script = ";".join([_SNAPSHOTS, _LAST_DRAWN, _HOLDERS, _ROWS_AS_JSON.format(rows=rows)])
    _, last_drawn, holders, visible = execute(script.encode())
    if last_drawn.get_value(0, 1) != b"f":
        raise OperationalError("this server is a standby; the change feed can only be followed on the primary")
    return ChangeBatch(
        int(last_drawn.get_value(0, 0) or 0),
        frozenset((holders.get_value(row, 0) or b"").decode() for row in range(holders.ntuples)),
        _decode_rows(visible.get_value(0, 0) or b""),
    )


_decode_rows = Decoder(list[Row]).decode


class FeedRewoundError(Exception):
    """Applied changes are missing: a backup was restored, or a standby without them was promoted."""


@dataclass(slots=True)
class Position:
    """A follower's position in the feed: takes polls, returns what to apply and what is confirmed. No I/O.

    `is_placed`: a first batch was applied. `floor`: every change up to this sequence is applied, except those that
    `_older_holders` may still commit: transactions whose rows may be below it. When one of them ends, the follower
    drops its whole cache.

    The feed went back when an applied row is missing; the newest one is always checked. A sequence proves nothing: a
    rolled-back transaction may have drawn the last one, and after a crash PostgreSQL draws it again. The follower then
    drops its whole cache and starts from what is drawn now. What it has reported is never drawn again, because the
    report's own commit makes the earlier draws durable.
    """

    confirmed: int = 0
    floor: int = 0
    is_placed: bool = False
    _older_holders: frozenset[str] = frozenset()
    _applied: set[Row] = field(default_factory=set)
    _candidate: int = 0
    _pending_holders: frozenset[str] | None = None

    def find_new(self, batch: ChangeBatch) -> list[Subject] | None:
        """Return the subjects in the batch that are not applied yet, each once; None: drop the whole cache.

        Raises FeedRewoundError.
        """
        is_truncated = len(batch.rows) > MAX_ROWS
        if not (is_truncated or self._applied <= set(batch.rows)):
            raise FeedRewoundError(f"the feed ends at {batch.drawn}, and was followed to {self.confirmed}")
        if not self.is_placed or is_truncated or self._older_holders - batch.holders or batch.drawn < self.confirmed:
            return None
        return list(dict.fromkeys(row.subject for row in batch.rows if row not in self._applied))

    def advance(self, batch: ChangeBatch) -> bool:
        """Record that the batch is applied; return whether the confirmed sequence moved."""
        is_truncated = len(batch.rows) > MAX_ROWS
        newest = batch.rows[-1].sequence if batch.rows and not is_truncated else batch.drawn + 1
        if batch.drawn < self.confirmed:
            self.confirmed, self.floor, self.is_placed, self._pending_holders = 0, 0, False, None
        self._older_holders &= batch.holders
        if not self.is_placed or is_truncated:
            self.is_placed, self._applied, self._older_holders = True, set(), batch.holders
            self.floor = max(self.floor, min(batch.drawn - OVERLAP, newest - 1))
        self._applied |= {row for row in batch.rows if row.sequence > self.floor}
        before = self.confirmed
        if self._pending_holders is not None:
            self._pending_holders &= batch.holders
            if not self._pending_holders:
                self.confirmed, self._pending_holders = self._candidate, None
        if self._pending_holders is None:
            self._candidate, self._pending_holders = batch.drawn, batch.holders
            if not batch.holders:
                self.confirmed, self._pending_holders = batch.drawn, None
        self.floor = max(self.floor, min(self.confirmed - OVERLAP, newest - 1))
        self._applied = {row for row in self._applied if row.sequence > self.floor}
        return self.confirmed > before
