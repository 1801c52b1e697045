"""Issuance requests: their states, and the approval that is bound to exactly what was requested."""

from dataclasses import fields, replace
from datetime import timedelta
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyvault.domain.environments import Environment
from keyvault.domain.issuance import (
    APPROVALS_NEEDED,
    COLLECT_WITHIN,
    TRANSITIONS,
    Delivery,
    IssuancePlan,
    IssuanceState,
    can_transition_issuance,
)
from keyvault.domain.keys import KeyKind

PLAN = IssuancePlan("acme", Environment.SANDBOX, KeyKind.PRIVATE, "till 1", Delivery.SECRET_BACKEND, None)
OTHERWISE: dict[str, list[object]] = {
    "merchant_id": ["globex", "acme-2"],
    "environment": [Environment.PRODUCTION],
    "kind": [KeyKind.PUBLIC],
    "label": ["till 2", "", "till 1 ", "Till 1"],
    "delivery": [Delivery.SHOW_ONCE, Delivery.SEALED],
    "expires_in_days": [1, 30, 3650],
    "recipient_public_key": ["AAAA", "BBBB"],
}

plans = st.builds(
    IssuancePlan,
    merchant_id=st.text(max_size=5),
    environment=st.sampled_from(Environment),
    kind=st.sampled_from(KeyKind),
    label=st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    delivery=st.sampled_from(Delivery),
    expires_in_days=st.none() | st.integers(1, 3650),
    recipient_public_key=st.sampled_from(["", "AAAA", "BBBB"]),
)


@pytest.mark.parametrize(
    ("old", "new"),
    list(product(IssuanceState, IssuanceState)),
    ids=lambda state: getattr(state, "value", None),
)
def test_transitions_cell_by_cell(old: IssuanceState, new: IssuanceState) -> None:
    ways = {
        "pending": {"approved", "rejected", "expired", "withdrawn"},
        "approved": {"issued", "withdrawn"},
        "issued": {"collected", "burned"},
    }
    assert can_transition_issuance(old, new) == (new in ways.get(old, ()))


def test_transitions_nothing_is_issued_that_was_not_approved() -> None:
    """Every path to `issued` and `collected` goes through `approved`, and every path there begins at `pending`."""
    ways_in = {state: {old for old in IssuanceState if can_transition_issuance(old, state)} for state in IssuanceState}
    assert ways_in[IssuanceState.COLLECTED] == {IssuanceState.ISSUED}
    assert ways_in[IssuanceState.ISSUED] == {IssuanceState.APPROVED}
    assert ways_in[IssuanceState.APPROVED] == {IssuanceState.PENDING}
    assert ways_in[IssuanceState.PENDING] == set()


@pytest.mark.parametrize("state", ["rejected", "expired", "withdrawn", "collected", "burned"])
def test_transitions_a_closed_request_stays_closed(state: str) -> None:
    """A rejected, expired or withdrawn request is never issued; a collected or discarded one never again."""
    assert TRANSITIONS[IssuanceState(state)] == frozenset()


def test_approvals_production_requires_a_second_person() -> None:
    assert APPROVALS_NEEDED == {Environment.SANDBOX: 0, Environment.PRODUCTION: 1}


def test_key_that_is_not_collected_is_discarded_after_72_hours() -> None:
    assert timedelta(hours=72) == COLLECT_WITHIN


def test_plan_every_field_is_tried() -> None:
    assert list(OTHERWISE) == [field.name for field in fields(IssuancePlan)]


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in OTHERWISE.items() for value in values], ids=repr
)
def test_plan_digest_changes_with_every_field(name: str, value: object) -> None:
    """An approval covers exactly what was requested: a change of any field voids it."""
    assert replace(PLAN, **{name: value}).digest() != PLAN.digest()  # type: ignore[arg-type]  # of the field's own type


@given(plans, plans)
def test_plan_digests_are_equal_for_equal_plans_only(plan: IssuancePlan, other: IssuancePlan) -> None:
    assert (plan.digest() == other.digest()) == (plan == other)


def test_plan_digest_is_stable_for_ever() -> None:
    """Stored approvals stay valid: the digest equals `sha256sum` of the canonical text, computed elsewhere."""
    assert PLAN.digest() == "4294c3cf30dcd119ed4b162c57799f127d59ab7ddb6f93e0ad3dffda430b15a5"
