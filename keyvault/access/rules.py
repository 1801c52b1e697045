"""Authorization rules as data: the requirements of an operation or an endpoint."""

from dataclasses import dataclass

from keyvault.access.catalog import Endpoint, NoMatchingEndpoint
from keyvault.access.customers import Customer, CustomerFault
from keyvault.access.permissions import Permission
from keyvault.access.scopes import EVERYWHERE, AccessScope
from keyvault.domain.environments import Environment


@dataclass(frozen=True, slots=True)
class OperationRule:
    """An operation on the service's own data.

    `second_person`: the requester may not perform it. `is_personal`: it concerns the principal alone, so every scope
    allows it.
    """

    permission: Permission
    second_person: bool = False
    is_personal: bool = False


@dataclass(frozen=True, slots=True)
class EndpointRule:
    """A request for a cataloged endpoint, or one that matches none."""

    endpoint: Endpoint | NoMatchingEndpoint


Rule = OperationRule | EndpointRule

_FOUR_EYES = frozenset(
    {Permission.ISSUANCE_APPROVE, Permission.ROTATIONS_APPROVE, Permission.BREAK_GLASS_REVIEW}
    | {Permission.OPERATORS_APPROVE}
)
_PERSONAL = frozenset({Permission.SESSIONS_WRITE})


def operation(permission: Permission) -> OperationRule:
    """Return the rule of an operation."""
    return OperationRule(permission, second_person=permission in _FOUR_EYES, is_personal=permission in _PERSONAL)


@dataclass(frozen=True, slots=True)
class Target:
    """The object of an operation. A field is None where the operation has no particular one.

    `within`: the accounts that the object concerns if it belongs to no single one, such as the merchants of a campaign.
    `requester_person`: the person who requested what is now approved or reviewed; None: only the permission is checked.
    The service that writes the approval compares the persons again, and so does the database.
    """

    environment: Environment | None = None
    merchant_id: str | None = None
    requester_person: str | None = None
    within: AccessScope = EVERYWHERE

    @property
    def scope(self) -> AccessScope:
        """The accounts that the object concerns: its own, or those of `within`."""
        return AccessScope(
            self.within.merchants if self.merchant_id is None else frozenset({self.merchant_id}),
            self.within.environments if self.environment is None else frozenset({self.environment}),
        )


PLATFORM = Target()
"""Target of an operation that belongs to no account: it concerns the whole installation."""


@dataclass(frozen=True, slots=True)
class EndpointRequest:
    """Facts of a request besides its key and endpoint. Their values are untrusted; their presence is certain.

    `customer` is the verdict on the Bearer: None if the request has none or the endpoint does not accept one.
    """

    named_merchant: str | None = None
    has_bearer: bool = False
    has_origin: bool = False
    client_address: str | None = None
    merchant_context: str | None = None
    store_context: str | None = None
    customer: Customer | CustomerFault | None = None
