"""Merchants and accounts in the console."""

from html import unescape

import pytest

from keyvault.domain.errors import StateConflictError
from keyvault.models import Account, AuditEntry, Key, Merchant
from keyvault.services import offboarding
from tests.admin.desk import Desk, address, browser, hidden, text_of
from tests.domain.minting import mint
from tests.factories import issue, request_key


def test_merchant_created_has_an_account_in_each_environment(desk: Desk) -> None:
    answer = browser(desk.admin).post(
        address("keyvault_merchant_create"), {"merchant_id": "globex", "name": "Globex Travel"}, follow=True
    )
    assert "Globex Travel" in text_of(answer)
    assert set(Account.objects.filter(merchant="globex").values_list("environment", flat=True)) == {
        "sandbox",
        "production",
    }


@pytest.mark.parametrize(("merchant_id", "status"), [("Not A Slug", 400), ("acme", 409), ("", 400)])
def test_merchant_created_with_invalid_fields_is_refused_with_the_reason(
    desk: Desk, merchant_id: str, status: int
) -> None:
    answer = browser(desk.admin).post(
        address("keyvault_merchant_create"), {"merchant_id": merchant_id, "name": "<b>Acme</b>"}
    )
    assert answer.status_code == status
    assert "<b>Acme</b>" not in text_of(answer)
    assert Merchant.objects.count() == 1


def test_merchant_suspended_and_resumed(desk: Desk) -> None:
    client = browser(desk.admin)
    assert client.post(address("keyvault_merchant_suspend", "acme")).status_code == 302
    assert Merchant.objects.get().status == "suspended"
    assert client.post(address("keyvault_merchant_suspend", "acme")).status_code == 409
    page = address("keyvault_merchant_resume", "acme")
    client.post(page, {"version": hidden(client.get(page), "version")})
    assert Merchant.objects.get().status == "active"


def test_account_suspended_is_recorded_in_its_own_chain(desk: Desk) -> None:
    """An action on an account is in that account's audit chain, under the operator's name."""
    browser(desk.admin).post(address("keyvault_account_suspend", desk.production.pk))
    entry = AuditEntry.objects.latest("id")
    assert (entry.chain_id, entry.event, entry.actor) == (
        "account:acme/production",
        "account.suspended",
        "operator:admin",
    )
    assert {account.status for account in Account.objects.filter(environment="sandbox")} == {"active"}


def test_account_page_offers_to_request_its_key(desk: Desk) -> None:
    page = address("keyvault_account_change", desk.sandbox.pk)
    offer = f"{address('keyvault_issuancerequest_request')}?merchant=acme&environment=sandbox"
    client = browser(desk.tam)
    assert offer in unescape(text_of(client.get(page)))
    form = text_of(client.get(offer))
    assert 'name="merchant" value="acme"' in form
    assert '<option value="sandbox" selected>' in form
    assert offer not in unescape(text_of(browser(desk.auditor).get(page)))


def test_account_page_shows_its_base_url_and_the_limit_in_force(desk: Desk) -> None:
    page = text_of(browser(desk.auditor).get(address("keyvault_account_change", desk.sandbox.pk)))
    assert "/sandbox</code>" in page
    assert "25 per 1 second (default of the environment)" in page
    assert "1 hour" in page


ACTS = {
    "configure": ({"configuration": '{"theme": "blue"}'}, "client_configuration", {"theme": "blue"}),
    "origins": (
        {"origins": "https://shop.example\r\n  HTTP://localhost:3000\r\n"},
        "allowed_origins",
        ["https://shop.example", "http://localhost:3000"],
    ),
    "token-bound": ({"seconds": "600"}, "customer_token_seconds", 600),
}


@pytest.mark.parametrize("act", ACTS)
def test_account_changed_for_browsers_shows_it_on_its_page(desk: Desk, act: str) -> None:
    fields, column, value = ACTS[act]
    client, page = browser(desk.admin), address(f"keyvault_account_{act}", desk.sandbox.pk)
    version = hidden(client.get(page), "version")
    answer = client.post(page, {**fields, "version": version}, follow=True)
    assert answer.status_code == 200
    assert getattr(Account.objects.get(pk=desk.sandbox.pk), column) == value
    assert getattr(Account.objects.get(pk=desk.production.pk), column) != value
    shown = text_of(answer)
    assert any(message in shown for message in ("&quot;theme&quot;", "https://shop.example", "10 minutes"))
    # Submitting the same page again is a conflict.
    assert client.post(page, {**fields, "version": version}).status_code == 409


@pytest.mark.parametrize(
    ("act", "fields", "message"),
    [
        ("configure", {"configuration": "{"}, "Invalid JSON"),
        ("configure", {"configuration": '{"a": 1, "a": 2}'}, "duplicate member name"),
        ("configure", {"configuration": "[]"}, "a JSON object"),
        ("configure", {"configuration": '{"a": NaN}'}, "strings, integers"),
        ("configure", {"configuration": "[" * 50_000}, "Invalid JSON"),
        ("configure", {"configuration": f'{{"key": "{mint()}"}}'}, "secret"),
        ("configure", {"configuration": ""}, "required"),
        ("origins", {"origins": "https://shop.example\nhttps://*.example"}, "line 2"),
        ("token-bound", {"seconds": "59"}, "60 to 86400"),
        ("token-bound", {"seconds": "x"}, "whole number"),
    ],
)
def test_account_change_invalid_is_refused_with_the_reason(
    desk: Desk, act: str, fields: dict[str, str], message: str
) -> None:
    before = Account.objects.get(pk=desk.sandbox.pk)
    page = address(f"keyvault_account_{act}", desk.sandbox.pk)
    answer = browser(desk.admin).post(page, {**fields, "version": before.version})
    assert answer.status_code == 400
    assert message in text_of(answer)
    assert Account.objects.get(pk=desk.sandbox.pk).version == before.version


# ------------------------------------------------------------------------------------------------------ offboarding


def test_merchant_offboarded_in_the_console_counts_before_and_after(desk: Desk) -> None:
    """The page lists what would end and requires the id. The response lists what ended and what remains."""
    issue(desk.sandbox)
    issue(desk.production)
    request_key(desk.production)
    client, page = browser(desk.responder), address("keyvault_merchant_offboard", "acme")
    before = text_of(client.get(page))
    assert "1 key, 1 issuance request" in before
    answer = client.post(page, {"why": "contract ended", "merchant_id": "acme"}, follow=True)
    shown = text_of(answer)
    assert "Revoked in production: 1 key, 1 issuance request; sandbox: 1 key. Nothing remains." in shown
    assert "The merchant was offboarded" in shown
    assert Merchant.objects.get().status == "offboarded"
    assert set(Key.objects.values_list("state", flat=True)) == {"deactivated"}


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"why": "x", "merchant_id": "globex"}, 400),
        ({"why": "x", "merchant_id": ""}, 400),
        ({"why": "", "merchant_id": "acme"}, 400),
        ({}, 400),
    ],
)
def test_merchant_offboarded_without_its_id_or_a_reason_keeps_everything(
    desk: Desk, fields: dict[str, str], status: int
) -> None:
    """A mistake ends nothing: the id and a reason must be entered."""
    issue(desk.sandbox)
    answer = browser(desk.responder).post(address("keyvault_merchant_offboard", "acme"), fields)
    assert answer.status_code == status
    assert Merchant.objects.get().status == "active"
    assert Key.objects.get().state == "active"


def test_merchant_offboarded_is_only_offered_to_continue(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no way back; while something remains, the page offers to continue."""
    issue(desk.sandbox)
    client, page = browser(desk.admin), address("keyvault_merchant_offboard", "acme")

    def die(*_: object) -> None:
        raise StateConflictError("Somebody else changed this meanwhile.")

    with monkeypatch.context() as interrupted:
        interrupted.setattr(offboarding, "_end_account", die)
        assert client.post(page, {"why": "x", "merchant_id": "acme"}).status_code == 409
    detail = text_of(client.get(address("keyvault_merchant_change", "acme")))
    assert "Offboarding is not finished" in detail
    assert "sandbox: 1 key" in detail
    assert page in detail
    client.post(page, {"why": "x", "merchant_id": "acme"})
    detail = text_of(client.get(address("keyvault_merchant_change", "acme")))
    assert "Offboarding is not finished" not in detail
    for act in ("offboard", "suspend", "resume"):
        assert address(f"keyvault_merchant_{act}", "acme") not in detail
        assert client.post(address(f"keyvault_merchant_{act}", "acme"), {"version": 2}).status_code in {400, 409}
    account_page = text_of(client.get(address("keyvault_account_change", desk.sandbox.pk)))
    assert "The merchant was offboarded" in account_page
    assert address("keyvault_account_suspend", desk.sandbox.pk) not in account_page


def test_page_of_a_merchant_leads_to_a_key_request_for_it(desk: Desk) -> None:
    """Guarantee: who may request a key does so from the merchant's page, without typing its id."""
    page, form = (
        address("keyvault_merchant_change", "acme"),
        f"{address('keyvault_issuancerequest_request')}?merchant=acme",
    )
    assert f'href="{form}">Request a key' in text_of(browser(desk.tam).get(page))
    assert 'name="merchant" value="acme"' in text_of(browser(desk.tam).get(form))
    assert "Request a key</a>" not in text_of(browser(desk.auditor).get(page))


def test_page_of_a_merchant_leads_to_what_is_its_own(desk: Desk) -> None:
    """Guarantee: denials, webhooks, connections and limits of a merchant are one click from its page."""
    client = browser(desk.admin)
    shown = text_of(client.get(address("keyvault_merchant_change", "acme")))
    for page, column in (
        ("keyvault_refusal", "environment"),
        ("keyvault_webhookendpoint", "account__environment"),
        ("keyvault_providerconnection", "account__environment"),
        ("keyvault_limitoverride", "environment"),
    ):
        url = f"{address(f'{page}_changelist')}?q=acme&{column}__exact=production"
        assert f'href="{url.replace("&", "&amp;")}"' in shown
        assert client.get(url).status_code == 200
