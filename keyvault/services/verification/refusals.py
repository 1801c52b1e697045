"""Record refused requests and the deciding rule: in memory on the request path, written shortly after by a thread.

Support staff look a refusal up by its request id. It is neither evidence nor part of a verdict, so losing one is
acceptable. Memory is bounded, and so are the rows that a flood of unproved requests or of one revoked key can cause.
"""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from time import monotonic, sleep
from typing import ClassVar

from django.conf import settings
from django.db import InterfaceError, OperationalError

from keyvault.access.decision import Check, Denial
from keyvault.backends import meters
from keyvault.domain.environments import Environment
from keyvault.domain.free_text import MAX_REDACTED_LENGTH, clean_text
from keyvault.models import Refusal
from keyvault.services.usage.recorder import usage_log
from keyvault.services.verification.judging import Judgement
from keyvault.services.work.background_thread import FlushThread, forget_at_fork
from keyvault.services.work.deletion import delete_batch
from keyvault.wire.entry_points import VerificationEntryPoint

_log = logging.getLogger(__name__)

FLUSH_SECONDS = 0.5
"""Interval between two flushes, and the period of the limits below, in seconds."""

UNPROVED_KEPT_FOR = timedelta(days=1)
"""Retention of a refusal without a proved key."""

_MAX_PENDING = 2_000
"""Maximum unwritten refusals in memory."""

_MAX_UNPROVED = 5
"""Maximum rows per flush and error code without a proved key, so that unauthenticated requests cannot fill the disk."""

_MAX_PER_KEY = 10
"""Maximum rows per flush, key and error code. Clients may go on using a revoked key at full rate."""

_MAX_LINES = 50
_MAX_TOTAL_LINES = 200
"""Maximum log lines per period and reason, and in total. The request path writes them, a tenth of a millisecond each.

These limits do not depend on the database or on the thread that writes to it.
"""

_WRITE_BATCH = 100
_PAUSE_SECONDS = 0.001
"""Rows between two pauses, and the pause in seconds. The pause releases the interpreter to pending verdicts."""


@dataclass(slots=True)
class _RefusalEntry:
    """One denial. `key_id` and `merchant_id` are "" before proof."""

    denial: Denial
    trace: Sequence[Check]
    key_id: str
    merchant_id: str
    request_id: str
    entry_point: VerificationEntryPoint
    environment: Environment
    endpoint: str
    source: str
    at: datetime

    def log(self) -> None:
        _log.info(
            "denied",
            extra={
                "request_id": self.request_id,
                "code": self.denial.code,
                "internal": self.denial.internal,
                "key_id": self.key_id,
            },
        )

    def as_row(self) -> Refusal:
        """Return the row to store, with secrets in client-supplied text redacted."""
        return Refusal(
            request_id=self.request_id[:32],
            at=self.at,
            entry_point=self.entry_point,
            environment=self.environment,
            endpoint=clean_text(self.endpoint, 100),
            code=self.denial.code,
            detail=clean_text(self.denial.detail[:MAX_REDACTED_LENGTH], 300),
            internal=clean_text(self.denial.internal[:MAX_REDACTED_LENGTH], 300),
            key_id=self.key_id,
            merchant_id=self.merchant_id,
            source=clean_text(self.source, 64),
            trace=[[check.rule.value, check.passed] for check in self.trace],
        )


@dataclass(slots=True, eq=False)
class RefusalLog(FlushThread):
    """Unwritten refusals of this process. The first one starts the thread."""

    thread_name: ClassVar[str] = "refusals"
    interval_seconds: ClassVar[float] = FLUSH_SECONDS
    failure: ClassVar[str] = "refusals could not be written"
    outage: ClassVar[str] = "refusals could not be written; as many as fit are kept"

    clock: Callable[[], float] = monotonic
    keeps_rows: bool = True
    """Whether refusals are stored. A regional verifier, which has no database, only logs them."""
    _pending: list[_RefusalEntry] = field(default_factory=list)
    _seen: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Refusals in this period by key id ("" without one) and error code."""
    _lines: int = 0
    _period: int = 0
    _dropped: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _flushing: threading.Lock = field(default_factory=threading.Lock)

    def note(
        self,
        judgement: Judgement,
        *,
        request_id: str,
        entry_point: VerificationEntryPoint,
        environment: Environment,
        endpoint: str,
        source: str,
        at: datetime,
    ) -> None:
        """Record and log a denied judgement; ignore a grant. Performs no I/O except logging, and never raises."""
        verdict = judgement.verdict
        if not isinstance(verdict, Denial):
            return
        meters.note_denial(entry_point, verdict.code)
        try:
            holder = judgement.holder or verdict.holder
            key_id, merchant_id = ("", "") if holder is None else (holder.key_id, holder.merchant_id)
            entry = _RefusalEntry(
                verdict,
                judgement.trace,
                key_id,
                merchant_id,
                request_id,
                entry_point,
                environment,
                endpoint[:MAX_REDACTED_LENGTH],
                source[:MAX_REDACTED_LENGTH],
                at,
            )
            if self._add(entry):
                entry.log()
        except Exception:  # noqa: BLE001  recording must not affect the reply
            _log.exception("a refusal could not be recorded")

    def flush(self) -> None:
        """Write what is pending. After a database failure keep as many as fit."""
        with self._flushing:
            with self._lock:
                pending, self._pending = self._pending, []
                dropped, self._dropped = self._dropped, 0
            if dropped:
                _log.warning("too many refusals: some were dropped", extra={"dropped": dropped})
            for start in range(0, len(pending), _WRITE_BATCH):
                portion = pending[start : start + _WRITE_BATCH]
                try:
                    Refusal.objects.bulk_create([entry.as_row() for entry in portion], ignore_conflicts=True)
                except (OperationalError, InterfaceError):
                    self._put_back(pending[start:])
                    raise
                except Exception:  # noqa: BLE001  the other portions may be written
                    _log.exception("refusals could not be written", extra={"count": len(portion)})
                sleep(_PAUSE_SECONDS)

    def forget(self) -> None:
        """Reset in a forked child. The parent writes its own pending refusals and owns the thread."""
        self.__init__(self.clock, self.keeps_rows)  # type: ignore[misc]  # a dataclass's own

    def _add(self, entry: _RefusalEntry) -> bool:
        """Queue a refusal if there is room. Return whether to log it.

        The log budget is per period of time, not per flush, so a hanging database does not silence the log.
        """
        reason = entry.key_id, entry.denial.code
        limit = _MAX_PER_KEY if entry.key_id else _MAX_UNPROVED
        period = int(self.clock() / FLUSH_SECONDS)
        with self._lock:
            if period != self._period:
                self._period, self._lines = period, 0
                self._seen.clear()
            self._seen[reason] += 1
            times = self._seen[reason]
            if not self.keeps_rows:
                pass
            elif times <= limit and len(self._pending) < _MAX_PENDING:
                self._pending.append(entry)
                self._start_if_reporting()
            else:
                self._dropped += 1
            is_logged = times <= _MAX_LINES and self._lines < _MAX_TOTAL_LINES
            self._lines += is_logged
            return is_logged

    def _start_if_reporting(self) -> None:
        """Start the thread in a process that reports usage; no other process has an entry point."""
        if self._thread is None and usage_log.is_reporting:
            self.start()

    def _put_back(self, pending: list[_RefusalEntry]) -> None:
        with self._lock:
            room = max(0, _MAX_PENDING - len(self._pending))
            self._dropped += len(pending[room:])
            self._pending = pending[:room] + self._pending


def forget_old(now: datetime) -> int:
    """Delete old refusals, those without a proved key after a day, because anyone can cause them. Return how many."""
    rows = Refusal.objects.order_by("at")
    unproved = delete_batch(rows.filter(at__lt=now - UNPROVED_KEPT_FOR, key_id=""))
    return unproved + delete_batch(rows.filter(at__lt=now - timedelta(days=settings.REFUSAL_DAYS)))


refusal_log = RefusalLog()
"""This process's refusal log."""

forget_at_fork(refusal_log)
