"""Counters of failed sign-ins: a growing lock after ten attempts, in either store."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.test import override_settings
from redis import Redis

from keyvault.access.limits import (
    SIGN_IN_FAILURES,
    SIGN_IN_FAILURES_KEPT_SECONDS,
    SIGN_IN_LOCK_SECONDS,
    SIGN_IN_LOCKS_KEPT_SECONDS,
)
from keyvault.services.limits.limiter import StoreWatch, limiter
from keyvault.services.limits.sign_in_attempts import AttemptCounter, LocalAttempts, RedisAttempts, attempts
from tests.clocks import MonotonicClock
from tests.servers.throwaway import free_port
from tests.services.racing import TIMEOUT_SECONDS, race

KEY = "kv:sign-in:name:x"
KEPT = SIGN_IN_FAILURES_KEPT_SECONDS


@pytest.fixture(params=["local", pytest.param("redis", marks=pytest.mark.redis)])
def store(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "local":
        yield LocalAttempts()
    else:
        yield RedisAttempts(request.getfixturevalue("redis_url"), timeout_seconds=TIMEOUT_SECONDS)


def test_attempts_after_ten_are_locked_and_not_counted(store: Any) -> None:
    """Further attempts do not extend the lock."""
    numbers = [store.take(KEY, KEPT).number for _ in range(SIGN_IN_FAILURES)]
    assert numbers == list(range(1, SIGN_IN_FAILURES + 1))
    for _ in range(3):
        attempt = store.take(KEY, KEPT)
        assert (attempt.number, attempt.is_locked) == (SIGN_IN_FAILURES + 1, True)
        assert 0 < attempt.retry_after_seconds <= SIGN_IN_LOCK_SECONDS
    assert not store.take("kv:sign-in:name:y", KEPT).is_locked


def test_attempts_returned_are_not_counted(store: Any) -> None:
    for _ in range(3 * SIGN_IN_FAILURES):
        assert store.take(KEY, KEPT).number == 1
        store.give_back(KEY)
    store.give_back("kv:sign-in:never-taken")
    assert store.take("kv:sign-in:never-taken", KEPT).number == 1


def test_attempts_before_a_right_one_no_longer_count(store: Any) -> None:
    """Typing errors of many days do not add up to a lock. The locks of the week are remembered."""
    for _ in range(3):
        for _ in range(SIGN_IN_FAILURES - 1):
            assert not store.take(KEY, KEPT).is_last
        store.give_back(KEY, is_right=True)
    assert store.take(KEY, KEPT).number == 1


def test_attempts_below_the_lock_count_for_as_long_as_asked() -> None:
    """An attacker who always stops before the lock, and so causes no alarm, gets nine guesses in that time."""
    clock = MonotonicClock(0.0)
    store = LocalAttempts(clock)
    for _ in range(SIGN_IN_FAILURES - 1):
        store.take(KEY, KEPT)
    clock.seconds += KEPT - 1
    assert store.take(KEY, KEPT).is_last
    clock.seconds += SIGN_IN_LOCK_SECONDS
    for _ in range(SIGN_IN_FAILURES - 1):
        store.take(KEY, KEPT)
    clock.seconds += KEPT
    assert store.take(KEY, KEPT).number == 1


def test_attempts_made_concurrently_are_counted_once_each(store: Any) -> None:
    taken = race(*(lambda: store.take(KEY, KEPT) for _ in range(24)))
    assert sum(not attempt.is_locked for attempt in taken) == SIGN_IN_FAILURES


def test_attempts_in_process_expire_after_the_lock() -> None:
    clock = MonotonicClock(0.0)
    store = LocalAttempts(clock)
    for _ in range(SIGN_IN_FAILURES):
        store.take(KEY, KEPT)
    clock.seconds += SIGN_IN_LOCK_SECONDS - 0.5
    assert store.take(KEY, KEPT).retry_after_seconds == 1
    clock.seconds += 0.5
    assert store.take(KEY, KEPT).number == 1


def test_attempts_in_redis_expire_with_the_lock(redis_url: str) -> None:
    """Every counter expires, so an attacker cannot fill Redis."""
    store = RedisAttempts(redis_url, timeout_seconds=TIMEOUT_SECONDS)
    with Redis.from_url(redis_url) as client:
        for lasts in [KEPT] * (SIGN_IN_FAILURES - 1) + [SIGN_IN_LOCK_SECONDS]:
            store.take(KEY, KEPT)
            assert lasts - 60 < client.ttl(KEY) <= lasts
        client.pexpire(KEY, 90_500)
        assert store.take(KEY, KEPT).retry_after_seconds in {90, 91}
        store.give_back(KEY)
        assert 0 < client.ttl(KEY) <= 91


def test_attempts_in_process_that_lock_again_within_a_week_are_locked_for_longer() -> None:
    """Each lock doubles, up to a day, so that a persistent attacker gets few guesses. A quiet week ends that."""
    clock = MonotonicClock(0.0)
    store = LocalAttempts(clock)
    hours = []
    for _ in range(8):
        lasts = [store.take(KEY, KEPT).retry_after_seconds for _ in range(SIGN_IN_FAILURES)][-1]
        hours.append(lasts / 3600)
        clock.seconds += lasts
    assert hours == [0.5, 1, 2, 4, 8, 16, 24, 24]
    clock.seconds += SIGN_IN_LOCKS_KEPT_SECONDS
    assert [store.take(KEY, KEPT).retry_after_seconds for _ in range(SIGN_IN_FAILURES)][-1] == SIGN_IN_LOCK_SECONDS


def test_attempts_in_redis_that_lock_again_within_a_week_are_locked_for_longer(redis_url: str) -> None:
    store = RedisAttempts(redis_url, timeout_seconds=TIMEOUT_SECONDS)
    hours = []
    with Redis.from_url(redis_url) as client:
        for _ in range(8):
            hours.append([store.take(KEY, KEPT).retry_after_seconds for _ in range(SIGN_IN_FAILURES)][-1] / 3600)
            assert 0 < client.ttl(f"{KEY}:locks") <= SIGN_IN_LOCKS_KEPT_SECONDS
            client.delete(KEY)
    assert hours == [0.5, 1, 2, 4, 8, 16, 24, 24]


def test_attempts_that_are_right_at_the_last_moment_count_no_lock(store: Any) -> None:
    """The last attempt before a lock was right: the next lock is a first one."""
    for _ in range(SIGN_IN_FAILURES):
        store.take(KEY, KEPT)
    store.give_back(KEY)
    assert store.take(KEY, KEPT).retry_after_seconds == SIGN_IN_LOCK_SECONDS


def test_attempts_in_process_are_bounded_and_keep_locks() -> None:
    """A flood of other names neither fills the memory nor evicts the lock of a name."""
    store = LocalAttempts(capacity=64)
    for _ in range(SIGN_IN_FAILURES):
        store.take(KEY, KEPT)
    for number in range(1000):
        store.take(f"flood-{number}", KEPT)
        assert len(store) <= 64
    assert store.take(KEY, KEPT).is_locked


@pytest.mark.parametrize("returns_attempt", [True, False])
def test_attempts_without_redis_are_counted_in_process(returns_attempt: bool) -> None:
    """The loss of Redis never allows unlimited guesses."""
    lost = RedisAttempts(f"redis://127.0.0.1:{free_port()}/0")
    counted = AttemptCounter(LocalAttempts(), lost, StoreWatch())
    for _ in range(SIGN_IN_FAILURES):
        assert not counted.take(KEY, KEPT).is_locked
    if returns_attempt:
        counted.give_back(KEY)
    assert counted.take(KEY, KEPT).is_locked != returns_attempt


def test_attempts_of_two_processes_are_shared_in_redis(redis_url: str) -> None:
    """A second process grants no further ten guesses."""
    with override_settings(REDIS_URL=redis_url):
        limiter.cache_clear()
        takes: list[Callable[[str, int], Any]] = []
        for _ in range(2):
            attempts.cache_clear()
            takes.append(attempts().take)
        allowed = [not take(KEY, KEPT).is_locked for _ in range(SIGN_IN_FAILURES) for take in takes]
    assert sum(allowed) == SIGN_IN_FAILURES
