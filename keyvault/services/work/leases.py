"""Work that one worker does at a time, and that another takes over when that one dies.

A lease is a promise with an end: whoever claims it has until then. Its token fences: inside the transaction
that records the outcome, `hold` refuses a worker whose lease has gone to another meanwhile.
"""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import IntegrityError, transaction
from django.db.models import F, Q

from keyvault.domain.errors import StateConflictError
from keyvault.models import WorkLease

LEASE = timedelta(seconds=15)
"""Longer than a call to the secret backend may take (its time limits are seconds). One that outlives it all the same
finds its lease gone when it comes to record the outcome."""

_FIRST_BACKOFF_SECONDS = 1
_LONGEST_BACKOFF_SECONDS = 60
_PAUSE_SECONDS = 5


@dataclass(frozen=True, slots=True)
class Lease:
    subject: str
    token: str
    attempts: int


def claim(subject: str, now: datetime, *, now_or_never: bool = False) -> Lease | None:
    """The lease on a piece of work, or None while another holds it or it is not due. Its own transaction.

    `now_or_never`: due or not, for somebody who waits for the answer.
    """
    token = secrets.token_hex(16)
    free = Q(until__isnull=True) | Q(until__lte=now)
    due = Q(due_at__isnull=True) | Q(due_at__lte=now)
    rows = WorkLease.objects.filter(free, subject=subject)
    if not now_or_never:
        rows = rows.filter(due)
    if rows.update(token=token, until=now + LEASE, attempts=F("attempts") + 1) == 1:
        return Lease(subject, token, WorkLease.objects.values_list("attempts", flat=True).get(subject=subject))
    try:
        with transaction.atomic():
            WorkLease.objects.create(subject=subject, token=token, until=now + LEASE, attempts=1)
    except IntegrityError:
        return None
    return Lease(subject, token, 1)


def hold(lease: Lease) -> None:
    """Inside the transaction of the outcome: locks the lease's row. Raises StateConflictError when it is lost."""
    if WorkLease.objects.filter(subject=lease.subject, token=lease.token).update(last_error="") != 1:
        raise StateConflictError("Another worker took this over.", internal=f"{lease.subject}: the lease is lost")


def renew(lease: Lease, now: datetime) -> None:
    """For work of many small steps: as long again from now. Raises StateConflictError when it is lost."""
    if WorkLease.objects.filter(subject=lease.subject, token=lease.token).update(until=now + LEASE) != 1:
        raise StateConflictError("Another worker took this over.", internal=f"{lease.subject}: the lease is lost")


def release(lease: Lease, *, due_at: datetime | None = None) -> None:
    """Gives the work back in good order, to be looked at again at `due_at` (None: at once)."""
    WorkLease.objects.filter(subject=lease.subject, token=lease.token).update(
        token="",
        until=None,
        due_at=due_at,
        attempts=0,
        last_error="",
    )


def postpone(lease: Lease, now: datetime, error: str) -> None:
    """Gives the work back after a failure, to be tried again after a pause that doubles up to a minute."""
    doubled = _FIRST_BACKOFF_SECONDS * 2 ** min(lease.attempts - 1, 10)
    _give_back(lease, now + timedelta(seconds=min(_LONGEST_BACKOFF_SECONDS, doubled * _jitter())), error)


def pause(lease: Lease, now: datetime, error: str, *, seconds: int = 0) -> None:
    """Gives the work back while a server that it needs is away: no attempt is used up, and it is soon tried again.

    `seconds`: what the server itself asked for, honoured up to a minute, so that its return is noticed.
    """
    wanted = max(_PAUSE_SECONDS, seconds) * _jitter()
    _give_back(lease, now + timedelta(seconds=min(wanted, _LONGEST_BACKOFF_SECONDS - 2)), error, attempts=0)


def _give_back(lease: Lease, due_at: datetime, error: str, **changes: int) -> None:
    WorkLease.objects.filter(subject=lease.subject, token=lease.token).update(
        token="",
        until=None,
        due_at=due_at,
        last_error=error[:300],
        **changes,
    )


def _jitter() -> float:
    return 1 + secrets.randbelow(250) / 1000


def put_off(subject: str, now: datetime, error: str) -> None:
    """Note a failure of work that needs no lease, and wait longer with each one in a row. See `list_failed`."""
    lease = claim(subject, now, now_or_never=True)
    if lease is not None:
        postpone(lease, now, error)


def list_failed(prefix: str) -> dict[str, WorkLease]:
    """The work whose subject begins so and whose last try failed, by subject."""
    return {row.subject: row for row in WorkLease.objects.filter(~Q(last_error=""), subject__startswith=prefix)}


def forget(subject: str) -> None:
    """Nothing is left to remember of that work."""
    WorkLease.objects.filter(subject=subject).delete()


def list_due(subjects: Iterable[str], now: datetime) -> list[str]:
    """Which of these nobody is at work on and whose time has come, in the order given."""
    wanted = list(subjects)
    busy = WorkLease.objects.filter(Q(until__gt=now) | Q(due_at__gt=now), subject__in=wanted)
    taken = set(busy.values_list("subject", flat=True))
    return [subject for subject in wanted if subject not in taken]


def wake(subject: str) -> None:
    """Something happened that the waiting work should look at now."""
    WorkLease.objects.filter(subject=subject).update(due_at=None)
