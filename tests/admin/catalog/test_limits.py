"""Limits in the console: shown with their defaults, set for an account, an endpoint or a pair, and cleared."""

from typing import Any

import pytest

from keyvault.access.limits import Limit
from keyvault.models import AuditEntry, LimitOverride
from keyvault.services.limits.overrides import account_limit_in_force, endpoint_limit_in_force
from tests.admin.desk import Desk, address, browser, text_of
from tests.factories import SANDBOX, account

FIELDS = {"environment": "sandbox", "merchant": "acme", "endpoint": "", "requests": "7", "in_seconds": "60"}


def post_set(desk: Desk, **changed: Any) -> Any:
    return browser(desk.tam).post(address("keyvault_limitoverride_set"), {**FIELDS, **changed}, follow=True)


def test_limit_of_an_account_is_set_and_shown_on_its_page(desk: Desk) -> None:
    assert "The limit of acme/sandbox is 7 per 60 s" in text_of(post_set(desk))
    assert account_limit_in_force(account("acme")).limit == Limit(7, 60)
    page = text_of(browser(desk.auditor).get(address("keyvault_account_change", desk.sandbox.pk)))
    assert "7 per 60 s" in page
    entry = AuditEntry.objects.latest("id")
    assert (entry.event, entry.actor, entry.chain_id) == ("limit.set", "operator:tam", "account:acme/sandbox")


@pytest.mark.parametrize("whose", [{}, {"endpoint": "orders.create"}, {"merchant": "", "endpoint": "orders.create"}])
def test_limit_form_left_empty_changes_nothing_and_keeps_the_form(desk: Desk, whose: dict[str, str]) -> None:
    """A form submitted by mistake never removes an account's limit."""
    post_set(desk, **whose)
    entries = AuditEntry.objects.count()
    answer = post_set(desk, **whose, requests="", in_seconds="")
    assert answer.status_code == 400
    assert "Nothing was changed. Enter both numbers, or select" in text_of(answer)
    assert 'name="requests"' in text_of(answer)
    assert AuditEntry.objects.count() == entries
    if whose.get("endpoint"):
        assert LimitOverride.objects.get().limit_count == 7
    else:
        assert account_limit_in_force(account("acme")).limit == Limit(7, 60)


def test_limit_is_reset_to_the_default_only_when_selected(desk: Desk) -> None:
    post_set(desk)
    assert "the default again" in text_of(post_set(desk, requests="", in_seconds="", default="on"))
    assert account_limit_in_force(account("acme")).limit == Limit(25, 1)


def test_limit_of_an_endpoint_and_of_a_pair_are_set_and_cleared(desk: Desk) -> None:
    post_set(desk, merchant="", endpoint="orders.create", requests="5", in_seconds="1")
    post_set(desk, endpoint="orders.create", requests="9", in_seconds="1")
    acme = account("acme")
    assert endpoint_limit_in_force(SANDBOX, "orders.create", acme).limit == Limit(9, 1)
    pair = LimitOverride.objects.get(account=acme)
    client = browser(desk.tam)
    assert "Limit cleared" in text_of(client.post(address("keyvault_limitoverride_clear", pair.pk), follow=True))
    assert endpoint_limit_in_force(SANDBOX, "orders.create", acme).limit == Limit(5, 1)
    assert client.get(address("keyvault_limitoverride_clear", pair.pk)).status_code == 409


@pytest.mark.parametrize(
    ("changed", "status", "message"),
    [
        ({"merchant": "nobody"}, 404, "There is no merchant nobody"),
        ({"merchant": ""}, 400, "Enter a merchant, an endpoint, or both."),
        ({"in_seconds": ""}, 400, "Enter both numbers, or select"),
        ({"default": "on"}, 400, "Enter two numbers or choose the default, not both."),
        ({"requests": "0"}, 400, "greater than or equal to 1"),
        ({"requests": "1000001"}, 400, "less than or equal to 1000000"),
        ({"endpoint": "no.such"}, 400, "Select a valid choice"),
        ({"endpoint": "credentials.revoke_self"}, 400, "Select a valid choice"),
    ],
)
def test_limit_invalid_is_refused_with_the_reason(
    desk: Desk, changed: dict[str, str], status: int, message: str
) -> None:
    answer = post_set(desk, **changed)
    assert answer.status_code == status
    assert message in text_of(answer)
    assert (account("acme").limit_count, LimitOverride.objects.count()) == (None, 0)


def test_limit_list_shows_the_defaults(desk: Desk) -> None:
    """Every limit that can stop a merchant is on a page, including unchanged defaults."""
    text = text_of(browser(desk.approver).get(address("keyvault_limitoverride_changelist")))
    assert "25 per 1 s" in text
    assert "100 per 1 s" in text
    post_set(desk)
    text = text_of(browser(desk.approver).get(address("keyvault_limitoverride_changelist")))
    assert "7 per 60 s" in text


def test_limit_form_opened_from_an_account_is_prefilled(desk: Desk) -> None:
    page = text_of(browser(desk.tam).get(address("keyvault_account_change", desk.sandbox.pk)))
    query = "?merchant=acme&amp;environment=sandbox"
    assert address("keyvault_limitoverride_set") + query in page
    form = browser(desk.tam).get(address("keyvault_limitoverride_set"), {"merchant": "acme", "environment": "sandbox"})
    assert 'value="acme"' in text_of(form)
    assert address("keyvault_limitoverride_set") not in text_of(
        browser(desk.auditor).get(address("keyvault_account_change", desk.sandbox.pk))
    )
