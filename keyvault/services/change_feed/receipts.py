"""Receipts of changes, such as a revocation: which verifiers have applied the change.

A receipt waits for each verifier that may still answer from memory: it has not deregistered, and its staleness bound
since its last report (`Verifier.seen_at`) has not passed. All times are the database's, because the process that
builds the receipt and the verifier may run on different hosts.

Limitations:

- A verifier measures its staleness in monotonic time, but receipts use the database's clock. If that clock steps
  forward while a verifier is silent, the verifier expires and the receipt completes too early, by at most the step.
  Even then no verifier allows a request by the earlier state later than `KEYVAULT_MAX_STALENESS` after the change.
- A verifier that starts while a transaction is open confirms nothing until that transaction ends. Receipts of earlier
  changes wait for it too, although it has applied them.
- On SQLite, where all processes share one host, a verifier that cannot write its confirmation keeps answering. The
  host's generation counter keeps it correct.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from time import monotonic, sleep
from typing import Any

from django.db import DatabaseError
from django.db.models import OuterRef, Subquery
from django.db.models.functions import Now

from keyvault.domain.ids import Subject
from keyvault.models import Account, Change, Confirmation, Verifier
from keyvault.services.change_feed.follower import CONFIRMATIONS_KEPT_FOR

_log = logging.getLogger(__name__)

MAX_WAIT_SECONDS = 5
"""Maximum wait for a receipt, in seconds."""

MAX_WAITERS = 2
"""Maximum concurrent waits of one process. Each holds a thread that verdicts need."""

MAX_SEQUENCE = 2**63 - 1
"""Maximum of the database's sequence column."""

_LISTED_WITHIN = timedelta(hours=1)
"""An expired verifier is listed only if it reported after the change, or at most this long before."""

_TIMES_SHOWN_FOR = CONFIRMATIONS_KEPT_FOR - timedelta(hours=1)
"""Maximum age of a change whose confirmation times are shown. A worker deletes by its own clock, within the margin."""

MAX_STOPPED = 200
"""Maximum verifiers that have deregistered, the latest ones, which a receipt reads."""

_FIRST_POLL_SECONDS = 0.002
_MAX_PAUSE_SECONDS = 0.05

_waiters = threading.BoundedSemaphore(MAX_WAITERS)


class VerifierProgress(StrEnum):
    """Progress of a verifier toward a change. EXPIRED: its staleness bound passed, and receipts do not wait for it."""

    CONFIRMED = "confirmed"
    WAITING = "waiting"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class VerifierReceipt:
    """One verifier's progress. `confirmed_at` is also None if the confirmation is no longer kept."""

    verifier_id: str
    entry_point: str
    progress: VerifierProgress
    confirmed_at: datetime | None
    started_at: datetime
    seen_at: datetime


@dataclass(frozen=True, slots=True)
class Receipt:
    """The receipt of the change with this sequence, now. Complete: no verifier is WAITING.

    `subject` and `changed_at` are None when the change is no longer kept.
    """

    sequence: int
    is_complete: bool
    subject: Subject | None = None
    changed_at: datetime | None = None
    verifiers: tuple[VerifierReceipt, ...] = ()

    def of(self, progress: VerifierProgress) -> list[VerifierReceipt]:
        return [verifier for verifier in self.verifiers if verifier.progress is progress]

    def seconds_until(self, verifier: VerifierReceipt) -> float | None:
        """Seconds from the change to the confirmation. Two clocks apply if the database runs on another host."""
        if self.changed_at is None or verifier.confirmed_at is None:
            return None
        return max(0.0, (verifier.confirmed_at - self.changed_at).total_seconds())


def find_receipt(sequence: int) -> Receipt | None:
    """Return the receipt of a change, or None for an unknown sequence."""
    if not 0 < sequence <= MAX_SEQUENCE:
        return None
    receipt = _receipt(sequence)
    return None if receipt.changed_at is None else receipt


def wait_for_receipt(sequence: int, seconds: int) -> tuple[Receipt, int]:
    """Wait until the receipt is complete or the time is over. Return it and the maximum wait granted, in seconds.

    Call it outside a transaction. At most MAX_WAIT_SECONDS are granted, and 0 while MAX_WAITERS others wait. After a
    database failure the receipt is incomplete; the change itself is unaffected.
    """
    with _waiter_slot() as has_slot:
        granted = min(seconds, MAX_WAIT_SECONDS) if has_slot else 0
        try:
            return _wait(sequence, granted), granted
        except DatabaseError:
            _log.exception("a receipt could not be read", extra={"sequence": sequence})
            return Receipt(sequence, is_complete=False), granted


def list_unconfirmed(sequence: int) -> list[str]:
    """Return the ids of the verifiers that the receipt waits for."""
    rows = Verifier.objects.filter(confirmed_sequence__lt=sequence, stopped_at__isnull=True).annotate(now=Now())
    ordered = rows.order_by("started_at", "verifier_id")
    return [row.verifier_id for row in ordered if _progress(row, sequence, row.now) is VerifierProgress.WAITING]


def find_account_of(subject: Subject | None) -> Account | None:
    """Return the account of a change's subject. None: no account, or one that no longer exists."""
    kind, identity = subject or ("", "")
    accounts = Account.objects.select_related("merchant")
    if kind == "key":
        return accounts.filter(credentials__keys=identity).first()
    if kind == "credential":
        return accounts.filter(credentials=identity).first()
    if kind == "customer_token":
        return accounts.filter(customer_tokens=identity).first()
    # A limit's subject is "acme/sandbox orders.create", or "sandbox orders.create" for all accounts.
    merchant_id, _, environment = identity.partition(" ")[0].partition("/")
    if kind in {"account", "limit"} and environment:
        return accounts.filter(merchant=merchant_id, environment=environment).first()
    return None


def describe_receipt(receipt: Receipt) -> dict[str, Any]:
    """Describe a receipt as JSON, for every entry point."""
    return {
        "sequence": receipt.sequence,
        "complete": receipt.is_complete,
        "changed_at": receipt.changed_at,
        "verifiers": [
            {
                "verifier_id": verifier.verifier_id,
                "door": verifier.entry_point,
                "state": verifier.progress,
                "confirmed_at": verifier.confirmed_at,
                "seen_at": verifier.seen_at,
            }
            for verifier in receipt.verifiers
        ],
    }


@contextmanager
def _waiter_slot() -> Iterator[bool]:
    has_slot = _waiters.acquire(blocking=False)
    try:
        yield has_slot
    finally:
        if has_slot:
            _waiters.release()


def _wait(sequence: int, seconds: float) -> Receipt:
    until = monotonic() + seconds
    pause = _FIRST_POLL_SECONDS
    while not (receipt := _receipt(sequence)).is_complete and (remaining := until - monotonic()) > 0:
        sleep(min(pause, remaining))
        pause = min(2 * pause, _MAX_PAUSE_SECONDS)
    return receipt


def _receipt(sequence: int) -> Receipt:
    change = Change.objects.filter(sequence=sequence).first()
    receipts = []
    for row in sorted(_list_verifiers(sequence), key=lambda row: (row.started_at, row.verifier_id)):
        progress = _progress(row, sequence, row.now)
        if progress is not None and (progress is not VerifierProgress.EXPIRED or _was_active(row, change)):
            # Of an older change, the first confirmation that is still kept may be of a later change.
            confirmed_at = None if change is None or change.at < row.now - _TIMES_SHOWN_FOR else row.first_confirmed_at
            receipts.append(
                VerifierReceipt(row.verifier_id, row.entry_point, progress, confirmed_at, row.started_at, row.seen_at)
            )
    return Receipt(
        sequence,
        is_complete=all(verifier.progress is not VerifierProgress.WAITING for verifier in receipts),
        subject=None if change is None else (change.subject_kind, change.subject_id),
        changed_at=None if change is None else change.at,
        verifiers=tuple(receipts),
    )


def _list_verifiers(sequence: int) -> list[Any]:
    """Return the verifiers that have not deregistered, and the latest MAX_STOPPED others, by one query."""
    first = Confirmation.objects.filter(verifier=OuterRef("pk"), sequence__gte=sequence).order_by("sequence")
    rows = Verifier.objects.annotate(now=Now(), first_confirmed_at=Subquery(first.values("at")[:1]))
    stopped = Verifier.objects.filter(stopped_at__isnull=False).order_by("-stopped_at").values("pk")
    # Limited inside: SQLite allows no limit in a part of a union.
    return list(rows.filter(stopped_at__isnull=True).union(rows.filter(pk__in=stopped[:MAX_STOPPED]), all=True))


def _progress(row: Verifier, sequence: int, now: datetime) -> VerifierProgress | None:
    """Return the progress, or None for a verifier that deregistered before it applied the change."""
    if row.confirmed_sequence >= sequence:
        return VerifierProgress.CONFIRMED
    if row.stopped_at is not None:
        return None
    return (
        VerifierProgress.WAITING
        if row.seen_at + timedelta(milliseconds=row.staleness_ms) >= now
        else VerifierProgress.EXPIRED
    )


def _was_active(row: Verifier, change: Change | None) -> bool:
    return change is None or row.seen_at >= change.at - _LISTED_WITHIN
