"""Storage of rate limit buckets: this process, or a Redis that several processes share."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from keyvault.access.limits import Bucket, BucketState, Spend, spend, spend_each
from keyvault.services.limits.redis_pipeline import LimitPipeline


class LimitStoreLostError(Exception):
    """The store did not reply or its reply was invalid; whether it spent anything is unknown."""


Spender = Callable[[int], tuple[int, ...] | None]
"""Spends a number of tokens from all buckets or none, without I/O; see `LocalStore.spender`."""


class LimitStore(Protocol):
    def spend(self, buckets: Sequence[Bucket], cost: int) -> Spend:
        """Apply `access.limits.spend` to the stored states atomically. Raises LimitStoreLostError."""


@runtime_checkable
class PipelinedStore(Protocol):
    async def spend_async(self, buckets: Sequence[Bucket], cost: int) -> Spend:
        """Spend from asyncio; calls of the same loop iteration share a round trip. Raises LimitStoreLostError."""

    async def close_async(self) -> None:
        """Close the connection of the running loop."""


class StoreReply(NamedTuple):
    """Reply of a shared store: the result, the stored states, and the store's clock in microseconds."""

    spend: Spend
    states: tuple[BucketState, ...]
    now_us: int


def monotonic_us() -> int:
    """Return the time of `LocalStore`'s clock, in microseconds."""
    return time.monotonic_ns() // 1000


class _Cell:
    """A `BucketState` as one integer, in units of 1/count microseconds: divmod by `count` gives the state's fields."""

    __slots__ = ("count", "full_at")

    def __init__(self, full_at: int, count: int) -> None:
        self.full_at = full_at
        self.count = count

    @property
    def state(self) -> BucketState:
        return BucketState(*divmod(self.full_at, self.count))


class LocalStore:
    """Buckets of this process, at most `capacity` of them; the fullest are evicted first."""

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns, capacity: int = 100_000) -> None:
        """`now_ns`: a monotonic clock in nanoseconds. No other process reads these states, so it need not be UTC."""
        self._now_ns = now_ns
        self._capacity = capacity
        self._cells: dict[str, _Cell] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._cells)

    def spender(self, buckets: Sequence[Bucket]) -> Spender:
        """Return a function that spends as `spend` does, ten times as fast, for buckets that are known.

        It returns one flat tuple: remaining tokens and seconds until full, for each bucket. It returns None, and
        spends nothing, when a bucket is new or empty, or for more than two buckets: only `spend` can decide then.
        """
        if len(buckets) == 1:
            return self._spender_of_one(*buckets)
        if len(buckets) == 2:
            return self._spender_of_two(*buckets)
        return lambda cost: None

    def _spender_of_one(self, bucket: Bucket) -> Spender:
        """Return the fast path for one bucket. The closure holds all constants, for speed."""
        cells, key, now_ns = self._cells, bucket.key, self._now_ns
        acquire, release = self._lock.acquire, self._lock.release
        count, window_us, burst, second = bucket.limit.numbers

        def spend_tokens(cost: int) -> tuple[int, ...] | None:
            if cost < 1:
                return None
            acquire()  # `with` takes twice as long
            try:
                cell = cells.get(key)
                if cell is None or cell.count != count:
                    return None
                now, full_at = now_ns() // 1000 * count, cell.full_at
                full_at = (full_at if full_at > now else now) + cost * window_us
                unspent = now + burst - full_at
                if unspent < 0:
                    return None
                cell.full_at = full_at
            finally:
                release()
            return unspent // window_us, -((now - full_at) // second)

        return spend_tokens

    def _spender_of_two(self, first: Bucket, second: Bucket) -> Spender:
        """Return the fast path for an account's bucket and an endpoint's, like `_spender_of_one`."""
        cells, key_1, key_2, now_ns = self._cells, first.key, second.key, self._now_ns
        acquire, release = self._lock.acquire, self._lock.release
        count_1, window_us_1, burst_1, second_1 = first.limit.numbers
        count_2, window_us_2, burst_2, second_2 = second.limit.numbers

        def spend_tokens(cost: int) -> tuple[int, ...] | None:
            if cost < 1:
                return None
            acquire()
            try:
                cell_1, cell_2 = cells.get(key_1), cells.get(key_2)
                if cell_1 is None or cell_2 is None or cell_1.count != count_1 or cell_2.count != count_2:
                    return None
                now_us = now_ns() // 1000
                now_1, full_1 = now_us * count_1, cell_1.full_at
                full_1 = (full_1 if full_1 > now_1 else now_1) + cost * window_us_1
                unspent_1 = now_1 + burst_1 - full_1
                now_2, full_2 = now_us * count_2, cell_2.full_at
                full_2 = (full_2 if full_2 > now_2 else now_2) + cost * window_us_2
                unspent_2 = now_2 + burst_2 - full_2
                if unspent_1 < 0 or unspent_2 < 0:
                    return None
                cell_1.full_at, cell_2.full_at = full_1, full_2
            finally:
                release()
            return (
                unspent_1 // window_us_1,
                -((now_1 - full_1) // second_1),
                unspent_2 // window_us_2,
                -((now_2 - full_2) // second_2),
            )

        return spend_tokens

    def spend(self, buckets: Sequence[Bucket], cost: int) -> Spend:
        with self._lock:
            cells = [self._cells.get(bucket.key) for bucket in buckets]
            states = [None if cell is None else cell.state for cell in cells]
            outcome, kept = spend(states, buckets, cost, self._now_ns() // 1000)
            for bucket, state in zip(buckets, kept, strict=True):
                count = bucket.limit.count
                self._cells[bucket.key] = _Cell(state.micros * count + state.fraction, count)
            if len(self._cells) > self._capacity:
                self._evict()
        return outcome

    def _evict(self) -> None:
        """Evict an eighth of the buckets, so that a flood of new ones rarely causes a sort.

        The theoretical arrival time sorts full buckets first, whose eviction loses nothing, and exhausted ones last.
        So a flood of new buckets cannot refill an exhausted one.
        """
        kept = self._capacity - self._capacity // 8
        for key in sorted(self._cells, key=lambda key: self._cells[key].state)[: len(self._cells) - kept]:
            del self._cells[key]


# KEYS: the buckets. ARGV, four for each: count, window in µs, and the advance of `Limit.advance`.
# Returns the time in µs and the previous states; the caller computes the result from these with its own arithmetic.
# Lua's numbers are doubles: every one here is an integer below 2**53, until the year 2255. They are formatted with
# '%.0f', because tostring() keeps 14 digits. A state expires only after its bucket is full again.
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


def redis_client(url: str, timeout_seconds: float) -> Redis:
    """Return a client without retries: a failed attempt may already have spent, and the request is waiting."""
    return Redis.from_url(
        url,
        socket_timeout=timeout_seconds,
        socket_connect_timeout=timeout_seconds,
        retry=Retry(NoBackoff(), 0),
    )


REDIS_TIMEOUT_SECONDS = 0.25
"""Timeout of a connection attempt to Redis, and of one reply, in seconds."""


class RedisStore:
    """Buckets in Redis, timed by the server's clock. Keys of one call share a hash tag `{tag}` for Redis Cluster."""

    def __init__(self, url: str, timeout_seconds: float = REDIS_TIMEOUT_SECONDS) -> None:
        self._script = redis_client(url, timeout_seconds).register_script(_SPEND)
        self._pipeline = LimitPipeline(url, _SPEND, timeout_seconds)

    def spend(self, buckets: Sequence[Bucket], cost: int) -> Spend:
        return self.spend_each(buckets, [cost] * len(buckets)).spend

    async def spend_async(self, buckets: Sequence[Bucket], cost: int) -> Spend:
        return (await self.spend_each_async(buckets, [cost] * len(buckets))).spend

    def spend_each(self, buckets: Sequence[Bucket], costs: Sequence[int]) -> StoreReply:
        """Apply `access.limits.spend_each` to the stored states atomically. Raises LimitStoreLostError."""
        numbers = _script_arguments(buckets, costs)
        try:
            reply = self._script(keys=[bucket.key for bucket in buckets], args=numbers)
        except (RedisError, OSError) as error:
            raise LimitStoreLostError(f"{type(error).__name__}: {error}") from error
        return _parse_reply(reply, buckets, costs)

    async def spend_each_async(self, buckets: Sequence[Bucket], costs: Sequence[int]) -> StoreReply:
        numbers = _script_arguments(buckets, costs)
        try:
            reply = await self._pipeline.run([bucket.key for bucket in buckets], numbers)
        except (RedisError, OSError) as error:
            raise LimitStoreLostError(f"{type(error).__name__}: {error}") from error
        return _parse_reply(reply, buckets, costs)

    async def close_async(self) -> None:
        await self._pipeline.close()


def _script_arguments(buckets: Sequence[Bucket], costs: Sequence[int]) -> list[int]:
    return [
        number
        for bucket, cost in zip(buckets, costs, strict=True)
        for number in (bucket.limit.count, bucket.limit.window_us, *bucket.limit.advance(cost))
    ]


def _parse_reply(reply: Any, buckets: Sequence[Bucket], costs: Sequence[int]) -> StoreReply:
    now, *states = reply
    now_us = int(now)
    return StoreReply(*spend_each([_parse_state(state) for state in states], buckets, costs, now_us), now_us)


def _parse_state(state: Any) -> BucketState | None:
    if state is None:
        return None
    micros, _, fraction = state.partition(b":")
    return BucketState(int(micros), int(fraction))
