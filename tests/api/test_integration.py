"""The integration plane: orders, the client configuration, and behavior common to every endpoint."""

import re
from datetime import datetime, timedelta

import pytest
from django.test import Client

from keyvault.access.roles import Role
from keyvault.domain.plaintext import Plaintext
from keyvault.models import AuditEntry, Operator, Order
from tests.domain.minting import mint
from tests.factories import PRODUCTION, SANDBOX, account, issue, make_operator

from .integration import ORDER, ORDERS, Ask, change_account, expect, issue_token, pointers, private, public

pytestmark = pytest.mark.django_db

# ------------------------------------------------------------------------------------------------------ orders


@pytest.mark.parametrize("customer_id", ["cust-1", None, "a" * 128, "x.y~z!$&'()*+,=:@-_"])
def test_order_created_is_answered_and_read_back(ask: Ask, customer_id: str | None) -> None:
    key = private()
    created = ask("POST", ORDERS, {**ORDER, "customer_id": customer_id}, key=key)
    assert created.status_code == 201
    assert created["Cache-Control"] == "no-store"
    assert re.fullmatch("ord_[0-9A-Za-z]{20}", created.body["order_token"])
    created_at = datetime.fromisoformat(created.body["created_at"])
    assert created_at.utcoffset() == timedelta(0)
    assert created.body == {
        "order_token": created.body["order_token"],
        **ORDER,
        "customer_id": customer_id,
        "created_at": created.body["created_at"],
    }
    read = ask("GET", f"{ORDERS}/{created.body['order_token']}", key=key)
    assert (read.status_code, read.body) == (200, created.body)


def test_order_created_is_in_the_audit_log_of_its_account(ask: Ask) -> None:
    key, text = issue(account())
    created = ask("POST", ORDERS, ORDER, key=text)
    entry = AuditEntry.objects.get(event="order.created")
    assert (entry.chain_id, entry.actor) == ("account:acme/sandbox", f"key:{key.key_id}")
    assert created.body["order_token"] in bytes(entry.body).decode()


def test_order_of_another_merchant_or_environment_is_not_found(ask: Ask) -> None:
    """Another merchant's order looks exactly like one that never existed."""
    token = ask("POST", ORDERS, ORDER, key=private()).body["order_token"]
    answers = [
        ask("GET", f"{ORDERS}/{token}", key=private("globex")),
        ask("GET", f"/production/merchants/orders/{token}", key=private("acme", PRODUCTION)),
        ask("GET", f"{ORDERS}/ord_00000000000000000000", key=private()),
        ask("GET", f"{ORDERS}/whatever", key=private()),
    ]
    for answer in answers:
        expect(answer, 404, "not_found")
    assert len({str({**answer.body, "request_id": ""}) for answer in answers}) == 1


def test_order_with_a_bearer_is_for_its_own_customer_or_none(ask: Ask) -> None:
    """A signed-in customer sees no other customer's order."""
    key = private()
    token = issue_token(ask, key)["token"]
    for customer_id, status in (("cust-1", 200), ("cust-2", 404), (None, 200)):
        created = ask("POST", ORDERS, {**ORDER, "customer_id": customer_id}, key=key).body["order_token"]
        assert ask("GET", f"{ORDERS}/{created}", key=key, bearer=token).status_code == status
        assert ask("GET", f"{ORDERS}/{created}", key=key).status_code == 200


@pytest.mark.parametrize(
    ("changes", "pointer"),
    [
        ({"amount_minor": 0}, "/amount_minor"),
        ({"amount_minor": -1}, "/amount_minor"),
        ({"amount_minor": 1_000_000_000_000}, "/amount_minor"),
        ({"amount_minor": 10**400}, "/amount_minor"),
        ({"amount_minor": "1299"}, "/amount_minor"),
        ({"amount_minor": 1.0}, "/amount_minor"),
        ({"amount_minor": True}, "/amount_minor"),
        ({"amount_minor": None}, "/amount_minor"),
        ({"currency": "eur"}, "/currency"),
        ({"currency": "EURO"}, "/currency"),
        ({"currency": "ABC"}, "/currency"),
        ({"currency": "XTS"}, "/currency"),
        ({"currency": "DEM"}, "/currency"),
        ({"currency": "EUR\n"}, "/currency"),
        ({"currency": " EU"}, "/currency"),
        ({"currency": "ÄÖÜ"}, "/currency"),
        ({"currency": 978}, "/currency"),
        ({"currency": None}, "/currency"),
        ({"customer_id": ""}, "/customer_id"),
        ({"customer_id": "."}, "/customer_id"),
        ({"customer_id": ".."}, "/customer_id"),
        ({"customer_id": "a/b"}, "/customer_id"),
        ({"customer_id": "a b"}, "/customer_id"),
        ({"customer_id": "a;b"}, "/customer_id"),
        ({"customer_id": "cust\n"}, "/customer_id"),
        ({"customer_id": "kundin-ä"}, "/customer_id"),
        ({"customer_id": "\ud800"}, "/customer_id"),
        ({"customer_id": "\x00"}, "/customer_id"),
        ({"customer_id": "a" * 129}, "/customer_id"),
        ({"customer_id": 7}, "/customer_id"),
        ({"customer_id": mint()}, "/customer_id"),
        ({"colour": "red"}, "/colour"),
        ({"a/b~c": 1}, "/a~1b~0c"),
    ],
)
def test_order_with_an_invalid_field_is_refused_with_a_pointer(
    ask: Ask, changes: dict[str, object], pointer: str
) -> None:
    response = ask("POST", ORDERS, {**ORDER, **changes}, key=private())
    expect(response, 400, "request_invalid")
    assert set(pointers(response)) == {pointer}
    assert not Order.objects.exists()


def test_order_with_several_faults_lists_each(ask: Ask) -> None:
    response = ask("POST", ORDERS, {"customer_id": "a b"}, key=private())
    assert pointers(response) == ["/amount_minor", "/currency", "/customer_id"]


@pytest.mark.parametrize(
    ("body", "content_type", "status", "code"),
    [
        (b"{", "application/json", 400, "request_invalid"),
        (b"[]", "application/json", 400, "request_invalid"),
        (b'{"amount_minor": 1, "amount_minor": 2, "currency": "EUR"}', "application/json", 400, "request_invalid"),
        (b'{"amount_minor": NaN}', "application/json", 400, "request_invalid"),
        (b"\xff", "application/json", 400, "request_invalid"),
        (b'{"\\ud800": 1}', "application/json", 400, "request_invalid"),
        (b"[" * 60_000, "application/json", 400, "request_invalid"),
        (b"", "application/json", 400, "request_invalid"),
        (b"amount_minor=1", "application/x-www-form-urlencoded", 415, "media_type_unsupported"),
        (b"{}", "text/plain", 415, "media_type_unsupported"),
        (b"{}", "", 415, "media_type_unsupported"),
        (b" " * 65_537, "application/json", 413, "payload_too_large"),
    ],
)
def test_order_with_an_unreadable_body_is_refused_after_authentication(
    ask: Ask, body: bytes, content_type: str, status: int, code: str
) -> None:
    """Credentials are checked before Idempotency-Key, and Idempotency-Key before the body."""
    expect(ask("POST", ORDERS, body, content_type=content_type, key=private()), status, code)
    expect(ask("POST", ORDERS, body, content_type=content_type, key=Plaintext(mint())), 401, "credential_invalid")
    if status != 413:
        missing = ask("POST", ORDERS, body, content_type=content_type, key=private(), idempotency=None)
        expect(missing, 400, "idempotency_key_missing")


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON"])
def test_order_with_any_json_media_type_is_read(ask: Ask, content_type: str) -> None:
    assert ask("POST", ORDERS, ORDER, content_type=content_type, key=private()).status_code == 201


def test_order_retried_is_created_once(ask: Ask) -> None:
    key = private()
    first = ask("POST", ORDERS, ORDER, key=key, idempotency="k1")
    again = ask("POST", ORDERS, ORDER, key=key, idempotency="k1")
    assert (again.status_code, again.body, again["Idempotent-Replayed"]) == (201, first.body, "true")
    assert Order.objects.count() == 1
    expect(
        ask("POST", ORDERS, {**ORDER, "amount_minor": 1}, key=key, idempotency="k1"), 422, "idempotency_body_mismatch"
    )
    assert ask("POST", ORDERS, ORDER, key=private("globex"), idempotency="k1").status_code == 201
    assert Order.objects.count() == 2


# ------------------------------------------------------------------------------------------------ configuration


def test_client_configuration_is_that_of_the_keys_account(ask: Ask) -> None:
    change_account(client_configuration={"theme": "blue"})
    for environment, found in ((SANDBOX, {"theme": "blue"}), (PRODUCTION, {})):
        read = ask("GET", f"/{environment}/client/configuration", key=public("acme", environment))
        assert read.status_code == 200
        assert read.body == {"merchant_id": "acme", "environment": environment, "configuration": found}
    assert ask("GET", "/sandbox/client/configuration", key=public("globex")).body["configuration"] == {}


# ----------------------------------------------------------------------------------------------- all endpoints


def test_wrong_method_is_refused_before_the_body_is_read(ask: Ask) -> None:
    """HEAD is refused too; it does not fall back to GET."""
    for key in (None, private()):
        expect(ask("PUT", ORDERS, b"{", key=key), 405, "method_not_allowed")
        head = ask("HEAD", "/sandbox/client/configuration", key=key)
        assert head.status_code == 405


def test_base_url_itself_is_not_found(ask: Ask) -> None:
    for path in ("/sandbox", "/sandbox/", "/production/", f"{ORDERS}/", "/sandbox/Merchants/orders"):
        expect(ask("GET", path), 404, "endpoint_unknown")


def test_admin_session_counts_as_no_credential(ask: Ask, client: Client) -> None:
    """A credential of one plane is never accepted on another."""
    make_operator("root", *Role)
    client.force_login(Operator.objects.get(username="root"))
    expect(ask("GET", "/sandbox/customers/me"), 401, "credential_missing")


def test_answer_carries_the_limits_after_authentication_only(ask: Ask) -> None:
    change_account(limit_count=2, limit_seconds=60)
    key = private()
    for remaining in (1, 0):
        answer = ask("GET", f"{ORDERS}/x", key=key)
        assert answer["RateLimit-Policy"] == '"account";q=2;w=60'
        assert answer["RateLimit"].startswith(f'"account";r={remaining};')
    refused = ask("GET", f"{ORDERS}/x", key=key)
    expect(refused, 429, "rate_limited")
    assert int(refused["Retry-After"]) >= 1
    assert "RateLimit" in refused
    assert "RateLimit" not in ask("GET", f"{ORDERS}/x", key=Plaintext(mint()))


def test_body_of_a_request_that_takes_none_is_ignored_or_refused(ask: Ask) -> None:
    key = private()
    assert ask("GET", f"{ORDERS}/x", b"{", key=key).status_code == 404
    assert ask("DELETE", "/sandbox/customers/access-tokens/x", b"{", key=key).status_code == 404
    for path in ("acknowledge", "revoke-self"):
        refused = ask("POST", f"/sandbox/credentials/{path}", {"reason": "leaked"}, key=key)
        expect(refused, 400, "request_invalid")
        expect(ask("POST", f"/sandbox/credentials/{path}", b" " * 65_537, key=key), 413, "payload_too_large")
    expect(ask("POST", "/sandbox/credentials/acknowledge", {}, key=key), 404, "not_found")
