"""The invariants, checked after every step. Each function yields a sentence for each violation."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from keyvault.domain.environments import Environment
from keyvault.domain.keys import DEAD_STATES, KeyKind, KeyState
from rotation.domain.events import Event, RotationState
from rotation.domain.plan_fields import AtDeadline, Reinstatement
from rotation.domain.silence import GAPS
from rotation.domain.states import Move, RotationAction
from tests.simulator.campaign import SimulatedCampaign
from tests.simulator.clock import START
from tests.simulator.fleet import Consumer, KnownUse
from tests.simulator.store import StoredCredential, StoredKey, StoredRotation

S = RotationState

SLACK = timedelta(minutes=5)
"""Clock skew, rounding to minutes, and the time in which the engine answers an attempt in quarantine."""

LONGEST_SILENCE = timedelta(hours=25)
"""Maximum time between two turns of an open rotation that does not wait until a stated time."""


@dataclass(slots=True)
class Commit:
    """One commit of a worker. `before`, `after`: usable keys that the merchant has."""

    rotation: StoredRotation
    step: Move | RotationAction
    before: int
    after: int


@dataclass(slots=True)
class Step:
    """What one step of the simulation did."""

    now: datetime = START
    calm_since: datetime = START
    credential: StoredCredential | None = None
    consumers: list[Consumer] = field(default_factory=list)
    actor: str = ""
    changes: list[tuple[StoredKey, KeyState, KeyState, str]] = field(default_factory=list)
    refusals: list[tuple[Consumer, StoredKey]] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    has_new_key: bool = False
    faults: list[str] = field(default_factory=list)
    campaign: SimulatedCampaign | None = None

    def note_commit(self, commit: Commit) -> None:
        self.commits.append(commit)

    def note_refusal(self, consumer: Consumer, key: StoredKey) -> None:
        self.refusals.append((consumer, key))

    def note_new_key(self, credential: StoredCredential) -> None:
        self.has_new_key = self.credential is credential


def no_known_consumer_is_refused(step: Step) -> Iterator[str]:
    """A consumer that the plan could have known of is refused at most in the one reversible attempt."""
    for consumer, key in step.refusals:
        if key.ended_by == "engine" and (fault := _judge_refusal(consumer, key, step)) is not None:
            yield f"{consumer.source} is refused with {key.key_id}, which is {key.state}: {fault}"
        elif key.is_usable(step.now):
            yield f"{consumer.source} is refused with {key.key_id}, which is active: a verifier does not know it"


def _judge_refusal(consumer: Consumer, key: StoredKey, step: Step) -> str | None:
    rotation = _find_rotation(consumer.credential, key)
    if rotation is None:
        return "no rotation retired it"
    known = consumer.known.get(key.key_id)
    if known is None or consumer.credential.kind is KeyKind.PUBLIC or rotation.silence_waived:
        return None
    if consumer.source in rotation.waived:
        return None
    if _is_reversible(rotation, key):
        rotation.tried_at = rotation.tried_at or step.now
        return None if step.now - rotation.tried_at <= SLACK else "its first attempt did not reinstate the key"
    silence = find_silence(known, rotation, has_moved=any(host.key is not key for host in consumer.hosts))
    if silence is None:
        return "it was seen once, and no operator waived it"
    if step.now < known.used_at + silence - SLACK:
        return f"it used the key at {known.used_at:%Y-%m-%d %H:%M}, and may be silent for {silence}"
    return None


def _is_reversible(rotation: StoredRotation, key: StoredKey) -> bool:
    is_quarantined = rotation.state is S.QUARANTINE and key.state is KeyState.SUSPENDED
    may_reinstate = rotation.plan.reinstatement is Reinstatement.ONCE and rotation.reinstated_at is None
    return is_quarantined and may_reinstate and rotation.used_at is not None


def _find_rotation(credential: StoredCredential, key: StoredKey) -> StoredRotation | None:
    """Find the rotation that retired the key."""
    for rotation in reversed(credential.rotations):
        if key is rotation.predecessor or key is rotation.replacement:
            return rotation
    return None


def find_silence(known: KnownUse, rotation: StoredRotation, *, has_moved: bool) -> timedelta | None:
    """Return how long a consumer may be silent by its own habit; None: it was seen once, so its habit is unknown.

    `has_moved`: one of its hosts has, so it is known that the others only have to follow.
    """
    quiet = timedelta(seconds=rotation.plan.quiet_seconds)
    if rotation.credential.environment is not Environment.PRODUCTION:
        return quiet
    if has_moved:
        return quiet + known.longest_gap
    return None if known.runs == 1 else max(quiet, GAPS * known.longest_gap)


def engine_keeps_a_key(step: Step) -> Iterator[str]:
    """No commit of the engine takes a credential from one or more delivered and accepted keys to none."""
    for commit in step.commits:
        if commit.before and not commit.after:
            yield f"{commit.rotation.rotation_id} took the merchant's last key in {commit.rotation.state}"


def at_most_two_keys_verify(step: Step) -> Iterator[str]:
    if step.credential is not None and (step.changes or step.has_new_key):
        count = step.credential.count_verifying(step.now)
        if count > 2:
            yield f"{count} keys of {step.credential.credential_id} verify"


def no_dead_key_lives(step: Step) -> Iterator[str]:
    for key, was, state, by in step.changes:
        if was in DEAD_STATES and state not in DEAD_STATES:
            yield f"{key.key_id} was {was} and is {state}, by the {by}"


def time_alone_never_revokes(step: Step) -> Iterator[str]:
    """The engine takes a private key away after proof and silence, or because the approved plan says so."""
    for commit in step.commits:
        rotation, move = commit.rotation, commit.step
        if not isinstance(move, Move) or rotation.credential.kind is KeyKind.PUBLIC:
            continue
        if move.to is S.QUARANTINE:
            yield from _judge_quarantine(rotation, move, step)
        if move.to is S.REVOKING:
            since, period = rotation.quarantined_at, timedelta(seconds=rotation.plan.quarantine_seconds)
            if since is None or since + period > step.now + SLACK:
                yield f"{rotation.rotation_id} revokes {rotation.predecessor.key_id} without a whole quarantine"


def _judge_quarantine(rotation: StoredRotation, move: Move, step: Step) -> Iterator[str]:
    if rotation.used_at is None:
        yield f"{rotation.rotation_id} quarantines a key without proof of the other one"
    if rotation.plan.at_deadline is AtDeadline.REVOKE and move.event is Event.DEADLINE:
        return
    quiet = timedelta(seconds=rotation.plan.quiet_seconds)
    for consumer in step.consumers:
        known = consumer.known.get(rotation.predecessor.key_id)
        is_silent = known is None or known.used_at + quiet <= step.now + SLACK
        if not is_silent and known is not None and consumer.source not in rotation.waived:
            yield (
                f"{rotation.rotation_id} quarantines {rotation.predecessor.key_id}, which {consumer.source} used at "
                f"{known.used_at:%Y-%m-%d %H:%M}: {move.why}"
            )


def nothing_is_stuck(step: Step) -> Iterator[str]:
    """An open rotation progresses, waits until a stated time, or has raised an alarm."""
    if step.credential is not None and (rotation := step.credential.open_rotation) is not None:
        yield from judge_stuck(rotation, step.now, step.calm_since)


def judge_stuck(rotation: StoredRotation, now: datetime, calm_since: datetime) -> Iterator[str]:
    """`calm_since`: the end of the last outage, which has an alarm of its own."""
    if rotation.alarmed_at is not None and rotation.alarmed_at >= rotation.entered_at - SLACK:
        return
    if rotation.state is S.STALLED:
        yield f"{rotation.rotation_id} is stalled without an alarm"
        return
    wait, oldest = rotation.wait, now - LONGEST_SILENCE
    if calm_since > oldest or (wait is not None and wait.until is not None and wait.until > oldest):
        return
    # An outstanding retirement date of a public key has no deadline, on purpose.
    ends_at = rotation.deadline if rotation.has_approval else rotation.approval_expires_at
    has_end = rotation.credential.kind is KeyKind.PUBLIC or (ends_at is not None and ends_at > oldest)
    if rotation.turned_at > oldest and (has_end or rotation.entered_at > oldest):
        return
    waiting_for = "its first turn" if wait is None else wait.waiting_for
    yield (
        f"{rotation.rotation_id} is stuck in {rotation.state} since {rotation.entered_at:%Y-%m-%d %H:%M}, last turn "
        f"{rotation.turned_at:%Y-%m-%d %H:%M}, waiting for {waiting_for}"
    )


def a_campaign_keeps_its_pace(step: Step) -> Iterator[str]:
    """A campaign begins at most what its pace allows in a minute, and holds at most its slots."""
    campaign = step.campaign
    if campaign is not None and campaign.count_recent(step.now) > campaign.pace.per_minute:
        yield f"a campaign began {campaign.count_recent(step.now)} rotations in a minute"
    if campaign is not None and campaign.count_unproved() > campaign.pace.concurrency:
        yield f"a campaign holds {campaign.count_unproved()} slots of {campaign.pace.concurrency}"


def nothing_unforeseen_happens(step: Step) -> Iterator[str]:
    """No worker meets an error that the product does not name."""
    yield from step.faults


Invariant = Callable[[Step], Iterator[str]]

INVARIANTS: tuple[Invariant, ...] = (
    no_known_consumer_is_refused,
    engine_keeps_a_key,
    at_most_two_keys_verify,
    no_dead_key_lives,
    time_alone_never_revokes,
    nothing_is_stuck,
    a_campaign_keeps_its_pace,
    nothing_unforeseen_happens,
)
