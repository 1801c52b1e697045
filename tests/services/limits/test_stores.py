"""The limit stores agree with `access.limits.spend`, under concurrency too."""

import asyncio
import random
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis import Redis

from keyvault.access.limits import MAX_COUNT, MAX_SECONDS, Bucket, BucketState, Limit, Spend, spend, spend_each
from keyvault.services.limits import stores as limit_stores
from keyvault.services.limits.redis_pipeline import LimitPipeline
from keyvault.services.limits.stores import LimitStore, LimitStoreLostError, LocalStore, RedisStore
from tests.servers.throwaway import free_port
from tests.services.racing import TIMEOUT_SECONDS, race

NOW_US = 1_795_262_400_000_000
A_DAY = MAX_SECONDS
"""Longest window, in seconds: with a small limit, no token returns during a test."""


def bucket(limit: Limit, name: str = "account") -> Bucket:
    return Bucket(name, f"kv:limit:{{1}}:{name}", limit)


def count_allowed(store: LimitStore, buckets: Sequence[Bucket], attempts: int) -> int:
    return sum(store.spend(buckets, 1).allowed for _ in range(attempts))


@pytest.fixture
def client(redis_url: str) -> Iterator["Redis"]:
    with Redis.from_url(redis_url, decode_responses=True) as connected:
        yield connected


def make_store(redis_url: str) -> RedisStore:
    """Make a store with a long timeout; the default is too short for a busy test machine."""
    return RedisStore(redis_url, timeout_seconds=TIMEOUT_SECONDS)


def stored(client: "Redis", one: Bucket) -> BucketState | None:
    found = client.get(one.key)
    return BucketState(*map(int, str(found).split(":"))) if found else None


# ------------------------------------------------------------------------------------------------ in process

limits = st.builds(Limit, st.integers(1, 9), st.integers(1, 3))


@given(
    st.lists(limits, min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(-1_000_000, 2_000_000), st.integers(1, 9)), max_size=40),
)
def test_local_store_agrees_with_the_pure_arithmetic(
    limits_drawn: list[Limit], requests: list[tuple[int, int]]
) -> None:
    """Also when the clock steps back."""
    buckets = [bucket(limit, str(number)) for number, limit in enumerate(limits_drawn)]
    clock = [NOW_US]
    store = LocalStore(lambda: clock[0] * 1000)
    states: tuple[BucketState | None, ...] = (None,) * len(buckets)
    for gap_us, cost in requests:
        clock[0] += gap_us
        affordable = min(cost, *(limit.count for limit in limits_drawn))
        expected, states = spend(states, buckets, affordable, clock[0])
        assert store.spend(buckets, affordable) == expected


@given(
    st.lists(st.builds(Limit, st.integers(1, 9) | st.just(999_983), st.integers(1, 3)), min_size=1, max_size=2),
    st.lists(
        st.tuples(
            st.sampled_from([0, 1, 111_111, 333_333, -2_000_000]) | st.integers(-1_000_000, 2_000_000),
            st.integers(1, 9),
            st.booleans(),
        ),
        max_size=60,
    ),
)
def test_local_store_fast_path_agrees_with_the_pure_arithmetic(
    limits_drawn: list[Limit], requests: list[tuple[int, int, bool]]
) -> None:
    """What `spender` admits, `spend` would admit with the same effect; what `spender` declines costs nothing."""
    buckets = [bucket(limit, str(number)) for number, limit in enumerate(limits_drawn)]
    clock, pure = [NOW_US], dict[str, BucketState | None].fromkeys(one.key for one in buckets)
    store = LocalStore(lambda: clock[0] * 1000)
    for gap_us, cost, is_first_alone in requests:
        clock[0] += gap_us
        request = buckets[:1] if is_first_alone else buckets
        affordable = min(cost, *(one.limit.count for one in request))
        expected, kept = spend([pure[one.key] for one in request], request, affordable, clock[0])
        has_new = any(pure[one.key] is None for one in request)
        pure.update(zip((one.key for one in request), kept, strict=True))
        fast = store.spender(request)(affordable)
        assert (fast is not None) == (expected.allowed and not has_new)
        if fast is None:
            assert store.spend(request, affordable) == expected
        else:
            assert fast == tuple(part for one in expected.statuses for part in (one.remaining, one.reset_seconds))


def test_local_store_fast_path_for_three_buckets_spends_nothing() -> None:
    """An account and an endpoint have one bucket each; only `spend` decides about more."""
    store, buckets = LocalStore(lambda: NOW_US * 1000), [bucket(Limit(9, 1), name) for name in "abc"]
    store.spend(buckets, 1)
    assert store.spender(buckets)(1) is None
    assert [status.remaining for status in store.spend(buckets, 1).statuses] == [7, 7, 7]


@pytest.mark.parametrize("cost", [-1, 0, 10])
def test_local_store_fast_path_with_an_invalid_cost_spends_nothing(cost: int) -> None:
    """A negative cost returns no tokens."""
    store, one = LocalStore(lambda: NOW_US * 1000), bucket(Limit(9, 1))
    store.spend([one], 1)
    assert store.spender([one])(cost) is None
    assert store.spend([one], 1).statuses[0].remaining == 7


def test_local_store_with_a_changed_limit_under_one_key_follows_the_arithmetic() -> None:
    """Buckets normally carry their limit in the key."""
    store = LocalStore(lambda: NOW_US * 1000)
    store.spend([bucket(Limit(4, 8))], 2)
    smaller = bucket(Limit(2, 8))
    assert store.spender([smaller])(1) is None
    assert store.spend([smaller], 1).statuses[0].remaining == 0


def test_local_store_with_64_threads_admits_exactly_the_limit() -> None:
    def busy_now_ns() -> int:
        time.sleep(0)  # yields to another thread at the worst moment: after the states were read
        return NOW_US * 1000

    store, buckets = LocalStore(busy_now_ns), [bucket(Limit(500, A_DAY)), bucket(Limit(300, A_DAY), "endpoint")]
    assert sum(race(*[lambda: count_allowed(store, buckets, 10)] * 64)) == 300
    assert store.spend(buckets[:1], 200).allowed
    assert not store.spend(buckets[:1], 1).allowed


def test_local_store_with_threads_on_both_paths_admits_exactly_the_limit() -> None:
    """The verifier and the integration plane spend from one store."""
    store, buckets = (
        LocalStore(lambda: NOW_US * 1000),
        [bucket(Limit(500, A_DAY)), bucket(Limit(300, A_DAY), "endpoint")],
    )
    store.spend(buckets, 1)

    def spend_fast() -> int:
        return sum(store.spender(buckets)(1) is not None for _ in range(100))

    assert sum(race(*[spend_fast, lambda: count_allowed(store, buckets, 100)] * 8)) == 299
    assert store.spend(buckets[:1], 200).allowed
    assert store.spender(buckets[:1])(1) is None


def test_local_store_with_its_own_clock_returns_tokens() -> None:
    """The store measures elapsed time, not wall time."""
    store, limit, before_us = LocalStore(), Limit(100, 1), limit_stores.monotonic_us()
    assert store.spend([bucket(limit)], 100).allowed
    while not store.spend([bucket(limit)], 1).allowed:
        assert limit_stores.monotonic_us() - before_us < 30_000_000
    assert limit_stores.monotonic_us() - before_us >= 10_000


def test_local_store_with_many_buckets_stays_within_its_capacity() -> None:
    store = LocalStore(lambda: NOW_US * 1000, capacity=100)
    for number in range(1_000):
        store.spend([bucket(Limit(10, 60), str(number))], 1)
        assert len(store) <= 100


def test_local_store_with_many_buckets_keeps_the_exhausted_ones() -> None:
    """Filling the store does not restore an exhausted limit."""
    store, limit = LocalStore(lambda: NOW_US * 1000, capacity=100), Limit(10, 60)
    exhausted = [bucket(limit, f"0 exhausted {number}") for number in range(50)]
    assert [store.spend([one], 10).allowed for one in exhausted] == [True] * 50
    for number in range(1_000):
        store.spend([bucket(limit, f"flood {number}")], 1)
    assert [store.spend([one], 1).allowed for one in exhausted] == [False] * 50


def test_local_store_evicts_full_buckets_first() -> None:
    clock = [NOW_US]
    store = LocalStore(lambda: clock[0] * 1000, capacity=100)
    for number in range(80):
        store.spend([bucket(Limit(10, 1), f"9 soon full {number}")], 10)
    clock[0] += 1_000_000
    spent_from = [bucket(Limit(10, 60), f"0 spent from {number}") for number in range(33)]
    for one in spent_from:
        store.spend([one], 1)
    assert [store.spend([one], 1).statuses[0].remaining for one in spent_from] == [8] * 33


# ---------------------------------------------------------------------------------------------------------- Redis


def test_redis_store_in_one_moment_admits_exactly_the_burst(redis_url: str) -> None:
    store, limit = make_store(redis_url), Limit(50, A_DAY)
    outcomes = [store.spend([bucket(limit)], 1) for _ in range(53)]
    assert [one.allowed for one in outcomes] == [True] * 50 + [False] * 3
    assert [one.statuses[0].remaining for one in outcomes] == [*reversed(range(50)), 0, 0, 0]
    assert A_DAY // 50 - 60 < outcomes[-1].retry_after_seconds <= A_DAY // 50


def test_redis_store_with_64_concurrent_clients_admits_exactly_the_limit(redis_url: str) -> None:
    """Each client has its own connections, like a process."""
    buckets = [bucket(Limit(500, A_DAY)), bucket(Limit(300, A_DAY), "endpoint")]
    stores = [make_store(redis_url) for _ in range(64)]
    counted = race(*[lambda store=store: count_allowed(store, buckets, 10) for store in stores])
    assert sum(counted) == 300
    assert stores[0].spend(buckets[:1], 200).allowed
    assert not stores[0].spend(buckets[:1], 1).allowed


def test_redis_store_that_refuses_takes_nothing_from_any_bucket(redis_url: str, client: "Redis") -> None:
    store = make_store(redis_url)
    account, endpoint = bucket(Limit(10, A_DAY)), bucket(Limit(2, A_DAY), "endpoint")
    assert store.spend([account, endpoint], 2).allowed
    before = client.mget([account.key, endpoint.key])
    refused = [store.spend([account, endpoint], 1) for _ in range(5)]
    assert [(one.allowed, one.binding.policy, one.statuses[0].remaining) for one in refused] == [
        (False, "endpoint", 8)
    ] * 5
    assert client.mget([account.key, endpoint.key]) == before
    assert store.spend([account], 8).allowed


def test_redis_store_agrees_with_the_pure_arithmetic(
    redis_url: str, client: "Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal states before give equal states after, to the last fraction, for limits of every size.

    The generated states are full, partly spent, exhausted, or beyond the maximum, as after a backward clock step.
    """
    seen: list[tuple[int, Spend, tuple[BucketState, ...]]] = []

    def record_spend(
        states: Sequence[BucketState | None], buckets: Sequence[Bucket], costs: Sequence[int], now_us: int
    ) -> Any:
        outcome, kept = spend_each(states, buckets, costs, now_us)
        seen.append((now_us, outcome, kept))
        return outcome, kept

    monkeypatch.setattr(limit_stores, "spend_each", record_spend)
    rng, store = random.Random(3), make_store(redis_url)  # noqa: S311  generates examples, not secrets
    for number in range(600):
        buckets = [Bucket("any", f"{{{number}}}:{place}", _any_limit(rng)) for place in range(rng.randint(1, 3))]
        before = {one.key: _any_state(rng, one.limit, _now_us(client)) for one in buckets}
        client.mset({key: f"{state[0]}:{state[1]}" for key, state in before.items() if state} | {"other": "1"})
        least = min(one.limit.count for one in buckets)
        store.spend(buckets, rng.choice([1, least, rng.randint(1, least)]))
        now_us, outcome, kept = seen[-1]
        for one, expected in zip(buckets, kept, strict=True):
            state = stored(client, one)
            # A full bucket may have expired; a refusal leaves the state unchanged.
            assert state == expected or max(state or expected, expected).ceiling <= max(now_us, _now_us(client)), (
                one,
                before[one.key],
                outcome,
            )
    allowed = sum(outcome.allowed for _, outcome, _ in seen)
    assert 100 < allowed < 500


@pytest.mark.parametrize("limit", [Limit(1, 1), Limit(7, 60), Limit(999_983, 60), Limit(MAX_COUNT, A_DAY)], ids=str)
def test_redis_script_at_the_edge_agrees_with_the_pure_arithmetic(client: "Redis", limit: Limit) -> None:
    """Only the script's time is replaced; the last fraction of a microsecond must decide equally."""
    injected = limit_stores._SPEND.replace("redis.call('TIME')", "{ARGV[#ARGV - 1], ARGV[#ARGV]}")
    assert injected != limit_stores._SPEND
    script, one, outcomes = client.register_script(injected), bucket(limit), set()
    for cost in {1, limit.count // 2 + 1, limit.count}:
        micros, fraction = limit.advance(cost)
        edges = {0, limit.count - 1, *(max(0, limit.count - fraction + step) % limit.count for step in (-1, 0, 1))}
        for before in [
            BucketState(NOW_US + limit.window_us - micros + step, edge)
            for step in (-2, -1, 0, 1)
            for edge in sorted(edges)
        ]:
            client.set(one.key, f"{before.micros}:{before.fraction}")
            script([one.key], [limit.count, limit.window_us, micros, fraction, *divmod(NOW_US, 1_000_000)])
            outcome, (kept,) = spend([before], [one], cost, NOW_US)
            assert stored(client, one) == kept
            outcomes.add(outcome.allowed)
    assert outcomes == {True, False}


def _any_limit(rng: random.Random) -> Limit:
    return Limit(
        rng.choice([1, 3, 7, 60, 999_983, MAX_COUNT, rng.randint(1, MAX_COUNT)]),
        rng.choice([60, 3_600, MAX_SECONDS, rng.randint(60, MAX_SECONDS)]),
    )


def _any_state(rng: random.Random, limit: Limit, now_us: int) -> BucketState | None:
    micros = rng.choice(
        [
            now_us - rng.randint(0, 10**9),
            now_us + rng.randint(0, limit.window_us),
            now_us + limit.window_us - limit.advance(1)[0],
            now_us + limit.window_us + rng.randint(0, 10**12),
        ]
    )
    return rng.choice([None, *[BucketState(micros, rng.randrange(limit.count))] * 4])


def _now_us(client: "Redis") -> int:
    seconds, micros = client.time()
    return int(seconds) * 1_000_000 + int(micros)


def test_redis_store_after_a_backward_clock_step_locks_out_for_at_most_one_window(
    redis_url: str, client: "Redis"
) -> None:
    """The first request corrects the state, although it is refused."""
    store, late = make_store(redis_url), bucket(Limit(10, A_DAY))
    full_at_us = _now_us(client) + 30 * late.limit.window_us
    client.set(late.key, f"{full_at_us}:7")
    refused = store.spend([late], 10)
    assert (refused.allowed, refused.retry_after_seconds) == (False, A_DAY)
    state = stored(client, late)
    assert state
    assert state.ceiling <= _now_us(client) + late.limit.window_us


def test_redis_store_key_expires_when_its_bucket_is_full(redis_url: str, client: "Redis") -> None:
    store, one = make_store(redis_url), bucket(Limit(1_000, 3_600))
    store.spend([one], 500)
    state = stored(client, one)
    assert state
    assert state.ceiling <= client.pexpiretime(one.key) * 1_000 <= state.ceiling + 10_000_000


@pytest.mark.parametrize("cost", [-5, 0, 11])
def test_redis_store_with_an_invalid_cost_spends_nothing(redis_url: str, client: "Redis", cost: int) -> None:
    with pytest.raises(ValueError, match="cost"):
        make_store(redis_url).spend([bucket(Limit(20, A_DAY)), bucket(Limit(10, A_DAY), "endpoint")], cost)
    assert client.keys() == []


def test_redis_store_after_a_script_flush_loads_the_script_again(redis_url: str, client: "Redis") -> None:
    store = make_store(redis_url)
    store.spend([bucket(Limit(3, A_DAY))], 1)
    client.script_flush()
    assert store.spend([bucket(Limit(3, A_DAY))], 1).statuses[0].remaining == 1


def test_redis_store_at_a_closed_port_raises_lost() -> None:
    with pytest.raises(LimitStoreLostError, match="ConnectionError"):
        RedisStore(f"redis://127.0.0.1:{free_port()}/0").spend([bucket(Limit(3, 1))], 1)


def test_redis_store_without_a_reply_raises_lost_and_sends_nothing_twice() -> None:
    """A second attempt might be charged twice."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = RedisStore(f"redis://127.0.0.1:{silent.getsockname()[1]}/0")
        with pytest.raises(LimitStoreLostError, match="Timeout"):
            store.spend([bucket(Limit(3, 1))], 1)
        silent.setblocking(False)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):
            silent.accept()


def test_redis_store_with_the_wrong_password_raises_lost_without_revealing_it(redis_url: str) -> None:
    parts = urlsplit(redis_url)
    wrong = urlunsplit(parts._replace(netloc=f":not-the-password@{parts.hostname}:{parts.port}"))
    with pytest.raises(LimitStoreLostError) as lost:
        RedisStore(wrong).spend([bucket(Limit(3, 1))], 1)
    assert "not-the-password" not in str(lost.value)


@pytest.mark.parametrize("state", ["", "nonsense", "1:2:3", "-1:0"])
def test_redis_store_with_an_invalid_state_raises_lost(redis_url: str, client: "Redis", state: str) -> None:
    client.set(bucket(Limit(3, 1)).key, state)
    with pytest.raises(LimitStoreLostError):
        make_store(redis_url).spend([bucket(Limit(3, 1))], 1)


def test_redis_store_out_of_memory_raises_lost_and_spends_nothing(redis_url: str, client: "Redis") -> None:
    """Full memory must not produce a bucket that is never charged."""
    buckets = [bucket(Limit(3, A_DAY)), bucket(Limit(3, A_DAY), "endpoint")]
    before = f"{client.config_get('maxmemory')['maxmemory']}"
    client.config_set("maxmemory", 1)
    try:
        with pytest.raises(LimitStoreLostError):
            make_store(redis_url).spend(buckets, 1)
    finally:
        client.config_set("maxmemory", before)
    assert client.keys() == []


# ------------------------------------------------------------------------------------------------ Redis in asyncio


class AsyncioStore:
    """Runs concurrent asyncio requests against one Redis store."""

    def __init__(self, url: str, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.store = RedisStore(url, timeout_seconds)

    def run(self, *batches: Sequence[tuple[Sequence[Bucket], int]]) -> list[list[Spend | BaseException]]:
        """Run each batch of requests concurrently, one batch after the other, and return their outcomes."""

        async def run_all() -> list[list[Spend | BaseException]]:
            try:
                return [
                    await asyncio.gather(
                        *[self.store.spend_async(buckets, cost) for buckets, cost in batch], return_exceptions=True
                    )
                    for batch in batches
                ]
            finally:
                await self.store.close_async()

        return asyncio.run(run_all())


def allowed(outcomes: Sequence[Spend | BaseException]) -> list[bool]:
    assert all(isinstance(one, Spend) for one in outcomes), outcomes
    return [isinstance(one, Spend) and one.allowed for one in outcomes]


def test_redis_store_in_asyncio_returns_each_caller_its_outcome(redis_url: str, client: "Redis") -> None:
    account, endpoint = bucket(Limit(10, A_DAY)), bucket(Limit(3, A_DAY), "endpoint")
    (outcomes,) = AsyncioStore(redis_url).run(
        [([account], 2), ([account, endpoint], 3), ([account, endpoint], 1), ([account], 5)]
    )
    assert allowed(outcomes) == [True, True, False, True]
    assert [[status.remaining for status in one.statuses] for one in outcomes if isinstance(one, Spend)] == [
        [8],
        [5, 0],
        [5, 0],
        [0],
    ]
    assert stored(client, account)


def test_redis_store_in_asyncio_sends_concurrent_requests_in_one_round_trip(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that arrive during a round trip share the next one."""
    round_trips: list[int] = []
    evaluated = LimitPipeline._evaluate

    async def counted(self: LimitPipeline, client: Any, batch: Sequence[Any]) -> list[Any]:
        round_trips.append(len(batch))
        return await evaluated(self, client, batch)

    loop, one = AsyncioStore(redis_url), bucket(Limit(1_000, A_DAY))
    loop.store.spend([one], 1)  # loads the script
    monkeypatch.setattr(LimitPipeline, "_evaluate", counted)

    async def run_all() -> list[Spend]:
        first = [asyncio.ensure_future(loop.store.spend_async([one], 1)) for _ in range(200)]
        while not round_trips:
            await asyncio.sleep(0)
        second = [asyncio.ensure_future(loop.store.spend_async([one], 1)) for _ in range(50)]
        try:
            return await asyncio.gather(*first, *second)
        finally:
            await loop.store.close_async()

    assert [spent.statuses[0].remaining for spent in asyncio.run(run_all())] == list(range(998, 748, -1))
    assert round_trips == [200, 50]


def test_redis_store_in_asyncio_and_threads_admits_exactly_the_limit(redis_url: str) -> None:
    """Event loops and threads of several processes share one Redis."""
    buckets = [bucket(Limit(500, A_DAY)), bucket(Limit(300, A_DAY), "endpoint")]

    def in_asyncio() -> int:
        return sum(sum(allowed(batch)) for batch in AsyncioStore(redis_url).run(*[[(buckets, 1)] * 20] * 5))

    blocking = [make_store(redis_url) for _ in range(8)]
    counted = race(*[in_asyncio] * 8, *[lambda store=store: count_allowed(store, buckets, 20) for store in blocking])
    assert sum(counted) == 300
    assert blocking[0].spend(buckets[:1], 200).allowed
    assert not blocking[0].spend(buckets[:1], 1).allowed


def test_redis_store_in_asyncio_after_a_script_flush_loads_the_script_again(redis_url: str, client: "Redis") -> None:
    """Each request is counted once."""
    loop, one = AsyncioStore(redis_url), bucket(Limit(20, A_DAY))
    loop.run([([one], 1)])
    client.script_flush()
    (outcomes,) = loop.run([([one], 1)] * 5)
    assert allowed(outcomes) == [True] * 5
    assert loop.store.spend([one], 1).statuses[0].remaining == 13


def test_redis_store_in_asyncio_with_one_invalid_state_fails_for_that_caller_only(
    redis_url: str, client: "Redis"
) -> None:
    valid, invalid = bucket(Limit(3, A_DAY)), bucket(Limit(3, A_DAY), "invalid")
    client.set(invalid.key, "nonsense")
    ((before, lost, after),) = AsyncioStore(redis_url).run([([valid], 1), ([invalid], 1), ([valid], 1)])
    assert allowed([before, after]) == [True, True]
    assert isinstance(lost, LimitStoreLostError)


def test_redis_store_in_asyncio_at_a_closed_port_raises_lost() -> None:
    (outcomes,) = AsyncioStore(f"redis://127.0.0.1:{free_port()}/0").run([([bucket(Limit(3, 1))], 1)] * 3)
    assert [type(one) for one in outcomes] == [LimitStoreLostError] * 3


def test_redis_store_in_asyncio_without_a_reply_raises_lost_for_all() -> None:
    """One connection is used, and no call is sent twice."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        loop = AsyncioStore(f"redis://127.0.0.1:{silent.getsockname()[1]}/0", timeout_seconds=0.25)
        (outcomes,) = loop.run([([bucket(Limit(3, 1))], 1)] * 100)
        assert [type(one) for one in outcomes] == [LimitStoreLostError] * 100
        silent.setblocking(False)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):
            silent.accept()


def test_redis_store_in_asyncio_with_a_canceled_caller_answers_the_others(redis_url: str) -> None:
    loop, one = AsyncioStore(redis_url), bucket(Limit(9, A_DAY))

    async def run_all() -> bool:
        canceled, other = (asyncio.ensure_future(loop.store.spend_async([one], 1)) for _ in range(2))
        await asyncio.sleep(0)
        canceled.cancel()
        try:
            return (await other).allowed
        finally:
            await loop.store.close_async()

    assert asyncio.run(run_all())


def test_redis_store_in_asyncio_when_the_loop_ends_cancels_pending_requests(redis_url: str) -> None:
    """A verifier stops with requests under way."""
    loop, one = AsyncioStore(redis_url), bucket(Limit(9, A_DAY))

    async def leave() -> "asyncio.Task[Spend]":
        task = asyncio.ensure_future(loop.store.spend_async([one], 1))
        await asyncio.sleep(0)
        return task

    task = asyncio.run(leave())
    assert task.cancelled()
    assert allowed(loop.run([([one], 1)])[0]) == [True]
