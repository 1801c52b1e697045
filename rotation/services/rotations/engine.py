"""Moving a rotation on: what a worker runs, as often as it likes, and may be killed in.

`advance_rotation` holds a lease, looks at the facts, asks `states.next_step`, and does that one thing: a side
effect (`effects`), or a transition (`transitions`), until there is something to wait for.
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
    stall,
    tell_blocked,
    tell_what_is_due,
)

S = RotationState

_PROVING = (S.AWAITING_PROOF, S.OVERLAP)

_log = logging.getLogger(__name__)

LOOK_AGAIN_SECONDS = (2.0, 60.0)
"""A waiting rotation is looked at this often at first, and at last: the longer it has waited, the rarer."""

_PATIENCE = 20
"""It is looked at again after this part of the time that it has waited."""

SWEEP_SECONDS = 2.0
"""Time in which one sweep begins turns, in seconds; what is left over is the next one's."""

_AT_LEAST = 2
"""Turns of every sweep: one of each list."""

_MOST_AT_ONCE = 200
"""Length of each list: more turns than a sweep has time for."""

ACCEPTED_WITHIN_SECONDS = 8.0
"""Longer than a verifier's staleness bound is by default, and shorter than the lease. Whoever has to be waited for any
longer costs the staged key: the next turn makes another one."""

_LOOK_SECONDS = 0.05
pause = time.sleep

_JUST_NOW = timedelta(seconds=10)
_MINUTE = timedelta(minutes=1)

MOST_ATTEMPTS = 12
"""Failures of one step in a row, but for an unavailable backend, before the rotation stalls by name."""

_MOST_STEPS = 20


def advance_all_due(clock: Callable[[], datetime] = utc_now) -> int:
    """Take turns of rotations whose time has come, for SWEEP_SECONDS; return how many.

    The listing does not count towards that time, and the first two turns are taken whatever they last: one of each
    list of `list_due`. A fault of one turn ends no other.
    """
    due = list_due(clock())
    began = time.monotonic()
    turns = 0
    for rotation_id in due:
        if turns >= _AT_LEAST and time.monotonic() - began > SWEEP_SECONDS:
            break
        turns += 1
        try:
            advance_rotation(rotation_id, clock)
        except Exception:  # noqa: BLE001  one rotation's fault is not the next one's; its lease ends by itself
            _log.exception("a rotation's turn failed unforeseen", extra={"rotation_id": rotation_id})
    return turns


def list_due(now: datetime) -> list[str]:
    """List the open rotations of what this process serves that nobody works on and whose time has come.

    Two lists, by turns: those to which something happened, whenever they were to be looked at, and those that are due.
    Both begin at a random id and go round, so that workers do not reach for the same rotation, and rotations that
    never move hide no other. An index has the open ones in that order.
    """
    lease = WorkLease.objects.filter(subject=Concat(Value(subject_of("")), OuterRef("pk")))
    held = Q(until__gt=now)
    later, failed = held | Q(due_at__gt=now), held | Q(~Q(last_error=""), due_at__gt=now)
    rows = _served().exclude(state__in=CLOSED)
    urgent = rows.alias(
        predecessor_is=_state_of("predecessor"), replacement_is=_state_of("replacement"), tried=_tried(now)
    )
    start = _draw_start()
    # CASE, so that a lease is read only of those to which something happened.
    happened = Case(When(_HAPPENED, then=_is_free(lease, failed)), default=Value(False))
    first = _list_round(urgent.filter(happened), start)
    others = _list_round(rows.filter(_is_free(lease, later)), start)
    # By turns: however much happens to some, the others are not forgotten.
    return list(dict.fromkeys(pk for pair in zip_longest(first, others) for pk in pair if pk is not None))


def _draw_start() -> str:
    """Draw an id like those of rotations: about as many of them are below it as above."""
    return mint_id("rot", secrets.token_bytes)


def _list_round(rows: QuerySet[Rotation], start: str) -> list[str]:
    """List ids from `start` on, and then from the first one on to `start`."""
    ids = rows.order_by("pk").values_list("pk", flat=True)
    found = list(ids.filter(pk__gte=start)[:_MOST_AT_ONCE])
    room = _MOST_AT_ONCE - len(found)
    return [*found, *ids.filter(pk__lt=start)[:room]] if room else found


# Each of these reads one row by its key. As a join or EXISTS, PostgreSQL would read all keys or all leases instead.


def _is_free(lease: QuerySet[WorkLease], unless: Q) -> Coalesce:
    """Whether the rotation has no lease that meets the condition."""
    free = Case(When(unless, then=Value(False)), default=Value(True))
    return Coalesce(Subquery(lease.values(free=free)), Value(True))


def _state_of(key: str) -> Coalesce:
    """The state of the rotation's key; empty where there is none."""
    return Coalesce(Subquery(Key.objects.filter(pk=OuterRef(key)).values("state")), Value(""))


def _tried(now: datetime) -> Subquery:
    """A try of the predecessor a moment ago; None: there was none."""
    since = now - _JUST_NOW
    tries = UseBucket.objects.filter(
        key=OuterRef("predecessor"), outcome=UseOutcome.REFUSED, minute__gte=since - _MINUTE, last_at__gte=since
    )
    return Subquery(tries.order_by("minute").values("pk")[:1])


_HAPPENED = (
    Q(state__in=[S.SCHEDULED, S.AWAITING_PROOF, S.OVERLAP, S.ROLLING_BACK]) & ~Q(predecessor_is=KeyState.ACTIVE)
    | Q(state__in=[S.STAGED, S.PUBLISHING, *_PROVING, S.QUARANTINE]) & ~Q(replacement_is=KeyState.ACTIVE)
    | Q(state=S.QUARANTINE) & ~Q(predecessor_is=KeyState.SUSPENDED)
    | Q(state=S.QUARANTINE, reinstated_at=None, waived_at=None, tried__isnull=False)
    | Q(state=S.ROLLING_BACK, quarantined_at__isnull=True) & ~Q(replacement_is=KeyState.ACTIVE)
    | Q(state=S.ROLLING_BACK, quarantined_at__isnull=False) & ~Q(replacement_is=KeyState.SUSPENDED)
)
"""A key that is not as the state wants it, or a try of a quarantined one: the merchant may wait for the answer."""


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
    """A foreign writer, a refusal of the secret backend (its client has logged in anew and tried again by then), an
    unreadable plan, or a step that keeps failing stalls the rotation by name, for a person to look at."""
    why = error.internal or error.detail
    _log.warning("rotation step failed", extra={"rotation_id": rotation_id, "why": why})
    reason = _for_a_person(error)
    if reason is None and lease.attempts >= MOST_ATTEMPTS:
        reason = f"a step kept failing: {error.detail}"
    if reason is not None:
        try:
            if _stall(rotation_id, lease, clock(), reason):
                return
        except KeyvaultError as second:
            why = second.internal or second.detail
        except Exception as second:  # noqa: BLE001  a fault here must not keep the lease, nor end the sweep
            _log.exception("rotation cannot be stalled", extra={"rotation_id": rotation_id})
            why = type(second).__name__
    leases.postpone(lease, clock(), why)


def _for_a_person(error: KeyvaultError) -> str | None:
    """What no second try mends."""
    if isinstance(error, BackendDeniedError):
        return f"the secret backend refuses us: {error.detail}"
    return error.detail if isinstance(error, ForeignWriterError | UnreadablePlanError) else None


def _stall(rotation_id: str, lease: Lease, now: datetime, why: str) -> bool:
    """Whether it stalled. In a state that cannot, it stays as it is, and operators are told once."""
    rotation = get_rotation(rotation_id)
    grant = authorize(WORKER, P.ROTATIONS_ADVANCE, rotation.credential.account, now=now)
    if S.STALLED not in TRANSITIONS[rotation.current_state]:
        tell_blocked(grant, rotation, why, lease)
        return False
    stall(grant, rotation, why, lease)
    leases.release(lease)
    return True
