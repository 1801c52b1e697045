"""The page of approvals: what waits for the operator, approved together and each for itself."""

import html
import re
from typing import Any
from unittest import mock

import pytest
from django.test import Client

from keyvault.access.permissions import Permission as P
from keyvault.access.roles import Role
from keyvault.access.scopes import AccessScope
from keyvault.admin.framework import attention, step_up
from keyvault.admin.oversight import approvals
from keyvault.domain.issuance import Delivery, IssuanceState
from keyvault.models import AuditEntry, IssuanceRequest
from keyvault.services.issuance.requests import reject_issuance
from rotation.domain.events import RotationState
from rotation.domain.plan_fields import PlanOverrides
from rotation.models import Rotation
from rotation.services.rotations.requests import request_rotation
from tests.admin.desk import Desk, address, browser, text_of
from tests.factories import grant, issue, make_merchant, make_operator, request_key

_HIDDEN = re.compile(r'<input type="hidden" name="([^"]+)" value="([^"]*)"')


def ask_rotation(desk: Desk, overrides: PlanOverrides = PlanOverrides()) -> Rotation:  # noqa: B008  it is frozen
    key, _ = issue(desk.production, label="till")
    return request_rotation(grant(desk.tam, P.ROTATIONS_WRITE, desk.production), key.credential, overrides)


def choice(row: Any) -> str:
    return f"{row._meta.label_lower}:{row.pk}"


def review(client: Client, *rows: Any) -> Any:
    return client.get(address("approvals_review"), {"item": [choice(row) for row in rows]})


def submit(client: Client, shown: Any) -> Any:
    """Send the form of the review as it was shown."""
    fields: dict[str, list[str]] = {}
    for name, value in _HIDDEN.findall(text_of(shown)):
        if name not in {"csrfmiddlewaretoken", "next"}:
            fields.setdefault(html.unescape(name), []).append(html.unescape(value))
    return client.post(address("approvals_review"), fields)


def state_of(row: Any) -> str:
    row.refresh_from_db()
    return str(row.state)


def test_approvals_lists_what_the_operator_may_approve_and_what_it_changes(desk: Desk) -> None:
    """Guarantee: requests of others are listed with what they change and what is unusual; own ones are not."""
    request_key(desk.production, label="backend", delivery=Delivery.SHOW_ONCE, by=desk.tam)
    request_key(desk.production, label="mine", by=desk.admin)
    ask_rotation(desk, PlanOverrides(reason="yearly", quarantine_seconds=172_800))
    client = browser(desk.admin)
    page = text_of(client.get(address("approvals")))
    assert "Key requests to approve" in page
    assert "acme/production · backend" in page
    assert "acme/production · till" in page
    assert "mine" not in page
    assert page.count("not the default</span>") == 2
    assert "Nothing awaits your approval" not in page
    assert 'value="keyvault.issuancerequest:' in page
    assert page.count("checked") == 0
    select = client.get(address("approvals"), {"select": "key-requests-to-approve"})
    assert text_of(select).count(" checked") == 1


def test_approvals_together_are_each_recorded_with_their_own_digest(desk: Desk) -> None:
    """Guarantee: one form approves several requests; each has an approval by its digest, and an audit entry."""
    first, second = (request_key(desk.production, label=label, by=desk.tam) for label in ("first", "second"))
    rotation = ask_rotation(desk)
    client = browser(desk.approver)
    shown = review(client, first, second, rotation)
    assert "Approve 3 requests" in text_of(shown)
    answer = submit(client, shown)
    assert answer.status_code == 200
    assert "3 of 3 requests approved" in text_of(answer)
    assert {state_of(first), state_of(second)} == {IssuanceState.APPROVED}
    assert state_of(rotation) == RotationState.SCHEDULED
    for row in (first, second, rotation):
        assert [each.plan_digest for each in row.approvals.all()] == [row.plan_digest]
    entries = AuditEntry.objects.filter(event__in=["issuance.approved", "rotation.approved"])
    bodies = [bytes(entry.body) for entry in entries]
    for row in (first, second, rotation):
        assert sum(str(row.pk).encode() in body for body in bodies) == 1


def test_approvals_name_what_cannot_be_approved_and_approve_the_others(desk: Desk) -> None:
    """Guarantee: a request that was decided or changed after the page was shown is named, and stops no other."""
    kept, rejected, changed = (request_key(desk.production, label=label, by=desk.tam) for label in ("a1", "b2", "c3"))
    client = browser(desk.approver)
    shown = review(client, kept, rejected, changed)
    reject_issuance(grant(desk.admin, P.ISSUANCE_REJECT, desk.production), rejected, "no")
    forged = text_of(shown).replace(changed.plan_digest, "0" * 64)
    with mock.patch("tests.admin.oversight.test_approvals.text_of", side_effect=[forged]):
        answer = submit(client, shown)
    page = text_of(answer)
    assert "1 of 3 requests approved" in page
    assert "2 requests not approved" in page
    assert "The plan is not what you were shown" in page
    assert [state_of(row) for row in (kept, rejected, changed)] == ["approved", "rejected", "pending"]


def test_approvals_of_own_requests_are_refused_with_a_sentence(desk: Desk) -> None:
    """Guarantee: the requester cannot approve, neither by the page nor by a forged form."""
    mine = request_key(desk.production, label="mine", by=desk.admin)
    client = browser(desk.admin)
    shown = text_of(review(client, mine))
    assert "You requested this. A second person must approve it." in shown
    assert '<button type="submit" class="button button-good"' not in shown
    answer = client.post(
        address("approvals_review"), {"item": choice(mine), f"{choice(mine)}-plan_digest": mine.plan_digest}
    )
    assert answer.status_code == 409
    assert "0 of 1 request approved" in text_of(answer)
    assert state_of(mine) == IssuanceState.PENDING


def test_approvals_need_one_recent_second_factor(desk: Desk) -> None:
    """Guarantee: without a second factor of the last five minutes nothing is approved, and the review stays."""
    row = request_key(desk.production, by=desk.tam)
    client = browser(desk.approver)
    shown = review(client, row)
    with mock.patch.object(step_up, "is_step_up_due", return_value=True):
        answer = submit(client, shown)
    assert answer.status_code == 403
    assert "Confirm with your second factor" in text_of(answer)
    assert state_of(row) == IssuanceState.PENDING


@pytest.mark.parametrize(
    ("items", "status"),
    [
        (["x"], 404),
        (["keyvault.issuancerequest:req_absent"], 404),
        (["keyvault.merchant:acme"], 404),
        (["rotation.retirement:x"], 404),
        ([f"keyvault.issuancerequest:req_{number}" for number in range(approvals.MAX_TOGETHER + 1)], 400),
    ],
)
def test_approvals_of_unknown_or_too_many_rows_are_refused(desk: Desk, items: list[str], status: int) -> None:
    for method in ("get", "post"):
        answer = getattr(browser(desk.approver), method)(address("approvals_review"), {"item": items})
        assert answer.status_code == status


def test_approvals_without_a_choice_show_the_list_again(desk: Desk) -> None:
    request_key(desk.production, label="backend", by=desk.tam)
    client = browser(desk.approver)
    for answer, status in (
        (client.get(address("approvals_review")), 200),
        (client.post(address("approvals_review")), 400),
    ):
        assert answer.status_code == status
        assert "Choose at least one request" in text_of(answer)
        assert "backend" in text_of(answer)


def test_approvals_outside_the_scope_are_unknown(desk: Desk) -> None:
    """Guarantee: an operator of another merchant sees and approves nothing of this one."""
    row = request_key(desk.production, label="backend", by=desk.tam)
    make_merchant("globex")
    limited = make_operator("limited", Role.APPROVER, scope=AccessScope(frozenset({"globex"})))
    client = browser(limited)
    assert "backend" not in text_of(client.get(address("approvals")))
    answer = client.post(
        address("approvals_review"), {"item": choice(row), f"{choice(row)}-plan_digest": row.plan_digest}
    )
    assert answer.status_code == 404
    assert state_of(row) == IssuanceState.PENDING


def test_approvals_are_counted_exactly_or_as_more(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (attention, approvals):
        monkeypatch.setattr(module, "MAX_ROWS", 3)
        monkeypatch.setattr(module, "MAX_DECIDABLE", 2)
    for number in range(2):
        request_key(desk.production, label=f"label-{number}", by=desk.tam)
    client = browser(desk.approver)
    assert '<span class="count">2</span></h2>' in text_of(client.get(address("approvals")))
    for number in range(2):
        request_key(desk.production, label=f"more-{number}", by=desk.tam)
    assert '<span class="count">3+</span></h2>' in text_of(client.get(address("approvals")))
    assert IssuanceRequest.objects.count() == 4
