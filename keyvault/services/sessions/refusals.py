"""Count refused sign-ins in memory and write them to the audit log once a minute.

Anyone can cause refusals and locks of addresses, so their entries per minute and process are bounded. A name is kept
only if an operator has it: users sometimes type a password into the name field. A process that is killed loses the
counts of its last minute.
"""

import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, ClassVar

from django.db import DatabaseError

from keyvault.access.limits import SIGN_IN_FAILURES, SIGN_IN_LOCK_SECONDS
from keyvault.access.permissions import Permission
from keyvault.access.principals import CONSOLE
from keyvault.domain.timestamps import format_timestamp
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.transaction import recorded
from keyvault.services.usage.recorder import usage_log
from keyvault.services.work.background_thread import FlushThread, forget_at_fork

FLUSH_SECONDS = 60.0
"""Interval between two flushes, in seconds."""

MAX_PAIRS = 20
"""Maximum pairs of name and address per minute. Further addresses are counted together for each name."""

MAX_ADDRESS_LOCKS = 20
"""Maximum locked addresses per minute with an audit entry each. Further ones are counted together."""

UNKNOWN = "unknown"
OTHERS = "others"

_Pair = tuple[str, str, str]
"""Name, address, and the reason of a refused single sign-on ("" for a password)."""


@dataclass(slots=True)
class _Count:
    """Refusals of one pair. `locked`: how many were refused without checking the password."""

    since: datetime
    refused: int = 0
    locked: int = 0


@dataclass(slots=True)
class _OtherLocks:
    """Number of address locks that share one audit entry."""

    since: datetime
    count: int = 0


@dataclass(slots=True, eq=False)
class SignInRefusals(FlushThread):
    """Unwritten sign-in refusals of this process. The first one starts the thread."""

    thread_name: ClassVar[str] = "sign-in-refusals"
    interval_seconds: ClassVar[float] = FLUSH_SECONDS
    failure: ClassVar[str] = "refused sign-ins could not be written"
    outage: ClassVar[str] = "refused sign-ins could not be written; they are kept"

    _counts: dict[_Pair, _Count] = field(default_factory=dict)
    _address_locks: int = 0
    _other_locks: _OtherLocks | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def note(
        self, username: str | None, address: str | None, now: datetime, *, is_locked: bool, reason: str = ""
    ) -> None:
        """Count one refusal. `username` is an existing operator's, or None. Performs no I/O."""
        pair = (username or UNKNOWN, address or UNKNOWN, reason)
        with self._lock:
            if pair not in self._counts and len(self._counts) >= MAX_PAIRS:
                pair = (pair[0], OTHERS, reason)
            count = self._counts.setdefault(pair, _Count(now))
            count.refused += 1
            count.locked += is_locked
            self._start_if_reporting()

    def note_address_lock(self, now: datetime) -> bool:
        """Return whether the lock gets its own audit entry. If not, count it. Performs no I/O."""
        with self._lock:
            self._start_if_reporting()
            self._address_locks += 1
            if self._address_locks <= MAX_ADDRESS_LOCKS:
                return True
            self._add_other_locks(_OtherLocks(now, 1))
            return False

    def flush(self) -> None:
        """Write one audit entry for each pair, and one for all further address locks.

        After a database failure the rest is kept. The next minute starts with no address locks counted.
        """
        with self._lock:
            pending, self._counts = self._counts, {}
            others, self._other_locks = self._other_locks, None
            self._address_locks = 0
        if others is not None:
            try:
                _write_other_locks(others)
            except DatabaseError:
                self._take_back(pending, others)
                raise
        while pending:
            pair, count = next(iter(pending.items()))
            try:
                _write(pair, count)
            except DatabaseError:
                self._take_back(pending)
                raise
            del pending[pair]

    def forget(self) -> None:
        """Reset in a forked child. The parent writes its own pending counts and owns the thread."""
        self.__init__()  # type: ignore[misc]  # a dataclass's own

    def _start_if_reporting(self) -> None:
        """Start the thread in a process that reports usage; no other process serves the console."""
        if self._thread is None and usage_log.is_reporting:
            self.start()

    def _add_other_locks(self, locks: _OtherLocks) -> None:
        if self._other_locks is None:
            self._other_locks = _OtherLocks(locks.since)
        self._other_locks.since = min(self._other_locks.since, locks.since)
        self._other_locks.count += locks.count

    def _take_back(self, pending: dict[_Pair, _Count], others: _OtherLocks | None = None) -> None:
        with self._lock:
            if others is not None:
                self._add_other_locks(others)
            for pair, count in pending.items():
                known = pair in self._counts or len(self._counts) < MAX_PAIRS
                kept = self._counts.setdefault(pair if known else (pair[0], OTHERS, pair[2]), _Count(count.since))
                kept.since = min(kept.since, count.since)
                kept.refused += count.refused
                kept.locked += count.locked


def _write(pair: _Pair, count: _Count) -> None:
    username, address, reason = pair
    grant = authorize(CONSOLE, Permission.SESSIONS_WRITE, now=datetime.now(UTC))
    details: dict[str, Any] = {"reason": reason} if reason else {}
    with recorded(
        grant,
        Permission.SESSIONS_WRITE,
        "operator.sign_in_refused",
        operator=username,
        address=address,
        count=count.refused,
        locked=count.locked,
        since=format_timestamp(count.since, "seconds"),
        **details,
    ):
        pass


def _write_other_locks(locks: _OtherLocks) -> None:
    grant = authorize(CONSOLE, Permission.SESSIONS_WRITE, now=datetime.now(UTC))
    with recorded(
        grant,
        Permission.SESSIONS_WRITE,
        "address.locked",
        address=OTHERS,
        count=locks.count,
        failures=SIGN_IN_FAILURES,
        seconds=SIGN_IN_LOCK_SECONDS,
        since=format_timestamp(locks.since, "seconds"),
    ):
        pass


sign_in_refusals = SignInRefusals()
"""This process's sign-in refusals."""

forget_at_fork(sign_in_refusals)
