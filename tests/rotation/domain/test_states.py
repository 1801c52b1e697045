"""The states of a rotation and its way forward, step by step; events are in test_events, proof in test_proofs,
silence and quarantine in test_silence."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest

from keyvault.domain.keys import KeyKind
from rotation.domain.events import OPEN, RotationState
from rotation.domain.policy import Plan
from rotation.domain.states import (
    CLOSED,
    TRANSITIONS,
    KeyFacts,
    Move,
    RotationAction,
    Wait,
)
from rotation.domain.windows import Blackout, Window
from tests.rotation.situation import (
    ACTIVE,
    BEFORE_APPROVAL,
    DAY,
    ENTERED,
    MADE,
    NOW,
    PLAN,
    QUARANTINE,
    QUIET,
    SECOND,
    STALLING,
    SUSPENDED,
    K,
    S,
    dead,
    plan,
    step,
    told,
    used,
)

WAY = [
    *(S.REQUESTED, S.AWAITING_APPROVAL, S.SCHEDULED, S.STAGED, S.PUBLISHING),
    *(S.AWAITING_PROOF, S.OVERLAP, S.QUARANTINE, S.REVOKING, S.COMPLETED),
]
SIDE = [S.REJECTED, S.EXPIRED, S.CANCELLED, S.STALLED, S.ROLLING_BACK, S.ROLLED_BACK, S.EMERGENCY]

# --- the machine as it is drawn ---------------------------------------------------------------------------


def test_states_are_those_of_the_design() -> None:
    """ROTATION.md's names, in its order."""
    assert [state.value for state in WAY] == [
        *("requested", "awaiting_approval", "scheduled", "staged", "publishing"),
        *("awaiting_proof", "overlap", "quarantine", "revoking", "completed"),
    ]
    assert [state.value for state in SIDE] == [
        *("rejected", "expired", "cancelled", "stalled", "rolling_back", "rolled_back", "emergency"),
    ]
    assert set(S) == {*WAY, *SIDE} == set(TRANSITIONS)
    assert {S.COMPLETED, S.ROLLED_BACK, S.REJECTED, S.EXPIRED, S.CANCELLED} == CLOSED


def test_states_that_are_open_or_may_stall_are_these() -> None:
    unpublished = {S.SCHEDULED, S.EMERGENCY, S.STAGED, S.PUBLISHING}
    delivered = {S.AWAITING_PROOF, S.OVERLAP, S.QUARANTINE, S.REVOKING}
    assert BEFORE_APPROVAL | unpublished | delivered | {S.ROLLING_BACK} == set(OPEN)
    assert {S.STALLED} | {state for state in S if S.STALLED in TRANSITIONS[state]} == {S.STALLED, *STALLING}


def test_transitions_the_way_is_walked_step_by_step() -> None:
    for state, following in pairwise(WAY[1:]):
        assert following in TRANSITIONS[state]


def test_transitions_only_overlap_leads_to_quarantine_and_only_quarantine_to_revoking() -> None:
    """The old key ends by way of proof, silence and quarantine. (A stalled one goes on where it stopped.)"""
    into = {state: {old for old in S if state in TRANSITIONS[old]} for state in S}
    assert into[S.REVOKING] == {S.QUARANTINE}
    assert into[S.QUARANTINE] == {S.OVERLAP, S.STALLED}
    assert into[S.OVERLAP] == {S.AWAITING_PROOF, S.QUARANTINE, S.STALLED}
    assert into[S.AWAITING_PROOF] == {S.PUBLISHING, S.STALLED}
    assert into[S.ROLLED_BACK] == {S.ROLLING_BACK, S.STALLED}
    assert into[S.STAGED] == {S.SCHEDULED, S.EMERGENCY, S.STAGED, S.PUBLISHING, S.STALLED}


def test_transitions_revoking_is_final() -> None:
    """Once the old key is revoked there is nothing to stall for and nothing to go back to."""
    assert TRANSITIONS[S.REVOKING] == {S.COMPLETED}


def test_transitions_nothing_leads_out_of_a_closed_state() -> None:
    assert [TRANSITIONS[state] for state in CLOSED] == [frozenset()] * len(CLOSED)


def test_transitions_every_open_state_can_end() -> None:
    """No rotation is stuck for good: from everywhere some closed state can be reached."""
    ends = set(CLOSED)
    while more := {state for state in S if state not in ends and TRANSITIONS[state] & ends}:
        ends |= more
    assert ends == set(S)


# --- closed, and stalled ----------------------------------------------------------------------------------


@pytest.mark.parametrize("state", sorted(CLOSED))
@dead
def test_step_closed_is_closed_whatever_happens(state: RotationState, key: KeyFacts) -> None:
    """No event, no clock and no evidence opens a closed rotation."""
    for far in (NOW, NOW + 10_000 * DAY, NOW - 10_000 * DAY):
        found = step(state, far, predecessor=key, replacement=key, acknowledged_at=NOW, observed_through=far)
        assert isinstance(found, Wait)
        assert found.until is None


@pytest.mark.parametrize("stalled_from", STALLING)
@pytest.mark.parametrize("key", [ACTIVE, SUSPENDED], ids=lambda key: key.state)
def test_step_stalled_waits_for_a_person(stalled_from: RotationState, key: KeyFacts) -> None:
    """As long as both keys live, no time and no evidence sets a stalled rotation going again by itself."""
    for far in (NOW, NOW + 10_000 * DAY):
        found = step(
            S.STALLED,
            far,
            stalled_from=stalled_from,
            predecessor=key,
            replacement=ACTIVE,
            is_accepted=True,
            is_delivered=True,
            acknowledged_at=NOW,
            confirmed_at=NOW,
            observed_through=far,
        )
        assert isinstance(found, Wait)
        assert "operator" in found.waiting_for


# --- before approval --------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", sorted(BEFORE_APPROVAL))
@pytest.mark.parametrize(
    ("has_approval", "expires_at", "expected"),
    [
        (False, NOW + SECOND, "wait"),
        (False, NOW, "to expired"),
        (False, NOW - DAY, "to expired"),
        (False, None, "wait"),
        (True, NOW + SECOND, "to scheduled"),
        (True, NOW - DAY, "to scheduled"),
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
    ("has_approval", "expires_at", "expected"),
    [(True, NOW - DAY, "act"), (False, NOW + SECOND, "wait"), (False, NOW, "to expired"), (False, None, "wait")],
)
def test_step_emergency_mints_under_its_approval_and_at_once(
    has_approval: bool, expires_at: datetime | None, expected: str
) -> None:
    """Approval gates the mint here too; but no window, no not-before and no deadline holds it up."""
    found = step(
        S.EMERGENCY,
        has_approval=has_approval,
        approval_expires_at=expires_at,
        plan=plan(not_before=NOW + DAY, window=NEVER),
        deadline=NOW - DAY,
    )
    assert told(found) == expected


def test_step_emergency_of_a_merchant_who_has_left_is_cancelled() -> None:
    """Approved or not: its credentials get no keys any more."""
    for has_approval in (True, False):
        assert told(step(S.EMERGENCY, has_left=True, has_approval=has_approval)) == "to cancelled"
        stalled = {"stalled_from": S.EMERGENCY, "has_left": True, "has_approval": has_approval}
        assert told(step(S.STALLED, **stalled)) == "to cancelled"


# --- scheduled --------------------------------------------------------------------------------------------

NEVER = Window(blackouts=(Blackout(NOW - DAY, NOW + 9999 * DAY),))
AT_TWO = Window(weekdays=(0, 1, 2, 3, 4, 5, 6), opens=14 * 60, closes=15 * 60)
"""From 14:00 to 15:00 UTC; it is noon."""

TWO_O_CLOCK = NOW + timedelta(hours=2)


@pytest.mark.parametrize(
    ("asked", "expected", "until"),
    [
        (plan(not_before=NOW - DAY), "act", None),
        (plan(not_before=NOW), "act", None),
        (plan(not_before=NOW + SECOND), "wait", NOW + SECOND),
        (plan(window=Window()), "act", None),
        (plan(window=AT_TWO), "wait", TWO_O_CLOCK),
        (plan(window=AT_TWO, not_before=NOW + timedelta(minutes=130)), "wait", NOW + timedelta(minutes=130)),
        (plan(window=AT_TWO, not_before=NOW + timedelta(minutes=181)), "wait", TWO_O_CLOCK + DAY),
        (plan(window=NEVER), "to stalled", None),
    ],
    ids=[
        "not-before past",
        "not-before now",
        "not-before to come",
        "window open",
        "window to open",
        "not-before within the window",
        "not-before after the window",
        "window never opens",
    ],
)
def test_step_scheduled_waits_for_not_before_and_its_window(asked: Plan, expected: str, until: datetime | None) -> None:
    found = step(S.SCHEDULED, plan=asked, deadline=NOW + 10 * DAY)
    assert told(found) == expected
    assert getattr(found, "until", None) == until


def test_step_scheduled_within_its_window_begins() -> None:
    assert told(step(S.SCHEDULED, TWO_O_CLOCK, plan=plan(window=AT_TWO))) == "act"
    assert told(step(S.SCHEDULED, TWO_O_CLOCK - SECOND, plan=plan(window=AT_TWO))) == "wait"


@pytest.mark.parametrize("state", [S.STAGED, S.PUBLISHING, S.AWAITING_PROOF, S.OVERLAP, S.QUARANTINE])
def test_step_begun_is_not_held_up_by_a_window(state: RotationState) -> None:
    """A window is for the beginning: a rotation halfway through is not left there for the night."""
    known = {"acknowledged_at": NOW, "is_accepted": True, "is_delivered": True, "observed_through": NOW}
    assert told(step(state, plan=plan(window=NEVER), replacement=used(1, 1, NOW), **known)).startswith("to ")


# --- staged and publishing --------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_accepted", "expected"), [(False, "wait"), (True, "to publishing")])
def test_step_staged_waits_until_every_verifier_accepts(is_accepted: bool, expected: str) -> None:
    """Nobody is given a key that some verifier would still refuse."""
    assert told(step(S.STAGED, is_accepted=is_accepted, is_delivered=True)) == expected


@pytest.mark.parametrize(
    ("is_delivered", "is_notified", "expected"),
    [
        (False, False, "act"),
        (False, True, "act"),
        (True, False, "wait"),
        (True, True, "to awaiting_proof"),
    ],
)
def test_step_publishing_goes_on_once_it_is_delivered_and_told(
    is_delivered: bool, is_notified: bool, expected: str
) -> None:
    """Telling comes after delivering: the merchant who is told finds the key where they read it."""
    assert told(step(S.PUBLISHING, is_delivered=is_delivered, is_notified=is_notified)) == expected


@pytest.mark.parametrize(("is_notified", "expected"), [(False, "to stalled"), (True, "to awaiting_proof")])
def test_step_publishing_stalls_when_nobody_will_be_told_any_more(is_notified: bool, expected: str) -> None:
    assert told(step(S.PUBLISHING, is_delivered=True, is_notified=is_notified, notification_failed=True)) == expected


# --- public keys ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("retire_at", "expected", "until"),
    [
        (None, "wait", None),
        (NOW + SECOND, "wait", NOW + SECOND),
        (NOW, "to quarantine", None),
        (NOW - DAY, "to quarantine", None),
    ],
)
def test_step_public_overlap_ends_on_its_approved_date_and_only_then(
    retire_at: datetime | None, expected: str, until: datetime | None
) -> None:
    """Neither silence nor a deadline retires what shipped apps hold, and no traffic keeps it."""
    for seen in (NOW, NOW - 300 * DAY, None):
        found = step(
            S.OVERLAP,
            kind=KeyKind.PUBLIC,
            deadline=None,
            retire_at=retire_at,
            predecessor=KeyFacts(K.ACTIVE, last_used_at=seen),
            observed_through=NOW,
        )
        assert told(found) == expected
        assert getattr(found, "until", None) == until


def test_step_public_overlap_has_no_end_of_its_own() -> None:
    """Without a date it stays, for years, and pages nobody."""
    for days in (1, 400, 4000):
        found = step(S.OVERLAP, NOW + days * DAY, kind=KeyKind.PUBLIC, deadline=None, observed_through=NOW + days * DAY)
        assert told(found) == "wait"


# --- revoking ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("material_destroyed", "expected"), [(False, "act"), (True, "to completed")])
def test_step_revoking_is_done_when_the_backend_s_copy_is_destroyed(material_destroyed: bool, expected: str) -> None:
    key = KeyFacts(K.DEACTIVATED, material_destroyed=material_destroyed)
    assert told(step(S.REVOKING, predecessor=key)) == expected
    assert told(step(S.REVOKING, NOW + 9999 * DAY, predecessor=key)) == expected


# --- rolling back -----------------------------------------------------------------------------------------

BACK = {"written_back_at": ENTERED, "observed_through": NOW}
"""The predecessor was delivered again when the roll-back began, and all uses are reported."""

LONG_AGO = NOW - 2 * QUIET


def test_step_rolling_back_writes_the_predecessor_first() -> None:
    """Before anything is waited for, the merchant reads a key that stays."""
    assert told(step(S.ROLLING_BACK, written_back_at=None, observed_through=NOW)) == "act"


@pytest.mark.parametrize(
    ("old", "new", "acknowledged_at", "expected"),
    [
        (ACTIVE, ACTIVE, None, "to rolling_back"),
        (used(1, 1, NOW), used(1, 1, NOW - QUIET), None, "to rolling_back"),
        (used(1, 1, NOW), used(1, 1, NOW - QUIET + SECOND), None, "wait"),
        (used(1, 1, LONG_AGO), used(1, 1, NOW - QUIET), None, "wait"),
        (ACTIVE, used(1, 1, NOW - QUIET), None, "wait"),
        (used(1, 1, LONG_AGO), ACTIVE, NOW - QUIET, "wait"),
        (used(1, 1, NOW - QUIET), ACTIVE, NOW - QUIET, "to rolling_back"),
        (used(1, 1, NOW), used(1, 1, LONG_AGO), NOW - QUIET + SECOND, "wait"),
    ],
    ids=[
        "nobody had the replacement in use",
        "back on the predecessor, replacement silent",
        "replacement used a second too late",
        "predecessor not used since",
        "predecessor not used at all",
        "acknowledged, and not back",
        "acknowledged, and back",
        "acknowledged a second too late",
    ],
)
def test_step_rolling_back_retires_the_replacement_by_the_same_silence(
    old: KeyFacts, new: KeyFacts, acknowledged_at: datetime | None, expected: str
) -> None:
    """The merchant may use the replacement already: it goes only when they are seen to be back and it is silent."""
    found = step(S.ROLLING_BACK, predecessor=old, replacement=new, acknowledged_at=acknowledged_at, **BACK)
    assert told(found) == expected


@pytest.mark.parametrize("observed", [None, ENTERED, ENTERED + QUIET - SECOND])
def test_step_rolling_back_silence_is_observed_too(observed: datetime | None) -> None:
    assert told(step(S.ROLLING_BACK, **{**BACK, "observed_through": observed})) == "wait"


@pytest.mark.parametrize(
    ("tried_at", "expected"),
    [(None, "to rolled_back"), (NOW - QUARANTINE, "to rolled_back"), (NOW - QUARANTINE + SECOND, "wait")],
)
def test_step_rolling_back_ends_after_a_quarantine_without_attempts(tried_at: datetime | None, expected: str) -> None:
    quarantined = KeyFacts(K.SUSPENDED, tried_at=tried_at)
    assert told(step(S.ROLLING_BACK, replacement=quarantined, quarantined_at=ENTERED, **BACK)) == expected


def test_step_rolling_back_takes_nothing_away_while_the_predecessor_is_not_good() -> None:
    """Whatever was wrong with it in between: the replacement stays as long as it is the only good key."""
    for key, expected in (
        (SUSPENDED, "to stalled"),
        (KeyFacts(K.COMPROMISED), "to publishing"),
        (KeyFacts(K.ACTIVE, is_expired=True), "to publishing"),
    ):
        assert told(step(S.ROLLING_BACK, predecessor=key, **BACK)) == expected
        quarantined = {**BACK, "replacement": SUSPENDED, "quarantined_at": ENTERED}
        assert told(step(S.ROLLING_BACK, predecessor=key, **quarantined)) == expected


def test_step_rolling_back_stalls_at_its_deadline_unless_it_only_waits_for_the_quarantine() -> None:
    """A way back on which nobody calls is not waited for unseen."""
    late = {"written_back_at": ENTERED, "deadline": NOW}
    assert told(step(S.ROLLING_BACK, NOW, **late)) == "to stalled"
    suspended = replace(ACTIVE, state=K.SUSPENDED)
    assert told(step(S.ROLLING_BACK, NOW, **late, replacement=suspended, quarantined_at=ENTERED)) == "wait"


# --- each state says one thing ----------------------------------------------------------------------------


@pytest.mark.parametrize("state", OPEN)
def test_step_every_state_has_its_way_forward_and_says_what_it_waits_for(state: RotationState) -> None:
    for is_there in (True, False):
        found = step(state, is_accepted=is_there, is_delivered=is_there, observed_through=None)
        assert found.why if isinstance(found, Move) else found.waiting_for
        if isinstance(found, RotationAction):
            assert state in {S.SCHEDULED, S.EMERGENCY, S.PUBLISHING, S.ROLLING_BACK, S.REVOKING}


def test_step_says_times_in_utc() -> None:
    found = step(S.SCHEDULED, plan=plan(not_before=datetime(2026, 11, 22, 9, 30, tzinfo=UTC)), deadline=NOW + 9 * DAY)
    assert isinstance(found, Wait)
    assert found.waiting_for == "its start time, 2026-11-22 09:30:00 UTC"


def test_situations_cover_every_state() -> None:
    """What the tests begin with has a replacement exactly where the engine has made one."""
    assert set(MADE) == set(OPEN) - BEFORE_APPROVAL - {S.SCHEDULED, S.EMERGENCY}
    assert PLAN.deadline is not None
