"""Customer access tokens on the integration plane: issued, used beside a private key, revoked."""

from datetime import datetime, timedelta

import pytest

from keyvault.models import AuditEntry, CustomerToken
from tests.factories import PRODUCTION, now

from .integration import Ask, change_account, expect, issue_token, pointers, private

pytestmark = [pytest.mark.database, pytest.mark.django_db]


def test_customer_token_issued_names_its_customer_and_lives_a_quarter_of_an_hour(ask: Ask) -> None:
    key = private()
    begun = now()
    issued = ask("POST", "/sandbox/customers/cust-1/access-tokens", key=key, content_type="")
    assert issued.status_code == 201
    assert set(issued.body) == {"token_id", "token", "customer_id", "expires_at"}
    assert issued.body["token"].startswith(f"kv_cat_sbx_{issued.body['token_id']}")
    expires_at = datetime.fromisoformat(issued.body["expires_at"])
    assert begun + timedelta(seconds=900) <= expires_at <= now() + timedelta(seconds=900)
    me = ask("GET", "/sandbox/customers/me", key=key, bearer=issued.body["token"])
    assert (me.status_code, me.body) == (200, {"customer_id": "cust-1", "expires_at": issued.body["expires_at"]})


def test_customer_token_is_kept_as_a_digest_and_never_in_the_audit_log(ask: Ask) -> None:
    """The token is nowhere but in the answer: neither in its row nor in what is kept for good."""
    token = issue_token(ask, private())
    row = CustomerToken.objects.get(token_id=token["token_id"])
    secret = token["token"][-49:]
    assert secret not in str(vars(row))
    entries = {entry.event: bytes(entry.body).decode() for entry in AuditEntry.objects.all()}
    assert not any(secret in entry for entry in entries.values())
    assert token["token_id"] in entries["customer_token.issued"]
    assert "cust-1" in entries["customer_token.issued"]


@pytest.mark.parametrize(("ttl_seconds", "bound"), [(1, 3600), (3600, 3600), (60, 60)])
def test_customer_token_lives_as_long_as_asked_within_the_bound(ask: Ask, ttl_seconds: int, bound: int) -> None:
    change_account(customer_token_seconds=bound)
    token = CustomerToken.objects.get(token_id=issue_token(ask, private(), ttl_seconds=ttl_seconds)["token_id"])
    assert token.expires_at - token.created_at == timedelta(seconds=ttl_seconds)


def test_customer_token_of_an_account_with_a_low_bound_lives_no_longer_by_default(ask: Ask) -> None:
    change_account(customer_token_seconds=60)
    token = CustomerToken.objects.get(token_id=issue_token(ask, private())["token_id"])
    assert token.expires_at - token.created_at == timedelta(seconds=60)


@pytest.mark.parametrize("ttl_seconds", [0, -1, 3601, 10**30, "60", 60.0, None, True])
def test_customer_token_for_a_time_that_does_not_fit_is_refused(ask: Ask, ttl_seconds: object) -> None:
    response = ask("POST", "/sandbox/customers/c/access-tokens", {"ttl_seconds": ttl_seconds}, key=private())
    expect(response, 400, "request_invalid")
    assert pointers(response) == ["/ttl_seconds"]
    assert not CustomerToken.objects.exists()


def test_customer_token_for_an_id_that_is_too_long_is_refused(ask: Ask) -> None:
    longest = ask("POST", f"/sandbox/customers/{'c' * 128}/access-tokens", key=private())
    assert longest.body["customer_id"] == "c" * 128
    response = ask("POST", f"/sandbox/customers/{'c' * 129}/access-tokens", key=private())
    expect(response, 400, "request_invalid")
    assert pointers(response) == [""]


def test_customer_token_of_one_customer_is_never_replayed_for_another(ask: Ask) -> None:
    """The same Idempotency-Key and the same empty body for somebody else do not hand over the first one's token."""
    key = private()
    first = ask("POST", "/sandbox/customers/alice/access-tokens", key=key, idempotency="k1").body
    again = ask("POST", "/sandbox/customers/alice/access-tokens", key=key, idempotency="k1")
    assert (again.body, again["Idempotent-Replayed"]) == (first, "true")
    other = ask("POST", "/sandbox/customers/bob/access-tokens", key=key, idempotency="k1")
    expect(other, 422, "idempotency_body_mismatch")


def test_customer_token_is_no_service_token(ask: Ask) -> None:
    """Guarantee: a credential of one plane is never accepted on another."""
    expect(ask("GET", "/v1/credentials", bearer=issue_token(ask, private())["token"]), 401, "service_token_invalid")


def test_customer_token_is_good_beside_every_private_key_of_its_account(ask: Ask) -> None:
    token = issue_token(ask, private())["token"]
    assert ask("GET", "/sandbox/customers/me", key=private(), bearer=token).status_code == 200


def test_customer_token_revoked_is_refused_and_revoked_again_without_a_second_entry(ask: Ask) -> None:
    key = private()
    token = issue_token(ask, key)
    url = f"/sandbox/customers/access-tokens/{token['token_id']}"
    for _ in range(3):
        revoked = ask("DELETE", url, key=key)
        assert (revoked.status_code, revoked.content) == (204, b"")
    expect(ask("GET", "/sandbox/customers/me", key=key, bearer=token["token"]), 401, "customer_token_revoked")
    assert AuditEntry.objects.filter(event="customer_token.revoked").count() == 1


def test_customer_token_of_another_merchant_or_environment_is_not_revoked(ask: Ask) -> None:
    key = private()
    token = issue_token(ask, key)
    path = f"customers/access-tokens/{token['token_id']}"
    expect(ask("DELETE", f"/sandbox/{path}", key=private("globex")), 404, "not_found")
    expect(ask("DELETE", f"/production/{path}", key=private("acme", PRODUCTION)), 404, "not_found")
    expect(ask("DELETE", "/sandbox/customers/access-tokens/nobody", key=key), 404, "not_found")
    assert ask("GET", "/sandbox/customers/me", key=key, bearer=token["token"]).status_code == 200
