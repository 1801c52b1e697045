"""The fault experiments judge each response by when the key's end had certainly returned."""

import http.client
from datetime import datetime

import pytest

from keyvault.services.usage.recorder import UsageLog
from rotation.domain.events import RotationState as S
from tests.clocks import Clock
from tests.faults.expected_verdicts import judge
from tests.faults.traffic import VerificationAnswer
from tests.rotation.steps import advance, overlapping, quarantined, revoke, wait

pytestmark = pytest.mark.django_db


def are_allowed_wrongly(key_id: str, at: datetime, seconds: list[float], returned: dict[str, float]) -> list[float]:
    """Return those of these times after `at` at which no request that begins then may be allowed."""
    sent = [at.timestamp() + each for each in seconds]
    answers = [VerificationAnswer(key_id, each, each + 0.002, False, http.client.OK, "") for each in sent]
    return [after for after, answer in zip(seconds, answers, strict=True) if judge([answer], returned).wrongly_allowed]


def test_persons_revocation_counts_from_its_return_not_from_a_workers_turn_beside_it(
    clock: Clock, verifier: UsageLog
) -> None:
    rotation = overlapping(clock, verifier)
    key_id, at = rotation.predecessor_id, clock()
    revoke(rotation.predecessor, clock)
    # As by a worker that read its clock between the person's clock and the commit.
    assert advance(rotation, clock, 0.007).entered_at > at
    returned = {key_id: at.timestamp() + 0.5}
    assert are_allowed_wrongly(key_id, at, [0.014, 0.499, 0.501], returned) == [0.501]
    assert are_allowed_wrongly(key_id, at, [19.9, 20.1], {}) == [20.1], "an unknown return: the database timeout"


def test_workers_suspension_has_returned_before_the_next_step_of_its_rotation(clock: Clock, verifier: UsageLog) -> None:
    rotation = quarantined(clock, verifier)
    key_id, at = rotation.predecessor_id, clock()
    rotation = wait(rotation, clock, verifier, 6)
    assert rotation.state == S.COMPLETED
    assert are_allowed_wrongly(key_id, at, [8.9, 9.1], {}) == [9.1]
