"""Actions that need a second person: one table of them, and the rule for each."""

import re
from datetime import timedelta
from typing import Any

import pytest
from django.contrib import admin

from keyvault.access.permissions import Permission as P
from keyvault.access.roles import Role
from keyvault.admin.framework import step_up
from keyvault.admin.framework.four_eyes import ApproveForm
from keyvault.admin.framework.model_admin import ConsoleModelAdmin
from keyvault.domain.environments import Environment
from keyvault.domain.issuance import Delivery
from keyvault.domain.keys import KeyKind
from keyvault.domain.revocation import RevocationReason
from keyvault.models import BreakGlass, Operator
from keyvault.services.issuance.requests import collect_key
from keyvault.services.keys.lifecycle import revoke_key
from keyvault.services.operator_changes import change_roles
from keyvault.services.operators.operators import disable_operator
from rotation.domain.plan_fields import PlanOverrides
from rotation.services.rotations.interventions import request_retirement
from rotation.services.rotations.requests import reissue_key, request_rotation
from rotation.services.schedules.schedules import ScheduleDraft, ScheduleScope, save_schedule
from rotation.services.schedules.standing_approvals import request_standing_approval
from tests.admin.desk import Desk, address, browser, dump, hidden, text_of
from tests.clocks import Clock
from tests.factories import approve, grant, issue, issue_request, make_operator, now, on_host, request_key
from tests.rotation.campaigning import asked as request_campaign

DECIDING = frozenset({P.ISSUANCE_APPROVE, P.ROTATIONS_APPROVE, P.BREAK_GLASS_REVIEW, P.OPERATORS_APPROVE})
"""Permissions to decide on a request. A rejection needs no second person."""


def issuance(desk: Desk) -> Any:
    return request_key(desk.production, by=desk.admin)


def rotation(desk: Desk, kind: KeyKind = KeyKind.PRIVATE) -> Any:
    key, _ = issue(desk.production, kind=kind)
    return request_rotation(grant(desk.admin, P.ROTATIONS_WRITE, desk.production), key.credential, PlanOverrides())


def emergency(desk: Desk) -> Any:
    key, _ = issue(desk.production)
    revoke_key(grant(desk.responder, P.KEYS_REVOKE, desk.production), key, RevocationReason.UNSPECIFIED)
    return reissue_key(grant(desk.admin, P.ROTATIONS_WRITE, desk.production), key.credential, "leaked")


def retirement(desk: Desk) -> Any:
    row = rotation(desk, KeyKind.PUBLIC)
    return request_retirement(grant(desk.admin, P.ROTATIONS_WRITE, desk.production), row, now() + timedelta(days=90))


def campaign(desk: Desk) -> Any:
    issue(desk.production)
    return request_campaign(Clock(now()), environment=Environment.PRODUCTION, by=desk.admin)


def standing(desk: Desk) -> Any:
    allowed = grant(desk.admin, P.SCHEDULES_WRITE, desk.production)
    row = save_schedule(allowed, ScheduleScope(Environment.PRODUCTION, desk.production), ScheduleDraft(365))
    return request_standing_approval(allowed, row, 90)


def operator_change(desk: Desk) -> Any:
    row = Operator.objects.get(username="tam")
    return change_roles(grant(desk.admin, P.OPERATORS_WRITE), row, [Role.APPROVER], "joins the approvers")


def collected(desk: Desk) -> Any:
    """A production key that `admin` had shown."""
    row = request_key(desk.production, delivery=Delivery.SHOW_ONCE, by=desk.admin)
    approve(row, by=desk.approver)
    issue_request(row)
    collect_key(grant(desk.admin, P.ISSUANCE_COLLECT, desk.production), row)
    return BreakGlass.objects.get()


def claimed(desk: Desk) -> Any:
    """An approval of `admin`'s request that a command line gave in the approver's name."""
    shell = on_host(desk.approver)
    approve(request_key(desk.production, by=desk.admin), by=shell)
    return BreakGlass.objects.get()


ROWS: dict[str, dict[Any, str | None]] = {
    "keyvault_issuancerequest_approve": {issuance: "approved"},
    "rotation_rotation_approve": {rotation: "scheduled", emergency: "emergency"},
    "rotation_campaign_approve": {campaign: "running"},
    "rotation_standingapproval_approve": {standing: "approved"},
    "rotation_retirement_approve": {retirement: None},
    "keyvault_operatorchange_approve": {operator_change: "applied"},
    "keyvault_breakglass_review": {collected: None},
    "keyvault_breakglass_confirm": {claimed: None},
    "keyvault_breakglass_disown": {claimed: None},
}
"""Each page that takes a second person, rows that `admin`, who has its permission, requested, and their next state."""

CASES = [pytest.param(page, make, id=f"{page}-{make.__name__}") for page, makes in ROWS.items() for make in makes]


def deciding_actions() -> dict[str, Any]:
    """The registered actions that decide on a request, by the name of their page."""
    return {
        f"{model._meta.label_lower.replace('.', '_')}_{action.name}": action
        for model, model_admin in admin.site._registry.items()
        if isinstance(model_admin, ConsoleModelAdmin)
        for action in model_admin.row_actions
        if action.permission in DECIDING and action.name != "reject"
    }


BOUND = [case for case in CASES if issubclass(deciding_actions()[str(case.values[0])].form, ApproveForm)]


@pytest.mark.database
def test_every_action_that_takes_a_second_person_is_in_the_table() -> None:
    assert set(deciding_actions()) == set(ROWS)


@pytest.mark.parametrize(("page", "make"), CASES)
def test_action_by_any_operator_of_the_requester_is_refused(desk: Desk, page: str, make: Any) -> None:
    """Four eyes are two persons': neither a role that may do both, nor another log-in of the same person, counts."""
    row = make(desk)
    url, change = address(page, row.pk), address(f"{page.rpartition('_')[0]}_change", row.pk)
    sent = {"version": row.version, "plan_digest": getattr(row, "plan_digest", "")}
    twin = make_operator("admin-too", Role.APPROVER, person=desk.admin.person)
    clients, before = [browser(desk.admin), browser(twin)], dump()
    for client in clients:
        for answer in (client.get(url), client.post(url, sent)):
            assert answer.status_code == 409
            assert "second person" in text_of(answer)
        shown = text_of(client.get(change))
        assert url not in shown
        assert "A second person must approve it" in shown or "another person must review it" in shown
    assert dump() == before
    assert url in text_of(browser(desk.approver).get(change))
    assert browser(desk.approver).post(url, sent).status_code == 302
    assert browser(desk.approver).get(url).status_code == 409


def test_approver_sees_that_the_requester_was_disabled_meanwhile(desk: Desk) -> None:
    """Guarantee: an approver knows that the requester was disabled, because the account may have been stolen."""
    row = request_key(desk.production, by=desk.tam)
    approver, page = browser(desk.approver), address("keyvault_issuancerequest_change", row.pk)
    assert "tam (disabled)" not in text_of(approver.get(page))
    disable_operator(grant(desk.admin, P.OPERATORS_WRITE), Operator.objects.get(username=desk.tam.username))
    for shown in (page, address("approvals"), f"{address('approvals_review')}?item=keyvault.issuancerequest:{row.pk}"):
        assert "tam (disabled)" in text_of(approver.get(shown)), shown


@pytest.mark.parametrize(("page", "make"), BOUND)
def test_approval_is_bound_to_the_digest_that_was_shown(desk: Desk, page: str, make: Any) -> None:
    """An approval covers exactly what the page showed: the form contains the digest, and another digest is refused."""
    row, other = make(desk), request_key(desk.production, by=desk.tam, label="another")
    client, url = browser(desk.approver), address(page, row.pk)
    shown = hidden(client.get(url), "plan_digest")
    assert shown == row.plan_digest
    for digest, status in ((other.plan_digest, 409), ("0" * 64, 409), ("", 400)):
        assert client.post(url, {"plan_digest": digest}).status_code == status
    assert not row.approvals.exists()
    assert type(row).objects.get(pk=row.pk).state == row.state
    assert client.post(url, {"plan_digest": shown}).status_code == 302
    assert type(row).objects.get(pk=row.pk).state == ROWS[page][make]
    approval = row.approvals.get()
    assert (approval.plan_digest, approval.person) == (row.plan_digest, desk.approver.person)


@pytest.mark.parametrize(("page", "make"), BOUND)
def test_page_of_a_request_has_both_forms_that_decide_on_it(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, page: str, make: Any
) -> None:
    """Guarantee: the page of a request approves it with a second factor, and rejects it with a reason, each by one
    form to its own route. The page is not replaced while they are filled in. The requester has neither form."""
    monkeypatch.setattr(step_up, "is_step_up_due", lambda request: True)
    row, noun = make(desk), page.rpartition("_")[0]
    change, reject = address(f"{noun}_change", row.pk), address(f"{noun}_reject", row.pk)
    shown = text_of(browser(desk.approver).get(change))
    approving, rejecting = (
        re.findall(rf'<form method="post" action="{url}".*?</form>', shown, re.DOTALL)
        for url in (address(page, row.pk), reject)
    )
    assert (len(approving), len(rejecting)) == (1, 1)
    assert row.plan_digest in approving[0]
    assert "Confirm with your second factor" in approving[0]
    assert 'name="why"' in rejecting[0]
    assert "Confirm with your second factor" not in rejecting[0]
    assert shown.count(f'"{reject}"') == 1
    assert "data-live" not in shown
    assert "<dt>Requested by</dt>" in shown.partition("<h2>Decide</h2>")[2]
    assert "<h2>Decide</h2>" not in text_of(browser(desk.admin).get(change))
