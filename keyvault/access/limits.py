"""How often may one do that? The generic cell rate algorithm, exact in integers.

    spend(states, buckets, cost, now_us) -> (Spend, new states)     all buckets pay, or none does

A bucket's state is one moment, the theoretical arrival time of ITU-T I.371 Annex A: when it will be full again.
Each token moves it on by seconds/count; a request passes as long as it stays within `seconds` from now. The moment
is kept as whole microseconds and a fraction in units of 1/count microseconds, so that nothing is ever rounded:
within any w seconds no more than count + w*count/seconds tokens are spent, and none is lost.

The same arithmetic runs inside Redis and, for the usual case, in the payers of `LocalStore`, see
`services.limit_stores`: change all of them or none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode, KeyvaultError

LARGEST_COUNT = 1_000_000
LONGEST_SECONDS = 86_400

_SECOND_US = 1_000_000


def find_limit_fault(count: int, seconds: int) -> str | None:
    """Why these two numbers make no limit, or None."""
    if not 1 <= count <= LARGEST_COUNT:
        return f"A limit lets 1 to {LARGEST_COUNT} requests pass, not {count}."
    if not 1 <= seconds <= LONGEST_SECONDS:
        return f"A limit counts over 1 to {LONGEST_SECONDS} seconds, not {seconds}."
    return None


@dataclass(frozen=True, slots=True)
class Limit:
    """`count` per `seconds`, with a burst of `count`. Raises ValueError for numbers out of bounds."""

    count: int
    seconds: int
    window_us: int = field(init=False, repr=False, compare=False)
    numbers: tuple[int, int, int, int] = field(init=False, repr=False, compare=False)
    """For those in a hurry: count and window, then the window and a second in units of 1/count microseconds."""

    def __post_init__(self) -> None:
        if (fault := find_limit_fault(self.count, self.seconds)) is not None:
            raise ValueError(fault)
        window_us = self.seconds * _SECOND_US
        object.__setattr__(self, "window_us", window_us)
        object.__setattr__(self, "numbers", (self.count, window_us, self.count * window_us, self.count * _SECOND_US))

    def __str__(self) -> str:
        return f"{self.count}/{self.seconds}"

    def advance(self, cost: int) -> tuple[int, int]:
        """How far `cost` tokens move the arrival time: whole microseconds, and the rest in 1/count of one.

        Raises ValueError when no burst holds that many.
        """
        if not 1 <= cost <= self.count:
            raise ValueError(f"a cost of {cost} is not between 1 and the burst of {self.count}")
        return divmod(cost * self.window_us, self.count)


DEFAULT_LIMITS = {Environment.SANDBOX: Limit(25, 1), Environment.PRODUCTION: Limit(100, 1)}
"""Of an account; an endpoint has none unless it is given one."""

FAILED_PROOF_LIMIT = Limit(100, 60)
"""Of an end client's address."""

SIGN_IN_FAILURES = 10
"""Failed sign-ins to the console by which a name, an address or a known device is locked."""

SIGN_IN_LOCK_SECONDS = 1800
"""Duration of that lock, in seconds; failures that lie further back than that are forgotten."""

REPEAT_LIMIT = Limit(10, 60)
"""Of a key's holder who revokes it again, though it was revoked already."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """What is spent from: `policy` names it in RateLimit fields, `key` is its place in a store."""

    policy: str
    key: str
    limit: Limit


class BucketState(NamedTuple):
    """When a bucket will be full again; compares as the moment that it is."""

    micros: int
    fraction: int

    @property
    def ceiling(self) -> int:
        return self.micros + (self.fraction > 0)


@dataclass(frozen=True, slots=True)
class BucketStatus:
    """One bucket afterwards: whole tokens left, and when it will be full again (rounded up).

    `wait_us`: how long until it alone would let the same request pass; 0 when it does.
    """

    policy: str
    limit: Limit
    remaining: int
    reset_seconds: int
    wait_us: int = 0


@dataclass(frozen=True, slots=True)
class Spend:
    """`retry_after_seconds` (1 or more when refused, else 0) is enough for all buckets if nobody else spends."""

    allowed: bool
    standings: tuple[BucketStatus, ...]
    retry_after_seconds: int

    @property
    def binding(self) -> BucketStatus:
        """The standing that matters: of the bucket with the least left, or of the one that refuses longest."""
        if self.allowed:
            return min(self.standings, key=lambda standing: standing.remaining)
        return max(self.standings, key=lambda standing: standing.wait_us)


class RateLimitedError(KeyvaultError):
    """A limit that is not the judgement's is used up; `spend` says until when."""

    code = ErrorCode.RATE_LIMITED

    def __init__(self, spend: Spend) -> None:
        binding = spend.binding
        super().__init__(
            f"The {binding.policy} limit of {binding.limit.count} in {binding.limit.seconds} s is used up."
        )
        self.spend = spend


def spend(
    states: Sequence[BucketState | None], buckets: Sequence[Bucket], cost: int, now_us: int
) -> tuple[Spend, tuple[BucketState, ...]]:
    """Takes `cost` tokens from every bucket, or none from any; the states in the buckets' order, None when full.

    The new states are to be stored after a refusal too: there they differ only where the clock has stepped back.
    Raises ValueError when some bucket can never hold that many tokens.
    """
    return spend_each(states, buckets, [cost] * len(buckets), now_us)


def spend_each(
    states: Sequence[BucketState | None], buckets: Sequence[Bucket], costs: Sequence[int], now_us: int
) -> tuple[Spend, tuple[BucketState, ...]]:
    """The same with a cost for each bucket."""
    before = tuple(_within(state, bucket.limit, now_us) for state, bucket in zip(states, buckets, strict=True))
    after = tuple(
        _charged(state, bucket.limit, cost) for state, bucket, cost in zip(before, buckets, costs, strict=True)
    )
    waits = [
        max(0, state.ceiling - bucket.limit.window_us - now_us) for state, bucket in zip(after, buckets, strict=True)
    ]
    kept = before if any(waits) else after
    standings = tuple(
        _standing(bucket, state, wait_us, now_us) for bucket, state, wait_us in zip(buckets, kept, waits, strict=True)
    )
    return Spend(not any(waits), standings, _seconds(max(waits))), kept


def bucket_status(bucket: Bucket, state: BucketState, now_us: int) -> BucketStatus:
    """How that bucket is now, when nothing is asked of it."""
    return _standing(bucket, _within(state, bucket.limit, now_us), 0, now_us)


def fallback(limit: Limit, percent: int) -> Limit:
    """That share of the limit, in the same time: at least 1."""
    return Limit(max(1, limit.count * percent // 100), limit.seconds)


def _within(state: BucketState | None, limit: Limit, now_us: int) -> BucketState:
    """The state as seen now: never before now, and after a step back of the clock never emptier than empty."""
    full, empty = BucketState(now_us, 0), BucketState(now_us + limit.window_us, 0)
    return full if state is None else max(full, min(state, empty))


def _charged(state: BucketState, limit: Limit, cost: int) -> BucketState:
    micros, fraction = limit.advance(cost)
    carry, fraction = divmod(state.fraction + fraction, limit.count)
    return BucketState(state.micros + micros + carry, fraction)


def _standing(bucket: Bucket, state: BucketState, wait_us: int, now_us: int) -> BucketStatus:
    limit = bucket.limit
    unspent = (now_us + limit.window_us - state.micros) * limit.count - state.fraction
    return BucketStatus(bucket.policy, limit, unspent // limit.window_us, _seconds(state.ceiling - now_us), wait_us)


def _seconds(micros: int) -> int:
    """Rounded up: whoever waits that long has waited long enough."""
    return -(-micros // _SECOND_US)
