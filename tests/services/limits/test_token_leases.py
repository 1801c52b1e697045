"""Token leases against a model of the shared store: any order, delay and loss of replies."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyvault.access.limits import MAX_SECONDS, Bucket, BucketState, Limit, Spend, spend, spend_each
from keyvault.services.limits.stores import StoreReply
from keyvault.services.limits.token_leases import LIFE_US, SHARE, TokenLeaseRequest, TokenLeases

SECOND_US = 1_000_000
A_DAY = MAX_SECONDS
AHEAD_US = 7_777_777_777
"""Offset of the store's clock from the processes' clock, in microseconds."""

Request = tuple[Bucket, ...]


def bucket(limit: Limit, name: str = "account") -> Bucket:
    return Bucket(name, name, limit)


@dataclass
class SharedStore:
    """Model of the shared store.

    `now_us` is the clock of the processes; `calls` counts the store's calls.
    """

    now_us: int = 5_000_000
    states: dict[str, BucketState] = field(default_factory=dict)
    calls: int = 0

    def spend_each(self, buckets: Sequence[Bucket], costs: Sequence[int]) -> StoreReply:
        self.calls += 1
        now_us = self.now_us + AHEAD_US
        outcome, kept = spend_each([self.states.get(one.key) for one in buckets], buckets, costs, now_us)
        self.states.update(zip((one.key for one in buckets), kept, strict=True))
        return StoreReply(outcome, kept, now_us)

    def would_allow(self, one: Bucket, cost: int) -> bool:
        return spend([self.states.get(one.key)], [one], cost, self.now_us + AHEAD_US)[0].allowed

    def leases(self) -> TokenLeases:
        return TokenLeases(lambda: self.now_us)


def spend_now(shared: SharedStore, leases: TokenLeases, request: Request, cost: int) -> Spend:
    """Spend with a store that replies immediately."""
    step = leases.plan(request, cost)
    while isinstance(step, TokenLeaseRequest):
        step = leases.settle(step, shared.spend_each(step.buckets, step.costs))
    return step


def drain(shared: SharedStore, leases: TokenLeases, request: Request) -> int:
    return next(number for number in range(10_000) if not spend_now(shared, leases, request, 1).allowed)


@dataclass
class InFlight:
    """A lease request in flight, with its reply once the store has handled it."""

    leases: TokenLeases
    lease_request: TokenLeaseRequest
    reply: StoreReply | None = None
    paid_us: int = 0


class LeaseTraffic:
    """Several processes and what each bucket admitted, as (time, cost)."""

    def __init__(self, processes: int) -> None:
        self.shared = SharedStore()
        self.processes = [self.shared.leases() for _ in range(processes)]
        self.in_flight: list[InFlight] = []
        self.admitted: dict[str, list[tuple[int, int]]] = {}

    def begin(self, process: int, request: Request, cost: int) -> None:
        leases = self.processes[process % len(self.processes)]
        if leases.spender(request)(cost) is not None:
            self._admit(request, cost, self.shared.now_us)
            return
        step = leases.plan(request, cost)
        if isinstance(step, Spend):
            assert not step.allowed, "the fast path had declined this"
            assert not all(self.shared.would_allow(one, cost) for one in request), (
                "refused although the store would admit"
            )
        else:
            self.in_flight.append(InFlight(leases, step))

    def deliver(self, which: int, *, is_lost: bool) -> None:
        """Deliver one request to the store or its reply to the process, or lose it."""
        if not self.in_flight:
            return
        one = self.in_flight[which % len(self.in_flight)]
        if is_lost:
            self.in_flight.remove(one)
            one.leases.abandon(one.lease_request)
        elif one.reply is None:
            one.reply, one.paid_us = (
                self.shared.spend_each(one.lease_request.buckets, one.lease_request.costs),
                self.shared.now_us,
            )
        else:
            self.in_flight.remove(one)
            step = one.leases.settle(one.lease_request, one.reply)
            if isinstance(step, TokenLeaseRequest):
                self.in_flight.append(InFlight(one.leases, step))
            elif step.allowed:
                self._admit([part.bucket for part in one.lease_request.parts], one.lease_request.cost, one.paid_us)
                held = [each for each in one.lease_request.all_buckets if each not in one.lease_request.buckets]
                self._admit(held, one.lease_request.cost, one.lease_request.sent_us)

    def _admit(self, request: Sequence[Bucket], cost: int, at_us: int) -> None:
        for one in request:
            self.admitted.setdefault(one.key, []).append((at_us, cost))

    def excess(self, one: Bucket) -> tuple[Fraction, Fraction]:
        """Return the tokens admitted beyond the limit, and beyond the limit plus LIFE_US, in the worst window."""
        count, window_us = one.limit.count, one.limit.window_us
        worst, spent, least = 0, 0, 0
        for at_us, cost in sorted(self.admitted.get(one.key, [])):
            least = min(least, spent * window_us - at_us * count)
            spent += cost
            worst = max(worst, spent * window_us - at_us * count - least)
        tokens = Fraction(worst, window_us) - count
        return tokens, tokens - Fraction(LIFE_US * count, window_us)


limits = st.builds(Limit, st.sampled_from([1, 3, 39, 40, 41, 60, 100, 200, 200]), st.sampled_from([1, 2, 60]))
gaps = (
    st.sampled_from([0, 0, 0, 5_000, 40_000, LIFE_US - 1, LIFE_US, 300_000])
    | st.integers(0, 2 * SECOND_US)
    | st.just(61 * SECOND_US)
)
costs = st.sampled_from([1, 1, 1, 1, 2, 3, 7])
schedule_steps = st.tuples(
    st.sampled_from(["burst", "burst", "flood", "begin", "begin", "deliver", "deliver", "deliver", "lose"]),
    st.integers(0, 9),
    st.booleans(),
    gaps,
    costs,
)


@settings(max_examples=300)
@given(limits, limits, st.integers(1, 3), st.lists(schedule_steps, max_size=60))
def test_leases_of_several_processes_admit_no_more_than_the_bound(
    account_limit: Limit, endpoint_limit: Limit, processes: int, schedule: list[tuple[str, int, bool, int, int]]
) -> None:
    """In any window, each process exceeds a strict bucket by at most one lease and what LIFE_US restores.

    Requests may be concurrent and replies late or lost. A process refuses only what the store would refuse.
    """
    account, endpoint = bucket(account_limit), bucket(endpoint_limit, "endpoint")
    traffic = LeaseTraffic(processes)
    for step, number, has_endpoint, gap_us, drawn_cost in schedule:
        traffic.shared.now_us += gap_us
        request = (account, endpoint) if has_endpoint else (account,)
        cost = min(drawn_cost, *(one.limit.count for one in request))
        if step == "begin":
            traffic.begin(number, request, cost)
        elif step in ("burst", "flood"):
            for _ in range(25 if step == "burst" else 250):
                traffic.begin(number, request, cost)
                traffic.deliver(-1, is_lost=False)
                traffic.deliver(-1, is_lost=False)
        else:
            traffic.deliver(number, is_lost=step == "lose")
    for one in (account, endpoint):
        beyond_limit, beyond_life = traffic.excess(one)
        assert beyond_limit <= processes * max(1, one.limit.count // SHARE)
        assert beyond_life <= 0


def test_leases_held_by_all_processes_reach_the_bound() -> None:
    """The bound is tight: nearly all that LIFE_US restores is admitted beyond the limit."""
    one = bucket(Limit(200, 1))
    traffic = LeaseTraffic(3)

    def spend_in_all(number: int) -> None:
        for process in [0, 1, 2] * number:
            traffic.begin(process, (one,), 1)
            traffic.deliver(0, is_lost=False)
            traffic.deliver(0, is_lost=False)

    for number in (1, 2, 4, 1):  # each round exhausts the previous lease
        traffic.shared.now_us += LIFE_US - 1
        spend_in_all(number)
    traffic.shared.now_us += LIFE_US - 1
    spend_in_all(300)
    tokens, beyond_life = traffic.excess(one)
    assert 16 <= tokens <= 20
    assert beyond_life <= 0


@given(
    st.builds(Limit, st.integers(1, 39), st.sampled_from([1, 2, 60])),
    st.lists(st.tuples(gaps, st.integers(0, 2), costs), max_size=60),
)
def test_leases_of_a_small_limit_are_exact(limit: Limit, schedule: list[tuple[int, int, int]]) -> None:
    """Limits below 40 are not leased: each outcome equals a strict bucket's, with no longer wait."""
    shared, state, one = SharedStore(), None, bucket(limit)
    processes = [shared.leases() for _ in range(3)]
    for gap_us, process, drawn_cost in schedule:
        shared.now_us += gap_us
        cost = min(drawn_cost, limit.count)
        expected, (state,) = spend([state], [one], cost, shared.now_us)
        outcome = spend_now(shared, processes[process], (one,), cost)
        assert outcome.allowed == expected.allowed
        if outcome.allowed:
            assert outcome == expected
        else:  # the process has not seen what others have spent since
            assert 1 <= outcome.retry_after_seconds <= expected.retry_after_seconds


@given(limits, st.lists(st.tuples(gaps, st.integers(0, 2), st.integers(1, 30)), max_size=40))
def test_leases_lose_fewer_tokens_than_are_spent(limit: Limit, schedule: list[tuple[int, int, int]]) -> None:
    """At least half of the tokens that the store paid are spent, for any pattern of requests."""
    shared, one, spent, paid = SharedStore(), bucket(limit), 0, 0
    processes = [shared.leases() for _ in range(3)]
    for gap_us, process, requests in schedule:
        shared.now_us += gap_us
        for _ in range(requests):
            step = processes[process].plan((one,), 1)
            while isinstance(step, TokenLeaseRequest):
                reply = shared.spend_each(step.buckets, step.costs)
                paid += sum(step.costs) if reply.spend.allowed else 0
                step = processes[process].settle(step, reply)
            spent += step.allowed
            assert paid < 2 * spent or paid == 0


def test_leases_under_load_double_up_to_a_twentieth_of_the_remainder() -> None:
    shared, one = SharedStore(), bucket(Limit(1_000, A_DAY))
    leases = shared.leases()
    costs: list[int] = []
    while len(costs) < 9:
        step = leases.plan((one,), 1)
        if isinstance(step, TokenLeaseRequest):
            costs += step.costs
            leases.settle(step, shared.spend_each(step.buckets, step.costs))
    assert costs == [1, 2, 4, 8, 16, 32, 46, 44, 42]


def test_leases_report_the_remainder_as_if_each_token_were_counted_in_the_store() -> None:
    shared, one = SharedStore(), bucket(Limit(300, A_DAY))
    leases, remaining = shared.leases(), []
    for _ in range(300):
        fast = leases.spender((one,))(1)
        remaining.append(fast[0] if fast else spend_now(shared, leases, (one,), 1).statuses[0].remaining)
    assert remaining == list(reversed(range(300)))
    assert shared.calls < 100
    refused = spend_now(shared, leases, (one,), 1)
    assert (refused.allowed, refused.retry_after_seconds) == (False, A_DAY // 300)


def test_leases_after_expiry_are_lost() -> None:
    """An expired lease is not spent, and the bucket does not get its tokens back."""
    shared, one = SharedStore(), bucket(Limit(1_000, A_DAY))
    leases = shared.leases()
    for _ in range(1 + 2 + 4 + 1):
        spend_now(shared, leases, (one,), 1)
    shared.now_us += LIFE_US - 1
    assert leases.spender((one,))(1) is not None
    shared.now_us += 1
    assert leases.spender((one,))(1) is None
    outcome = spend_now(shared, leases, (one,), 1)
    assert outcome.statuses[0].remaining == 1_000 - (1 + 2 + 4 + 8) - 1


def test_leases_of_a_process_with_few_requests_hold_nothing_back() -> None:
    """40 requests a second over four processes fit a limit of 45 a second."""
    shared, one = SharedStore(), bucket(Limit(45, 1))
    processes = [shared.leases() for _ in range(4)]
    for number in range(400):
        shared.now_us += 25_000
        assert spend_now(shared, processes[number % 4], (one,), 1).allowed


@pytest.mark.parametrize(("pause_us", "size"), [(LIFE_US - 1, 8), (LIFE_US, 4), (SECOND_US - 1, 4), (SECOND_US, 1)])
def test_leases_after_a_pause_start_with_the_recent_use(pause_us: int, size: int) -> None:
    shared, one = SharedStore(), bucket(Limit(1_000, A_DAY))
    leases = shared.leases()
    for _ in range(1 + 2 + 4):
        spend_now(shared, leases, (one,), 1)
    shared.now_us += pause_us
    step = leases.plan((one,), 1)
    assert isinstance(step, TokenLeaseRequest)
    assert step.costs == [size]


def test_leases_after_a_mostly_unused_one_shrink_to_its_use() -> None:
    shared, one = SharedStore(), bucket(Limit(1_000, A_DAY))
    leases = shared.leases()
    for _ in range(1 + 2 + 4 + 2):
        spend_now(shared, leases, (one,), 1)
    shared.now_us += LIFE_US
    step = leases.plan((one,), 1)
    assert isinstance(step, TokenLeaseRequest)
    assert step.costs == [2]


def test_leases_under_steady_load_cover_about_one_life() -> None:
    """Few store calls, and few tokens held back."""
    shared, one = SharedStore(), bucket(Limit(100_000, 1))
    leases = shared.leases()
    for _ in range(5_000):
        shared.now_us += 1_000
        assert spend_now(shared, leases, (one,), 1).allowed
    assert shared.calls < 2 * 5_000_000 // LIFE_US


def test_leases_whose_reply_is_late_have_expired() -> None:
    """The life starts when the request is sent: this request is admitted, the rest of the lease is lost."""
    shared, one = SharedStore(), bucket(Limit(1_000, A_DAY))
    leases = shared.leases()
    for _ in range(1 + 2):
        spend_now(shared, leases, (one,), 1)
    step = leases.plan((one,), 1)
    assert isinstance(step, TokenLeaseRequest)
    assert step.costs == [4]
    reply = shared.spend_each(step.buckets, step.costs)
    shared.now_us += LIFE_US
    outcome = leases.settle(step, reply)
    assert isinstance(outcome, Spend)
    assert outcome.allowed
    assert leases.spender((one,))(1) is None


def test_leases_refused_by_a_late_reply_wait_from_the_store_s_time() -> None:
    shared, one = SharedStore(), bucket(Limit(10, 1))
    assert shared.spend_each([one], [10]).spend.allowed
    leases = shared.leases()
    step = leases.plan((one,), 1)
    assert isinstance(step, TokenLeaseRequest)
    reply = shared.spend_each(step.buckets, step.costs)
    shared.now_us += 60_000
    refused = leases.settle(step, reply)
    assert isinstance(refused, Spend)
    assert not refused.allowed
    shared.now_us += 40_000
    assert spend_now(shared, leases, (one,), 1).allowed


@pytest.mark.parametrize("is_next_there", [False, True])
def test_leases_held_by_a_request_refused_after_their_expiry_are_lost(is_next_there: bool) -> None:
    """A process never holds more than one lease of a bucket."""
    shared, account, endpoint = SharedStore(), bucket(Limit(400, A_DAY)), bucket(Limit(8, A_DAY), "endpoint")
    leases = shared.leases()
    for _ in range(1 + 2 + 3):
        spend_now(shared, leases, (account,), 1)
    assert shared.spend_each([endpoint], [8]).spend.allowed
    shared.now_us += 1
    held, following = leases.plan((account, endpoint), 1), leases.plan((account,), 1)
    assert isinstance(held, TokenLeaseRequest)
    assert isinstance(following, TokenLeaseRequest)
    assert following.costs == [8]
    if is_next_there:
        leases.settle(following, shared.spend_each(following.buckets, following.costs))
    leases.settle(held, shared.spend_each(held.buckets, held.costs))
    admitted = [leases.spender((account,))(1) is not None for _ in range(9)]
    assert admitted == ([True] * 7 + [False] * 2 if is_next_there else [False] * 9)


def test_leases_for_a_cost_above_the_lease_request_exactly_the_cost() -> None:
    shared, one = SharedStore(), bucket(Limit(100, A_DAY))
    leases = shared.leases()
    spend_now(shared, leases, (one,), 1)
    step = leases.plan((one,), 30)
    assert isinstance(step, TokenLeaseRequest)
    assert step.costs == [30]


def test_leases_requested_concurrently_are_one() -> None:
    """While one request asks for a lease, the others ask for their own tokens only."""
    shared, one = SharedStore(), bucket(Limit(1_000, A_DAY))
    leases = shared.leases()
    spend_now(shared, leases, (one,), 1)
    steps = [leases.plan((one,), 1) for _ in range(5)]
    assert [step.costs for step in steps if isinstance(step, TokenLeaseRequest)] == [[2], [1], [1], [1], [1]]


def test_leases_that_a_bucket_cannot_pay_become_a_single_spend() -> None:
    """Other processes have spent from the bucket since this one last saw it."""
    shared, one = SharedStore(), bucket(Limit(100, A_DAY))
    leases = shared.leases()
    for _ in range(3):
        spend_now(shared, leases, (one,), 1)
    assert shared.spend_each([one], [96]).spend.allowed
    step = leases.plan((one,), 1)
    assert isinstance(step, TokenLeaseRequest)
    assert step.costs == [4]
    assert spend_now(shared, leases, (one,), 1).allowed
    again = leases.settle(step, shared.spend_each(step.buckets, step.costs))
    assert isinstance(again, TokenLeaseRequest)
    assert again.costs == [1]
    assert not spend_now(shared, leases, (one,), 1).allowed


def test_leases_of_an_empty_bucket_refuse_without_calls() -> None:
    """The store is called once for each restored token and once a second."""
    shared, one = SharedStore(), bucket(Limit(10, 1))
    leases = shared.leases()
    assert drain(shared, leases, (one,)) == 10
    shared.calls = 0
    assert not any(spend_now(shared, leases, (one,), 1).allowed for _ in range(1_000))
    assert shared.calls == 0
    shared.now_us += 99_999
    assert not spend_now(shared, leases, (one,), 1).allowed
    assert shared.calls == 0
    shared.now_us += 1
    assert spend_now(shared, leases, (one,), 1).allowed


def test_leases_of_a_bucket_after_a_store_flush_admit_within_a_second() -> None:
    shared, one = SharedStore(), bucket(Limit(10, A_DAY))
    leases = shared.leases()
    drain(shared, leases, (one,))
    shared.states.clear()
    shared.now_us += SECOND_US
    assert spend_now(shared, leases, (one,), 1).allowed


def test_leases_of_a_request_refused_by_one_bucket_take_nothing_from_the_other() -> None:
    """Neither from the store nor from the held lease."""
    shared, account, endpoint = SharedStore(), bucket(Limit(400, A_DAY)), bucket(Limit(8, A_DAY), "endpoint")
    leases = shared.leases()
    assert drain(shared, leases, (account, endpoint)) == 8
    for _ in range(50):
        refused = spend_now(shared, leases, (account, endpoint), 1)
        assert [status.remaining for status in refused.statuses] == [392, 0]
        assert refused.binding.policy == "endpoint"
    assert drain(shared, leases, (account,)) == 392


def test_leases_held_by_a_request_refused_in_the_store_are_returned() -> None:
    shared, account, endpoint = SharedStore(), bucket(Limit(400, A_DAY)), bucket(Limit(8, A_DAY), "endpoint")
    leases = shared.leases()
    for _ in range(4):
        spend_now(shared, leases, (account,), 1)
    assert shared.spend_each([endpoint], [8]).spend.allowed
    assert not spend_now(shared, leases, (account, endpoint), 1).allowed
    assert drain(shared, leases, (account,)) == 396


def test_leases_after_a_lost_reply_are_requested_again() -> None:
    """The tokens that the store may have paid are lost."""
    shared, one = SharedStore(), bucket(Limit(100, A_DAY))
    leases = shared.leases()
    spend_now(shared, leases, (one,), 1)
    for _ in range(2):
        step = leases.plan((one,), 1)
        assert isinstance(step, TokenLeaseRequest)
        assert step.costs == [2]
        shared.spend_each(step.buckets, step.costs)
        leases.abandon(step)
    assert drain(shared, leases, (one,)) == 100 - 1 - 4


@pytest.mark.parametrize("cost", [-1, 0, 6])
def test_leases_for_an_invalid_cost_raise_value_error(cost: int) -> None:
    """A negative cost returns no tokens."""
    shared, one = SharedStore(), bucket(Limit(5, 1))
    leases = shared.leases()
    spend_now(shared, leases, (one,), 1)
    assert leases.spender((one,))(cost) is None
    with pytest.raises(ValueError, match="cost"):
        leases.plan((one,), cost)


def test_leases_of_many_buckets_use_bounded_memory() -> None:
    shared = SharedStore()
    leases = TokenLeases(lambda: shared.now_us, capacity=100)
    sizes = []
    for number in range(1_000):
        spend_now(shared, leases, (bucket(Limit(100, 60), f"{number}"),), 1)
        sizes.append(len(leases))
    assert max(sizes) == 100
    assert all(later > earlier or later >= 87 for earlier, later in pairwise(sizes))
