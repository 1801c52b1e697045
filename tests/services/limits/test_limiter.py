"""The limiter of a process: what it spends from which bucket, and its behavior when the shared store is lost."""

import asyncio
import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest
from prometheus_client import REGISTRY
from pytest_django import Settings
from redis import Redis

from keyvault.access.limits import MAX_SECONDS, Bucket, Limit, Spend
from keyvault.domain.errors import DependencyUnavailableError, ErrorCode
from keyvault.domain.keys import KeyKind
from keyvault.services.limits import limiter as limits
from keyvault.services.limits.limiter import FailedProofs, Limiter, StoreWatch, account_buckets, failed_proofs, limiter
from keyvault.services.limits.stores import LimitStoreLostError, LocalStore, RedisStore
from tests.clocks import MonotonicClock
from tests.servers.redis import find_redis, redis_server
from tests.servers.throwaway import free_port
from tests.services.racing import TIMEOUT_SECONDS, start

ACCOUNT = Limit(40, MAX_SECONDS)
ENDPOINT = Limit(8, MAX_SECONDS)
BUCKETS = account_buckets(7, KeyKind.PRIVATE, ACCOUNT, "orders.create", ENDPOINT)
ACCOUNT_ONLY = BUCKETS[:1]

ADDRESS = "192.0.2.1"


class FlakyStore:
    """A store that can be made unavailable and counts its calls."""

    def __init__(self, clock: MonotonicClock) -> None:
        self.is_available = True
        self.calls = 0
        self._store = LocalStore(clock.nanos)

    def spend(self, buckets: Sequence[Bucket], cost: int) -> Spend:
        self.calls += 1
        if not self.is_available:
            raise LimitStoreLostError("gone")
        return self._store.spend(buckets, cost)


@pytest.fixture
def clock() -> MonotonicClock:
    return MonotonicClock()


@pytest.fixture
def store(clock: MonotonicClock) -> FlakyStore:
    return FlakyStore(clock)


@pytest.fixture
def shared(store: FlakyStore, clock: MonotonicClock) -> Limiter:
    """A limiter with a fallback share of 25 percent."""
    return Limiter(store, LocalStore(clock.nanos), 25, clock)


@pytest.fixture
def proofs(clock: MonotonicClock) -> FailedProofs:
    return FailedProofs(Limiter(LocalStore(clock.nanos), None, 100, clock), clock)


@pytest.fixture
def uncached_limits() -> Iterator[None]:
    """Create the limiter of this process from the test's settings, and drop it afterwards."""
    for cached in (limiter, failed_proofs):
        cached.cache_clear()
    yield
    for cached in (limiter, failed_proofs):
        cached.cache_clear()


def drain(target: Limiter, buckets: Sequence[Bucket]) -> int:
    """Return how many single tokens the buckets held."""
    return next(number for number in range(10_000) if not target.spend(buckets, 1).allowed)


# -------------------------------------------------------------------------------------------------------- buckets


def test_buckets_encode_account_kind_and_limit_in_their_keys() -> None:
    """A hash tag puts all buckets of an account into one Redis cluster slot; a changed limit starts full."""
    assert [(one.policy, one.key, one.limit) for one in BUCKETS] == [
        ("account", "kv:limit:{7}:private:account::40/86400", ACCOUNT),
        ("endpoint", "kv:limit:{7}:private:endpoint:orders.create::8/86400", ENDPOINT),
    ]


def test_buckets_of_an_endpoint_without_a_limit_are_those_of_the_account() -> None:
    assert account_buckets(7, KeyKind.PRIVATE, ACCOUNT, "orders.create", None) == ACCOUNT_ONLY


def test_buckets_of_public_and_private_keys_are_separate(shared: Limiter) -> None:
    """Shoppers cannot exhaust the limit of the merchant's backend."""
    public = account_buckets(7, KeyKind.PUBLIC, ACCOUNT, "orders.create", ENDPOINT)
    assert drain(shared, public) == 8
    assert drain(shared, BUCKETS) == 8


def test_limiter_of_an_exhausted_endpoint_admits_others(shared: Limiter) -> None:
    """A request that the endpoint refuses takes nothing from the account."""
    assert drain(shared, BUCKETS) == 8
    assert [shared.spend(BUCKETS, 1).allowed for _ in range(100)] == [False] * 100
    assert drain(shared, ACCOUNT_ONLY) == 32


# ----------------------------------------------------------------------------------------------- store unavailable


def test_limiter_without_its_store_spends_a_share_of_each_limit(shared: Limiter, store: FlakyStore) -> None:
    store.is_available = False
    assert drain(shared, BUCKETS) == 2
    assert drain(shared, ACCOUNT_ONLY) == 8
    assert shared.spend(BUCKETS, 1).binding.limit == Limit(2, MAX_SECONDS)


def test_limiter_without_its_store_charges_at_most_the_share_for_a_larger_cost(
    shared: Limiter, store: FlakyStore
) -> None:
    store.is_available = False
    assert shared.spend(BUCKETS, 8).allowed
    assert not shared.spend(BUCKETS, 1).allowed


def test_limiter_without_its_store_refuses_for_an_endpoint_that_refuses_on_loss(
    shared: Limiter, store: FlakyStore
) -> None:
    """On the call that detects the loss and on those that skip the store."""
    store.is_available = False
    for _ in range(2):
        with pytest.raises(DependencyUnavailableError) as refused:
            shared.spend(BUCKETS, 1, refuse_on_loss=True)
        assert (refused.value.code, refused.value.retry_after_seconds) == (ErrorCode.DEPENDENCY_UNAVAILABLE, 1)
    assert drain(shared, BUCKETS) == 2


def test_limiter_with_its_store_admits_for_an_endpoint_that_refuses_on_loss(shared: Limiter) -> None:
    assert shared.spend(BUCKETS, 1, refuse_on_loss=True).allowed


def test_limiter_without_store_and_fallback_refuses(store: FlakyStore, clock: MonotonicClock) -> None:
    store.is_available = False
    with pytest.raises(DependencyUnavailableError):
        Limiter(store, None, 100, clock).spend(BUCKETS, 1)


def test_limiter_without_its_store_retries_once_a_second(
    shared: Limiter, store: FlakyStore, clock: MonotonicClock
) -> None:
    """Only one request a second waits for the lost store."""
    store.is_available = False
    for _ in range(10):
        shared.spend(ACCOUNT_ONLY, 1)
    assert store.calls == 1
    clock.seconds += 0.999
    shared.spend(ACCOUNT_ONLY, 1)
    assert store.calls == 1
    clock.seconds += 0.001
    for _ in range(10):
        shared.spend(ACCOUNT_ONLY, 1)
    assert store.calls == 2


def test_limiter_probes_a_lost_store_with_one_request(clock: MonotonicClock) -> None:
    """Other requests do not wait for the probe."""
    probing, may_reply = threading.Event(), threading.Event()

    class SlowStore(FlakyStore):
        def spend(self, buckets: Sequence[Bucket], cost: int) -> Spend:
            if self.calls:
                probing.set()
                assert may_reply.wait(TIMEOUT_SECONDS)
            return super().spend(buckets, cost)

    store = SlowStore(clock)
    shared = Limiter(store, LocalStore(clock.nanos), 25, clock)
    store.is_available = False
    shared.spend(ACCOUNT_ONLY, 1)
    clock.seconds += 1
    probe = start(lambda: shared.spend(ACCOUNT_ONLY, 1))
    assert probing.wait(TIMEOUT_SECONDS)
    assert shared.spend(ACCOUNT_ONLY, 1).binding.limit.count == 10
    store.is_available = True
    may_reply.set()
    assert probe.result(TIMEOUT_SECONDS).binding.limit.count == 40


def test_limiter_with_its_store_back_spends_from_it_again(
    shared: Limiter, store: FlakyStore, clock: MonotonicClock
) -> None:
    shared.spend(ACCOUNT_ONLY, 15)
    store.is_available = False
    assert drain(shared, ACCOUNT_ONLY) == 10
    store.is_available = True
    clock.seconds += 1
    assert shared.spend(ACCOUNT_ONLY, 1).binding.limit == ACCOUNT
    assert drain(shared, ACCOUNT_ONLY) == 24


def test_limiter_logs_each_loss_and_each_return_once(
    shared: Limiter, store: FlakyStore, clock: MonotonicClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, limits.__name__)
    for is_available in (True, False, False, True, True, False):
        store.is_available = is_available
        clock.seconds += 1
        for _ in range(3):
            shared.spend(ACCOUNT_ONLY, 1)
    assert caplog.messages == ["limit store lost", "limit store back", "limit store lost"]
    assert caplog.records[0].__dict__["why"] == "gone"


def test_limiter_without_requests_reports_that_its_store_is_back(
    shared: Limiter, store: FlakyStore, clock: MonotonicClock
) -> None:
    """Guarantee: the alert about a lost store ends with the loss, even in an idle process."""

    def is_reported() -> float | None:
        return REGISTRY.get_sample_value("keyvault_limit_store_lost")

    shared.retry_lost()
    assert store.calls == 0, "an available store is not asked"
    store.is_available = False
    shared.spend(ACCOUNT_ONLY, 1)
    clock.seconds += 1
    shared.retry_lost()
    assert (store.calls, is_reported()) == (2, 1)
    store.is_available = True
    shared.retry_lost()
    assert (store.calls, is_reported()) == (2, 1), "not due for another attempt"
    clock.seconds += 1
    shared.retry_lost()
    assert (store.calls, is_reported()) == (3, 0)


def test_limiters_of_one_store_share_the_knowledge_of_its_loss(
    store: FlakyStore, clock: MonotonicClock, caplog: pytest.LogCaptureFixture
) -> None:
    """All limiters together retry once a second, and the loss is logged once."""
    caplog.set_level(logging.WARNING, limits.__name__)
    watch = StoreWatch(clock)
    one, other = (Limiter(store, LocalStore(clock.nanos), percent, watch=watch) for percent in (25, 50))
    store.is_available = False
    assert (drain(one, ACCOUNT_ONLY), drain(other, ACCOUNT_ONLY)) == (10, 20)
    assert store.calls == 1
    store.is_available = True
    clock.seconds += 1
    assert other.spend(ACCOUNT_ONLY, 1).binding.limit == ACCOUNT
    assert one.spend(ACCOUNT_ONLY, 1).binding.limit == ACCOUNT
    assert caplog.messages == ["limit store lost", "limit store back"]


def test_limiter_in_asyncio_without_its_store_behaves_the_same(clock: MonotonicClock) -> None:
    """A share of each limit, refusal on loss, one attempt a second, and recovery."""

    class AsyncioFlakyStore(FlakyStore):
        async def spend_async(self, buckets: Sequence[Bucket], cost: int) -> Spend:
            await asyncio.sleep(0)
            return self.spend(buckets, cost)

        async def close_async(self) -> None:
            """Do nothing: no connection is open."""

    store = AsyncioFlakyStore(clock)
    shared = Limiter(store, LocalStore(clock.nanos), 25, clock)

    async def lose_and_restore() -> None:
        assert (await shared.spend_async(BUCKETS, 1)).binding.limit == ENDPOINT
        store.is_available = False
        assert [(await shared.spend_async(BUCKETS, 1)).allowed for _ in range(3)] == [True, True, False]
        with pytest.raises(DependencyUnavailableError):
            await shared.spend_async(BUCKETS, 1, refuse_on_loss=True)
        assert store.calls == 2
        clock.seconds += 1
        await shared.spend_async(BUCKETS, 1)
        await shared.spend_async(BUCKETS, 1)
        assert store.calls == 3
        store.is_available = True
        clock.seconds += 1
        spends = await asyncio.gather(*[shared.spend_async(ACCOUNT_ONLY, 1) for _ in range(3)])
        assert [one.binding.limit.count for one in spends] == [40, 10, 10]
        assert (await shared.spend_async(ACCOUNT_ONLY, 1)).binding.limit == ACCOUNT

    asyncio.run(lose_and_restore())


# ------------------------------------------------------------------------------------------------- Redis unavailable


def test_limiter_at_a_closed_port_spends_a_share() -> None:
    shared = Limiter(RedisStore(f"redis://127.0.0.1:{free_port()}/0"), LocalStore(), 25)
    assert drain(shared, ACCOUNT_ONLY) == 10


def test_limiter_with_an_unresponsive_redis_spends_a_share_until_it_replies(
    redis_url: str, clock: MonotonicClock
) -> None:
    """Tokens spent before the loss stay spent after it."""
    shared = Limiter(RedisStore(redis_url), LocalStore(), 25, clock)
    with Redis.from_url(redis_url) as client:
        assert shared.spend(ACCOUNT_ONLY, 30).allowed
        client.client_pause(timeout=600_000, all=False)  # blocks writes for longer than the test
        try:
            assert drain(shared, ACCOUNT_ONLY) == 10
        finally:
            client.client_unpause()
        clock.seconds += 1
        assert drain(shared, ACCOUNT_ONLY) == 10
        assert shared.spend(ACCOUNT_ONLY, 1).binding.limit == ACCOUNT


@pytest.mark.skipif(find_redis() is None, reason="no Redis server on this machine")
def test_limiter_with_a_stopped_redis_spends_a_share() -> None:
    """The limiter holds open connections when Redis stops."""
    with redis_server() as url:
        shared = Limiter(RedisStore(url, timeout_seconds=TIMEOUT_SECONDS), LocalStore(), 25)
        assert shared.spend(BUCKETS, 1).binding.limit == ENDPOINT
    assert drain(shared, BUCKETS) == 2


# --------------------------------------------------------------------------------------------------- failed proofs


def test_failed_proofs_of_one_address_are_allowed_a_hundred_times(proofs: FailedProofs, clock: MonotonicClock) -> None:
    """After that, one attempt becomes available every 0.6 s."""
    assert [proofs.note(ADDRESS) for _ in range(100)] == [None] * 100
    assert [proofs.note(ADDRESS) for _ in range(5)] == [1] * 5
    clock.seconds += 0.75
    assert [proofs.note(ADDRESS) for _ in range(2)] == [None, 1]
    clock.seconds += 60
    assert [proofs.note(ADDRESS) for _ in range(101)] == [None] * 100 + [1]


def test_failed_proofs_of_other_addresses_are_counted_separately(proofs: FailedProofs) -> None:
    for _ in range(101):
        proofs.note(ADDRESS)
    assert proofs.note("192.0.2.2") is None


def test_failed_proofs_noted_in_process_share_the_count_without_redis(proofs: FailedProofs) -> None:
    assert proofs.note_here(None) is None
    assert [proofs.note_here(ADDRESS) for _ in range(50)] + [proofs.note(ADDRESS) for _ in range(50)] == [None] * 100
    assert (proofs.note_here(ADDRESS), proofs.note(ADDRESS)) == (1, 1)
    assert proofs.is_over(ADDRESS)


@pytest.mark.parametrize("address", [None, "", "unknown", "192.0.2.1:4711", "192.0.2.1, 192.0.2.2", "192.0.2.300"])
def test_failed_proofs_without_a_trustworthy_address_are_not_counted(proofs: FailedProofs, address: str | None) -> None:
    assert {proofs.note(address) for _ in range(200)} == {None}
    with proofs.look_up(address):
        pass


@pytest.mark.parametrize(
    ("one", "other", "is_one_source"),
    [
        ("2001:db8::1", "2001:0db8:0:0:ffff:ffff:ffff:ffff", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("192.0.2.1", "::ffff:192.0.2.1", True),
        ("::ffff:192.0.2.1", "::ffff:192.0.2.2", False),
        ("fe80::1%eth0", "fe80::2%eth1", True),
    ],
)
def test_failed_proofs_count_by_source_network(proofs: FailedProofs, one: str, other: str, is_one_source: bool) -> None:
    """An IPv6 /64 is one source; an IPv4-mapped IPv6 address is that IPv4 address."""
    for _ in range(100):
        proofs.note(one)
    assert (proofs.note(other) is not None) == is_one_source


def test_look_ups_of_addresses_over_the_limit_are_serialized_and_all_pass(proofs: FailedProofs) -> None:
    """A guesser never occupies the database; a valid key from such an address is slower and never refused."""
    guessers = ["192.0.2.1", "192.0.2.2", "2001:db8::1"]
    for address in guessers * 101:
        proofs.note(address)
    entered = threading.Event()

    def look_up() -> None:
        with proofs.look_up(guessers[2]):
            entered.set()

    with ExitStack() as held:
        for address in guessers[:2]:
            held.enter_context(proofs.look_up(address))
        third = start(look_up)
        with proofs.look_up("192.0.2.3"), proofs.look_up("192.0.2.3"), proofs.look_up(None):
            assert not entered.wait(0.2)
    third.result(TIMEOUT_SECONDS)
    assert entered.is_set()


def test_look_ups_of_an_address_after_its_lockout_are_concurrent(proofs: FailedProofs, clock: MonotonicClock) -> None:
    for _ in range(101):
        proofs.note(ADDRESS)
    clock.seconds += 1
    with proofs.look_up(ADDRESS), proofs.look_up(ADDRESS), proofs.look_up(ADDRESS):
        pass


def test_look_up_that_fails_releases_its_place(proofs: FailedProofs) -> None:
    for _ in range(101):
        proofs.note(ADDRESS)
    for _ in range(3):
        with pytest.raises(LookupError), proofs.look_up(ADDRESS):
            raise LookupError


def test_failed_proofs_of_many_addresses_use_bounded_memory(
    proofs: FailedProofs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_MAX_ADDRESSES", 10)
    for number in range(40):
        for _ in range(101):
            proofs.note(f"192.0.2.{number}")
    assert list(proofs._over_until) == [f"192.0.2.{number}" for number in range(30, 40)]


# ---------------------------------------------------------------------------------------------------- configuration


def test_limiter_configured_without_redis_counts_in_process(settings: Settings, uncached_limits: None) -> None:
    settings.REDIS_URL, settings.LIMIT_FALLBACK_PERCENT = "", 25
    assert limiter() is limiter()
    assert drain(limiter(), ACCOUNT_ONLY) == 40
    assert limiter().spend(account_buckets(8, KeyKind.PRIVATE, ACCOUNT, "any", None), 1, refuse_on_loss=True).allowed


def test_limiter_configured_with_redis_counts_there(settings: Settings, redis_url: str, uncached_limits: None) -> None:
    """Two processes with the same Redis share one limit."""
    settings.REDIS_URL, settings.LIMIT_FALLBACK_PERCENT = redis_url, 25
    assert limiter().spend(ACCOUNT_ONLY, 15).allowed
    limiter.cache_clear()
    assert drain(limiter(), ACCOUNT_ONLY) == 25


def test_limiter_configured_with_a_lost_redis_spends_the_configured_share(
    settings: Settings, uncached_limits: None
) -> None:
    """Failed proofs keep their full limit, so a loss of Redis gives an attacker no extra attempts."""
    settings.REDIS_URL, settings.LIMIT_FALLBACK_PERCENT = f"redis://127.0.0.1:{free_port()}/0", 50
    assert drain(limiter(), ACCOUNT_ONLY) == 20
    noted = [failed_proofs().note(ADDRESS) for _ in range(300)]
    assert noted[:100] == [None] * 100
    assert 1 in noted


def test_failed_proofs_as_configured_take_nothing_from_an_account(
    settings: Settings, redis_url: str, uncached_limits: None
) -> None:
    """Failed authentication never spends a victim's quota; the two share no Redis key."""
    settings.REDIS_URL, settings.LIMIT_FALLBACK_PERCENT = redis_url, 25
    for address in (ADDRESS, "2001:db8::1"):
        failed_proofs().note(address)
    with Redis.from_url(redis_url, decode_responses=True) as client:
        assert sorted(client.keys()) == [
            "kv:limit:{proof:192.0.2.1}:100/60",
            "kv:limit:{proof:2001:db8::/64}:100/60",
        ]
    assert failed_proofs() is failed_proofs()


def test_failed_proofs_as_configured_share_the_knowledge_of_a_lost_redis(
    settings: Settings, uncached_limits: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, limits.__name__)
    settings.REDIS_URL, settings.LIMIT_FALLBACK_PERCENT = f"redis://127.0.0.1:{free_port()}/0", 50
    limiter().spend(ACCOUNT_ONLY, 1)
    failed_proofs().note(ADDRESS)
    assert caplog.messages == ["limit store lost"]


def test_failed_proofs_noted_in_process_never_call_redis(
    settings: Settings, redis_url: str, uncached_limits: None
) -> None:
    """An event loop must not block; the price is one more full limit per process."""
    settings.REDIS_URL, settings.LIMIT_FALLBACK_PERCENT = redis_url, 25
    noted = [failed_proofs().note_here(ADDRESS) for _ in range(200)]
    assert noted[:100] == [None] * 100
    assert 1 in noted
    assert failed_proofs().is_over(ADDRESS)
    with Redis.from_url(redis_url) as client:
        assert client.keys() == []
    assert failed_proofs().note(ADDRESS) is None
