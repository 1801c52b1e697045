"""Idempotency-Key over REST: repeated rotation requests, and the replay of show-once secrets."""

from datetime import timedelta
from typing import Any

import pytest
from rest_framework.test import APIRequestFactory
from rest_framework.views import APIView

from keyvault.api.idempotency import answer_once
from keyvault.domain.environments import Environment
from keyvault.domain.errors import IdempotencyError
from keyvault.domain.plaintext import Plaintext
from keyvault.models.idempotency import IdempotentRequest
from keyvault.services.idempotency import HOLD_SECONDS, SEALED_FOR, Effect, StoredResponse
from rotation.models import Rotation
from tests.factories import account, have_peppers, issue, now

from .conftest import Call

pytestmark = [pytest.mark.django_db]

KEY = "HTTP_IDEMPOTENCY_KEY"


@pytest.fixture
def wanted(token: str) -> dict[str, Any]:
    key, _ = issue(account())
    return {"credential_id": key.credential_id}


def test_rotation_requested_twice_with_one_key_is_created_once(call: Call, wanted: dict[str, Any]) -> None:
    """The retry gets the same status and bytes and is marked as a replay; a quoted key equals the unquoted one."""
    first = call("POST", "/v1/rotations", wanted, **{KEY: "abc"})
    again = call("POST", "/v1/rotations", wanted, **{KEY: '"abc"'})
    assert (first.status_code, again.status_code) == (201, 201)
    assert again.content == first.content
    assert "Idempotent-Replayed" not in first
    assert again["Idempotent-Replayed"] == "true"
    assert Rotation.objects.count() == 1


def test_rotation_requested_without_a_key_is_refused(call: Call, wanted: dict[str, Any]) -> None:
    response = call("POST", "/v1/rotations", wanted)
    assert (response.status_code, response.body["code"]) == (400, "idempotency_key_missing")
    assert not Rotation.objects.exists()


@pytest.mark.parametrize(
    ("key", "body", "status", "code"),
    [
        ("abc", b'{"credential_id": "%s"} ', 422, "idempotency_body_mismatch"),
        ("other", b'{"credential_id": "%s"}', 409, "state_conflict"),
        ("", b'{"credential_id": "%s"}', 400, "idempotency_key_missing"),
        ("x" * 256, b'{"credential_id": "%s"}', 400, "request_invalid"),
        ("abc", b'{"credential_id": 7, "not": "%s"}', 422, "idempotency_body_mismatch"),
        ("abc", b"no json %s", 422, "idempotency_body_mismatch"),
        ("", b"no json %s", 400, "idempotency_key_missing"),
        ("other", b"no json %s", 400, "request_invalid"),
        ("other", b'{"credential_id": "crd_%s"}', 404, "not_found"),
    ],
)
def test_rotation_requested_again_with_another_body_is_refused(
    call: Call, wanted: dict[str, Any], key: str, body: bytes, status: int, code: str
) -> None:
    """One more byte makes it another body, valid or not; an invalid key executes nothing."""
    sent = b'{"credential_id": "%s"}' % wanted["credential_id"].encode()
    assert call("POST", "/v1/rotations", sent, **{KEY: "abc"}).status_code == 201
    response = call("POST", "/v1/rotations", body % wanted["credential_id"].encode(), **{KEY: key})
    assert (response.status_code, response.body["code"]) == (status, code)
    assert Rotation.objects.count() == 1


def test_rotation_request_in_progress_answers_retry_after(call: Call, wanted: dict[str, Any]) -> None:
    call("POST", "/v1/rotations", wanted, **{KEY: "abc"})
    IdempotentRequest.objects.update(status=None, held_until=now() + timedelta(seconds=HOLD_SECONDS))
    response = call("POST", "/v1/rotations", wanted, **{KEY: "abc"})
    assert (response.status_code, response.body["code"]) == (409, "idempotency_in_progress")
    assert 1 <= int(response["Retry-After"]) <= HOLD_SECONDS


def test_rotation_replayed_to_a_token_without_the_permission_is_refused(call: Call, wanted: dict[str, Any]) -> None:
    """Credentials are checked before any replay: a stored answer does not bypass a permission."""
    call("POST", "/v1/rotations", wanted, **{KEY: "abc"})
    response = call("POST", "/v1/rotations", wanted, **{KEY: "abc", "HTTP_AUTHORIZATION": "Bearer nothing"})
    assert (response.status_code, response.body["code"]) == (401, "service_token_invalid")


# ------------------------------------------------------------------------------------------- show-once secrets

SECRET = "kv_cat_sbx_" + "s" * 60


def ask(path: str = "/make", body: bytes = b"{}", *, at: Any = None) -> Any:
    moment = at or now()

    def effect() -> StoredResponse:
        return StoredResponse(201, {"token": None, "token_id": "1"}, "token", Plaintext(SECRET), "1")

    def prepare() -> Effect:
        return effect

    class View(APIView):
        permission_classes = ()

        def post(self, request: Any) -> Any:
            return answer_once(
                request,
                holder="crd_1",
                endpoint="tokens.create",
                environment=Environment.SANDBOX,
                now=moment,
                prepare=prepare,
            )

        def handle_exception(self, exc: Exception) -> Any:
            raise exc

    sent = APIRequestFactory().post(path, body, content_type="application/json", headers={"Idempotency-Key": "k"})
    return View.as_view()(sent).render()


def test_secret_replayed_in_time_is_identical() -> None:
    """A client that lost the first answer gets it in full; after the retention time it learns that the secret is
    gone.
    """
    have_peppers()
    begun = now()
    first, again = ask(at=begun), ask(at=begun + timedelta(seconds=1))
    assert first.content == again.content
    assert first.data == {"token": SECRET, "token_id": "1"}
    late = ask(at=begun + SEALED_FOR)
    assert (late.status_code, late["Idempotent-Replayed"]) == (201, "true")
    assert late.data == {"token": None, "token_id": "1", "secret_available": False}


def test_secret_of_another_path_is_never_replayed() -> None:
    """The path names the customer: the same key and body on another path are another request, and refused."""
    have_peppers()
    ask("/customers/one/access-tokens")
    with pytest.raises(IdempotencyError) as caught:
        ask("/customers/two/access-tokens")
    assert caught.value.code == "idempotency_body_mismatch"
