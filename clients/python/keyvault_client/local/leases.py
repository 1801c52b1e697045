"""Rate-limit tokens: the service spends them in batches, and this process uses them one by one."""

from dataclasses import dataclass

LEASE_SECONDS = 1.0
"""Time after which unused tokens are dropped. The limits have refilled by then."""

_SHARE = 10
"""A batch has at most a tenth of the smallest burst, so that other processes find tokens."""

LeaseKey = tuple[str, str]
"""Merchant id and endpoint."""


@dataclass(slots=True)
class _Lease:
    tokens: int = 0
    until: float = 0.0
    batch: int = 0


class LocalLeases:
    """The caller holds a lock around each method. `now`: a monotonic time, in seconds."""

    def __init__(self) -> None:
        self._leases: dict[LeaseKey, _Lease] = {}

    def take(self, key: LeaseKey, now: float) -> bool:
        """Use one token. Returns False without one."""
        lease = self._leases.get(key)
        if lease is None or lease.tokens < 1 or now >= lease.until:
            return False
        lease.tokens -= 1
        return True

    def next_batch(self, key: LeaseKey, smallest_count: int, now: float) -> int:
        """Return how many tokens to ask for: twice the previous batch if that was used up in time, else one."""
        lease = self._leases.setdefault(key, _Lease())
        was_used_up = lease.tokens < 1 and now < lease.until
        lease.batch = min(max(lease.batch, 1) * 2, max(smallest_count // _SHARE, 1)) if was_used_up else 1
        return lease.batch

    def add(self, key: LeaseKey, tokens: int, now: float) -> None:
        """Add the tokens of a batch. Tokens of an earlier batch stay until they expire."""
        lease = self._leases.setdefault(key, _Lease())
        lease.tokens = tokens + (lease.tokens if now < lease.until else 0)
        lease.until = now + LEASE_SECONDS

    def clear(self) -> None:
        self._leases.clear()
