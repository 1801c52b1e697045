"""Tokens taken from the shared buckets in advance, a few at a time, and spent in this process: no I/O here.

    plan(buckets, cost)      -> Spend, when what is known here decides, or the Ask that the store has to answer
    settle(ask, its answer)  -> Spend, or another Ask; abandon(ask) when there was no answer

A lease is what one ask pays beyond the request that asks. It ends LIFE_US after the ask was sent, by the clock of
this process, and what is left of it then is lost: it was paid, so it is never spent twice. How large it is:

- At most a twentieth of what the store said was left, so that leases shrink to nothing as the bucket empties: with
  fewer than 40 tokens left every request is counted in the store, exactly, and so is every limit below 40.
- At most what the one before was used for, and twice that when it was used up before its end: the first is the cost
  alone. Hence a process that asks seldom holds nothing back, and what is lost is always less than what was spent.
  (Not counted: what a request held while another of its buckets refused it, and what was on its way when the store
  was lost.)

A bucket that was empty is remembered. It gains tokens by time alone, so while the arithmetic refuses by the state
last seen, the store would refuse too: a flood of refused requests asks it when a token has come back, and once a
second in case somebody has emptied the store.

Over all processes, in any w seconds a bucket admits no more than count + w * count / seconds, as a strict one does,
and what was paid before and is spent now: a lease for each process, and no more than LIFE_US brings back.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from keyvault.access.limits import Bucket, BucketState, BucketStatus, Spend, bucket_status, spend
from keyvault.services.limits.stores import Payer, StoreReply, monotonic_us

LIFE_US = 100_000

SHARE = 20
"""A lease is one part of so many of what is left."""

_REMEMBERED_US = 1_000_000


class _Holding:
    """What this process knows of a bucket and holds of it; moments are in microseconds of this process's clock."""

    __slots__ = ("ends_us", "full_at", "is_leasing", "left", "seen_us", "size")

    def __init__(self) -> None:
        self.left = 0
        self.ends_us = 0
        self.size = 0  # what the last lease paid, the request that asked included
        self.is_leasing = False  # somebody has asked for the next one: until it comes, all others ask for their cost
        self.full_at = 0  # in units of 1/count microseconds, as in LocalStore
        self.seen_us = 0


@dataclass(frozen=True, slots=True)
class _Part:
    """Of an ask: `size` tokens are wanted from the store."""

    bucket: Bucket
    holding: _Holding
    size: int
    is_lease: bool


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """What the store is asked for: `costs` of `buckets`, all or none, for one request for `cost`."""

    request: Sequence[Bucket]
    cost: int
    parts: tuple[_Part, ...]
    paid: tuple[tuple[_Holding, int], ...]
    """The holdings that have paid for the request already, and the end of each lease that did."""
    sent_us: int

    @property
    def buckets(self) -> list[Bucket]:
        return [part.bucket for part in self.parts]

    @property
    def costs(self) -> list[int]:
        return [part.size for part in self.parts]


class Leases:
    """Of one process; `capacity` bounds the buckets it knows: the oldest are forgotten, and their tokens lost."""

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
        """As `LocalStore.payer`, from leases alone."""
        return partial(self._try_spend, buckets)

    def _try_spend(self, buckets: Sequence[Bucket], cost: int) -> tuple[int, ...] | None:
        if cost < 1:
            return None
        told: tuple[int, ...] = ()
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
                told += (remaining if remaining < count else count, reset_seconds if reset_seconds > 1 else 1)
            for holding in paid:
                holding.left -= cost
        return told

    def plan(self, buckets: Sequence[Bucket], cost: int) -> Spend | LeaseRequest:
        """Raises ValueError when some bucket can never hold that many tokens."""
        for bucket in buckets:
            bucket.limit.advance(cost)
        with self._lock:
            now_us = self._now_us()
            holdings = [self._holding(bucket.key) for bucket in buckets]
            lacking = [
                (bucket, holding)
                for bucket, holding in zip(buckets, holdings, strict=True)
                if holding.left < cost or now_us >= holding.ends_us
            ]
            if refusal := _refusal(lacking, cost, now_us):
                return self._told(buckets, now_us, refusal, [bucket for bucket, _ in lacking])
            owing = [holding for _, holding in lacking]
            paid = [holding for holding in holdings if holding not in owing]
            for holding in paid:
                holding.left -= cost
            if not lacking:
                return self._told(buckets, now_us)
            parts = tuple(_part(bucket, holding, cost, now_us) for bucket, holding in lacking)
            return LeaseRequest(buckets, cost, parts, tuple((holding, holding.ends_us) for holding in paid), now_us)

    def settle(self, ask: LeaseRequest, answer: StoreReply) -> Spend | LeaseRequest:
        with self._lock:
            now_us = self._now_us()
            is_paid = answer.spend.allowed
            for part, state in zip(ask.parts, answer.states, strict=True):
                # Counted from when it was sent, which was before the store looked at its clock.
                count, shifted_us = part.bucket.limit.count, state.micros - answer.now_us + ask.sent_us
                part.holding.full_at, part.holding.seen_us = shifted_us * count + state.fraction, ask.sent_us
                if is_paid and part.is_lease:
                    self._take(part, ask, now_us)
            if not is_paid and any(part.size > ask.cost for part in ask.parts):
                parts = tuple(_Part(part.bucket, part.holding, ask.cost, part.is_lease) for part in ask.parts)
                return LeaseRequest(ask.request, ask.cost, parts, ask.paid, now_us)
            self._let_go(ask)
            if is_paid:
                return self._told(ask.request, now_us)
            self._give_back(ask)
            return self._told(ask.request, now_us, answer.spend, ask.buckets)

    def abandon(self, ask: LeaseRequest) -> None:
        """Nobody knows what the store has done. What it may have paid is lost."""
        with self._lock:
            self._let_go(ask)
            self._give_back(ask)

    def _take(self, part: _Part, ask: LeaseRequest, now_us: int) -> None:
        """Of the lease before, only what this request itself uses up lives on: the rest is all new."""
        holding = part.holding
        before = min(holding.left, ask.cost - 1) if now_us < holding.ends_us else 0
        holding.left = before + part.size - ask.cost
        holding.ends_us = ask.sent_us + self._life_us
        holding.size = part.size

    @staticmethod
    def _let_go(ask: LeaseRequest) -> None:
        for part in ask.parts:
            if part.is_lease:
                part.holding.is_leasing = False

    @staticmethod
    def _give_back(ask: LeaseRequest) -> None:
        """To the same lease, if nobody has asked for the next one because this one was used up: else they are lost."""
        for holding, ends_us in ask.paid:
            if holding.ends_us == ends_us and not holding.is_leasing:
                holding.left += ask.cost

    def _told(
        self, request: Sequence[Bucket], now_us: int, refusal: Spend | None = None, asked: Sequence[Bucket] = ()
    ) -> Spend:
        """As the holdings are now; a refusal speaks for the buckets that were asked."""
        refused = {} if refusal is None else {one.key: told for one, told in zip(asked, refusal.statuses, strict=True)}
        standings = tuple(
            refused.get(bucket.key) or _standing(bucket, self._holding(bucket.key), now_us) for bucket in request
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
    if now_us - holding.seen_us < _REMEMBERED_US:
        used = holding.size - holding.left
        left_there = bucket_status(bucket, _state(bucket, holding), now_us).remaining
        size = min(2 * used if now_us < holding.ends_us else used, left_there // SHARE)
    return _Part(bucket, holding, max(cost, size), is_lease=True)


def _refusal(lacking: Sequence[tuple[Bucket, _Holding]], cost: int, now_us: int) -> Spend | None:
    """What the store would certainly say, where that is no."""
    if not lacking:
        return None
    states = [
        _state(bucket, holding) if now_us - holding.seen_us < _REMEMBERED_US else None for bucket, holding in lacking
    ]
    outcome, _ = spend(states, [bucket for bucket, _ in lacking], cost, now_us)
    return None if outcome.allowed else outcome


def _state(bucket: Bucket, holding: _Holding) -> BucketState:
    return BucketState(*divmod(holding.full_at, bucket.limit.count))


def _standing(bucket: Bucket, holding: _Holding, now_us: int) -> BucketStatus:
    """What is left there and here. The bucket is full again when it is so there."""
    there = bucket_status(bucket, _state(bucket, holding), now_us)
    here = holding.left if now_us < holding.ends_us else 0
    return BucketStatus(
        there.policy, there.limit, min(there.remaining + here, there.limit.count), max(there.reset_seconds, 1)
    )
