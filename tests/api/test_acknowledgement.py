"""Rotations over REST, and the merchant's acknowledgement on the integration plane."""

from datetime import UTC, datetime

import pytest
from django.test import Client

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.roles import Role
from keyvault.domain.environments import Environment
from keyvault.models import AuditEntry, UseContext
from keyvault.services.keys.lifecycle import get_key, suspend_key
from keyvault.services.merchants.merchants import find_account
from keyvault.services.secrets.stored_copies import read_string
from keyvault.services.usage.recorder import UsageLog
from rotation.api import rotations
from rotation.models import Rotation
from rotation.services.rotations.engine import advance_rotation
from rotation.services.rotations.interventions import acknowledge
from rotation.services.rotations.reports import get_rotation
from tests.factories import grant, issue, make_token, the_operator
from tests.rotation import scene

from .conftest import Call, new_key

pytestmark = pytest.mark.django_db

URL = "/sandbox/credentials/acknowledge"
JSON = "application/json"


def test_rotation_over_rest_is_requested_approved_and_read(call: Call) -> None:
    key, _ = issue(find_account("acme", Environment.SANDBOX))
    wanted = {"credential_id": key.credential_id, "proof": "ack", "quiet_seconds": 1}
    requested = call("POST", "/v1/rotations", wanted, **new_key())
    assert requested.status_code == 201
    assert requested.body["state"] == "awaiting_approval"
    assert requested.body["plan"]["quiet_seconds"] == 1
    read = call("GET", f"/v1/rotations/{requested.body['rotation_id']}")
    assert read.body["waiting_for"] == "approval by a second person"
    assert b"+00:00" not in read.content
    assert read.body["predecessor_key_id"] == key.key_id
    duplicate = call("POST", "/v1/rotations", {"credential_id": key.credential_id}, **new_key())
    assert (duplicate.status_code, duplicate.body["code"]) == (409, "state_conflict")
    assert requested.body["rotation_id"] in duplicate.body["detail"]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 400, "request_invalid"),
        ({"credential_id": "crd_nowhere"}, 404, "not_found"),
        ({"credential_id": "x", "quiet_seconds": 0}, 400, "request_invalid"),
        ({"credential_id": "x", "quiet_seconds": "1"}, 400, "request_invalid"),
        ({"credential_id": "x", "deadline": "tomorrow"}, 400, "request_invalid"),
        ({"credential_id": "x", "soon": True}, 400, "request_invalid"),
    ],
)
def test_rotation_request_with_invalid_fields_is_refused(
    call: Call, body: dict[str, object], status: int, code: str
) -> None:
    response = call("POST", "/v1/rotations", body, **new_key())
    assert (response.status_code, response.body["code"]) == (status, code)


def test_rotation_request_with_an_infeasible_deadline_names_the_field(call: Call) -> None:
    key, _ = issue(find_account("acme", Environment.SANDBOX))
    body = {"credential_id": key.credential_id, "deadline": "2027-01-01T00:00:00Z", "quiet_seconds": 360 * 86_400}
    response = call("POST", "/v1/rotations", body, **new_key())
    assert response.status_code == 400
    assert [fault["pointer"] for fault in response.body["errors"]] == ["/deadline"]


def test_rotation_of_another_merchant_is_not_found(call: Call) -> None:
    key, _ = issue(find_account("acme", Environment.SANDBOX))
    _, scoped = make_token(P.ROTATIONS_WRITE, P.ROTATIONS_READ, merchants=["globex"])
    header = {"HTTP_AUTHORIZATION": f"Bearer {scoped.reveal()}"}
    assert call("POST", "/v1/rotations", {"credential_id": key.credential_id}, **new_key(), **header).status_code == 404
    rotation = scene.rotate(key.credential, datetime.now(UTC))
    assert call("GET", f"/v1/rotations/{rotation.rotation_id}", **header).status_code == 404


def test_acknowledgement_by_the_replacement_counts_once_and_is_repeatable(client: Client, call: Call) -> None:
    """Only the replacement itself can acknowledge the rotation."""
    key, old = issue(find_account("acme", Environment.SANDBOX))
    rotation = scene.rotate(key.credential, datetime.now(UTC))
    advance_rotation(rotation.rotation_id)
    replacement = get_rotation(rotation.rotation_id).replacement
    assert replacement is not None
    new = read_string(replacement)
    assert client.post(URL, content_type=JSON, headers={"X-Api-Key": old.reveal()}).json()["code"] == "not_found"
    assert get_rotation(rotation.rotation_id).acknowledged_at is None
    for _ in range(2):
        response = client.post(URL, content_type=JSON, headers={"X-Api-Key": new.reveal()})
        assert response.status_code == 204
        assert response["Cache-Control"] == "no-store"
    assert get_rotation(rotation.rotation_id).acknowledged_at is not None


def test_acknowledgement_with_malformed_credentials_is_refused(client: Client, token: str) -> None:
    """Cover the forms of the Authorization header; tests/entry_points asserts the verdict of each credential."""
    _, private = issue(find_account("acme", Environment.SANDBOX))
    for url, headers, code in (
        (URL, {"Authorization": f"Bearer {private.reveal()}"}, "credential_missing"),
        (URL, {"X-Api-Key": private.reveal(), "Authorization": "Bearer x,Bearer x"}, "credential_ambiguous"),
        (URL, {"X-Api-Key": private.reveal(), "Authorization": "Basic x, y"}, "credential_ambiguous"),
        (URL, {"X-Api-Key": private.reveal(), "Authorization": ",Bearer x"}, "credential_ambiguous"),
        (URL, {"Authorization": "Bearer x,Bearer x"}, "credential_ambiguous"),
        (URL, {"X-Api-Key": "malformed", "Authorization": "a,b"}, "credential_ambiguous"),
        (URL + f"?key={private.reveal()}", {"Authorization": "a,b"}, "credential_in_url"),
    ):
        response = client.post(url, content_type=JSON, headers=headers)
        assert response.json()["code"] == code, code
        if response.status_code == 401:
            assert "WWW-Authenticate" in response
        if code == "credential_ambiguous":
            assert response.status_code == 400


def test_acknowledgement_that_meets_another_one_is_repeated(
    client: Client, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The contract calls it repeatable, so two processes of a merchant may send it concurrently."""
    key, _ = issue(find_account("acme", Environment.SANDBOX))
    rotation = scene.rotate(key.credential, datetime.now(UTC))
    advance_rotation(rotation.rotation_id)
    replacement = get_rotation(rotation.rotation_id).replacement
    assert replacement is not None

    def meet(grant: Grant, found: Rotation) -> None:
        monkeypatch.setattr(rotations, "acknowledge", acknowledge)
        acknowledge(grant, get_rotation(found.rotation_id))
        acknowledge(grant, found)

    monkeypatch.setattr(rotations, "acknowledge", meet)
    response = client.post(URL, content_type=JSON, headers={"X-Api-Key": read_string(replacement).reveal()})
    assert response.status_code == 204
    assert AuditEntry.objects.filter(event="rotation.acknowledged").count() == 1


def test_acknowledgement_by_a_service_token_is_refused(call: Call) -> None:
    """No service token can acknowledge on the merchant's behalf."""
    assert call("POST", URL).body["code"] == "credential_missing"


def test_acknowledgement_with_a_suspended_key_is_an_attempt_in_quarantine(
    client: Client, token: str, usage: UsageLog
) -> None:
    """An attempt at Keyvault's own endpoint counts, so the quarantine is not reported as untried."""
    key, text = issue(find_account("acme", Environment.SANDBOX))
    admin = the_operator("admin", Role.KEY_ADMINISTRATOR)
    suspend_key(grant(admin, P.KEYS_SUSPEND, key.credential.account), get_key(key.key_id) or key)
    assert client.post(URL, content_type=JSON, headers={"X-Api-Key": text.reveal()}).json()["code"] == "key_not_active"
    usage.flush()
    assert UseContext.objects.get().outcome == "refused"
