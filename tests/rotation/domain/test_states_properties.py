"""Invariants of `next_step` over random facts, including facts that no engine gathers."""

from dataclasses import fields, replace
from datetime import datetime
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from keyvault.domain.keys import DEAD_STATES, KeyKind
from rotation.domain.events import Event
from rotation.domain.plan_fields import AtDeadline, Proof, Reinstatement
from rotation.domain.silence import SourceFacts
from rotation.domain.states import (
    CLOSED,
    READ_IN,
    TRANSITIONS,
    FactGroup,
    Facts,
    KeyFacts,
    Move,
    RotationAction,
    Wait,
    list_awaited_sources,
    next_step,
)
from tests.rotation.situation import DAY, NOW, PLAN, QUARANTINE, QUIET, SECOND, STALLING, K, S, facts, plan

moments = st.sampled_from(
    [NOW + sign * offset for sign in (-1, 1) for offset in (SECOND, QUARANTINE, QUIET, DAY, 400 * DAY)] + [NOW]
)
key_facts = st.builds(
    KeyFacts,
    # A replacement is activated in the transaction that creates it, so it never appears in pre-activation.
    state=st.sampled_from([K.ACTIVE] * 3 + [K.SUSPENDED] * 2 + sorted(DEAD_STATES)),
    is_expired=st.sampled_from([False, False, False, True]),
    count=st.sampled_from([0, 4, 5, 10**6]),
    sources=st.sampled_from([0, 1, 2]),
    minutes=st.sampled_from([0, 1, 10]),
    first_used_at=st.none() | moments,
    has_traffic=st.booleans(),
    last_used_at=st.none() | moments,
    tried_at=st.none() | moments,
    tried_by_known_at=st.none() | moments,
    material_destroyed=st.booleans(),
)
any_source = st.builds(
    SourceFacts,
    name=st.just("192.0.2.0/24 shop"),
    used_at=moments,
    moved_at=st.none() | moments,
    gap_seconds=st.sampled_from([0, 3_600, None]),
    is_waived=st.booleans(),
)
any_plan = st.builds(
    plan,
    proof=st.sampled_from(Proof),
    not_before=moments,
    deadline=moments,
    is_dormant=st.booleans(),
    at_deadline=st.sampled_from(AtDeadline),
    reinstatement=st.sampled_from(Reinstatement),
)
KNOWN = {
    "kind": st.sampled_from(KeyKind),
    "plan": any_plan,
    "entered_at": moments,
    "predecessor": key_facts,
    "replacement": key_facts,
    "deadline": st.none() | moments,
    "retire_at": st.none() | moments,
    "has_left": st.booleans(),
    "notification_failed": st.booleans(),
    "has_approval": st.booleans(),
    "approval_expires_at": st.none() | moments,
    "is_accepted": st.booleans(),
    "unconfirmed": st.lists(st.text("verifier-1", min_size=1), max_size=5).map(tuple),
    "is_delivered": st.booleans(),
    "is_notified": st.booleans(),
    "acknowledged_at": st.none() | moments,
    "confirmed_at": st.none() | moments,
    "is_proved": st.booleans(),
    "quarantined_at": st.none() | moments,
    "is_held": st.sampled_from([False, False, False, True]),
    "was_reinstated": st.booleans(),
    "silence_waived": st.booleans(),
    "written_back_at": st.none() | moments,
    "observed_through": st.none() | moments,
    "lost_at": st.none() | moments,
    "is_suspended": st.sampled_from([False, False, False, True]),
    "resumed_at": st.none() | moments,
    "sources": st.lists(any_source, max_size=2).map(tuple),
}
any_facts = st.builds(
    lambda state, stalled_from, **known: Facts(
        state, stalled_from=stalled_from if state is S.STALLED else None, **known
    ),
    state=st.sampled_from(S),
    stalled_from=st.sampled_from(STALLING),
    **KNOWN,
)
many = settings(max_examples=250)


def test_random_facts_include_every_fact() -> None:
    """A new fact of the machine must be added to the random facts here."""
    assert {field.name for field in fields(Facts)} == {"state", "stalled_from", *KNOWN}


FACTS_OF = {
    FactGroup.APPROVAL: {"Facts.has_approval"},
    FactGroup.ACCEPTANCE: {"Facts.is_accepted", "Facts.unconfirmed"},
    FactGroup.NOTIFICATION: {"Facts.is_notified", "Facts.notification_failed"},
    FactGroup.TRAFFIC: {f"KeyFacts.{name}" for name in ("count", "sources", "minutes", "first_used_at", "has_traffic")},
    FactGroup.LAST_USES: {"KeyFacts.last_used_at"},
    FactGroup.SOURCES: {"Facts.sources"},
    FactGroup.OBSERVATION: {"Facts.observed_through", "Facts.lost_at"},
}
read: set[str] = set()
"""What a step has read of `WatchedFacts` and `WatchedKeyFacts`."""


class WatchedFacts(Facts):
    def __getattribute__(self, name: str) -> object:
        read.add(f"Facts.{name}")
        return super().__getattribute__(name)


class WatchedKeyFacts(KeyFacts):
    def __getattribute__(self, name: str) -> object:
        read.add(f"KeyFacts.{name}")
        return super().__getattribute__(name)


def values_of(known: Facts | KeyFacts) -> dict[str, Any]:
    return {field.name: getattr(known, field.name) for field in fields(known)}


@many
@given(any_facts, moments)
def test_step_reads_only_the_groups_of_its_stage(known: Facts, now: datetime) -> None:
    """Guarantee: no step is decided on a fact that the engine does not gather in that stage."""
    old, new = (WatchedKeyFacts(**values_of(key)) for key in (known.predecessor, known.replacement) if key is not None)
    watched = WatchedFacts(**values_of(known) | {"predecessor": old, "replacement": new})
    read.clear()
    assert next_step(watched, now) == next_step(known, now)
    list_awaited_sources(watched)
    unread = [group for group, stages in READ_IN.items() if known.stage not in stages]
    assert read.isdisjoint(set().union(*(FACTS_OF[group] for group in unread)))


@many
@given(any_facts, moments)
def test_step_of_any_facts_is_a_permitted_transition(known: Facts, now: datetime) -> None:
    """Every possible move is in TRANSITIONS, so the engine never refuses its own next step."""
    found = next_step(known, now)
    if isinstance(found, Move):
        assert found.to in TRANSITIONS[known.state]
        assert found.why
    elif isinstance(found, RotationAction):
        assert known.state in {S.SCHEDULED, S.EMERGENCY, S.PUBLISHING, S.REVOKING, S.ROLLING_BACK}
        assert found.waiting_for
    else:
        assert found.waiting_for


@many
@given(any_facts, moments)
def test_step_retires_a_key_only_beside_another_good_one(known: Facts, now: datetime) -> None:
    """Entering quarantine, revoking and the end of a rollback all require another active, unexpired key."""
    found = next_step(known, now)
    if not isinstance(found, Move) or found.event not in {None, Event.DEADLINE}:
        return
    if found.to in {S.QUARANTINE, S.REVOKING}:
        assert known.replacement is not None
        assert (known.replacement.state, known.replacement.is_expired) == (K.ACTIVE, False)
    if known.state is S.ROLLING_BACK and found.to in {S.ROLLING_BACK, S.ROLLED_BACK}:
        assert (known.predecessor.state, known.predecessor.is_expired) == (K.ACTIVE, False)


@many
@given(any_facts, moments)
def test_step_revokes_only_after_observed_silence(known: Facts, now: datetime) -> None:
    """Without a watermark over the whole period no private key enters quarantine and none is revoked."""
    found = next_step(known, now)
    if not isinstance(found, Move) or found.event is not None:
        return
    period = None
    if known.state is S.OVERLAP and found.to is S.QUARANTINE and known.kind is KeyKind.PRIVATE:
        period = QUIET
    elif known.state is S.QUARANTINE and found.to is S.REVOKING:
        period = QUARANTINE
    elif known.state is S.ROLLING_BACK:
        period = QUIET if known.quarantined_at is None else QUARANTINE
    if period is not None:
        assert known.observed_through is not None
        assert known.entered_at + period <= known.observed_through
        assert not known.is_suspended
        assert known.resumed_at is None or known.resumed_at + period <= known.observed_through
        moved = bool(known.sources) and all(source.has_moved or source.is_waived for source in known.sources)
        is_explained = period is QUIET and moved
        assert known.lost_at is None or known.lost_at + period <= known.observed_through or is_explained
        if period is QUIET:
            for source in known.sources:
                assert source.is_waived or source.used_at + period <= known.observed_through
                assert source.is_waived or source.has_moved or source.gap_seconds is not None


@many
@given(any_facts, moments, moments)
def test_step_time_alone_never_retires_a_key(known: Facts, now: datetime, later: datetime) -> None:
    """With the same evidence, time only leads to a stall at the deadline, or to an approved date: a deadline with a
    revoking plan, or a public key's retirement.
    """
    by_date = known.plan.at_deadline is AtDeadline.REVOKE or known.kind is KeyKind.PUBLIC
    for state in (S.OVERLAP, S.QUARANTINE, S.ROLLING_BACK):
        steps = [next_step(replace(known, state=state), clock) for clock in (now, later)]
        if by_date and state is S.OVERLAP:
            continue
        assert steps[0] == steps[1] or Event.DEADLINE in {getattr(step, "event", None) for step in steps}
        assert all(step.to is S.STALLED for step in steps if isinstance(step, Move) and step.event is Event.DEADLINE)


@many
@given(any_facts, moments)
def test_step_reinstates_at_most_once_and_never_a_public_or_a_dead_key(known: Facts, now: datetime) -> None:
    found = next_step(known, now)
    if isinstance(found, Move) and known.state is S.QUARANTINE and found.to is S.OVERLAP:
        assert found.event is Event.TRIED_BY_KNOWN_SOURCE
        assert not known.was_reinstated
        assert not known.predecessor.is_dead
        assert known.is_proved
        assert known.kind is KeyKind.PRIVATE


@many
@given(any_facts, moments)
def test_step_with_a_dead_replacement_never_continues(known: Facts, now: datetime) -> None:
    """With a dead replacement the rotation ends or stands still; nothing is delivered, proved or retired for it."""
    if known.replacement is None or not known.replacement.is_dead or known.state is S.STALLED or known.is_held:
        return
    found = next_step(known, now)
    if known.state in {S.STAGED, S.PUBLISHING, S.AWAITING_PROOF, S.OVERLAP, S.QUARANTINE}:
        assert isinstance(found, Move)
        assert found.to is S.CANCELLED
    if known.state is S.ROLLING_BACK:
        assert isinstance(found, Move)
        assert found.to is S.ROLLED_BACK


@many
@given(any_facts, moments)
def test_step_with_a_held_key_changes_nothing(known: Facts, now: datetime) -> None:
    """Only an emergency of a merchant that has left ends: it has no key in quarantine."""
    if not (known.has_left and known.stage is S.EMERGENCY):
        assert isinstance(next_step(replace(known, is_held=True), now), Wait)


@given(any_facts, moments)
def test_step_of_a_closed_rotation_is_none(known: Facts, now: datetime) -> None:
    for state in CLOSED:
        assert isinstance(next_step(replace(known, state=state), now), Wait)


@given(any_facts, moments)
def test_step_is_deterministic(known: Facts, now: datetime) -> None:
    """Two workers with the same facts take the same step."""
    again = replace(known, predecessor=replace(known.predecessor), plan=replace(known.plan))
    assert next_step(known, now) == next_step(again, now)


@given(st.sampled_from(Proof), st.lists(moments, max_size=15))
def test_step_without_evidence_keeps_both_keys_at_any_time(proof: Proof, clocks: list[datetime]) -> None:
    for state in (S.AWAITING_PROOF, S.OVERLAP, S.QUARANTINE):
        for now in clocks:
            found = next_step(facts(state, plan=replace(PLAN, proof=proof)), now)
            assert isinstance(found, Wait) or found == Move(S.STALLED, getattr(found, "why", ""), Event.DEADLINE)
