"""What was refused, and by which rule: noted in memory on the request path, written a moment later by a thread.

For whoever is asked why with a request id. It is no evidence and part of no verdict, so it may be lost: memory is
bounded, and so is what a flood of requests without any proof can have written.
"""

import logging
import os
import threading
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from multiprocessing.util import Finalize

from django.db import InterfaceError, OperationalError, close_old_connections, connections
from django.db.models import Q

from keyvault.access.decision import Denial
from keyvault.domain.environments import Environment
from keyvault.domain.free_text import clean_text
from keyvault.models import Refusal
from keyvault.services.usage import usage_log
from keyvault.services.verification import Judgement

_log = logging.getLogger(__name__)

FLUSH_SECONDS = 0.5
KEPT_FOR = timedelta(days=30)
UNPROVED_KEPT_FOR = timedelta(days=1)

_MOST_PENDING = 2_000
_MOST_UNPROVED = 5
"""Of one flush: whoever proves nothing shall not fill the disk."""

_MOST_FORGOTTEN = 5_000
_READ = 512
"""Of a text no more than this is looked at."""


@dataclass(slots=True)
class RefusalLog:
    """The refusals of this process that are not yet written."""

    _pending: list[Refusal] = field(default_factory=list)
    _unproved: int = 0
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
        """Notes a denied judgement and logs it; a grant leaves nothing. Some microseconds, no I/O, never an error."""
        verdict = judgement.verdict
        if not isinstance(verdict, Denial):
            return
        try:
            holder = judgement.holder or verdict.holder
            _log.info(
                "denied",
                extra={
                    "request_id": request_id,
                    "code": verdict.code,
                    "internal": verdict.internal,
                    "key_id": "" if holder is None else holder.key_id,
                },
            )
            row = Refusal(
                request_id=request_id[:32],
                at=at,
                door=door[:32],
                environment=environment,
                endpoint=endpoint[:_READ],
                code=verdict.code,
                detail=verdict.detail[:_READ],
                internal=verdict.internal[:_READ],
                key_id="" if holder is None else holder.key_id,
                merchant_id="" if holder is None else holder.merchant_id,
                source=source[:_READ],
                trace=[[check.rule.value, check.passed] for check in judgement.trace],
            )
            self._add(row, is_proved=holder is not None)
        except Exception:  # noqa: BLE001  the answer is given, whatever becomes of its record
            _log.exception("a refusal could not be noted")

    def flush(self) -> None:
        """Writes what is pending. What a lost database did not take is kept, as far as there is room."""
        with self._flushing:
            with self._lock:
                rows, self._pending = self._pending, []
                dropped, self._dropped = self._dropped, 0
                self._unproved = 0
            if dropped:
                _log.warning("too many refusals at once: some are not kept", extra={"dropped": dropped})
            if not rows:
                return
            try:
                Refusal.objects.bulk_create(map(_cleaned, rows), ignore_conflicts=True)
            except (OperationalError, InterfaceError):
                self._take_back(rows)
                raise

    def stop(self) -> None:
        """The farewell: writes what is left."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout=5)
            self._try_flush()

    def forget(self) -> None:
        """In a forked child: what is pending is the parent's to write, and so is its thread."""
        self.__init__()  # type: ignore[misc]  # of this very class, which nobody inherits from

    def _add(self, row: Refusal, *, is_proved: bool) -> None:
        with self._lock:
            if len(self._pending) >= _MOST_PENDING or (not is_proved and self._unproved >= _MOST_UNPROVED):
                self._dropped += 1
                return
            self._pending.append(row)
            self._unproved += not is_proved
            self._start()

    def _start(self) -> None:
        """A process that reports its uses writes its refusals too; no other one has a door."""
        if self._thread is not None or not usage_log.is_reporting:
            return
        self._thread = threading.Thread(target=self._write, name="refusals", daemon=True)
        self._thread.start()
        # Not atexit, which is not called in Granian's forked worker; this is called there and everywhere else.
        Finalize(None, self.stop, exitpriority=0)

    def _write(self) -> None:
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

    def _take_back(self, rows: list[Refusal]) -> None:
        with self._lock:
            room = max(0, _MOST_PENDING - len(self._pending))
            self._dropped += len(rows[room:])
            self._pending = rows[:room] + self._pending


def _cleaned(row: Refusal) -> Refusal:
    """Redacted here, not on the request path."""
    row.endpoint = clean_text(row.endpoint, 100)
    row.detail = clean_text(row.detail, 300)
    row.internal = clean_text(row.internal, 300)
    row.source = clean_text(row.source, 64)
    return row


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
