"""Limits on failed sign-ins by name, address and known device: a lock of 30 minutes after ten failures.

    attempt = attempts().take(key)     before a password hash is computed
    attempts().give_back(key)          when the password was right

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

from keyvault.access.limits import SIGN_IN_FAILURES, SIGN_IN_LOCK_SECONDS
from keyvault.services.limits.limiter import StoreWatch, limiter
from keyvault.services.limits.stores import REDIS_TIMEOUT_SECONDS, LimitStoreLostError, redis_client

_MAX_KEYS = 50_000


@dataclass(frozen=True, slots=True)
class CountedAttempt:
    """A counted attempt: its number in the current series, and the seconds until a lock of the series ends.

    A series ends 30 minutes after its latest counted attempt.
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


class LocalAttempts:
    """Counts of this process, for at most `capacity` keys; the lowest counts are evicted first."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic, capacity: int = _MAX_KEYS) -> None:
        self._monotonic = monotonic
        self._capacity = capacity
        self._counts: dict[str, tuple[int, float]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._counts)

    def take(self, key: str) -> CountedAttempt:
        with self._lock:
            now = self._monotonic()
            count, ends_at = self._counts.get(key, (0, 0.0))
            if ends_at <= now:
                count = 0
            if count >= SIGN_IN_FAILURES:
                return CountedAttempt(count + 1, math.ceil(ends_at - now))
            self._counts[key] = (count + 1, now + SIGN_IN_LOCK_SECONDS)
            if len(self._counts) > self._capacity:
                self._evict()
        return CountedAttempt(count + 1, SIGN_IN_LOCK_SECONDS)

    def give_back(self, key: str) -> None:
        with self._lock:
            count, ends_at = self._counts.get(key, (0, 0.0))
            if count > 1:
                self._counts[key] = (count - 1, ends_at)
            else:
                self._counts.pop(key, None)

    def _evict(self) -> None:
        """Evict an eighth of the keys, so that a flood of new ones rarely causes a sort."""
        kept = self._capacity - self._capacity // 8
        for key in sorted(self._counts, key=lambda key: self._counts[key])[: len(self._counts) - kept]:
            del self._counts[key]


# KEYS: one key. ARGV: the count that locks, and its expiry in milliseconds.
_TAKE = """
local count = tonumber(redis.call('GET', KEYS[1]) or '0')
if count >= tonumber(ARGV[1]) then return {count + 1, redis.call('PTTL', KEYS[1])} end
count = redis.call('INCR', KEYS[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return {count, tonumber(ARGV[2])}
"""

_GIVE_BACK = """
local count = tonumber(redis.call('GET', KEYS[1]) or '0')
if count > 1 then redis.call('DECR', KEYS[1]) else redis.call('DEL', KEYS[1]) end
"""


class RedisAttempts:
    """Counts in Redis, shared by all processes. Its methods raise LimitStoreLostError."""

    def __init__(self, url: str, timeout_seconds: float = REDIS_TIMEOUT_SECONDS) -> None:
        client = redis_client(url, timeout_seconds)
        self._take = client.register_script(_TAKE)
        self._give_back = client.register_script(_GIVE_BACK)

    def take(self, key: str) -> CountedAttempt:
        count, milliseconds = self._run(self._take, key, SIGN_IN_FAILURES, SIGN_IN_LOCK_SECONDS * 1000)
        return CountedAttempt(int(count), max(1, math.ceil(int(milliseconds) / 1000)))

    def give_back(self, key: str) -> None:
        self._run(self._give_back, key)

    @staticmethod
    def _run(script: Any, key: str, *arguments: int) -> Any:
        try:
            return script(keys=[key], args=arguments)
        except (RedisError, OSError) as error:
            raise LimitStoreLostError(f"{type(error).__name__}: {error}") from error


class AttemptCounter:
    """The shared counts, or this process's own while Redis is lost or not configured."""

    def __init__(self, local: LocalAttempts, shared: RedisAttempts | None, watch: StoreWatch) -> None:
        self.local = local
        self._shared = shared
        self._watch = watch

    def take(self, key: str) -> CountedAttempt:
        if self._shared is not None:
            with suppress(LimitStoreLostError), self._watch.guard():
                return self._shared.take(key)
        return self.local.take(key)

    def give_back(self, key: str) -> None:
        if self._shared is not None:
            with suppress(LimitStoreLostError), self._watch.guard():
                self._shared.give_back(key)
                return
        self.local.give_back(key)


@cache
def attempts() -> AttemptCounter:
    """Return this process's attempt counter. Raises ValueError for an invalid Redis URL."""
    shared = RedisAttempts(settings.REDIS_URL) if settings.REDIS_URL else None
    return AttemptCounter(LocalAttempts(), shared, limiter().watch)
