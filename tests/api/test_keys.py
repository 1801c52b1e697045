"""Keys and credentials on the service plane."""

import pytest
from django.test import Client

from keyvault.access.permissions import Permission as P
from keyvault.domain.environments import Environment
from keyvault.domain.keystring import StringScope
from keyvault.domain.revocation import RevocationReason
from keyvault.models import AuditEntry, Change
from keyvault.services.merchants.merchants import find_account
from tests.factories import issue, make_token

from .conftest import Call

pytestmark = pytest.mark.django_db


@pytest.mark.database
def test_key_is_shown_without_anything_secret(call: Call) -> None:
    key, text = issue(find_account("acme", Environment.SANDBOX))
    response = call("GET", f"/v1/keys/{key.key_id}")
    assert response.status_code == 200
    assert response.body["state"] == "active"
    assert response.body["last_used_at"] is None
    assert text.reveal() not in str(response.body)
    assert bytes(key.digest).hex() not in str(response.body)


@pytest.mark.parametrize("path", ["/v1/keys/0000000000000000", "/v1/keys/..", "/v1/keys/%00", "/v1/keys/" + "a" * 5000])
def test_key_with_an_unknown_id_is_not_found(call: Call, path: str) -> None:
    response = call("GET", path)
    assert (response.status_code, response.body["code"]) == (404, "not_found")


def test_key_of_another_merchant_is_not_found(call: Call) -> None:
    key, _ = issue(find_account("acme", Environment.SANDBOX))
    _, scoped = make_token(P.KEYS_READ, P.KEYS_REVOKE, merchants=["globex"])
    header = {"HTTP_AUTHORIZATION": f"Bearer {scoped.reveal()}"}
    there, absent = (call("GET", f"/v1/keys/{key_id}", **header) for key_id in (key.key_id, "0" * 16))
    for response in (there, absent):
        del response.body["request_id"]
    assert there.status_code == absent.status_code == 404
    assert there.body == absent.body
    assert call("POST", f"/v1/keys/{key.key_id}/revoke", {"reason": "unspecified"}, **header).status_code == 404


def test_key_of_an_environment_outside_the_token_is_permission_missing(call: Call) -> None:
    key, _ = issue(find_account("acme", Environment.SANDBOX))
    _, scoped = make_token(P.KEYS_READ, scope=StringScope.PRODUCTION)
    response = call("GET", f"/v1/keys/{key.key_id}", HTTP_AUTHORIZATION=f"Bearer {scoped.reveal()}")
    assert (response.status_code, response.body["code"]) == (403, "permission_missing")


def test_revoke_ends_the_key_immediately_and_answers_with_the_sequence(call: Call) -> None:
    """The next verification refuses the key."""
    key, text = issue(find_account("acme", Environment.SANDBOX))
    verify = {"key": text.reveal(), "environment": "sandbox", "endpoint": "orders.create"}
    assert call("POST", "/v1/keys/verify", verify).body["allowed"] is True
    response = call("POST", f"/v1/keys/{key.key_id}/revoke", {"reason": "superseded"})
    assert response.status_code == 202
    assert response.body == {
        "key_id": key.key_id,
        "state": "deactivated",
        "sequence": Change.objects.filter(subject_kind="key", subject_id=key.key_id).latest("sequence").sequence,
    }
    assert call("POST", "/v1/keys/verify", verify).body["code"] == "key_revoked"
    assert AuditEntry.objects.filter(event="key.revoked").count() == 1


def test_revoke_twice_is_one_revocation_and_the_same_answer(call: Call) -> None:
    key, _ = issue(find_account("acme", Environment.SANDBOX))
    first, second = (call("POST", f"/v1/keys/{key.key_id}/revoke", {"reason": "superseded"}) for _ in range(2))
    assert first.body == second.body
    assert second.status_code == 202


def test_revoke_for_compromise_marks_an_already_revoked_key(call: Call) -> None:
    key, _ = issue(find_account("acme", Environment.SANDBOX))
    call("POST", f"/v1/keys/{key.key_id}/revoke", {"reason": "superseded"})
    response = call("POST", f"/v1/keys/{key.key_id}/revoke", {"reason": "key_compromise"})
    assert response.body["state"] == "compromised"


@pytest.mark.parametrize("body", [{}, {"reason": "because"}, {"reason": "superseded", "force": True}])
def test_revoke_without_a_known_reason_is_refused(call: Call, body: dict[str, object]) -> None:
    key, _ = issue(find_account("acme", Environment.SANDBOX))
    response = call("POST", f"/v1/keys/{key.key_id}/revoke", body)
    assert (response.status_code, response.body["code"]) == (400, "request_invalid")


@pytest.mark.parametrize(
    ("sent", "detail"),
    [
        ("because", '"because" is none of '),
        ("\ud800", '"\\ud800" is none of '),
        ("x" * 60_000, f'"{"x" * 64}" is none of '),
        ("", '"" is none of '),
        (5, "Not a string."),
        (None, "This field may not be null."),
    ],
    ids=["a word", "half a surrogate pair", "much", "nothing", "a number", "null"],
)
def test_revoke_for_an_unknown_reason_lists_the_valid_ones(call: Call, sent: object, detail: str) -> None:
    key, text = issue(find_account("acme", Environment.SANDBOX))
    response = call("POST", f"/v1/keys/{key.key_id}/revoke", {"reason": sent})
    assert (response.status_code, response.body["code"]) == (400, "request_invalid")
    (fault,) = response.body["errors"]
    if detail.endswith("none of "):
        detail += ", ".join(RevocationReason) + "."
    assert fault == {"pointer": "/reason", "detail": detail}
    shown = call("POST", f"/v1/keys/{key.key_id}/revoke", {"reason": text.reveal()})
    assert text.reveal()[30:] not in str(shown.body)


def test_credential_is_shown_with_its_keys_and_nothing_secret(call: Call) -> None:
    key, text = issue(find_account("acme", Environment.SANDBOX))
    response = call("GET", f"/v1/credentials/{key.credential_id}")
    assert response.status_code == 200
    assert (response.body["merchant_id"], response.body["kind"]) == ("acme", "private")
    assert [each["key_id"] for each in response.body["keys"]] == [key.key_id]
    assert text.reveal() not in str(response.body)


@pytest.mark.parametrize("credential_id", ["crd_00000000000000000000", "crd_x", "..", "%00", "crd_" + "a" * 5000])
def test_credential_with_an_unknown_id_is_not_found(call: Call, credential_id: str) -> None:
    response = call("GET", f"/v1/credentials/{credential_id}")
    assert (response.status_code, response.body["code"]) == (404, "not_found")


def test_credential_outside_the_token_is_not_found_or_permission_missing(call: Call) -> None:
    key, _ = issue(find_account("acme", Environment.SANDBOX))
    path = f"/v1/credentials/{key.credential_id}"
    for options, status, code in (
        ({"merchants": ["globex"]}, 404, "not_found"),
        ({"scope": StringScope.PRODUCTION}, 403, "permission_missing"),
    ):
        _, scoped = make_token(P.KEYS_READ, **options)
        response = call("GET", path, HTTP_AUTHORIZATION=f"Bearer {scoped.reveal()}")
        assert (response.status_code, response.body["code"]) == (status, code)


@pytest.mark.parametrize("credential", ["", "Bearer", "Bearer x", "Basic eA==", "bearer  ", "Bearer a,b"])
def test_service_plane_without_a_valid_token_is_refused(client: Client, db: None, credential: str) -> None:
    headers = {"Authorization": credential} if credential else {}
    response = client.get("/v1/credentials", headers=headers)
    assert response.status_code == 401
    assert response.json()["code"] == "service_token_invalid"
    assert response["WWW-Authenticate"].startswith("Bearer")


def test_api_key_and_admin_session_are_refused_on_the_service_plane(client: Client, call: Call) -> None:
    """A credential of one plane is never accepted on another."""
    from keyvault.access.roles import Role
    from keyvault.models import Operator
    from tests.factories import make_operator

    _, text = issue(find_account("acme", Environment.SANDBOX))
    assert call("GET", "/v1/credentials", HTTP_AUTHORIZATION=f"Bearer {text.reveal()}").status_code == 401
    make_operator("boss", Role.KEY_ADMINISTRATOR)
    client.force_login(Operator.objects.get(username="boss"))
    assert client.get("/v1/credentials").status_code == 401
    assert client.post("/sandbox/credentials/acknowledge").json()["code"] == "credential_missing"


def test_token_without_the_permission_is_refused_before_its_body_is_read(call: Call) -> None:
    _, reader = make_token(P.KEYS_READ)
    header = {"HTTP_AUTHORIZATION": f"Bearer {reader.reveal()}"}
    response = call("POST", "/v1/keys/verify", b"not json", **header)
    assert (response.status_code, response.body["code"]) == (403, "permission_missing")
