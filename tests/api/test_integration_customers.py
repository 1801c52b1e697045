"""Customer access tokens on the integration plane: issued, used beside a private key, revoked."""

from datetime import datetime, timedelta

import pytest

from keyvault.access.limits import REPEAT_LIMIT
from keyvault.models import AuditEntry, CustomerToken
from tests.factories import PRODUCTION, now

from .integration import Ask, change_account, expect, issue_token, pointers, private

pytestmark = pytest.mark.django_db


def test_customer_token_issued_names_its_customer_and_expires_in_15_minutes(ask: Ask) -> None:
    key = private()
    started_at = now()
    issued = ask("POST", "/sandbox/customers/cust-1/access-tokens", key=key, content_type="")
    assert issued.status_code == 201
    assert set(issued.body) == {"token_id", "token", "customer_id", "expires_at"}
    assert issued.body["token"].startswith(f"kv_cat_sbx_{issued.body['token_id']}")
    expires_at = datetime.fromisoformat(issued.body["expires_at"])
    assert started_at + timedelta(seconds=900) <= expires_at <= now() + timedelta(seconds=900)
    me = ask("GET", "/sandbox/customers/me", key=key, bearer=issued.body["token"])
    assert (me.status_code, me.body) == (200, {"customer_id": "cust-1", "expires_at": issued.body["expires_at"]})


def test_customer_token_is_stored_as_a_digest_and_not_in_the_audit_log(ask: Ask) -> None:
    """The token appears only in the answer, neither in its row nor in the audit log."""
    token = issue_token(ask, private())
    row = CustomerToken.objects.get(token_id=token["token_id"])
    secret = token["token"][-49:]
    assert secret not in str(vars(row))
    entries = {entry.event: bytes(entry.body).decode() for entry in AuditEntry.objects.all()}
    assert not any(secret in entry for entry in entries.values())
    assert token["token_id"] in entries["customer_token.issued"]
    assert "cust-1" in entries["customer_token.issued"]


@pytest.mark.parametrize(("ttl_seconds", "bound"), [(1, 3600), (3600, 3600), (60, 60)])
def test_customer_token_ttl_within_the_bound_is_honored(ask: Ask, ttl_seconds: int, bound: int) -> None:
    change_account(customer_token_seconds=bound)
    token = CustomerToken.objects.get(token_id=issue_token(ask, private(), ttl_seconds=ttl_seconds)["token_id"])
    assert token.expires_at - token.created_at == timedelta(seconds=ttl_seconds)


def test_customer_token_default_ttl_respects_a_low_account_bound(ask: Ask) -> None:
    change_account(customer_token_seconds=60)
    token = CustomerToken.objects.get(token_id=issue_token(ask, private())["token_id"])
    assert token.expires_at - token.created_at == timedelta(seconds=60)


@pytest.mark.parametrize("ttl_seconds", [0, -1, 3601, 10**30, "60", 60.0, None, True])
def test_customer_token_with_an_invalid_ttl_is_refused(ask: Ask, ttl_seconds: object) -> None:
    response = ask("POST", "/sandbox/customers/c/access-tokens", {"ttl_seconds": ttl_seconds}, key=private())
    expect(response, 400, "request_invalid")
    assert pointers(response) == ["/ttl_seconds"]
    assert not CustomerToken.objects.exists()


def test_customer_token_for_an_overlong_customer_id_is_refused(ask: Ask) -> None:
    longest = ask("POST", f"/sandbox/customers/{'c' * 128}/access-tokens", key=private())
    assert longest.body["customer_id"] == "c" * 128
    response = ask("POST", f"/sandbox/customers/{'c' * 129}/access-tokens", key=private())
    expect(response, 400, "request_invalid")
    assert pointers(response) == [""]


def test_customer_token_of_one_customer_is_never_replayed_for_another(ask: Ask) -> None:
    """The same Idempotency-Key and empty body for another customer do not return the first customer's token."""
    key = private()
    first = ask("POST", "/sandbox/customers/alice/access-tokens", key=key, idempotency="k1").body
    again = ask("POST", "/sandbox/customers/alice/access-tokens", key=key, idempotency="k1")
    assert (again.body, again["Idempotent-Replayed"]) == (first, "true")
    other = ask("POST", "/sandbox/customers/bob/access-tokens", key=key, idempotency="k1")
    expect(other, 422, "idempotency_body_mismatch")


def test_customer_token_as_a_service_token_is_refused(ask: Ask) -> None:
    """Guarantee: a credential of one plane is never accepted on another."""
    expect(ask("GET", "/v1/credentials", bearer=issue_token(ask, private())["token"]), 401, "service_token_invalid")


def test_customer_token_is_valid_with_every_private_key_of_its_account(ask: Ask) -> None:
    token = issue_token(ask, private())["token"]
    assert ask("GET", "/sandbox/customers/me", key=private(), bearer=token).status_code == 200


def test_customer_token_revoked_twice_is_refused_and_audited_once(ask: Ask) -> None:
    key = private()
    token = issue_token(ask, key)
    url = f"/sandbox/customers/access-tokens/{token['token_id']}"
    for _ in range(3):
        revoked = ask("DELETE", url, key=key)
        assert (revoked.status_code, revoked.content) == (204, b"")
    expect(ask("GET", "/sandbox/customers/me", key=key, bearer=token["token"]), 401, "customer_token_revoked")
    assert AuditEntry.objects.filter(event="customer_token.revoked").count() == 1


@pytest.mark.database
def test_customer_token_revoked_too_often_is_refused_until_the_limit_refills(ask: Ask) -> None:
    """Guarantee: a merchant that repeats a revocation does not keep the verifiers of the host busy.

    The limit delays no first revocation.
    """
    key = private()
    first, second = (f"/sandbox/customers/access-tokens/{issue_token(ask, key)['token_id']}" for _ in range(2))
    answers = [ask("DELETE", first, key=key) for _ in range(REPEAT_LIMIT.count + 2)]
    assert [answer.status_code for answer in answers[:-1]] == [204] * (REPEAT_LIMIT.count + 1)
    expect(answers[-1], 429, "rate_limited")
    assert 1 <= int(answers[-1].headers["Retry-After"]) <= REPEAT_LIMIT.seconds
    assert ask("DELETE", second, key=key).status_code == 204
    other = private()
    third = f"/sandbox/customers/access-tokens/{issue_token(ask, other)['token_id']}"
    assert [ask("DELETE", third, key=other).status_code for _ in range(2)] == [204, 204]


def test_customer_token_of_another_merchant_or_environment_is_not_revoked(ask: Ask) -> None:
    key = private()
    token = issue_token(ask, key)
    path = f"customers/access-tokens/{token['token_id']}"
    expect(ask("DELETE", f"/sandbox/{path}", key=private("globex")), 404, "not_found")
    expect(ask("DELETE", f"/production/{path}", key=private("acme", PRODUCTION)), 404, "not_found")
    expect(ask("DELETE", "/sandbox/customers/access-tokens/unknown", key=key), 404, "not_found")
    assert ask("GET", "/sandbox/customers/me", key=key, bearer=token["token"]).status_code == 200
