"""Leases against a shared store whose clock and wire the test holds: any order, any delay, any loss."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyvault.access.limits import MAX_SECONDS, Bucket, BucketState, Limit, Spend, spend, spend_each
from keyvault.services.limits.stores import StoreReply
from keyvault.services.limits.token_leases import LIFE_US, SHARE, LeaseRequest, Leases

SECOND_US = 1_000_000
A_DAY = MAX_SECONDS
AHEAD_US = 7_777_777_777
"""The store's clock is another one than that of the processes."""

Request = tuple[Bucket, ...]


def bucket(limit: Limit, name: str = "account") -> Bucket:
    return Bucket(name, name, limit)


@dataclass
class Shared:
    """The store; `now_us` is the clock of the processes, `admitted` when it paid for which request."""

    now_us: int = 5_000_000
    states: dict[str, BucketState] = field(default_factory=dict)
    asked: int = 0

    def spend_each(self, buckets: Sequence[Bucket], costs: Sequence[int]) -> StoreReply:
        self.asked += 1
        now_us = self.now_us + AHEAD_US
        outcome, kept = spend_each([self.states.get(one.key) for one in buckets], buckets, costs, now_us)
        self.states.update(zip((one.key for one in buckets), kept, strict=True))
        return StoreReply(outcome, kept, now_us)

    def would_allow(self, one: Bucket, cost: int) -> bool:
        return spend([self.states.get(one.key)], [one], cost, self.now_us + AHEAD_US)[0].allowed

    def leases(self) -> Leases:
        return Leases(lambda: self.now_us)


def spend_at_once(shared: Shared, leases: Leases, request: Request, cost: int) -> Spend:
    """With a store that answers in no time."""
    step = leases.plan(request, cost)
    while isinstance(step, LeaseRequest):
        step = leases.settle(step, shared.spend_each(step.buckets, step.costs))
    return step


def drain(shared: Shared, leases: Leases, request: Request) -> int:
    return next(number for number in range(10_000) if not spend_at_once(shared, leases, request, 1).allowed)


@dataclass
class Travelling:
    """An ask under way; the answer when the store has it."""

    leases: Leases
    ask: LeaseRequest
    answer: StoreReply | None = None
    paid_us: int = 0


class Traffic:
    """Several processes, and what they let pass: (moment, cost) for each bucket."""

    def __init__(self, processes: int) -> None:
        self.shared = Shared()
        self.processes = [self.shared.leases() for _ in range(processes)]
        self.travelling: list[Travelling] = []
        self.admitted: dict[str, list[tuple[int, int]]] = {}

    def begin(self, process: int, request: Request, cost: int) -> None:
        leases = self.processes[process % len(self.processes)]
        if leases.spender(request)(cost) is not None:
            self._admit(request, cost, self.shared.now_us)
            return
        step = leases.plan(request, cost)
        if isinstance(step, Spend):
            assert not step.allowed, "what is all here was tried before"
            assert not all(self.shared.would_allow(one, cost) for one in request), "refused what the store would allow"
        else:
            self.travelling.append(Travelling(leases, step))

    def go_on(self, which: int, *, is_cut: bool) -> None:
        """One ask reaches the store, or its answer the process; or it is lost on the way."""
        if not self.travelling:
            return
        one = self.travelling[which % len(self.travelling)]
        if is_cut:
            self.travelling.remove(one)
            one.leases.abandon(one.ask)
        elif one.answer is None:
            one.answer, one.paid_us = self.shared.spend_each(one.ask.buckets, one.ask.costs), self.shared.now_us
        else:
            self.travelling.remove(one)
            step = one.leases.settle(one.ask, one.answer)
            if isinstance(step, LeaseRequest):
                self.travelling.append(Travelling(one.leases, step))
            elif step.allowed:
                self._admit([part.bucket for part in one.ask.parts], one.ask.cost, one.paid_us)
                held = [each for each in one.ask.request if each not in one.ask.buckets]
                self._admit(held, one.ask.cost, one.ask.sent_us)

    def _admit(self, request: Sequence[Bucket], cost: int, at_us: int) -> None:
        for one in request:
            self.admitted.setdefault(one.key, []).append((at_us, cost))

    def excess(self, one: Bucket) -> tuple[Fraction, Fraction]:
        """In the worst of all windows: the tokens beyond the limit, and beyond it and what LIFE_US brings."""
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
acts = st.tuples(
    st.sampled_from(["burst", "burst", "flood", "begin", "begin", "go on", "go on", "go on", "cut"]),
    st.integers(0, 9),
    st.booleans(),
    gaps,
    costs,
)


@settings(max_examples=300)
@given(limits, limits, st.integers(1, 3), st.lists(acts, max_size=60))
def test_leases_of_several_processes_admit_no_more_than_the_bound(
    account_limit: Limit, endpoint_limit: Limit, processes: int, schedule: list[tuple[str, int, bool, int, int]]
) -> None:
    """In any window: what a strict bucket admits, and at most a lease for each process and what a lease's life brings.

    Whatever is asked at once, however long an answer takes, and also when it never comes. Nobody is refused by a
    bucket that would have let him pass.
    """
    account, endpoint = bucket(account_limit), bucket(endpoint_limit, "endpoint")
    traffic = Traffic(processes)
    for act, number, has_endpoint, gap_us, wanted in schedule:
        traffic.shared.now_us += gap_us
        request = (account, endpoint) if has_endpoint else (account,)
        cost = min(wanted, *(one.limit.count for one in request))
        if act == "begin":
            traffic.begin(number, request, cost)
        elif act in ("burst", "flood"):
            for _ in range(25 if act == "burst" else 250):
                traffic.begin(number, request, cost)
                traffic.go_on(-1, is_cut=False)
                traffic.go_on(-1, is_cut=False)
        else:
            traffic.go_on(number, is_cut=act == "cut")
    for one in (account, endpoint):
        beyond_limit, beyond_life = traffic.excess(one)
        assert beyond_limit <= processes * max(1, one.limit.count // SHARE)
        assert beyond_life <= 0


def test_leases_that_all_processes_hold_while_the_bucket_is_full_reach_the_bound() -> None:
    """The bound is no guess: nearly all that a tenth of a second brings passes beyond the limit."""
    one = bucket(Limit(200, 1))
    traffic = Traffic(3)

    def spend_in_all(number: int) -> None:
        for process in [0, 1, 2] * number:
            traffic.begin(process, (one,), 1)
            traffic.go_on(0, is_cut=False)
            traffic.go_on(0, is_cut=False)

    for number in (1, 2, 4, 1):  # each uses the lease before up
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
    """Below 40 there is nothing to lease: each outcome is that of a strict bucket, and nobody waits longer."""
    shared, state, one = Shared(), None, bucket(limit)
    processes = [shared.leases() for _ in range(3)]
    for gap_us, process, wanted in schedule:
        shared.now_us += gap_us
        cost = min(wanted, limit.count)
        expected, (state,) = spend([state], [one], cost, shared.now_us)
        told = spend_at_once(shared, processes[process], (one,), cost)
        assert told.allowed == expected.allowed
        if told.allowed:
            assert told == expected
        else:  # the process has not seen what the others spent since
            assert 1 <= told.retry_after_seconds <= expected.retry_after_seconds


@given(limits, st.lists(st.tuples(gaps, st.integers(0, 2), st.integers(1, 30)), max_size=40))
def test_leases_lose_fewer_tokens_than_are_spent(limit: Limit, schedule: list[tuple[int, int, int]]) -> None:
    """Whoever comes, in bursts or one by one: at least half of what the store has paid has let a request pass."""
    shared, one, spent, paid = Shared(), bucket(limit), 0, 0
    processes = [shared.leases() for _ in range(3)]
    for gap_us, process, requests in schedule:
        shared.now_us += gap_us
        for _ in range(requests):
            step = processes[process].plan((one,), 1)
            while isinstance(step, LeaseRequest):
                answer = shared.spend_each(step.buckets, step.costs)
                paid += sum(step.costs) if answer.spend.allowed else 0
                step = processes[process].settle(step, answer)
            spent += step.allowed
            assert paid < 2 * spent or paid == 0


def test_leases_under_load_grow_by_doubling_up_to_a_twentieth_of_what_is_left() -> None:
    shared, one = Shared(), bucket(Limit(1_000, A_DAY))
    leases = shared.leases()
    costs: list[int] = []
    while len(costs) < 9:
        step = leases.plan((one,), 1)
        if isinstance(step, LeaseRequest):
            costs += step.costs
            leases.settle(step, shared.spend_each(step.buckets, step.costs))
    assert costs == [1, 2, 4, 8, 16, 32, 46, 44, 42]


def test_leases_tell_what_is_left_as_if_each_token_were_counted_in_the_store() -> None:
    shared, one = Shared(), bucket(Limit(300, A_DAY))
    leases, told = shared.leases(), []
    for _ in range(300):
        quick = leases.spender((one,))(1)
        told.append(quick[0] if quick else spend_at_once(shared, leases, (one,), 1).statuses[0].remaining)
    assert told == list(reversed(range(300)))
    assert shared.asked < 100
    refused = spend_at_once(shared, leases, (one,), 1)
    assert (refused.allowed, refused.retry_after_seconds) == (False, A_DAY // 300)


def test_leases_at_their_end_are_lost() -> None:
    """Nothing is spent after it, and the bucket has paid."""
    shared, one = Shared(), bucket(Limit(1_000, A_DAY))
    leases = shared.leases()
    for _ in range(1 + 2 + 4 + 1):
        spend_at_once(shared, leases, (one,), 1)
    shared.now_us += LIFE_US - 1
    assert leases.spender((one,))(1) is not None
    shared.now_us += 1
    assert leases.spender((one,))(1) is None
    told = spend_at_once(shared, leases, (one,), 1)
    assert told.statuses[0].remaining == 1_000 - (1 + 2 + 4 + 8) - 1


def test_leases_of_a_process_that_asks_seldom_hold_nothing_back() -> None:
    """40 a second over four processes is not refused by a limit of 45 a second."""
    shared, one = Shared(), bucket(Limit(45, 1))
    processes = [shared.leases() for _ in range(4)]
    for number in range(400):
        shared.now_us += 25_000
        assert spend_at_once(shared, processes[number % 4], (one,), 1).allowed


@pytest.mark.parametrize(("pause_us", "size"), [(LIFE_US - 1, 8), (LIFE_US, 4), (SECOND_US - 1, 4), (SECOND_US, 1)])
def test_leases_after_a_pause_are_as_large_as_was_used_and_begin_small_after_a_long_one(
    pause_us: int, size: int
) -> None:
    shared, one = Shared(), bucket(Limit(1_000, A_DAY))
    leases = shared.leases()
    for _ in range(1 + 2 + 4):
        spend_at_once(shared, leases, (one,), 1)
    shared.now_us += pause_us
    step = leases.plan((one,), 1)
    assert isinstance(step, LeaseRequest)
    assert step.costs == [size]


def test_leases_after_one_that_was_hardly_used_are_as_small_as_its_use() -> None:
    shared, one = Shared(), bucket(Limit(1_000, A_DAY))
    leases = shared.leases()
    for _ in range(1 + 2 + 4 + 2):
        spend_at_once(shared, leases, (one,), 1)
    shared.now_us += LIFE_US
    step = leases.plan((one,), 1)
    assert isinstance(step, LeaseRequest)
    assert step.costs == [2]


def test_leases_under_steady_load_are_about_what_a_life_needs() -> None:
    """A thousand a second of a hundred thousand: not many asks for a lease's life, and little held back."""
    shared, one = Shared(), bucket(Limit(100_000, 1))
    leases = shared.leases()
    for _ in range(5_000):
        shared.now_us += 1_000
        assert spend_at_once(shared, leases, (one,), 1).allowed
    assert shared.asked < 2 * 5_000_000 // LIFE_US


def test_leases_whose_answer_comes_late_have_ended() -> None:
    """A life begins when the ask is sent: the request itself passes, the rest does not."""
    shared, one = Shared(), bucket(Limit(1_000, A_DAY))
    leases = shared.leases()
    for _ in range(1 + 2):
        spend_at_once(shared, leases, (one,), 1)
    step = leases.plan((one,), 1)
    assert isinstance(step, LeaseRequest)
    assert step.costs == [4]
    answer = shared.spend_each(step.buckets, step.costs)
    shared.now_us += LIFE_US
    told = leases.settle(step, answer)
    assert isinstance(told, Spend)
    assert told.allowed
    assert leases.spender((one,))(1) is None


def test_leases_refused_by_an_answer_that_came_late_do_not_wait_from_then_on() -> None:
    shared, one = Shared(), bucket(Limit(10, 1))
    assert shared.spend_each([one], [10]).spend.allowed
    leases = shared.leases()
    step = leases.plan((one,), 1)
    assert isinstance(step, LeaseRequest)
    answer = shared.spend_each(step.buckets, step.costs)
    shared.now_us += 60_000
    refused = leases.settle(step, answer)
    assert isinstance(refused, Spend)
    assert not refused.allowed
    shared.now_us += 40_000
    assert spend_at_once(shared, leases, (one,), 1).allowed


@pytest.mark.parametrize("is_next_there", [False, True])
def test_leases_held_by_a_request_that_is_refused_after_their_time_are_lost(is_next_there: bool) -> None:
    """A process never holds more than one lease of a bucket."""
    shared, account, endpoint = Shared(), bucket(Limit(400, A_DAY)), bucket(Limit(8, A_DAY), "endpoint")
    leases = shared.leases()
    for _ in range(1 + 2 + 3):
        spend_at_once(shared, leases, (account,), 1)
    assert shared.spend_each([endpoint], [8]).spend.allowed
    shared.now_us += 1
    held, following = leases.plan((account, endpoint), 1), leases.plan((account,), 1)
    assert isinstance(held, LeaseRequest)
    assert isinstance(following, LeaseRequest)
    assert following.costs == [8]
    if is_next_there:
        leases.settle(following, shared.spend_each(following.buckets, following.costs))
    leases.settle(held, shared.spend_each(held.buckets, held.costs))
    left = [leases.spender((account,))(1) is not None for _ in range(9)]
    assert left == ([True] * 7 + [False] * 2 if is_next_there else [False] * 9)


def test_leases_of_a_cost_beyond_the_lease_ask_for_exactly_that() -> None:
    shared, one = Shared(), bucket(Limit(100, A_DAY))
    leases = shared.leases()
    spend_at_once(shared, leases, (one,), 1)
    step = leases.plan((one,), 30)
    assert isinstance(step, LeaseRequest)
    assert step.costs == [30]


def test_leases_asked_for_by_many_at_once_are_one() -> None:
    """While one request asks for a lease, the others ask for themselves."""
    shared, one = Shared(), bucket(Limit(1_000, A_DAY))
    leases = shared.leases()
    spend_at_once(shared, leases, (one,), 1)
    steps = [leases.plan((one,), 1) for _ in range(5)]
    assert [step.costs for step in steps if isinstance(step, LeaseRequest)] == [[2], [1], [1], [1], [1]]


def test_leases_that_a_bucket_cannot_give_become_a_single_spend() -> None:
    """The last tokens are there for somebody: others have used the bucket up since it was seen."""
    shared, one = Shared(), bucket(Limit(100, A_DAY))
    leases = shared.leases()
    for _ in range(3):
        spend_at_once(shared, leases, (one,), 1)
    assert shared.spend_each([one], [96]).spend.allowed
    step = leases.plan((one,), 1)
    assert isinstance(step, LeaseRequest)
    assert step.costs == [4]
    assert spend_at_once(shared, leases, (one,), 1).allowed
    again = leases.settle(step, shared.spend_each(step.buckets, step.costs))
    assert isinstance(again, LeaseRequest)
    assert again.costs == [1]
    assert not spend_at_once(shared, leases, (one,), 1).allowed


def test_leases_of_an_empty_bucket_refuse_a_flood_without_asking() -> None:
    """Once for each token that comes back, and once a second."""
    shared, one = Shared(), bucket(Limit(10, 1))
    leases = shared.leases()
    assert drain(shared, leases, (one,)) == 10
    shared.asked = 0
    assert not any(spend_at_once(shared, leases, (one,), 1).allowed for _ in range(1_000))
    assert shared.asked == 0
    shared.now_us += 99_999
    assert not spend_at_once(shared, leases, (one,), 1).allowed
    assert shared.asked == 0
    shared.now_us += 1
    assert spend_at_once(shared, leases, (one,), 1).allowed


def test_leases_of_a_bucket_that_somebody_emptied_the_store_of_pass_within_a_second() -> None:
    shared, one = Shared(), bucket(Limit(10, A_DAY))
    leases = shared.leases()
    drain(shared, leases, (one,))
    shared.states.clear()
    shared.now_us += SECOND_US
    assert spend_at_once(shared, leases, (one,), 1).allowed


def test_leases_of_a_request_that_one_bucket_refuses_take_nothing_from_the_other() -> None:
    """Neither in the store nor from what is here."""
    shared, account, endpoint = Shared(), bucket(Limit(400, A_DAY)), bucket(Limit(8, A_DAY), "endpoint")
    leases = shared.leases()
    assert drain(shared, leases, (account, endpoint)) == 8
    for _ in range(50):
        refused = spend_at_once(shared, leases, (account, endpoint), 1)
        assert [told.remaining for told in refused.statuses] == [392, 0]
        assert refused.binding.policy == "endpoint"
    assert drain(shared, leases, (account,)) == 392


def test_leases_held_by_a_request_that_another_process_s_spending_refuses_are_given_back() -> None:
    shared, account, endpoint = Shared(), bucket(Limit(400, A_DAY)), bucket(Limit(8, A_DAY), "endpoint")
    leases = shared.leases()
    for _ in range(4):
        spend_at_once(shared, leases, (account,), 1)
    assert shared.spend_each([endpoint], [8]).spend.allowed
    assert not spend_at_once(shared, leases, (account, endpoint), 1).allowed
    assert drain(shared, leases, (account,)) == 396


def test_leases_after_an_answer_that_never_came_ask_again() -> None:
    """What the store may have paid is lost, and the next one leases."""
    shared, one = Shared(), bucket(Limit(100, A_DAY))
    leases = shared.leases()
    spend_at_once(shared, leases, (one,), 1)
    for _ in range(2):
        step = leases.plan((one,), 1)
        assert isinstance(step, LeaseRequest)
        assert step.costs == [2]
        shared.spend_each(step.buckets, step.costs)
        leases.abandon(step)
    assert drain(shared, leases, (one,)) == 100 - 1 - 4


@pytest.mark.parametrize("cost", [-1, 0, 6])
def test_leases_of_what_no_burst_holds_are_an_error(cost: int) -> None:
    """Nothing is paid back by a negative cost."""
    shared, one = Shared(), bucket(Limit(5, 1))
    leases = shared.leases()
    spend_at_once(shared, leases, (one,), 1)
    assert leases.spender((one,))(cost) is None
    with pytest.raises(ValueError, match="cost"):
        leases.plan((one,), cost)


def test_leases_flooded_with_buckets_know_a_bounded_number() -> None:
    shared = Shared()
    leases = Leases(lambda: shared.now_us, capacity=100)
    sizes = []
    for number in range(1_000):
        spend_at_once(shared, leases, (bucket(Limit(100, 60), f"{number}"),), 1)
        sizes.append(len(leases))
    assert max(sizes) == 100
    assert all(later > earlier or later >= 87 for earlier, later in pairwise(sizes))
