"""Orders: their account, valid fields, and immutability."""

import pytest

from keyvault.access.customers import Customer
from keyvault.access.permissions import Permission as P
from keyvault.domain.errors import NotFoundError, PermissionMissingError, RequestInvalidError
from keyvault.domain.keys import KeyKind
from keyvault.models import Account, Order
from keyvault.services.merchants.orders import MAX_AMOUNT_MINOR, create_order, find_order
from tests.factories import PRODUCTION, SANDBOX, grant, issue, make_merchant, now
from tests.services.conftest import Scene
from tests.services.rows import last_body, last_ids, written_since
from tests.services.tokens.test_customer_tokens import holder_of

pytestmark = pytest.mark.django_db


def make_order(place: Account, customer_id: str | None = None, amount_minor: int = 1) -> Order:
    """Create an order with a private key of the account."""
    key, _ = issue(place)
    allowed = grant(holder_of(key), P.ORDERS_CREATE, place)
    return create_order(allowed, place, amount_minor=amount_minor, currency="EUR", customer_id=customer_id)


@pytest.mark.database
def test_order_created_writes_one_row_and_one_audit_entry(scene: Scene) -> None:
    key, _ = issue(scene.sandbox)
    before = last_ids()
    order = create_order(
        grant(holder_of(key), P.ORDERS_CREATE, scene.sandbox),
        scene.sandbox,
        amount_minor=MAX_AMOUNT_MINOR,
        currency="EUR",
        customer_id="cust-1",
    )
    assert Order.objects.get() == order
    assert written_since(before) == (["order.created"], [])
    body = last_body("order.created")
    assert body["actor"] == f"key:{key.key_id}"
    assert body["details"] == {
        "order_token": order.order_token,
        "amount_minor": MAX_AMOUNT_MINOR,
        "currency": "EUR",
        "customer_id": "cust-1",
    }


@pytest.mark.parametrize(
    ("amount_minor", "currency", "customer_id", "pointers"),
    [
        (0, "EUR", None, ["/amount_minor"]),
        (MAX_AMOUNT_MINOR + 1, "EUR", None, ["/amount_minor"]),
        (1, "eur", None, ["/currency"]),
        (1, "EUR\n", None, ["/currency"]),
        (1, "EUR", "", ["/customer_id"]),
        (1, "EUR", "cust\n", ["/customer_id"]),
        (0, "", "a b", ["/amount_minor", "/currency", "/customer_id"]),
    ],
)
def test_order_that_is_invalid_reports_every_fault(
    scene: Scene, amount_minor: int, currency: str, customer_id: str | None, pointers: list[str]
) -> None:
    key, _ = issue(scene.sandbox)
    allowed = grant(holder_of(key), P.ORDERS_CREATE, scene.sandbox)
    with pytest.raises(RequestInvalidError) as refused:
        create_order(allowed, scene.sandbox, amount_minor=amount_minor, currency=currency, customer_id=customer_id)
    assert [fault.pointer for fault in refused.value.faults] == pointers
    assert not Order.objects.exists()


def test_order_created_without_a_private_key_of_the_account_is_refused(scene: Scene) -> None:
    """A public key cannot write, and a private key writes in its own account only."""
    public, _ = issue(scene.sandbox, kind=KeyKind.PUBLIC)
    private, _ = issue(scene.sandbox)
    with pytest.raises(PermissionMissingError):
        grant(holder_of(public), P.ORDERS_CREATE, scene.sandbox)
    with pytest.raises(PermissionMissingError):
        grant(holder_of(private), P.ORDERS_CREATE, scene.production)
    allowed = grant(holder_of(private), P.ORDERS_CREATE, scene.sandbox)
    with pytest.raises(PermissionMissingError):
        create_order(allowed, scene.production, amount_minor=1, currency="EUR")


def test_order_of_another_account_is_not_found(scene: Scene) -> None:
    make_merchant("globex")
    order = make_order(scene.sandbox)
    assert find_order("acme", SANDBOX, order.order_token) == order
    for merchant_id, environment in (("acme", PRODUCTION), ("globex", SANDBOX)):
        with pytest.raises(NotFoundError):
            find_order(merchant_id, environment, order.order_token)


@pytest.mark.parametrize(("customer_id", "is_found"), [("alice", True), ("bob", False), (None, True)])
def test_order_of_another_customer_is_not_found(scene: Scene, customer_id: str | None, is_found: bool) -> None:
    """A signed-in customer finds their own orders and those without a customer."""
    order = make_order(scene.sandbox, customer_id)
    alice = Customer("alice", "0" * 16, now())
    if is_found:
        assert find_order("acme", SANDBOX, order.order_token, alice) == order
    else:
        with pytest.raises(NotFoundError):
            find_order("acme", SANDBOX, order.order_token, alice)
