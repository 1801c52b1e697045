"""Pages of errors, and forms that are sent twice."""

import re
from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import PermissionDenied
from django.test import Client

from keyvault.access.roles import Role
from keyvault.admin.framework import form_tokens
from keyvault.admin.framework.middleware import ConsoleAccessMiddleware
from keyvault.admin.site import ConsoleSite
from keyvault.models import IdempotentRequest, IssuanceRequest
from rotation.models import Rotation
from tests.admin.desk import Desk, address, browser, text_of
from tests.factories import issue, make_operator, now

pytestmark = pytest.mark.database

FRAME = '<aside class="side"'


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a defect")


def deny(*_: Any, **__: Any) -> Any:
    raise PermissionDenied


@pytest.mark.parametrize(
    ("path", "defect", "status"),
    [("/admin/no%0Aroute/", None, 404), ("/admin/", deny, 403), ("/admin/", fail, 500)],
)
def test_error_that_no_view_answered_is_shown_in_the_frame(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, path: str, defect: Any, status: int
) -> None:
    """Guarantee: the operator keeps the menu, and can name the request."""
    client = browser(desk.admin)
    if defect is not None:
        monkeypatch.setattr(ConsoleAccessMiddleware, "process_view", defect)
    answer = client.get(path)
    shown = text_of(answer)
    assert answer.status_code == status
    assert FRAME in shown
    assert answer["X-Request-Id"] in shown
    assert "default-src 'none'" in answer["Content-Security-Policy"]
    assert "a defect" not in shown


def test_error_of_the_frame_itself_is_shown_without_it(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: the page of an error never fails."""
    client = browser(desk.admin)
    monkeypatch.setattr(ConsoleSite, "each_context", fail)
    answer = client.get("/admin/")
    assert answer.status_code == 500
    assert FRAME not in text_of(answer)
    assert answer["X-Request-Id"] in text_of(answer)


def test_error_before_the_sign_in_shows_no_menu(monkeypatch: pytest.MonkeyPatch, db: None) -> None:
    monkeypatch.setattr(ConsoleAccessMiddleware, "process_view", fail)
    answer = Client(raise_request_exception=False).get("/admin/")
    assert answer.status_code == 500
    assert FRAME not in text_of(answer)


# --- forms that are sent twice ---------------------------------------------------------------------------------


def open_form(client: Client, url: str) -> str:
    found = re.search(r'name="form_token" value="([^"]+)"', text_of(client.get(url)))
    assert found is not None
    return found[1]


def test_form_that_is_sent_twice_makes_one_request(desk: Desk) -> None:
    """Guarantee: without scripts, too, a double click makes one request, and leads to it."""
    client, url = browser(make_operator("somebody", *Role)), address("keyvault_issuancerequest_request")
    typed = {
        "form_token": open_form(client, url),
        "merchant": "acme",
        "environment": "production",
        "kind": "private",
        "label": "checkout",
        "delivery": "secret_backend",
    }
    first, second = client.post(url, typed), client.post(url, typed)
    (row,) = IssuanceRequest.objects.all()
    assert first["Location"] == second["Location"] == address("keyvault_issuancerequest_change", row.pk)
    changed = client.post(url, {**typed, "label": "billing"})
    assert IssuanceRequest.objects.count() == 2
    assert changed["Location"] != first["Location"]
    assert IssuanceRequest.objects.get(label="billing").pk in changed["Location"]
    again = client.post(url, {**typed, "form_token": open_form(client, url)})
    assert again["Location"] not in {first["Location"], changed["Location"]}


def test_form_of_a_rotation_that_is_sent_twice_leads_to_the_rotation(desk: Desk) -> None:
    key, _ = issue(desk.production, by=desk.tam)
    client, url = browser(desk.tam), address("rotation_rotation_request")
    typed = {"form_token": open_form(client, url), "credential_id": key.credential_id, "reason": "yearly"}
    typed |= {"at_deadline": "stall", "reinstatement": "once", "time_zone": "UTC"}
    locations = {client.post(url, typed).get("Location") for _ in range(2)}
    assert locations == {address("rotation_rotation_change", Rotation.objects.get().pk)}


def test_form_that_is_sent_again_while_it_is_processed_waits_for_the_result(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: a second submission never creates a second row, even if the first one takes long."""
    client, url = browser(make_operator("somebody", *Role)), address("keyvault_issuancerequest_request")
    typed = {"form_token": open_form(client, url), "merchant": "acme", "environment": "sandbox", "kind": "private"}
    typed |= {"label": "checkout", "delivery": "secret_backend"}
    client.post(url, typed)
    IdempotentRequest.objects.update(status=None, held_until=now() + timedelta(minutes=1))
    waited: list[float] = []
    monkeypatch.setattr(form_tokens, "pause", waited.append)
    answer = client.post(url, typed)
    assert answer.status_code == 409
    assert "still being processed" in text_of(answer)
    assert len(waited) > 1
    assert IssuanceRequest.objects.count() == 1
