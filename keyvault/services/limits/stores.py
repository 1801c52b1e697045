"""Where the buckets of limits are kept: in this process, or in a Redis that several processes share."""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from keyvault.access.limits import Bucket, BucketState, Spend, spend, spend_each
from keyvault.services.limits.redis_pipeline import LimitPipeline


class LimitStoreLostError(Exception):
    """The store did not answer, or not with sense; whether anything was spent there is not known."""


Payer = Callable[[int], tuple[int, ...] | None]
"""Spends that many tokens at once, or none: see `LocalStore.payer`."""


class LimitStore(Protocol):
    def spend(self, buckets: Sequence[Bucket], cost: int) -> Spend:
        """`access.limits.spend` on the stored states, in one step that nobody else comes between.

        Raises LimitStoreLostError.
        """


@runtime_checkable
class PipelinedStore(Protocol):
    async def spend_async(self, buckets: Sequence[Bucket], cost: int) -> Spend:
        """The same for callers in asyncio: all of one turn of the loop travel together."""

    async def close_async(self) -> None:
        """Lets go of the connection of the running loop."""


class StoreReply(NamedTuple):
    """What a shared store said: the outcome, the states that it keeps, and the time there in microseconds."""

    spend: Spend
    states: tuple[BucketState, ...]
    now_us: int


def monotonic_us() -> int:
    """Of the clock that `LocalStore` goes by."""
    return time.monotonic_ns() // 1000


class _Cell:
    """A state as one number, in units of 1/count microseconds: `BucketState` is its quotient and remainder by count."""

    __slots__ = ("count", "full_at")

    def __init__(self, full_at: int, count: int) -> None:
        self.full_at = full_at
        self.count = count

    @property
    def arrival(self) -> BucketState:
        return BucketState(*divmod(self.full_at, self.count))


class LocalStore:
    """Buckets of this process: at most `capacity` of them, the rest is forgotten, the fullest first."""

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns, capacity: int = 100_000) -> None:
        """`now_ns`: nobody else reads these states, so a clock that is never set serves better than the time of day."""
        self._now_ns = now_ns
        self._capacity = capacity
        self._cells: dict[str, _Cell] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._cells)

    def payer(self, buckets: Sequence[Bucket]) -> Payer:
        """`spend` from these in a tenth of its time, when all pay: what is left and the seconds to full, of each in
        turn. None: nothing was spent, and only `spend` can say whether that is a refusal. A bucket is new, or empty.
        """
        if len(buckets) == 1:
            return self._payer_of_one(buckets[0])
        return partial(self._try_spend, buckets)

    def _payer_of_one(self, bucket: Bucket) -> Payer:
        """As nearly always: in one function, that has at hand whatever stays the same."""
        cells, key, now_ns = self._cells, bucket.key, self._now_ns
        acquire, release = self._lock.acquire, self._lock.release
        count, window_us, burst, second = bucket.limit.numbers

        def pay(cost: int) -> tuple[int, ...] | None:
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

        return pay

    def _try_spend(self, buckets: Sequence[Bucket], cost: int) -> tuple[int, ...] | None:
        if cost < 1:
            return None
        paid: list[tuple[_Cell, int]] = []
        told: tuple[int, ...] = ()
        with self._lock:
            now_us = self._now_ns() // 1000
            for bucket in buckets:
                count, window_us, burst, second = bucket.limit.numbers
                cell = self._cells.get(bucket.key)
                if cell is None or cell.count != count:
                    return None
                now, full_at = now_us * count, cell.full_at
                full_at = (full_at if full_at > now else now) + cost * window_us
                unspent = now + burst - full_at
                if unspent < 0:
                    return None
                paid.append((cell, full_at))
                told += (unspent // window_us, -((now - full_at) // second))
            for cell, full_at in paid:
                cell.full_at = full_at
        return told

    def spend(self, buckets: Sequence[Bucket], cost: int) -> Spend:
        with self._lock:
            cells = [self._cells.get(bucket.key) for bucket in buckets]
            states = [None if cell is None else cell.arrival for cell in cells]
            outcome, kept = spend(states, buckets, cost, self._now_ns() // 1000)
            for bucket, state in zip(buckets, kept, strict=True):
                count = bucket.limit.count
                self._cells[bucket.key] = _Cell(state.micros * count + state.fraction, count)
            if len(self._cells) > self._capacity:
                self._make_room()
        return outcome

    def _make_room(self) -> None:
        """Forgets an eighth, so that a flood of new buckets pays for sorting once in a while only.

        The arrival time sorts those that are full again to the front, of which nothing is lost, and those that
        somebody has used up to the end: a flood of others does not win them back.
        """
        kept = self._capacity - self._capacity // 8
        for key in sorted(self._cells, key=lambda key: self._cells[key].arrival)[: len(self._cells) - kept]:
            del self._cells[key]


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


def redis_client(url: str, timeout_seconds: float) -> Redis:
    """Return a client that tries once: the first attempt may have spent already, and the request is waiting."""
    return Redis.from_url(
        url,
        socket_timeout=timeout_seconds,
        socket_connect_timeout=timeout_seconds,
        retry=Retry(NoBackoff(), 0),
    )


REDIS_TIMEOUT_SECONDS = 0.25


class RedisStore:
    """Buckets in Redis, by the clock of Redis. In a cluster, keys that are spent from together share a `{tag}`."""

    def __init__(self, url: str, timeout_seconds: float = REDIS_TIMEOUT_SECONDS) -> None:
        self._script = redis_client(url, timeout_seconds).register_script(_SPEND)
        self._pipeline = LimitPipeline(url, _SPEND, timeout_seconds)

    def spend(self, buckets: Sequence[Bucket], cost: int) -> Spend:
        return self.ask(buckets, [cost] * len(buckets)).spend

    async def spend_async(self, buckets: Sequence[Bucket], cost: int) -> Spend:
        return (await self.ask_async(buckets, [cost] * len(buckets))).spend

    def ask(self, buckets: Sequence[Bucket], costs: Sequence[int]) -> StoreReply:
        """`access.limits.spend_each`. Raises LimitStoreLostError."""
        numbers = _numbers(buckets, costs)
        try:
            found = self._script(keys=[bucket.key for bucket in buckets], args=numbers)
        except (RedisError, OSError) as error:
            raise LimitStoreLostError(f"{type(error).__name__}: {error}") from error
        return _answer(found, buckets, costs)

    async def ask_async(self, buckets: Sequence[Bucket], costs: Sequence[int]) -> StoreReply:
        numbers = _numbers(buckets, costs)
        try:
            found = await self._pipeline.run([bucket.key for bucket in buckets], numbers)
        except (RedisError, OSError) as error:
            raise LimitStoreLostError(f"{type(error).__name__}: {error}") from error
        return _answer(found, buckets, costs)

    async def close_async(self) -> None:
        await self._pipeline.close()


def _numbers(buckets: Sequence[Bucket], costs: Sequence[int]) -> list[int]:
    return [
        number
        for bucket, cost in zip(buckets, costs, strict=True)
        for number in (bucket.limit.count, bucket.limit.window_us, *bucket.limit.advance(cost))
    ]


def _answer(found: Any, buckets: Sequence[Bucket], costs: Sequence[int]) -> StoreReply:
    now, *states = found
    now_us = int(now)
    return StoreReply(*spend_each([_parsed(state) for state in states], buckets, costs, now_us), now_us)


def _parsed(state: Any) -> BucketState | None:
    if state is None:
        return None
    micros, _, fraction = state.partition(b":")
    return BucketState(int(micros), int(fraction))
