"""Rate limit budgets of the verifier, as configured: local buckets, or Redis buckets with leases or strict counting.

    spender(buckets)(cost)         spends without I/O, or returns None if it cannot decide; nothing is spent then
    spend, await spend_async       decide every request; raise DependencyUnavailableError as `Limiter.spend` does

Maximum number of tokens spent in any w seconds, where W = count + w * count / seconds:

- Local and strict: W. No request is refused while a token is left.
- Leased, with p processes: W + p * max(1, count // 20). A second bound, which does not count requests in flight, is
  W + count / seconds / 10: the last term is the refill during a lease's lifetime of 0.1 s.
- Leased and strict, while Redis is lost: p * W * KEYVAULT_LIMIT_FALLBACK_PERCENT / 100, as each process counts alone.

Leases that expire lose fewer tokens than leases spend, and none while fewer than 40 are left. Leased budgets therefore
admit at least half of what strict ones admit, and exactly as much for a limit below 40.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Protocol

from django.conf import settings

from keyvault.access.limits import Bucket, Spend
from keyvault.services.limits.limiter import Limiter, limiter
from keyvault.services.limits.stores import LimitStoreLostError, LocalStore, RedisStore, Spender, StoreReply
from keyvault.services.limits.token_leases import TokenLeaseRequest, TokenLeases


class LimitBudgets(Protocol):
    """Buckets that requests spend from. `is_local`: `spend` does no I/O, as `spender` never does."""

    is_local: bool

    def spender(self, buckets: Sequence[Bucket]) -> Spender: ...

    def spend(self, buckets: Sequence[Bucket], cost: int, *, refuse_on_loss: bool = False) -> Spend: ...

    async def spend_async(self, buckets: Sequence[Bucket], cost: int, *, refuse_on_loss: bool = False) -> Spend: ...

    async def close_async(self) -> None:
        """Close the connection of the running loop, before that loop ends."""


class LocalBudgets:
    """Budgets of this process, from the same buckets as its limiter."""

    is_local = True

    def __init__(self, limiter: Limiter, store: LocalStore) -> None:
        self.spender = store.spender
        self.spend = limiter.spend
        self.spend_async = limiter.spend_async
        self.close_async = limiter.close_async


class StrictBudgets:
    """Budgets that count each request in the shared store."""

    is_local = False

    def __init__(self, limiter: Limiter) -> None:
        self.spend = limiter.spend
        self.spend_async = limiter.spend_async
        self.close_async = limiter.close_async

    def spender(self, buckets: Sequence[Bucket]) -> Spender:
        """Return a function that always defers to the store."""
        return lambda cost: None


class LeasedBudgets:
    """Budgets from leases on the shared store's buckets, with the limiter's fallback while the store is lost."""

    is_local = False

    def __init__(self, limiter: Limiter, store: RedisStore, leases: TokenLeases | None = None) -> None:
        self._limiter = limiter
        self._store = store
        self._leases = leases or TokenLeases()
        self.spender = self._leases.spender
        self.close_async = limiter.close_async

    def spend(self, buckets: Sequence[Bucket], cost: int, *, refuse_on_loss: bool = False) -> Spend:
        step = self._leases.plan(buckets, cost)
        while isinstance(step, TokenLeaseRequest):
            answer: StoreReply | None = None
            try:
                with suppress(LimitStoreLostError), self._limiter.watch.guard():
                    answer = self._store.spend_each(step.buckets, step.costs)
            finally:
                if answer is None:
                    self._leases.abandon(step)
            if answer is None:
                return self._limiter.spend_share(buckets, cost, refuse_on_loss=refuse_on_loss)
            step = self._leases.settle(step, answer)
        return step

    async def spend_async(self, buckets: Sequence[Bucket], cost: int, *, refuse_on_loss: bool = False) -> Spend:
        step = self._leases.plan(buckets, cost)
        while isinstance(step, TokenLeaseRequest):
            answer: StoreReply | None = None
            try:
                with suppress(LimitStoreLostError), self._limiter.watch.guard():
                    answer = await self._store.spend_each_async(step.buckets, step.costs)
            finally:
                if answer is None:
                    self._leases.abandon(step)
            if answer is None:
                return self._limiter.spend_share(buckets, cost, refuse_on_loss=refuse_on_loss)
            step = self._leases.settle(step, answer)
        return step


def budgets() -> LimitBudgets:
    """Return the configured budgets on the buckets of `limiter()`; a new limiter gets new budgets."""
    return _budgets_of(limiter(), is_strict=settings.IS_STRICT_LIMITS)


@lru_cache(maxsize=1)
def _budgets_of(limiter: Limiter, *, is_strict: bool) -> LimitBudgets:
    if isinstance(limiter.store, LocalStore):
        return LocalBudgets(limiter, limiter.store)
    if isinstance(limiter.store, RedisStore) and not is_strict:
        return LeasedBudgets(limiter, limiter.store)
    return StrictBudgets(limiter)
