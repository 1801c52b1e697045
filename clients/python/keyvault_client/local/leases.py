"""Tokens of rate limits that were spent at the service in a batch, and are used here one by one."""

from dataclasses import dataclass

LEASE_SECONDS = 1.0
"""Time after which unused tokens are dropped. The limits have refilled by then."""

_SHARE = 10
"""A batch has at most this part of the smallest burst, so that other processes find tokens."""

LeaseKey = tuple[str, str]
"""Merchant id and endpoint."""


@dataclass(slots=True)
class _Lease:
    tokens: int = 0
    until: float = 0.0
    batch: int = 0


class Leases:
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
        """Return how many tokens to ask for: twice the batch before if that was used up in time, else one."""
        lease = self._leases.setdefault(key, _Lease())
        was_used_up = lease.tokens < 1 and now < lease.until
        lease.batch = min(max(lease.batch, 1) * 2, max(smallest_count // _SHARE, 1)) if was_used_up else 1
        return lease.batch

    def add(self, key: LeaseKey, tokens: int, now: float) -> None:
        """Add the tokens of a batch. What was left of an earlier one is dropped with the time."""
        lease = self._leases.setdefault(key, _Lease())
        lease.tokens = tokens + (lease.tokens if now < lease.until else 0)
        lease.until = now + LEASE_SECONDS

    def clear(self) -> None:
        self._leases.clear()
