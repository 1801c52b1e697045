"""The timeline on a rotation's page: progress forward, in a rollback, or where the rotation ended early."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from keyvault.domain.keys import KeyState
from keyvault.models import Key
from rotation.admin.rotation_sections import steps_of
from rotation.domain.events import RotationState as S
from rotation.models import Rotation

AT = datetime(2026, 11, 21, 12, tzinfo=UTC)
OLD_KEY = Key(key_id="A" * 16, state=KeyState.ACTIVE)
MADE = {"replacement_id": "B" * 16}
PUBLISHED = {**MADE, "accepted_at": AT}
DELIVERED = {**PUBLISHED, "delivered_at": AT}
USED = {**DELIVERED, "used_at": AT}
QUARANTINED = {**USED, "silent_at": AT, "quarantined_at": AT}

PATH = (
    *(S.REQUESTED, S.AWAITING_APPROVAL, S.SCHEDULED, S.STAGED, S.PUBLISHING, S.AWAITING_PROOF),
    *(S.OVERLAP, S.QUARANTINE, S.REVOKING, S.COMPLETED),
)
FORWARD = [state.value.replace("_", " ") for state in PATH]


def timeline_of(state: S, **columns: Any) -> list[tuple[str, str]]:
    row = Rotation(state=state, approvals_needed=1, created_at=AT, entered_at=AT, predecessor=OLD_KEY, **columns)
    return [(step.label, step.place) for step in steps_of(row)]


def steps_to(*labels: str, then: str) -> list[tuple[str, str]]:
    """Return the steps: done up to the last label, whose status is `then`."""
    return [*((label, "done") for label in labels[:-1]), (labels[-1], then)]


@pytest.mark.parametrize(
    ("state", "columns"),
    [
        (S.REQUESTED, {}),
        (S.AWAITING_APPROVAL, {}),
        (S.SCHEDULED, {}),
        (S.STAGED, MADE),
        (S.PUBLISHING, PUBLISHED),
        (S.AWAITING_PROOF, DELIVERED),
        (S.OVERLAP, USED),
        (S.QUARANTINE, QUARANTINED),
        (S.REVOKING, QUARANTINED),
    ],
)
def test_timeline_forward_shows_completed_and_future_steps(state: S, columns: dict[str, Any]) -> None:
    shown = timeline_of(state, **columns)
    here = FORWARD.index(state.value.replace("_", " "))
    assert shown == [
        (label, "done" if place < here else "current" if place == here else "ahead")
        for place, label in enumerate(FORWARD)
    ]


def test_timeline_says_how_long_the_states_took_whose_ends_are_known() -> None:
    columns = {"accepted_at": AT, "delivered_at": AT + timedelta(minutes=2), "used_at": AT + timedelta(days=3)}
    row = Rotation(state=S.OVERLAP, created_at=AT, predecessor=OLD_KEY, **MADE, **columns)
    row.entered_at = AT + timedelta(days=4, minutes=2)
    assert {step.label: step.note for step in steps_of(row) if step.note} == {
        "publishing": "took 2 min",
        "awaiting proof": "took 4 d",
    }
    row.delivered_at = AT - timedelta(minutes=1)
    assert "publishing" not in {step.label for step in steps_of(row) if step.note}


def test_timeline_of_a_completed_rotation_is_fully_done() -> None:
    assert timeline_of(S.COMPLETED, **QUARANTINED, closed_at=AT) == steps_to(*FORWARD, then="done")


def test_timeline_of_an_early_completion_omits_unobserved_steps() -> None:
    """The predecessor was revoked by an operator: there was no silence and no quarantine."""
    assert timeline_of(S.COMPLETED, **DELIVERED, closed_at=AT) == steps_to(*FORWARD[:6], "completed", then="done")


@pytest.mark.parametrize("state", [S.REJECTED, S.EXPIRED, S.CANCELLED])
def test_timeline_of_an_ended_rotation_stops_there(state: S) -> None:
    assert timeline_of(state, closed_at=AT) == steps_to("requested", "awaiting approval", state.value, then="stopped")


def test_timeline_of_a_stalled_rotation_marks_the_step() -> None:
    shown = timeline_of(S.STALLED, stalled_from=S.PUBLISHING, **PUBLISHED)
    assert ("publishing: stalled", "stopped") in shown
    assert shown[-1] == ("completed", "ahead")


def test_timeline_of_a_roll_back_shows_the_steps_reached() -> None:
    shown = timeline_of(S.ROLLING_BACK, **USED)
    assert shown == [*steps_to(*FORWARD[:7], "rolling back", then="current"), ("rolled back", "ahead")]
    assert timeline_of(S.ROLLED_BACK, **USED) == steps_to(*FORWARD[:7], "rolling back", "rolled back", then="done")
    stalled = timeline_of(S.STALLED, stalled_from=S.ROLLING_BACK, **USED)
    assert stalled[-2:] == [("rolling back: stalled", "stopped"), ("rolled back", "ahead")]


def test_timeline_of_an_emergency_starts_with_the_emergency() -> None:
    shown = timeline_of(S.EMERGENCY)
    assert shown[:3] == [("requested", "done"), ("emergency", "current"), ("staged", "ahead")]
    assert [label for label, _ in shown] == ["requested", "emergency", "staged", "publishing", "completed"]
    assert timeline_of(S.STALLED, stalled_from=S.EMERGENCY)[1] == ("emergency: stalled", "stopped")
