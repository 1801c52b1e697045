"""Leases: one worker at a time per piece of work, with takeover when that worker dies.

A lease is an exclusive claim with an expiry. Its token is a fencing token: `hold`, in the transaction that records the
outcome, rejects a worker whose lease another worker has taken over.

Work in a queue is dispatched when it is due: `take_due` selects it and `claim_dispatched` begins it. The row is
authoritative, not the message: a lost message is sent again after REDISPATCH, and a repeated one claims nothing. A
claimed row is due when its lease expires, so that a dead worker's work is found. `wake` makes the work due now; a
wake-up while the work is claimed makes it due when it is released.

To prevent deadlocks, a transaction locks these rows last, after keys and rotations.
"""

import hashlib
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.conf import settings
from django.db import IntegrityError, connection, transaction
from django.db.models import Case, F, Min, Q, QuerySet, Value, When
from django.db.models.functions import Coalesce

from keyvault.domain.errors import StateConflictError
from keyvault.models import WorkLease
from keyvault.services.work.deletion import delete_batch

LEASE = timedelta(seconds=15)
"""Lifetime of a lease. Longer than the timeout of a secret backend call, which is a few seconds.

A call that still takes longer fails in `hold` when its worker records the outcome.
"""

REDISPATCH = timedelta(seconds=30)
"""Time after which dispatched work is due again, in case its message was lost."""

_FIRST_BACKOFF_SECONDS = 1
_MAX_BACKOFF_SECONDS = 60
_PAUSE_SECONDS = 5

_MAX_COUNTED = 10_000
"""Maximum rows of a queue that are counted."""


_MAX_SUBJECT = 80
"""Maximum length of a subject, as its column has it."""

_DIGEST_HEX = 32
"""Length of the digest at the end of a longer name, in hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A claim. `wakes`: the row's wake-ups when it was claimed; later ones came while it was held."""

    subject: str
    token: str
    attempts: int
    wakes: int = 0


def make_subject(name: str) -> str:
    """Return a piece of work's name as a subject: a name that is too long ends with its digest."""
    if len(name) <= _MAX_SUBJECT:
        return name
    return name[: _MAX_SUBJECT - _DIGEST_HEX] + hashlib.sha256(name.encode()).hexdigest()[:_DIGEST_HEX]


def claim(subject: str, now: datetime, *, ignore_due_at: bool = False) -> Lease | None:
    """Claim a piece of work in a transaction of its own; None while another worker holds it or it is not due.

    `ignore_due_at`: claim the work even before it is due, because a caller waits for the result.
    """
    due = Q() if ignore_due_at else Q(due_at__isnull=True) | Q(due_at__lte=now)
    lease = _claim(subject, now, due)
    if lease is not None:
        return lease
    token = secrets.token_hex(16)
    try:
        with transaction.atomic():
            WorkLease.objects.create(subject=subject, token=token, until=now + LEASE, due_at=now + LEASE, attempts=1)
    except IntegrityError:
        return None
    return Lease(subject, token, 1)


def claim_dispatched(subject: str, queues: Collection[str], now: datetime) -> Lease | None:
    """Claim work in one of these queues for which a message arrived.

    None if an earlier message claimed it, another worker holds it, or it is in none of the queues.
    """
    return _claim(subject, now, Q(queue__in=queues, due_since__isnull=False))


def claim_early(subject: str, queues: Collection[str], now: datetime) -> Lease | None:
    """Claim work in one of these queues even before it is due, but not during its pause after a failure."""
    may_begin = Q(last_error="") | Q(due_at__lte=now) | Q(due_since__isnull=False)
    return _claim(subject, now, Q(queue__in=queues) & may_begin)


def _claim(subject: str, now: datetime, condition: Q) -> Lease | None:
    token = secrets.token_hex(16)
    free = Q(until__isnull=True) | Q(until__lte=now)
    claimed = WorkLease.objects.filter(free, condition, subject=subject).update(
        token=token, until=now + LEASE, due_at=now + LEASE, attempts=F("attempts") + 1, due_since=None
    )
    if claimed != 1:
        return None
    # A wake-up between the two statements needs no further turn: the worker has not read anything yet.
    row = WorkLease.objects.filter(subject=subject, token=token).values_list("attempts", "wakes").first()
    return None if row is None else Lease(subject, token, *row)  # None: a person ended the work meanwhile.


def hold(lease: Lease) -> None:
    """Lock the lease's row inside the transaction of the outcome. Raises StateConflictError when it is lost."""
    if _own(lease).update(last_error="") != 1:
        raise _lost(lease)


def is_held(lease: Lease) -> bool:
    """Whether no other worker has taken the work over."""
    return _own(lease).exists()


def renew(lease: Lease, now: datetime) -> None:
    """Extend the lease from now, between many small steps or before a call to another server.

    Raises StateConflictError when it is lost.
    """
    if _own(lease).update(until=now + LEASE, due_at=now + LEASE) != 1:
        raise _lost(lease)


def release(lease: Lease, *, due_at: datetime | None = None) -> None:
    """Release the work after a success; it is due again at `due_at` (None: now, which needs no row).

    Use `release_queued` for work in a queue.
    """
    if due_at is None:
        _own(lease).delete()
    else:
        _own(lease).update(token="", until=None, due_at=due_at, attempts=0, last_error="")


def release_queued(lease: Lease, now: datetime, due_at: datetime, *, is_urgent: bool = False) -> None:
    """Release work in a queue after a success; it is due at `due_at`, or now if it was woken while it was claimed."""
    is_unwoken = Q(wakes=lease.wakes)
    _own(lease).update(
        token="",
        until=None,
        due_at=Case(When(is_unwoken, then=Value(due_at)), default=Value(min(now, due_at))),
        is_urgent=Case(When(is_unwoken, then=Value(is_urgent)), default=F("is_urgent")),
        attempts=0,
        last_error="",
    )


def _own(lease: Lease) -> QuerySet[WorkLease]:
    return WorkLease.objects.filter(subject=lease.subject, token=lease.token)


def _lost(lease: Lease) -> StateConflictError:
    return StateConflictError("Another worker took this over.", internal=f"{lease.subject}: the lease is lost")


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


def fail(lease: Lease, now: datetime, error: str) -> None:
    """Release the work after a failure that no pause repairs: due again immediately, with the error in its row."""
    _reschedule(lease, now, error)


def _reschedule(lease: Lease, due_at: datetime, error: str, **changes: int) -> None:
    _own(lease).update(token="", until=None, due_at=due_at, due_since=None, last_error=error[:300], **changes)


def _jitter() -> float:
    return 1 + secrets.randbelow(250) / 1000


def finish(lease: Lease) -> None:
    """Delete the row inside the transaction that finishes the work. Raises StateConflictError when it is lost."""
    if _own(lease).delete()[0] != 1:
        raise _lost(lease)


def forget(subject: str) -> None:
    """Delete the lease row of finished work."""
    WorkLease.objects.filter(subject=subject).delete()


def forget_abandoned(now: datetime) -> int:
    """Delete a batch of rows of work that no worker has claimed for LEASE_DAYS; the work itself may still start.

    Rows of work in a queue stay: nothing else lists that work. Return how many.
    """
    long_ago, rows = now - timedelta(days=settings.LEASE_DAYS), WorkLease.objects.filter(queue="")
    is_free = Q(until__isnull=True) | Q(until__lt=now)
    deleted = delete_batch(rows.filter(is_free, due_at__lt=long_ago).order_by("due_at"))
    return deleted + delete_batch(rows.filter(due_at__isnull=True, until__lt=long_ago).order_by("until"))


def list_due(subjects: Iterable[str], now: datetime) -> list[str]:
    """Return the subjects that are due and not leased, in the given order."""
    wanted = list(subjects)
    busy = WorkLease.objects.filter(Q(until__gt=now) | Q(due_at__gt=now), subject__in=wanted)
    taken = set(busy.values_list("subject", flat=True))
    return [subject for subject in wanted if subject not in taken]


# --- queues -------------------------------------------------------------------------------------------------


def enqueue(subject: str, queue: str, due_at: datetime, *, is_urgent: bool = False) -> None:
    """Put new work into a queue, inside the transaction that makes the work."""
    WorkLease.objects.create(subject=subject, queue=queue, due_at=due_at, is_urgent=is_urgent)


def wake(subjects: Collection[str], now: datetime, *, is_urgent: bool = False) -> set[str]:
    """Make work in a queue due now, in the transaction of the event. Paused work is due after its pause.

    A wake-up for work that is claimed takes effect when it is released. Return the work that needs a message. The
    other work is paused, or was woken or dispatched earlier and waits for a worker.
    """
    is_paused = ~Q(last_error="") & Q(until__isnull=True)
    is_waiting = Q(due_since__isnull=False) & (Q(is_urgent=True) if is_urgent else Q())
    rows = WorkLease.objects.filter(subject__in=subjects)
    with transaction.atomic(savepoint=False):
        if len(subjects) > 1:
            # Locked in order, so that two transactions with several rows each do not deadlock.
            list(rows.order_by("subject").select_for_update())
        idle = set(rows.exclude(is_paused | is_waiting).values_list("subject", flat=True))
        # Wake the paused and the waiting ones, too: a worker that claims one now may not see the event's changes.
        rows.update(
            wakes=F("wakes") + 1,
            due_at=Case(When(is_paused | is_waiting, then=F("due_at")), default=Value(now)),
            due_since=Case(When(is_paused, then=F("due_since")), default=Coalesce("due_since", Value(now))),
            is_urgent=Value(True) if is_urgent else F("is_urgent"),
        )
    return idle


def has_due(queue: str, now: datetime, *, is_urgent: bool) -> bool:
    """Whether a queue has due subjects. Takes no write lock on SQLite, unlike `take_due`."""
    # Django writes `is_urgent=False` as `NOT is_urgent`, for which SQLite uses no index.
    return WorkLease.objects.filter(queue=queue, is_urgent__in=[is_urgent], due_at__lte=now).exists()


def take_due(queue: str, now: datetime, limit: int, *, is_urgent: bool) -> list[str]:
    """Take up to `limit` due subjects of a queue for dispatch, the longest due first.

    The statement that selects them makes them due again after REDISPATCH. Concurrent callers take different ones.
    """
    if limit <= 0:
        return []
    is_postgres = connection.vendor == "postgresql"
    adapt = connection.ops.adapt_datetimefield_value
    with connection.cursor() as cursor:
        cursor.execute(
            _TAKE_DUE.format(skip_locked="FOR UPDATE SKIP LOCKED" if is_postgres else ""),
            [queue, is_urgent, adapt(now), limit, adapt(now + REDISPATCH)],
        )
        return [subject for (subject,) in cursor.fetchall()]


_TAKE_DUE = """
    WITH due AS (
        SELECT subject FROM keyvault_worklease WHERE queue = %s AND is_urgent = %s AND due_at <= %s
        ORDER BY due_at LIMIT %s {skip_locked}
    )
    UPDATE keyvault_worklease SET due_since = coalesce(due_since, due_at), due_at = %s
    WHERE subject IN (SELECT subject FROM due)
    RETURNING subject
"""
"""One statement, so that no lock outlives a stopped client. Django's `update` returns no rows."""


def measure_queue(queue: str, now: datetime) -> tuple[int, datetime | None]:
    """Return how many rows of a queue wait for a worker, at most 10,000, and since when the oldest is due."""
    rows = WorkLease.objects.filter(queue=queue)
    waiting = rows.filter(due_since__isnull=False)
    depth = waiting[:_MAX_COUNTED].count()
    starts = [waiting.aggregate(at=Min("due_since"))["at"]] if depth else []
    for is_urgent in (True, False):
        due = rows.filter(is_urgent__in=[is_urgent], due_at__lte=now, due_since__isnull=True)
        if count := due[:_MAX_COUNTED].count():
            depth += count
            starts.append(due.order_by("due_at").values_list("due_at", flat=True).first())
    return min(depth, _MAX_COUNTED), min((at for at in starts if at is not None), default=None)
