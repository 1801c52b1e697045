"""The plan of a rotation: defaults, faults, and the digest that an approval is bound to."""

import json
from dataclasses import MISSING, fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyvault.domain.canonical import canonical_digest
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind
from keyvault.domain.timestamps import format_timestamp
from rotation.domain.plan_fields import (
    FARTHEST,
    FIELDS,
    LONGEST_SECONDS,
    AtDeadline,
    DeliveryChannel,
    Proof,
    Reinstatement,
    default_of,
)
from rotation.domain.policy import (
    APPROVAL_LIFETIME,
    REMINDERS,
    Plan,
    default_deadline_seconds,
    due_reminder,
    find_far_faults,
    find_faults,
)
from rotation.domain.windows import Blackout, Window

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
SANDBOX, PRODUCTION = Environment.SANDBOX, Environment.PRODUCTION
HOUR, DAY = 3_600, 86_400

XMAS = Blackout(NOW + timedelta(days=30), NOW + timedelta(days=40), "holidays")
NIGHTLY = Window("Europe/Athens", (1, 2, 3), 22 * 60, 4 * 60)
DEADLINE = NOW + timedelta(days=45)

PLAN = Plan(
    credential_id="crd_1",
    predecessor_key_id="A" * 16,
    reason="yearly",
    not_before=NOW,
    deadline=DEADLINE,
    proof=Proof.TRAFFIC,
    proof_count=100,
    proof_sources=2,
    soak_seconds=600,
    quiet_seconds=7 * DAY,
    quarantine_seconds=DAY,
)

OTHERWISE: dict[str, list[object]] = {
    "credential_id": ["crd_2"],
    "predecessor_key_id": ["B" * 16],
    "reason": ["leak", ""],
    "not_before": [NOW + timedelta(microseconds=1), NOW - timedelta(days=1)],
    "deadline": [DEADLINE + timedelta(microseconds=1), DEADLINE - timedelta(days=1), None],
    "proof": [Proof.ACK, Proof.BOTH, Proof.CONFIRMATION],
    "proof_count": [99, 101],
    "proof_sources": [1, 3],
    "soak_seconds": [0, 601],
    "quiet_seconds": [1, 7 * DAY - 1],
    "quarantine_seconds": [1, DAY - 1],
    "expires_in_days": [1, 365],
    "predecessor_may_expire": [True],
    "is_dormant": [True],
    "at_deadline": [AtDeadline.REVOKE],
    "reinstatement": [Reinstatement.NEVER],
    "channels": [(), (DeliveryChannel.WEBHOOK,), (DeliveryChannel.SECRET_BACKEND, DeliveryChannel.WEBHOOK)],
    "window": [Window(), NIGHTLY, replace(NIGHTLY, blackouts=(XMAS,)), replace(NIGHTLY, blackouts=(XMAS, XMAS))],
    "retire_at": [NOW, NOW + timedelta(days=1)],
    "late_sources": [{"192.0.2.0/24 job": None}, {"192.0.2.0/24 job": format_timestamp(DEADLINE)}],
    "waived_sources": [("192.0.2.0/24 job",), ("192.0.2.0/24 job", "192.0.2.0/24 shop")],
}

OPTIONAL = [field.name for field in fields(Plan) if field.default is not MISSING]

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
times = st.datetimes(timezones=st.just(UTC))
seconds = st.integers(0, LONGEST_SECONDS)
plans = st.builds(
    Plan,
    credential_id=texts,
    predecessor_key_id=texts,
    reason=texts,
    not_before=times,
    deadline=st.none() | times,
    proof=st.sampled_from(Proof),
    proof_count=seconds,
    proof_sources=seconds,
    soak_seconds=seconds,
    quiet_seconds=seconds,
    quarantine_seconds=seconds,
    expires_in_days=st.none() | st.integers(1, 3650),
    predecessor_may_expire=st.booleans(),
    is_dormant=st.booleans(),
    at_deadline=st.sampled_from(AtDeadline),
    reinstatement=st.sampled_from(Reinstatement),
    channels=st.sampled_from([(), *({(each,) for each in DeliveryChannel}), tuple(DeliveryChannel)]),
    window=st.sampled_from([None, Window(), NIGHTLY, replace(NIGHTLY, blackouts=(XMAS,))]),
    retire_at=st.none() | times,
    waived_sources=st.lists(texts, max_size=3).map(tuple),
)


def changed(**values: Any) -> Plan:
    return replace(PLAN, **values)


def faults(
    plan: Plan,
    environment: Environment = PRODUCTION,
    expires_at: datetime | None = None,
    kind: KeyKind = KeyKind.PRIVATE,
) -> list[str]:
    return [fault.pointer for fault in find_faults(plan, environment, kind, expires_at, NOW)]


# --- defaults ---------------------------------------------------------------------------------------------


def test_defaults_are_the_documented_ones() -> None:
    """5 from 1 without soak and 100 from 2 over 600 s; 1 h and 7 d of quiet; 10 min and 24 h of quarantine."""
    defaults = {
        name: (each.defaults[SANDBOX], each.defaults[PRODUCTION]) for name, each in FIELDS.items() if each.defaults
    }
    assert defaults == {
        "deadline": (7 * DAY, 45 * DAY),
        "proof_count": (5, 100),
        "proof_sources": (1, 2),
        "soak_seconds": (0, 600),
        "quiet_seconds": (HOUR, 7 * DAY),
        "quarantine_seconds": (600, DAY),
    }


@pytest.mark.parametrize("environment", Environment)
def test_defaults_make_a_feasible_plan(environment: Environment) -> None:
    numbers = {name: default_of(name, environment) for name, each in FIELDS.items() if each.defaults}
    deadline = NOW + timedelta(seconds=numbers.pop("deadline"))
    plan = changed(deadline=deadline, **numbers)
    assert faults(plan, environment) == []


def test_defaults_of_production_are_never_laxer_than_those_of_the_sandbox() -> None:
    for each in FIELDS.values():
        assert each.least[PRODUCTION] >= each.least[SANDBOX]
        if each.defaults:
            assert each.defaults[PRODUCTION] >= each.defaults[SANDBOX]
    assert timedelta(days=1) <= APPROVAL_LIFETIME <= timedelta(days=30)


@given(st.integers(0, 400 * DAY), st.integers(HOUR, 90 * DAY))
def test_default_deadline_leaves_time_for_twice_the_longest_gap(gap: int, quiet: int) -> None:
    """A job that runs monthly can become silent before it."""
    silence = max(quiet, min(2 * gap, LONGEST_SECONDS))
    assert default_deadline_seconds(PRODUCTION, quiet, gap) == 45 * DAY + max(0, silence - 7 * DAY)
    assert default_deadline_seconds(SANDBOX, HOUR, 0) == 7 * DAY


# --- faults -----------------------------------------------------------------------------------------------


def test_plan_that_is_feasible_has_no_fault() -> None:
    assert faults(PLAN) == []


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("quiet_seconds", {SANDBOX: 1, PRODUCTION: 3_600}, 366 * DAY),
        ("quarantine_seconds", {SANDBOX: 1, PRODUCTION: 600}, 366 * DAY),
        ("proof_count", {SANDBOX: 1, PRODUCTION: 1}, 1_000_000),
        ("proof_sources", {SANDBOX: 1, PRODUCTION: 1}, 10_000),
        ("soak_seconds", {SANDBOX: 0, PRODUCTION: 0}, 366 * DAY),
        ("expires_in_days", {SANDBOX: 1, PRODUCTION: 1}, 3_650),
    ],
)
@pytest.mark.parametrize("environment", Environment)
def test_plan_value_out_of_its_bounds_is_a_fault(
    name: str, least: dict[Environment, int], most: int, environment: Environment
) -> None:
    """Every plan has proof, quiet and quarantine, even an approved one."""
    far = changed(deadline=NOW + timedelta(days=730))
    for value, is_fault in (
        (least[environment], False),
        (least[environment] - 1, True),
        (-1, True),
        (most, False),
        (most + 1, True),
    ):
        plan = replace(far, **{name: value})  # type: ignore[arg-type]  # an integer
        found = [each.detail for each in find_faults(plan, environment, KeyKind.PRIVATE, None, NOW)]
        assert any("is out of range" in detail for detail in found) == is_fault


def test_plan_whose_soak_and_quiet_do_not_fit_before_the_deadline_is_a_fault() -> None:
    needed = timedelta(seconds=PLAN.soak_seconds + PLAN.quiet_seconds)
    assert faults(changed(deadline=NOW + needed)) == []
    assert faults(changed(deadline=NOW + needed - timedelta(microseconds=1))) == ["/deadline"]


def test_plan_time_counts_from_the_later_of_not_before_and_now() -> None:
    needed = timedelta(seconds=PLAN.soak_seconds + PLAN.quiet_seconds)
    later = NOW + timedelta(days=30)
    assert faults(changed(not_before=later, deadline=later + needed)) == []
    assert faults(changed(not_before=later, deadline=later + needed - timedelta(seconds=1))) == ["/deadline"]
    assert faults(changed(not_before=NOW - timedelta(days=30), deadline=NOW)) == ["/deadline"]


def test_plan_whose_predecessor_expires_before_the_deadline_warns_or_faults() -> None:
    """An old key that expires during its rotation is reported before the rotation starts."""
    early = DEADLINE - timedelta(microseconds=1)
    assert faults(PLAN, expires_at=DEADLINE) == []
    assert faults(PLAN, expires_at=early) == ["/deadline"]
    assert faults(changed(predecessor_may_expire=True), expires_at=early) == []


def test_plan_with_several_faults_names_each() -> None:
    plan = changed(quiet_seconds=0, quarantine_seconds=0, proof_count=0, deadline=NOW)
    assert faults(plan) == ["/proof_count", "/quiet_seconds", "/quarantine_seconds", "/deadline"]


def test_plan_fault_names_the_accepted_range() -> None:
    details = [fault.detail for fault in find_faults(changed(quiet_seconds=0), PRODUCTION, KeyKind.PRIVATE, None, NOW)]
    assert details == ["0 is out of range. Use 3600 to 31622400 seconds in production."]


@given(plans, st.sampled_from(Environment), st.none() | times, st.sampled_from(KeyKind))
def test_plan_of_any_values_is_checked_without_an_exception(
    plan: Plan, environment: Environment, expires_at: datetime | None, kind: KeyKind
) -> None:
    """Faults of a plan are listed, never raised."""
    near = replace(plan, not_before=NOW)
    assert all(pointer.startswith("/") for pointer in faults(near, environment, expires_at, kind))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("quiet_seconds", 10**18),
        ("quiet_seconds", 10**12),
        ("soak_seconds", 10**18),
        ("soak_seconds", LONGEST_SECONDS + 1),
        ("expires_in_days", 10**18),
        ("proof_count", 10**18),
    ],
)
def test_plan_of_astronomical_values_is_listed_as_a_fault(name: str, value: int) -> None:
    """No number from a client is an internal error: rejected values are not used in computations."""
    assert faults(changed(**{name: value})) == [f"/{name}"]


@pytest.mark.parametrize(
    ("at", "is_fault"),
    [
        (None, False),
        (NOW, False),
        (NOW + FARTHEST, False),
        (NOW - FARTHEST, False),
        (NOW + FARTHEST + timedelta(microseconds=1), True),
        (NOW - FARTHEST - timedelta(microseconds=1), True),
        (datetime.max.replace(tzinfo=UTC), True),
        (datetime.min.replace(tzinfo=UTC), True),
    ],
    ids=str,
)
def test_plan_time_too_far_away_is_a_fault(at: datetime | None, is_fault: bool) -> None:
    """The bound is checked before any arithmetic, which would overflow the calendar."""
    found = [fault.pointer for fault in find_far_faults({"not_before": at, "deadline": NOW}, NOW)]
    assert found == ["/not_before"] * is_fault


@pytest.mark.parametrize(("days", "is_fault"), [(None, False), (44, True), (45, False), (3650, False)])
def test_plan_whose_replacement_would_expire_before_the_deadline_is_a_fault(days: int | None, is_fault: bool) -> None:
    """The new key never expires before the old one is retired."""
    assert faults(changed(expires_in_days=days)) == ["/expires_in_days"] * is_fault


# --- by kind of key, window and deadline ------------------------------------------------------------------


PUBLIC = replace(PLAN, proof=Proof.CONFIRMATION, deadline=None)


def test_plan_of_a_public_key_is_proved_by_confirmation_and_has_no_deadline() -> None:
    assert faults(PUBLIC, kind=KeyKind.PUBLIC) == []
    assert faults(PLAN, kind=KeyKind.PUBLIC) == ["/proof", "/deadline"]
    for proof in (Proof.ACK, Proof.TRAFFIC, Proof.BOTH):
        assert faults(replace(PUBLIC, proof=proof), kind=KeyKind.PUBLIC) == ["/proof"]


@pytest.mark.parametrize(
    ("retire_at", "is_fault"),
    [(None, False), (NOW + timedelta(seconds=1), False), (NOW, True), (NOW - timedelta(days=1), True)],
)
def test_plan_retires_a_public_key_on_a_date_to_come(retire_at: datetime | None, is_fault: bool) -> None:
    assert faults(replace(PUBLIC, retire_at=retire_at), kind=KeyKind.PUBLIC) == ["/retire_at"] * is_fault


def test_plan_of_a_private_key_has_a_deadline_and_is_retired_by_silence() -> None:
    assert faults(changed(deadline=None)) == ["/deadline"]
    assert faults(changed(retire_at=NOW + timedelta(days=9))) == ["/retire_at"]


def test_plan_by_confirmation_is_for_credentials_without_traffic() -> None:
    """A confirmation cannot replace the evidence of a credential in use."""
    assert faults(changed(proof=Proof.CONFIRMATION)) == ["/proof"]
    assert faults(changed(proof=Proof.CONFIRMATION, is_dormant=True)) == []


def test_plan_whose_window_never_opens_is_a_fault() -> None:
    shut = Window(blackouts=(Blackout(NOW - timedelta(days=1), NOW + timedelta(days=9999)),))
    assert faults(changed(window=shut)) == ["/window"]
    assert faults(replace(PUBLIC, window=shut), kind=KeyKind.PUBLIC) == ["/window"]


def test_plan_time_counts_from_when_the_window_opens() -> None:
    """The time that remains after the first opening must suffice."""
    opens_at = NOW + timedelta(days=10)
    needed = timedelta(seconds=PLAN.soak_seconds + PLAN.quiet_seconds)
    shut = Window(blackouts=(Blackout(NOW - timedelta(days=1), opens_at),))
    assert faults(changed(window=shut, deadline=opens_at + needed)) == []
    assert faults(changed(window=shut, deadline=opens_at + needed - timedelta(seconds=1))) == ["/deadline"]


# --- reminders --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("days", "reminded", "expected"),
    [
        (0, 0, None),
        (24, 0, None),
        (25, 0, 25),
        (25, 25, None),
        (50, 25, 50),
        (74, 50, None),
        (80, 0, 75),
        (80, 75, None),
        (500, 75, None),
        (-5, 0, None),
    ],
)
def test_reminder_is_due_at_quarters_of_the_time_and_once(days: int, reminded: int, expected: int | None) -> None:
    """Only the latest of several missed reminders is sent."""
    assert due_reminder(NOW, NOW + timedelta(days=100), reminded, NOW + timedelta(days=days)) == expected


def test_reminder_without_remaining_time_is_the_last() -> None:
    assert due_reminder(NOW, NOW, 0, NOW) == REMINDERS[-1] == 75


# --- the digest -------------------------------------------------------------------------------------------


def test_plan_every_field_is_tested() -> None:
    assert list(OTHERWISE) == [field.name for field in fields(Plan)]


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in OTHERWISE.items() for value in values], ids=str
)
def test_plan_digest_changes_with_every_field(name: str, value: object) -> None:
    """An approval is bound to the plan: a change of any field voids it."""
    assert replace(PLAN, **{name: value}).digest() != PLAN.digest()  # type: ignore[arg-type]  # of the field's own type


@given(plans, plans)
def test_plan_digests_are_equal_for_equal_plans_only(plan: Plan, other: Plan) -> None:
    assert (plan.digest() == other.digest()) == (plan == other)


def test_plan_approved_before_a_field_was_added_keeps_its_digest() -> None:
    """The approval stays valid: the literals are what a plan without optional fields stores and digests."""
    stored = {
        "credential_id": "crd_1",
        "predecessor_key_id": "AAAAAAAAAAAAAAAA",
        "reason": "yearly",
        "not_before": "2026-11-21T12:00:00Z",
        "deadline": "2027-01-05T12:00:00Z",
        "proof": "traffic",
        "proof_count": 100,
        "proof_sources": 2,
        "soak_seconds": 600,
        "quiet_seconds": 604800,
        "quarantine_seconds": 86400,
    }
    assert Plan.from_json(stored) == PLAN
    assert PLAN.as_json() == stored
    assert PLAN.digest() == "5a73d05bb954b074c2b1355ef3114d653252a0e9ce6112d54009e456c009895c"


@pytest.mark.parametrize("name", OPTIONAL)
def test_plan_stores_an_optional_field_only_when_set(name: str) -> None:
    assert name not in PLAN.as_json()
    assert name in PLAN.as_shown()
    for value in OTHERWISE[name]:
        assert name in replace(PLAN, **{name: value}).as_json()  # type: ignore[arg-type]  # of the field's own type


def test_plan_digest_is_specific_to_rotations() -> None:
    """An approval of a rotation cannot serve for an issuance, nor the reverse."""
    assert PLAN.digest() == canonical_digest({**PLAN.as_json(), "what": "rotation"})
    assert PLAN.digest() != canonical_digest({**PLAN.as_json(), "what": "issuance"})
    assert PLAN.digest() != canonical_digest(PLAN.as_json())


@given(plans)
def test_plan_round_trips_through_json(plan: Plan) -> None:
    """A plan survives JSON unchanged, values and digest."""
    stored = json.loads(json.dumps(plan.as_json()))
    again = Plan.from_json(stored)
    assert again == plan
    assert again.digest() == plan.digest()
    assert again.not_before.tzinfo is not None
    assert isinstance(again.proof, Proof)


@pytest.mark.parametrize("name", ["quiet_seconds", "proof", "deadline"])
def test_plan_stored_with_a_missing_field_is_refused(name: str) -> None:
    """A truncated row is not completed with defaults."""
    stored = dict(PLAN.as_json())
    del stored[name]
    with pytest.raises((KeyError, TypeError)):
        Plan.from_json(dict(stored))


def test_plan_stored_with_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError):
        Plan.from_json({**PLAN.as_json(), "skip_proof": True})
