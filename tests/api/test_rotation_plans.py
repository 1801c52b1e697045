"""Rotations over REST: the fields of a plan, and how a rotation is aborted."""

from datetime import UTC, datetime
from typing import Any

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.domain.environments import Environment
from keyvault.services.merchants.merchants import find_account
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.transaction import recorded
from rotation.models import Rotation
from rotation.services.rotations.engine import advance_rotation
from tests.factories import issue, make_token
from tests.rotation import scene

from .conftest import Call, new_key

pytestmark = pytest.mark.django_db

WINDOW = {"time_zone": "Europe/Berlin", "weekdays": [0, 1, 2], "opens": "09:00", "closes": "17:00"}


def asked(call: Call, **plan: Any) -> Any:
    key, _ = issue(find_account("acme", Environment.SANDBOX))
    return call("POST", "/v1/rotations", {"credential_id": key.credential_id, **plan}, **new_key())


def test_rotation_plan_over_rest_shows_every_approved_field(call: Call) -> None:
    answer = asked(
        call, proof="both", at_deadline="revoke", reinstatement="never", channels=["secret_backend"], window=WINDOW
    )
    assert answer.status_code == 201
    plan = answer.body["plan"]
    chosen = {name: plan[name] for name in ("proof", "at_deadline", "reinstatement", "channels", "is_dormant")}
    assert chosen == {
        "proof": "both",
        "at_deadline": "revoke",
        "reinstatement": "never",
        "channels": ["secret_backend"],
        "is_dormant": True,
    }
    assert plan["window"]["opens"] == "09:00"
    assert answer.body["deadline"] == plan["deadline"]


@pytest.mark.parametrize(
    ("plan", "pointer"),
    [
        ({"proof": "hope"}, "/proof"),
        ({"at_deadline": "explode"}, "/at_deadline"),
        ({"channels": []}, "/channels"),
        ({"channels": ["webhook"]}, "/channels"),
        ({"channels": ["secret_backend", "webhook"]}, "/channels"),
        ({"window": {"time_zone": "Mars/Olympus"}}, "/window/time_zone"),
        ({"window": {**WINDOW, "opens": "9 o'c"}}, "/window/opens"),
        ({"window": {**WINDOW, "weekdays": [9]}}, "/window/weekdays/0"),
        ({"retire_at": "2027-01-01T00:00:00Z"}, "/retire_at"),
    ],
)
def test_rotation_plan_with_an_invalid_field_names_it(call: Call, plan: dict[str, Any], pointer: str) -> None:
    answer = asked(call, **plan)
    assert (answer.status_code, answer.body["code"]) == (400, "request_invalid")
    assert pointer in [fault["pointer"] for fault in answer.body["errors"]]
    assert not Rotation.objects.exists()


@pytest.mark.parametrize(("plan", "status"), [({}, 404), ({"channels": ["webhook"]}, 400)])
def test_rotation_of_a_foreign_credential_answers_as_of_an_unknown_one(
    call: Call, plan: dict[str, Any], status: int
) -> None:
    """A token learns nothing about the credentials of foreign merchants, however invalid the body is."""
    key, _ = issue(find_account("acme", Environment.SANDBOX))
    _, globex_only = make_token(P.ROTATIONS_WRITE, merchants=["globex"])
    token = {"HTTP_AUTHORIZATION": f"Bearer {globex_only.reveal()}"}
    foreign, absent = (
        call("POST", "/v1/rotations", {"credential_id": credential_id, **plan}, **new_key(), **token)
        for credential_id in (key.credential_id, "crd_" + "0" * 20)
    )
    ids = [answer.body.pop("request_id") for answer in (foreign, absent)]
    assert ids[0] != ids[1]
    assert (foreign.status_code, foreign.body) == (absent.status_code, absent.body)
    assert foreign.status_code == status


def test_rotation_aborted_over_rest_before_delivery_is_canceled(call: Call) -> None:
    rotation_id = asked(call).body["rotation_id"]
    for _ in range(2):
        answer = call("POST", f"/v1/rotations/{rotation_id}/abort", {"reason": "not now"})
        assert (answer.status_code, answer.body["state"], answer.body["why"]) == (200, "cancelled", "not now")


def test_rotation_aborted_over_rest_after_delivery_rolls_back_unless_closed(call: Call) -> None:
    key, _ = issue(find_account("acme", Environment.SANDBOX))
    rotation = scene.rotate(key.credential, datetime.now(UTC))
    advance_rotation(rotation.rotation_id)
    url = f"/v1/rotations/{rotation.rotation_id}/abort"
    for _ in range(2):
        answer = call("POST", url, {})
        assert (answer.status_code, answer.body["state"]) == (200, "rolling_back")
    other = scene.rotate(issue(find_account("acme", Environment.SANDBOX))[0].credential, datetime.now(UTC))
    reject = authorize(scene.approver(), P.ROTATIONS_APPROVE, other.credential.account, now=datetime.now(UTC))
    with recorded(reject, P.ROTATIONS_APPROVE, "rotation.rejected", account=other.credential.account):
        other.compare_and_swap(state="rejected")
    answer = call("POST", f"/v1/rotations/{other.rotation_id}/abort", {})
    assert (answer.status_code, answer.body["code"]) == (409, "state_conflict")


def test_rotation_of_another_merchant_is_not_found_for_abort(call: Call) -> None:
    """The answer is not found, as if the rotation did not exist."""
    key, _ = issue(find_account("acme", Environment.SANDBOX))
    rotation = scene.rotate(key.credential, datetime.now(UTC))
    _, scoped = make_token(P.ROTATIONS_WRITE, merchants=["globex"])
    header = {"HTTP_AUTHORIZATION": f"Bearer {scoped.reveal()}"}
    answer = call("POST", f"/v1/rotations/{rotation.rotation_id}/abort", {}, **header)
    assert (answer.status_code, answer.body["code"]) == (404, "not_found")
    assert Rotation.objects.get(pk=rotation.pk).state == "scheduled"
