"""Break-glass acts in the console: listed until a second person has reviewed them."""

import pytest
from django.test import Client

from keyvault.access.permissions import Permission as P
from keyvault.access.roles import Role
from keyvault.domain.issuance import Delivery
from keyvault.models import AuditEntry, BreakGlass
from keyvault.services.issuance.requests import collect_key
from tests.admin.desk import Desk, address, browser, hidden, text_of
from tests.factories import approve, grant, issue_request, make_operator, on_host, request_key


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


@pytest.fixture
def claimed(desk: Desk) -> BreakGlass:
    """Approve `admin`'s request in the approver's name on a command line."""
    row = request_key(desk.production, by=desk.admin)
    approve(row, by=on_host(desk.approver))
    return BreakGlass.objects.get()


def submit(client: Client, act: BreakGlass, action: str) -> int:
    """Open the page of the action and submit it; return the status."""
    page = address(f"keyvault_breakglass_{action}", act.pk)
    shown = client.get(page)
    if shown.status_code != 200:
        return shown.status_code
    form = {} if action == "disown" else {"version": hidden(shown, "version")}
    return client.post(page, form).status_code


def offered(client: Client, act: BreakGlass) -> set[str]:
    """Return the actions that the page of the act offers."""
    shown = text_of(client.get(address("keyvault_breakglass_change", act.pk)))
    return {name for name in ("review", "confirm", "disown") if address(f"keyvault_breakglass_{name}", act.pk) in shown}


def test_break_glass_reviewed_by_its_requester_is_refused_with_the_reason(desk: Desk, claimed: BreakGlass) -> None:
    """A requester is not offered the review of their own request and is shown the reason."""
    client = browser(desk.admin)
    assert offered(client, claimed) == set()
    shown = text_of(client.get(address("keyvault_breakglass_change", claimed.pk)))
    assert "You requested this, so another person must review it" in shown
    assert "Break-glass actions to review" not in text_of(client.get("/admin/"))
    for action in ("review", "confirm", "disown"):
        page = address(f"keyvault_breakglass_{action}", claimed.pk)
        assert client.get(page).status_code == client.post(page, {"version": claimed.version}).status_code == 409
    claimed.refresh_from_db()
    assert (claimed.reviewed_at, claimed.first_reviewer) == (None, None)


def test_break_glass_claim_asks_its_approver_was_this_you(desk: Desk, claimed: BreakGlass) -> None:
    client = browser(desk.approver)
    front = text_of(client.get("/admin/"))
    assert "Was this you?" in front
    assert "Break-glass actions to review" not in front
    assert f"{claimed.account} · Key request approved" in front
    assert offered(client, claimed) == {"confirm", "disown"}
    assert "Was this you?" in text_of(client.get(address("keyvault_breakglass_change", claimed.pk)))
    assert submit(client, claimed, "confirm") == 302
    front = text_of(client.get("/admin/"))
    assert "Was this you?" not in front
    assert "Another person must review it too" in front
    assert offered(client, claimed) == set()
    claimed.refresh_from_db()
    assert (claimed.first_reviewer_person, claimed.reviewed_at) == (desk.approver.person, None)
    assert submit(browser(make_operator("third", Role.APPROVER)), claimed, "review") == 302
    claimed.refresh_from_db()
    assert claimed.reviewed_at is not None


def test_break_glass_claim_disowned_takes_two_others(desk: Desk, claimed: BreakGlass) -> None:
    """The approver raises an alarm. Each of two others reviews once."""
    client = browser(desk.approver)
    assert submit(client, claimed, "disown") == 302
    assert offered(client, claimed) == set()
    assert "approval.disowned" in text_of(client.get(address("keyvault_notice_changelist")))
    for username, closes in (("third", False), ("fourth", True)):
        other = browser(make_operator(username, Role.APPROVER))
        assert "Break-glass actions to review" in text_of(other.get("/admin/"))
        assert offered(other, claimed) == {"review"}
        assert submit(other, claimed, "review") == 302
        assert offered(other, claimed) == set()
        assert "Break-glass actions to review" not in text_of(other.get("/admin/"))
        claimed.refresh_from_db()
        assert (claimed.reviewed_at is not None) is closes
    assert claimed.first_reviewer is not None
    page = text_of(browser(desk.auditor).get(address("keyvault_breakglass_change", claimed.pk)))
    assert "third" in page
    assert "fourth" in page


def test_break_glass_list_is_readable_by_auditors_without_review(desk: Desk, act: BreakGlass) -> None:
    client = browser(desk.auditor)
    assert act.subject in text_of(client.get(address("keyvault_breakglass_changelist"), {"review": "open"}))
    assert act.subject not in text_of(client.get(address("keyvault_breakglass_changelist"), {"review": "done"}))
    page = text_of(client.get(address("keyvault_breakglass_change", act.pk)))
    assert address("keyvault_issuancerequest_change", act.subject) in page
    assert address("keyvault_breakglass_review", act.pk) not in page
