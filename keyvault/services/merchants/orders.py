"""Orders: a merchant's private keys create and read them, each in its own environment."""

import secrets

from keyvault.access.customers import Customer, find_customer_id_fault
from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.domain.currencies import CURRENCIES
from keyvault.domain.environments import Environment
from keyvault.domain.errors import Fault, NotFoundError, RequestInvalidError
from keyvault.domain.ids import mint_id
from keyvault.models import Account, Order
from keyvault.services.recording.transaction import recorded

MAX_AMOUNT_MINOR = 999_999_999_999
"""Maximum order amount, in the currency's minor unit."""

CURRENCY_RULE = "a current ISO 4217 code of a currency with a minor unit, such as EUR"


def create_order(
    grant: Grant, account: Account, *, amount_minor: int, currency: str, customer_id: str | None = None
) -> Order:
    """Create an order. Raises RequestInvalidError with faults."""
    faults = []
    if not 1 <= amount_minor <= MAX_AMOUNT_MINOR:
        faults.append(Fault("/amount_minor", f"1 to {MAX_AMOUNT_MINOR}"))
    if currency not in CURRENCIES:
        faults.append(Fault("/currency", CURRENCY_RULE))
    if customer_id is not None and (fault := find_customer_id_fault(customer_id)) is not None:
        faults.append(Fault("/customer_id", fault))
    if faults:
        raise RequestInvalidError("The order is invalid.", faults)
    order = Order(
        order_token=mint_id("ord", secrets.token_bytes),
        account=account,
        amount_minor=amount_minor,
        currency=currency,
        customer_id=customer_id,
        created_at=grant.at,
    )
    with recorded(
        grant,
        Permission.ORDERS_CREATE,
        "order.created",
        account=account,
        order_token=order.order_token,
        amount_minor=amount_minor,
        currency=currency,
        customer_id=customer_id,
    ):
        order.save()
    return order


def find_order(merchant_id: str, environment: Environment, order_token: str, customer: Customer | None = None) -> Order:
    """Return the merchant's order, hiding other customers' orders from a customer. Raises NotFoundError."""
    own = Order.objects.filter(account__merchant=merchant_id, account__environment=environment)
    order: Order | None = own.filter(order_token=order_token).first()
    is_foreign = (
        order is not None
        and customer is not None
        and order.customer_id is not None
        and order.customer_id != customer.customer_id
    )
    if order is None or is_foreign:
        raise NotFoundError
    return order
