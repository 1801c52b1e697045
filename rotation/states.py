"""The states of a rotation, and `next_step`: what a rotation does next, given what is known. PURE.

    requested → awaiting_approval → scheduled → staged → publishing → awaiting_proof → overlap
              → quarantine → revoking → completed
    side: rejected · expired · cancelled · stalled → (resume)

Four facts, four timestamps, never collapsed: accepted, delivered, used, silent. Time alone never revokes:
at the deadline a rotation stalls and both keys stay.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from keyvault.domain.keys import DEAD_STATES, KeyState
from rotation.policy import Plan, Proof


class RotationState(StrEnum):
    REQUESTED = "requested"
    AWAITING_APPROVAL = "awaiting_approval"
    SCHEDULED = "scheduled"
    STAGED = "staged"
    PUBLISHING = "publishing"
    AWAITING_PROOF = "awaiting_proof"
    OVERLAP = "overlap"
    QUARANTINE = "quarantine"
    REVOKING = "revoking"
    COMPLETED = "completed"
    REJECTED = "rejected"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    STALLED = "stalled"


S = RotationState

TRANSITIONS: dict[RotationState, frozenset[RotationState]] = {
    S.REQUESTED: frozenset({S.AWAITING_APPROVAL, S.SCHEDULED, S.REJECTED, S.EXPIRED, S.CANCELLED}),
    S.AWAITING_APPROVAL: frozenset({S.SCHEDULED, S.REJECTED, S.EXPIRED, S.CANCELLED}),
    S.SCHEDULED: frozenset({S.STAGED, S.CANCELLED, S.STALLED}),
    S.STAGED: frozenset({S.STAGED, S.PUBLISHING, S.CANCELLED, S.STALLED}),
    S.PUBLISHING: frozenset({S.STAGED, S.AWAITING_PROOF, S.CANCELLED, S.STALLED}),
    S.AWAITING_PROOF: frozenset({S.OVERLAP, S.COMPLETED, S.CANCELLED, S.STALLED}),
    S.OVERLAP: frozenset({S.QUARANTINE, S.COMPLETED, S.CANCELLED, S.STALLED}),
    S.QUARANTINE: frozenset({S.REVOKING, S.COMPLETED, S.CANCELLED, S.STALLED}),
    S.REVOKING: frozenset({S.COMPLETED}),
    S.COMPLETED: frozenset(),
    S.REJECTED: frozenset(),
    S.EXPIRED: frozenset(),
    S.CANCELLED: frozenset(),
    S.STALLED: frozenset(
        {S.SCHEDULED, S.STAGED, S.PUBLISHING, S.AWAITING_PROOF, S.OVERLAP, S.QUARANTINE, S.COMPLETED, S.CANCELLED}
    ),
}

CLOSED = frozenset(state for state, ways in TRANSITIONS.items() if not ways)
BEFORE_APPROVAL = frozenset({S.REQUESTED, S.AWAITING_APPROVAL})
UNPUBLISHED = frozenset({S.SCHEDULED, S.STAGED, S.PUBLISHING})
"""Approved, and nobody has been given the replacement for certain."""

DELIVERED = frozenset({S.AWAITING_PROOF, S.OVERLAP, S.QUARANTINE, S.REVOKING})


@dataclass(frozen=True, slots=True)
class KeyFacts:
    """What is known of one of the two keys. `refused_at`: the last attempt on it while it was suspended."""

    state: KeyState
    is_expired: bool = False
    count: int = 0
    sources: int = 0
    first_used_at: datetime | None = None
    last_used_at: datetime | None = None
    refused_at: datetime | None = None
    material_destroyed: bool = True

    @property
    def is_dead(self) -> bool:
        return self.state in DEAD_STATES or self.is_expired


@dataclass(frozen=True, slots=True)
class Facts:
    """All that `next_step` looks at.

    `observed_through`: up to when every live verifier has reported its uses; None while none is live.
    `stalled_from`: of a stalled rotation, the state it stalled in.
    `lost_at`: when a verifier was last found dead with uses that it may not have reported.
    `is_accepted`: every verifier would accept the replacement. `is_delivered`: the backend holds it.
    """

    state: RotationState
    plan: Plan
    entered_at: datetime
    predecessor: KeyFacts
    replacement: KeyFacts | None = None
    stalled_from: RotationState | None = None
    has_approval: bool = False
    approval_expires_at: datetime | None = None
    is_accepted: bool = False
    is_delivered: bool = False
    acknowledged_at: datetime | None = None
    observed_through: datetime | None = None
    lost_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do yet. `until`: when looking again may help; None: when something happens."""

    waiting_for: str
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class Move:
    """Go to `to`, having done what that state stands for."""

    to: RotationState
    why: str


@dataclass(frozen=True, slots=True)
class Act:
    """Do the side effect of the present state, then look again.

    scheduled: make the replacement. publishing: deliver it. revoking: destroy the predecessor's copy.
    """

    waiting_for: str


def next_step(facts: Facts, now: datetime) -> Wait | Move | Act:
    """The one thing to do next. Reads top to bottom: what ends or stops a rotation, then its way forward."""
    if facts.state in CLOSED:
        return Wait("nothing: it is closed")
    if facts.state is S.STALLED:
        return _ends(facts) or Wait("an operator, who looks at why it stalled")
    return _ends(facts) or _stops(facts, now) or _FORWARD[facts.state](facts, now)


def _ends(facts: Facts) -> Move | None:
    if facts.state is S.REVOKING:
        return None
    if facts.replacement is not None and facts.replacement.is_dead:
        return Move(S.CANCELLED, "the replacement is no longer usable")
    if not facts.predecessor.is_dead:
        return None
    stage = facts.stalled_from or facts.state
    if stage in DELIVERED:
        return Move(S.COMPLETED, "the predecessor ended by other means; silence is not claimed")
    if stage in {S.STAGED, S.PUBLISHING}:
        return None  # The replacement is on its way, and now the only hope: it is delivered first.
    return Move(S.CANCELLED, "the predecessor ended before there was a replacement")


def _stops(facts: Facts, now: datetime) -> Move | None:
    if facts.state in BEFORE_APPROVAL or facts.state is S.REVOKING:
        return None
    if facts.replacement is not None and facts.replacement.state is KeyState.SUSPENDED:
        return Move(S.STALLED, "the replacement was suspended by an operator")
    if facts.predecessor.state is KeyState.SUSPENDED and facts.state is not S.QUARANTINE:
        return Move(S.STALLED, "the predecessor was suspended by an operator")
    if facts.predecessor.state is KeyState.ACTIVE and facts.state is S.QUARANTINE:
        return Move(S.STALLED, "the predecessor was resumed by an operator")
    if now >= facts.plan.deadline and facts.state is not S.QUARANTINE:
        return Move(S.STALLED, "the deadline has passed; both keys stay as they are")
    return None


def _when_asked(facts: Facts, now: datetime) -> Wait | Move:
    if facts.has_approval:
        return Move(S.SCHEDULED, "approved")
    if facts.approval_expires_at is not None and now >= facts.approval_expires_at:
        return Move(S.EXPIRED, "nobody approved it in time")
    return Wait("approval by a second person", facts.approval_expires_at)


def _when_scheduled(facts: Facts, now: datetime) -> Wait | Act:
    if now < facts.plan.not_before:
        return Wait(f"its time, {facts.plan.not_before:%Y-%m-%d %H:%M:%S} UTC", facts.plan.not_before)
    return Act("the replacement to be made")


def _when_staged(facts: Facts, now: datetime) -> Wait | Move:
    if not facts.is_accepted:
        return Wait("every verifier to accept the replacement")
    return Move(S.PUBLISHING, "every verifier accepts the replacement")


def _when_publishing(facts: Facts, now: datetime) -> Act | Move:
    if facts.is_delivered:
        return Move(S.AWAITING_PROOF, "the secret backend holds the replacement")
    return Act("the secret backend to hold the replacement")


def _when_awaiting_proof(facts: Facts, now: datetime) -> Wait | Move:
    assert facts.replacement is not None  # noqa: S101  staged long before
    missing = _missing_proof(facts.plan, facts.replacement, facts.acknowledged_at, now)
    if missing is None:
        return Move(S.OVERLAP, "the replacement is proved in use")
    return missing


def _missing_proof(plan: Plan, replacement: KeyFacts, acknowledged_at: datetime | None, now: datetime) -> Wait | None:
    if plan.proof is Proof.ACK:
        return None if acknowledged_at else Wait("the merchant to acknowledge with the replacement")
    if replacement.count < plan.proof_count or replacement.sources < plan.proof_sources:
        return Wait(
            f"traffic on the replacement: {replacement.count} of {plan.proof_count} authentications, "
            f"{replacement.sources} of {plan.proof_sources} sources"
        )
    soaked_at = (replacement.first_used_at or now) + timedelta(seconds=plan.soak_seconds)
    return Wait("the replacement to be in use for its soak time", soaked_at) if now < soaked_at else None


def _when_overlapping(facts: Facts, now: datetime) -> Wait | Move:
    assert facts.replacement is not None  # noqa: S101  staged long before
    signs = [at for at in (facts.replacement.last_used_at, facts.acknowledged_at) if at is not None]
    old_at = facts.predecessor.last_used_at
    if not signs or (old_at is not None and max(signs) < old_at):
        # Silence of the old key means something only while the new one carries the traffic: when both are
        # silent, somebody may just be away.
        return Wait("the replacement to be used after the predecessor was")
    quiet = timedelta(seconds=facts.plan.quiet_seconds)
    return _silence(facts, facts.predecessor.last_used_at, quiet) or Move(
        S.QUARANTINE, "the predecessor was silent for the quiet period"
    )


def _when_quarantined(facts: Facts, now: datetime) -> Wait | Move:
    period = timedelta(seconds=facts.plan.quarantine_seconds)
    return _silence(facts, facts.predecessor.refused_at, period) or Move(
        S.REVOKING, "nobody tried the predecessor in quarantine"
    )


def _silence(facts: Facts, last_at: datetime | None, period: timedelta) -> Wait | None:
    """Silence counts from the last sign of life, and only as far as every live verifier has reported."""
    signs = [at for at in (facts.entered_at, last_at, facts.lost_at) if at is not None]
    silent_at = max(signs) + period
    if facts.observed_through is None:
        return Wait("a verifier that reports uses")
    if facts.observed_through < silent_at:
        return Wait(f"silence of the predecessor until {silent_at:%Y-%m-%d %H:%M:%S} UTC", silent_at)
    return None


def _when_revoking(facts: Facts, now: datetime) -> Act | Move:
    if not facts.predecessor.material_destroyed:
        return Act("the secret backend to destroy the predecessor's copy")
    return Move(S.COMPLETED, "the predecessor is revoked and its copy destroyed")


_FORWARD = {
    S.REQUESTED: _when_asked,
    S.AWAITING_APPROVAL: _when_asked,
    S.SCHEDULED: _when_scheduled,
    S.STAGED: _when_staged,
    S.PUBLISHING: _when_publishing,
    S.AWAITING_PROOF: _when_awaiting_proof,
    S.OVERLAP: _when_overlapping,
    S.QUARANTINE: _when_quarantined,
    S.REVOKING: _when_revoking,
}
