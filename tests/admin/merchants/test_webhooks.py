"""Webhook endpoints in the console: added, secret shown once, tested, disabled and enabled, monitored."""

import html
import re
from datetime import timedelta
from typing import Any

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.backends.outbound import OutboundError, Reply
from keyvault.models import WebhookBreaker, WebhookDelivery, WebhookEndpoint
from keyvault.services.webhooks.deliveries import deliver_due
from keyvault.services.webhooks.endpoints import add_endpoint, send_test, signing_secrets
from tests.admin.desk import Desk, address, browser, dump, text_of
from tests.factories import grant, now

URL = "https://acme.example/hooks"
HOST = "acme.example"
CHOSEN = {"merchant": "acme", "environment": "sandbox", "url": URL}
SECRET = re.compile(r"whsec_[A-Za-z0-9+/=]{44}")


def add(client: Any, **changed: str) -> Any:
    return client.post(address("keyvault_webhookendpoint_add"), {**CHOSEN, **changed})


def make(desk: Desk) -> WebhookEndpoint:
    return add_endpoint(grant(desk.tam, P.WEBHOOKS_WRITE, desk.sandbox), desk.sandbox, URL)[0]


def shown_once(answer: Any, client: Any) -> str:
    """Return the secret of the answer and assert that no cache, cookie, session or row has it."""
    assert answer.status_code == 200
    assert "no-store" in answer["Cache-Control"]
    found = SECRET.findall(html.unescape(text_of(answer)))
    assert len(set(found)) == 1
    secret = str(found[0])
    assert secret not in dump()
    assert secret not in str(dict(client.session))
    assert secret not in client.cookies.output()
    return secret


def test_endpoint_added_shows_its_secret_once(desk: Desk) -> None:
    client = browser(desk.tam)
    secret = shown_once(add(client), client)
    endpoint = WebhookEndpoint.objects.get()
    assert [each.reveal() for each in signing_secrets(endpoint, now())] == [secret]
    page = address("keyvault_webhookendpoint_change", endpoint.pk)
    text = text_of(client.get(page))
    assert URL in text
    assert "whsec_" not in text


@pytest.mark.parametrize(
    ("changed", "status", "message"),
    [
        ({"url": "http://acme.example/"}, 400, "https"),
        ({"url": "https://127.0.0.1/"}, 400, "a public address"),
        ({"url": ""}, 400, "required"),
        ({"merchant": "nobody"}, 404, "no merchant"),
        ({"environment": "moon"}, 400, "valid choice"),
    ],
)
def test_endpoint_invalid_is_refused_at_its_field(
    desk: Desk, changed: dict[str, str], status: int, message: str
) -> None:
    answer = add(browser(desk.tam), **changed)
    assert answer.status_code == status
    assert message in text_of(answer)
    assert not WebhookEndpoint.objects.exists()


def test_endpoint_added_twice_is_a_conflict(desk: Desk) -> None:
    client = browser(desk.tam)
    add(client)
    assert add(client).status_code == 409


def test_endpoint_form_opened_from_an_account_is_prefilled(desk: Desk) -> None:
    client = browser(desk.tam)
    text = text_of(client.get(address("keyvault_account_change", desk.production.pk)))
    (link,) = re.findall(r'href="([^"]*webhookendpoint/new/add/[^"]*)"', text)
    form = text_of(client.get(link.replace("&amp;", "&")))
    assert 'value="acme"' in form
    assert 'value="production" selected' in form


def test_secret_rotated_is_shown_once_and_the_page_shows_the_overlap(desk: Desk) -> None:
    endpoint = make(desk)
    client = browser(desk.tam)
    page = address("keyvault_webhookendpoint_rotate", endpoint.pk)
    assert client.post(page, {"overlap_hours": "169"}).status_code == 400
    secret = shown_once(client.post(page, {"overlap_hours": "24"}), client)
    endpoint.refresh_from_db()
    assert signing_secrets(endpoint, now())[0].reveal() == secret
    assert "Previous secret signs until" in text_of(client.get(address("keyvault_webhookendpoint_change", endpoint.pk)))
    assert "end immediately" in text_of(client.get(page))


def test_endpoint_is_disabled_and_enabled(desk: Desk) -> None:
    endpoint = make(desk)
    client = browser(desk.tam)
    disable = address("keyvault_webhookendpoint_disable", endpoint.pk)
    enable = address("keyvault_webhookendpoint_enable", endpoint.pk)
    assert client.post(disable, {"why": "they moved"}).status_code == 302
    assert client.post(disable, {"why": "they moved"}).status_code == 409
    text = text_of(client.get(address("keyvault_webhookendpoint_change", endpoint.pk)))
    assert "they moved" in text
    assert "Send test" not in text
    endpoint.refresh_from_db()
    assert client.post(enable, {"version": str(endpoint.version - 1)}).status_code == 409
    assert client.post(enable, {"version": str(endpoint.version)}).status_code == 302
    endpoint.refresh_from_db()
    assert endpoint.disabled_at is None


def test_test_message_outcome_is_shown_on_the_page(desk: Desk) -> None:
    endpoint = make(desk)
    client = browser(desk.tam)
    page = address("keyvault_webhookendpoint_change", endpoint.pk)
    assert client.post(address("keyvault_webhookendpoint_test", endpoint.pk)).status_code == 302
    assert "webhook.test" in text_of(client.get(page))

    def send(*args: Any, **options: Any) -> Reply:
        raise OutboundError("The connection was refused.")

    assert deliver_due(send=send) == 1
    text = text_of(client.get(page))
    assert "The connection was refused." in text
    assert "given up" in text
    assert "1 of 10" in text


def test_endpoint_paused_by_its_breaker_is_shown_and_listed(desk: Desk) -> None:
    endpoint = make(desk)
    client = browser(desk.auditor)
    until = now() + timedelta(minutes=5)
    WebhookBreaker.objects.create(endpoint=endpoint, failures=7, open_until=until)
    text = text_of(client.get(address("keyvault_webhookendpoint_change", endpoint.pk)))
    assert "badge-paused" in text
    assert "7 since the last reply" in text
    assert f"{until:%Y-%m-%d %H:%M:%S}" in text
    listed = {
        state: f">{HOST}<" in text_of(client.get(address("keyvault_webhookendpoint_changelist"), {"state": state}))
        for state in ("enabled", "paused", "disabled")
    }
    assert listed == {"enabled": False, "paused": True, "disabled": False}


def test_deliveries_show_their_next_attempt(desk: Desk) -> None:
    endpoint = make(desk)
    send_test(grant(desk.tam, P.WEBHOOKS_WRITE, desk.sandbox), endpoint)
    WebhookDelivery.objects.update(attempts=3, last_status=503, last_error="answered 503")
    text = text_of(browser(desk.auditor).get(address("keyvault_webhookendpoint_change", endpoint.pk)))
    assert "3 of 10" in text
    assert "answered 503" in text
    assert f"{WebhookDelivery.objects.get().due_at:%Y-%m-%d %H:%M}" in text


@pytest.mark.parametrize(("state", "is_shown"), [("enabled", True), ("disabled", False)])
def test_endpoints_are_listed_by_state(desk: Desk, state: str, is_shown: bool) -> None:
    make(desk)
    text = text_of(browser(desk.auditor).get(address("keyvault_webhookendpoint_changelist"), {"state": state}))
    assert (f">{HOST}<" in text) == is_shown


def test_url_is_shown_only_to_those_who_may_change_it_and_in_no_list(desk: Desk) -> None:
    """Guarantee: merchants put secrets into URLs; a list, and a page for readers, shows the host."""
    endpoint = make(desk)
    send_test(grant(desk.tam, P.WEBHOOKS_WRITE, desk.sandbox), endpoint)
    notice = WebhookDelivery.objects.get().notice
    WebhookDelivery.objects.update(due_at=now() - timedelta(days=1))
    page = address("keyvault_webhookendpoint_change", endpoint.pk)
    lists = [
        address("keyvault_webhookendpoint_changelist"),
        address("keyvault_account_change", desk.sandbox.pk),
        address("keyvault_merchant_change", desk.sandbox.merchant_id),
        address("keyvault_notice_change", notice.pk),
        address("health"),
    ]
    for operator, is_shown in ((desk.admin, True), (desk.auditor, False)):
        client = browser(operator)
        assert (URL in text_of(client.get(page))) == is_shown
        for each in lists:
            text = text_of(client.get(each))
            assert f">{HOST}<" in text, each
            assert URL not in text, each
