"""Append missing revocations to this host's revocation log: those of other hosts, and those that were not written.

The change feed supplies the candidates: rows after the newest one checked, up to the last one below which no row can
still appear (`feed_revocations`).

The backfill also settles lines without an outcome, left by a failed commit or a killed process. An unsettled line would
count as a revocation after a machine restart.
"""

import logging
import os
import threading
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from django.conf import settings
from django.db import connection

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER
from keyvault.domain.ids import Subject
from keyvault.domain.revocation_log import CaughtUp, Committed, ConfirmedLines, Dropped, Ended
from keyvault.models import Key
from keyvault.models.recording import RecordedModel
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.revocation_log import (
    announce_failure,
    append_lines,
    boot_id,
    describe_ended,
    empty_error,
    find_account_to_alarm,
    find_progress_line,
    read_lines,
)
from keyvault.services.recording.transaction import recorded
from keyvault.services.revocations.feed_revocations import find_last_settled, list_ended
from keyvault.services.revocations.replay import have_ended, read_counter

_log = logging.getLogger(__name__)

_BATCH = 1000
_PROGRESS_INTERVAL = 10_000
"""Changes checked between two progress lines, and the maximum that a restart checks again."""

_SETTLED_AFTER = timedelta(seconds=60)
"""Age after which a line without an outcome is settled.

If its transaction commits later, its own process marks it as committed, and that mark takes precedence.
"""


@dataclass(slots=True)
class LogBackfill:
    """This process's progress through the revocation log and the change feed.

    The log is read once from its last progress line; later only new lines are read. `_known`: logged revocations of
    changes that were not checked yet.
    """

    position: int = 0
    _noted_position: int = 0
    _file: tuple[int, int] | None = None
    _offset: int = 0
    _confirmed: ConfirmedLines = field(default_factory=ConfirmedLines)
    _known: dict[Subject, Ended] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, now: datetime) -> int:
        """Run one bounded round. Return how many lines it appended. Raise an alarm if the log is not writable."""
        if not self._lock.acquire(blocking=False):
            return 0
        try:
            return self._run(now)
        except OSError as error:
            _log.exception("the revocation log cannot be backfilled")
            _raise_alarm(error, now)
            return 0
        finally:
            self._lock.release()

    def _run(self, now: datetime) -> int:
        self._open()
        self._catch_up()
        self._settle(now)
        last = find_last_settled()
        if last < self.position:
            # The database was set back, or no verifier follows it: then no change is known to be settled.
            self._detect_rewind(read_counter())
        if last <= self.position:
            return 0
        ended, end = list_ended(self.position, last, _BATCH)
        missing = describe_ended([subject for subject, row in ended if not self._is_logged(row)], end, now)
        progress_line = [] if self._confirmed.list_unconfirmed(boot_id()) else [CaughtUp(end)]
        if missing or (progress_line and end - self._noted_position >= _PROGRESS_INTERVAL):
            append_lines([*missing, *progress_line], is_synced=bool(missing))
        self._advance(end)
        return len(missing)

    def _settle(self, now: datetime) -> None:
        """Settle lines whose outcome is overdue.

        Lines beyond the database's sequence counter stay unsettled: the database was set back, and an object that is
        alive in it may have been revoked.
        """
        waiting = self._confirmed.list_unconfirmed(boot_id())
        due = [unit for unit in waiting if unit[0].at + _SETTLED_AFTER <= now]
        if due and connection.vendor == "postgresql":  # SQLite reuses the sequence of a failed transaction
            counter = read_counter()
            due = [unit for unit in due if unit[0].sequence <= counter]
        if due:
            append_lines([Committed(unit[0].unit) if have_ended(unit) else Dropped(unit[0].unit) for unit in due])
            self._catch_up()

    def _detect_rewind(self, counter: int) -> None:
        """Detect a database that was set back. Startup refuses one, but this process is already running."""
        if counter < self.position:
            _log.error("the database was set back; stop all processes, and run: manage.py replay_revocations")
            self.position = counter

    def _open(self) -> None:
        """Start over if the log file was restored or replaced. Raises OSError if there is none."""
        status = os.stat(settings.REVOCATION_LOG)
        file, size = (status.st_dev, status.st_ino), status.st_size
        if size == 0:
            raise empty_error()
        if file != self._file or size < self._offset:
            self.position = self._noted_position = 0
            self._offset = find_progress_line()
            self._confirmed, self._known, self._file = ConfirmedLines(), {}, file
            self._catch_up()

    def _catch_up(self) -> None:
        """Read what any process of this host has appended since."""
        for offset, line in read_lines(self._offset):
            self._offset = offset
            for confirmed_line in () if line is None else self._confirmed.add(line):
                if isinstance(confirmed_line, CaughtUp):
                    self._noted_position = max(self._noted_position, confirmed_line.sequence)
                    self._advance(confirmed_line.sequence)
                else:
                    self._known[confirmed_line.kind, confirmed_line.id] = confirmed_line

    def _advance(self, sequence: int) -> None:
        self.position = max(self.position, sequence)
        self._known = {subject: line for subject, line in self._known.items() if line.sequence > self.position}

    def _is_logged(self, row: RecordedModel) -> bool:
        """Whether the log has the row's revocation. A key's state must match too: it may become compromised later."""
        subject = row.alters()
        line = None if subject is None else self._known.get(subject)
        return line is not None and (not isinstance(row, Key) or line.state == row.state)


_backfill = LogBackfill()


def backfill_log(now: datetime) -> int:
    """Run one round of this process's backfill. Return how many lines it appended."""
    return _backfill.run(now)


def _raise_alarm(error: OSError, now: datetime) -> None:
    account = find_account_to_alarm()
    if account is not None:
        grant = authorize(WORKER, P.REVOCATION_LOG_APPEND, account, now=now)
        with recorded(grant, P.REVOCATION_LOG_APPEND, "journal.failed", account=account):
            announce_failure(grant, account, error)
