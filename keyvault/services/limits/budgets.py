"""What the verifier spends from, by its configuration: buckets of this process, or of Redis, leased or strictly.

    payer(buckets)(cost)               no I/O: (remaining, reset_seconds) of each bucket in turn when all pay, else None
    spend, await spend_soon            the whole answer, after a None; DependencyUnavailableError as `Limiter.spend`

How far each may be off, with W the limit's count + w * count / seconds, the most that w seconds may bring:

- In this process, and strict: never more than W, and a token that is left is never refused.
- Leased, whatever the number of processes p: never more than W + p * max(1, count // 20), nor than W and what the
  tenth of a second of a lease's life brings (count / seconds / 10, but for what was paid by requests under way).
  Tokens lost with leases that end unspent are fewer than those spent, and none are while fewer than 40 are left:
  at least half of what a strict bucket would admit passes, and of a limit below 40 exactly as much.
- While Redis is lost: what processes count for themselves, p * W * KEYVAULT_LIMIT_FALLBACK_PERCENT / 100.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Protocol

from django.conf import settings

from keyvault.access.limits import Bucket, Spend
from keyvault.services.limits.limiter import Limiter, limiter
from keyvault.services.limits.stores import LimitStoreLostError, LocalStore, Payer, RedisStore, StoreReply
from keyvault.services.limits.token_leases import LeaseRequest, Leases


class LimitBudgets(Protocol):
    """`is_local`: `spend` does no I/O either."""

    is_local: bool

    def payer(self, buckets: Sequence[Bucket]) -> Payer: ...

    def spend(self, buckets: Sequence[Bucket], cost: int, *, refuse_on_loss: bool = False) -> Spend: ...

    async def spend_async(self, buckets: Sequence[Bucket], cost: int, *, refuse_on_loss: bool = False) -> Spend: ...

    async def close_async(self) -> None:
        """Before the running loop ends: a connection is of one loop."""


class LocalBudgets:
    """In this process: the very buckets that its limiter spends from."""

    is_local = True

    def __init__(self, limiter: Limiter, store: LocalStore) -> None:
        self.payer = store.payer
        self.spend = limiter.spend
        self.spend_async = limiter.spend_async
        self.close_async = limiter.close_async


class StrictBudgets:
    """Each request is counted in the shared store."""

    is_local = False

    def __init__(self, limiter: Limiter) -> None:
        self.spend = limiter.spend
        self.spend_async = limiter.spend_async
        self.close_async = limiter.close_async

    def payer(self, buckets: Sequence[Bucket]) -> Payer:
        """Nothing is known here."""
        return lambda cost: None


class LeasedBudgets:
    """From leases of the shared store's buckets; while that is lost, what the limiter puts in its place."""

    is_local = False

    def __init__(self, limiter: Limiter, store: RedisStore, leases: Leases | None = None) -> None:
        self._limiter = limiter
        self._store = store
        self._leases = leases or Leases()
        self.payer = self._leases.payer
        self.close_async = limiter.close_async

    def spend(self, buckets: Sequence[Bucket], cost: int, *, refuse_on_loss: bool = False) -> Spend:
        step = self._leases.plan(buckets, cost)
        while isinstance(step, LeaseRequest):
            answer: StoreReply | None = None
            try:
                with suppress(LimitStoreLostError), self._limiter.watch.asking():
                    answer = self._store.ask(step.buckets, step.costs)
            finally:
                if answer is None:
                    self._leases.abandon(step)
            if answer is None:
                return self._limiter.spend_share(buckets, cost, refuse_on_loss=refuse_on_loss)
            step = self._leases.settle(step, answer)
        return step

    async def spend_async(self, buckets: Sequence[Bucket], cost: int, *, refuse_on_loss: bool = False) -> Spend:
        step = self._leases.plan(buckets, cost)
        while isinstance(step, LeaseRequest):
            answer: StoreReply | None = None
            try:
                with suppress(LimitStoreLostError), self._limiter.watch.asking():
                    answer = await self._store.ask_async(step.buckets, step.costs)
            finally:
                if answer is None:
                    self._leases.abandon(step)
            if answer is None:
                return self._limiter.spend_share(buckets, cost, refuse_on_loss=refuse_on_loss)
            step = self._leases.settle(step, answer)
        return step


def budgets() -> LimitBudgets:
    """As configured. Spends from what `limiter()` spends from, and is made anew when that is."""
    return _budgets_of(limiter(), is_strict=settings.IS_STRICT_LIMITS)


@lru_cache(maxsize=1)
def _budgets_of(limiter: Limiter, *, is_strict: bool) -> LimitBudgets:
    if isinstance(limiter.store, LocalStore):
        return LocalBudgets(limiter, limiter.store)
    if isinstance(limiter.store, RedisStore) and not is_strict:
        return LeasedBudgets(limiter, limiter.store)
    return StrictBudgets(limiter)
