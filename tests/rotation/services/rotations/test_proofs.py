"""Proof that a replacement is in use: by acknowledgement, traffic, both, or an operator's confirmation."""

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from keyvault.domain.keys import KeyKind
from rotation.domain.plan_fields import Proof
from rotation.domain.policy import Plan
from rotation.domain.states import KeyFacts, Wait
from tests.rotation.situation import ACTIVE, DAY, NOW, SECOND, S, outcome_of, plan, step, used

SOAKED = NOW - timedelta(seconds=60)
TRAFFIC, BOTH = plan(proof=Proof.TRAFFIC), plan(proof=Proof.BOTH)
ENOUGH, TOO_FEW = used(5, 2, SOAKED), used(4, 2, SOAKED)


@pytest.mark.parametrize(
    ("asked", "replacement", "acknowledged_at", "expected"),
    [
        (plan(proof=Proof.ACK), ACTIVE, None, "wait"),
        (plan(proof=Proof.ACK), used(10**6, 10**3, SOAKED - DAY), None, "wait"),
        (plan(proof=Proof.ACK), ACTIVE, NOW, "to overlap"),
        (TRAFFIC, ACTIVE, None, "wait"),
        (TRAFFIC, ACTIVE, NOW, "wait"),
        (TRAFFIC, ENOUGH, None, "to overlap"),
        (TRAFFIC, TOO_FEW, None, "wait"),
        (TRAFFIC, used(5, 1, SOAKED), None, "wait"),
        (TRAFFIC, used(5, 2, SOAKED + SECOND), None, "wait"),
        (TRAFFIC, used(10**6, 1, SOAKED), None, "wait"),
        (plan(proof=Proof.TRAFFIC, soak_seconds=0), used(5, 2, NOW), None, "to overlap"),
        (BOTH, ACTIVE, None, "wait"),
        (BOTH, ACTIVE, NOW, "wait"),
        (BOTH, ENOUGH, None, "wait"),
        (BOTH, TOO_FEW, NOW, "wait"),
        (BOTH, ENOUGH, NOW, "to overlap"),
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
        "both: nothing",
        "both: ack alone",
        "both: traffic alone",
        "both: ack and too few",
        "both: ack and traffic",
    ],
)
def test_proof_is_the_one_that_was_approved(
    asked: Plan, replacement: KeyFacts, acknowledged_at: datetime | None, expected: str
) -> None:
    """The replacement counts as in use only by the plan's own policy."""
    found = step(S.AWAITING_PROOF, plan=asked, replacement=replacement, acknowledged_at=acknowledged_at)
    assert outcome_of(found) == expected


@pytest.mark.parametrize("proof", [Proof.ACK, Proof.TRAFFIC, Proof.BOTH])
def test_proof_by_confirmation_is_refused_where_there_is_traffic(proof: Proof) -> None:
    """A credential in use cannot be confirmed past its proof."""
    assert outcome_of(step(S.AWAITING_PROOF, plan=plan(proof=proof), confirmed_at=NOW)) == "wait"


@pytest.mark.parametrize("kind", KeyKind)
def test_proof_by_confirmation_is_accepted_without_traffic(kind: KeyKind) -> None:
    asked = plan(proof=Proof.CONFIRMATION)
    known = {"plan": asked, "kind": kind, "replacement": ENOUGH, "acknowledged_at": NOW}
    assert outcome_of(step(S.AWAITING_PROOF, **known)) == "wait"
    assert outcome_of(step(S.AWAITING_PROOF, confirmed_at=NOW, **known)) == "to overlap"


@pytest.mark.parametrize("proof", Proof)
@pytest.mark.parametrize("how", ["acknowledged_at", "confirmed_at"])
def test_proof_of_a_dormant_credential_is_an_acknowledgement_or_a_confirmation(proof: Proof, how: str) -> None:
    """A credential without traffic does not wait for traffic."""
    asked = plan(proof=proof, is_dormant=True)
    assert outcome_of(step(S.AWAITING_PROOF, plan=asked)) == "wait"
    assert outcome_of(step(S.AWAITING_PROOF, plan=asked, **{how: NOW})) == "to overlap"


def test_proof_of_a_dormant_credential_with_new_traffic_is_that_traffic() -> None:
    assert outcome_of(step(S.AWAITING_PROOF, plan=plan(proof=Proof.TRAFFIC, is_dormant=True), replacement=ENOUGH)) == (
        "to overlap"
    )


def test_proof_of_a_public_key_is_never_an_acknowledgement() -> None:
    """Every user of the app could send it."""
    asked = plan(proof=Proof.CONFIRMATION, is_dormant=True)
    known = {"plan": asked, "kind": KeyKind.PUBLIC, "deadline": None, "acknowledged_at": NOW}
    assert outcome_of(step(S.AWAITING_PROOF, **known)) == "wait"


@pytest.mark.parametrize("proof", Proof)
@pytest.mark.parametrize("is_dormant", [True, False])
def test_proof_that_is_missing_is_named(proof: Proof, is_dormant: bool) -> None:
    """The text names what the rotation waits for and every sufficient proof."""
    found = step(S.AWAITING_PROOF, plan=plan(proof=proof, is_dormant=is_dormant))
    assert isinstance(found, Wait)
    phrases = {
        Proof.ACK: ["acknowledge"],
        Proof.TRAFFIC: ["traffic", "0 of 5", "0 of 2"],
        Proof.BOTH: ["traffic", "0 of 5", "0 of 2", "acknowledge"],
        Proof.CONFIRMATION: ["operator"],
    }[proof] + (["operator", "acknowledge"] if is_dormant else [])
    assert [phrase for phrase in phrases if phrase not in found.waiting_for] == []


@pytest.mark.parametrize(
    ("replacement", "acknowledged_at", "expected"),
    [
        (ACTIVE, None, "traffic on the replacement: 0 of 5 authentications, 0 of 2 sources, 0 of 1 minutes; and {}"),
        (
            replace(used(10**6, 4, SOAKED), minutes=0),
            None,
            "traffic on the replacement: 5 of 5 authentications, 2 of 2 sources, 0 of 1 minutes; and {}",
        ),
        (used(5, 2, SOAKED + SECOND), None, "{}"),
        (ENOUGH, None, "{}"),
        (used(5, 2, SOAKED + SECOND), NOW, "the replacement to be in use for its soak time"),
    ],
    ids=["nothing", "more than required", "not soaked", "soaked", "acknowledged, not soaked"],
)
def test_proof_of_both_names_the_acknowledgement_until_it_is_given(
    replacement: KeyFacts, acknowledged_at: datetime | None, expected: str
) -> None:
    """The merchant may acknowledge before the soak time has passed."""
    found = step(S.AWAITING_PROOF, plan=BOTH, replacement=replacement, acknowledged_at=acknowledged_at)
    assert isinstance(found, Wait)
    assert found.waiting_for == expected.format("the merchant to acknowledge with the replacement")


def test_proof_soak_names_the_next_check() -> None:
    found = step(S.AWAITING_PROOF, plan=TRAFFIC, replacement=used(5, 2, NOW - SECOND))
    assert isinstance(found, Wait)
    assert found.until == NOW + timedelta(seconds=59)


def test_proof_soak_counts_from_the_first_use() -> None:
    busy = used(10**6, 50, SOAKED, NOW)
    assert outcome_of(step(S.AWAITING_PROOF, plan=TRAFFIC, replacement=busy)) == "to overlap"
    late = used(10**6, 50, SOAKED + SECOND, NOW)
    assert outcome_of(step(S.AWAITING_PROOF, plan=TRAFFIC, replacement=late)) == "wait"


@pytest.mark.parametrize(
    ("soak_seconds", "minutes", "expected"),
    [
        (0, 0, "wait"),
        (0, 1, "to overlap"),
        (59, 1, "to overlap"),
        (120, 1, "wait"),
        (120, 2, "to overlap"),
        (600, 9, "wait"),
        (600, 10, "to overlap"),
        (86_400, 10, "to overlap"),
    ],
)
def test_proof_by_traffic_is_in_as_many_minutes_as_the_soak_has(soak_seconds: int, minutes: int, expected: str) -> None:
    """One burst, however long ago, does not show that the replacement is in use."""
    burst = replace(used(10**6, 50, NOW - DAY), minutes=minutes)
    asked = plan(proof=Proof.TRAFFIC, soak_seconds=soak_seconds)
    found = step(S.AWAITING_PROOF, plan=asked, replacement=burst)
    assert outcome_of(found) == expected
    if isinstance(found, Wait):
        assert f"{minutes} of {max(1, min(soak_seconds // 60, 10))} minutes" in found.waiting_for


def test_proof_ignores_the_predecessors_traffic() -> None:
    found = step(S.AWAITING_PROOF, plan=TRAFFIC, predecessor=used(10**6, 100, SOAKED - DAY))
    assert outcome_of(found) == "wait"
