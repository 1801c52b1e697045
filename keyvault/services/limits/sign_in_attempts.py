"""Limits on failed sign-ins by name, address and known device: a lock after ten failures.

The first lock lasts 30 minutes; each further one within a week lasts twice as long, up to a day. A pause of
some seconds after each failure, instead of the lock, would hardly reduce the guesses in a day. It would delay every
operator behind a shared address when one of them mistypes. Failures of a name or a device count for a day, or until a
right attempt, so that an attacker who stays below the lock gets no more guesses.

    attempt = attempts().take(key, kept_seconds)    before a password hash is computed
    attempts().give_back(key)                       when the password could not be checked
    attempts().give_back(key, is_right=True)        when it was right

An attempt is counted before the password is checked, so that concurrent guesses cannot exceed the limit. Redis keeps
the counts if configured, else this process does. While Redis is lost, each process counts for itself.
"""

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from django.conf import settings
from redis.exceptions import RedisError

from keyvault.access.limits import (
    MAX_SIGN_IN_LOCK_SECONDS,
    SIGN_IN_FAILURES,
    SIGN_IN_LOCK_SECONDS,
    SIGN_IN_LOCKS_KEPT_SECONDS,
    sign_in_lock_seconds,
)
from keyvault.services.limits.limiter import StoreWatch, limiter
from keyvault.services.limits.stores import REDIS_TIMEOUT_SECONDS, LimitStoreLostError, redis_client

_MAX_KEYS = 50_000


@dataclass(frozen=True, slots=True)
class CountedAttempt:
    """A counted attempt: its number in the current series, and the seconds until the series or its lock ends.

    A series ends `kept_seconds` after its latest counted attempt, with a right attempt, or with its lock.
    """

    number: int
    retry_after_seconds: int

    @property
    def is_locked(self) -> bool:
        """Whether the password must not be checked. A locked attempt is not counted and does not extend the lock."""
        return self.number > SIGN_IN_FAILURES

    @property
    def is_last(self) -> bool:
        """Whether a failure of this attempt starts the lock."""
        return self.number == SIGN_IN_FAILURES


@dataclass(slots=True, order=True)
class _Series:
    """Attempts of a key: `count` until `ends_at`; `locks` of earlier series until `locks_end_at`."""

    count: int = 0
    locks: int = 0
    ends_at: float = 0.0
    locks_end_at: float = 0.0


class LocalAttempts:
    """Counts of this process, for at most `capacity` keys; the lowest counts are evicted first."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic, capacity: int = _MAX_KEYS) -> None:
        self._monotonic = monotonic
        self._capacity = capacity
        self._series: dict[str, _Series] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._series)

    def take(self, key: str, kept_seconds: int) -> CountedAttempt:
        with self._lock:
            now = self._monotonic()
            series = self._series.setdefault(key, _Series())
            if series.ends_at <= now:
                series.count = 0
            if series.locks_end_at <= now:
                series.locks = 0
            if series.count >= SIGN_IN_FAILURES:
                return CountedAttempt(series.count + 1, math.ceil(series.ends_at - now))
            series.count += 1
            seconds = kept_seconds
            if series.count == SIGN_IN_FAILURES:
                series.locks, series.locks_end_at = series.locks + 1, now + SIGN_IN_LOCKS_KEPT_SECONDS
                seconds = sign_in_lock_seconds(series.locks)
            series.ends_at = now + seconds
            number = series.count
            if len(self._series) > self._capacity:
                self._evict()
        return CountedAttempt(number, seconds)

    def give_back(self, key: str, *, is_right: bool = False) -> None:
        with self._lock:
            series = self._series.get(key)
            if series is None:
                return
            if series.count >= SIGN_IN_FAILURES:
                series.locks = max(0, series.locks - 1)
            series.count = 0 if is_right else max(0, series.count - 1)
            if not series.count and not series.locks:
                del self._series[key]

    def _evict(self) -> None:
        """Evict an eighth of the keys, so that a flood of new ones rarely causes a sort."""
        kept = self._capacity - self._capacity // 8
        for key in sorted(self._series, key=lambda key: self._series[key])[: len(self._series) - kept]:
            del self._series[key]


# KEYS: the count of the series; the count of locks. ARGV: the number of failures that locks; then, in milliseconds, the
# duration of the first lock, the maximum duration, and the retention of the count of locks and of the failures.
_TAKE = """
local count = tonumber(redis.call('GET', KEYS[1]) or '0')
local limit = tonumber(ARGV[1])
if count >= limit then return {count + 1, redis.call('PTTL', KEYS[1])} end
count = redis.call('INCR', KEYS[1])
local lasts = tonumber(ARGV[5])
if count == limit then
    local locks = redis.call('INCR', KEYS[2])
    redis.call('PEXPIRE', KEYS[2], ARGV[4])
    lasts = math.min(tonumber(ARGV[2]) * 2 ^ math.min(locks - 1, 16), tonumber(ARGV[3]))
end
redis.call('PEXPIRE', KEYS[1], string.format('%d', lasts))
return {count, lasts}
"""

# ARGV: the number of failures that locks; 1 after a right attempt.
_GIVE_BACK = """
local count = tonumber(redis.call('GET', KEYS[1]) or '0')
if count >= tonumber(ARGV[1]) and redis.call('DECR', KEYS[2]) <= 0 then redis.call('DEL', KEYS[2]) end
if count > 1 and ARGV[2] == '0' then redis.call('DECR', KEYS[1]) else redis.call('DEL', KEYS[1]) end
"""


class RedisAttempts:
    """Counts in Redis, shared by all processes. Its methods raise LimitStoreLostError."""

    def __init__(self, url: str, timeout_seconds: float = REDIS_TIMEOUT_SECONDS) -> None:
        client = redis_client(url, timeout_seconds)
        self._take = client.register_script(_TAKE)
        self._give_back = client.register_script(_GIVE_BACK)

    def take(self, key: str, kept_seconds: int) -> CountedAttempt:
        seconds = (SIGN_IN_LOCK_SECONDS, MAX_SIGN_IN_LOCK_SECONDS, SIGN_IN_LOCKS_KEPT_SECONDS, kept_seconds)
        count, milliseconds = self._run(self._take, key, SIGN_IN_FAILURES, *(each * 1000 for each in seconds))
        return CountedAttempt(int(count), max(1, math.ceil(int(milliseconds) / 1000)))

    def give_back(self, key: str, *, is_right: bool = False) -> None:
        self._run(self._give_back, key, SIGN_IN_FAILURES, int(is_right))

    @staticmethod
    def _run(script: Any, key: str, *arguments: int) -> Any:
        try:
            return script(keys=[key, f"{key}:locks"], args=arguments)
        except (RedisError, OSError) as error:
            raise LimitStoreLostError(f"{type(error).__name__}: {error}") from error


class AttemptCounter:
    """The shared counts, or this process's own while Redis is lost or not configured."""

    def __init__(self, local: LocalAttempts, shared: RedisAttempts | None, watch: StoreWatch) -> None:
        self.local = local
        self._shared = shared
        self._watch = watch

    def take(self, key: str, kept_seconds: int) -> CountedAttempt:
        if self._shared is not None:
            with suppress(LimitStoreLostError), self._watch.guard():
                return self._shared.take(key, kept_seconds)
        return self.local.take(key, kept_seconds)

    def give_back(self, key: str, *, is_right: bool = False) -> None:
        """Remove an attempt. `is_right`: it was right, so that earlier failures of the key no longer count."""
        if self._shared is not None:
            with suppress(LimitStoreLostError), self._watch.guard():
                self._shared.give_back(key, is_right=is_right)
                return
        self.local.give_back(key, is_right=is_right)


@cache
def attempts() -> AttemptCounter:
    """Return this process's attempt counter. Raises ValueError for an invalid Redis URL."""
    shared = RedisAttempts(settings.REDIS_URL) if settings.REDIS_URL else None
    return AttemptCounter(LocalAttempts(), shared, limiter().watch)
