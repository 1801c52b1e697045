"""The endpoint catalog on the service plane."""

import pytest

from keyvault.access.catalog import BUILT_IN
from keyvault.access.endpoint_description import authorization_panel
from keyvault.access.endpoints import EndpointDraft
from keyvault.access.permissions import Permission as P
from keyvault.access.roles import Role
from keyvault.domain.keys import KeyKind
from keyvault.services.catalog.endpoints import add_endpoint
from tests.factories import grant, make_token, the_operator

from .conftest import Call

pytestmark = pytest.mark.django_db


@pytest.mark.database
def test_endpoints_are_listed_with_their_authorization_panels(call: Call) -> None:
    draft = EndpointDraft(
        "invoices.retrieve",
        "GET",
        "/merchants/invoices/<invoice>",
        frozenset({KeyKind.PRIVATE}),
        limit_count=5,
        limit_seconds=1,
    )
    add_endpoint(grant(the_operator("admin", Role.KEY_ADMINISTRATOR), P.CATALOG_WRITE), draft)
    listed = {endpoint["name"]: endpoint for endpoint in call("GET", "/v1/endpoints").body["endpoints"]}
    assert listed.keys() == {*(endpoint.name for endpoint in BUILT_IN.endpoints), "invoices.retrieve"}
    for endpoint in BUILT_IN.endpoints:
        assert listed[endpoint.name]["authorization"] == dict(authorization_panel(endpoint))
    added = listed["invoices.retrieve"]
    assert (added["built_in"], added["limit"]) == (False, {"count": 5, "seconds": 1})
    assert added["authorization"]["X-Api-Key"] == "private API key"


def test_endpoints_without_the_permission_are_refused(call: Call) -> None:
    _, reader = make_token(P.KEYS_READ)
    response = call("GET", "/v1/endpoints", HTTP_AUTHORIZATION=f"Bearer {reader.reveal()}")
    assert (response.status_code, response.body["code"]) == (403, "permission_missing")
