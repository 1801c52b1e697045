"""Operators in the console: changed by another key administrator, approved by a second person, and reviewed."""

import csv
import io
import re
from typing import Any
from unittest import mock

import pytest
from allauth.mfa.models import Authenticator
from allauth.socialaccount.models import SocialAccount
from pytest_django import Settings

from keyvault.access.roles import Role
from keyvault.access.scopes import EVERYWHERE, NOWHERE, AccessScope
from keyvault.models import AuditEntry, Operator, OperatorChange, OperatorChangeState, RoleUse
from keyvault.models.recording import collect_subjects
from keyvault.services.sessions.role_uses import role_uses
from tests.admin.desk import Desk, address, browser, hidden, text_of
from tests.factories import SANDBOX, make_merchant, make_operator, now

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def fresh_role_uses() -> None:
    role_uses.forget()


def row_of(username: str) -> Operator:
    return Operator.objects.get(username=username)


def change_roles(desk: Desk, username: str, *roles: Role, by: Any = None) -> Any:
    client = browser(by or desk.admin)
    page = address("keyvault_operator_roles", row_of(username).pk)
    fields = {"version": hidden(client.get(page), "version"), "roles": list(roles), "why": "joins the approvers"}
    return client.post(page, fields)


@pytest.mark.database
def test_operator_role_is_requested_approved_and_applied_in_the_console(desk: Desk) -> None:
    answer = change_roles(desk, "tam", Role.TECHNICAL_ACCOUNT_MANAGER, Role.APPROVER)
    change = OperatorChange.objects.get()
    page = address("keyvault_operatorchange_change", change.pk)
    assert (answer.status_code, answer["Location"]) == (302, page)
    approver = browser(desk.approver)
    assert "Changes of operators to approve" in text_of(approver.get("/admin/"))
    assert "joins the approvers" in text_of(approver.get(page))
    approve = address("keyvault_operatorchange_approve", change.pk)
    digest = hidden(approver.get(approve), "plan_digest")
    assert approver.post(approve, {"plan_digest": digest}).status_code == 302
    assert row_of("tam").roles == {Role.TECHNICAL_ACCOUNT_MANAGER, Role.APPROVER}
    assert "Changes of operators to approve" not in _attention(text_of(approver.get("/admin/")))
    text = text_of(browser(desk.auditor).get(address("keyvault_operator_change", row_of("tam").pk)))
    assert change.pk in text
    assert f'{address("keyvault_auditentry_changelist")}?q=tam"' in text


def _plain(answer: Any) -> str:
    """Return the page without the ids of its fields."""
    return re.sub(r' id="[^"]*"| aria-[a-z]+="[^"]*"', "", text_of(answer))


def _attention(text: str) -> str:
    """Return the part of the overview before the items without rows."""
    return text.partition("all caught up")[0] if "all caught up" in text else text


def test_operator_change_is_offered_neither_to_its_requester_nor_to_the_person_concerned(desk: Desk) -> None:
    concerned = make_operator("tam-too", Role.APPROVER, person=desk.tam.person)
    change_roles(desk, "tam", Role.APPROVER)
    change = OperatorChange.objects.get()
    page, approve = (address(f"keyvault_operatorchange_{name}", change.pk) for name in ("change", "approve"))
    for operator, note in ((desk.admin, "You requested this"), (concerned, "This request changes your own operator")):
        client = browser(operator)
        assert note in text_of(client.get(page))
        assert approve not in text_of(client.get(page))
        assert client.post(approve, {"plan_digest": change.plan_digest}).status_code == 409
    assert approve in text_of(browser(desk.approver).get(page))
    change.refresh_from_db()
    assert change.state == OperatorChangeState.AWAITING_APPROVAL


def test_operator_change_is_rejected_or_withdrawn_in_the_console(desk: Desk) -> None:
    change_roles(desk, "tam", Role.APPROVER)
    rejected = OperatorChange.objects.get()
    reject = address("keyvault_operatorchange_reject", rejected.pk)
    assert browser(desk.approver).post(reject, {"why": "not needed"}).status_code == 302
    change_roles(desk, "tam", Role.APPROVER)
    withdrawn = OperatorChange.objects.exclude(pk=rejected.pk).get()
    assert browser(desk.admin).post(address("keyvault_operatorchange_withdraw", withdrawn.pk)).status_code == 302
    assert set(OperatorChange.objects.values_list("state", flat=True)) == {"rejected", "withdrawn"}
    assert "not needed" in text_of(browser(desk.admin).get(address("keyvault_operatorchange_change", rejected.pk)))


@pytest.mark.database
def test_operator_role_without_approval_applies_at_once_and_ends_sessions(desk: Desk) -> None:
    client = browser(desk.responder)
    assert change_roles(desk, "responder", Role.AUDITOR).status_code == 302
    assert row_of("responder").roles == {Role.AUDITOR}
    assert client.get("/admin/").status_code == 302


def test_operator_changed_meanwhile_is_shown_again(desk: Desk) -> None:
    page = address("keyvault_operator_roles", row_of("tam").pk)
    client = browser(desk.admin)
    version = hidden(client.get(page), "version")
    change_roles(desk, "tam", Role.AUDITOR)
    fields = {"version": version, "roles": [Role.INCIDENT_RESPONDER], "why": "x"}
    answer = client.post(page, fields)
    assert answer.status_code == 409
    assert row_of("tam").roles == {Role.AUDITOR}
    assert hidden(answer, "version") == str(row_of("tam").version) != version
    assert f'value="{Role.INCIDENT_RESPONDER}" checked' not in _plain(answer)


def test_operator_change_refused_by_a_rule_keeps_what_was_typed(desk: Desk) -> None:
    """Guarantee: a refusal loses nothing that the operator typed, if the row is still what the page showed."""
    change_roles(desk, "tam", Role.APPROVER)
    answer = change_roles(desk, "tam", Role.APPROVER)
    assert answer.status_code == 409
    shown = _plain(answer)
    assert "A change of tam awaits approval already." in shown
    assert f'value="{Role.APPROVER}" checked' in shown
    assert f'value="{Role.TECHNICAL_ACCOUNT_MANAGER}" checked' not in shown
    assert "joins the approvers</textarea>" in shown
    assert hidden(answer, "version") == str(row_of("tam").version)


def test_operator_does_not_change_their_own(desk: Desk) -> None:
    """No person changes their own roles, resets their own factors or disables themselves, with any login."""
    make_operator("admin-too", Role.AUDITOR, person=desk.admin.person)
    client = browser(desk.admin)
    for username in ("admin", "admin-too"):
        row = row_of(username)
        text = text_of(client.get(address("keyvault_operator_change", row.pk)))
        assert "This is you" in text
        for action in ("roles", "reset-factors", "disable"):
            page = address(f"keyvault_operator_{action}", row.pk)
            assert page not in text
            fields = {"version": row.version, "roles": [Role.AUDITOR, Role.INCIDENT_RESPONDER], "why": "x"}
            assert client.post(page, fields).status_code == 409
        assert (row_of(username).roles, row_of(username).is_active) == (row.roles, True)


def test_operator_disabled_in_the_console_is_signed_out(desk: Desk) -> None:
    client = browser(desk.tam)
    assert browser(desk.admin).post(address("keyvault_operator_disable", row_of("tam").pk)).status_code == 302
    assert client.get("/admin/").status_code == 302
    assert not row_of("tam").is_active
    text = text_of(browser(desk.admin).get(address("keyvault_operator_change", row_of("tam").pk)))
    assert address("keyvault_operator_roles", row_of("tam").pk) not in text


def change_scope(desk: Desk, username: str, **fields: Any) -> Any:
    client = browser(desk.admin)
    page = address("keyvault_operator_scope", row_of(username).pk)
    version = hidden(client.get(page), "version")
    return client.post(page, {"version": version, "why": "new region", **fields})


def test_operator_scope_is_narrowed_by_one_person_and_widened_by_two(desk: Desk) -> None:
    """Guarantee: the console widens a scope under four eyes, as shown to the approver, and then only."""
    narrow = {"merchants": "acme", "environments": ["sandbox"]}
    assert change_scope(desk, "tam", **narrow).status_code == 302
    assert row_of("tam").access_scope == AccessScope(frozenset({"acme"}), frozenset({SANDBOX}))
    whole = {"all_merchants": "on", "environments": ["sandbox", "production"]}
    assert change_scope(desk, "tam", **whole).status_code == 302
    change = OperatorChange.objects.get()
    approver, approve = browser(desk.approver), address("keyvault_operatorchange_approve", change.pk)
    text = text_of(approver.get(approve))
    for shown in ("acme in sandbox", "all merchants in production and sandbox", "Other operators of this person"):
        assert shown in text
    assert row_of("tam").access_scope != EVERYWHERE
    assert approver.post(approve, {"plan_digest": change.plan_digest}).status_code == 302
    assert row_of("tam").access_scope == EVERYWHERE


@pytest.mark.parametrize(
    "fields",
    [
        {"environments": ["sandbox"]},
        {"merchants": "acme", "all_merchants": "on", "environments": ["sandbox"]},
        {"merchants": "absent", "environments": ["sandbox"]},
        {"merchants": "acme"},
    ],
)
def test_operator_scope_without_a_clear_choice_is_shown_again(desk: Desk, fields: dict[str, Any]) -> None:
    assert change_scope(desk, "tam", **fields).status_code == 400
    assert row_of("tam").access_scope == EVERYWHERE


def test_operator_without_a_scope_is_linked_to_its_person(desk: Desk) -> None:
    make_operator("jane", Role.APPROVER, scope=NOWHERE)
    client = browser(desk.admin)
    page, link = (address(f"keyvault_operator_{name}", row_of("jane").pk) for name in ("change", "same-person"))
    assert "has no access" in text_of(client.get(page))
    version = hidden(client.get(link), "version")
    assert client.post(link, {"version": version, "other": "absent"}).status_code == 400
    assert client.post(link, {"version": version, "other": "tam"}).status_code == 302
    assert row_of("jane").person == desk.tam.person
    assert link not in text_of(client.get(address("keyvault_operator_change", row_of("approver").pk)))


def test_operator_factors_are_reset_with_a_second_person(desk: Desk) -> None:
    page = address("keyvault_operator_reset-factors", row_of("tam").pk)
    assert browser(desk.admin).post(page, {"why": "lost the phone"}).status_code == 302
    change = OperatorChange.objects.get()
    client = browser(desk.tam)
    approve = address("keyvault_operatorchange_approve", change.pk)
    assert browser(desk.approver).post(approve, {"plan_digest": change.plan_digest}).status_code == 302
    assert client.get("/admin/").status_code == 302


def test_access_review_lists_roles_with_their_use(desk: Desk) -> None:
    """Auditors see who may do what, and which roles are used: a page opened counts for the role that opens it."""
    client = browser(desk.auditor)
    review = address("keyvault_operator_review")
    assert browser(desk.tam).get(review).status_code == 403
    text = text_of(client.get(review))
    assert [name in text for name in ("tam", "approver", "admin", "auditor", "responder")] == [True] * 5
    assert "Permissions of each role" in text
    assert "all merchants in production and sandbox" in text
    assert review in text_of(client.get(address("keyvault_operator_changelist")))
    role_uses.flush()
    used = RoleUse.objects.filter(last_used_at__isnull=False).values_list("operator__username", "role")
    assert list(used) == [("auditor", "auditor")]


def test_access_review_shows_a_second_factor_at_the_identity_provider(desk: Desk, settings: Settings) -> None:
    """On the review and on the page of the operator."""
    settings.IDENTITY_PROVIDER = mock.Mock(second_factors=["mfa"])
    row = row_of("tam")
    with collect_subjects():
        Authenticator.objects.filter(user=row).delete()
        SocialAccount(user=row, provider="https://id.example", uid="1").save()
        row.compare_and_swap(last_login=now())
    client = browser(desk.admin)
    for page in (address("keyvault_operator_review"), address("keyvault_operator_change", row.pk)):
        assert ">identity provider</span>" in text_of(client.get(page))


def test_access_review_is_for_operators_of_the_whole_installation(desk: Desk) -> None:
    """Guarantee: an operator with a scope learns no other operator's name, roles or scope."""
    make_merchant("globex")
    limited = make_operator("limited", Role.AUDITOR, scope=AccessScope(frozenset({"globex"})))
    client = browser(limited)
    for name in ("keyvault_operator_review", "keyvault_operator_export"):
        assert client.get(address(name)).status_code == 403
    assert "Access review" not in text_of(client.get(address("keyvault_operator_changelist")))
    assert not AuditEntry.objects.filter(event="access_review.exported").exists()


def test_access_review_is_paged(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keyvault.admin.operators.operators._PAGE", 2)
    client, review = browser(desk.auditor), address("keyvault_operator_review")
    first, last = text_of(client.get(review)), text_of(client.get(f"{review}?page=3"))
    assert ("Next page" in first, "Previous page" in first) == (True, False)
    assert ("Next page" in last, "Previous page" in last) == (False, True)
    assert client.get(f"{review}?page=x").status_code == 200


def test_access_review_is_exported_and_each_export_recorded(desk: Desk) -> None:
    """Guarantee: the file has every role, and the audit log names who exported it."""
    answer: Any = browser(desk.auditor).get(address("keyvault_operator_export"))
    assert (answer["Content-Type"], answer["Cache-Control"]) == ("text/csv; charset=utf-8", "no-store")
    rows = list(csv.DictReader(io.StringIO(text_of(answer))))
    assert {(row["username"], row["role"]) for row in rows} >= {("tam", "technical_account_manager")}
    assert browser(desk.tam).get(address("keyvault_operator_export")).status_code == 403
    exported = AuditEntry.objects.filter(event="access_review.exported")
    assert [entry.actor.partition(":")[2] for entry in exported] == ["auditor"]
