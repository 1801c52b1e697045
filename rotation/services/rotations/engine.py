"""The worker's loop: advance rotations, idempotently and safe against being killed at any point.

`advance_rotation` claims a lease, gathers the facts, calls `states.next_step` and performs the result: a side effect
(`side_effects`) or a transition (`transitions`). It repeats this until the rotation has to wait. `turns` calls it for
rotations that are due.
"""

import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import NamedTuple

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER
from keyvault.backends.base import BackendDeniedError
from keyvault.domain.errors import DependencyUnavailableError, KeyvaultError, StateConflictError
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.clock_alarm import report_clock
from keyvault.services.secrets.stored_copies import ForeignWriterError
from keyvault.services.usage.recorder import note_lost, utc_now
from keyvault.services.work import leases
from keyvault.services.work.clock import ClockDiffersError
from keyvault.services.work.leases import Lease
from rotation.domain.events import RotationState
from rotation.domain.policy import UnreadablePlanError
from rotation.domain.states import CLOSED, TRANSITIONS, Facts, Move, Wait, next_step
from rotation.models import Rotation
from rotation.services.rotations.facts import gather_facts
from rotation.services.rotations.reports import get_rotation, subject_of
from rotation.services.rotations.side_effects import Effects
from rotation.services.rotations.transitions import (
    lift_quarantine,
    make_transition,
    report_blocked,
    send_due_notices,
    stall,
)
from rotation.services.rotations.turns import list_queues

S = RotationState

_log = logging.getLogger(__name__)

POLL_SECONDS = (2.0, 21_600.0)
"""Poll interval of a waiting rotation, in seconds: the shortest and the longest. It grows with the time waited."""

_POLL_DIVISOR = 20
"""The next poll interval is the time waited, divided by this."""

_CHECKED_WITHIN = {
    S.AWAITING_PROOF: timedelta(minutes=10),
    S.OVERLAP: timedelta(hours=6),
    S.ROLLING_BACK: timedelta(hours=6),
    S.QUARANTINE: timedelta(hours=1),
}
"""Maximum sleep in states whose wait may end without an event: use of the replacement, the last source that moves."""

MAX_ATTEMPTS = 12
"""Consecutive failures of one step before the rotation stalls; an unavailable backend does not count."""

_MAX_STEPS = 20

_RENEW_AFTER = leases.LEASE / 3
"""Age at which a turn's lease is renewed before the next step. A turn usually ends sooner."""


def advance_rotation(
    rotation_id: str, clock: Callable[[], datetime] = utc_now, *, is_dispatched: bool = False
) -> Wait | None:
    """Advance the rotation as far as possible now; return what it waits for.

    None: another worker holds it, it pauses after a failure, its environment is not served here, or the turn failed. A
    failure is recorded and retried later. The rotation stalls, with both keys unchanged, when a step keeps failing,
    meets a foreign writer or is refused by the secret backend.

    `is_dispatched`: a message asks for this turn; only the first message since the last turn has an effect.
    """
    claim = leases.claim_dispatched if is_dispatched else leases.claim_early
    lease = claim(subject_of(rotation_id), list_queues(), clock())
    if lease is None:
        return None
    try:
        done = _advance_to_wait(rotation_id, lease, clock)
    except DependencyUnavailableError as error:
        # An outage uses up no attempt; verification works without the backend.
        _log.warning("rotation paused", extra={"rotation_id": rotation_id, "why": error.internal})
        leases.pause(lease, clock(), error.internal or error.detail, seconds=error.retry_after_seconds)
        if isinstance(error, ClockDiffersError):
            report_clock(error, clock())
    except KeyvaultError as error:
        # Often another writer was faster, and the next turn reads the current state.
        _handle_failure(rotation_id, lease, clock, error)
    except Exception as error:  # noqa: BLE001  errors are isolated per rotation, logged and recorded
        _log.exception("unexpected error in a rotation step", extra={"rotation_id": rotation_id})
        fault = StateConflictError("an unexpected error; see the log", internal=type(error).__name__)
        _handle_failure(rotation_id, lease, clock, fault)
    else:
        leases.release_queued(lease, clock(), done.due_at, is_urgent=done.is_urgent)
        return done.wait
    return None


class _DoneTurn(NamedTuple):
    """The result of a turn: the wait, when the next turn is due, and whether the merchant has no usable key."""

    wait: Wait
    due_at: datetime
    is_urgent: bool = False


def _next_due(wait: Wait, rotation: Rotation, facts: Facts, now: datetime) -> datetime:
    """Return when the waiting rotation is due again without an event."""
    due_at: datetime
    if wait.until is not None and wait.until > now:
        due_at = wait.until
    else:
        shortest, longest = POLL_SECONDS
        waited = (now - max(rotation.entered_at, wait.until or rotation.entered_at)).total_seconds()
        due_at = now + timedelta(seconds=min(max(waited / _POLL_DIVISOR, shortest), longest))
    if rotation.current_state in _CHECKED_WITHIN:
        due_at = min(due_at, now + _CHECKED_WITHIN[rotation.current_state])
    keys = (rotation.predecessor, rotation.replacement)
    ends: list[datetime | None] = [facts.deadline, *(key.expires_at for key in keys if key is not None)]
    return min([due_at, *(end for end in ends if end is not None and end > now)])


def _advance_to_wait(rotation_id: str, lease: Lease, clock: Callable[[], datetime]) -> _DoneTurn:
    """Advance until the rotation waits.

    A transition leaves the rotation and its keys as they are stored. A person's change in the meantime makes the next
    write of that row fail, and wakes the rotation.
    """
    effects, renewed_at, rotation = Effects(lease, clock), clock(), get_rotation(rotation_id)
    note_lost(renewed_at)
    for _ in range(_MAX_STEPS):
        now = clock()
        if now - renewed_at >= _RENEW_AFTER:
            leases.renew(lease, now)
            renewed_at = now
        facts = gather_facts(rotation, now)
        step = next_step(facts, now)
        grant = authorize(WORKER, P.ROTATIONS_ADVANCE, rotation.credential.account, now=now)
        if isinstance(step, Wait):
            effects.keep(grant, rotation)
            send_due_notices(grant, rotation, facts, lease)
            is_urgent = facts.predecessor.is_dead and facts.has_approval and not facts.is_delivered
            return _DoneTurn(step, _next_due(step, rotation, facts, now), is_urgent)
        if isinstance(step, Move):
            if facts.quarantined_at is not None and step.to is not S.OVERLAP:
                # The key was tried, and its quarantine ends in this turn. A reinstatement raises its own alarm.
                send_due_notices(grant, rotation, facts, lease)
            if step.to is S.CANCELLED or (step.to is S.ROLLED_BACK and rotation.written_back_at is None):
                # This needs only the database, so the predecessor verifies again even while the backend is down.
                lift_quarantine(grant, rotation, lease)
                effects.write_back(grant, rotation)
            elif step.to is S.STALLED:
                effects.settle_delivery(grant, rotation)
            make_transition(grant, rotation, facts, step, lease)
            if step.to in CLOSED:
                return _DoneTurn(Wait("nothing: the rotation is closed"), now)
        else:
            effects.act(grant, rotation)
            rotation = get_rotation(rotation_id)  # Much may have changed during a slow call of the backend.
    return _DoneTurn(Wait("its next turn"), clock())


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
    leases.release_queued(lease, now, now)
    return True
