"""The worker's loop: advance rotations, idempotently and safe against being killed at any point.

`advance_rotation` claims a lease, gathers the facts, calls `states.next_step` and performs the result: a side effect
(`side_effects`) or a transition (`transitions`). It repeats this until the rotation has to wait.
"""

import logging
import secrets
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from itertools import zip_longest

from django.conf import settings
from django.db.models import Case, OuterRef, Q, QuerySet, Subquery, Value, When
from django.db.models.functions import Coalesce, Concat

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER
from keyvault.backends.base import BackendDeniedError
from keyvault.domain.errors import DependencyUnavailableError, KeyvaultError, StateConflictError
from keyvault.domain.ids import mint_id
from keyvault.domain.keys import KeyState
from keyvault.models import Key, UseBucket, WorkLease
from keyvault.models.usage import UseOutcome
from keyvault.services.recording.authorization import authorize
from keyvault.services.secrets.stored_copies import ForeignWriterError
from keyvault.services.usage.recorder import note_lost, utc_now
from keyvault.services.work import leases
from keyvault.services.work.leases import Lease
from rotation.domain.events import RotationState
from rotation.domain.policy import UnreadablePlanError
from rotation.domain.states import CLOSED, TRANSITIONS, Move, Wait, next_step
from rotation.models import Rotation
from rotation.services.rotations.facts import gather_facts, list_unconfirmed
from rotation.services.rotations.reports import get_rotation, subject_of
from rotation.services.rotations.side_effects import Effects
from rotation.services.rotations.transitions import (
    lift_quarantine,
    make_transition,
    report_blocked,
    send_due_notices,
    stall,
)

S = RotationState

_PROVING = (S.AWAITING_PROOF, S.OVERLAP)

_log = logging.getLogger(__name__)

POLL_SECONDS = (2.0, 60.0)
"""Poll interval of a waiting rotation, in seconds: the shortest and the longest. It grows with the time waited."""

_POLL_DIVISOR = 20
"""The next poll interval is the time waited, divided by this."""

SWEEP_SECONDS = 2.0
"""Time in which one sweep begins turns, in seconds; the next sweep takes the rest."""

_MIN_TURNS = 2
"""Minimum number of turns in a sweep: one of each list."""

_MAX_LISTED = 200
"""Maximum length of each list, in rotations; a sweep has time for fewer turns."""

ACCEPTED_WITHIN_SECONDS = 8.0
"""Maximum wait within a turn for verifiers to accept a staged key, in seconds.

Longer than a verifier's default staleness bound and shorter than the lease. After it the staged key is lost, and the
next turn makes another one.
"""

_ACCEPTANCE_POLL_SECONDS = 0.05
pause = time.sleep

_RECENTLY = timedelta(seconds=10)
_MINUTE = timedelta(minutes=1)

MAX_ATTEMPTS = 12
"""Consecutive failures of one step before the rotation stalls; an unavailable backend does not count."""

_MAX_STEPS = 20


def advance_all_due(clock: Callable[[], datetime] = utc_now) -> int:
    """Advance due rotations for SWEEP_SECONDS; return the number of turns taken.

    The listing does not count towards that time. The first two turns, one of each list of `list_due`, are always
    taken. Errors are isolated per turn.
    """
    due = list_due(clock())
    began = time.monotonic()
    turns = 0
    for rotation_id in due:
        if turns >= _MIN_TURNS and time.monotonic() - began > SWEEP_SECONDS:
            break
        turns += 1
        try:
            advance_rotation(rotation_id, clock)
        except Exception:  # noqa: BLE001  errors are isolated per rotation; its lease expires
            _log.exception("unexpected error in a rotation's turn", extra={"rotation_id": rotation_id})
    return turns


def list_due(now: datetime) -> list[str]:
    """List the open, unclaimed and due rotations of the environments that this process serves.

    Two lists alternate: rotations with an event, whether due or not, and rotations that are due. Both start at a
    random id and wrap around. Workers thus rarely choose the same rotation, and rotations that never progress cannot
    starve others. An index holds the open rotations in that order.
    """
    lease = WorkLease.objects.filter(subject=Concat(Value(subject_of("")), OuterRef("pk")))
    held = Q(until__gt=now)
    later, failed = held | Q(due_at__gt=now), held | Q(~Q(last_error=""), due_at__gt=now)
    rows = _served().exclude(state__in=CLOSED)
    urgent = rows.alias(
        predecessor_is=_state_of("predecessor"), replacement_is=_state_of("replacement"), tried=_tried(now)
    )
    start = _draw_start()
    # CASE, so that leases are read only for rotations with an event.
    happened = Case(When(_HAS_EVENT, then=_is_free(lease, failed)), default=Value(False))
    first = _list_round(urgent.filter(happened), start)
    others = _list_round(rows.filter(_is_free(lease, later)), start)
    # The lists alternate, so rotations with many events cannot starve the others.
    return list(dict.fromkeys(pk for pair in zip_longest(first, others) for pk in pair if pk is not None))


def _draw_start() -> str:
    """Draw a random rotation id, which on average splits the existing ones in half."""
    return mint_id("rot", secrets.token_bytes)


def _list_round(rows: QuerySet[Rotation], start: str) -> list[str]:
    """List ids from `start` on, then wrap around to those before it."""
    ids = rows.order_by("pk").values_list("pk", flat=True)
    found = list(ids.filter(pk__gte=start)[:_MAX_LISTED])
    room = _MAX_LISTED - len(found)
    return [*found, *ids.filter(pk__lt=start)[:room]] if room else found


# Each of these reads one row by its key. For a join or EXISTS, PostgreSQL would read all keys or all leases instead.


def _is_free(lease: QuerySet[WorkLease], unless: Q) -> Coalesce:
    """Whether the rotation has no lease that meets the condition."""
    free = Case(When(unless, then=Value(False)), default=Value(True))
    return Coalesce(Subquery(lease.values(free=free)), Value(True))


def _state_of(key: str) -> Coalesce:
    """The state of the rotation's key; empty without one."""
    return Coalesce(Subquery(Key.objects.filter(pk=OuterRef(key)).values("state")), Value(""))


def _tried(now: datetime) -> Subquery:
    """A refused attempt with the predecessor within the last 10 seconds; None without one."""
    since = now - _RECENTLY
    tries = UseBucket.objects.filter(
        key=OuterRef("predecessor"), outcome=UseOutcome.REFUSED, minute__gte=since - _MINUTE, last_at__gte=since
    )
    return Subquery(tries.order_by("minute").values("pk")[:1])


_HAS_EVENT = (
    Q(state__in=[S.SCHEDULED, S.AWAITING_PROOF, S.OVERLAP, S.ROLLING_BACK]) & ~Q(predecessor_is=KeyState.ACTIVE)
    | Q(state__in=[S.STAGED, S.PUBLISHING, *_PROVING, S.QUARANTINE]) & ~Q(replacement_is=KeyState.ACTIVE)
    | Q(state=S.QUARANTINE) & ~Q(predecessor_is=KeyState.SUSPENDED)
    | Q(state=S.QUARANTINE, reinstated_at=None, waived_at=None, tried__isnull=False)
    | Q(state=S.ROLLING_BACK, quarantined_at__isnull=True) & ~Q(replacement_is=KeyState.ACTIVE)
    | Q(state=S.ROLLING_BACK, quarantined_at__isnull=False) & ~Q(replacement_is=KeyState.SUSPENDED)
)
"""Rotations with a key in an unexpected state or an attempt in quarantine, either of which may affect the merchant."""


def _served() -> QuerySet[Rotation]:
    """Rotations in KEYVAULT_ENVIRONMENTS; this process has no peppers to advance any other."""
    return Rotation.objects.filter(credential__account__environment__in=settings.ENVIRONMENTS)


def advance_rotation(rotation_id: str, clock: Callable[[], datetime] = utc_now) -> Wait | None:
    """Advance the rotation as far as possible now; return what it waits for.

    None: another worker holds it, its environment is not served here, or the turn failed. A failure is recorded and
    retried later. The rotation stalls, with both keys unchanged, when a step keeps failing, meets a foreign writer or
    is refused by the secret backend.
    """
    if not _served().filter(pk=rotation_id).exists():
        return None
    lease = leases.claim(subject_of(rotation_id), clock(), ignore_due_at=True)
    if lease is None:
        return None
    try:
        wait, entered_at = _advance_to_wait(rotation_id, lease, clock)
    except DependencyUnavailableError as error:
        # An outage uses up no attempt; verification works without the backend.
        _log.warning("rotation paused", extra={"rotation_id": rotation_id, "why": error.internal})
        leases.pause(lease, clock(), error.internal or error.detail, seconds=error.retry_after_seconds)
    except KeyvaultError as error:
        # Often another writer was faster, and the next turn reads the current state.
        _handle_failure(rotation_id, lease, clock, error)
    except Exception as error:  # noqa: BLE001  errors are isolated per rotation, logged and recorded
        _log.exception("unexpected error in a rotation step", extra={"rotation_id": rotation_id})
        fault = StateConflictError("an unexpected error; see the log", internal=type(error).__name__)
        _handle_failure(rotation_id, lease, clock, fault)
    else:
        leases.release(lease, due_at=_next_poll(wait, entered_at, clock()))
        return wait
    return None


def _next_poll(wait: Wait, entered_at: datetime, now: datetime) -> datetime:
    shortest, longest = POLL_SECONDS
    waited = (now - entered_at).total_seconds()
    due_at = now + timedelta(seconds=min(max(waited / _POLL_DIVISOR, shortest), longest))
    return due_at if wait.until is None else min(due_at, max(wait.until, now))


def _advance_to_wait(rotation_id: str, lease: Lease, clock: Callable[[], datetime]) -> tuple[Wait, datetime]:
    """Advance until the rotation waits; return the wait and when the rotation entered its state."""
    effects = Effects(lease, clock)
    for _ in range(_MAX_STEPS):
        now = clock()
        note_lost(now)
        rotation = get_rotation(rotation_id)
        facts = gather_facts(rotation, now)
        step = next_step(facts, now)
        grant = authorize(WORKER, P.ROTATIONS_ADVANCE, rotation.credential.account, now=now)
        is_held = rotation.state == S.STAGED and effects.holds(rotation.replacement_id)
        if isinstance(step, Wait) and is_held and _wait_until_accepted(rotation):
            # Only this process holds the string; the next turn would have to make another key.
            continue
        if isinstance(step, Wait):
            send_due_notices(grant, rotation, facts, lease)
            return step, rotation.entered_at
        if isinstance(step, Move):
            if step.to is S.CANCELLED or (step.to is S.ROLLED_BACK and rotation.written_back_at is None):
                # The database suffices for this, so the predecessor verifies again even while the backend is down.
                lift_quarantine(grant, rotation, lease)
                effects.write_back(grant, rotation)
            make_transition(grant, rotation, facts, step, lease)
        else:
            effects.act(grant, rotation)
    return Wait("its next turn"), clock()


def _wait_until_accepted(rotation: Rotation) -> bool:
    """Poll, within the lease, until every verifier has confirmed the key or become stale; False after the maximum."""
    assert rotation.replacement is not None  # noqa: S101  staged
    until = time.monotonic() + ACCEPTED_WITHIN_SECONDS
    while time.monotonic() < until:
        if not list_unconfirmed(rotation.replacement):
            return True
        pause(_ACCEPTANCE_POLL_SECONDS)
    return False


def _handle_failure(rotation_id: str, lease: Lease, clock: Callable[[], datetime], error: KeyvaultError) -> None:
    """Stall the rotation where only a person can help, else postpone the next attempt.

    These stall it: a foreign writer, a refusal by the secret backend (its client has already retried with a new
    login), an unreadable plan, and MAX_ATTEMPTS consecutive failures.
    """
    why = error.internal or error.detail
    _log.warning("rotation step failed", extra={"rotation_id": rotation_id, "why": why})
    reason = _stall_reason(error)
    if reason is None and lease.attempts >= MAX_ATTEMPTS:
        reason = f"a step kept failing: {error.detail}"
    if reason is not None:
        try:
            if _stall(rotation_id, lease, clock(), reason):
                return
        except KeyvaultError as second:
            why = second.internal or second.detail
        except Exception as second:  # noqa: BLE001  an error here must not keep the lease or end the sweep
            _log.exception("rotation cannot be stalled", extra={"rotation_id": rotation_id})
            why = type(second).__name__
    leases.postpone(lease, clock(), why)


def _stall_reason(error: KeyvaultError) -> str | None:
    """Return the reason to stall for an error that no retry fixes; None for any other."""
    if isinstance(error, BackendDeniedError):
        return f"the secret backend denies access: {error.detail}"
    return error.detail if isinstance(error, ForeignWriterError | UnreadablePlanError) else None


def _stall(rotation_id: str, lease: Lease, now: datetime, why: str) -> bool:
    """Stall the rotation; return False in a state that cannot stall, of which operators are notified once."""
    rotation = get_rotation(rotation_id)
    grant = authorize(WORKER, P.ROTATIONS_ADVANCE, rotation.credential.account, now=now)
    if S.STALLED not in TRANSITIONS[rotation.current_state]:
        report_blocked(grant, rotation, why, lease)
        return False
    stall(grant, rotation, why, lease)
    leases.release(lease)
    return True
