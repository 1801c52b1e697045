"""Take a rotation to the start of a test, by the real engine and a clock that tests control."""

from collections.abc import Hashable
from datetime import datetime
from typing import Any

from django.db.models import Q, QuerySet

from keyvault.access.permissions import Permission as P
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Key, WorkLease
from keyvault.services.keys.lifecycle import get_key, revoke_key
from keyvault.services.recording.authorization import authorize
from keyvault.services.usage.recorder import UsageLog
from rotation.domain.events import RotationState as S
from rotation.models import Rotation
from rotation.services.rotations.engine import advance_rotation
from rotation.services.rotations.reports import get_rotation, subject_of
from rotation.services.rotations.turns import dispatch_due
from tests.clocks import Clock
from tests.services.rows import disable_triggers
from tests.starting_rows import start_with

from . import scene


def damage(rotation: Rotation, changes: dict[str, Any]) -> Rotation:
    """Write the plan as another release would; no service of this release does so."""
    disable_triggers()
    rows: QuerySet[Rotation] = QuerySet(Rotation)
    rows.filter(pk=rotation.pk).update(plan={**rotation.plan, **changes})
    return get_rotation(rotation.rotation_id)


def advance(rotation: Rotation, clock: Clock, seconds: float = 0) -> Rotation:
    clock.tick(seconds)
    advance_rotation(rotation.rotation_id, clock)
    return get_rotation(rotation.rotation_id)


def list_due(clock: Clock) -> list[str]:
    """List the rotations that a tick would dispatch now, the longest due first."""
    rows = WorkLease.objects.filter(~Q(queue=""), due_at__lte=clock()).order_by("due_at", "subject")
    return [row.subject.removeprefix(subject_of("")) for row in rows]


def run_due(clock: Clock) -> int:
    """Run one tick, and each message that it sends; return how many."""
    return dispatch_due(clock, lambda turn: advance_rotation(turn.rotation_id, clock, is_dispatched=True))


def key_states(rotation: Rotation) -> tuple[str, str | None]:
    fresh = get_rotation(rotation.rotation_id)
    return fresh.predecessor.state, fresh.replacement.state if fresh.replacement else None


def begun(clock: Clock, **overrides: Hashable) -> Rotation:
    """Return a rotation of the first key of `acme` in the sandbox."""
    return start_with(_begun, clock(), tuple(overrides.items()))


def _begun(now: datetime, overrides: tuple[tuple[str, Hashable], ...]) -> Rotation:
    key, _ = scene.first_key(now)
    return scene.rotate(key.credential, now, **dict(overrides))


def overlapping(clock: Clock, verifier: UsageLog, **overrides: object) -> Rotation:
    """Return a rotation whose replacement is proved."""
    rotation = advance(begun(clock, **overrides), clock)
    scene.acknowledge_replacement(rotation.rotation_id, clock())
    verifier.flush()
    rotation = advance(rotation, clock, 3)
    assert rotation.state == S.OVERLAP
    return rotation


def quarantined(clock: Clock, verifier: UsageLog, **overrides: object) -> Rotation:
    rotation = overlapping(clock, verifier, **overrides)
    clock.tick(6)
    verifier.flush()
    rotation = advance(rotation, clock)
    assert rotation.state == S.QUARANTINE
    return rotation


def revoke(key: Key, clock: Clock, reason: RevocationReason = RevocationReason.UNSPECIFIED) -> None:
    fresh = get_key(key.key_id)
    assert fresh is not None
    revoke_key(authorize(scene.admin(), P.KEYS_REVOKE, fresh.credential.account, now=clock()), fresh, reason)


def wait(rotation: Rotation, clock: Clock, verifier: UsageLog, seconds: float) -> Rotation:
    """Advance the time while every verifier reports, then run the engine once."""
    clock.tick(seconds)
    verifier.flush()
    return advance(rotation, clock, 3)
