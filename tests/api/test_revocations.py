"""The receipt of a revocation on the service plane, waited for or queried."""

from datetime import datetime
from typing import Any

import pytest
from django.db import DatabaseError

from keyvault.access.permissions import Permission as P
from keyvault.domain.environments import Environment
from keyvault.domain.keystring import StringScope
from keyvault.models import Change, Confirmation, Key
from keyvault.services.change_feed import receipts
from keyvault.services.merchants.merchants import find_account
from tests.factories import issue, make_merchant, make_token
from tests.verifiers import confirm, fall_silent, make_verifier

from .conftest import Call

pytestmark = pytest.mark.django_db


def revoke(call: Call, key: Key, prefer: str | None = None) -> Any:
    headers = {} if prefer is None else {"HTTP_PREFER": prefer}
    return call("POST", f"/v1/keys/{key.key_id}/revoke", {"reason": "superseded"}, **headers)


def issue_key(merchant_id: str = "acme") -> Key:
    return issue(find_account(merchant_id, Environment.SANDBOX))[0]


def bearer(*permissions: P, **options: Any) -> dict[str, str]:
    return {"HTTP_AUTHORIZATION": f"Bearer {make_token(*permissions, **options)[1].reveal()}"}


# --- Prefer: wait -----------------------------------------------------------------------------------------


@pytest.mark.database
def test_revoke_with_prefer_wait_answers_with_the_complete_receipt(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is sent with the last confirmation, and lists who confirmed and when."""
    verifier = make_verifier()
    monkeypatch.setattr(receipts, "sleep", lambda seconds: confirm(verifier, Change.objects.latest("pk").sequence))
    response = revoke(call, issue_key(), "wait=5")
    assert (response.status_code, response["Preference-Applied"]) == (202, "wait=5")
    receipt = response.body["receipt"]
    assert (receipt["sequence"], receipt["complete"]) == (response.body["sequence"], True)
    receipt_body = receipt["verifiers"]
    assert [(row["verifier_id"], row["door"], row["state"]) for row in receipt_body] == [
        ("verifier-1", "server", "confirmed")
    ]
    assert datetime.fromisoformat(receipt_body[0]["confirmed_at"]) == Confirmation.objects.get().at


def test_revoke_whose_wait_times_out_succeeds(call: Call) -> None:
    """The key is revoked nevertheless: the same 202, with a receipt that names the missing verifiers."""
    key = issue_key()
    make_verifier()
    response = revoke(call, key, "wait=0")
    assert (response.status_code, response["Preference-Applied"]) == (202, "wait=0")
    assert response.body["state"] == "deactivated"
    assert response.body["receipt"]["complete"] is False
    assert response.body["receipt"]["verifiers"][0]["state"] == "waiting"
    assert response.body["receipt"]["verifiers"][0]["confirmed_at"] is None


@pytest.mark.database
def test_revoke_with_an_unreadable_receipt_succeeds(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails after the commit, the answer states that the key is revoked."""

    def fail(sequence: int) -> None:
        raise DatabaseError("gone")

    monkeypatch.setattr(receipts, "_receipt", fail)
    response = revoke(call, issue_key(), "wait=5")
    assert (response.status_code, response.body["state"]) == (202, "deactivated")
    assert response.body["receipt"] == {
        "sequence": response.body["sequence"],
        "complete": False,
        "changed_at": None,
        "verifiers": [],
    }


def test_revoke_wait_is_capped_by_the_server(call: Call) -> None:
    response = revoke(call, issue_key(), "wait=86400")
    assert response["Preference-Applied"] == "wait=5"
    assert response.body["receipt"]["complete"] is True


@pytest.mark.parametrize("prefer", [None, "respond-async", "wait", "wait=soon", "wait=-1", 'wait="5', "x" * 4000])
def test_revoke_without_a_valid_wait_has_no_receipt(call: Call, prefer: str | None) -> None:
    """A malformed or unknown preference is ignored (RFC 7240)."""
    response = revoke(call, issue_key(), prefer)
    assert response.status_code == 202
    assert response.body.keys() == {"key_id", "state", "sequence"}
    assert "Preference-Applied" not in response


def test_revoke_repeated_answers_with_the_same_receipt(call: Call) -> None:
    key = issue_key()
    first, second = (revoke(call, key, "wait=1") for _ in range(2))
    assert first.body == second.body


# --- GET /v1/revocations/<sequence> -----------------------------------------------------------------------


def test_revocation_lists_the_verifiers_by_status(call: Call) -> None:
    """The receipt lists a confirmed, a pending and an expired verifier, and no other details about them."""
    first, _, third = (make_verifier(f"verifier-{number}") for number in (1, 2, 3))
    sequence = revoke(call, issue_key()).body["sequence"]
    confirm(first, sequence)
    fall_silent(third)
    response = call("GET", f"/v1/revocations/{sequence}")
    assert response.status_code == 200
    assert response.body.keys() == {"sequence", "complete", "changed_at", "verifiers"}
    assert (response.body["sequence"], response.body["complete"]) == (sequence, False)
    receipt_body = {
        row["verifier_id"]: (row["state"], row["confirmed_at"] is None) for row in response.body["verifiers"]
    }
    assert receipt_body == {
        "verifier-1": ("confirmed", False),
        "verifier-2": ("waiting", True),
        "verifier-3": ("expired", True),
    }


@pytest.mark.parametrize(
    "sequence",
    ["0", "4611686018427387904", str(2**63 - 1), str(2**63), "9" * 19, "9" * 20, "9" * 5000, "-1", "1.0", "x"],
)
def test_revocation_with_an_unknown_sequence_is_not_found(call: Call, sequence: str) -> None:
    """Covers numbers of any size and values that are no number."""
    response = call("GET", f"/v1/revocations/{sequence}")
    assert (response.status_code, response.body["code"]) == (404, "not_found")


def test_revocation_of_another_merchant_is_not_found(call: Call) -> None:
    sequence = revoke(call, issue_key()).body["sequence"]
    header = bearer(P.KEYS_READ, merchants=["globex"])
    there, absent = (call("GET", f"/v1/revocations/{number}", **header) for number in (sequence, 2**40))
    for response in (there, absent):
        del response.body["request_id"]
    assert there.status_code == absent.status_code == 404
    assert there.body == absent.body
    assert call("GET", f"/v1/revocations/{sequence}", **bearer(P.KEYS_READ, merchants=["acme"])).status_code == 200


def test_revocation_in_an_environment_outside_the_token_is_permission_missing(call: Call) -> None:
    sequence = revoke(call, issue_key()).body["sequence"]
    response = call("GET", f"/v1/revocations/{sequence}", **bearer(P.KEYS_READ, scope=StringScope.PRODUCTION))
    assert (response.status_code, response.body["code"]) == (403, "permission_missing")


def test_revocation_without_the_permission_is_permission_missing(call: Call) -> None:
    """The permission is checked before the lookup, so sequences cannot be probed."""
    for number in (revoke(call, issue_key()).body["sequence"], 2**40):
        response = call("GET", f"/v1/revocations/{number}", **bearer(P.KEYS_REVOKE))
        assert (response.status_code, response.body["code"]) == (403, "permission_missing")
    assert call("GET", "/v1/revocations/1", HTTP_AUTHORIZATION="").status_code == 401


def test_revocation_without_an_account_is_readable_by_all_merchant_tokens(call: Call) -> None:
    make_merchant("third")
    number = Change.objects.filter(subject_kind="merchant").latest("sequence").sequence
    assert call("GET", f"/v1/revocations/{number}").status_code == 200
    assert call("GET", f"/v1/revocations/{number}", **bearer(P.KEYS_READ, merchants=["third"])).status_code == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_revocation_is_read_only(call: Call, method: str) -> None:
    response = call(method, "/v1/revocations/1")
    assert (response.status_code, response.body["code"]) == (405, "method_not_allowed")
