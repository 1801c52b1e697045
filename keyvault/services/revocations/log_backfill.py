"""Appending to this host's journal what it lacks: what other hosts revoked, and what once could not be written.

Found in the change feed: rows behind the newest one that was looked at, up to where none can still appear below. That
is as far as any verifier has confirmed; on SQLite, which has one writer, the newest row.

And settling what nobody marked, of a commit that failed or a process that was killed: left as it is, it would count as
a revocation after the machine went down.
"""

import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from django.conf import settings
from django.db import connection
from django.db.models import Max

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER
from keyvault.domain.revocation_log import CaughtUp, Committed, ConfirmedLines, Dropped, Ended
from keyvault.models import Change, Key, Verifier
from keyvault.models.recording import RecordedModel, Subject
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.revocation_log import (
    ENDING,
    announce_failure,
    append_lines,
    boot_id,
    describe_ended,
    empty_error,
    find_account_to_alarm,
    find_last_look,
    read_journal,
)
from keyvault.services.recording.transaction import recorded
from keyvault.services.revocations.replay import have_ended, read_counter

_log = logging.getLogger(__name__)

_AT_ONCE = 1000
_NOTED_EVERY = 10_000
"""Changes looked at between two notes of how far: so many are looked at again after a restart, at most."""

_SETTLED_AFTER = timedelta(seconds=60)
"""Nobody waits that long for a commit. One that comes later still is marked by its own process, and that counts."""


@dataclass(slots=True)
class LogBackfill:
    """What a process knows of the journal: read once, from the last note of how far, and then only what is new in it.

    `_known`: the ends that it has of changes that were not looked at yet.
    """

    looked: int = 0
    _noted: int = 0
    _file: tuple[int, int] | None = None
    _offset: int = 0
    _standing: ConfirmedLines = field(default_factory=ConfirmedLines)
    _known: dict[Subject, Ended] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def heal(self, now: datetime) -> int:
        """How many ends it appended, of so many changes at a time. A journal that cannot be written is an alarm."""
        if not self._lock.acquire(blocking=False):
            return 0
        try:
            return self._heal(now)
        except OSError as error:
            _log.exception("the revocation journal cannot be mended")
            _raise_alarm(error, now)
            return 0
        finally:
            self._lock.release()

    def _heal(self, now: datetime) -> int:
        self._open()
        self._catch_up()
        self._settle(now)
        last = _last_settled()
        if last < self.looked:
            # Or no verifier follows it any more, so that nothing is known to be settled.
            self._notice_return(read_counter())
        if last <= self.looked:
            return 0
        changes = Change.objects.filter(sequence__gt=self.looked, sequence__lte=last, subject_kind__in=ENDING)
        found = list(changes.order_by("sequence")[:_AT_ONCE])
        upto = found[-1].sequence if len(found) == _AT_ONCE else last
        missing = describe_ended(self._list_missing(found), upto, now)
        looked = [] if self._standing.list_unconfirmed(boot_id()) else [CaughtUp(upto)]
        if missing or (looked and upto - self._noted >= _NOTED_EVERY):
            append_lines([*missing, *looked], is_synced=bool(missing))
        self._look(upto)
        return len(missing)

    def _settle(self, now: datetime) -> None:
        """Not what a database that went back has not drawn yet: what lives there may have ended all the same."""
        waiting = self._standing.list_unconfirmed(boot_id())
        due = [unit for unit in waiting if unit[0].at + _SETTLED_AFTER <= now]
        if due and connection.vendor == "postgresql":  # SQLite draws the sequence of a failed transaction again
            counter = read_counter()
            due = [unit for unit in due if unit[0].sequence <= counter]
        if due:
            append_lines([Committed(unit[0].unit) if have_ended(unit) else Dropped(unit[0].unit) for unit in due])
            self._catch_up()

    def _notice_return(self, counter: int) -> None:
        """Of a database that is behind what was looked at: a start would be refused, and this process runs already."""
        if counter < self.looked:
            _log.error("the database went back; stop everything, and run: manage.py replay_revocations")
            self.looked = counter

    def _open(self) -> None:
        """Begins again with another file: one that was put back, or made anew. Raises OSError where there is none."""
        status = os.stat(settings.JOURNAL)
        file, size = (status.st_dev, status.st_ino), status.st_size
        if size == 0:
            raise empty_error()
        if file != self._file or size < self._offset:
            self.looked = self._noted = 0
            self._offset = find_last_look()
            self._standing, self._known, self._file = ConfirmedLines(), {}, file
            self._catch_up()

    def _catch_up(self) -> None:
        """Reads what every process of the host has appended meanwhile."""
        for offset, line in read_journal(self._offset):
            self._offset = offset
            for stands in () if line is None else self._standing.add(line):
                if isinstance(stands, CaughtUp):
                    self._noted = max(self._noted, stands.sequence)
                    self._look(stands.sequence)
                else:
                    self._known[stands.kind, stands.id] = stands

    def _look(self, sequence: int) -> None:
        self.looked = max(self.looked, sequence)
        self._known = {subject: line for subject, line in self._known.items() if line.sequence > self.looked}

    def _list_missing(self, found: Sequence[Change]) -> list[Subject]:
        missing: list[Subject] = []
        for kind, model in ENDING.items():
            names = {change.subject_id for change in found if change.subject_kind == kind}
            rows = model._default_manager.filter(pk__in=names) if names else ()
            missing += [(kind, str(row.pk)) for row in rows if row.has_ended() and not self._has(row)]
        return missing

    def _has(self, row: RecordedModel) -> bool:
        """Also as what it ended: a key that was revoked may be reported as compromised later on."""
        subject = row.alters()
        line = None if subject is None else self._known.get(subject)
        return line is not None and (not isinstance(row, Key) or line.state == row.state)


_healer = LogBackfill()


def backfill_log(now: datetime) -> int:
    """One round of this process's healer."""
    return _healer.heal(now)


def _last_settled() -> int:
    """The newest change below which none can still appear; 0: none is known to be."""
    settled = Change.objects.all()
    if connection.vendor == "postgresql":
        confirmed = Verifier.objects.aggregate(newest=Max("confirmed_sequence"))["newest"]
        settled = settled.filter(sequence__lte=confirmed or 0)
    return settled.order_by("-sequence").values_list("sequence", flat=True).first() or 0


def _raise_alarm(error: OSError, now: datetime) -> None:
    account = find_account_to_alarm()
    if account is not None:
        grant = authorize(WORKER, P.JOURNAL_KEEP, account, now=now)
        with recorded(grant, P.JOURNAL_KEEP, "journal.failed", account=account):
            announce_failure(grant, account, error)
