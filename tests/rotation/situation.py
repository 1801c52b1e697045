"""A rotation in each of its states, with no event pending: the base facts of the pure tests."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from keyvault.domain.keys import DEAD_STATES, KeyState
from rotation.domain.events import RotationState
from rotation.domain.plan_fields import Proof
from rotation.domain.policy import Plan
from rotation.domain.states import Facts, KeyFacts, Move, RotationAction, Wait, next_step

S, K = RotationState, KeyState
NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
SECOND, DAY = timedelta(seconds=1), timedelta(days=1)
ENTERED = NOW - timedelta(hours=1)
QUIET, QUARANTINE = timedelta(seconds=600), timedelta(seconds=300)

PLAN = Plan(
    credential_id="crd_1",
    predecessor_key_id="A" * 16,
    reason="",
    not_before=NOW - DAY,
    deadline=NOW + DAY,
    proof=Proof.ACK,
    proof_count=5,
    proof_sources=2,
    soak_seconds=60,
    quiet_seconds=600,
    quarantine_seconds=300,
)

BEFORE_APPROVAL = frozenset({S.REQUESTED, S.AWAITING_APPROVAL})

MADE = (S.STAGED, S.PUBLISHING, S.AWAITING_PROOF, S.OVERLAP, S.QUARANTINE, S.REVOKING, S.ROLLING_BACK)
"""States that have a replacement."""

STALLING = (
    *(S.SCHEDULED, S.EMERGENCY, S.STAGED, S.PUBLISHING, S.AWAITING_PROOF, S.OVERLAP, S.QUARANTINE, S.ROLLING_BACK),
)
"""States that a rotation may have stalled in."""

ACTIVE, SUSPENDED = KeyFacts(K.ACTIVE), KeyFacts(K.SUSPENDED)

EXPIRED = (KeyFacts(K.ACTIVE, is_expired=True), KeyFacts(K.SUSPENDED, is_expired=True))
DEAD = (*(KeyFacts(state) for state in sorted(DEAD_STATES)), *EXPIRED)
dead = pytest.mark.parametrize("key", DEAD, ids=lambda key: f"{key.state}{'-expired' * key.is_expired}")


def facts(state: RotationState, **changes: Any) -> Facts:
    """Return the facts of a rotation in the state (if stalled: from overlap), with changes and nothing that moves it
    on.
    """
    stage = changes.get("stalled_from", S.OVERLAP) if state is S.STALLED else state
    base = Facts(
        state=state,
        plan=PLAN,
        entered_at=ENTERED,
        predecessor=_predecessor(stage),
        replacement=ACTIVE if stage in MADE else None,
        deadline=PLAN.deadline,
        stalled_from=stage if state is S.STALLED else None,
        has_approval=stage not in BEFORE_APPROVAL,
        approval_expires_at=NOW + DAY,
        is_accepted=stage in MADE and stage is not S.STAGED,
        is_delivered=stage in MADE and stage not in {S.STAGED, S.PUBLISHING},
        is_proved=stage in {S.OVERLAP, S.QUARANTINE, S.REVOKING},
        quarantined_at=ENTERED if stage is S.QUARANTINE else None,
    )
    return replace(base, **changes)


def _predecessor(stage: RotationState) -> KeyFacts:
    if stage is S.QUARANTINE:
        return SUSPENDED
    if stage is S.REVOKING:
        return KeyFacts(K.DEACTIVATED, material_destroyed=False)
    return KeyFacts(K.COMPROMISED) if stage is S.EMERGENCY else ACTIVE


def step(state: RotationState, now: datetime = NOW, /, **changes: Any) -> Wait | Move | RotationAction:
    return next_step(facts(state, **changes), now)


def outcome_of(found: Wait | Move | RotationAction) -> str:
    """Return the step as one word, for tables."""
    if isinstance(found, Move):
        return f"to {found.to}"
    return "act" if isinstance(found, RotationAction) else "wait"


def plan(**changes: Any) -> Plan:
    return replace(PLAN, **changes)


def used(count: int, sources: int, first: datetime | None, last: datetime | None = None) -> KeyFacts:
    """Return a good key that `sources` used `count` times, in every minute between these times."""
    return KeyFacts(
        K.ACTIVE, count=count, sources=sources, minutes=count, first_used_at=first, last_used_at=last or first
    )
