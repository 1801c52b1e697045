"""Limit budgets of a verifier process, as configured; several instances stand for several processes."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import pytest
from pytest_django import Settings
from redis import Redis

from keyvault.access.limits import MAX_SECONDS, Bucket, Limit, Spend
from keyvault.domain.errors import DependencyUnavailableError
from keyvault.domain.keys import KeyKind
from keyvault.services.limits import limiter as limits
from keyvault.services.limits.budgets import LeasedBudgets, LimitBudgets, LocalBudgets, StrictBudgets, budgets
from keyvault.services.limits.limiter import Limiter, account_buckets, failed_proofs, limiter
from keyvault.services.limits.stores import LimitStoreLostError, LocalStore, RedisStore, StoreReply
from keyvault.services.limits.token_leases import TokenLeases
from tests.servers.throwaway import free_port
from tests.services.racing import TIMEOUT_SECONDS, race

T = TypeVar("T")

A_DAY = MAX_SECONDS
ACCOUNT = Limit(500, A_DAY)
BUCKETS = account_buckets(7, KeyKind.PRIVATE, ACCOUNT, "orders.create", Limit(300, A_DAY))
ACCOUNT_ONLY = BUCKETS[:1]
SMALL = account_buckets(8, KeyKind.PRIVATE, Limit(39, A_DAY), "any", None)

NO_EXPIRY_US = 3_600_000_000
"""Lease life that exceeds the test's duration, in microseconds, for tests that count every token."""


def make_budgets(redis_url: str, *, is_strict: bool = False, life_us: int = NO_EXPIRY_US) -> LimitBudgets:
    """Make the budgets of one process, with its own connections and leases."""
    store = RedisStore(redis_url, timeout_seconds=TIMEOUT_SECONDS)
    shared = Limiter(store, LocalStore(), 25)
    return StrictBudgets(shared) if is_strict else LeasedBudgets(shared, store, TokenLeases(life_us=life_us))


def spend_one(limit_budgets: LimitBudgets, buckets: Sequence[Bucket]) -> bool:
    """Spend one token as the engine does: on the fast path, or else in the store."""
    return limit_budgets.spender(buckets)(1) is not None or limit_budgets.spend(buckets, 1).allowed


def drain(limit_budgets: LimitBudgets, buckets: Sequence[Bucket]) -> int:
    return next(number for number in range(10_000) if not spend_one(limit_budgets, buckets))


def drain_in_asyncio(limit_budgets: LimitBudgets, buckets: Sequence[Bucket]) -> int:
    """Spend eight tokens concurrently until one is refused."""

    async def spend_async() -> bool:
        return limit_budgets.spender(buckets)(1) is not None or (await limit_budgets.spend_async(buckets, 1)).allowed

    async def drain_async() -> int:
        admitted = 0
        while True:
            outcomes = await asyncio.gather(*[spend_async() for _ in range(8)])
            admitted += sum(outcomes)
            if not all(outcomes):
                return admitted

    return run(limit_budgets, drain_async)


def run(limit_budgets: LimitBudgets, call: Callable[[], Awaitable[T]]) -> T:
    async def run_and_close() -> T:
        try:
            return await call()
        finally:
            await limit_budgets.close_async()

    return asyncio.run(run_and_close())


@pytest.fixture
def closed_port_url() -> str:
    return f"redis://127.0.0.1:{free_port()}/0"


# ----------------------------------------------------------------------------------------------------- admission


@pytest.mark.parametrize("drained", [drain, drain_in_asyncio])
@pytest.mark.parametrize("is_strict", [True, False], ids=["strict", "leased"])
def test_budgets_of_one_process_admit_exactly_the_limit(
    redis_url: str, is_strict: bool, drained: Callable[[LimitBudgets, Sequence[Bucket]], int]
) -> None:
    """A request that the endpoint refuses takes nothing from the account."""
    limit_budgets = make_budgets(redis_url, is_strict=is_strict)
    assert drained(limit_budgets, BUCKETS) == 300
    # Concurrent callers that find the endpoint empty may each have held the last token of an account lease.
    lost = 200 - drained(limit_budgets, ACCOUNT_ONLY)
    assert lost == 0 if is_strict or drained is drain else 0 <= lost < 8


def test_strict_budgets_of_several_processes_admit_exactly_the_limit(redis_url: str) -> None:
    """In threads and in asyncio, with an integration plane beside them."""
    processes = [make_budgets(redis_url, is_strict=True) for _ in range(6)]
    counted = race(
        *[lambda each=each: drain(each, ACCOUNT_ONLY) for each in processes[:3]],
        *[lambda each=each: drain_in_asyncio(each, ACCOUNT_ONLY) for each in processes[3:]],
    )
    assert sum(counted) == 500


def test_leased_budgets_of_several_processes_admit_more_than_half_and_at_most_the_limit(redis_url: str) -> None:
    """The bucket gets no tokens back during the test; expired leases lose fewer tokens than were spent."""
    processes = [make_budgets(redis_url, life_us=100_000) for _ in range(6)]
    plane = Limiter(RedisStore(redis_url, timeout_seconds=TIMEOUT_SECONDS), LocalStore(), 25)
    counted = race(
        *[lambda each=each: drain(each, ACCOUNT_ONLY) for each in processes[:3]],
        *[lambda each=each: drain_in_asyncio(each, ACCOUNT_ONLY) for each in processes[3:]],
        lambda: sum(plane.spend(ACCOUNT_ONLY, 1).allowed for _ in range(50)),
    )
    remaining = sum(drain(each, ACCOUNT_ONLY) for each in processes)  # leases that arrived after the last refusal
    assert 250 < sum(counted) + remaining <= 500


def test_leased_budgets_of_several_processes_admit_a_small_limit_exactly(redis_url: str) -> None:
    processes = [make_budgets(redis_url, life_us=1) for _ in range(6)]
    assert sum(race(*[lambda each=each: drain(each, SMALL) for each in processes])) == 39


def test_leased_budgets_under_load_rarely_call_redis(redis_url: str) -> None:
    limit_budgets, buckets = (
        make_budgets(redis_url),
        account_buckets(9, KeyKind.PRIVATE, Limit(100_000, A_DAY), "any", None),
    )
    with Redis.from_url(redis_url) as client:
        client.config_resetstat()
        assert all(spend_one(limit_budgets, buckets) for _ in range(5_000))
        stats: Any = client.info("commandstats")
        assert sum(stats[name]["calls"] for name in stats if name.startswith("cmdstat_evalsha")) < 20


def test_leased_budgets_of_an_empty_bucket_refuse_most_requests_without_redis(redis_url: str) -> None:
    limit_budgets = make_budgets(redis_url)
    assert drain(limit_budgets, SMALL) == 39
    with Redis.from_url(redis_url) as client:
        client.config_resetstat()
        refused = [limit_budgets.spend(SMALL, 1) for _ in range(200)]
        stats: Any = client.info("commandstats")
    assert {one.allowed for one in refused} == {False}
    assert all(0 < one.retry_after_seconds <= A_DAY // 39 + 1 for one in refused)
    # One call a second, in case Redis was flushed.
    assert sum(stats[name]["calls"] for name in stats if name.startswith("cmdstat_evalsha")) < 100


def test_leased_budgets_report_the_same_remaining_tokens_as_strict_ones(redis_url: str) -> None:
    remaining: list[int] = []
    limit_budgets = make_budgets(redis_url)
    for _ in range(100):
        fast = limit_budgets.spender(ACCOUNT_ONLY)(1)
        remaining.append(fast[0] if fast else limit_budgets.spend(ACCOUNT_ONLY, 1).binding.remaining)
    assert remaining == list(range(499, 399, -1))


def test_local_budgets_share_tokens_with_the_integration_plane() -> None:
    store = LocalStore()
    plane = Limiter(store, None, 100)
    limit_budgets = LocalBudgets(plane, store)
    assert limit_budgets.is_local
    assert plane.spend(BUCKETS, 100).allowed
    assert drain(limit_budgets, BUCKETS) == 200
    assert run(limit_budgets, lambda: limit_budgets.spend_async(ACCOUNT_ONLY, 200)).allowed
    assert not plane.spend(ACCOUNT_ONLY, 1).allowed


# --------------------------------------------------------------------------------------------------- Redis unavailable


class FlakyRedisStore(RedisStore):
    """A Redis store that can be made unavailable and counts its calls."""

    def __init__(self, redis_url: str) -> None:
        super().__init__(redis_url, timeout_seconds=TIMEOUT_SECONDS)
        self.is_available = True
        self.calls = 0

    def spend_each(self, buckets: Sequence[Bucket], costs: Sequence[int]) -> StoreReply:
        self.calls += 1
        if not self.is_available:
            raise LimitStoreLostError("gone")
        return super().spend_each(buckets, costs)

    async def spend_each_async(self, buckets: Sequence[Bucket], costs: Sequence[int]) -> StoreReply:
        self.calls += 1
        await asyncio.sleep(0)
        if not self.is_available:
            raise LimitStoreLostError("gone")
        return await super().spend_each_async(buckets, costs)


@pytest.mark.parametrize("in_asyncio", [False, True], ids=["blocking", "asyncio"])
@pytest.mark.parametrize("is_strict", [True, False], ids=["strict", "leased"])
def test_budgets_without_redis_spend_a_share_and_retry_once_a_second(
    redis_url: str, is_strict: bool, in_asyncio: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Limits stay in force, endpoints that refuse on loss refuse, and the loss is logged once."""
    caplog.set_level(logging.WARNING, limits.__name__)
    clock, store = [1_000.0], FlakyRedisStore(redis_url)
    shared = Limiter(store, LocalStore(), 25, lambda: clock[0])
    limit_budgets: LimitBudgets = StrictBudgets(shared) if is_strict else LeasedBudgets(shared, store)

    async def spend(*, refuse_on_loss: bool = False) -> Spend:
        if in_asyncio:
            return await limit_budgets.spend_async(SMALL, 1, refuse_on_loss=refuse_on_loss)
        return limit_budgets.spend(SMALL, 1, refuse_on_loss=refuse_on_loss)

    async def lose_and_restore() -> None:
        assert (await spend(refuse_on_loss=True)).binding.limit.count == 39
        store.is_available, store.calls = False, 0
        with pytest.raises(DependencyUnavailableError) as refused:
            await spend(refuse_on_loss=True)
        assert refused.value.retry_after_seconds == 1
        assert [(await spend()).allowed for _ in range(12)] == [True] * 9 + [False] * 3
        with pytest.raises(DependencyUnavailableError):
            await spend(refuse_on_loss=True)
        assert store.calls == 1
        assert not shared.spend(SMALL, 1).allowed, "the integration plane has another share"
        clock[0] += 1
        await spend()
        await spend()
        assert store.calls == 2
        store.is_available = True
        clock[0] += 1
        assert (await spend()).binding.limit.count == 39

    run(limit_budgets, lose_and_restore)
    assert caplog.messages == ["limit store lost", "limit store back"]


def test_leased_budgets_without_redis_spend_their_lease(redis_url: str) -> None:
    """Also for an endpoint that refuses on loss, because a leased token needs no check."""
    store = FlakyRedisStore(redis_url)
    limit_budgets = LeasedBudgets(Limiter(store, LocalStore(), 25), store, TokenLeases(life_us=NO_EXPIRY_US))
    for _ in range(1 + 2 + 1):
        spend_one(limit_budgets, ACCOUNT_ONLY)
    store.is_available = False
    assert [limit_budgets.spend(ACCOUNT_ONLY, 1, refuse_on_loss=True).allowed for _ in range(3)] == [True] * 3
    with pytest.raises(DependencyUnavailableError):
        limit_budgets.spend(ACCOUNT_ONLY, 1, refuse_on_loss=True)


def test_leased_budgets_after_a_canceled_request_lease_again(redis_url: str) -> None:
    limit_budgets = make_budgets(redis_url)

    async def cancel_and_retry() -> None:
        await limit_budgets.spend_async(ACCOUNT_ONLY, 1)
        task = asyncio.ensure_future(limit_budgets.spend_async(ACCOUNT_ONLY, 1))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await limit_budgets.spend_async(ACCOUNT_ONLY, 1)).allowed
        assert limit_budgets.spender(ACCOUNT_ONLY)(1) is not None

    run(limit_budgets, cancel_and_retry)


# ---------------------------------------------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("has_redis", "is_strict", "expected"),
    [
        (False, False, LocalBudgets),
        (False, True, LocalBudgets),
        (True, False, LeasedBudgets),
        (True, True, StrictBudgets),
    ],
)
def test_budgets_follow_the_configuration(
    settings: Settings, closed_port_url: str, has_redis: bool, is_strict: bool, expected: type[LimitBudgets]
) -> None:
    settings.REDIS_URL, settings.IS_STRICT_LIMITS = closed_port_url if has_redis else "", is_strict
    assert type(budgets()) is expected
    assert budgets().is_local == (not has_redis)
    assert budgets() is budgets()


def test_budgets_as_configured_spend_from_the_limiter_store(settings: Settings) -> None:
    """Also after the limiter is created again, as tests do."""
    settings.REDIS_URL = ""
    for _ in range(2):
        assert limiter().spend(SMALL, 30).allowed
        assert drain(budgets(), SMALL) == 9
        limiter.cache_clear()


def test_budgets_as_configured_share_the_fallback_state_with_the_limiter(
    settings: Settings, closed_port_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A lost Redis is logged once, and the process's share covers the integration plane too."""
    caplog.set_level(logging.WARNING, limits.__name__)
    settings.REDIS_URL, settings.IS_STRICT_LIMITS, settings.LIMIT_FALLBACK_PERCENT = closed_port_url, False, 50
    assert limiter().spend(SMALL, 10).allowed
    failed_proofs().note("192.0.2.1")
    assert drain(budgets(), SMALL) == 9
    assert caplog.messages == ["limit store lost"]
