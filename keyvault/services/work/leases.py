"""Leases: one worker at a time per piece of work, with takeover when that worker dies.

A lease is an exclusive claim with an expiry. Its token is a fencing token: `hold`, in the transaction that records the
outcome, rejects a worker whose lease another worker has taken over.
"""

import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import IntegrityError, transaction
from django.db.models import F, Q

from keyvault.domain.errors import StateConflictError
from keyvault.models import WorkLease
from keyvault.services.work.deletion import delete_batch

LEASE = timedelta(seconds=15)
"""Lifetime of a lease. Longer than the timeout of a secret backend call, which is a few seconds.

A call that still takes longer fails in `hold` when its worker records the outcome.
"""

KEPT_FOR = timedelta(days=7)
"""Retention of the row of work that no worker claims any more."""

_FIRST_BACKOFF_SECONDS = 1
_MAX_BACKOFF_SECONDS = 60
_PAUSE_SECONDS = 5
_FAILED_BATCH = 500
"""Maximum rows of failed work read in one query."""


@dataclass(frozen=True, slots=True)
class Lease:
    subject: str
    token: str
    attempts: int


def claim(subject: str, now: datetime, *, ignore_due_at: bool = False) -> Lease | None:
    """Claim a piece of work in a transaction of its own; None while another worker holds it or it is not due.

    `ignore_due_at`: claim the work even before it is due, because a caller waits for the result.
    """
    token = secrets.token_hex(16)
    free = Q(until__isnull=True) | Q(until__lte=now)
    due = Q(due_at__isnull=True) | Q(due_at__lte=now)
    rows = WorkLease.objects.filter(free, subject=subject)
    if not ignore_due_at:
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
    """Lock the lease's row inside the transaction of the outcome. Raises StateConflictError when it is lost."""
    if WorkLease.objects.filter(subject=lease.subject, token=lease.token).update(last_error="") != 1:
        raise StateConflictError("Another worker took this over.", internal=f"{lease.subject}: the lease is lost")


def renew(lease: Lease, now: datetime) -> None:
    """Extend the lease from now, between many small steps. Raises StateConflictError when it is lost."""
    if WorkLease.objects.filter(subject=lease.subject, token=lease.token).update(until=now + LEASE) != 1:
        raise StateConflictError("Another worker took this over.", internal=f"{lease.subject}: the lease is lost")


def release(lease: Lease, *, due_at: datetime | None = None) -> None:
    """Release the work after a success; it is due again at `due_at` (None: now, which needs no row)."""
    if due_at is None:
        WorkLease.objects.filter(subject=lease.subject, token=lease.token).delete()
        return
    WorkLease.objects.filter(subject=lease.subject, token=lease.token).update(
        token="",
        until=None,
        due_at=due_at,
        attempts=0,
        last_error="",
    )


def postpone(lease: Lease, now: datetime, error: str) -> None:
    """Release the work after a failure; the next attempt is due after a backoff that doubles up to a minute."""
    backoff = _FIRST_BACKOFF_SECONDS * 2 ** min(lease.attempts - 1, 10)
    _reschedule(lease, now + timedelta(seconds=min(_MAX_BACKOFF_SECONDS, backoff * _jitter())), error)


def pause(lease: Lease, now: datetime, error: str, *, seconds: int = 0) -> None:
    """Release the work while a server that it needs is unavailable: no attempt is counted, and the retry is soon.

    `seconds`: the server's own Retry-After, honored up to a minute so that its return is noticed.
    """
    wanted = max(_PAUSE_SECONDS, seconds) * _jitter()
    _reschedule(lease, now + timedelta(seconds=min(wanted, _MAX_BACKOFF_SECONDS - 2)), error, attempts=0)


def _reschedule(lease: Lease, due_at: datetime, error: str, **changes: int) -> None:
    WorkLease.objects.filter(subject=lease.subject, token=lease.token).update(
        token="",
        until=None,
        due_at=due_at,
        last_error=error[:300],
        **changes,
    )


def _jitter() -> float:
    return 1 + secrets.randbelow(250) / 1000


def record_failure(subject: str, now: datetime, error: str) -> None:
    """Record a failure of work that needs no lease; consecutive failures back off. See `list_failed`."""
    lease = claim(subject, now, ignore_due_at=True)
    if lease is not None:
        postpone(lease, now, error)


def list_failed(prefix: str) -> Iterator[Sequence[WorkLease]]:
    """Yield work whose subject has this prefix and whose last attempt failed, in batches ordered by subject.

    A batch's rows may be deleted before the next one is read.
    """
    failed = WorkLease.objects.filter(~Q(last_error=""), subject__startswith=prefix).order_by("subject")
    batch = failed[:_FAILED_BATCH]
    while rows := list(batch):
        yield rows
        if len(rows) < _FAILED_BATCH:
            return
        batch = failed.filter(subject__gt=rows[-1].subject)[:_FAILED_BATCH]


def forget(subject: str) -> None:
    """Delete the lease row of finished work."""
    WorkLease.objects.filter(subject=subject).delete()


def forget_abandoned(now: datetime) -> None:
    """Delete a batch of rows of work that no worker has claimed for a week; the work itself may still start."""
    long_ago = now - KEPT_FOR
    is_free = Q(until__isnull=True) | Q(until__lt=now)
    delete_batch(WorkLease.objects.filter(is_free, due_at__lt=long_ago).order_by("due_at"))
    delete_batch(WorkLease.objects.filter(due_at__isnull=True, until__lt=long_ago).order_by("until"))


def list_due(subjects: Iterable[str], now: datetime) -> list[str]:
    """Return the subjects that are due and not leased, in the given order."""
    wanted = list(subjects)
    busy = WorkLease.objects.filter(Q(until__gt=now) | Q(due_at__gt=now), subject__in=wanted)
    taken = set(busy.values_list("subject", flat=True))
    return [subject for subject in wanted if subject not in taken]


def wake(subject: str) -> None:
    """Make waiting work due now."""
    WorkLease.objects.filter(subject=subject).update(due_at=None)
