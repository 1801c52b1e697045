"""Break-glass acts in the console: listed until a second person has reviewed them."""

from dataclasses import replace

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import Channel
from keyvault.domain.issuance import Delivery
from keyvault.models import AuditEntry, BreakGlass
from keyvault.services.issuance.requests import collect_key
from tests.admin.desk import Desk, address, browser, hidden, text_of
from tests.factories import approve, grant, issue_request, request_key


@pytest.fixture
def act(desk: Desk) -> BreakGlass:
    """Show a production key to `admin`."""
    row = request_key(desk.production, delivery=Delivery.SHOW_ONCE, by=desk.admin)
    approve(row, by=desk.approver)
    issue_request(row)
    collect_key(grant(desk.admin, P.ISSUANCE_COLLECT, desk.production), row)
    found: BreakGlass = BreakGlass.objects.get()
    return found


def test_break_glass_reviewed_by_a_second_person_is_no_longer_listed(desk: Desk, act: BreakGlass) -> None:
    client = browser(desk.approver)
    assert "to review" in text_of(client.get("/admin/"))
    page = address("keyvault_breakglass_review", act.pk)
    assert client.post(page, {"version": hidden(client.get(page), "version")}).status_code == 302
    act.refresh_from_db()
    assert act.reviewer_person == desk.approver.person
    assert AuditEntry.objects.latest("id").event == "break_glass.reviewed"
    assert client.post(page, {"version": act.version}).status_code == 409


def test_break_glass_reviewed_by_whoever_asked_for_it_is_refused_and_says_why(desk: Desk) -> None:
    """A requester is not offered the review of their own request and is shown the reason."""
    row = request_key(desk.production, by=desk.admin)
    approve(row, by=replace(desk.approver, channel=Channel.COMMAND_LINE, host_user="root"))
    act = BreakGlass.objects.get()
    client, page = browser(desk.admin), address("keyvault_breakglass_review", act.pk)
    shown = text_of(client.get(address("keyvault_breakglass_change", act.pk)))
    assert page not in shown
    assert "You requested this, so another person must review it" in shown
    assert "Break-glass actions to review" not in text_of(client.get("/admin/"))
    assert client.get(page).status_code == 409
    assert client.post(page, {"version": act.version}).status_code == 409
    act.refresh_from_db()
    assert act.reviewed_at is None
    claimed = text_of(browser(desk.approver).get(address("keyvault_breakglass_change", act.pk)))
    assert page not in claimed
    assert "This was done under your name, so another person must review it" in claimed


def test_break_glass_list_is_readable_by_auditors_without_review(desk: Desk, act: BreakGlass) -> None:
    client = browser(desk.auditor)
    assert act.subject in text_of(client.get(address("keyvault_breakglass_changelist"), {"review": "open"}))
    assert act.subject not in text_of(client.get(address("keyvault_breakglass_changelist"), {"review": "done"}))
    page = text_of(client.get(address("keyvault_breakglass_change", act.pk)))
    assert address("keyvault_issuancerequest_change", act.subject) in page
    assert address("keyvault_breakglass_review", act.pk) not in page
