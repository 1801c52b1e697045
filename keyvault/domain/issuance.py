"""Issuance requests under four eyes: states, transitions, and the approval policy of each environment.

pending → approved → issued → collected        side: rejected · expired · withdrawn · burned (never collected)
"""

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

from keyvault.domain.canonical import JsonValue, canonical_digest
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind


class IssuanceState(StrEnum):
    PENDING = "pending"
    APPROVED = "approved"
    ISSUED = "issued"
    COLLECTED = "collected"
    REJECTED = "rejected"
    EXPIRED = "expired"
    WITHDRAWN = "withdrawn"
    BURNED = "burned"


TRANSITIONS: dict[IssuanceState, frozenset[IssuanceState]] = {
    IssuanceState.PENDING: frozenset(
        {
            IssuanceState.APPROVED,
            IssuanceState.REJECTED,
            IssuanceState.EXPIRED,
            IssuanceState.WITHDRAWN,
        }
    ),
    IssuanceState.APPROVED: frozenset({IssuanceState.ISSUED, IssuanceState.WITHDRAWN}),
    IssuanceState.ISSUED: frozenset({IssuanceState.COLLECTED, IssuanceState.BURNED}),
    IssuanceState.COLLECTED: frozenset(),
    IssuanceState.REJECTED: frozenset(),
    IssuanceState.EXPIRED: frozenset(),
    IssuanceState.WITHDRAWN: frozenset(),
    IssuanceState.BURNED: frozenset(),
}

APPROVALS_NEEDED = {Environment.SANDBOX: 0, Environment.PRODUCTION: 1}
"""Minimum number of approvals of a request. The setting of the same name can only raise it."""

REQUEST_LIFETIME = timedelta(days=7)

MAX_EXPIRES_IN_DAYS = 3_650
"""Maximum lifetime of a new key, in days."""

COLLECT_WITHIN = timedelta(hours=72)
"""Time to collect a show-once or sealed private key. A key neither collected nor used by then is discarded."""


class Delivery(StrEnum):
    """The way a key reaches the merchant. Sealed: encrypted to a recipient's public key, which is approved too."""

    SECRET_BACKEND = "secret_backend"  # noqa: S105  the name of a delivery
    SHOW_ONCE = "show_once"
    SEALED = "sealed"


COLLECTED_DELIVERIES = frozenset({Delivery.SHOW_ONCE, Delivery.SEALED})
"""Deliveries that must be collected. Collection deletes the stored copy; a missed deadline discards the key."""


def can_transition_issuance(current: IssuanceState, new: IssuanceState) -> bool:
    return new in TRANSITIONS[current]


@dataclass(frozen=True, slots=True)
class IssuancePlan:
    """The content of an issuance request. An approval is bound to its digest: changing a field voids the approval."""

    merchant_id: str
    environment: Environment
    kind: KeyKind
    label: str
    delivery: Delivery
    expires_in_days: int | None
    recipient_public_key: str = ""

    def digest(self) -> str:
        plan: dict[str, JsonValue] = {
            "what": "issuance",
            "merchant_id": self.merchant_id,
            "environment": self.environment.value,
            "kind": self.kind.value,
            "label": self.label,
            "delivery": self.delivery.value,
            "expires_in_days": self.expires_in_days,
        }
        if self.recipient_public_key:
            plan["recipient_public_key"] = self.recipient_public_key
        return canonical_digest(plan)
