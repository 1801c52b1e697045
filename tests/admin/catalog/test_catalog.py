"""The catalog in the console: every endpoint's panel; upstream endpoints are added and changed without a restart."""

import json
from typing import Any

import pytest

from keyvault.access.catalog import BUILT_IN, Endpoint, NoMatchingEndpoint
from keyvault.access.endpoint_description import authorization_panel
from keyvault.models import AuditEntry, CatalogEndpoint
from keyvault.services.catalog.catalog import find_endpoint
from tests.admin.desk import Desk, address, browser, hidden, make_endpoint, text_of

FIELDS = {
    "name": "refunds.create",
    "method": "POST",
    "path": "/refunds/<refund_id>",
    "credentials": ["private"],
    "bearer": "optional",
    "merchant_from": "",
    "store_from": "header:X-Store-Id",
    "limit_count": "5",
    "limit_seconds": "60",
    "on_limiter_loss": "refuse",
    "summary": "Refunds an order.",
}


def post_add(desk: Desk, **changed: Any) -> Any:
    return browser(desk.admin).post(address("keyvault_catalogendpoint_add"), {**FIELDS, **changed}, follow=True)


def test_endpoint_added_in_the_console_is_in_the_catalog_immediately(desk: Desk) -> None:
    answer = post_add(desk)
    assert "Verify and the gateways accept it from now on" in text_of(answer)
    found = find_endpoint("refunds.create")
    assert isinstance(found, Endpoint)
    assert (found.method, found.path, found.bearer, found.on_limiter_loss) == (
        "POST",
        "/refunds/<refund_id>",
        "optional",
        "refuse",
    )
    assert str(found.store_from) == "header:X-Store-Id"
    entry = AuditEntry.objects.latest("id")
    assert (entry.event, entry.actor) == ("endpoint.added", "operator:admin")


def test_endpoint_with_errors_shows_each_at_its_field(desk: Desk) -> None:
    answer = post_add(desk, name="x", path="/v1/keys", store_from="header:Cookie", limit_seconds="")
    assert answer.status_code == 400
    text = text_of(answer)
    assert "words of a-z" in text
    assert "is reserved for this service" in text
    assert "has another purpose" in text
    assert "set both numbers or neither" in text
    assert 'value="header:Cookie"' in text
    assert not CatalogEndpoint.objects.exists()


def test_endpoint_changed_keeps_the_other_fields(desk: Desk) -> None:
    row = make_endpoint(summary="Refunds an order.")
    client = browser(desk.admin)
    form = client.get(address("keyvault_catalogendpoint_edit", row.pk))
    text = text_of(form)
    assert 'value="/refunds/&lt;refund_id&gt;"' in text
    changed = {**FIELDS, "version": hidden(form, "version"), "method": "PUT"}
    answer = client.post(address("keyvault_catalogendpoint_edit", row.pk), changed, follow=True)
    assert "Changed endpoint" in text_of(answer)
    found = find_endpoint("refunds.create")
    assert isinstance(found, Endpoint)
    assert found.method == "PUT"
    details = json.loads(bytes(AuditEntry.objects.latest("id").body))["details"]
    assert (details["before"]["Method"], details["rule"]["Method"]) == ("POST", "PUT")


def test_endpoint_changed_from_an_outdated_page_is_a_conflict(desk: Desk) -> None:
    """A rule is changed only by an operator who saw the current version."""
    row = make_endpoint()
    client = browser(desk.admin)
    seen = hidden(client.get(address("keyvault_catalogendpoint_edit", row.pk)), "version")
    url = address("keyvault_catalogendpoint_edit", row.pk)
    assert client.post(url, {**FIELDS, "version": seen}).status_code == 302
    assert client.post(url, {**FIELDS, "version": seen, "method": "PUT"}).status_code == 409


def test_endpoint_withdrawn_and_restored_from_its_page(desk: Desk) -> None:
    row = make_endpoint()
    client = browser(desk.admin)
    client.post(address("keyvault_catalogendpoint_withdraw", row.pk))
    assert isinstance(find_endpoint("refunds.create"), NoMatchingEndpoint)
    page = text_of(client.get(address("keyvault_catalogendpoint_change", row.pk)))
    assert address("keyvault_catalogendpoint_restore", row.pk) in page
    assert address("keyvault_catalogendpoint_edit", row.pk) not in page
    form = client.get(address("keyvault_catalogendpoint_restore", row.pk))
    client.post(address("keyvault_catalogendpoint_restore", row.pk), {"version": hidden(form, "version")})
    assert isinstance(find_endpoint("refunds.create"), Endpoint)


@pytest.mark.parametrize("page", ["changelist", "panels"])
def test_catalog_pages_show_built_in_and_added_endpoints(desk: Desk, page: str) -> None:
    make_endpoint()
    text = text_of(browser(desk.auditor).get(address(f"keyvault_catalogendpoint_{page}")))
    for name in ("refunds.create", *(endpoint.name for endpoint in BUILT_IN.endpoints)):
        assert name in text


def test_catalog_panel_is_the_same_everywhere(desk: Desk) -> None:
    """The panels page, the endpoint's page and the explanation all use `authorization_panel`."""
    make_endpoint(merchant_from="path:refund_id", limit_count=5, limit_seconds=60)
    client = browser(desk.approver)
    pages = [
        text_of(client.get(address("keyvault_catalogendpoint_panels"))),
        text_of(client.get(address("keyvault_catalogendpoint_change", "refunds.create"))),
        text_of(client.post(address("explain"), {"environment": "sandbox", "endpoint": "refunds.create"})),
    ]
    found = find_endpoint("refunds.create")
    assert isinstance(found, Endpoint)
    for label, phrase in authorization_panel(found):
        for text in pages:
            assert f"<dt>{label}</dt>" in text
            assert phrase.replace("<", "&lt;").replace(">", "&gt;").replace("'", "&#x27;") in text


def test_catalog_list_filters_by_state(desk: Desk) -> None:
    row = make_endpoint()
    client = browser(desk.admin)
    assert address("keyvault_catalogendpoint_change", row.pk) in text_of(
        client.get(address("keyvault_catalogendpoint_changelist"), {"state": "active"})
    )
    assert address("keyvault_catalogendpoint_change", row.pk) not in text_of(
        client.get(address("keyvault_catalogendpoint_changelist"), {"state": "withdrawn"})
    )
