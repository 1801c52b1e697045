"""External events on a rotation: every state by every event, against a reviewed table."""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product

import pytest

from rotation.domain.events import OPEN, OUTCOMES, REFUSED, STAYS, Event, Outcome, RotationState
from rotation.domain.plan_fields import AtDeadline, Reinstatement
from rotation.domain.states import CLOSED, TRANSITIONS, Facts, KeyFacts, Move, Wait, find_events, next_step
from tests.rotation.situation import (
    ACTIVE,
    DAY,
    ENTERED,
    NOW,
    SECOND,
    STALLING,
    SUSPENDED,
    K,
    S,
    facts,
    outcome_of,
    plan,
)

REVIEWED = """
                         asked wait_ok sched emerg staged publi proof overl quara revok rollb
replacement_compromised  .     .       .     .     can    can   can   can   can   .     RLB
replacement_revoked      .     .       .     .     can    can   can   can   can   .     RLB
replacement_expired      .     .       .     .     can    can   can   can   can   .     RLB
predecessor_compromised  emg   emg     emg   .     .      .     com   com   com   .     pub
predecessor_revoked      can   can     can   .     .      .     com   com   com   .     pub
predecessor_expired      emg   emg     emg   .     .      .     com   com   com   .     pub
replacement_suspended    .     .       .     .     stl    stl   stl   stl   stl   .     stl
predecessor_suspended    .     .       stl   .     stl    stl   stl   stl   .     .     stl
quarantine_lifted        .     .       .     .     .      .     .     .     stl   .     stl
tried_by_known_source    .     .       .     .     .      .     .     .     ovl   .     .
tried_by_unknown_source  .     .       .     .     .      .     .     .     .     .     .
deadline                 .     .       stl   .     stl    stl   stl   stl   .     .     stl
aborted                  can   can     can   can   can    can   rol   rol   rol   REF   REF
"""
"""The expected outcome of each event in each state, kept apart from the code, so that a code change shows up here.

`.` unchanged, REF refused, RLB rolled_back, rol rolling_back, can cancelled, com completed, emg emergency, ovl back to
overlap, pub publishing (the replacement is written again), stl stalled.
"""

COLUMNS = {
    "asked": S.REQUESTED,
    "wait_ok": S.AWAITING_APPROVAL,
    "sched": S.SCHEDULED,
    "emerg": S.EMERGENCY,
    "staged": S.STAGED,
    "publi": S.PUBLISHING,
    "proof": S.AWAITING_PROOF,
    "overl": S.OVERLAP,
    "quara": S.QUARANTINE,
    "revok": S.REVOKING,
    "rollb": S.ROLLING_BACK,
}
CELLS: dict[str, Outcome] = {
    ".": STAYS,
    "REF": REFUSED,
    "RLB": S.ROLLED_BACK,
    "rol": S.ROLLING_BACK,
    "can": S.CANCELLED,
    "com": S.COMPLETED,
    "emg": S.EMERGENCY,
    "ovl": S.OVERLAP,
    "pub": S.PUBLISHING,
    "stl": S.STALLED,
}


def _read() -> dict[tuple[Event, RotationState], Outcome]:
    head, *rows = [line.split() for line in REVIEWED.strip().splitlines()]
    return {
        (Event(name), COLUMNS[column]): CELLS[cell]
        for name, *cells in rows
        for column, cell in zip(head, cells, strict=True)
    }


TABLE = _read()
ENDS = (
    *(Event.REPLACEMENT_COMPROMISED, Event.REPLACEMENT_REVOKED, Event.REPLACEMENT_EXPIRED),
    *(Event.PREDECESSOR_COMPROMISED, Event.PREDECESSOR_REVOKED, Event.PREDECESSOR_EXPIRED),
)
"""Events that move even a stalled rotation."""

SEEN = [event for event in Event if event is not Event.ABORTED]
"""Every event that the facts show; an abort is an operator's act, see test_interventions."""

COMPROMISED, REVOKED, EXPIRED = KeyFacts(K.COMPROMISED), KeyFacts(K.DEACTIVATED), KeyFacts(K.ACTIVE, is_expired=True)


def _key(name: str, key: KeyFacts) -> Callable[[Facts], Facts]:
    return lambda known: replace(known, **{name: key})  # type: ignore[arg-type]  # a key, under a key's name


def _retiring(known: Facts, key: KeyFacts) -> Facts:
    """The retiring key is suspended by the engine."""
    name = "replacement" if known.stage is S.ROLLING_BACK else "predecessor"
    return replace(known, quarantined_at=ENTERED, **{name: key})  # type: ignore[arg-type]  # a key, under a key's name


def _tried_by_known(known: Facts) -> Facts:
    tried = replace(SUSPENDED, tried_at=NOW, tried_by_known_at=NOW)
    known = replace(_retiring(known, tried), is_proved=True)
    # The quarantined key of a rollback is the replacement; earlier attempts with the predecessor do not count.
    return replace(known, predecessor=replace(known.predecessor, tried_by_known_at=NOW))


HAPPENED: dict[Event, Callable[[Facts], Facts]] = {
    Event.REPLACEMENT_COMPROMISED: _key("replacement", COMPROMISED),
    Event.REPLACEMENT_REVOKED: _key("replacement", REVOKED),
    Event.REPLACEMENT_EXPIRED: _key("replacement", EXPIRED),
    Event.PREDECESSOR_COMPROMISED: _key("predecessor", COMPROMISED),
    Event.PREDECESSOR_REVOKED: _key("predecessor", REVOKED),
    Event.PREDECESSOR_EXPIRED: _key("predecessor", EXPIRED),
    Event.REPLACEMENT_SUSPENDED: _key("replacement", SUSPENDED),
    Event.PREDECESSOR_SUSPENDED: lambda known: replace(known, predecessor=SUSPENDED, quarantined_at=None),
    Event.QUARANTINE_LIFTED: lambda known: _retiring(known, ACTIVE),
    Event.TRIED_BY_KNOWN_SOURCE: _tried_by_known,
    Event.TRIED_BY_UNKNOWN_SOURCE: lambda known: _retiring(known, replace(SUSPENDED, tried_at=NOW)),
    Event.DEADLINE: lambda known: replace(
        known, deadline=NOW, predecessor=ACTIVE if known.predecessor.is_dead else known.predecessor
    ),
}
"""For each event, the facts of a rotation to which it, and as far as possible nothing else, has just happened."""


def happened(event: Event, state: RotationState, stalled_from: RotationState | None = None) -> Facts:
    known = facts(state) if stalled_from is None else facts(state, stalled_from=stalled_from)
    return HAPPENED[event](known)


# --- the table ------------------------------------------------------------------------------------------------


def test_table_as_reviewed_has_every_cell() -> None:
    """Every state and event has a reviewed outcome."""
    assert set(TABLE) == set(product(Event, OPEN))
    assert set(OPEN) == set(S) - CLOSED - {S.STALLED}
    assert set(HAPPENED) == set(SEEN)


@pytest.mark.parametrize(("event", "state"), sorted(TABLE), ids=str)
def test_table_in_the_code_is_the_reviewed_one(event: Event, state: RotationState) -> None:
    assert OUTCOMES[event][state] is TABLE[event, state]


def test_table_has_nothing_that_was_not_reviewed() -> None:
    assert {(event, state) for event, row in OUTCOMES.items() for state in row} == set(TABLE)


@pytest.mark.parametrize(("event", "state"), sorted(TABLE), ids=str)
def test_table_moves_are_permitted_transitions(event: Event, state: RotationState) -> None:
    """Every outcome is a permitted transition, also for a rotation that stalled in that state."""
    outcome = TABLE[event, state]
    if isinstance(outcome, RotationState):
        assert outcome in TRANSITIONS[state]
        if event in ENDS and state in STALLING:
            assert outcome in TRANSITIONS[S.STALLED]


# --- every cell, through `next_step` ----------------------------------------------------------------------------


@pytest.mark.parametrize(("event", "state"), sorted(product(SEEN, OPEN)), ids=str)
def test_event_in_each_state_does_what_was_reviewed(event: Event, state: RotationState) -> None:
    known = happened(event, state)
    assert event in set(find_events(known, NOW))
    found = next_step(known, NOW)
    expected = TABLE[event, state]
    if isinstance(expected, RotationState):
        assert isinstance(found, Move)
        assert (found.to, found.event) == (expected, event)
        assert found.why
    else:
        assert not isinstance(found, Move) or found.event is None


@pytest.mark.parametrize(("event", "stage"), sorted(product(SEEN, STALLING)), ids=str)
def test_event_to_a_stalled_rotation_depends_on_the_state_it_stalled_in(event: Event, stage: RotationState) -> None:
    """Only the end of one of its keys moves a stalled rotation; everything else waits for an operator."""
    found = next_step(happened(event, S.STALLED, stage), NOW)
    expected = TABLE[event, stage]
    if stage is S.EMERGENCY:
        assert outcome_of(found) == "wait"  # Its predecessor was dead from the start.
    elif event in ENDS and isinstance(expected, RotationState):
        assert isinstance(found, Move)
        assert (found.to, found.event) == (expected, event)
    else:
        assert isinstance(found, Wait)
        assert found.until is None


@pytest.mark.parametrize("event", SEEN)
@pytest.mark.parametrize("state", sorted(CLOSED))
def test_event_to_a_closed_rotation_does_nothing(state: RotationState, event: Event) -> None:
    known = replace(happened(event, S.OVERLAP), state=state)
    found = next_step(known, NOW)
    assert isinstance(found, Wait)
    assert found.until is None


@pytest.mark.parametrize("state", OPEN)
def test_event_base_facts_show_none(state: RotationState) -> None:
    """The base facts show no event, so each cell above tests its own event only."""
    dead_by_then = {S.EMERGENCY: [Event.PREDECESSOR_COMPROMISED], S.REVOKING: [Event.PREDECESSOR_REVOKED]}
    assert list(find_events(facts(state), NOW)) == dead_by_then.get(state, [])


# --- several events ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", OPEN)
@pytest.mark.parametrize(("old", "new"), list(product(ENDS[3:], ENDS[:3])), ids=str)
def test_event_with_both_keys_dead_depends_on_the_replacement(state: RotationState, old: Event, new: Event) -> None:
    """A rotation with two dead keys ends; it is neither `completed` nor delivered again."""
    both = HAPPENED[new](happened(old, state))
    decides = new if isinstance(TABLE[new, state], RotationState) else old
    expected = TABLE[decides, state]
    found = next_step(both, NOW)
    if isinstance(expected, RotationState):
        assert isinstance(found, Move)
        assert (found.to, found.event) == (expected, decides)
    else:
        assert not isinstance(found, Move) or found.event is None


@pytest.mark.parametrize("state", OPEN)
def test_event_first_of_two_with_an_effect_applies(state: RotationState) -> None:
    """Events apply in the order of `Event`; one without effect does not hide the next."""
    for first, second in combinations(SEEN, 2):
        known = HAPPENED[second](HAPPENED[first](facts(state)))
        shown = list(find_events(known, NOW))
        assert shown == sorted(shown, key=list(Event).index)
        moving = [TABLE[event, state] for event in shown if isinstance(TABLE[event, state], RotationState)]
        found = next_step(known, NOW)
        if moving:
            assert isinstance(found, Move)
            assert found.to is moving[0]
        else:
            assert not isinstance(found, Move) or found.event is None


def test_event_deadline_without_a_predecessor_is_ignored() -> None:
    """The replacement is the merchant's only key, so its delivery has no deadline."""
    for state in (S.STAGED, S.PUBLISHING, S.EMERGENCY):
        known = facts(state, predecessor=COMPROMISED, deadline=NOW - DAY)
        assert Event.DEADLINE not in set(find_events(known, NOW))
        assert outcome_of(next_step(known, NOW)) in {"wait", "act"}


@pytest.mark.parametrize("state", OPEN)
def test_event_deadline_counts_from_the_second_it_names(state: RotationState) -> None:
    known = facts(state, predecessor=ACTIVE, deadline=NOW)
    assert Event.DEADLINE not in set(find_events(known, NOW - SECOND))
    assert Event.DEADLINE in set(find_events(known, NOW))
    assert Event.DEADLINE not in set(find_events(replace(known, deadline=None), NOW + 9999 * DAY))


# --- cells that depend on the plan --------------------------------------------------------------------------------


@pytest.mark.parametrize("state", OPEN)
def test_event_deadline_revokes_only_with_an_approved_plan_and_proof(state: RotationState) -> None:
    """An unproved rotation stalls: no plan revokes the only key known to be in use."""
    known = replace(happened(Event.DEADLINE, state), plan=plan(at_deadline=AtDeadline.REVOKE))
    expected = S.QUARANTINE if state is S.OVERLAP else TABLE[Event.DEADLINE, state]
    found = next_step(known, NOW)
    if isinstance(expected, RotationState):
        assert isinstance(found, Move)
        assert (found.to, found.event) == (expected, Event.DEADLINE)
    else:
        assert not isinstance(found, Move) or found.event is None


@pytest.mark.parametrize("replacement", [SUSPENDED, COMPROMISED, REVOKED, EXPIRED], ids=str)
def test_event_deadline_with_an_unusable_replacement_does_not_revoke(replacement: KeyFacts) -> None:
    known = facts(S.OVERLAP, plan=plan(at_deadline=AtDeadline.REVOKE), deadline=NOW, replacement=replacement)
    assert outcome_of(next_step(known, NOW)) in {"to stalled", "to cancelled"}


@pytest.mark.parametrize("reinstatement", Reinstatement)
def test_event_attempt_by_a_known_source_reinstates_as_planned(reinstatement: Reinstatement) -> None:
    known = replace(happened(Event.TRIED_BY_KNOWN_SOURCE, S.QUARANTINE), plan=plan(reinstatement=reinstatement))
    assert outcome_of(next_step(known, NOW)) == ("to overlap" if reinstatement is Reinstatement.ONCE else "wait")
