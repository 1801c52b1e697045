"""Asking for a credential under four eyes: states, the policy of an environment, who may approve.

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

APPROVED_STATES = frozenset({IssuanceState.APPROVED, IssuanceState.ISSUED, IssuanceState.COLLECTED})
"""States that only enough approvals lead to."""

APPROVALS_NEEDED = {Environment.SANDBOX: 0, Environment.PRODUCTION: 1}
"""The default policy, and the least that an environment's row may be set to."""

REQUEST_LIFETIME = timedelta(days=7)

COLLECT_WITHIN = timedelta(hours=72)
"""A private key that was to be shown once, or sealed, is burned if it was neither collected nor used by then."""


class Delivery(StrEnum):
    """How the new key reaches the merchant. Sealed: encrypted to the recipient's public key, which is approved too."""

    SECRET_BACKEND = "secret_backend"  # noqa: S105  the name of a way
    SHOW_ONCE = "show_once"
    SEALED = "sealed"


HANDED_OVER = frozenset({Delivery.SHOW_ONCE, Delivery.SEALED})
"""Ways that end with the collection: our copy goes then, and the key itself if nobody comes in time."""


def can_transition_issuance(current: IssuanceState, new: IssuanceState) -> bool:
    return new in TRANSITIONS[current]


@dataclass(frozen=True, slots=True)
class IssuancePlan:
    """Exactly what is asked for. An approval is bound to its digest: change a field and it is void."""

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
