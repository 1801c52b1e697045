"""Keys: kinds, states, and the table of state transitions.

States have the names of NIST SP 800-57 Part 1 Rev. 5, section 7. NIST lets suspended and deactivated keys process
old data. This table is stricter, because an API key only authenticates: only `active` verifies, and only
`suspended` returns to `active`.
"""

from datetime import datetime
from enum import StrEnum

from msgspec import Struct

from keyvault.domain.environments import Environment
from keyvault.domain.networks import IPNetwork


class KeyKind(StrEnum):
    """The two API credentials of the domain; not the halves of an asymmetric pair."""

    PUBLIC = "public"
    PRIVATE = "private"


class KeyState(StrEnum):
    PRE_ACTIVATION = "pre_activation"
    ACTIVE = "active"
    SUSPENDED = "suspended"
    DEACTIVATED = "deactivated"
    COMPROMISED = "compromised"
    DESTROYED = "destroyed"


class RetirementReason(StrEnum):
    """Why a key was deactivated; the error code depends on it."""

    EXPIRED = "expired"
    REVOKED = "revoked"


TRANSITIONS: dict[KeyState, frozenset[KeyState]] = {
    KeyState.PRE_ACTIVATION: frozenset({KeyState.ACTIVE, KeyState.COMPROMISED, KeyState.DESTROYED}),
    KeyState.ACTIVE: frozenset({KeyState.SUSPENDED, KeyState.DEACTIVATED, KeyState.COMPROMISED}),
    KeyState.SUSPENDED: frozenset({KeyState.ACTIVE, KeyState.DEACTIVATED, KeyState.COMPROMISED}),
    KeyState.DEACTIVATED: frozenset({KeyState.COMPROMISED, KeyState.DESTROYED}),
    KeyState.COMPROMISED: frozenset({KeyState.DESTROYED}),
    KeyState.DESTROYED: frozenset(),
}

DEAD_STATES = frozenset({KeyState.DEACTIVATED, KeyState.COMPROMISED, KeyState.DESTROYED})
"""States in which a key never verifies again. It may still move from one of them to another."""


def can_transition(current: KeyState, new: KeyState) -> bool:
    return new in TRANSITIONS[current]


class KeyRecord(Struct, frozen=True, gc=False):
    """The immutable view of a stored key that a verdict needs: a digest, never plaintext.

    A msgspec Struct, because the request path creates one per key read. `limit_…` is the account's own limit; None: the
    default of the environment.
    """

    key_id: str
    credential_id: str
    kind: KeyKind
    environment: Environment
    merchant_id: str
    digest: bytes
    pepper_version: int
    state: KeyState
    retirement: RetirementReason | None
    expires_at: datetime | None
    merchant_active: bool
    account_active: bool
    reports_origin: bool = False
    networks: tuple[IPNetwork, ...] = ()
    account_id: int = 0
    limit_count: int | None = None
    limit_seconds: int | None = None
    account_version: int = 0

    def is_expired(self, now: datetime) -> bool:
        """Return whether the key has expired by the clock, independent of the expiry job."""
        return self.expires_at is not None and now >= self.expires_at

    def may_verify(self, now: datetime) -> bool:
        return self.state is KeyState.ACTIVE and not self.is_expired(now)
