"""The timeline of a rotation's page: where it stands on its way, forward, back, or where it ended before its time."""

from datetime import UTC, datetime
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

WAY = (
    *(S.REQUESTED, S.AWAITING_APPROVAL, S.SCHEDULED, S.STAGED, S.PUBLISHING, S.AWAITING_PROOF),
    *(S.OVERLAP, S.QUARANTINE, S.REVOKING, S.COMPLETED),
)
FORWARD = [state.value.replace("_", " ") for state in WAY]


def told(state: S, **columns: Any) -> list[tuple[str, str]]:
    row = Rotation(state=state, approvals_needed=1, created_at=AT, entered_at=AT, predecessor=OLD_KEY, **columns)
    return [(step.label, step.place) for step in steps_of(row)]


def way(*labels: str, then: str) -> list[tuple[str, str]]:
    """Done up to the last label, of which `then` is told."""
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
def test_timeline_forward_shows_what_is_done_and_what_is_ahead(state: S, columns: dict[str, Any]) -> None:
    shown = told(state, **columns)
    here = FORWARD.index(state.value.replace("_", " "))
    assert shown == [
        (label, "done" if place < here else "current" if place == here else "ahead")
        for place, label in enumerate(FORWARD)
    ]


def test_timeline_of_a_completed_rotation_is_done_throughout() -> None:
    assert told(S.COMPLETED, **QUARANTINED, closed_at=AT) == way(*FORWARD, then="done")


def test_timeline_of_one_that_completed_early_claims_nothing_that_was_not_seen() -> None:
    """The predecessor was revoked by hand: there was no silence and no quarantine."""
    assert told(S.COMPLETED, **DELIVERED, closed_at=AT) == way(*FORWARD[:6], "completed", then="done")


@pytest.mark.parametrize("state", [S.REJECTED, S.EXPIRED, S.CANCELLED])
def test_timeline_of_one_that_ended_stops_there(state: S) -> None:
    assert told(state, closed_at=AT) == way("requested", "awaiting approval", state.value, then="stopped")


def test_timeline_of_a_stalled_rotation_marks_where() -> None:
    shown = told(S.STALLED, stalled_from=S.PUBLISHING, **PUBLISHED)
    assert ("publishing: stalled", "stopped") in shown
    assert shown[-1] == ("completed", "ahead")


def test_timeline_of_a_roll_back_shows_how_far_it_had_come() -> None:
    shown = told(S.ROLLING_BACK, **USED)
    assert shown == [*way(*FORWARD[:7], "rolling back", then="current"), ("rolled back", "ahead")]
    assert told(S.ROLLED_BACK, **USED) == way(*FORWARD[:7], "rolling back", "rolled back", then="done")
    stalled = told(S.STALLED, stalled_from=S.ROLLING_BACK, **USED)
    assert stalled[-2:] == [("rolling back: stalled", "stopped"), ("rolled back", "ahead")]


def test_timeline_of_an_emergency_begins_with_it() -> None:
    shown = told(S.EMERGENCY)
    assert shown[:3] == [("requested", "done"), ("emergency", "current"), ("staged", "ahead")]
    assert [label for label, _ in shown] == ["requested", "emergency", "staged", "publishing", "completed"]
    assert told(S.STALLED, stalled_from=S.EMERGENCY)[1] == ("emergency: stalled", "stopped")
