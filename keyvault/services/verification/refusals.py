"""What was refused, and by which rule: noted in memory on the request path, written a moment later by a thread.

For whoever is asked why with a request id. It is no evidence and part of no verdict, so it may be lost: memory is
bounded, and so is what a flood can have written, of requests without any proof or with one revoked key again and again.
"""

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from multiprocessing.util import Finalize
from time import monotonic, sleep

from django.db import InterfaceError, OperationalError, close_old_connections, connections
from django.db.models import Q

from keyvault.access.decision import Check, Denial
from keyvault.domain.environments import Environment
from keyvault.domain.free_text import MAX_REDACTED_LENGTH, clean_text
from keyvault.models import Refusal
from keyvault.services.usage.recorder import usage_log
from keyvault.services.verification.judging import Judgement
from keyvault.services.work.thread_priority import lower_priority

_log = logging.getLogger(__name__)

FLUSH_SECONDS = 0.5
KEPT_FOR = timedelta(days=30)
UNPROVED_KEPT_FOR = timedelta(days=1)

_MOST_PENDING = 2_000
_MOST_UNPROVED = 5
"""Of one flush: whoever proves nothing shall not fill the disk."""

_MOST_OF_A_KEY = 10
"""Of one flush and for one reason: a revoked key that is still in use everywhere is refused as often as it was
allowed."""

_MOST_LINES = 50
_MOST_LINES_OF_ALL = 200
"""Of the same, in the log, which the request path writes itself: a tenth of a millisecond each. They depend neither on
the database nor on whoever writes to it."""

_AT_ONCE = 100
_PAUSE_SECONDS = 0.001
"""Verdicts wait for whatever holds the interpreter: so it is let go after so many."""

_MOST_FORGOTTEN = 5_000


@dataclass(slots=True)
class _Noted:
    """A denial as it was given. `key_id` and `merchant_id` "" before proof."""

    denial: Denial
    trace: Sequence[Check]
    key_id: str
    merchant_id: str
    request_id: str
    door: str
    environment: Environment
    endpoint: str
    source: str
    at: datetime

    def tell(self) -> None:
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
        """Without the secrets that a client may have put into what it says."""
        return Refusal(
            request_id=self.request_id[:32],
            at=self.at,
            door=self.door[:32],
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


@dataclass(slots=True)
class RefusalLog:
    """The refusals of this process that are not yet written."""

    clock: Callable[[], float] = monotonic
    _pending: list[_Noted] = field(default_factory=list)
    _seen: Counter[tuple[str, str]] = field(default_factory=Counter)
    """How many there were of each key ("" of none) and for each reason in the period between two flushes."""
    _lines: int = 0
    _period: int = 0
    _dropped: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _flushing: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def note(
        self,
        judgement: Judgement,
        *,
        request_id: str,
        door: str,
        environment: Environment,
        endpoint: str,
        source: str,
        at: datetime,
    ) -> None:
        """Notes a denied judgement, and tells the log; a grant leaves nothing. No I/O but the log's, never an error."""
        verdict = judgement.verdict
        if not isinstance(verdict, Denial):
            return
        try:
            holder = judgement.holder or verdict.holder
            key_id, merchant_id = ("", "") if holder is None else (holder.key_id, holder.merchant_id)
            noted = _Noted(
                verdict,
                judgement.trace,
                key_id,
                merchant_id,
                request_id,
                door,
                environment,
                endpoint[:MAX_REDACTED_LENGTH],
                source[:MAX_REDACTED_LENGTH],
                at,
            )
            if self._add(noted):
                noted.tell()
        except Exception:  # noqa: BLE001  the answer is given, whatever becomes of its record
            _log.exception("a refusal could not be noted")

    def flush(self) -> None:
        """Writes what is pending. What a lost database did not take is kept, as far as there is room."""
        with self._flushing:
            with self._lock:
                pending, self._pending = self._pending, []
                dropped, self._dropped = self._dropped, 0
            if dropped:
                _log.warning("too many refusals at once: some are not kept", extra={"dropped": dropped})
            for start in range(0, len(pending), _AT_ONCE):
                portion = pending[start : start + _AT_ONCE]
                try:
                    Refusal.objects.bulk_create([noted.as_row() for noted in portion], ignore_conflicts=True)
                except (OperationalError, InterfaceError):
                    self._take_back(pending[start:])
                    raise
                except Exception:  # noqa: BLE001  whatever it was, the other portions may be written
                    _log.exception("refusals could not be written", extra={"count": len(portion)})
                sleep(_PAUSE_SECONDS)

    def stop(self) -> None:
        """The farewell: writes what is left."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout=5)
            self._try_flush()

    def forget(self) -> None:
        """In a forked child: what is pending is the parent's to write, and so is its thread."""
        self.__init__(self.clock)  # type: ignore[misc]  # of this very class, which nobody inherits from

    def _add(self, noted: _Noted) -> bool:
        """Whether the log is to have it. By time and not by flushes: a database that hangs silences nobody."""
        about = noted.key_id, noted.denial.code
        most = _MOST_OF_A_KEY if noted.key_id else _MOST_UNPROVED
        period = int(self.clock() / FLUSH_SECONDS)
        with self._lock:
            if period != self._period:
                self._period, self._lines = period, 0
                self._seen.clear()
            self._seen[about] += 1
            times = self._seen[about]
            if times <= most and len(self._pending) < _MOST_PENDING:
                self._pending.append(noted)
                self._start()
            else:
                self._dropped += 1
            is_told = times <= _MOST_LINES and self._lines < _MOST_LINES_OF_ALL
            self._lines += is_told
            return is_told

    def _start(self) -> None:
        """A process that reports its uses writes its refusals too; no other one has a door."""
        if self._thread is not None or not usage_log.is_reporting:
            return
        self._thread = threading.Thread(target=self._write, name="refusals", daemon=True)
        self._thread.start()
        # Not atexit, which is not called in Granian's forked worker; this is called there and everywhere else.
        Finalize(None, self.stop, exitpriority=0)

    def _write(self) -> None:
        lower_priority()
        try:
            while not self._stop.wait(FLUSH_SECONDS):
                self._try_flush()
                close_old_connections()
        finally:
            connections.close_all()  # this thread's own

    def _try_flush(self) -> None:
        try:
            self.flush()
        except (OperationalError, InterfaceError) as error:
            _log.warning("refusals could not be written; they are kept as far as there is room", extra={"why": error})
        except Exception:  # noqa: BLE001  whatever it was, the next ones may be written
            _log.exception("refusals could not be written")

    def _take_back(self, pending: list[_Noted]) -> None:
        with self._lock:
            room = max(0, _MOST_PENDING - len(self._pending))
            self._dropped += len(pending[room:])
            self._pending = pending[:room] + self._pending


def find_refusal(request_id: str) -> Refusal | None:
    return Refusal.objects.filter(request_id=request_id).first()


def forget_old(now: datetime) -> int:
    """Deletes refusals of more than 30 days ago, and of more than a day ago where nothing was proved: anybody makes
    those. Some thousands at a time. How many there were."""
    rows = Refusal.objects.filter(Q(at__lt=now - KEPT_FOR) | Q(at__lt=now - UNPROVED_KEPT_FOR, key_id=""))
    old = rows.order_by("at").values_list("pk", flat=True)[:_MOST_FORGOTTEN]
    deleted, _ = Refusal.objects.filter(pk__in=list(old)).delete()
    return deleted


refusal_log = RefusalLog()
"""This process's own."""

os.register_at_fork(after_in_child=refusal_log.forget)
