"""Where the buckets of limits are kept: in this process, or in a Redis that several processes share."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from keyvault.access.limits import Arrival, Bucket, Spend, spend


class LimitStoreLostError(Exception):
    """The store did not answer, or not with sense; whether anything was spent there is not known."""


class LimitStore(Protocol):
    def spend(self, buckets: Sequence[Bucket], cost: int) -> Spend:
        """`access.limits.spend` on the stored states, in one step that nobody else comes between.

        Raises LimitStoreLostError.
        """


def monotonic_us() -> int:
    """Nobody else reads these states, so a clock that is never set serves better than the time of day."""
    return time.monotonic_ns() // 1000


class LocalStore:
    """Buckets of this process: at most `capacity` of them, the rest is forgotten, the fullest first."""

    def __init__(self, now_us: Callable[[], int] = monotonic_us, capacity: int = 100_000) -> None:
        self._now_us = now_us
        self._capacity = capacity
        self._states: dict[str, Arrival] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._states)

    def spend(self, buckets: Sequence[Bucket], cost: int) -> Spend:
        with self._lock:
            states = [self._states.get(bucket.key) for bucket in buckets]
            outcome, kept = spend(states, buckets, cost, self._now_us())
            self._states.update(zip((bucket.key for bucket in buckets), kept, strict=True))
            if len(self._states) > self._capacity:
                self._make_room()
        return outcome

    def _make_room(self) -> None:
        """Forgets an eighth, so that a flood of new buckets pays for sorting once in a while only.

        The arrival time sorts those that are full again to the front, of which nothing is lost, and those that
        somebody has used up to the end: a flood of others does not win them back.
        """
        kept = self._capacity - self._capacity // 8
        for key in sorted(self._states, key=self._states.__getitem__)[: len(self._states) - kept]:
            del self._states[key]


# KEYS: the buckets. ARGV, four for each: count, window in µs, and the advance of `Limit.advance`.
# Answers the time in µs and the states found; from these the caller's own arithmetic tells the outcome.
# Lua's numbers are doubles: every one here is a whole number below 2**53, until the year 2255. Written out with
# '%.0f', because tostring() keeps 14 digits. A state expires only after it is full again.
_SPEND = """
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local found, before, after = {string.format('%.0f', now)}, {}, {}
local allowed = true
for i, key in ipairs(KEYS) do
  local count, window = tonumber(ARGV[4 * i - 3]), tonumber(ARGV[4 * i - 2])
  local micros, fraction = now, 0
  local state = redis.call('GET', key)
  found[i + 1] = state
  if state then
    local m, f = string.match(state, '^(%d+):(%d+)$')
    m, f = tonumber(m), tonumber(f)
    if m >= now then micros, fraction = m, f end
    if m >= now + window then
      micros, fraction = now + window, 0
      if m > micros or f > 0 then before[i] = {micros, fraction} end
    end
  end
  micros, fraction = micros + tonumber(ARGV[4 * i - 1]), fraction + tonumber(ARGV[4 * i])
  if fraction >= count then micros, fraction = micros + 1, fraction - count end
  after[i] = {micros, fraction}
  if micros > now + window or (micros == now + window and fraction > 0) then allowed = false end
end
for i, state in pairs(allowed and after or before) do
  local lives_ms = math.ceil((state[1] - now) / 1000) + 1
  redis.call('SET', KEYS[i], string.format('%.0f:%.0f', state[1], state[2]), 'PX', string.format('%.0f', lives_ms))
end
return found
"""


class RedisStore:
    """Buckets in Redis, by the clock of Redis. In a cluster, keys that are spent from together share a `{tag}`."""

    def __init__(self, url: str, timeout_seconds: float = 0.25) -> None:
        # Not tried twice: the first attempt may have spent already, and the request is waiting.
        client = Redis.from_url(
            url,
            socket_timeout=timeout_seconds,
            socket_connect_timeout=timeout_seconds,
            retry=Retry(NoBackoff(), 0),
        )
        self._spend = client.register_script(_SPEND)

    def spend(self, buckets: Sequence[Bucket], cost: int) -> Spend:
        numbers = [
            number
            for bucket in buckets
            for number in (bucket.limit.count, bucket.limit.window_us, *bucket.limit.advance(cost))
        ]
        try:
            now_us, *states = self._spend(keys=[bucket.key for bucket in buckets], args=numbers)
        except (RedisError, OSError) as error:
            raise LimitStoreLostError(f"{type(error).__name__}: {error}") from error
        outcome, _ = spend([_parsed(state) for state in states], buckets, cost, int(now_us))
        return outcome


def _parsed(state: Any) -> Arrival | None:
    if state is None:
        return None
    micros, _, fraction = state.partition(b":")
    return Arrival(int(micros), int(fraction))
