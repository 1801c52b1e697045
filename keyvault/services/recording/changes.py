"""The change feed: one row for each subject that a transaction altered, in that very transaction; who follows it
learns of every change that anybody can see.

**What is guaranteed, and by what.** A sequence is drawn before its transaction commits, so a higher one may be
seen before a lower one. Therefore rows are applied as soon as they are visible, in any order, and only the
*confirmed* sequence waits: it is L when every change up to L has been applied and no other can still appear.

On PostgreSQL a writer takes an advisory lock before it draws its sequences. The lock is shared, so no writer waits
for another, and ends with the transaction: PostgreSQL makes a commit visible first and lets its locks go then
(CommitTransaction: ProcArrayEndTransaction before ResourceOwnerRelease), waiting for synchronous standbys before
both. A look reads three things, each in a snapshot of its own (READ COMMITTED), in this order: the last sequence
drawn, L; who holds the lock; the rows. Whoever drew a sequence up to L held the lock by then: it is among
those holders, or it has ended and the rows show what it left. So L is confirmed by the first look that finds
none of those holders any more. Later holders draw above L, and transactions that alter no verdict never hold it:
neither delays anything. One that has drawn and lingers delays the confirmation, never a change that is visible.
This needs a sequence without a cache, which is Django's, and the primary: a standby does not know the holders.

SQLite has one writer at a time, so the highest row is confirmed.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache, partial
from typing import NamedTuple

from django.conf import settings
from django.db import OperationalError, connection, transaction
from msgspec.json import Decoder

from keyvault.models import Change
from keyvault.models.recording import Subject
from keyvault.services.postgres.raw_queries import ask
from keyvault.services.recording.host_generation import HostGeneration

_log = logging.getLogger(__name__)

CHANNEL = "keyvault_changes"
"""NOTIFY wakes the followers; its payload is the last sequence, and nobody relies on it."""

MOST_ROWS = 10_000
"""Of one look. A follower that is further behind forgets everything."""

_OVERLAP = 64
"""So many of the latest rows are read again, to see that they are still there."""

_LOCK = (0x4B_56, 0x66_65_65_64)
_HOLD = """
    SELECT pg_advisory_xact_lock_shared(%s, %s),
        CASE WHEN current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
        THEN set_config('synchronous_commit', 'on', true) END
"""
"""And whoever is answered was answered durably: a commit that the host made asynchronous is made synchronous here."""

_SNAPSHOTS = "SET TRANSACTION ISOLATION LEVEL READ COMMITTED"
_LAST_DRAWN = """
    SELECT CASE WHEN is_called THEN last_value ELSE 0 END, pg_is_in_recovery() FROM keyvault_change_sequence_seq
"""
_HOLDERS = f"""
    SELECT virtualtransaction FROM pg_locks
    WHERE locktype = 'advisory' AND classid = {_LOCK[0]} AND objid = {_LOCK[1]} AND objsubid = 2
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""  # noqa: S608  numbers of ours
_ROWS = """
    SELECT sequence, subject_kind, subject_id, at FROM keyvault_change
    WHERE sequence > {above} ORDER BY sequence LIMIT {most}
"""
_ROWS_AS_JSON = """
    SELECT coalesce(json_agg(json_build_array(
        sequence, json_build_array(subject_kind, subject_id), extract(epoch FROM at)::text
    )), '[]') FROM ({rows}) AS found
"""
"""One value, read at once: a look is made several times a second, and finds mostly what the one before has found."""


@cache
def generation() -> HostGeneration:
    """This process's own. Raises OSError when the file cannot be opened or made."""
    return HostGeneration(settings.DATA_DIR / "generation")


def announce_changes(subjects: Mapping[Subject, bool], now: datetime) -> int | None:
    """Writes the change rows of an open transaction; the last sequence, or None when no verdict is altered.

    The processes of this host are told after the commit and before whoever asked for the change is answered.
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
    if is_postgres:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_notify(%s, %s)", [CHANNEL, str(sequence)])
    transaction.on_commit(partial(notify_host, tuple(subjects)))
    return sequence


def notify_host(subjects: Collection[Subject]) -> None:
    """Tells the processes of this host. Never raises: what is done is done, and the feed tells them too."""
    try:
        generation().announce(subjects)
    except Exception:  # noqa: BLE001  whatever it was, the act is committed
        _log.critical("this host's processes could not be told of a change; they find it in the feed", exc_info=True)


class Row(NamedTuple):
    """`at` as the database writes it: a restored database draws its sequences again, and the time tells them apart."""

    sequence: int
    subject: Subject
    at: str


@dataclass(frozen=True, slots=True)
class ChangeBatch:
    """What one look found: `drawn` is the last sequence drawn when it began, `holders` who might then have drawn it
    or a lower one, `rows` what was visible after that (all of them, or the first MOST_ROWS + 1).
    """

    drawn: int
    holders: frozenset[str]
    rows: list[Row]


def look_at_feed(above: int) -> ChangeBatch:
    """Reads the rows above a sequence, in one round trip. Raises OperationalError when it cannot, or on a standby."""
    rows = _ROWS.format(above=int(above), most=MOST_ROWS + 1)
    if connection.vendor != "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SELECT coalesce(max(sequence), 0) FROM keyvault_change")
            drawn = cursor.fetchone()[0]
            cursor.execute(rows)
            found = [Row(sequence, (kind, identity), at) for sequence, kind, identity, at in cursor.fetchall()]
            return ChangeBatch(drawn, frozenset(), found)
    script = ";".join([_SNAPSHOTS, _LAST_DRAWN, _HOLDERS, _ROWS_AS_JSON.format(rows=rows)])
    _, last_drawn, holders, visible = ask(script.encode())
    if last_drawn.get_value(0, 1) != b"f":
        raise OperationalError("the change feed is followed on the primary only, and this is a standby")
    return ChangeBatch(
        int(last_drawn.get_value(0, 0) or 0),
        frozenset((holders.get_value(row, 0) or b"").decode() for row in range(holders.ntuples)),
        _decode_rows(visible.get_value(0, 0) or b""),
    )


_decode_rows = Decoder(list[Row]).decode


class FeedWentBackError(Exception):
    """Changes that were there are not any more: a backup was restored, or a standby took over that lacked some."""


@dataclass(slots=True)
class Position:
    """How far the feed has been followed: fed with looks, it says what to apply and what is confirmed. No I/O.

    `floor`: everything up to there is applied, but for what the `strangers` may yet commit: transactions whose
    rows may be below it. Each of them that ends is answered with forgetting everything.
    """

    confirmed: int = 0
    floor: int = 0
    is_placed: bool = False
    _strangers: frozenset[str] = frozenset()
    _applied: set[Row] = field(default_factory=set)
    _candidate: int = 0
    _undecided: frozenset[str] | None = None

    def find_new(self, look: ChangeBatch) -> list[Subject] | None:
        """What the look shows that is not applied yet, each once; None: forget everything.

        Raises FeedWentBackError.
        """
        is_too_much = len(look.rows) > MOST_ROWS
        if look.drawn < self.confirmed or not (is_too_much or self._applied <= set(look.rows)):
            raise FeedWentBackError(f"the feed ends at {look.drawn}, and was followed to {self.confirmed}")
        if not self.is_placed or is_too_much or self._strangers - look.holders:
            return None
        return list(dict.fromkeys(row.subject for row in look.rows if row not in self._applied))

    def advance(self, look: ChangeBatch) -> bool:
        """Notes that what the look showed has been applied; whether more is confirmed by that."""
        self._strangers &= look.holders
        if not self.is_placed or len(look.rows) > MOST_ROWS:
            self.is_placed, self._applied, self._strangers = True, set(), look.holders
            self.floor = max(self.floor, look.drawn - _OVERLAP)
        self._applied |= {row for row in look.rows if row.sequence > self.floor}
        before = self.confirmed
        if self._undecided is not None:
            self._undecided &= look.holders
            if not self._undecided:
                self.confirmed, self._undecided = self._candidate, None
        if self._undecided is None:
            self._candidate, self._undecided = look.drawn, look.holders
            if not look.holders:
                self.confirmed, self._undecided = look.drawn, None
        self.floor = max(self.floor, self.confirmed - _OVERLAP)
        self._applied = {row for row in self._applied if row.sequence > self.floor}
        return self.confirmed > before
