"""The states of a rotation: each cell of `next_step`, and what no sequence of events can make of it."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from keyvault.domain.keys import DEAD_STATES, KeyState, may_become
from rotation.policy import Plan, Proof
from rotation.states import (
    BEFORE_APPROVAL,
    CLOSED,
    DELIVERED,
    TRANSITIONS,
    UNPUBLISHED,
    Act,
    Facts,
    KeyFacts,
    Move,
    RotationState,
    Wait,
    next_step,
)

S, K = RotationState, KeyState
NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
SECOND, DAY = timedelta(seconds=1), timedelta(days=1)
ENTERED = NOW - timedelta(hours=1)

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
QUIET, QUARANTINE = timedelta(seconds=600), timedelta(seconds=300)

WAY = [
    *(S.REQUESTED, S.AWAITING_APPROVAL, S.SCHEDULED, S.STAGED, S.PUBLISHING),
    *(S.AWAITING_PROOF, S.OVERLAP, S.QUARANTINE, S.REVOKING, S.COMPLETED),
]
OPEN = [state for state in S if state not in CLOSED]
WITH_REPLACEMENT = [S.STAGED, S.PUBLISHING, S.AWAITING_PROOF, S.OVERLAP, S.QUARANTINE, S.REVOKING]
TIMED = [S.SCHEDULED, S.STAGED, S.PUBLISHING, S.AWAITING_PROOF, S.OVERLAP]


def facts(state: RotationState, **changes: Any) -> Facts:
    """A rotation in that state with nothing wrong about it, and nothing yet to move it on."""
    has_replacement = state in WITH_REPLACEMENT or state is S.STALLED
    suspended = state is S.QUARANTINE
    revoked = state is S.REVOKING
    base = Facts(
        state=state,
        plan=PLAN,
        entered_at=ENTERED,
        predecessor=KeyFacts(
            K.SUSPENDED if suspended else K.DEACTIVATED if revoked else K.ACTIVE, material_destroyed=not revoked
        ),
        replacement=KeyFacts(K.ACTIVE) if has_replacement else None,
        stalled_from=S.OVERLAP if state is S.STALLED else None,
        has_approval=state not in BEFORE_APPROVAL,
        approval_expires_at=NOW + DAY,
    )
    return replace(base, **changes)


def step(state: RotationState, now: datetime = NOW, **changes: Any) -> Wait | Move | Act:
    return next_step(facts(state, **changes), now)


def told(found: Wait | Move | Act) -> str:
    """The step in one word, for tables."""
    if isinstance(found, Move):
        return f"to {found.to}"
    return "act" if isinstance(found, Act) else "wait"


def plan(**changes: Any) -> Plan:
    return replace(PLAN, **changes)


DEAD = [KeyFacts(state) for state in sorted(DEAD_STATES)] + [
    KeyFacts(K.ACTIVE, is_expired=True),
    KeyFacts(K.SUSPENDED, is_expired=True),
]
dead = pytest.mark.parametrize("key", DEAD, ids=lambda key: f"{key.state}{'-expired' * key.is_expired}")


# --- the table --------------------------------------------------------------------------------------------


def test_states_are_those_of_the_design() -> None:
    """ROTATION.md's names, but for the side states that come with a later issue."""
    later = {"rolling_back", "rolled_back", "emergency"}
    assert set(S) == {*WAY, S.REJECTED, S.EXPIRED, S.CANCELLED, S.STALLED}
    assert [state.value for state in WAY] == [
        *("requested", "awaiting_approval", "scheduled", "staged", "publishing"),
        *("awaiting_proof", "overlap", "quarantine", "revoking", "completed"),
    ]
    assert later.isdisjoint(state.value for state in S)
    assert set(TRANSITIONS) == set(S)
    assert {S.COMPLETED, S.REJECTED, S.EXPIRED, S.CANCELLED} == CLOSED


def test_states_groups_follow_the_way() -> None:
    assert {S.REQUESTED, S.AWAITING_APPROVAL} == BEFORE_APPROVAL
    assert {S.SCHEDULED, S.STAGED, S.PUBLISHING} == UNPUBLISHED
    assert {S.AWAITING_PROOF, S.OVERLAP, S.QUARANTINE, S.REVOKING} == DELIVERED
    assert BEFORE_APPROVAL | UNPUBLISHED | DELIVERED | CLOSED | {S.STALLED} == set(S)


def test_transitions_only_overlap_leads_to_quarantine_and_only_quarantine_to_revoking() -> None:
    """The old key ends by way of proof, silence and quarantine. (A stalled one goes on where it stopped.)"""
    into = {state: {old for old in S if state in TRANSITIONS[old]} for state in S}
    assert into[S.REVOKING] == {S.QUARANTINE}
    assert into[S.QUARANTINE] == {S.OVERLAP, S.STALLED}
    assert into[S.OVERLAP] == {S.AWAITING_PROOF, S.STALLED}
    assert into[S.AWAITING_PROOF] == {S.PUBLISHING, S.STALLED}
    assert S.SCHEDULED not in TRANSITIONS[S.STAGED]


def test_transitions_nothing_leads_out_of_a_closed_state() -> None:
    assert [TRANSITIONS[state] for state in CLOSED] == [frozenset()] * len(CLOSED)


def test_transitions_every_open_state_can_end() -> None:
    """No rotation is stuck for good: from everywhere some closed state can be reached."""
    ends = set(CLOSED)
    while more := {state for state in S if state not in ends and TRANSITIONS[state] & ends}:
        ends |= more
    assert ends == set(S)


# --- what ends or stops a rotation, in every state --------------------------------------------------------


@pytest.mark.parametrize("state", sorted(CLOSED))
@dead
def test_step_closed_is_closed_whatever_happens(state: RotationState, key: KeyFacts) -> None:
    """No event, no clock and no evidence opens a closed rotation."""
    for far in (NOW, NOW + 10_000 * DAY, NOW - 10_000 * DAY):
        found = step(state, far, predecessor=key, replacement=key, acknowledged_at=NOW, observed_through=far)
        assert isinstance(found, Wait)
        assert found.until is None


@pytest.mark.parametrize("stalled_from", TIMED)
@pytest.mark.parametrize("key", [KeyFacts(K.ACTIVE), KeyFacts(K.SUSPENDED)], ids=lambda key: key.state)
def test_step_stalled_waits_for_a_person(stalled_from: RotationState, key: KeyFacts) -> None:
    """As long as both keys live, no time and no evidence sets a stalled rotation going again by itself."""
    for far in (NOW, NOW + 10_000 * DAY):
        known = {"stalled_from": stalled_from, "acknowledged_at": NOW, "observed_through": far}
        assert told(step(S.STALLED, far, predecessor=key, **known)) == "wait"
        assert told(step(S.STALLED, far, replacement=key, **known)) == "wait"


@pytest.mark.parametrize(
    ("stalled_from", "expected"),
    [
        (S.SCHEDULED, "to cancelled"),
        (S.STAGED, "wait"),
        (S.PUBLISHING, "wait"),
        (S.AWAITING_PROOF, "to completed"),
        (S.OVERLAP, "to completed"),
    ],
)
@dead
def test_step_stalled_with_a_dead_predecessor(stalled_from: RotationState, expected: str, key: KeyFacts) -> None:
    """A stall does not outlive what it waits for: it ends as the state that it stalled in would."""
    assert told(step(S.STALLED, stalled_from=stalled_from, predecessor=key)) == expected
    both = step(S.STALLED, stalled_from=stalled_from, predecessor=key, replacement=key)
    assert told(both) == "to cancelled"


@pytest.mark.parametrize("state", OPEN)
@dead
def test_step_with_a_dead_predecessor(state: RotationState, key: KeyFacts) -> None:
    """Revoked by hand, compromised or expired: the rotation ends, and the replacement stays or is still delivered."""
    expected = {
        S.REQUESTED: "to cancelled",
        S.AWAITING_APPROVAL: "to cancelled",
        S.SCHEDULED: "to cancelled",
        S.STAGED: "to stalled" if key.state is K.SUSPENDED else "wait",
        S.PUBLISHING: "to stalled" if key.state is K.SUSPENDED else "act",
        S.AWAITING_PROOF: "to completed",
        S.OVERLAP: "to completed",
        S.QUARANTINE: "to completed",
        S.REVOKING: "to completed",
        S.STALLED: "to completed",
    }
    assert told(step(state, predecessor=key)) == expected[state]


@pytest.mark.parametrize("state", OPEN)
@dead
def test_step_with_a_dead_replacement(state: RotationState, key: KeyFacts) -> None:
    """The replacement revoked or reported: cancelled, before the predecessor is gone; never revoked for a dead one."""
    expected = {S.REVOKING: "act"}
    assert told(step(state, replacement=key)) == expected.get(state, "to cancelled")


@pytest.mark.parametrize("state", OPEN)
def test_step_with_a_dead_predecessor_and_a_dead_replacement(state: RotationState) -> None:
    gone = KeyFacts(K.COMPROMISED, material_destroyed=True)
    expected = {S.REVOKING: "to completed"}
    assert told(step(state, predecessor=gone, replacement=gone)) == expected.get(state, "to cancelled")


@pytest.mark.parametrize("state", WITH_REPLACEMENT)
def test_step_with_a_suspended_replacement_stalls(state: RotationState) -> None:
    """An operator stopped it: nothing more is taken away from the merchant meanwhile."""
    found = step(state, replacement=KeyFacts(K.SUSPENDED), acknowledged_at=NOW, observed_through=NOW + DAY)
    assert told(found) == ("act" if state is S.REVOKING else "to stalled")


@pytest.mark.parametrize("state", OPEN)
def test_step_with_a_suspended_predecessor_stalls(state: RotationState) -> None:
    expected = {
        S.REQUESTED: "wait",
        S.AWAITING_APPROVAL: "wait",
        S.QUARANTINE: "wait",
        S.REVOKING: "to completed",
        S.STALLED: "wait",
    }
    assert told(step(state, predecessor=KeyFacts(K.SUSPENDED))) == expected.get(state, "to stalled")


def test_step_in_quarantine_with_a_resumed_predecessor_stalls() -> None:
    """An operator took it out of quarantine: it is not revoked behind their back."""
    found = step(S.QUARANTINE, predecessor=KeyFacts(K.ACTIVE), observed_through=NOW + DAY)
    assert told(found) == "to stalled"


@pytest.mark.parametrize("state", OPEN)
def test_step_at_the_deadline_stalls_and_keeps_both_keys(state: RotationState) -> None:
    """Time alone never revokes: at the deadline people are asked, and both keys stay as they are."""
    ready = {"acknowledged_at": NOW, "is_accepted": True, "is_delivered": True, "observed_through": None}
    for now, expected in (
        (PLAN.deadline - SECOND, None),
        (PLAN.deadline, "to stalled"),
        (NOW + 9999 * DAY, "to stalled"),
    ):
        found = told(step(state, now, **ready))
        if state in TIMED:
            assert (found == "to stalled") == (expected is not None)
        else:
            assert found != "to stalled"


# --- the way forward, cell by cell ------------------------------------------------------------------------


@pytest.mark.parametrize("state", sorted(BEFORE_APPROVAL))
@pytest.mark.parametrize(
    ("has_approval", "expires_at", "expected"),
    [
        (False, NOW + SECOND, "wait"),
        (False, NOW, "to expired"),
        (False, NOW - DAY, "to expired"),
        (False, None, "wait"),
        (True, NOW + SECOND, "to scheduled"),
        (True, None, "to scheduled"),
    ],
)
def test_step_before_approval(
    state: RotationState, has_approval: bool, expires_at: datetime | None, expected: str
) -> None:
    found = step(state, has_approval=has_approval, approval_expires_at=expires_at)
    assert told(found) == expected
    if isinstance(found, Wait):
        assert found.until == expires_at


@pytest.mark.parametrize(
    ("not_before", "expected"), [(NOW + SECOND, "wait"), (NOW, "act"), (NOW - DAY, "act"), (NOW + 9 * DAY, "wait")]
)
def test_step_scheduled_waits_for_its_time(not_before: datetime, expected: str) -> None:
    found = step(S.SCHEDULED, plan=plan(not_before=not_before, deadline=NOW + 10 * DAY))
    assert told(found) == expected
    if isinstance(found, Wait):
        assert found.until == not_before


@pytest.mark.parametrize(("is_accepted", "expected"), [(False, "wait"), (True, "to publishing")])
def test_step_staged_waits_until_every_verifier_accepts(is_accepted: bool, expected: str) -> None:
    """Nobody is given a key that some verifier would still refuse."""
    assert told(step(S.STAGED, is_accepted=is_accepted, is_delivered=True)) == expected


@pytest.mark.parametrize(("is_delivered", "expected"), [(False, "act"), (True, "to awaiting_proof")])
def test_step_publishing_goes_on_once_the_backend_holds_it(is_delivered: bool, expected: str) -> None:
    assert told(step(S.PUBLISHING, is_accepted=True, is_delivered=is_delivered)) == expected


TRAFFIC = plan(proof=Proof.TRAFFIC)


def used(count: int, sources: int, first: datetime | None, last: datetime | None = None) -> KeyFacts:
    return KeyFacts(K.ACTIVE, count=count, sources=sources, first_used_at=first, last_used_at=last or first)


SOAKED = NOW - timedelta(seconds=60)


@pytest.mark.parametrize(
    ("asked", "replacement", "acknowledged_at", "expected"),
    [
        (PLAN, KeyFacts(K.ACTIVE), None, "wait"),
        (PLAN, used(10**6, 10**3, SOAKED - DAY), None, "wait"),
        (PLAN, KeyFacts(K.ACTIVE), NOW, "to overlap"),
        (TRAFFIC, KeyFacts(K.ACTIVE), None, "wait"),
        (TRAFFIC, KeyFacts(K.ACTIVE), NOW, "wait"),
        (TRAFFIC, used(5, 2, SOAKED), None, "to overlap"),
        (TRAFFIC, used(4, 2, SOAKED), None, "wait"),
        (TRAFFIC, used(5, 1, SOAKED), None, "wait"),
        (TRAFFIC, used(5, 2, SOAKED + SECOND), None, "wait"),
        (TRAFFIC, used(10**6, 1, SOAKED), None, "wait"),
        (plan(proof=Proof.TRAFFIC, soak_seconds=0), used(5, 2, NOW), None, "to overlap"),
    ],
    ids=[
        "ack: nothing",
        "ack: traffic is none",
        "ack: given",
        "traffic: nothing",
        "traffic: ack is none",
        "traffic: enough, soaked",
        "traffic: too few",
        "traffic: too few sources",
        "traffic: not soaked",
        "traffic: one busy source",
        "traffic: without soak",
    ],
)
def test_step_awaiting_proof_goes_on_by_the_proof_that_was_approved(
    asked: Plan, replacement: KeyFacts, acknowledged_at: datetime | None, expected: str
) -> None:
    """The replacement counts as in use when the plan's own policy says so, and by nothing else."""
    found = step(S.AWAITING_PROOF, plan=asked, replacement=replacement, acknowledged_at=acknowledged_at)
    assert told(found) == expected


def test_step_awaiting_soak_says_when_to_look_again() -> None:
    found = step(S.AWAITING_PROOF, plan=TRAFFIC, replacement=used(5, 2, NOW - SECOND))
    assert isinstance(found, Wait)
    assert found.until == NOW + timedelta(seconds=59)


CARRIES = used(1, 1, NOW)
OLD_USE = NOW - QUIET


@pytest.mark.parametrize(
    ("observed", "last_used", "lost", "expected"),
    [
        (None, None, None, "wait"),
        (ENTERED, None, None, "wait"),
        (ENTERED + QUIET - SECOND, None, None, "wait"),
        (ENTERED + QUIET, None, None, "to quarantine"),
        (NOW, NOW - QUIET, None, "to quarantine"),
        (NOW, NOW - QUIET + SECOND, None, "wait"),
        (NOW, NOW, None, "wait"),
        (NOW, None, NOW - QUIET, "to quarantine"),
        (NOW, None, NOW - QUIET + SECOND, "wait"),
        (NOW, NOW - QUIET, NOW - QUIET + SECOND, "wait"),
        (NOW, NOW - QUIET + SECOND, NOW - QUIET, "wait"),
        (NOW, ENTERED - DAY, ENTERED - DAY, "to quarantine"),
    ],
    ids=[
        "nobody reports",
        "observed: nothing yet",
        "observed: a second short",
        "observed: the whole period",
        "used: long ago",
        "used: a second too late",
        "used: now",
        "verifier lost: long ago",
        "verifier lost: a second too late",
        "verifier lost after the last use",
        "used after a verifier was lost",
        "both before it began",
    ],
)
def test_step_overlap_ends_only_by_observed_silence(
    observed: datetime | None, last_used: datetime | None, lost: datetime | None, expected: str
) -> None:
    """Silence is observed, not assumed: it counts from the last sign of life, and only as far as was reported."""
    found = step(
        S.OVERLAP,
        replacement=CARRIES,
        predecessor=KeyFacts(K.ACTIVE, last_used_at=last_used),
        observed_through=observed,
        lost_at=lost,
    )
    assert told(found) == expected


@pytest.mark.parametrize(
    ("replacement", "acknowledged_at", "expected"),
    [
        (KeyFacts(K.ACTIVE), None, "wait"),
        (KeyFacts(K.ACTIVE), NOW, "to quarantine"),
        (CARRIES, None, "to quarantine"),
        (used(1, 1, OLD_USE), None, "to quarantine"),
        (used(1, 1, OLD_USE - SECOND), None, "wait"),
        (used(1, 1, OLD_USE - SECOND), OLD_USE, "to quarantine"),
        (used(1, 1, OLD_USE - SECOND), OLD_USE - SECOND, "wait"),
        (KeyFacts(K.ACTIVE), OLD_USE - SECOND, "wait"),
    ],
)
def test_step_overlap_ends_only_while_the_replacement_carries_the_traffic(
    replacement: KeyFacts, acknowledged_at: datetime | None, expected: str
) -> None:
    """Silence on both keys is an outage, not a rotation: the last one heard of has to be the new one."""
    found = step(
        S.OVERLAP,
        predecessor=KeyFacts(K.ACTIVE, last_used_at=OLD_USE),
        replacement=replacement,
        acknowledged_at=acknowledged_at,
        observed_through=NOW,
    )
    assert told(found) == expected


@pytest.mark.parametrize(
    ("observed", "refused", "lost", "expected"),
    [
        (None, None, None, "wait"),
        (ENTERED + QUARANTINE - SECOND, None, None, "wait"),
        (ENTERED + QUARANTINE, None, None, "to revoking"),
        (NOW, NOW - QUARANTINE, None, "to revoking"),
        (NOW, NOW - QUARANTINE + SECOND, None, "wait"),
        (NOW, None, NOW - QUARANTINE + SECOND, "wait"),
        (NOW, None, NOW - QUARANTINE, "to revoking"),
    ],
)
def test_step_quarantine_ends_only_when_nobody_was_seen_to_try(
    observed: datetime | None, refused: datetime | None, lost: datetime | None, expected: str
) -> None:
    """Somebody who still tries the old key keeps it from being revoked."""
    found = step(
        S.QUARANTINE,
        predecessor=KeyFacts(K.SUSPENDED, refused_at=refused),
        observed_through=observed,
        lost_at=lost,
    )
    assert told(found) == expected


@pytest.mark.parametrize(("material_destroyed", "expected"), [(False, "act"), (True, "to completed")])
def test_step_revoking_is_done_when_the_backend_s_copy_is_destroyed(material_destroyed: bool, expected: str) -> None:
    key = KeyFacts(K.DEACTIVATED, material_destroyed=material_destroyed)
    assert told(step(S.REVOKING, predecessor=key)) == expected
    assert told(step(S.REVOKING, NOW + 9999 * DAY, predecessor=key)) == expected


# --- all facts at once ------------------------------------------------------------------------------------

moments = st.sampled_from(
    [NOW + sign * offset for sign in (-1, 1) for offset in (SECOND, QUARANTINE, QUIET, DAY, 400 * DAY)] + [NOW]
)
key_facts = st.builds(
    KeyFacts,
    state=st.sampled_from(K),
    is_expired=st.booleans(),
    count=st.sampled_from([0, 4, 5, 10**6]),
    sources=st.sampled_from([0, 1, 2]),
    first_used_at=st.none() | moments,
    last_used_at=st.none() | moments,
    refused_at=st.none() | moments,
    material_destroyed=st.booleans(),
)
any_plan = st.builds(plan, proof=st.sampled_from(Proof), not_before=moments, deadline=moments)
any_facts = st.builds(
    lambda state, stalled_from, **known: Facts(
        state, stalled_from=stalled_from if state is S.STALLED else None, **known
    ),
    state=st.sampled_from(S),
    stalled_from=st.sampled_from(TIMED),
    plan=any_plan,
    entered_at=moments,
    predecessor=key_facts,
    replacement=key_facts,
    has_approval=st.booleans(),
    approval_expires_at=st.none() | moments,
    is_accepted=st.booleans(),
    is_delivered=st.booleans(),
    acknowledged_at=st.none() | moments,
    observed_through=st.none() | moments,
    lost_at=st.none() | moments,
)


@settings(max_examples=600)
@given(any_facts, moments)
def test_step_of_any_facts_is_a_way_of_the_table(known: Facts, now: datetime) -> None:
    """Every move that can be said is in TRANSITIONS, so that the engine never refuses its own next step."""
    found = next_step(known, now)
    if isinstance(found, Move):
        assert found.to in TRANSITIONS[known.state]
        assert found.why
    elif isinstance(found, Act):
        assert known.state in {S.SCHEDULED, S.PUBLISHING, S.REVOKING}
        assert found.waiting_for
    else:
        assert found.waiting_for


@settings(max_examples=600)
@given(any_facts, moments)
def test_step_takes_the_predecessor_away_only_from_a_living_replacement(known: Facts, now: datetime) -> None:
    """Into quarantine and into revoking: whatever else is known, the replacement is active and not expired."""
    found = next_step(known, now)
    if isinstance(found, Move) and found.to in {S.QUARANTINE, S.REVOKING}:
        assert known.replacement is not None
        assert not known.replacement.is_dead
        assert known.replacement.state is not K.SUSPENDED
        assert known.observed_through is not None


@settings(max_examples=600)
@given(any_facts, moments, moments)
def test_step_takes_the_predecessor_away_at_no_time_of_day(known: Facts, now: datetime, later: datetime) -> None:
    """Time alone never revokes: with the same evidence, no clock makes a difference but to stall or expire."""
    found = [
        next_step(replace(known, state=state), clock) for state in (S.OVERLAP, S.QUARANTINE) for clock in (now, later)
    ]
    for first, second in (found[:2], found[2:]):
        if told(first) != told(second):
            assert "to stalled" in {told(first), told(second)}


@given(any_facts, moments)
def test_step_is_a_function_of_the_facts(known: Facts, now: datetime) -> None:
    """Two workers that know the same do the same."""
    assert next_step(known, now) == next_step(known, now)


# --- simulation -------------------------------------------------------------------------------------------


@dataclass
class Key:
    """One of the two keys, as the verifiers treat it, and what was really done with it."""

    state: KeyState = K.ACTIVE
    expires_at: datetime | None = None
    used: list[tuple[datetime, str]] = field(default_factory=list)
    reported: int = 0
    refused: list[datetime] = field(default_factory=list)
    refused_reported: int = 0
    is_delivered: bool = False

    def is_good(self, now: datetime) -> bool:
        return self.state is K.ACTIVE and not self.is_expired(now)

    def is_expired(self, now: datetime) -> bool:
        return self.expires_at is not None and now >= self.expires_at

    def facts(self, now: datetime, refused_since: datetime) -> KeyFacts:
        seen = self.used[: self.reported]
        refused = [at for at in self.refused[: self.refused_reported] if at >= refused_since]
        return KeyFacts(
            state=self.state,
            is_expired=self.is_expired(now),
            count=len(seen),
            sources=len({source for _, source in seen}),
            first_used_at=seen[0][0] if seen else None,
            last_used_at=seen[-1][0] if seen else None,
            refused_at=max(refused, default=None),
            material_destroyed=False,
        )


class World:
    """A rotation, its two keys, the verifiers' reports and a clock: the engine's effects, without a database.

    What was really done stands beside what was reported, so that the rules can be held against the truth.
    """

    def __init__(self, proof: Proof = Proof.TRAFFIC, predecessor_expires_at: datetime | None = None) -> None:
        self.now = NOW
        self.plan = plan(
            proof=proof, proof_count=2, proof_sources=1, soak_seconds=5, deadline=NOW + 30 * DAY, not_before=NOW
        )
        self.state = S.AWAITING_APPROVAL
        self.stalled_from: RotationState | None = None
        self.entered_at = NOW
        self.has_approval = False
        self.predecessor = Key(expires_at=predecessor_expires_at, is_delivered=True)
        self.replacement: Key | None = None
        self.acknowledged_at: datetime | None = None
        self.observed_through: datetime | None = None
        self.lost_at: datetime | None = None
        self.is_backend_up = True
        self.is_destroyed = False
        self.moves: list[tuple[RotationState, RotationState]] = []

    # What others do.

    def both_keys(self) -> Iterator[Key]:
        yield self.predecessor
        if self.replacement is not None:
            yield self.replacement

    def use(self, key: Key, source: str = "a") -> None:
        """Somebody authenticates; the verifier will report it later, or never."""
        if key.is_good(self.now):
            key.used.append((self.now, source))
        elif key.state is K.SUSPENDED:
            key.refused.append(self.now)

    def report(self) -> None:
        """Every verifier reports all that it has seen."""
        for key in self.both_keys():
            key.reported, key.refused_reported = len(key.used), len(key.refused)
        self.observed_through = self.now

    def lose_verifier(self) -> None:
        """A verifier dies with what it has not reported."""
        for key in self.both_keys():
            del key.used[key.reported :]
            del key.refused[key.refused_reported :]
        self.lost_at = self.now

    def acknowledge(self) -> None:
        if self.replacement is not None and self.replacement.is_good(self.now) and self.replacement.is_delivered:
            self.acknowledged_at = self.acknowledged_at or self.now
            self.use(self.replacement)

    def become(self, key: Key, state: KeyState) -> None:
        """An operator's act on a key, as the transition table allows it."""
        if may_become(key.state, state) and not (state is K.ACTIVE and key.is_expired(self.now)):
            key.state = state

    def resume(self) -> None:
        if self.state is S.STALLED and self.stalled_from is not None:
            self._enter(self.stalled_from)
            self.stalled_from = None

    # What the engine does.

    def known(self) -> Facts:
        return Facts(
            state=self.state,
            plan=self.plan,
            entered_at=self.entered_at,
            predecessor=replace(
                self.predecessor.facts(self.now, self.entered_at), material_destroyed=self.is_destroyed
            ),
            replacement=None if self.replacement is None else self.replacement.facts(self.now, self.entered_at),
            stalled_from=self.stalled_from,
            has_approval=self.has_approval,
            approval_expires_at=NOW + 7 * DAY,
            is_accepted=self.replacement is not None and self.replacement.state is K.ACTIVE,
            is_delivered=self.replacement is not None and self.replacement.is_delivered,
            acknowledged_at=self.acknowledged_at,
            observed_through=self.observed_through,
            lost_at=self.lost_at,
        )

    def turn(self) -> None:
        """One worker's turn: steps until there is something to wait for."""
        for _ in range(20):
            before = self.good_keys()
            found = next_step(self.known(), self.now)
            if isinstance(found, Wait):
                return
            if isinstance(found, Move):
                self._move(found)
            elif not self._act():
                return
            self.check_step(before)
        raise AssertionError("the engine goes round in circles")

    def _act(self) -> bool:
        if self.state is S.SCHEDULED:
            self.replacement = Key()
            self._enter(S.STAGED)
        elif self.state is S.PUBLISHING and self.replacement is not None:
            self.replacement.is_delivered = self.is_backend_up
            return self.is_backend_up
        elif self.state is S.REVOKING:
            self.is_destroyed = self.is_backend_up
            return self.is_backend_up
        return True

    def _move(self, move: Move) -> None:
        assert move.to in TRANSITIONS[self.state], f"{self.state} to {move.to}"
        self.check_move(move.to)
        if move.to is S.QUARANTINE:
            self.predecessor.state = K.SUSPENDED
        if move.to is S.REVOKING:
            self.predecessor.state = K.DEACTIVATED
        ours = self.state is S.QUARANTINE and self.predecessor.state is K.SUSPENDED
        if ours and move.to in {S.CANCELLED, S.STALLED}:
            self.become(self.predecessor, K.ACTIVE)
        if move.to is S.STALLED:
            self.stalled_from = S.OVERLAP if self.state is S.QUARANTINE else self.state
        self._enter(move.to)

    def _enter(self, state: RotationState) -> None:
        self.moves.append((self.state, state))
        self.state, self.entered_at = state, self.now

    def good_keys(self) -> int:
        """Delivered and accepted: what the merchant can work with."""
        return sum(key.is_good(self.now) and key.is_delivered for key in self.both_keys())

    # What must hold.

    def check_step(self, before: int) -> None:
        """Invariant 1: no step of the engine takes a credential from a good key to none; two verify at most."""
        assert before == 0 or self.good_keys() >= 1, "the merchant was left without a key"
        assert sum(key.is_good(self.now) for key in self.both_keys()) <= 2

    def check_move(self, to: RotationState) -> None:
        if to is S.QUARANTINE:
            self.check_proof()
            self.check_silence([at for at, _ in self.predecessor.used], self.predecessor.reported, QUIET)
            assert self.replacement is not None
            self.check_order(self.replacement)
        if to is S.REVOKING:
            self.check_proof()
            assert self.state is S.QUARANTINE
            assert self.predecessor.state is K.SUSPENDED
            tried, reported = self.predecessor.refused, self.predecessor.refused_reported
            before = sum(at < self.entered_at for at in tried)
            self.check_silence(tried[before:], reported - before, QUARANTINE)

    def check_order(self, replacement: Key) -> None:
        """The last one that was heard of is the new one."""
        new = [at for at, _ in replacement.used] + [at for at in [self.acknowledged_at] if at is not None]
        old = [at for at, _ in self.predecessor.used[: self.predecessor.reported]]
        assert new
        assert not old or max(new) >= max(old)

    def check_proof(self) -> None:
        assert self.replacement is not None
        assert self.replacement.is_good(self.now)
        assert self.replacement.is_delivered
        if self.plan.proof is Proof.ACK:
            assert self.acknowledged_at is not None
        else:
            assert len(self.replacement.used) >= self.plan.proof_count

    def check_silence(self, done: list[datetime], reported: int, period: timedelta) -> None:
        """Of all that was really done before the verifiers' last report, the last is a whole period ago."""
        assert self.observed_through is not None
        assert self.entered_at + period <= self.observed_through
        for number, at in enumerate(done):
            if number < reported or at < self.observed_through:
                assert at + period <= self.observed_through
        if self.lost_at is not None and self.lost_at <= self.observed_through:
            assert self.lost_at + period <= self.observed_through


def walk_to_overlap(world: World) -> None:
    """Approved, delivered, and proved in either way."""
    world.has_approval = True
    world.turn()
    assert world.replacement is not None
    world.acknowledge()
    for _ in range(3):
        world.use(world.replacement)
    world.report()
    world.now += timedelta(seconds=5)
    world.turn()
    assert world.state is S.OVERLAP


def let_pass(world: World, period: timedelta) -> None:
    """A time in which the replacement alone is used, and all is reported."""
    world.now += period
    if world.replacement is not None:
        world.use(world.replacement)
    world.report()
    world.turn()


@pytest.mark.parametrize("proof", Proof)
def test_simulation_happy_path_completes(proof: Proof) -> None:
    """The machine below can reach the end: its invariants are not held by standing still."""
    world = World(proof)
    walk_to_overlap(world)
    let_pass(world, QUIET)
    let_pass(world, QUARANTINE)
    assert world.moves == list(pairwise(WAY[1:]))
    assert world.predecessor.state is K.DEACTIVATED
    assert world.replacement is not None
    assert world.replacement.is_good(world.now)


class Rotating(RuleBasedStateMachine):
    """Everything that can happen to a rotation, in any order and at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.closed_as: RotationState | None = None
        self.dead: dict[int, Key] = {}

    @initialize(
        proof=st.sampled_from(Proof),
        days=st.sampled_from([None, None, None, 1, 20]),
        start=st.sampled_from(["asked for", "approved", "proved", "proved", "silent"]),
    )
    def begin(self, proof: Proof, days: int | None, start: str) -> None:
        self.world = World(proof, None if days is None else NOW + days * DAY)
        self.world.has_approval = start != "asked for"
        if start in {"proved", "silent"}:
            walk_to_overlap(self.world)
        if start == "silent":
            self.quiet_time(600)

    @rule()
    def approve(self) -> None:
        self.world.has_approval = True

    @rule(seconds=st.sampled_from([1, 5, 60, 299, 300, 301, 599, 600, 601, 3_600, 86_400, 9_999_999]))
    def wait(self, seconds: int) -> None:
        self.world.now += timedelta(seconds=seconds)

    @rule()
    def turn(self) -> None:
        self.world.turn()

    @rule()
    def report(self) -> None:
        self.world.report()

    @rule(seconds=st.sampled_from([300, 600, 3_600]))
    def quiet_time(self, seconds: int) -> None:
        let_pass(self.world, timedelta(seconds=seconds))

    @rule()
    def lose_verifier(self) -> None:
        self.world.lose_verifier()

    @rule(source=st.sampled_from("ab"))
    def use_predecessor(self, source: str) -> None:
        self.world.use(self.world.predecessor, source)

    @rule(source=st.sampled_from("ab"))
    def use_replacement(self, source: str) -> None:
        if self.world.replacement is not None and self.world.replacement.is_delivered:
            self.world.use(self.world.replacement, source)

    @rule()
    def acknowledge(self) -> None:
        self.world.acknowledge()

    @rule()
    def resume(self) -> None:
        self.world.resume()

    @rule()
    def backend_fails_or_recovers(self) -> None:
        self.world.is_backend_up = not self.world.is_backend_up

    @rule(
        is_replacement=st.booleans(),
        state=st.sampled_from([K.ACTIVE, K.ACTIVE, K.ACTIVE, K.SUSPENDED, K.SUSPENDED, K.DEACTIVATED, K.COMPROMISED]),
    )
    def operator_acts(self, is_replacement: bool, state: KeyState) -> None:
        key = self.world.replacement if is_replacement else self.world.predecessor
        if key is not None:
            self.world.become(key, state)

    @invariant()
    def closed_is_closed(self) -> None:
        if self.closed_as is not None:
            assert self.world.state is self.closed_as
        if self.world.state in CLOSED:
            self.closed_as = self.world.state

    @invariant()
    def at_most_two_keys_verify(self) -> None:
        assert sum(key.is_good(self.world.now) for key in self.world.both_keys()) <= 2

    @invariant()
    def the_dead_stay_dead(self) -> None:
        for key in self.world.both_keys():
            if id(key) in self.dead:
                assert key.state in DEAD_STATES
            elif key.state in DEAD_STATES:
                self.dead[id(key)] = key

    @invariant()
    def revoked_only_by_the_whole_way(self) -> None:
        visited = [to for _, to in self.world.moves]
        if S.REVOKING in visited:
            way = [S.AWAITING_PROOF, S.OVERLAP, S.QUARANTINE, S.REVOKING]
            firsts = [visited.index(state) for state in way]
            assert firsts == sorted(firsts)


Rotating.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestRotating = Rotating.TestCase


@given(
    st.sampled_from(Proof),
    st.lists(st.integers(-400 * 86_400, 400 * 86_400), max_size=15),
    st.sampled_from(["no proof", "no report", "reports stopped"]),
)
def test_simulation_time_alone_never_reaches_quarantine(proof: Proof, jumps: list[int], lacking: str) -> None:
    """However the clock jumps, forwards or backwards: without evidence both keys stay as they are."""
    world = World(proof)
    world.has_approval = True
    world.turn()
    if lacking != "no proof":
        walk_to_overlap(world)
    if lacking == "no report":
        world.observed_through = None
    for jump in jumps:
        world.now = max(world.now + timedelta(seconds=jump), datetime(2000, 1, 1, tzinfo=UTC))
        if lacking == "no proof":
            world.observed_through = world.now
        world.turn()
        world.resume()
    assert {S.QUARANTINE, S.REVOKING, S.COMPLETED}.isdisjoint(to for _, to in world.moves)
    assert [key.state for key in world.both_keys()] == [K.ACTIVE, K.ACTIVE]


@given(st.lists(st.integers(1, 599), min_size=1, max_size=12))
def test_simulation_part_of_a_fleet_on_the_old_key_keeps_it(gaps: list[int]) -> None:
    """As long as somebody uses the old key more often than the quiet period, it stays."""
    world = World()
    walk_to_overlap(world)
    for gap in gaps:
        world.now += timedelta(seconds=gap)
        world.use(world.predecessor, "an old machine")
        world.report()
        world.turn()
        assert world.state is S.OVERLAP
    let_pass(world, QUIET)
    assert world.state is S.QUARANTINE


@given(st.lists(st.integers(1, 299), min_size=1, max_size=12))
def test_simulation_attempts_in_quarantine_put_revocation_off(gaps: list[int]) -> None:
    world = World()
    walk_to_overlap(world)
    let_pass(world, QUIET)
    for gap in gaps:
        world.now += timedelta(seconds=gap)
        world.use(world.predecessor, "an old machine")
        world.report()
        world.turn()
        assert world.state is S.QUARANTINE
    let_pass(world, QUARANTINE)
    assert world.state is S.COMPLETED


def test_simulation_replacement_revoked_in_quarantine_gives_the_predecessor_back() -> None:
    """A merely suspended predecessor is good again; a compromised one never."""
    for end, expected in ((None, K.ACTIVE), (K.COMPROMISED, K.COMPROMISED)):
        world = World()
        walk_to_overlap(world)
        let_pass(world, QUIET)
        assert world.state is S.QUARANTINE
        assert world.replacement is not None
        if end is not None:
            world.become(world.predecessor, end)
        world.become(world.replacement, K.DEACTIVATED)
        world.turn()
        assert world.moves[-1][1] is S.CANCELLED
        assert world.predecessor.state is expected


def test_facts_every_field_is_looked_at_by_a_test() -> None:
    """A new fact cannot be added to the machine without being added to the random ones above."""
    drawn = {field.name for field in fields(Facts)}
    assert drawn == {
        *("state", "plan", "entered_at", "predecessor", "replacement", "has_approval", "approval_expires_at"),
        *("is_accepted", "is_delivered", "acknowledged_at", "observed_through", "lost_at", "stalled_from"),
    }


def test_step_never_says_more_than_one_thing() -> None:
    """Every state has its way forward: no state is forgotten."""
    for state, accepted, delivered in product(OPEN, [True, False], [True, False]):
        assert told(step(state, is_accepted=accepted, is_delivered=delivered))
