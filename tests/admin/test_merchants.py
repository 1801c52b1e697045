"""Merchants and accounts in the console."""

import pytest

from keyvault.models import Account, AuditEntry, Merchant

from .desk import Desk, address, browser, hidden, text_of


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
def test_merchant_created_wrongly_is_refused_in_words(desk: Desk, merchant_id: str, status: int) -> None:
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
    """An act on an account stands in that account's audit chain, under the name of whoever did it."""
    browser(desk.admin).post(address("keyvault_account_suspend", desk.production.pk))
    entry = AuditEntry.objects.latest("id")
    assert (entry.chain_id, entry.event, entry.actor) == (
        "account:acme/production",
        "account.suspended",
        "operator:admin",
    )
    assert {account.status for account in Account.objects.filter(environment="sandbox")} == {"active"}


def test_account_page_offers_to_ask_for_its_key(desk: Desk) -> None:
    page = address("keyvault_account_change", desk.sandbox.pk)
    offer = f"{address('keyvault_issuancerequest_request')}?account={desk.sandbox.pk}"
    client = browser(desk.tam)
    assert offer in text_of(client.get(page))
    assert f'<option value="{desk.sandbox.pk}" selected>' in text_of(client.get(offer))
    assert offer not in text_of(browser(desk.auditor).get(page))
