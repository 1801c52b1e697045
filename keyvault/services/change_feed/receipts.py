"""Which verifiers have applied a change, by their own word: the receipt of a revocation. Reads only.

A verifier is waited for while it may still answer from memory: it has said no farewell, and since it was heard of last
(`Verifier.seen_at`) less than its staleness bound has passed. After that it answers from memory no longer, whatever
became of it. All times are the database's: who asks and who confirmed may be on different hosts.

Three limits. A verifier measures its own staleness in monotonic time, and the database's clock may be set: a step
forwards while a verifier is silent makes that one count as expired, and the receipt as complete, too early by at most
the step. (`KEYVAULT_MAX_STALENESS` after the change no verifier says yes by what was before, whatever any clock shows.)
And a verifier that was started while a writer lingers has confirmed nothing until that one ends: receipts of earlier
changes wait for it too, though it knows them. And on SQLite, which is one host's, a verifier that cannot write what it
has confirmed goes on by its host's word.
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

from keyvault.models import Account, Change, Confirmation, Verifier
from keyvault.models.recording import Subject

_log = logging.getLogger(__name__)

LONGEST_WAIT_SECONDS = 10
MOST_WAITERS = 2
"""Of one process: a wait holds one of its threads, and verdicts need those."""

LARGEST_SEQUENCE = 2**63 - 1

_HEARD_OF_WITHIN = timedelta(hours=1)
"""A verifier that had been silent for longer when the change was made has nothing to do with it: it is not listed."""

_FIRST_LOOK_SECONDS = 0.002
_LONGEST_PAUSE_SECONDS = 0.05

_waiters = threading.BoundedSemaphore(MOST_WAITERS)


class VerifierProgress(StrEnum):
    """How a verifier stands to a change. EXPIRED: it was not heard of in time, and is not waited for."""

    CONFIRMED = "confirmed"
    WAITING = "waiting"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class VerifierStanding:
    """`confirmed_at` is when it said that it had got there; None too when that is no longer kept."""

    verifier_id: str
    door: str
    standing: VerifierProgress
    confirmed_at: datetime | None
    started_at: datetime
    seen_at: datetime


@dataclass(frozen=True, slots=True)
class Receipt:
    """Of the change with this sequence, as it stands now. Complete: no verifier is waited for.

    `subject`, `changed_at`: None when the change is no longer kept.
    """

    sequence: int
    is_complete: bool
    subject: Subject | None = None
    changed_at: datetime | None = None
    verifiers: tuple[VerifierStanding, ...] = ()

    def of(self, standing: VerifierProgress) -> list[VerifierStanding]:
        return [verifier for verifier in self.verifiers if verifier.standing is standing]

    def seconds_until(self, verifier: VerifierStanding) -> float | None:
        """From the change to that confirmation; by two clocks, where the database is on another host than who asked."""
        if self.changed_at is None or verifier.confirmed_at is None:
            return None
        return max(0.0, (verifier.confirmed_at - self.changed_at).total_seconds())


def find_receipt(sequence: int) -> Receipt | None:
    """None: there is no such change."""
    if not 0 < sequence <= LARGEST_SEQUENCE or not Change.objects.filter(sequence=sequence).exists():
        return None
    return _receipt(sequence)


def wait_for_receipt(sequence: int, seconds: int) -> tuple[Receipt, int]:
    """The receipt when it is complete, or as it is after so many seconds; and for how many it was ready to wait.

    Call it outside a transaction. It never waits for more than LONGEST_WAIT_SECONDS, nor at all while MOST_WAITERS
    others do. A database that fails meanwhile undoes nothing: the receipt is then not complete.
    """
    with _place_to_wait() as has_place:
        allowed = min(seconds, LONGEST_WAIT_SECONDS) if has_place else 0
        try:
            return _wait(sequence, allowed), allowed
        except DatabaseError:
            _log.exception("a receipt could not be read", extra={"sequence": sequence})
            return Receipt(sequence, is_complete=False), allowed


def list_unconfirmed(sequence: int) -> list[str]:
    """The ids of the verifiers that are waited for until all have applied the change."""
    return [verifier.verifier_id for verifier in _receipt(sequence).of(VerifierProgress.WAITING)]


def find_account_of(subject: Subject | None) -> Account | None:
    """Whose the subject of a change is; None: of no account, or of one that is not known any more."""
    kind, identity = subject or ("", "")
    accounts = Account.objects.select_related("merchant")
    if kind == "key":
        return accounts.filter(credentials__keys=identity).first()
    if kind == "credential":
        return accounts.filter(credentials=identity).first()
    if kind == "customer_token":
        return accounts.filter(customer_tokens=identity).first()
    # Of a limit, "acme/sandbox orders.create", or "sandbox orders.create" of all accounts.
    merchant_id, _, environment = identity.partition(" ")[0].partition("/")
    if kind in {"account", "limit"} and environment:
        return accounts.filter(merchant=merchant_id, environment=environment).first()
    return None


def describe_receipt(receipt: Receipt) -> dict[str, Any]:
    """What every door tells about a receipt."""
    return {
        "sequence": receipt.sequence,
        "complete": receipt.is_complete,
        "changed_at": receipt.changed_at,
        "verifiers": [
            {
                "verifier_id": verifier.verifier_id,
                "door": verifier.door,
                "state": verifier.standing,
                "confirmed_at": verifier.confirmed_at,
                "seen_at": verifier.seen_at,
            }
            for verifier in receipt.verifiers
        ],
    }


@contextmanager
def _place_to_wait() -> Iterator[bool]:
    has_place = _waiters.acquire(blocking=False)
    try:
        yield has_place
    finally:
        if has_place:
            _waiters.release()


def _wait(sequence: int, seconds: float) -> Receipt:
    until = monotonic() + seconds
    pause = _FIRST_LOOK_SECONDS
    while not (receipt := _receipt(sequence)).is_complete and (left := until - monotonic()) > 0:
        sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
    return receipt


def _receipt(sequence: int) -> Receipt:
    change = Change.objects.filter(sequence=sequence).first()
    first = Confirmation.objects.filter(verifier=OuterRef("pk"), sequence__gte=sequence).order_by("sequence")
    rows = Verifier.objects.annotate(now=Now(), first_confirmed_at=Subquery(first.values("at")[:1]))
    standings = []
    for row in rows.order_by("started_at", "verifier_id"):
        standing = _standing(row, sequence, row.now)
        if standing is not None and (standing is not VerifierProgress.EXPIRED or _was_heard_of(row, change)):
            standings.append(
                VerifierStanding(
                    row.verifier_id, row.door, standing, row.first_confirmed_at, row.started_at, row.seen_at
                )
            )
    return Receipt(
        sequence,
        is_complete=all(verifier.standing is not VerifierProgress.WAITING for verifier in standings),
        subject=None if change is None else (change.subject_kind, change.subject_id),
        changed_at=None if change is None else change.at,
        verifiers=tuple(standings),
    )


def _standing(row: Verifier, sequence: int, now: datetime) -> VerifierProgress | None:
    """None: it went, and had not got there."""
    if row.confirmed_sequence >= sequence:
        return VerifierProgress.CONFIRMED
    if row.stopped_at is not None:
        return None
    return (
        VerifierProgress.WAITING
        if row.seen_at + timedelta(milliseconds=row.staleness_ms) >= now
        else VerifierProgress.EXPIRED
    )


def _was_heard_of(row: Verifier, change: Change | None) -> bool:
    return change is None or row.seen_at >= change.at - _HEARD_OF_WITHIN
