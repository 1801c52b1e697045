"""What the verifier spends from, as configured: several of these are several processes."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import pytest
from pytest_django import Settings
from redis import Redis

from keyvault.access.limits import LONGEST_SECONDS, Bucket, Limit, Spend
from keyvault.domain.errors import DependencyUnavailableError
from keyvault.domain.keys import KeyKind
from keyvault.services.limits import limiter as limits
from keyvault.services.limits.budgets import LeasedBudgets, LimitBudgets, LocalBudgets, StrictBudgets, budgets
from keyvault.services.limits.limiter import Limiter, account_buckets, failed_proofs, limiter
from keyvault.services.limits.stores import LimitStoreLostError, LocalStore, RedisStore, StoreReply
from keyvault.services.limits.token_leases import Leases
from tests.servers.throwaway import free_port
from tests.services.racing import TIMEOUT_SECONDS, race

T = TypeVar("T")

A_DAY = LONGEST_SECONDS
ACCOUNT = Limit(500, A_DAY)
BUCKETS = account_buckets(7, KeyKind.PRIVATE, ACCOUNT, "orders.create", Limit(300, A_DAY))
ACCOUNT_ONLY = BUCKETS[:1]
SMALL = account_buckets(8, KeyKind.PRIVATE, Limit(39, A_DAY), "any", None)

FOR_EVER_US = 3_600_000_000
"""Leases that outlive the test: where it counts every token, however slow the machine."""


def process(redis_url: str, *, is_strict: bool = False, life_us: int = FOR_EVER_US) -> LimitBudgets:
    """With connections and leases of its own."""
    store = RedisStore(redis_url, timeout_seconds=TIMEOUT_SECONDS)
    shared = Limiter(store, LocalStore(), 25)
    return StrictBudgets(shared) if is_strict else LeasedBudgets(shared, store, Leases(life_us=life_us))


def spend_one(spending: LimitBudgets, buckets: Sequence[Bucket]) -> bool:
    """As the engine does."""
    return spending.payer(buckets)(1) is not None or spending.spend(buckets, 1).allowed


def drain(spending: LimitBudgets, buckets: Sequence[Bucket]) -> int:
    return next(number for number in range(10_000) if not spend_one(spending, buckets))


def drain_in_asyncio(spending: LimitBudgets, buckets: Sequence[Bucket]) -> int:
    """Eight at a time, until one is refused."""

    async def spend_async() -> bool:
        return spending.payer(buckets)(1) is not None or (await spending.spend_async(buckets, 1)).allowed

    async def drain_async() -> int:
        passed = 0
        while True:
            outcomes = await asyncio.gather(*[spend_async() for _ in range(8)])
            passed += sum(outcomes)
            if not all(outcomes):
                return passed

    return run(spending, drain_async)


def run(spending: LimitBudgets, act: Callable[[], Awaitable[T]]) -> T:
    async def run_and_close() -> T:
        try:
            return await act()
        finally:
            await spending.close_async()

    return asyncio.run(run_and_close())


@pytest.fixture
def lost_url() -> str:
    return f"redis://127.0.0.1:{free_port()}/0"


# ----------------------------------------------------------------------------------------------------- what passes


@pytest.mark.parametrize("drained", [drain, drain_in_asyncio])
@pytest.mark.parametrize("is_strict", [True, False], ids=["strict", "leased"])
def test_budgets_of_one_process_admit_exactly_the_limit(
    redis_url: str, is_strict: bool, drained: Callable[[LimitBudgets, Sequence[Bucket]], int]
) -> None:
    """All or nothing: what the endpoint refused was not taken from the account."""
    spending = process(redis_url, is_strict=is_strict)
    assert drained(spending, BUCKETS) == 300
    # Leased, those who found the endpoint empty at once may each have held the last token of an account's lease.
    lost = 200 - drained(spending, ACCOUNT_ONLY)
    assert lost == 0 if is_strict or drained is drain else 0 <= lost < 8


def test_strict_budgets_of_several_processes_admit_exactly_the_limit(redis_url: str) -> None:
    """Never one more, whether they ask from threads or from asyncio, with an integration plane beside them."""
    processes = [process(redis_url, is_strict=True) for _ in range(6)]
    counted = race(
        *[lambda each=each: drain(each, ACCOUNT_ONLY) for each in processes[:3]],
        *[lambda each=each: drain_in_asyncio(each, ACCOUNT_ONLY) for each in processes[3:]],
    )
    assert sum(counted) == 500


def test_leased_budgets_of_several_processes_admit_no_more_than_the_limit_and_more_than_half(redis_url: str) -> None:
    """Of a bucket that gets nothing back meanwhile; what a lease loses is less than what was spent."""
    processes = [process(redis_url, life_us=100_000) for _ in range(6)]
    plane = Limiter(RedisStore(redis_url, timeout_seconds=TIMEOUT_SECONDS), LocalStore(), 25)
    counted = race(
        *[lambda each=each: drain(each, ACCOUNT_ONLY) for each in processes[:3]],
        *[lambda each=each: drain_in_asyncio(each, ACCOUNT_ONLY) for each in processes[3:]],
        lambda: sum(plane.spend(ACCOUNT_ONLY, 1).allowed for _ in range(50)),
    )
    left = sum(drain(each, ACCOUNT_ONLY) for each in processes)  # of leases that came after the last was refused
    assert 250 < sum(counted) + left <= 500


def test_leased_budgets_of_several_processes_admit_a_small_limit_exactly(redis_url: str) -> None:
    processes = [process(redis_url, life_us=1) for _ in range(6)]
    assert sum(race(*[lambda each=each: drain(each, SMALL) for each in processes])) == 39


def test_leased_budgets_under_load_ask_redis_seldom(redis_url: str) -> None:
    spending, buckets = process(redis_url), account_buckets(9, KeyKind.PRIVATE, Limit(100_000, A_DAY), "any", None)
    with Redis.from_url(redis_url) as client:
        client.config_resetstat()
        assert all(spend_one(spending, buckets) for _ in range(5_000))
        stats: Any = client.info("commandstats")
        assert sum(stats[name]["calls"] for name in stats if name.startswith("cmdstat_evalsha")) < 20


def test_leased_budgets_of_an_empty_bucket_refuse_a_flood_without_asking_redis(redis_url: str) -> None:
    spending = process(redis_url)
    assert drain(spending, SMALL) == 39
    with Redis.from_url(redis_url) as client:
        client.config_resetstat()
        refused = [spending.spend(SMALL, 1) for _ in range(200)]
        stats: Any = client.info("commandstats")
    assert {one.allowed for one in refused} == {False}
    assert all(0 < one.retry_after_seconds <= A_DAY // 39 + 1 for one in refused)
    # once a second, in case that somebody has emptied Redis
    assert sum(stats[name]["calls"] for name in stats if name.startswith("cmdstat_evalsha")) < 100


def test_leased_budgets_tell_what_is_left_like_strict_ones(redis_url: str) -> None:
    told: list[int] = []
    spending = process(redis_url)
    for _ in range(100):
        quick = spending.payer(ACCOUNT_ONLY)(1)
        told.append(quick[0] if quick else spending.spend(ACCOUNT_ONLY, 1).binding.remaining)
    assert told == list(range(499, 399, -1))


def test_local_budgets_spend_what_the_integration_plane_spends() -> None:
    store = LocalStore()
    plane = Limiter(store, None, 100)
    spending = LocalBudgets(plane, store)
    assert spending.is_local
    assert plane.spend(BUCKETS, 100).allowed
    assert drain(spending, BUCKETS) == 200
    assert run(spending, lambda: spending.spend_async(ACCOUNT_ONLY, 200)).allowed
    assert not plane.spend(ACCOUNT_ONLY, 1).allowed


# --------------------------------------------------------------------------------------------------- Redis is lost


class Gone(RedisStore):
    """Answers while it is there, and counts who asked."""

    def __init__(self, redis_url: str) -> None:
        super().__init__(redis_url, timeout_seconds=TIMEOUT_SECONDS)
        self.is_there = True
        self.calls = 0

    def spend_each(self, buckets: Sequence[Bucket], costs: Sequence[int]) -> StoreReply:
        self.calls += 1
        if not self.is_there:
            raise LimitStoreLostError("gone")
        return super().spend_each(buckets, costs)

    async def spend_each_async(self, buckets: Sequence[Bucket], costs: Sequence[int]) -> StoreReply:
        self.calls += 1
        await asyncio.sleep(0)
        if not self.is_there:
            raise LimitStoreLostError("gone")
        return await super().spend_each_async(buckets, costs)


@pytest.mark.parametrize("in_asyncio", [False, True], ids=["blocking", "asyncio"])
@pytest.mark.parametrize("is_strict", [True, False], ids=["strict", "leased"])
def test_budgets_without_redis_spend_a_share_once_asked_a_second_and_come_back(
    redis_url: str, is_strict: bool, in_asyncio: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Lost is never unlimited, refused where the endpoint wants that, and told once."""
    caplog.set_level(logging.WARNING, limits.__name__)
    clock, store = [1_000.0], Gone(redis_url)
    shared = Limiter(store, LocalStore(), 25, lambda: clock[0])
    spending: LimitBudgets = StrictBudgets(shared) if is_strict else LeasedBudgets(shared, store)

    async def spend(*, refuse_on_loss: bool = False) -> Spend:
        if in_asyncio:
            return await spending.spend_async(SMALL, 1, refuse_on_loss=refuse_on_loss)
        return spending.spend(SMALL, 1, refuse_on_loss=refuse_on_loss)

    async def lose_and_find() -> None:
        assert (await spend(refuse_on_loss=True)).binding.limit.count == 39
        store.is_there, store.calls = False, 0
        with pytest.raises(DependencyUnavailableError) as refused:
            await spend(refuse_on_loss=True)
        assert refused.value.retry_after_seconds == 1
        assert [(await spend()).allowed for _ in range(12)] == [True] * 9 + [False] * 3
        with pytest.raises(DependencyUnavailableError):
            await spend(refuse_on_loss=True)
        assert store.calls == 1
        assert not shared.spend(SMALL, 1).allowed, "the plane has the same share"
        clock[0] += 1
        await spend()
        await spend()
        assert store.calls == 2
        store.is_there = True
        clock[0] += 1
        assert (await spend()).binding.limit.count == 39

    run(spending, lose_and_find)
    assert caplog.messages == ["limit store lost", "limit store back"]


def test_leased_budgets_without_redis_spend_what_is_paid(redis_url: str) -> None:
    """Also where the endpoint refuses on a loss: nothing has to be checked there."""
    store = Gone(redis_url)
    spending = LeasedBudgets(Limiter(store, LocalStore(), 25), store, Leases(life_us=FOR_EVER_US))
    for _ in range(1 + 2 + 1):
        spend_one(spending, ACCOUNT_ONLY)
    store.is_there = False
    assert [spending.spend(ACCOUNT_ONLY, 1, refuse_on_loss=True).allowed for _ in range(3)] == [True] * 3
    with pytest.raises(DependencyUnavailableError):
        spending.spend(ACCOUNT_ONLY, 1, refuse_on_loss=True)


def test_leased_budgets_whose_caller_goes_away_lease_again(redis_url: str) -> None:
    spending = process(redis_url)

    async def go_away() -> None:
        await spending.spend_async(ACCOUNT_ONLY, 1)
        task = asyncio.ensure_future(spending.spend_async(ACCOUNT_ONLY, 1))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await spending.spend_async(ACCOUNT_ONLY, 1)).allowed
        assert spending.payer(ACCOUNT_ONLY)(1) is not None

    run(spending, go_away)


# ---------------------------------------------------------------------------------------------------- as configured


@pytest.mark.parametrize(
    ("has_redis", "is_strict", "expected"),
    [
        (False, False, LocalBudgets),
        (False, True, LocalBudgets),
        (True, False, LeasedBudgets),
        (True, True, StrictBudgets),
    ],
)
def test_budgets_are_as_configured(
    settings: Settings, lost_url: str, has_redis: bool, is_strict: bool, expected: type[LimitBudgets]
) -> None:
    settings.REDIS_URL, settings.IS_STRICT_LIMITS = lost_url if has_redis else "", is_strict
    assert type(budgets()) is expected
    assert budgets().is_local == (not has_redis)
    assert budgets() is budgets()


def test_budgets_as_configured_spend_from_the_limiter_s_store(settings: Settings) -> None:
    """Also when that is made anew, as tests do."""
    settings.REDIS_URL = ""
    for _ in range(2):
        assert limiter().spend(SMALL, 30).allowed
        assert drain(budgets(), SMALL) == 9
        limiter.cache_clear()


def test_budgets_as_configured_share_what_is_known_of_a_lost_redis(
    settings: Settings, lost_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And the process's share of a limit, with the integration plane."""
    caplog.set_level(logging.WARNING, limits.__name__)
    settings.REDIS_URL, settings.IS_STRICT_LIMITS, settings.LIMIT_FALLBACK_PERCENT = lost_url, False, 50
    assert limiter().spend(SMALL, 10).allowed
    failed_proofs().note("192.0.2.1")
    assert drain(budgets(), SMALL) == 9
    assert caplog.messages == ["limit store lost"]
