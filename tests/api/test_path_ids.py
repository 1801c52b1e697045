"""Ids in paths of the service plane: the token is judged first, and then an id of any form is absent alike."""

from dataclasses import dataclass

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.models import Change
from rotation.domain.plan_fields import PlanOverrides
from rotation.services.rotations.requests import request_rotation
from tests.factories import account, grant, issue, make_token, now, request_key
from tests.rotation import scene

from .conftest import Call

pytestmark = [pytest.mark.database, pytest.mark.django_db]


@dataclass(frozen=True)
class Route:
    """`path` with its id as `{}`; `kind` names the id; `absent` is a well-formed id without an object."""

    method: str
    path: str
    permission: P
    kind: str
    absent: str


ROUTES = (
    Route("GET", "/v1/keys/{}", P.KEYS_READ, "key", "0" * 16),
    Route("POST", "/v1/keys/{}/revoke", P.KEYS_REVOKE, "key", "0" * 16),
    Route("GET", "/v1/credentials/{}", P.KEYS_READ, "credential", "crd_" + "0" * 20),
    Route("GET", "/v1/revocations/{}", P.KEYS_READ, "sequence", "9" * 18),
    Route("GET", "/v1/issuance-requests/{}", P.ISSUANCE_REQUEST, "issuance request", "req_" + "0" * 20),
    Route("POST", "/v1/issuance-requests/{}/collect", P.ISSUANCE_COLLECT, "issuance request", "req_" + "0" * 20),
    Route("GET", "/v1/rotations/{}", P.ROTATIONS_READ, "rotation", "rot_" + "0" * 20),
    Route("POST", "/v1/rotations/{}/abort", P.ROTATIONS_WRITE, "rotation", "rot_" + "0" * 20),
)

MALFORMED = ("unknown", "short", "-1", "1.0", "1_0", "9" * 20, "9" * 5_000, "a" * 8_000, "A-._~!$&'()*+,=:@")
"""Path segments that are no id: every character of a canonical path, and numbers that no column can store."""

routes = pytest.mark.parametrize("route", ROUTES, ids=[f"{route.method} {route.path}" for route in ROUTES])


def bearer(*permissions: P, merchants: list[str] | None = None) -> dict[str, str]:
    return {"HTTP_AUTHORIZATION": f"Bearer {make_token(*permissions, merchants=merchants)[1].reveal()}"}


def make_foreign_id(kind: str) -> str:
    """Return the id of an object of acme."""
    place = account("acme")
    if kind == "issuance request":
        return request_key(place).issuance_request_id
    key, _ = issue(place)
    if kind == "rotation":
        asking = grant(scene.tam(), P.ROTATIONS_WRITE, place, at=now())
        return request_rotation(asking, key.credential, PlanOverrides()).rotation_id
    sequence = str(Change.objects.filter(subject_kind="key").latest("sequence").sequence)
    return {"key": key.key_id, "credential": key.credential_id, "sequence": sequence}[kind]


@routes
def test_id_of_any_form_is_read_only_after_the_token(call: Call, route: Route) -> None:
    """Guarantee: a client without a token, or without the permission, learns nothing from the form of an id."""
    other = bearer(P.KEYS_VERIFY)
    exposed = call(route.method, route.path.format(f"kv_prv_sbx_{'a' * 65}"), HTTP_AUTHORIZATION="")
    assert (exposed.status_code, exposed.body["code"]) == (400, "credential_in_url")
    for identity in (route.absent, *MALFORMED):
        path = route.path.format(identity)
        response = call(route.method, path, HTTP_AUTHORIZATION="")
        assert (response.status_code, response.body["code"]) == (401, "service_token_invalid"), identity
        assert response["WWW-Authenticate"].startswith("Bearer")
        response = call(route.method, path, **other)
        assert (response.status_code, response.body["code"]) == (403, "permission_missing"), identity


@routes
def test_id_of_another_form_is_absent_like_a_foreign_one(call: Call, route: Route) -> None:
    """Guarantee: malformed, unknown and other merchants' ids have one body, and none causes a server error."""
    own = bearer(route.permission, merchants=["globex"])
    bodies = {}
    for identity in (make_foreign_id(route.kind), route.absent, *MALFORMED):
        response = call(route.method, route.path.format(identity), {"reason": "superseded"}, **own)
        assert response.status_code == 404, identity
        del response.body["request_id"]
        bodies[identity] = response.body
    assert bodies == dict.fromkeys(bodies, bodies[route.absent])
    assert bodies[route.absent]["code"] == "not_found"


@routes
def test_id_of_any_form_has_the_methods_of_its_path(call: Call, route: Route) -> None:
    wrong = "GET" if route.method == "POST" else "POST"
    for identity in (route.absent, "short"):
        response = call(wrong, route.path.format(identity), {})
        assert (response.status_code, response.body["code"]) == (405, "method_not_allowed"), identity
        assert response["Allow"] == ("POST" if route.method == "POST" else "GET, HEAD")


def test_sequence_in_another_spelling_is_absent(call: Call) -> None:
    """Guarantee: only digits name a sequence, although Python reads other spellings of the same number."""
    issue(account("acme"))
    sequence = Change.objects.latest("sequence").sequence
    assert call("GET", f"/v1/revocations/{sequence}").status_code == 200
    for spelling in (f"+{sequence}", f"0_{sequence}", f"{sequence}.0"):
        assert call("GET", f"/v1/revocations/{spelling}").status_code == 404, spelling
