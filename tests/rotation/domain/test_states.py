"""The states of a rotation and its forward path, step by step.

Events are in test_events, proof in test_proofs, silence and quarantine in test_silence.
"""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest

from keyvault.domain.keys import KeyKind
from rotation.domain.events import OPEN, RotationState
from rotation.domain.pacing import FAILED
from rotation.domain.policy import Plan
from rotation.domain.states import (
    ABANDONED,
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
    outcome_of,
    plan,
    step,
    used,
)

WAY = [
    *(S.REQUESTED, S.AWAITING_APPROVAL, S.SCHEDULED, S.STAGED, S.PUBLISHING),
    *(S.AWAITING_PROOF, S.OVERLAP, S.QUARANTINE, S.REVOKING, S.COMPLETED),
]
SIDE = [S.REJECTED, S.EXPIRED, S.CANCELLED, S.STALLED, S.ROLLING_BACK, S.ROLLED_BACK, S.EMERGENCY]

# --- states and transitions -------------------------------------------------------------------------------


def test_states_are_the_documented_ones() -> None:
    assert [state.value for state in WAY] == [
        *("requested", "awaiting_approval", "scheduled", "staged", "publishing"),
        *("awaiting_proof", "overlap", "quarantine", "revoking", "completed"),
    ]
    assert [state.value for state in SIDE] == [
        *("rejected", "expired", "cancelled", "stalled", "rolling_back", "rolled_back", "emergency"),
    ]
    assert set(S) == {*WAY, *SIDE} == set(TRANSITIONS)
    assert {S.COMPLETED, S.ROLLED_BACK, S.REJECTED, S.EXPIRED, S.CANCELLED} == CLOSED
    assert {S.ROLLED_BACK, S.REJECTED, S.EXPIRED, S.CANCELLED} == ABANDONED
    assert ABANDONED | {S.ROLLING_BACK} == FAILED


def test_state_groups_follow_the_forward_path() -> None:
    unpublished = {S.SCHEDULED, S.EMERGENCY, S.STAGED, S.PUBLISHING}
    delivered = {S.AWAITING_PROOF, S.OVERLAP, S.QUARANTINE, S.REVOKING}
    assert BEFORE_APPROVAL | unpublished | delivered | {S.ROLLING_BACK} == set(OPEN)
    assert {S.STALLED} | {state for state in S if S.STALLED in TRANSITIONS[state]} == {S.STALLED, *STALLING}


def test_transitions_follow_the_forward_path_step_by_step() -> None:
    for state, following in pairwise(WAY[1:]):
        assert following in TRANSITIONS[state]


def test_transitions_to_quarantine_and_revoking_have_one_predecessor() -> None:
    """The old key is retired through proof, silence and quarantine. (A stalled rotation resumes where it stopped.)"""
    into = {state: {old for old in S if state in TRANSITIONS[old]} for state in S}
    assert into[S.REVOKING] == {S.QUARANTINE}
    assert into[S.QUARANTINE] == {S.OVERLAP, S.STALLED}
    assert into[S.OVERLAP] == {S.AWAITING_PROOF, S.QUARANTINE, S.STALLED}
    assert into[S.AWAITING_PROOF] == {S.PUBLISHING, S.STALLED}
    assert into[S.ROLLED_BACK] == {S.ROLLING_BACK, S.STALLED}
    assert into[S.STAGED] == {S.SCHEDULED, S.EMERGENCY, S.STAGED, S.PUBLISHING, S.STALLED}


def test_transitions_revoking_is_final() -> None:
    """Once the old key is revoked, the rotation can neither stall nor roll back."""
    assert TRANSITIONS[S.REVOKING] == {S.COMPLETED}


def test_transitions_from_a_closed_state_do_not_exist() -> None:
    assert [TRANSITIONS[state] for state in CLOSED] == [frozenset()] * len(CLOSED)


def test_transitions_every_open_state_can_end() -> None:
    """No rotation is stuck: a closed state is reachable from every open one."""
    ends = set(CLOSED)
    while more := {state for state in S if state not in ends and TRANSITIONS[state] & ends}:
        ends |= more
    assert ends == set(S)


# --- closed, and stalled ----------------------------------------------------------------------------------


@pytest.mark.parametrize("state", sorted(CLOSED))
@dead
def test_step_of_a_closed_rotation_is_none(state: RotationState, key: KeyFacts) -> None:
    """No event, time or evidence reopens a closed rotation."""
    for far in (NOW, NOW + 10_000 * DAY, NOW - 10_000 * DAY):
        found = step(state, far, predecessor=key, replacement=key, acknowledged_at=NOW, observed_through=far)
        assert isinstance(found, Wait)
        assert found.until is None


@pytest.mark.parametrize("stalled_from", STALLING)
@pytest.mark.parametrize("key", [ACTIVE, SUSPENDED], ids=lambda key: key.state)
def test_step_of_a_stalled_rotation_waits_for_an_operator(stalled_from: RotationState, key: KeyFacts) -> None:
    """While both keys live, neither time nor evidence resumes a stalled rotation."""
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
    assert outcome_of(found) == expected
    if isinstance(found, Wait):
        assert found.until == expires_at


@pytest.mark.parametrize(
    ("has_approval", "expires_at", "expected"),
    [(True, NOW - DAY, "act"), (False, NOW + SECOND, "wait"), (False, NOW, "to expired"), (False, None, "wait")],
)
def test_step_emergency_creates_the_key_immediately_after_approval(
    has_approval: bool, expires_at: datetime | None, expected: str
) -> None:
    """Approval gates the new key here too, but no window, not-before or deadline delays it."""
    found = step(
        S.EMERGENCY,
        has_approval=has_approval,
        approval_expires_at=expires_at,
        plan=plan(not_before=NOW + DAY, window=NEVER),
        deadline=NOW - DAY,
    )
    assert outcome_of(found) == expected


def test_step_emergency_of_an_offboarded_merchant_is_canceled() -> None:
    """Approved or not, an offboarded merchant's credentials get no new keys."""
    for has_approval in (True, False):
        assert outcome_of(step(S.EMERGENCY, has_left=True, has_approval=has_approval)) == "to cancelled"
        stalled = {"stalled_from": S.EMERGENCY, "has_left": True, "has_approval": has_approval}
        assert outcome_of(step(S.STALLED, **stalled)) == "to cancelled"


# --- scheduled --------------------------------------------------------------------------------------------

NEVER = Window(blackouts=(Blackout(NOW - DAY, NOW + 9999 * DAY),))
AT_TWO = Window(weekdays=(0, 1, 2, 3, 4, 5, 6), opens=14 * 60, closes=15 * 60)
"""From 14:00 to 15:00 UTC; the current time is noon."""

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
    assert outcome_of(found) == expected
    assert getattr(found, "until", None) == until


def test_step_scheduled_within_its_window_begins() -> None:
    assert outcome_of(step(S.SCHEDULED, TWO_O_CLOCK, plan=plan(window=AT_TWO))) == "act"
    assert outcome_of(step(S.SCHEDULED, TWO_O_CLOCK - SECOND, plan=plan(window=AT_TWO))) == "wait"


@pytest.mark.parametrize("state", [S.STAGED, S.PUBLISHING, S.AWAITING_PROOF, S.OVERLAP, S.QUARANTINE])
def test_step_of_a_started_rotation_ignores_the_window(state: RotationState) -> None:
    """A window applies to the start only: a running rotation is not paused overnight."""
    known = {"acknowledged_at": NOW, "is_accepted": True, "is_delivered": True, "observed_through": NOW}
    assert outcome_of(step(state, plan=plan(window=NEVER), replacement=used(1, 1, NOW), **known)).startswith("to ")


# --- staged and publishing --------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_accepted", "expected"), [(False, "wait"), (True, "to publishing")])
def test_step_staged_waits_until_every_verifier_accepts(is_accepted: bool, expected: str) -> None:
    """No merchant gets a key that some verifier would still refuse."""
    assert outcome_of(step(S.STAGED, is_accepted=is_accepted, is_delivered=True)) == expected


@pytest.mark.parametrize(
    ("is_delivered", "is_notified", "expected"),
    [
        (False, False, "act"),
        (False, True, "act"),
        (True, False, "wait"),
        (True, True, "to awaiting_proof"),
    ],
)
def test_step_publishing_continues_once_delivered_and_notified(
    is_delivered: bool, is_notified: bool, expected: str
) -> None:
    """Notification follows delivery, so the notified merchant finds the key where it reads."""
    assert outcome_of(step(S.PUBLISHING, is_delivered=is_delivered, is_notified=is_notified)) == expected


@pytest.mark.parametrize(("is_notified", "expected"), [(False, "to stalled"), (True, "to awaiting_proof")])
def test_step_publishing_stalls_when_notification_is_impossible(is_notified: bool, expected: str) -> None:
    assert (
        outcome_of(step(S.PUBLISHING, is_delivered=True, is_notified=is_notified, notification_failed=True)) == expected
    )


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
def test_step_public_overlap_ends_only_on_its_approved_date(
    retire_at: datetime | None, expected: str, until: datetime | None
) -> None:
    """Neither silence nor a deadline retires a key in shipped apps, and no traffic extends it."""
    for seen in (NOW, NOW - 300 * DAY, None):
        found = step(
            S.OVERLAP,
            kind=KeyKind.PUBLIC,
            deadline=None,
            retire_at=retire_at,
            predecessor=KeyFacts(K.ACTIVE, last_used_at=seen),
            observed_through=NOW,
        )
        assert outcome_of(found) == expected
        assert getattr(found, "until", None) == until


def test_step_public_overlap_without_a_date_never_ends() -> None:
    """Without a date it stays in overlap and raises no alarm."""
    for days in (1, 400, 4000):
        found = step(S.OVERLAP, NOW + days * DAY, kind=KeyKind.PUBLIC, deadline=None, observed_through=NOW + days * DAY)
        assert outcome_of(found) == "wait"


# --- revoking ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("material_destroyed", "expected"), [(False, "act"), (True, "to completed")])
def test_step_revoking_completes_when_the_backend_copy_is_destroyed(material_destroyed: bool, expected: str) -> None:
    key = KeyFacts(K.DEACTIVATED, material_destroyed=material_destroyed)
    assert outcome_of(step(S.REVOKING, predecessor=key)) == expected
    assert outcome_of(step(S.REVOKING, NOW + 9999 * DAY, predecessor=key)) == expected


# --- rolling back -----------------------------------------------------------------------------------------

BACK = {"written_back_at": ENTERED, "observed_through": NOW}
"""The predecessor was delivered again when the rollback began, and all uses are reported."""

LONG_AGO = NOW - 2 * QUIET


def test_step_rolling_back_writes_the_predecessor_first() -> None:
    """The merchant reads a lasting key before the rotation waits for anything."""
    assert outcome_of(step(S.ROLLING_BACK, written_back_at=None, observed_through=NOW)) == "act"


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
        "replacement never in use",
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
    """The merchant may already use the replacement: it is retired only once it is silent and the predecessor is in
    use.
    """
    found = step(S.ROLLING_BACK, predecessor=old, replacement=new, acknowledged_at=acknowledged_at, **BACK)
    assert outcome_of(found) == expected


@pytest.mark.parametrize("observed", [None, ENTERED, ENTERED + QUIET - SECOND])
def test_step_rolling_back_requires_observed_silence(observed: datetime | None) -> None:
    assert outcome_of(step(S.ROLLING_BACK, **{**BACK, "observed_through": observed})) == "wait"


@pytest.mark.parametrize(
    ("tried_at", "expected"),
    [(None, "to rolled_back"), (NOW - QUARANTINE, "to rolled_back"), (NOW - QUARANTINE + SECOND, "wait")],
)
def test_step_rolling_back_ends_after_a_quarantine_without_attempts(tried_at: datetime | None, expected: str) -> None:
    quarantined = KeyFacts(K.SUSPENDED, tried_at=tried_at)
    assert outcome_of(step(S.ROLLING_BACK, replacement=quarantined, quarantined_at=ENTERED, **BACK)) == expected


def test_step_rolling_back_keeps_the_replacement_without_a_good_predecessor() -> None:
    """The replacement stays as long as it is the only good key."""
    for key, expected in (
        (SUSPENDED, "to stalled"),
        (KeyFacts(K.COMPROMISED), "to publishing"),
        (KeyFacts(K.ACTIVE, is_expired=True), "to publishing"),
    ):
        assert outcome_of(step(S.ROLLING_BACK, predecessor=key, **BACK)) == expected
        quarantined = {**BACK, "replacement": SUSPENDED, "quarantined_at": ENTERED}
        assert outcome_of(step(S.ROLLING_BACK, predecessor=key, **quarantined)) == expected


def test_step_rolling_back_stalls_at_its_deadline_outside_quarantine() -> None:
    """A rollback without traffic does not wait unnoticed."""
    late = {"written_back_at": ENTERED, "deadline": NOW}
    assert outcome_of(step(S.ROLLING_BACK, NOW, **late)) == "to stalled"
    suspended = replace(ACTIVE, state=K.SUSPENDED)
    assert outcome_of(step(S.ROLLING_BACK, NOW, **late, replacement=suspended, quarantined_at=ENTERED)) == "wait"


@pytest.mark.parametrize("state", [S.QUARANTINE, S.ROLLING_BACK, S.STALLED])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"replacement": KeyFacts(K.COMPROMISED)},
        {"predecessor": KeyFacts(K.SUSPENDED, tried_at=NOW, tried_by_known_at=NOW), "is_proved": True},
        {"deadline": NOW},
    ],
)
def test_step_with_a_held_key_waits_for_its_release(state: RotationState, changes: dict[str, object]) -> None:
    """Neither silence nor an event ends a quarantine that an operator holds."""
    held = {"predecessor": SUSPENDED, "quarantined_at": ENTERED, **BACK, "is_held": True, **changes}
    found = step(state, **held)
    assert isinstance(found, Wait)
    assert found.waiting_for == "an operator to release the held key"


# --- every state ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", OPEN)
def test_step_every_state_moves_forward_and_names_its_wait(state: RotationState) -> None:
    for is_there in (True, False):
        found = step(state, is_accepted=is_there, is_delivered=is_there, observed_through=None)
        assert found.why if isinstance(found, Move) else found.waiting_for
        if isinstance(found, RotationAction):
            assert state in {S.SCHEDULED, S.EMERGENCY, S.PUBLISHING, S.ROLLING_BACK, S.REVOKING}


def test_step_states_times_in_utc() -> None:
    found = step(S.SCHEDULED, plan=plan(not_before=datetime(2026, 11, 22, 9, 30, tzinfo=UTC)), deadline=NOW + 9 * DAY)
    assert isinstance(found, Wait)
    assert found.waiting_for == "its start time, 2026-11-22 09:30:00 UTC"


def test_base_facts_cover_every_state() -> None:
    """The base facts have a replacement exactly in the states in which the engine has created one."""
    assert set(MADE) == set(OPEN) - BEFORE_APPROVAL - {S.SCHEDULED, S.EMERGENCY}
    assert PLAN.deadline is not None
