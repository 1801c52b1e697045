"""The rate limiters of this process: for accounts and endpoints, and for failed proofs by client address.

`access.limits` has the arithmetic, `limits.stores` the storage. This module decides what happens when the store is
lost: a request spends a share of each limit from local buckets, or is refused if its endpoint is configured so.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from ipaddress import IPv6Address, IPv6Network, ip_address

from django.conf import settings

from keyvault.access.limits import FAILED_PROOF_LIMIT, REPEAT_LIMIT, Bucket, Limit, RateLimitedError, Spend, fallback
from keyvault.backends import meters
from keyvault.domain.errors import DependencyUnavailableError
from keyvault.domain.keys import KeyKind
from keyvault.services.limits.stores import LimitStore, LimitStoreLostError, LocalStore, PipelinedStore, RedisStore

_log = logging.getLogger(__name__)

RETRY_SECONDS = 1
"""Pause between attempts to reach a lost store, in seconds, so that not every request waits for its timeout."""

_PROBE = Bucket("probe", "kv:limit:{probe}", Limit(1, 1))
"""Bucket for attempts to reach a lost store. Requests never spend from it."""

_MAX_ADDRESSES = 50_000
"""Maximum client addresses kept in memory."""

_MAX_SLOW_LOOKUPS = 2
"""Maximum concurrent key lookups for addresses over their limit, all of them together."""


class StoreWatch:
    """Circuit breaker of the shared store: whether it is lost, and when to try it again."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._retry_at: float | None = None  # None: the store is available

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Wrap a call to the store, and log when the store is lost or back.

        Raises LimitStoreLostError before the call while a lost store is not due for another attempt.
        """
        if not self._may_try():
            raise LimitStoreLostError("not due for another attempt")
        try:
            yield
        except LimitStoreLostError as error:
            self._note_lost(error)
            raise
        self._note_recovered()

    @property
    def is_lost(self) -> bool:
        return self._retry_at is not None

    def _may_try(self) -> bool:
        """Whether the store is available, or this request is the one that tries it again."""
        if self._retry_at is None:
            return True
        with self._lock:
            if self._retry_at is None:
                return True
            now = self._monotonic()
            if now < self._retry_at:
                return False
            self._retry_at = now + RETRY_SECONDS
            return True

    def _note_lost(self, error: LimitStoreLostError) -> None:
        with self._lock:
            has_changed = self._retry_at is None
            self._retry_at = self._monotonic() + RETRY_SECONDS
        if has_changed:
            meters.note_limit_store(is_lost=True)
            _log.warning("limit store lost", extra={"why": str(error)})

    def _note_recovered(self) -> None:
        if self._retry_at is None:
            return
        with self._lock:
            has_changed = self._retry_at is not None
            self._retry_at = None
        if has_changed:
            meters.note_limit_store(is_lost=False)
            _log.warning("limit store back")


class Limiter:
    """Spends from the store; while it is lost, from `fallback_store` with `fallback_percent` of each limit.

    Limiters of one store share a circuit breaker, so that a lost store delays one request a second in total.
    """

    def __init__(
        self,
        store: LimitStore,
        fallback_store: LocalStore | None,
        fallback_percent: int,
        monotonic: Callable[[], float] = time.monotonic,
        watch: StoreWatch | None = None,
    ) -> None:
        self.store = store
        self.watch = watch or StoreWatch(monotonic)
        self._fallback_store = fallback_store
        self._fallback_percent = fallback_percent

    def spend(self, buckets: Sequence[Bucket], cost: int, *, refuse_on_loss: bool = False) -> Spend:
        """Spend from all buckets or none. Raises DependencyUnavailableError when the store is lost without fallback."""
        with suppress(LimitStoreLostError), self.watch.guard():
            return self.store.spend(buckets, cost)
        return self.spend_share(buckets, cost, refuse_on_loss=refuse_on_loss)

    async def spend_async(self, buckets: Sequence[Bucket], cost: int, *, refuse_on_loss: bool = False) -> Spend:
        """Spend without blocking the event loop, where the store supports it. Raises as `spend`."""
        if not isinstance(self.store, PipelinedStore):
            return self.spend(buckets, cost, refuse_on_loss=refuse_on_loss)
        with suppress(LimitStoreLostError), self.watch.guard():
            return await self.store.spend_async(buckets, cost)
        return self.spend_share(buckets, cost, refuse_on_loss=refuse_on_loss)

    def retry_lost(self) -> None:
        """Try a lost store again: a process without requests would report it as lost forever. Never raises."""
        if self.watch.is_lost:
            with suppress(LimitStoreLostError), self.watch.guard():
                self.store.spend([_PROBE], 1)

    async def close_async(self) -> None:
        """Close the store's connection of the running loop, before that loop ends."""
        if isinstance(self.store, PipelinedStore):
            await self.store.close_async()

    def spend_share(self, buckets: Sequence[Bucket], cost: int, *, refuse_on_loss: bool) -> Spend:
        """Spend from the fallback store while the store is lost.

        A cost above the reduced burst is capped to it; otherwise such a request could never pass. Raises
        DependencyUnavailableError for `refuse_on_loss`, and without a fallback store.
        """
        if refuse_on_loss or self._fallback_store is None:
            raise DependencyUnavailableError(
                "The limits of this endpoint cannot be checked right now.",
                internal="limit store lost",
                retry_after_seconds=RETRY_SECONDS,
            )
        shares = [
            Bucket(bucket.policy, bucket.key, fallback(bucket.limit, self._fallback_percent)) for bucket in buckets
        ]
        return self._fallback_store.spend(shares, min(cost, *(share.limit.count for share in shares)))


class FailedProofs:
    """Limits failed proofs by client address. Without an address there is no limit; a valid key always passes."""

    def __init__(
        self, limiter: Limiter, monotonic: Callable[[], float] = time.monotonic, own: Limiter | None = None
    ) -> None:
        self._limiter = limiter
        self._own = own or limiter
        self._monotonic = monotonic
        self._over_until: dict[str, float] = {}
        self._lock = threading.Lock()
        self._slow_lookups = threading.BoundedSemaphore(_MAX_SLOW_LOOKUPS)

    def note(self, address: str | None) -> int | None:
        """Count a failure; return the retry delay in seconds if the address is over its limit, else None."""
        return self._count(self._limiter, address)

    def note_here(self, address: str | None) -> int | None:
        """Count a failure in this process only, without I/O, for an event loop.

        An address therefore has one full limit in each such process, and one more that all other processes share.
        """
        return self._count(self._own, address)

    def _count(self, limiter: Limiter, address: str | None) -> int | None:
        source = source_of(address)
        if source is None:
            return None
        limit = FAILED_PROOF_LIMIT
        spend = limiter.spend([Bucket("proof", f"kv:limit:{{proof:{source}}}:{limit}", limit)], 1)
        if spend.allowed:
            return None
        self._remember(source, self._monotonic() + spend.retry_after_seconds)
        return spend.retry_after_seconds

    @contextmanager
    def look_up(self, address: str | None) -> Iterator[None]:
        """Wrap a key lookup. Lookups for addresses over their limit share a few slots; others never wait."""
        if self.is_over(address):
            with self._slow_lookups:
                yield
        else:
            yield

    def is_over(self, address: str | None) -> bool:
        """Whether this address is over its limit of failed proofs."""
        source = source_of(address) if self._over_until else None
        return source is not None and self._over_until.get(source, 0) > self._monotonic()

    def _remember(self, source: str, until: float) -> None:
        with self._lock:
            self._over_until.pop(source, None)
            self._over_until[source] = until
            if len(self._over_until) > _MAX_ADDRESSES:
                del self._over_until[next(iter(self._over_until))]


def account_buckets(
    account_id: int,
    kind: KeyKind,
    account_limit: Limit,
    endpoint_name: str,
    endpoint_limit: Limit | None,
    *,
    account_setting: str = "",
    endpoint_setting: str = "",
) -> tuple[Bucket, ...]:
    """Return the buckets of a request: the account's, and the endpoint's if it has a limit.

    Both keys of a rotation share the account's bucket. Public and private keys have separate buckets, so that shoppers
    cannot exhaust the limit of the merchant's backend. The bucket's key includes the limit and its origin (`…_setting`:
    a row and its version), so that a changed limit starts full, even when it is changed back.
    """
    prefix = f"kv:limit:{{{account_id}}}:{kind}"
    account = Bucket("account", f"{prefix}:account:{account_setting}:{account_limit}", account_limit)
    if endpoint_limit is None:
        return (account,)
    key = f"{prefix}:endpoint:{endpoint_name}:{endpoint_setting}:{endpoint_limit}"
    return (account, Bucket("endpoint", key, endpoint_limit))


def spend_repeat(key_id: str, name: str = "repeat") -> None:
    """Count one operation against the limit of the key: a repeated revocation, or one that adds permanent rows.

    `name`: of the bucket. Each kind of operation has its own; "repeat" is that of the key's own revocation. Raises
    RateLimitedError.
    """
    bucket = Bucket(name, f"kv:limit:{{{name}:{key_id}}}:{REPEAT_LIMIT}", REPEAT_LIMIT)
    spend = limiter().spend([bucket], 1)
    if not spend.allowed:
        raise RateLimitedError(spend)


@cache
def limiter() -> Limiter:
    """Return the limiter of accounts and endpoints. Raises ValueError for an invalid Redis URL."""
    percent = settings.LIMIT_FALLBACK_PERCENT
    if not settings.REDIS_URL:
        return Limiter(LocalStore(), None, percent)
    return Limiter(RedisStore(settings.REDIS_URL), LocalStore(), percent)


@cache
def failed_proofs() -> FailedProofs:
    """Return the limiter of failed proofs. Its own local store keeps a flood of addresses from evicting accounts."""
    local = LocalStore(capacity=_MAX_ADDRESSES)
    own = Limiter(local, None, fallback_percent=100)
    if not settings.REDIS_URL:
        return FailedProofs(own)
    shared = limiter()
    return FailedProofs(Limiter(shared.store, local, fallback_percent=100, watch=shared.watch), own=own)


def source_of(address: str | None) -> str | None:
    """Return the source that an address is counted under; None for an invalid address.

    The source is the /64 network of an IPv6 address, and the address itself for IPv4 and IPv4-mapped IPv6.
    """
    try:
        parsed = ip_address(address or "")
    except ValueError:
        return None
    if not isinstance(parsed, IPv6Address):
        return str(parsed)
    return str(parsed.ipv4_mapped or IPv6Network((int(parsed), 64), strict=False))
