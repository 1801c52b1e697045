"""The cell rate algorithm, compared with a token bucket in exact fractions."""

from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import ceil, floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyvault.access.limits import (
    DEFAULT_LIMITS,
    FAILED_PROOF_LIMIT,
    MAX_COUNT,
    MAX_SECONDS,
    Bucket,
    BucketState,
    BucketStatus,
    Limit,
    Spend,
    bucket_status,
    fallback,
    find_limit_fault,
    spend,
    spend_each,
)
from keyvault.domain.environments import Environment

NOW_US = 1_795_262_400_000_000
SECOND_US = 1_000_000

Request = tuple[int, int]
"""How many microseconds after the one before, and for how many tokens."""

limits = st.builds(
    Limit,
    st.integers(1, 12) | st.sampled_from([3_000, 999_983, MAX_COUNT]),
    st.integers(1, 7) | st.sampled_from([60, MAX_SECONDS]),
)


@st.composite
def visits(draw: st.DrawFn) -> tuple[Limit, list[Request]]:
    """Generate a limit and requests: many at one moment, or just before and after a token returns."""
    limit = draw(limits)
    token_us = limit.window_us // limit.count
    gaps = (
        st.just(0)
        | st.sampled_from([token_us, token_us + 1, max(0, token_us - 1), limit.window_us])
        | st.integers(0, 2 * limit.window_us)
    )
    costs = st.just(1) | st.just(limit.count) | st.integers(1, limit.count)
    return limit, draw(st.lists(st.tuples(gaps, costs), min_size=1, max_size=40))


@dataclass
class TextbookBucket:
    """The token bucket of the textbook."""

    limit: Limit
    left: Fraction
    at_us: int

    def refill(self, now_us: int) -> None:
        gained = Fraction((now_us - self.at_us) * self.limit.count, self.limit.window_us)
        self.left, self.at_us = min(self.left + gained, Fraction(self.limit.count)), now_us


def bucket(limit: Limit, policy: str = "account") -> Bucket:
    return Bucket(policy, f"{policy}:{limit}", limit)


def spend_one(state: BucketState | None, limit: Limit, cost: int, now_us: int) -> tuple[Spend, BucketState]:
    outcome, (kept,) = spend([state], [bucket(limit)], cost, now_us)
    return outcome, kept


def admitted_in_excess(limit: Limit, admitted: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the windows in which more requests passed than the burst and the returned tokens allow."""
    sums = [0, *accumulate(cost for _, cost in admitted)]
    return [
        (admitted[first][0], admitted[last][0])
        for first in range(len(admitted))
        for last in range(first, len(admitted))
        if sums[last + 1] - sums[first]
        > limit.count + (admitted[last][0] - admitted[first][0]) * limit.count // limit.window_us
    ]


@given(visits())
def test_spend_agrees_with_a_token_bucket_that_never_rounds(visit: tuple[Limit, list[Request]]) -> None:
    """The bucket neither creates nor loses a token, and its reported state is exact."""
    limit, requests = visit
    tokens, state, now_us = TextbookBucket(limit, Fraction(limit.count), NOW_US), None, NOW_US
    for gap_us, cost in requests:
        now_us += gap_us
        tokens.refill(now_us)
        outcome, state = spend_one(state, limit, cost, now_us)
        assert outcome.allowed == (tokens.left >= cost)
        if outcome.allowed:
            tokens.left -= cost
        us_per_token = Fraction(limit.window_us, limit.count)
        wait_us = 0 if outcome.allowed else ceil((cost - tokens.left) * us_per_token)
        reset_us = (limit.count - tokens.left) * us_per_token
        assert outcome.statuses == (
            BucketStatus("account", limit, floor(tokens.left), ceil(reset_us / SECOND_US), wait_us),
        )
        assert outcome.retry_after_seconds == ceil(Fraction(wait_us, SECOND_US))


@given(visits())
def test_spend_never_admits_more_than_the_burst_and_the_refill(visit: tuple[Limit, list[Request]]) -> None:
    """In any window of w seconds at most count + floor(w * count / seconds) tokens are spent."""
    limit, requests = visit
    state, now_us, admitted = None, NOW_US, []
    for gap_us, cost in requests:
        now_us += gap_us
        outcome, state = spend_one(state, limit, cost, now_us)
        if outcome.allowed:
            admitted.append((now_us, cost))
    assert admitted_in_excess(limit, admitted) == []


@given(visits(), st.data())
def test_spend_with_a_clock_that_steps_back_never_admits_more(
    visit: tuple[Limit, list[Request]], data: st.DataObject
) -> None:
    """Guarantee: measured by true time, steps of the server's clock admit no more requests than the limit."""
    limit, requests = visit
    state, true_us, behind_us, admitted = None, NOW_US, 0, []
    for gap_us, cost in requests:
        true_us += gap_us
        behind_us += data.draw(st.just(0) | st.integers(0, 3 * limit.window_us))
        outcome, state = spend_one(state, limit, cost, true_us - behind_us)
        if outcome.allowed:
            admitted.append((true_us, cost))
    assert admitted_in_excess(limit, admitted) == []


@given(limits, st.integers(0, 10**15), st.booleans())
def test_spend_with_a_clock_that_steps_back_locks_out_for_one_window_at_most(
    limit: Limit, step_us: int, is_tried_at_once: bool
) -> None:
    _, state = spend_one(None, limit, limit.count, NOW_US)
    now_us = NOW_US - step_us
    if is_tried_at_once:
        refused, state = spend_one(state, limit, 1, now_us)
        assert not refused.allowed
        assert refused.retry_after_seconds <= limit.seconds
        now_us += limit.window_us
        allowed, _ = spend_one(state, limit, limit.count, now_us)
        assert allowed.allowed
    else:
        refused, _ = spend_one(state, limit, limit.count, now_us)
        assert refused.retry_after_seconds == limit.seconds


@given(st.builds(Limit, st.integers(1, 300), st.integers(1, MAX_SECONDS)))
def test_spend_at_one_moment_admits_the_burst_and_no_more(limit: Limit) -> None:
    state, outcomes = None, []
    for _ in range(limit.count + 3):
        outcome, state = spend_one(state, limit, 1, NOW_US)
        outcomes.append((outcome.allowed, outcome.statuses[0].remaining))
    assert outcomes == [(True, left) for left in reversed(range(limit.count))] + [(False, 0)] * 3


@given(limits, st.data())
def test_spend_after_a_refusal_passes_at_the_end_of_the_wait_and_not_before(limit: Limit, data: st.DataObject) -> None:
    spent, cost = data.draw(st.integers(1, limit.count)), data.draw(st.integers(1, limit.count))
    _, state = spend_one(None, limit, spent, NOW_US)
    refused, state = spend_one(state, limit, cost, NOW_US)
    if refused.allowed:
        return
    wait_us = refused.binding.wait_us
    assert 0 < wait_us <= refused.retry_after_seconds * SECOND_US <= wait_us + SECOND_US
    assert not spend_one(state, limit, cost, NOW_US + wait_us - 1)[0].allowed
    assert spend_one(state, limit, cost, NOW_US + wait_us)[0].allowed


@given(st.lists(limits, min_size=2, max_size=3), st.lists(st.integers(0, SECOND_US), max_size=30), st.data())
def test_spend_from_several_buckets_takes_from_all_or_from_none(
    chosen: list[Limit], gaps: list[int], data: st.DataObject
) -> None:
    """A request that one limit refuses spends nothing of the others."""
    buckets = [bucket(limit) for limit in chosen]
    states: tuple[BucketState | None, ...] = (None,) * len(chosen)
    now_us = NOW_US
    for gap_us in gaps:
        now_us += gap_us
        cost = data.draw(st.integers(1, min(limit.count for limit in chosen)))
        alone = [spend_one(state, limit, cost, now_us) for state, limit in zip(states, chosen, strict=True)]
        outcome, kept = spend(states, buckets, cost, now_us)
        assert outcome.allowed == all(one.allowed for one, _ in alone)
        assert outcome.retry_after_seconds == max(one.retry_after_seconds for one, _ in alone)
        full = BucketState(now_us, 0)
        untouched = tuple(max(full, state or full) for state in states)
        assert kept == (tuple(state for _, state in alone) if outcome.allowed else untouched)
        states = kept


def test_spend_from_an_empty_bucket_and_a_full_one_leaves_the_full_one_full() -> None:
    account, endpoint = Limit(10, 1), Limit(2, 60)
    buckets = [bucket(account), bucket(endpoint, "endpoint")]
    _, states = spend([None, None], buckets, 2, NOW_US)
    refused, _ = spend([None, states[1]], buckets, 1, NOW_US)
    assert refused == Spend(
        False, (BucketStatus("account", account, 10, 0), BucketStatus("endpoint", endpoint, 0, 60, 30 * SECOND_US)), 30
    )


@given(st.lists(limits, min_size=1, max_size=3), st.data())
def test_spend_each_takes_every_bucket_s_own_cost_or_nothing(chosen: list[Limit], data: st.DataObject) -> None:
    buckets = [bucket(limit) for limit in chosen]
    states = [spend_one(None, limit, data.draw(st.integers(1, limit.count)), NOW_US)[1] for limit in chosen]
    costs = [data.draw(st.integers(1, limit.count)) for limit in chosen]
    alone = [spend_one(*each, NOW_US) for each in zip(states, chosen, costs, strict=True)]
    outcome, kept = spend_each(states, buckets, costs, NOW_US)
    assert outcome.allowed == all(one.allowed for one, _ in alone)
    assert kept == (tuple(state for _, state in alone) if outcome.allowed else tuple(states))


@given(visits(), st.integers(0, 10 * SECOND_US))
def test_bucket_status_equals_what_can_be_spent_now(visit: tuple[Limit, list[Request]], later_us: int) -> None:
    limit, requests = visit
    state, now_us = None, NOW_US
    for gap_us, cost in requests:
        now_us += gap_us
        _, state = spend_one(state, limit, cost, now_us)
    assert state is not None
    status = bucket_status(bucket(limit), state, now_us + later_us)
    assert status.wait_us == 0
    if status.remaining:
        assert spend_one(state, limit, status.remaining, now_us + later_us)[0].allowed
    if status.remaining < limit.count:
        assert not spend_one(state, limit, status.remaining + 1, now_us + later_us)[0].allowed
        assert (
            bucket_status(bucket(limit), state, now_us + later_us + status.reset_seconds * SECOND_US).remaining
            == limit.count
        )


def test_binding_of_an_allowed_request_is_the_bucket_with_the_least_left() -> None:
    outcome, _ = spend([None, None], [bucket(Limit(9, 1)), bucket(Limit(5, 9), "endpoint")], 1, NOW_US)
    assert (outcome.binding.policy, outcome.binding.remaining) == ("endpoint", 4)


def test_binding_of_a_refused_request_is_the_bucket_that_refuses_longest() -> None:
    """The bucket with fewer tokens may not be the one that refuses, or may be ready earlier."""
    short, long = Limit(2, 2), Limit(100, MAX_SECONDS)
    used_up = [BucketState(NOW_US + short.window_us, 0), BucketState(NOW_US + long.window_us - 864 * SECOND_US, 0)]
    outcome, _ = spend(used_up, [bucket(short), bucket(long, "endpoint")], 2, NOW_US)
    assert [status.remaining for status in outcome.statuses] == [0, 1]
    assert outcome.binding is outcome.statuses[1]
    assert outcome.retry_after_seconds == 864


@pytest.mark.parametrize("cost", [-1, 0, 6])
def test_spend_of_a_negative_cost_or_one_above_the_burst_is_an_error(cost: int) -> None:
    """Guarantee: a negative cost returns no tokens, and a cost above the burst is refused without a wait."""
    with pytest.raises(ValueError, match="cost"):
        spend([None, None], [bucket(Limit(9, 1)), bucket(Limit(5, 1))], cost, NOW_US)


@pytest.mark.parametrize(
    ("count", "seconds", "word"),
    [(0, 1, "0"), (-1, 1, "-1"), (MAX_COUNT + 1, 1, "1000001"), (1, 0, "0"), (1, MAX_SECONDS + 1, "86401")],
)
def test_limit_out_of_bounds_is_refused_with_the_number_that_is_wrong(count: int, seconds: int, word: str) -> None:
    assert f"not {word}." in (find_limit_fault(count, seconds) or "")
    with pytest.raises(ValueError, match=f"not {word}"):
        Limit(count, seconds)


@pytest.mark.parametrize(("count", "seconds"), [(1, 1), (MAX_COUNT, MAX_SECONDS)])
def test_limit_at_its_bounds_is_a_limit(count: int, seconds: int) -> None:
    assert find_limit_fault(count, seconds) is None
    assert Limit(count, seconds).window_us == seconds * SECOND_US


@pytest.mark.parametrize(
    ("count", "percent", "expected"), [(100, 25, 25), (25, 25, 6), (3, 25, 1), (1, 1, 1), (7, 100, 7)]
)
def test_fallback_is_a_share_of_the_count_and_never_nothing(count: int, percent: int, expected: int) -> None:
    assert fallback(Limit(count, 60), percent) == Limit(expected, 60)


def test_defaults_are_those_of_the_domain() -> None:
    assert {Environment.SANDBOX: Limit(25, 1), Environment.PRODUCTION: Limit(100, 1)} == DEFAULT_LIMITS
    assert Limit(100, 60) == FAILED_PROOF_LIMIT
