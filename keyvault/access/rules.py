"""Rules as data: what an operation or an endpoint asks of whoever wants it."""

from dataclasses import dataclass

from keyvault.access.catalog import Endpoint, NoMatchingEndpoint
from keyvault.access.customers import Customer, CustomerFault
from keyvault.access.permissions import Permission
from keyvault.domain.environments import Environment


@dataclass(frozen=True, slots=True)
class OperationRule:
    """An act on our own data. `second_person`: never by the person who asked for it."""

    permission: Permission
    second_person: bool = False


@dataclass(frozen=True, slots=True)
class EndpointRule:
    """A request for a cataloged endpoint, or for something that is none."""

    endpoint: Endpoint | NoMatchingEndpoint


Rule = OperationRule | EndpointRule

_FOUR_EYES = frozenset({Permission.ISSUANCE_APPROVE, Permission.ROTATIONS_APPROVE, Permission.BREAK_GLASS_REVIEW})


def operation(permission: Permission) -> OperationRule:
    """The rule of an operation: its permission, and whether it takes a second person."""
    return OperationRule(permission, second_person=permission in _FOUR_EYES)


@dataclass(frozen=True, slots=True)
class Target:
    """What an operation is about. None: the operation is about no particular one.

    `requester_person` is who asked for what is now to be approved or reviewed; None asks whether they may approve
    at all. Whoever writes the approval compares the persons again, and so does the database.
    """

    environment: Environment | None = None
    merchant_id: str | None = None
    requester_person: str | None = None


PLATFORM = Target()
"""The target of what belongs to no account."""


@dataclass(frozen=True, slots=True)
class EndpointRequest:
    """The rest of a request for an endpoint, as the door saw it; untrusted but for its presence.

    `customer` is what became of the Bearer, judged beforehand: None when there was none or the endpoint takes none.
    """

    named_merchant: str | None = None
    has_bearer: bool = False
    has_origin: bool = False
    client_address: str | None = None
    merchant_context: str | None = None
    store_context: str | None = None
    customer: Customer | CustomerFault | None = None
