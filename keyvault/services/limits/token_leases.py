"""Token leases: tokens taken from the shared buckets in advance and spent in this process. No I/O here.

    plan(buckets, cost)       -> Spend, if the local state decides, or the LeaseRequest to send to the store
    settle(request, reply)    -> Spend, or another LeaseRequest; abandon(request) when there was no reply

A lease is what one lease request pays beyond the cost of its own request. It expires LIFE_US after the request was
sent, by the clock of this process. Its remaining tokens are then lost: the bucket has paid them, so they are never
spent twice. The size of a lease has two bounds:

- At most a twentieth of what is left in the store, so that leases shrink to nothing as the bucket empties. With fewer
  than 40 tokens left, the store counts every request exactly; the same holds for every limit below 40.
- At most what was used of the previous lease, or twice that if it was used up before it expired. The first lease is
  the cost alone. So a process with few requests holds nothing back, and loses fewer tokens than it spends.
  (Not counted: tokens held by a request that another of its buckets refused, and tokens in flight when the store was
  lost.)

An empty bucket is remembered. It gains tokens only with time. So while the arithmetic refuses by the last known state,
the store would refuse too. A flood of refused requests reaches the store only when a token is back, and once a second
in case the store was flushed.

Over all processes, in any w seconds a bucket admits at most count + w * count / seconds, as a strict one does, plus
tokens paid before and spent now: one lease per process, and no more than the refill of LIFE_US.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from keyvault.access.limits import Bucket, BucketState, BucketStatus, Spend, bucket_status, spend
from keyvault.services.limits.stores import Payer, StoreReply, monotonic_us

LIFE_US = 100_000
"""Lifetime of a lease, in microseconds."""

SHARE = 20
"""Divisor of the remaining tokens: the largest lease is remaining / SHARE."""

_STATE_MAX_AGE_US = 1_000_000
"""Maximum age of a bucket's last known state, in microseconds."""


class _Holding:
    """Local state of a bucket and its current lease; times are in microseconds of this process's clock."""

    __slots__ = ("ends_us", "full_at", "is_leasing", "left", "seen_us", "size")

    def __init__(self) -> None:
        self.left = 0
        self.ends_us = 0
        self.size = 0  # tokens that the last lease request paid, including its own cost
        self.is_leasing = False  # the next lease is requested; until it arrives, other requests pay their cost alone
        self.full_at = 0  # in units of 1/count microseconds, as in LocalStore
        self.seen_us = 0


@dataclass(frozen=True, slots=True)
class _Part:
    """One bucket of a lease request: `size` tokens to spend in the store."""

    bucket: Bucket
    holding: _Holding
    size: int
    is_lease: bool


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """A request to the store: spend `costs` from `buckets`, all or none, for one request of `cost` tokens."""

    request: Sequence[Bucket]
    cost: int
    parts: tuple[_Part, ...]
    paid: tuple[tuple[_Holding, int], ...]
    """The holdings that have already paid for the request, and when each of their leases expires."""
    sent_us: int

    @property
    def buckets(self) -> list[Bucket]:
        return [part.bucket for part in self.parts]

    @property
    def costs(self) -> list[int]:
        return [part.size for part in self.parts]


class Leases:
    """Leases of one process, for at most `capacity` buckets: the oldest are evicted and their tokens lost."""

    def __init__(
        self, now_us: Callable[[], int] = monotonic_us, life_us: int = LIFE_US, capacity: int = 100_000
    ) -> None:
        self._now_us = now_us
        self._life_us = life_us
        self._capacity = capacity
        self._holdings: dict[str, _Holding] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._holdings)

    def payer(self, buckets: Sequence[Bucket]) -> Payer:
        """Return a payer that spends from leases only; see `LocalStore.payer`."""
        return partial(self._try_spend, buckets)

    def _try_spend(self, buckets: Sequence[Bucket], cost: int) -> tuple[int, ...] | None:
        if cost < 1:
            return None
        statuses: tuple[int, ...] = ()
        with self._lock:
            now_us = self._now_us()
            paid = []
            for bucket in buckets:
                holding = self._holdings.get(bucket.key)
                if holding is None or holding.left < cost or now_us >= holding.ends_us:
                    return None
                paid.append(holding)
                count, window_us, burst, second = bucket.limit.numbers
                now, full_at = now_us * count, holding.full_at
                remaining = (now + burst - full_at) // window_us + holding.left - cost
                reset_seconds = -((now - full_at) // second)
                statuses += (remaining if remaining < count else count, reset_seconds if reset_seconds > 1 else 1)
            for holding in paid:
                holding.left -= cost
        return statuses

    def plan(self, buckets: Sequence[Bucket], cost: int) -> Spend | LeaseRequest:
        """Spend locally, or return the request to send to the store.

        Raises ValueError when a bucket can never hold that many tokens.
        """
        for bucket in buckets:
            bucket.limit.advance(cost)
        with self._lock:
            now_us = self._now_us()
            holdings = [self._holding(bucket.key) for bucket in buckets]
            unpaid = [
                (bucket, holding)
                for bucket, holding in zip(buckets, holdings, strict=True)
                if holding.left < cost or now_us >= holding.ends_us
            ]
            if refusal := _refusal(unpaid, cost, now_us):
                return self._result(buckets, now_us, refusal, [bucket for bucket, _ in unpaid])
            unpaid_holdings = [holding for _, holding in unpaid]
            paid = [holding for holding in holdings if holding not in unpaid_holdings]
            for holding in paid:
                holding.left -= cost
            if not unpaid:
                return self._result(buckets, now_us)
            parts = tuple(_part(bucket, holding, cost, now_us) for bucket, holding in unpaid)
            return LeaseRequest(buckets, cost, parts, tuple((holding, holding.ends_us) for holding in paid), now_us)

    def settle(self, lease_request: LeaseRequest, reply: StoreReply) -> Spend | LeaseRequest:
        with self._lock:
            now_us = self._now_us()
            is_paid = reply.spend.allowed
            for part, state in zip(lease_request.parts, reply.states, strict=True):
                # Relative to the send time, which is before the store read its clock.
                count, shifted_us = part.bucket.limit.count, state.micros - reply.now_us + lease_request.sent_us
                part.holding.full_at, part.holding.seen_us = shifted_us * count + state.fraction, lease_request.sent_us
                if is_paid and part.is_lease:
                    self._take(part, lease_request, now_us)
            if not is_paid and any(part.size > lease_request.cost for part in lease_request.parts):
                parts = tuple(
                    _Part(part.bucket, part.holding, lease_request.cost, part.is_lease) for part in lease_request.parts
                )
                return LeaseRequest(lease_request.request, lease_request.cost, parts, lease_request.paid, now_us)
            self._end_leasing(lease_request)
            if is_paid:
                return self._result(lease_request.request, now_us)
            self._refund(lease_request)
            return self._result(lease_request.request, now_us, reply.spend, lease_request.buckets)

    def abandon(self, lease_request: LeaseRequest) -> None:
        """Give up a request whose outcome is unknown. Tokens that the store may have paid are lost."""
        with self._lock:
            self._end_leasing(lease_request)
            self._refund(lease_request)

    def _take(self, part: _Part, lease_request: LeaseRequest, now_us: int) -> None:
        """Replace the previous lease; only the tokens that this request spends carry over from it."""
        holding = part.holding
        before = min(holding.left, lease_request.cost - 1) if now_us < holding.ends_us else 0
        holding.left = before + part.size - lease_request.cost
        holding.ends_us = lease_request.sent_us + self._life_us
        holding.size = part.size

    @staticmethod
    def _end_leasing(lease_request: LeaseRequest) -> None:
        for part in lease_request.parts:
            if part.is_lease:
                part.holding.is_leasing = False

    @staticmethod
    def _refund(lease_request: LeaseRequest) -> None:
        """Return the tokens to the same lease. They are lost if it is replaced or the next one is requested."""
        for holding, ends_us in lease_request.paid:
            if holding.ends_us == ends_us and not holding.is_leasing:
                holding.left += lease_request.cost

    def _result(
        self,
        request: Sequence[Bucket],
        now_us: int,
        refusal: Spend | None = None,
        refused_buckets: Sequence[Bucket] = (),
    ) -> Spend:
        """Return the result with the current state of each bucket; a refusal's state wins for the buckets it names."""
        refused = (
            {}
            if refusal is None
            else {one.key: statuses for one, statuses in zip(refused_buckets, refusal.statuses, strict=True)}
        )
        standings = tuple(
            refused.get(bucket.key) or _status(bucket, self._holding(bucket.key), now_us) for bucket in request
        )
        return Spend(refusal is None, standings, 0 if refusal is None else refusal.retry_after_seconds)

    def _holding(self, key: str) -> _Holding:
        holding = self._holdings.get(key)
        if holding is None:
            if len(self._holdings) >= self._capacity:
                for oldest in list(islice(self._holdings, self._capacity // 8 + 1)):
                    del self._holdings[oldest]
            holding = self._holdings[key] = _Holding()
        return holding


def _part(bucket: Bucket, holding: _Holding, cost: int, now_us: int) -> _Part:
    if holding.is_leasing:
        return _Part(bucket, holding, cost, is_lease=False)
    holding.is_leasing = True
    size = 0
    if now_us - holding.seen_us < _STATE_MAX_AGE_US:
        used = holding.size - holding.left
        left_there = bucket_status(bucket, _state(bucket, holding), now_us).remaining
        size = min(2 * used if now_us < holding.ends_us else used, left_there // SHARE)
    return _Part(bucket, holding, max(cost, size), is_lease=True)


def _refusal(unpaid: Sequence[tuple[Bucket, _Holding]], cost: int, now_us: int) -> Spend | None:
    """Return the refusal that the store is certain to give, or None."""
    if not unpaid:
        return None
    states = [
        _state(bucket, holding) if now_us - holding.seen_us < _STATE_MAX_AGE_US else None for bucket, holding in unpaid
    ]
    outcome, _ = spend(states, [bucket for bucket, _ in unpaid], cost, now_us)
    return None if outcome.allowed else outcome


def _state(bucket: Bucket, holding: _Holding) -> BucketState:
    return BucketState(*divmod(holding.full_at, bucket.limit.count))


def _status(bucket: Bucket, holding: _Holding, now_us: int) -> BucketStatus:
    """Return a bucket's status: tokens left in the store and in the lease; the store's time until it is full."""
    stored = bucket_status(bucket, _state(bucket, holding), now_us)
    leased = holding.left if now_us < holding.ends_us else 0
    return BucketStatus(
        stored.policy, stored.limit, min(stored.remaining + leased, stored.limit.count), max(stored.reset_seconds, 1)
    )
