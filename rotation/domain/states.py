"""The transitions between the states of a rotation; `next_step` decides the next one from the facts. PURE.

    requested → awaiting_approval → scheduled → staged → publishing → awaiting_proof → overlap
              → quarantine → revoking → completed
    side: rejected · expired · cancelled · stalled → (resume | extend | roll back)
          rolling_back → rolled_back · emergency → staged

Each of the four facts (accepted, delivered, used, silent) has its own timestamp; none implies another. Time alone
never revokes a key: at the deadline the rotation stalls and both keys stay. It revokes at the deadline only where the
approved plan says so and the replacement is proved. `events` has the states themselves, and the outcomes of external
events.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from keyvault.domain.keys import DEAD_STATES, KeyKind, KeyState
from rotation.domain.events import OUTCOMES, STAYS, Event, RotationState, Stays
from rotation.domain.plan_fields import AtDeadline, Proof, Reinstatement
from rotation.domain.policy import Plan
from rotation.domain.silence import AwaitedSource, SourceFacts, list_awaited, show_time

S = RotationState

TRANSITIONS: dict[RotationState, frozenset[RotationState]] = {
    S.REQUESTED: frozenset({S.AWAITING_APPROVAL, S.SCHEDULED, S.EMERGENCY, S.REJECTED, S.EXPIRED, S.CANCELLED}),
    S.AWAITING_APPROVAL: frozenset({S.SCHEDULED, S.EMERGENCY, S.REJECTED, S.EXPIRED, S.CANCELLED}),
    S.SCHEDULED: frozenset({S.STAGED, S.EMERGENCY, S.CANCELLED, S.STALLED}),
    S.EMERGENCY: frozenset({S.STAGED, S.REJECTED, S.EXPIRED, S.CANCELLED, S.STALLED}),
    S.STAGED: frozenset({S.STAGED, S.PUBLISHING, S.CANCELLED, S.STALLED}),
    S.PUBLISHING: frozenset({S.STAGED, S.AWAITING_PROOF, S.ROLLING_BACK, S.CANCELLED, S.STALLED}),
    S.AWAITING_PROOF: frozenset({S.OVERLAP, S.COMPLETED, S.ROLLING_BACK, S.CANCELLED, S.STALLED}),
    S.OVERLAP: frozenset({S.QUARANTINE, S.COMPLETED, S.ROLLING_BACK, S.CANCELLED, S.STALLED}),
    S.QUARANTINE: frozenset({S.OVERLAP, S.REVOKING, S.COMPLETED, S.ROLLING_BACK, S.CANCELLED, S.STALLED}),
    S.REVOKING: frozenset({S.COMPLETED}),
    S.ROLLING_BACK: frozenset({S.ROLLING_BACK, S.ROLLED_BACK, S.PUBLISHING, S.STALLED}),
    S.COMPLETED: frozenset(),
    S.ROLLED_BACK: frozenset(),
    S.REJECTED: frozenset(),
    S.EXPIRED: frozenset(),
    S.CANCELLED: frozenset(),
    S.STALLED: frozenset(
        {S.SCHEDULED, S.EMERGENCY, S.STAGED, S.PUBLISHING, S.AWAITING_PROOF, S.OVERLAP, S.QUARANTINE}
        | {S.ROLLING_BACK, S.ROLLED_BACK, S.COMPLETED, S.CANCELLED}
    ),
}

CLOSED = frozenset(state for state, targets in TRANSITIONS.items() if not targets)

ABANDONED = CLOSED - {S.COMPLETED}
"""States of a rotation that ended without replacing the key."""


@dataclass(frozen=True, slots=True)
class KeyFacts:
    """Facts about one of the two keys.

    `count`, `sources`, `minutes`, `first_used_at`: real traffic, which counts as proof; `minutes`: the distinct minutes
    that it was seen in. `has_traffic`: whether the predecessor had an allowed call since a plan that found it dormant,
    other than those that fetch or acknowledge the replacement or set a recipient key. `last_used_at`: the last use of
    any kind.
    `tried_at`: the last attempt to use the key since it was quarantined. `tried_by_known_at`: the last such attempt
    from a source that had used the key before.
    """

    state: KeyState
    is_expired: bool = False
    count: int = 0
    sources: int = 0
    minutes: int = 0
    first_used_at: datetime | None = None
    has_traffic: bool = False
    last_used_at: datetime | None = None
    tried_at: datetime | None = None
    tried_by_known_at: datetime | None = None
    material_destroyed: bool = True

    @property
    def is_dead(self) -> bool:
        return self.state in DEAD_STATES or self.is_expired


class FactGroup(StrEnum):
    """A group of facts that costs queries, so that only the stages that read it gather it.

    `approval`: has_approval. `acceptance`: is_accepted, unconfirmed. `notification`: is_notified, notification_failed.
    `traffic`: a key's count, sources, minutes, first_used_at, has_traffic. `last_uses`: a key's last_used_at.
    `sources`: sources.
    `observation`: observed_through, lost_at. A key's attempts are gathered while the rotation has suspended it.
    """

    APPROVAL = "approval"
    ACCEPTANCE = "acceptance"
    NOTIFICATION = "notification"
    TRAFFIC = "traffic"
    LAST_USES = "last_uses"
    SOURCES = "sources"
    OBSERVATION = "observation"


READ_IN: dict[FactGroup, frozenset[RotationState]] = {
    # The later stages are entered only with the approval.
    FactGroup.APPROVAL: frozenset({S.REQUESTED, S.AWAITING_APPROVAL, S.EMERGENCY}),
    FactGroup.ACCEPTANCE: frozenset({S.STAGED}),
    FactGroup.NOTIFICATION: frozenset({S.PUBLISHING}),
    FactGroup.TRAFFIC: frozenset({S.AWAITING_PROOF}),
    FactGroup.LAST_USES: frozenset({S.AWAITING_PROOF, S.OVERLAP, S.ROLLING_BACK}),
    FactGroup.SOURCES: frozenset({S.OVERLAP, S.ROLLING_BACK}),
    FactGroup.OBSERVATION: frozenset({S.OVERLAP, S.QUARANTINE, S.ROLLING_BACK}),
}
"""The stages whose step depends on each group."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The complete input of `next_step`. A group of facts that the stage does not read has its defaults.

    `deadline`: the plan's deadline, or the extended one; None: no deadline.
    `retire_at`: for a public key, the approved date on which the predecessor is taken out of service.
    `observed_through`: the time up to which every live verifier has reported its uses; None while none is live.
    `has_left`: the merchant is offboarded, and its credentials get no more keys.
    `stalled_from`: for a stalled rotation, the state it stalled in.
    `lost_at`: when a verifier was last marked lost with uses that it may not have reported.
    `is_suspended`: the merchant or the account is suspended. `resumed_at`: when operators last resumed either, or the
    key that is being retired.
    `sources`: the sources of a private key that is being retired: of the predecessor, in a roll-back the replacement.
    `is_accepted`: every verifier accepts the replacement; `unconfirmed`: the verifiers that have yet to confirm it.
    `is_delivered`: the replacement is where the merchant reads it.
    `is_notified`: every notification is delivered that the plan requires before delivery counts.
    `notification_failed`: all attempts to deliver it were given up.
    `quarantined_at`: when the rotation suspended the key that is being retired; None: it is not suspended.
    `is_held`: an operator holds that key suspended.
    `written_back_at`: in a rollback, when the predecessor became again what the merchant reads.
    """

    state: RotationState
    plan: Plan
    entered_at: datetime
    predecessor: KeyFacts
    kind: KeyKind = KeyKind.PRIVATE
    replacement: KeyFacts | None = None
    deadline: datetime | None = None
    retire_at: datetime | None = None
    stalled_from: RotationState | None = None
    has_left: bool = False
    has_approval: bool = False
    approval_expires_at: datetime | None = None
    is_accepted: bool = False
    unconfirmed: tuple[str, ...] = ()
    is_delivered: bool = False
    is_notified: bool = True
    notification_failed: bool = False
    acknowledged_at: datetime | None = None
    confirmed_at: datetime | None = None
    is_proved: bool = False
    quarantined_at: datetime | None = None
    is_held: bool = False
    was_reinstated: bool = False
    silence_waived: bool = False
    written_back_at: datetime | None = None
    observed_through: datetime | None = None
    lost_at: datetime | None = None
    is_suspended: bool = False
    resumed_at: datetime | None = None
    sources: tuple[SourceFacts, ...] = ()

    @property
    def is_dormant(self) -> bool:
        """Whether the plan found no use and none was seen since; a predecessor in use needs proof by traffic."""
        return self.plan.is_dormant and not self.predecessor.has_traffic and self.kind is not KeyKind.PUBLIC

    @property
    def stage(self) -> RotationState:
        return self.stalled_from if self.state is S.STALLED and self.stalled_from is not None else self.state


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do yet. `until`: when to check again; None: when an event occurs."""

    waiting_for: str
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class Move:
    """A transition to `to`. `event`: the external event that caused it, if any."""

    to: RotationState
    why: str
    event: Event | None = None


@dataclass(frozen=True, slots=True)
class RotationAction:
    """Perform the side effect of the current state, then evaluate again.

    scheduled, emergency: make the replacement. publishing: deliver it. rolling_back: deliver the predecessor again.
    revoking: destroy the predecessor's copy.
    """

    waiting_for: str


def next_step(facts: Facts, now: datetime) -> Wait | Move | RotationAction:
    """Return the one thing to do next. Events that end or stop a rotation are checked before progress."""
    if facts.state in CLOSED:
        return Wait("nothing: the rotation is closed")
    if facts.has_left and facts.stage is S.EMERGENCY:
        return Move(S.CANCELLED, "the merchant is offboarded")
    if facts.is_held:
        return Wait("an operator to release the held key")
    happened = _judge_events(facts, now)
    if facts.state is S.STALLED:
        ends = happened is not None and happened.to is not S.STALLED and happened.event in _ENDS
        return happened if ends and happened is not None else Wait("an operator to resolve the stall")
    return happened or _FORWARD[facts.state](facts, now)


# --- external events ----------------------------------------------------------------------------------------

_ENDS = frozenset(event for event in Event if event.value.endswith(("_compromised", "_revoked", "_expired")))
"""Events that move a stalled rotation, too."""

WHY = {
    Event.REPLACEMENT_COMPROMISED: "the replacement was reported compromised",
    Event.REPLACEMENT_REVOKED: "the replacement was revoked",
    Event.REPLACEMENT_EXPIRED: "the replacement expired",
    Event.PREDECESSOR_COMPROMISED: "the predecessor was reported compromised; silence is not claimed",
    Event.PREDECESSOR_REVOKED: "the predecessor was revoked by hand; silence is not claimed",
    Event.PREDECESSOR_EXPIRED: "the predecessor expired; silence is not claimed",
    Event.REPLACEMENT_SUSPENDED: "the replacement was suspended by an operator",
    Event.PREDECESSOR_SUSPENDED: "the predecessor was suspended by an operator",
    Event.QUARANTINE_LIFTED: "the key in quarantine was resumed by an operator",
    Event.TRIED_BY_KNOWN_SOURCE: "a known source still used the predecessor in quarantine",
    Event.DEADLINE: "the deadline has passed; no key was revoked",
}


def _judge_events(facts: Facts, now: datetime) -> Move | None:
    """Return the transition for the first event that causes one, by the table; None: no event does."""
    for event in find_events(facts, now):
        outcome = OUTCOMES[event].get(facts.stage, STAYS)
        if not isinstance(outcome, Stays):
            if event is Event.DEADLINE and facts.plan.at_deadline is AtDeadline.REVOKE and facts.stage is S.OVERLAP:
                return Move(S.QUARANTINE, "the deadline has passed, and the approved plan revokes then", event)
            return Move(outcome, WHY[event], event)
    return None


def find_events(facts: Facts, now: datetime) -> Iterator[Event]:
    """Yield the events that the facts show, in the order of `Event`."""
    old, new = facts.predecessor, facts.replacement
    if new is not None and new.is_dead:
        yield _end_of(new, Event.REPLACEMENT_COMPROMISED, Event.REPLACEMENT_REVOKED, Event.REPLACEMENT_EXPIRED)
    if old.is_dead:
        yield _end_of(old, Event.PREDECESSOR_COMPROMISED, Event.PREDECESSOR_REVOKED, Event.PREDECESSOR_EXPIRED)
    is_ours = facts.quarantined_at is not None
    rolls_back = facts.stage is S.ROLLING_BACK
    retiring = new if rolls_back else old
    if new is not None and new.state is KeyState.SUSPENDED and not (is_ours and rolls_back):
        yield Event.REPLACEMENT_SUSPENDED
    if old.state is KeyState.SUSPENDED and (not is_ours or rolls_back):
        yield Event.PREDECESSOR_SUSPENDED
    if is_ours and retiring is not None and retiring.state is KeyState.ACTIVE:
        yield Event.QUARANTINE_LIFTED
    if is_ours and retiring is not None and retiring.tried_at is not None:
        yield Event.TRIED_BY_KNOWN_SOURCE if _reinstates(facts) else Event.TRIED_BY_UNKNOWN_SOURCE
    # Without a predecessor the replacement is the merchant's only key, so no deadline applies.
    # Nor does one apply to a rollback that only waits for the end of its quarantine.
    is_nearly_back = is_ours and facts.stage is S.ROLLING_BACK
    if facts.deadline is not None and now >= facts.deadline and not old.is_dead and not is_nearly_back:
        yield Event.DEADLINE


def _end_of(key: KeyFacts, compromised: Event, revoked: Event, expired: Event) -> Event:
    if key.state is KeyState.COMPROMISED:
        return compromised
    return expired if key.is_expired else revoked


def _reinstates(facts: Facts) -> bool:
    """Return whether an attempt reinstates the predecessor: a known source's, while the replacement is proved."""
    return (
        facts.predecessor.tried_by_known_at is not None
        and facts.is_proved
        and may_reinstate(
            facts.plan, facts.kind, was_reinstated=facts.was_reinstated, silence_waived=facts.silence_waived
        )
    )


def may_reinstate(plan: Plan, kind: KeyKind, *, was_reinstated: bool, silence_waived: bool) -> bool:
    """Return whether a known source can still reinstate the predecessor: once, and never a public key."""
    return (
        plan.reinstatement is Reinstatement.ONCE
        and not was_reinstated
        and not silence_waived
        and kind is not KeyKind.PUBLIC
    )


# --- progress -----------------------------------------------------------------------------------------------


def _when_requested(facts: Facts, now: datetime) -> Wait | Move:
    if facts.has_approval:
        return Move(S.SCHEDULED, "approved")
    return _no_approval(facts, now)


def _no_approval(facts: Facts, now: datetime) -> Wait | Move:
    if facts.approval_expires_at is not None and now >= facts.approval_expires_at:
        return Move(S.EXPIRED, "not approved in time")
    return Wait("approval by a second person", facts.approval_expires_at)


def _when_scheduled(facts: Facts, now: datetime) -> Wait | RotationAction | Move:
    opens_at = facts.plan.find_opening(now)
    if opens_at is None:
        return Move(S.STALLED, "the window has no further opening")
    if now < opens_at:
        return Wait(f"its start time, {opens_at:%Y-%m-%d %H:%M:%S} UTC", opens_at)
    return RotationAction("the replacement to be made")


def _in_emergency(facts: Facts, now: datetime) -> Wait | RotationAction | Move:
    """Ignore window and deadline, since the merchant has no usable key."""
    return RotationAction("the replacement to be made") if facts.has_approval else _no_approval(facts, now)


def _when_staged(facts: Facts, now: datetime) -> Wait | Move:
    if not facts.is_accepted:
        return Wait(f"every verifier to accept the replacement{_named(facts.unconfirmed)}")
    return Move(S.PUBLISHING, "every verifier accepts the replacement")


_MAX_NAMED = 3


def _named(waited_for: tuple[str, ...]) -> str:
    """Name the first three, after a colon."""
    more = f" and {len(waited_for) - _MAX_NAMED} more" if len(waited_for) > _MAX_NAMED else ""
    return f": {', '.join(waited_for[:_MAX_NAMED])}{more}" if waited_for else ""


def _when_publishing(facts: Facts, now: datetime) -> Wait | RotationAction | Move:
    if not facts.is_delivered:
        return RotationAction("the secret backend to hold the replacement")
    if not facts.is_notified and facts.notification_failed:
        return Move(S.STALLED, "the merchant's webhook endpoint does not accept the message about the replacement")
    if not facts.is_notified:
        return Wait("the merchant's webhook endpoint to accept the message")
    return Move(S.AWAITING_PROOF, "the replacement is delivered")


def _when_awaiting_proof(facts: Facts, now: datetime) -> Wait | Move:
    missing = _missing_proof(facts, now)
    return Move(S.OVERLAP, "the replacement is proved in use") if missing is None else missing


def _missing_proof(facts: Facts, now: datetime) -> Wait | None:
    plan = facts.plan
    if facts.confirmed_at is not None and (plan.proof is Proof.CONFIRMATION or facts.is_dormant):
        return None
    if facts.acknowledged_at is not None and (plan.proof is Proof.ACK or facts.is_dormant):
        return None
    if plan.proof is Proof.CONFIRMATION:
        either = ", or the merchant to acknowledge with it" if facts.is_dormant else ""
        return Wait(f"an operator to confirm for the merchant that the replacement is in use{either}")
    either = ", or an operator to confirm for the merchant" if facts.is_dormant else ""
    acknowledgement = Wait(f"the merchant to acknowledge with the replacement{either}")
    if plan.proof is Proof.ACK:
        return acknowledgement
    traffic = _missing_traffic(facts, now)
    if plan.proof is Proof.TRAFFIC or facts.acknowledged_at is not None:
        return traffic
    if traffic is None or traffic.until is not None:
        return acknowledgement  # It may arrive during the soak time.
    return traffic if facts.is_dormant else Wait(f"{traffic.waiting_for}; and {acknowledgement.waiting_for}")


_MAX_PROOF_MINUTES = 10


def proof_minutes(soak_seconds: int) -> int:
    """Return the number of distinct minutes in which the replacement must be used: those of the soak time, up to ten.

    One burst that is long ago does not show that the replacement is in use.
    """
    return max(1, min(soak_seconds // 60, _MAX_PROOF_MINUTES))


def _missing_traffic(facts: Facts, now: datetime) -> Wait | None:
    plan, replacement = facts.plan, facts.replacement
    assert replacement is not None  # noqa: S101  staged long before
    minutes = proof_minutes(plan.soak_seconds)
    is_enough = replacement.count >= plan.proof_count and replacement.sources >= plan.proof_sources
    if not is_enough or replacement.minutes < minutes:
        else_ = ", or an acknowledgement, or an operator's confirmation" if facts.is_dormant else ""
        return Wait(
            f"traffic on the replacement: {_progress(replacement.count, plan.proof_count)} authentications, "
            f"{_progress(replacement.sources, plan.proof_sources)} sources, "
            f"{_progress(replacement.minutes, minutes)} minutes{else_}"
        )
    soaked_at = (replacement.first_used_at or now) + timedelta(seconds=plan.soak_seconds)
    return Wait("the replacement to be in use for its soak time", soaked_at) if now < soaked_at else None


def _progress(seen: int, required: int) -> str:
    """Return how much of a requirement is met. What exceeds it is not counted: `4 of 2` reads like an error."""
    return f"{min(seen, required)} of {required}"


def _when_overlapping(facts: Facts, now: datetime) -> Wait | Move:
    if facts.kind is KeyKind.PUBLIC:
        return _until_retired(facts, now)
    assert facts.replacement is not None  # noqa: S101  staged long before
    signs = (facts.replacement.last_used_at, facts.acknowledged_at, facts.confirmed_at)
    last_at = _find_last_use(facts, facts.predecessor.last_used_at)
    return (
        _missing_use(signs, last_at, "the replacement to be used after the predecessor was")
        or _silence_of_sources(facts, last_at, "the predecessor")
        or Move(S.QUARANTINE, "every source of the predecessor has moved, is silent, or is waived")
    )


def _until_retired(facts: Facts, now: datetime) -> Wait | Move:
    """Wait for the approved date. Shipped apps hold a public key for months, so traffic cannot delay its retirement."""
    if facts.retire_at is None:
        return Wait("a retirement date for the old public key")
    if now < facts.retire_at:
        return Wait(f"the retirement date of the old public key, {facts.retire_at:%Y-%m-%d %H:%M} UTC", facts.retire_at)
    return Move(S.QUARANTINE, "the approved retirement date of the old public key has come")


def _when_quarantined(facts: Facts, now: datetime) -> Wait | Move:
    """Wait until the quarantine ends. A known source delays the revocation; an unknown one only raises an alarm."""
    last_at = None if facts.silence_waived else facts.predecessor.tried_by_known_at
    return _missing_silence(facts, last_at, facts.plan.quarantine_seconds, "the predecessor") or Move(
        S.REVOKING,
        "the quarantine is over" if facts.silence_waived else "no known source tried the predecessor in quarantine",
    )


def _when_revoking(facts: Facts, now: datetime) -> RotationAction | Move:
    if not facts.predecessor.material_destroyed:
        return RotationAction("the secret backend to destroy the predecessor's copy")
    return Move(S.COMPLETED, "the predecessor is revoked and its copy destroyed")


def _when_rolling_back(facts: Facts, now: datetime) -> Wait | RotationAction | Move:
    """Rotate with the roles exchanged: deliver the predecessor, wait until the replacement is silent, revoke it."""
    replacement = facts.replacement
    assert replacement is not None  # noqa: S101  nothing is rolled back before there is one
    if facts.written_back_at is None:
        return RotationAction("the secret backend to hold the predecessor again")
    if facts.quarantined_at is None:
        used_at = _find_last_use(facts, replacement.last_used_at)
        last_at = max(filter(None, (used_at, facts.acknowledged_at)), default=None)
        # A replacement that was never used leaves no client to switch back.
        what = "the predecessor to be used after the replacement was"
        signs = (facts.predecessor.last_used_at, facts.confirmed_at)
        waits = None if last_at is None else _missing_use(signs, last_at, what)
        return (
            waits
            or _silence_of_sources(facts, last_at, "the replacement")
            or Move(S.ROLLING_BACK, "every source of the replacement has left it; its quarantine begins")
        )
    return _missing_silence(facts, replacement.tried_at, facts.plan.quarantine_seconds, "the replacement") or Move(
        S.ROLLED_BACK, "the predecessor is in use again, and the replacement is revoked"
    )


def _missing_use(signs: tuple[datetime | None, ...], left_at: datetime | None, what: str) -> Wait | None:
    """Wait unless the key that stays was used last.

    Silence of one key proves a switch only while the other one carries the traffic: when both are silent, the client
    may be down. `signs`: last uses of the key that stays; `left_at`: the last use of the key that is retired.
    """
    seen = [at for at in signs if at is not None]
    return Wait(what) if not seen or (left_at is not None and max(seen) < left_at) else None


def _find_last_use(facts: Facts, last_at: datetime | None) -> datetime | None:
    """Return the last use of the key that is being retired, without those of waived sources.

    `last_at`: its last allowed or denied use. A source's last use may be an attempt while the key was suspended.
    """
    used = [source.used_at for source in facts.sources if not source.is_waived]
    if len(used) == len(facts.sources) and last_at is not None:
        used.append(last_at)
    return max(used, default=None)


def list_awaited_sources(facts: Facts) -> list[AwaitedSource]:
    """List the sources whose silence the rotation awaits; none unless it retires a key by silence."""
    if facts.stage not in {S.OVERLAP, S.ROLLING_BACK} or facts.quarantined_at is not None:
        return []
    return list_awaited(
        facts.sources, facts.plan.quiet_seconds, facts.lost_at, facts.observed_through, facts.resumed_at
    )


def _silence_of_sources(facts: Facts, last_at: datetime | None, whose: str) -> Wait | None:
    """Wait until no source needs the key, and at least for the quiet period.

    Silence counts only up to the time for which every live verifier has reported. The quiet period also counts from a
    last use that no source accounts for.
    """
    if (unobserved := _missing_observation(facts)) is not None:
        return unobserved
    assert facts.observed_through is not None  # noqa: S101  checked above
    is_explained = any(last_at is not None and source.used_at >= last_at for source in facts.sources)
    lost_at = None if facts.sources else facts.lost_at
    signs = [facts.entered_at, None if is_explained else last_at, lost_at, facts.resumed_at]
    silent_at = max(at for at in signs if at is not None) + timedelta(seconds=facts.plan.quiet_seconds)
    awaited = list_awaited_sources(facts)
    if not awaited and silent_at <= facts.observed_through:
        return None
    ends = [silent_at, *(source.until for source in awaited if source.until is not None)]
    until = max((end for end in ends if end > facts.observed_through), default=None)
    if not awaited:
        return Wait(f"silence of {whose} until {show_time(silent_at)}", until)
    return Wait(f"silence of {whose}{_named(tuple(source.describe() for source in awaited))}", until)


def _missing_silence(facts: Facts, last_at: datetime | None, period_seconds: int, whose: str) -> Wait | None:
    """Wait until a quarantined key was not tried for the period, as far as every live verifier has reported."""
    signs = [at for at in (facts.entered_at, last_at, facts.lost_at, facts.resumed_at) if at is not None]
    silent_at = max(signs) + timedelta(seconds=period_seconds)
    if (unobserved := _missing_observation(facts)) is not None:
        return unobserved
    assert facts.observed_through is not None  # noqa: S101  checked above
    if facts.observed_through < silent_at:
        return Wait(f"the quarantine of {whose} to end at {show_time(silent_at)}", silent_at)
    return None


def _missing_observation(facts: Facts) -> Wait | None:
    """Wait while silence cannot be observed: clients of a suspended merchant or account stop without having moved."""
    if facts.is_suspended:
        return Wait("the merchant or the account to be resumed")
    return Wait("a verifier that reports uses") if facts.observed_through is None else None


_FORWARD = {
    S.REQUESTED: _when_requested,
    S.AWAITING_APPROVAL: _when_requested,
    S.SCHEDULED: _when_scheduled,
    S.EMERGENCY: _in_emergency,
    S.STAGED: _when_staged,
    S.PUBLISHING: _when_publishing,
    S.AWAITING_PROOF: _when_awaiting_proof,
    S.OVERLAP: _when_overlapping,
    S.QUARANTINE: _when_quarantined,
    S.REVOKING: _when_revoking,
    S.ROLLING_BACK: _when_rolling_back,
}
