"""States of a key: the table of NIST SP 800-57, and that terminal states are final."""

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from itertools import product

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from keyvault.domain.digests import DIGEST_BYTES
from keyvault.domain.environments import CONNECTION_MODE, ConnectionMode, Environment
from keyvault.domain.keys import (
    DEAD_STATES,
    TRANSITIONS,
    KeyKind,
    KeyRecord,
    KeyState,
    RetirementReason,
    can_transition,
)

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
MOMENT = timedelta(microseconds=1)

# SP 800-57 Part 1 Rev. 5, section 7: transitions 2 to 15, by the state that they start from. Ours may have
# fewer, for the reasons given in `domain.keys`, and none besides.
NIST = {
    "pre_activation": {"destroyed", "compromised", "active"},
    "active": {"destroyed", "compromised", "suspended", "deactivated"},
    "suspended": {"destroyed", "compromised", "active", "deactivated"},
    "deactivated": {"compromised", "destroyed"},
    "compromised": {"destroyed"},
    "destroyed": set[str](),
}


def key_record(state: KeyState, expires_at: datetime | None = None, **changes: object) -> KeyRecord:
    values: dict[str, object] = {
        "key_id": "A" * 16,
        "credential_id": "crd_1",
        "kind": KeyKind.PRIVATE,
        "environment": Environment.SANDBOX,
        "merchant_id": "acme",
        "digest": bytes(DIGEST_BYTES),
        "pepper_version": 1,
        "state": state,
        "retirement": None,
        "expires_at": expires_at,
        "merchant_active": True,
        "account_active": True,
    }
    return KeyRecord(**(values | changes))  # type: ignore[arg-type]  # a test's own words


def reachable(states: Iterable[KeyState]) -> set[KeyState]:
    """Return these states and all that are reachable from them, in any number of steps."""
    found, fresh = set(states), set(states)
    while fresh:
        fresh = {new for old in fresh for new in TRANSITIONS[old]} - found
        found |= fresh
    return found


def test_states_are_those_of_nist_sp_800_57() -> None:
    assert [state.value for state in KeyState] == list(NIST)
    assert set(TRANSITIONS) == set(KeyState)


@pytest.mark.parametrize(
    ("old", "new"), list(product(KeyState, KeyState)), ids=lambda state: getattr(state, "value", None)
)
def test_transitions_cell_by_cell(old: KeyState, new: KeyState) -> None:
    """The whole table, restated: a changed cell must be changed in two places."""
    ours = {
        "pre_activation": {"active", "compromised", "destroyed"},
        "active": {"suspended", "deactivated", "compromised"},
        "suspended": {"active", "deactivated", "compromised"},
        "deactivated": {"compromised", "destroyed"},
        "compromised": {"destroyed"},
        "destroyed": set[str](),
    }
    assert can_transition(old, new) == (new in ours[old])
    if can_transition(old, new):
        assert new in NIST[old]


def test_transitions_no_state_becomes_itself() -> None:
    """A repeated operation is no transition, so services can distinguish it from the first one."""
    assert not [state for state in KeyState if can_transition(state, state)]


def test_transitions_nothing_leads_from_a_dead_state_to_a_living_one() -> None:
    """A revoked, expired or compromised key never verifies again, in however many steps."""
    assert reachable(DEAD_STATES) == DEAD_STATES
    assert {KeyState.ACTIVE, KeyState.SUSPENDED, KeyState.PRE_ACTIVATION}.isdisjoint(DEAD_STATES)
    assert set(KeyState) - DEAD_STATES == {KeyState.PRE_ACTIVATION, KeyState.ACTIVE, KeyState.SUSPENDED}


def test_transitions_a_compromise_can_be_reported_until_the_key_is_destroyed() -> None:
    """A report of a leak is refused only if the key is already compromised or destroyed."""
    refusing = {state for state in KeyState if not can_transition(state, KeyState.COMPROMISED)}
    assert refusing == {KeyState.COMPROMISED, KeyState.DESTROYED}


def test_transitions_every_living_key_can_be_ended_in_one_step() -> None:
    for state in set(KeyState) - DEAD_STATES:
        assert TRANSITIONS[state] & DEAD_STATES


def test_transitions_every_state_ends_as_destroyed() -> None:
    assert all(KeyState.DESTROYED in reachable([state]) for state in KeyState)
    assert TRANSITIONS[KeyState.DESTROYED] == frozenset()


@pytest.mark.parametrize("state", KeyState)
@pytest.mark.parametrize(
    ("expires_at", "is_expired"),
    [
        (None, False),
        (NOW + timedelta(days=1), False),
        (NOW + MOMENT, False),
        (NOW, True),
        (NOW - MOMENT, True),
        (datetime.min.replace(tzinfo=UTC), True),
    ],
    ids=["never", "tomorrow", "in a moment", "now", "a moment ago", "long ago"],
)
def test_key_verifies_only_while_active_and_unexpired(
    state: KeyState, expires_at: datetime | None, is_expired: bool
) -> None:
    """Of all states, before and after the expiry, only `active` before the expiry verifies."""
    found = key_record(state, expires_at)
    assert found.is_expired(NOW) == is_expired
    assert found.may_verify(NOW) == (state is KeyState.ACTIVE and not is_expired)


@pytest.mark.parametrize("state", KeyState)
@pytest.mark.parametrize("retirement", [None, *RetirementReason])
def test_key_verification_ignores_purely_informative_fields(
    state: KeyState, retirement: RetirementReason | None
) -> None:
    """Whether a key verifies depends on its state and the clock alone."""
    found = key_record(state, retirement=retirement, reports_origin=True)
    assert found.may_verify(NOW) == (state is KeyState.ACTIVE)


class Life(RuleBasedStateMachine):
    """A key under random operations at random moments."""

    def __init__(self) -> None:
        super().__init__()
        self.state = KeyState.PRE_ACTIVATION
        self.past: list[KeyState] = []
        self.now = NOW
        self.expires_at = NOW + timedelta(days=30)

    @rule(wanted=st.sampled_from(KeyState))
    def asked_to_become(self, wanted: KeyState) -> None:
        if can_transition(self.state, wanted):
            self.past.append(self.state)
            self.state = wanted

    @rule(days=st.integers(0, 20))
    def later(self, days: int) -> None:
        self.now += timedelta(days=days)

    @invariant()
    def the_dead_stay_dead(self) -> None:
        if not DEAD_STATES.isdisjoint(self.past):
            assert self.state in DEAD_STATES
            assert not key_record(self.state, self.expires_at).may_verify(self.now)

    @invariant()
    def no_key_is_new_again(self) -> None:
        assert self.state is not KeyState.PRE_ACTIVATION or not self.past

    @invariant()
    def a_compromise_is_never_made_good(self) -> None:
        if KeyState.COMPROMISED in self.past:
            assert self.state is KeyState.DESTROYED

    @invariant()
    def what_expired_does_not_verify(self) -> None:
        if self.now >= self.expires_at:
            assert not key_record(self.state, self.expires_at).may_verify(self.now)


Life.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLifeOfAKey = Life.TestCase


def test_connections_sandbox_is_for_tests_and_production_is_live() -> None:
    """Guarantee: a sandbox account never connects to a live provider."""
    assert {
        Environment.SANDBOX: ConnectionMode.TEST,
        Environment.PRODUCTION: ConnectionMode.LIVE,
    } == CONNECTION_MODE
