"""Rate limits: the generic cell rate algorithm (GCRA), exact in integers.

    spend(states, buckets, cost, now_us) -> (Spend, new states)     charges all buckets, or none

A bucket's state is one time, the theoretical arrival time of ITU-T I.371 Annex A: when the bucket is full again.
Each token advances it by seconds/count. A request passes if the result is at most `seconds` from now. The time is
stored in whole microseconds and a fraction in units of 1/count microseconds, so there is no rounding: any w seconds
allow at most count + w*count/seconds tokens, and no token is lost.

The Redis script and `LocalStore.spender` in `services.limits.stores` repeat this arithmetic. Change all of them
together.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode, KeyvaultError

MAX_COUNT = 1_000_000
MAX_SECONDS = 86_400

_SECOND_US = 1_000_000


def find_limit_fault(count: int, seconds: int) -> str | None:
    """Return why the numbers are no valid limit, or None."""
    if not 1 <= count <= MAX_COUNT:
        return f"A limit allows 1 to {MAX_COUNT} requests, not {count}."
    if not 1 <= seconds <= MAX_SECONDS:
        return f"A limit covers 1 to {MAX_SECONDS} seconds, not {seconds}."
    return None


@dataclass(frozen=True, slots=True)
class Limit:
    """At most `count` per `seconds`, with a burst of `count`. Raises ValueError for numbers out of bounds."""

    count: int
    seconds: int
    window_us: int = field(init=False, repr=False, compare=False)
    numbers: tuple[int, int, int, int] = field(init=False, repr=False, compare=False)
    """Precomputed for the fast path: count, window in microseconds; window and one second in 1/count microseconds."""

    def __post_init__(self) -> None:
        if (fault := find_limit_fault(self.count, self.seconds)) is not None:
            raise ValueError(fault)
        window_us = self.seconds * _SECOND_US
        object.__setattr__(self, "window_us", window_us)
        object.__setattr__(self, "numbers", (self.count, window_us, self.count * window_us, self.count * _SECOND_US))

    def __str__(self) -> str:
        return f"{self.count}/{self.seconds}"

    def advance(self, cost: int) -> tuple[int, int]:
        """Return how far `cost` tokens advance the arrival time: whole microseconds, and the rest in units of 1/count.

        Raises ValueError when the burst is smaller than the cost.
        """
        if not 1 <= cost <= self.count:
            raise ValueError(f"a cost of {cost} is not between 1 and the burst of {self.count}")
        return divmod(cost * self.window_us, self.count)


DEFAULT_LIMITS = {Environment.SANDBOX: Limit(25, 1), Environment.PRODUCTION: Limit(100, 1)}
"""Default limit of an account, by environment. An endpoint has no default."""

FAILED_PROOF_LIMIT = Limit(100, 60)
"""Limit of failed proofs per client address."""

SIGN_IN_FAILURES = 10
"""Number of failed console sign-ins that locks a name, an address or a known device."""

SIGN_IN_LOCK_SECONDS = 1800
"""Duration of the first sign-in lock, in seconds, and time after which the failures of an address no longer count."""

SIGN_IN_FAILURES_KEPT_SECONDS = 86_400
"""Time after the last failure of a name or a device at which its failures no longer count, in seconds.

It equals the longest lock, so that an attacker who stays below the lock has no more guesses in a day.
"""

MAX_SIGN_IN_LOCK_SECONDS = 86_400
"""Maximum duration of a sign-in lock, in seconds."""

SIGN_IN_LOCKS_KEPT_SECONDS = 7 * 86_400
"""Time after a lock during which another one lasts longer, in seconds."""


def sign_in_lock_seconds(locks: int) -> int:
    """Return the duration of a counter's lock: each lock within SIGN_IN_LOCKS_KEPT_SECONDS lasts twice as long."""
    return int(min(SIGN_IN_LOCK_SECONDS * 2 ** min(locks - 1, 16), MAX_SIGN_IN_LOCK_SECONDS))


SESSION_IDLE_SECONDS = 15 * 60
"""Time after its last use at which a console session ends, in seconds."""

SESSION_SECONDS = 8 * 60 * 60
"""Maximum duration of a console session, in seconds, however much it is used."""

REPEAT_LIMIT = Limit(10, 60)
"""Limit for one key: of repeated self-revocations, of repeated revocations of its customer tokens, and of new recipient
keys."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A token bucket: `policy` is its name in RateLimit fields, `key` its key in a store."""

    policy: str
    key: str
    limit: Limit


class BucketState(NamedTuple):
    """The time when a bucket is full again; ordered by that time."""

    micros: int
    fraction: int

    @property
    def ceiling(self) -> int:
        return self.micros + (self.fraction > 0)


@dataclass(frozen=True, slots=True)
class BucketStatus:
    """A bucket after a request: whole tokens left, and seconds until it is full (rounded up).

    `wait_us`: microseconds until this bucket alone would allow the same request; 0 if it does now.
    """

    policy: str
    limit: Limit
    remaining: int
    reset_seconds: int
    wait_us: int = 0


@dataclass(frozen=True, slots=True)
class Spend:
    """The result of a spend. `retry_after_seconds`: until all buckets allow it, unless others spend; 0 when allowed."""

    allowed: bool
    statuses: tuple[BucketStatus, ...]
    retry_after_seconds: int

    @property
    def binding(self) -> BucketStatus:
        """The status to report: of the bucket with the fewest tokens left, or on refusal of the longest wait."""
        if self.allowed:
            return min(self.statuses, key=lambda status: status.remaining)
        return max(self.statuses, key=lambda status: status.wait_us)


class RateLimitedError(KeyvaultError):
    """A limit outside the judgement is exhausted; `spend` has its status."""

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
    """Take `cost` tokens from every bucket, or from none. `states` in the buckets' order; None: full.

    Store the new states after a refusal too: they differ if the clock has stepped back. Raises ValueError when the
    cost exceeds the burst of a bucket.
    """
    return spend_each(states, buckets, [cost] * len(buckets), now_us)


def spend_each(
    states: Sequence[BucketState | None], buckets: Sequence[Bucket], costs: Sequence[int], now_us: int
) -> tuple[Spend, tuple[BucketState, ...]]:
    """Like `spend`, with a separate cost for each bucket."""
    before = tuple(_within(state, bucket.limit, now_us) for state, bucket in zip(states, buckets, strict=True))
    after = tuple(
        _charged(state, bucket.limit, cost) for state, bucket, cost in zip(before, buckets, costs, strict=True)
    )
    waits = [
        max(0, state.ceiling - bucket.limit.window_us - now_us) for state, bucket in zip(after, buckets, strict=True)
    ]
    kept = before if any(waits) else after
    statuses = tuple(
        _status(bucket, state, wait_us, now_us) for bucket, state, wait_us in zip(buckets, kept, waits, strict=True)
    )
    return Spend(not any(waits), statuses, _seconds(max(waits))), kept


def bucket_status(bucket: Bucket, state: BucketState, now_us: int) -> BucketStatus:
    """Return the bucket's status now, without spending."""
    return _status(bucket, _within(state, bucket.limit, now_us), 0, now_us)


def fallback(limit: Limit, percent: int) -> Limit:
    """Return `percent` of the limit over the same time, at least 1 request."""
    return Limit(max(1, limit.count * percent // 100), limit.seconds)


def _within(state: BucketState | None, limit: Limit, now_us: int) -> BucketState:
    """Clamp the state to [full, empty] at this time, which matters after the clock has stepped back."""
    full, empty = BucketState(now_us, 0), BucketState(now_us + limit.window_us, 0)
    return full if state is None else max(full, min(state, empty))


def _charged(state: BucketState, limit: Limit, cost: int) -> BucketState:
    micros, fraction = limit.advance(cost)
    carry, fraction = divmod(state.fraction + fraction, limit.count)
    return BucketState(state.micros + micros + carry, fraction)


def _status(bucket: Bucket, state: BucketState, wait_us: int, now_us: int) -> BucketStatus:
    limit = bucket.limit
    unspent = (now_us + limit.window_us - state.micros) * limit.count - state.fraction
    return BucketStatus(bucket.policy, limit, unspent // limit.window_us, _seconds(state.ceiling - now_us), wait_us)


def _seconds(micros: int) -> int:
    """Convert to seconds, rounded up so that waiting that long always suffices."""
    return -(-micros // _SECOND_US)
