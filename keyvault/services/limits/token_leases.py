"""Token leases: tokens taken from the shared buckets in advance and spent in this process. No I/O here.

    plan(buckets, cost)       -> Spend, if the local state decides, or the TokenLeaseRequest to send to the store
    settle(request, reply)    -> Spend, or another TokenLeaseRequest; abandon(request) when there was no reply

A lease is the tokens that a lease request takes from the store beyond the cost of the client's request. It expires
LIFE_US after the lease request was sent, by the clock of this process. Its remaining tokens are then lost: the bucket
has counted them, so they are never spent twice. The size of a lease has two bounds:

- At most a twentieth of what is left in the store, so that leases shrink to nothing as the bucket empties. With fewer
  than 40 tokens left, the store counts every request exactly; the same holds for every limit below 40.
- At most what was used of the previous lease, or twice that if it was used up before it expired. The first lease is
  empty: the request takes its cost alone. So a process with few requests reserves nothing, and loses fewer tokens than
  it spends. (Not counted: tokens held by a request that another of its buckets refused, and tokens in flight when the
  store was lost.)

A bucket gains tokens only with time. So the store is certain to refuse what the last known state refuses, and such
requests are refused locally. They reach the store again when a token is due, and once a second in case the store was
flushed.

Over all processes, in any w seconds a bucket admits at most count + w * count / seconds, as a strict one does, plus
tokens leased earlier: at most one lease per process, and at most the refill of LIFE_US.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from keyvault.access.limits import Bucket, BucketState, BucketStatus, Spend, bucket_status, spend
from keyvault.services.limits.stores import Spender, StoreReply, monotonic_us

LIFE_US = 100_000
"""Lifetime of a lease, in microseconds."""

SHARE = 20
"""Divisor of the remaining tokens: the largest lease is remaining / SHARE."""

_STATE_MAX_AGE_US = 1_000_000
"""Maximum age of a bucket's last known state, in microseconds."""


class _BucketLease:
    """Local state of a bucket and its current lease; times are in microseconds of this process's clock."""

    __slots__ = ("ends_us", "full_at", "is_leasing", "left", "seen_us", "size")

    def __init__(self) -> None:
        self.left = 0
        self.ends_us = 0
        self.size = 0  # tokens that the last lease request spent, including its own cost
        self.is_leasing = False  # the next lease is requested; until it arrives, other requests spend their cost alone
        self.full_at = 0  # in units of 1/count microseconds, as in LocalStore
        self.seen_us = 0


@dataclass(frozen=True, slots=True)
class _LeasePart:
    """One bucket of a lease request: `size` tokens to spend in the store."""

    bucket: Bucket
    lease: _BucketLease
    size: int
    is_lease: bool


@dataclass(frozen=True, slots=True)
class TokenLeaseRequest:
    """A request to the store: spend `costs` from `buckets`, all or none, for one client request of `cost` tokens."""

    all_buckets: Sequence[Bucket]
    """All buckets of the client's request. `buckets` has those that no lease covers."""
    cost: int
    parts: tuple[_LeasePart, ...]
    covered: tuple[tuple[_BucketLease, int], ...]
    """The leases that have already spent the cost of this request, and when each expires."""
    sent_us: int

    @property
    def buckets(self) -> list[Bucket]:
        return [part.bucket for part in self.parts]

    @property
    def costs(self) -> list[int]:
        return [part.size for part in self.parts]


class TokenLeases:
    """Token leases of one process, for at most `capacity` buckets: the oldest are evicted and their tokens lost."""

    def __init__(
        self, now_us: Callable[[], int] = monotonic_us, life_us: int = LIFE_US, capacity: int = 100_000
    ) -> None:
        self._now_us = now_us
        self._life_us = life_us
        self._capacity = capacity
        self._leases: dict[str, _BucketLease] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._leases)

    def spender(self, buckets: Sequence[Bucket]) -> Spender:
        """Return a function that spends from leases only; see `LocalStore.spender`."""
        return partial(self._try_spend, buckets)

    def _try_spend(self, buckets: Sequence[Bucket], cost: int) -> tuple[int, ...] | None:
        if cost < 1:
            return None
        statuses: tuple[int, ...] = ()
        with self._lock:
            now_us = self._now_us()
            covered = []
            for bucket in buckets:
                lease = self._leases.get(bucket.key)
                if lease is None or lease.left < cost or now_us >= lease.ends_us:
                    return None
                covered.append(lease)
                count, window_us, burst, second = bucket.limit.numbers
                now, full_at = now_us * count, lease.full_at
                remaining = (now + burst - full_at) // window_us + lease.left - cost
                reset_seconds = -((now - full_at) // second)
                statuses += (remaining if remaining < count else count, reset_seconds if reset_seconds > 1 else 1)
            for lease in covered:
                lease.left -= cost
        return statuses

    def plan(self, buckets: Sequence[Bucket], cost: int) -> Spend | TokenLeaseRequest:
        """Decide locally, or return the request to send to the store.

        Raises ValueError when a bucket can never hold that many tokens.
        """
        for bucket in buckets:
            bucket.limit.advance(cost)
        with self._lock:
            now_us = self._now_us()
            leases = [self._lease(bucket.key) for bucket in buckets]
            uncovered = [
                (bucket, lease)
                for bucket, lease in zip(buckets, leases, strict=True)
                if lease.left < cost or now_us >= lease.ends_us
            ]
            if refusal := _refusal(uncovered, cost, now_us):
                return self._result(buckets, now_us, refusal, [bucket for bucket, _ in uncovered])
            uncovered_leases = [lease for _, lease in uncovered]
            covered = [lease for lease in leases if lease not in uncovered_leases]
            for lease in covered:
                lease.left -= cost
            if not uncovered:
                return self._result(buckets, now_us)
            parts = tuple(_lease_part(bucket, lease, cost, now_us) for bucket, lease in uncovered)
            return TokenLeaseRequest(buckets, cost, parts, tuple((lease, lease.ends_us) for lease in covered), now_us)

    def settle(self, lease_request: TokenLeaseRequest, reply: StoreReply) -> Spend | TokenLeaseRequest:
        with self._lock:
            now_us = self._now_us()
            is_spent = reply.spend.allowed
            for part, state in zip(lease_request.parts, reply.states, strict=True):
                # Relative to the send time, which is before the store read its clock.
                count, shifted_us = part.bucket.limit.count, state.micros - reply.now_us + lease_request.sent_us
                part.lease.full_at, part.lease.seen_us = (
                    shifted_us * count + state.fraction,
                    lease_request.sent_us,
                )
                if is_spent and part.is_lease:
                    self._take(part, lease_request, now_us)
            if not is_spent and any(part.size > lease_request.cost for part in lease_request.parts):
                parts = tuple(
                    _LeasePart(part.bucket, part.lease, lease_request.cost, part.is_lease)
                    for part in lease_request.parts
                )
                return TokenLeaseRequest(
                    lease_request.all_buckets, lease_request.cost, parts, lease_request.covered, now_us
                )
            self._end_leasing(lease_request)
            if is_spent:
                return self._result(lease_request.all_buckets, now_us)
            self._refund(lease_request)
            return self._result(lease_request.all_buckets, now_us, reply.spend, lease_request.buckets)

    def abandon(self, lease_request: TokenLeaseRequest) -> None:
        """Give up a request whose outcome is unknown. Tokens that the store may have spent are lost."""
        with self._lock:
            self._end_leasing(lease_request)
            self._refund(lease_request)

    def _take(self, part: _LeasePart, lease_request: TokenLeaseRequest, now_us: int) -> None:
        """Replace the previous lease. At most `cost` - 1 of its tokens carry over."""
        lease = part.lease
        before = min(lease.left, lease_request.cost - 1) if now_us < lease.ends_us else 0
        lease.left = before + part.size - lease_request.cost
        lease.ends_us = lease_request.sent_us + self._life_us
        lease.size = part.size

    @staticmethod
    def _end_leasing(lease_request: TokenLeaseRequest) -> None:
        for part in lease_request.parts:
            if part.is_lease:
                part.lease.is_leasing = False

    @staticmethod
    def _refund(lease_request: TokenLeaseRequest) -> None:
        """Return the tokens to their leases. They are lost if the lease was replaced or the next one is requested."""
        for lease, ends_us in lease_request.covered:
            if lease.ends_us == ends_us and not lease.is_leasing:
                lease.left += lease_request.cost

    def _result(
        self,
        buckets: Sequence[Bucket],
        now_us: int,
        refusal: Spend | None = None,
        refused_buckets: Sequence[Bucket] = (),
    ) -> Spend:
        """Return the result with each bucket's status: from the refusal for `refused_buckets`, else the current one."""
        refused = (
            {}
            if refusal is None
            else {one.key: statuses for one, statuses in zip(refused_buckets, refusal.statuses, strict=True)}
        )
        statuses = tuple(
            refused.get(bucket.key) or _status(bucket, self._lease(bucket.key), now_us) for bucket in buckets
        )
        return Spend(refusal is None, statuses, 0 if refusal is None else refusal.retry_after_seconds)

    def _lease(self, key: str) -> _BucketLease:
        lease = self._leases.get(key)
        if lease is None:
            if len(self._leases) >= self._capacity:
                for oldest in list(islice(self._leases, self._capacity // 8 + 1)):
                    del self._leases[oldest]
            lease = self._leases[key] = _BucketLease()
        return lease


def _lease_part(bucket: Bucket, lease: _BucketLease, cost: int, now_us: int) -> _LeasePart:
    if lease.is_leasing:
        return _LeasePart(bucket, lease, cost, is_lease=False)
    lease.is_leasing = True
    size = 0
    if now_us - lease.seen_us < _STATE_MAX_AGE_US:
        used = lease.size - lease.left
        left_in_store = bucket_status(bucket, _state(bucket, lease), now_us).remaining
        size = min(2 * used if now_us < lease.ends_us else used, left_in_store // SHARE)
    return _LeasePart(bucket, lease, max(cost, size), is_lease=True)


def _refusal(uncovered: Sequence[tuple[Bucket, _BucketLease]], cost: int, now_us: int) -> Spend | None:
    """Return the refusal that the store is certain to give, or None."""
    if not uncovered:
        return None
    states = [
        _state(bucket, lease) if now_us - lease.seen_us < _STATE_MAX_AGE_US else None for bucket, lease in uncovered
    ]
    outcome, _ = spend(states, [bucket for bucket, _ in uncovered], cost, now_us)
    return None if outcome.allowed else outcome


def _state(bucket: Bucket, lease: _BucketLease) -> BucketState:
    return BucketState(*divmod(lease.full_at, bucket.limit.count))


def _status(bucket: Bucket, lease: _BucketLease, now_us: int) -> BucketStatus:
    """Return a bucket's status: tokens left in the store and in the lease; the store's time until it is full."""
    stored = bucket_status(bucket, _state(bucket, lease), now_us)
    leased = lease.left if now_us < lease.ends_us else 0
    return BucketStatus(
        stored.policy, stored.limit, min(stored.remaining + leased, stored.limit.count), max(stored.reset_seconds, 1)
    )
