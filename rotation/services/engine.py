"""Moving a rotation on: what a worker runs, as often as it likes, and may be killed in.

`advance_rotation` holds a lease, looks at the facts, asks `states.next_step`, and does that one thing: a side
effect (`effects`), or a transition (`transitions`), until there is something to wait for.
"""

import logging
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from itertools import zip_longest

from django.conf import settings
from django.db.models import Exists, OuterRef, Q, QuerySet, Value
from django.db.models.functions import Concat

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER
from keyvault.backends.base import BackendDeniedError
from keyvault.domain.errors import DependencyUnavailableError, KeyvaultError, StateConflictError
from keyvault.domain.keys import KeyState
from keyvault.models import UseBucket, WorkLease
from keyvault.models.usage import Outcome
from keyvault.services import leases
from keyvault.services.authorization import authorize
from keyvault.services.leases import Lease
from keyvault.services.material import ForeignWriterError
from keyvault.services.usage import note_lost, utc_now
from rotation.events import RotationState
from rotation.models import Rotation
from rotation.services.effects import Effects
from rotation.services.facts import gather_facts, list_unconfirmed
from rotation.services.reports import get_rotation, subject_of
from rotation.services.transitions import lift_quarantine, make_transition, tell_what_is_due
from rotation.states import CLOSED, Move, Wait, next_step

S = RotationState

_PROVING = (S.AWAITING_PROOF, S.OVERLAP)

_log = logging.getLogger(__name__)

LOOK_AGAIN_SECONDS = (2.0, 60.0)
"""A waiting rotation is looked at this often at first, and at last: the longer it has waited, the rarer."""

_PATIENCE = 20
"""It is looked at again after this part of the time that it has waited."""

SWEEP_SECONDS = 2.0
"""So long one sweep begins turns; what is left over is the next one's."""

_MOST_AT_ONCE = 500

ACCEPTED_WITHIN_SECONDS = 8.0
"""Longer than a verifier's staleness bound is by default, and shorter than the lease. Whoever has to be waited for any
longer costs the staged key: the next turn makes another one."""

_LOOK_SECONDS = 0.05
pause = time.sleep

_JUST_NOW = timedelta(seconds=10)

MOST_ATTEMPTS = 12
"""Failures of one step in a row, but for an unavailable backend, before the rotation stalls by name."""

_MOST_STEPS = 20


def advance_all_due(clock: Callable[[], datetime] = utc_now) -> int:
    """Turns of rotations whose time has come, for a short while; how many."""
    began = time.monotonic()
    turns = 0
    for rotation_id in list_due(clock()):
        if time.monotonic() - began > SWEEP_SECONDS:
            break
        advance_rotation(rotation_id, clock)
        turns += 1
    return turns


def list_due(now: datetime) -> list[str]:
    """The open rotations of what this process serves that nobody is at work on and whose time has come.

    Among them those to which something has happened, whenever they were to be looked at. In no order, so that several
    workers do not reach for the same one.
    """
    lease = WorkLease.objects.filter(subject=Concat(Value(subject_of("")), OuterRef("pk")))
    held, later = Exists(lease.filter(until__gt=now)), Exists(lease.filter(due_at__gt=now))
    failed = Exists(lease.filter(~Q(last_error=""), due_at__gt=now))
    still_open = _served().exclude(state__in=CLOSED)
    urgent = still_open.filter(~held, ~failed).filter(_happened(now))
    due = still_open.filter(~held, ~later)
    first, others = (rows.order_by("?").values_list("pk", flat=True)[:_MOST_AT_ONCE] for rows in (urgent, due))
    # By turns: however much happens to some, the others are not forgotten.
    return list(dict.fromkeys(pk for pair in zip_longest(first, others) for pk in pair if pk is not None))


def _happened(now: datetime) -> Q:
    """A key that is not as the state wants it, or a try of a quarantined one: the merchant may wait for the answer."""
    active, suspended = KeyState.ACTIVE, KeyState.SUSPENDED
    tries = UseBucket.objects.filter(key=OuterRef("predecessor"), outcome=Outcome.REFUSED, last_at__gte=now - _JUST_NOW)
    return (
        Q(state__in=[S.SCHEDULED, S.AWAITING_PROOF, S.OVERLAP, S.ROLLING_BACK]) & ~Q(predecessor__state=active)
        | Q(state__in=[S.STAGED, S.PUBLISHING, *_PROVING, S.QUARANTINE]) & ~Q(replacement__state=active)
        | Q(state=S.QUARANTINE) & ~Q(predecessor__state=suspended)
        | Q(state=S.QUARANTINE, reinstated_at=None, waived_at=None) & Exists(tries)
        | Q(state=S.ROLLING_BACK, quarantined_at__isnull=True) & ~Q(replacement__state=active)
        | Q(state=S.ROLLING_BACK, quarantined_at__isnull=False) & ~Q(replacement__state=suspended)
    )


def _served() -> QuerySet[Rotation]:
    """Without an environment's peppers (KEYVAULT_ENVIRONMENTS) its rotations cannot be moved on."""
    return Rotation.objects.filter(credential__account__environment__in=settings.ENVIRONMENTS)


def advance_rotation(rotation_id: str, clock: Callable[[], datetime] = utc_now) -> Wait | None:
    """Moves the rotation on as far as it goes now, and says what it waits for.

    None: another worker holds it, or its environment is not served here. A failure is noted
    and tried again later; a step that keeps failing, meets a foreign writer, or is refused by the secret backend stalls
    the rotation, with both keys as they are.
    """
    if not _served().filter(pk=rotation_id).exists():
        return None
    lease = leases.claim(subject_of(rotation_id), clock(), now_or_never=True)
    if lease is None:
        return None
    try:
        wait, entered_at = _to_the_next_wait(rotation_id, lease, clock)
    except DependencyUnavailableError as error:
        # Not a failure: nothing is used up, and verification goes on without the backend.
        _log.warning("rotation paused", extra={"rotation_id": rotation_id, "why": error.internal})
        leases.pause(lease, clock(), error.internal or error.detail, seconds=error.retry_after_seconds)
    except KeyvaultError as error:
        # Often somebody was merely faster, and the next look finds what is true now.
        _give_up_or_try_again(rotation_id, lease, clock, error)
    except Exception as error:  # noqa: BLE001  one rotation's fault is not the next one's, and must not go on unseen
        _log.exception("rotation step failed unforeseen", extra={"rotation_id": rotation_id})
        fault = StateConflictError("an unforeseen fault; the log has it", internal=type(error).__name__)
        _give_up_or_try_again(rotation_id, lease, clock, fault)
    else:
        leases.release(lease, due_at=_look_again(wait, entered_at, clock()))
        return wait
    return None


def _look_again(wait: Wait, entered_at: datetime, now: datetime) -> datetime:
    shortest, longest = LOOK_AGAIN_SECONDS
    waited = (now - entered_at).total_seconds()
    due_at = now + timedelta(seconds=min(max(waited / _PATIENCE, shortest), longest))
    return due_at if wait.until is None else min(due_at, max(wait.until, now))


def _to_the_next_wait(rotation_id: str, lease: Lease, clock: Callable[[], datetime]) -> tuple[Wait, datetime]:
    """What it waits for, and since when it is in its state."""
    effects = Effects(lease, clock)
    for _ in range(_MOST_STEPS):
        now = clock()
        note_lost(now)
        rotation = get_rotation(rotation_id)
        facts = gather_facts(rotation, now)
        step = next_step(facts, now)
        grant = authorize(WORKER, P.ROTATIONS_ADVANCE, rotation.credential.account, now=now)
        is_held = rotation.state == S.STAGED and effects.holds(rotation.replacement_id)
        if isinstance(step, Wait) and is_held and _is_soon_accepted(rotation):
            # Only this process has the string: the next turn would have had to make another one.
            continue
        if isinstance(step, Wait):
            tell_what_is_due(grant, rotation, facts, lease)
            return step, rotation.entered_at
        if isinstance(step, Move):
            if step.to is S.CANCELLED or (step.to is S.ROLLED_BACK and rotation.written_back_at is None):
                # First what our own database is enough for: with the backend down the predecessor is good again.
                lift_quarantine(grant, rotation, lease)
                effects.write_back(grant, rotation)
            make_transition(grant, rotation, facts, step, lease)
        else:
            effects.act(grant, rotation)
    return Wait("its next turn"), clock()


def _is_soon_accepted(rotation: Rotation) -> bool:
    """Waits, within the lease: verifiers confirm, or their staleness bound passes, within a few seconds."""
    assert rotation.replacement is not None  # noqa: S101  staged
    until = time.monotonic() + ACCEPTED_WITHIN_SECONDS
    while time.monotonic() < until:
        if not list_unconfirmed(rotation.replacement):
            return True
        pause(_LOOK_SECONDS)
    return False


def _give_up_or_try_again(rotation_id: str, lease: Lease, clock: Callable[[], datetime], error: KeyvaultError) -> None:
    """A foreign writer, a refusal of the secret backend (its client has logged in anew and tried again by then), or a
    step that keeps failing stalls the rotation by name, for a person to look at."""
    why = error.internal or error.detail
    _log.warning("rotation step failed", extra={"rotation_id": rotation_id, "why": why})
    reason = _for_a_person(error)
    if reason is None and lease.attempts >= MOST_ATTEMPTS:
        reason = f"a step kept failing: {error.detail}"
    if reason is not None:
        try:
            _stall(rotation_id, lease, clock(), reason)
        except KeyvaultError as second:
            why = second.internal or second.detail
        else:
            return
    leases.postpone(lease, clock(), why)


def _for_a_person(error: KeyvaultError) -> str | None:
    """What no second try mends."""
    if isinstance(error, BackendDeniedError):
        return f"the secret backend refuses us: {error.detail}"
    return error.detail if isinstance(error, ForeignWriterError) else None


def _stall(rotation_id: str, lease: Lease, now: datetime, why: str) -> None:
    """Raises StateConflictError in a state that cannot stall."""
    rotation = get_rotation(rotation_id)
    grant = authorize(WORKER, P.ROTATIONS_ADVANCE, rotation.credential.account, now=now)
    make_transition(grant, rotation, gather_facts(rotation, now), Move(S.STALLED, why[:300]), lease)
    leases.release(lease)
