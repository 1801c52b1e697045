"""Changes of operators: which need a second person, who that is not, and what happens at the same time."""

import json
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from pytest_django import Settings

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST, Channel, OperatorPrincipal
from keyvault.access.roles import FOUR_EYES_ROLES, Role
from keyvault.access.scopes import EVERYWHERE, NOWHERE, AccessScope
from keyvault.domain.errors import PermissionMissingError, RequestInvalidError, StateConflictError
from keyvault.models import AuditEntry, BreakGlass, ConsoleSession, Operator, OperatorChange, OperatorChangeApproval
from keyvault.services.approvals.break_glass import find_review_fault, review_break_glass
from keyvault.services.operator_changes import (
    APPROVAL_LIFETIME,
    approve_change,
    change_roles,
    change_scope,
    enroll_operator,
    is_undecided,
    list_undecided,
    reject_change,
    request_factor_reset,
    withdraw_change,
)
from keyvault.services.operators.operators import disable_operator, find_operator, link_person
from keyvault.services.recording.authorization import operator_principal
from keyvault.services.sessions.invitations import prepare_sign_in
from keyvault.services.sessions.second_factors import has_second_factor
from tests.factories import SANDBOX, grant, make_merchant, make_operator, now
from tests.services.conftest import Scene
from tests.services.racing import TIMEOUT_SECONDS, held_open, start, wait_until_blocked
from tests.services.sessions.test_sessions import start_session

pytestmark = pytest.mark.django_db

WHY = "joins the approvers"

ACME = AccessScope(frozenset({"acme"}))
ACME_SANDBOX = AccessScope(frozenset({"acme"}), frozenset({SANDBOX}))
ALL_SANDBOX = AccessScope(None, frozenset({SANDBOX}))


def row_of(operator: OperatorPrincipal) -> Operator:
    return Operator.objects.get(username=operator.username)


def request(scene: Scene, operator: OperatorPrincipal, *roles: Role, by: OperatorPrincipal | None = None) -> Any:
    return change_roles(grant(by or scene.admin, P.OPERATORS_WRITE), row_of(operator), roles, WHY)


def approve(change: OperatorChange, by: OperatorPrincipal, **options: Any) -> OperatorChange:
    allowed = grant(by, P.OPERATORS_APPROVE, None, change.requester_person, **options)
    return approve_change(allowed, OperatorChange.objects.get(pk=change.pk), change.plan_digest)


def details_of(event: str) -> dict[str, Any]:
    details: dict[str, Any] = json.loads(bytes(AuditEntry.objects.get(event=event).body))["details"]
    return details


@pytest.mark.database
@pytest.mark.postgres_once
@pytest.mark.parametrize("role", list(Role))
def test_role_added_by_one_person_is_no_approving_one(scene: Scene, role: Role) -> None:
    """Guarantee: no single key administrator makes another operator an approver or an administrator."""
    nobody = make_operator("nobody")
    change = request(scene, nobody, role)
    if role in FOUR_EYES_ROLES:
        assert row_of(nobody).roles == frozenset()
        assert is_undecided(change, now())
        approve(change, scene.approver)
    else:
        assert change is None
    assert row_of(nobody).roles == {role}


def test_role_kept_or_removed_needs_no_approval(scene: Scene) -> None:
    """Only the addition of an approving role needs one."""
    both = make_operator("both", Role.APPROVER, Role.AUDITOR)
    assert request(scene, both, Role.APPROVER, Role.INCIDENT_RESPONDER) is None
    assert request(scene, both, Role.INCIDENT_RESPONDER) is None
    assert row_of(both).roles == {Role.INCIDENT_RESPONDER}
    assert not OperatorChange.objects.exists()


def test_roles_changed_in_the_console_are_audited_and_end_sessions(scene: Scene) -> None:
    start_session(scene.tam)
    change = request(scene, scene.tam, Role.APPROVER)
    assert ConsoleSession.objects.exists(), "a request changes nothing"
    approve(change, scene.approver)
    assert not ConsoleSession.objects.exists()
    old, new = ["technical_account_manager"], ["approver"]
    about = {"change_id": change.pk, "username": "tam", "kind": "roles", "old": old, "new": new}
    digest = {"plan_digest": change.plan_digest}
    assert details_of("operator_change.requested") == {**about, **digest, "why": WHY}
    assert details_of("operator_change.approved") == {**about, **digest}
    changed = {"username": "tam", "old": old, "new": new, "why": WHY, "sessions_ended": 1}
    assert details_of("operator.roles_changed") == changed


def test_change_of_ones_own_operator_is_refused(scene: Scene) -> None:
    """A person changes the roles of none of their own logins, and disables none of them."""
    other_login = make_operator("admin-too", Role.AUDITOR, person=scene.admin.person)
    allowed = grant(scene.admin, P.OPERATORS_WRITE)
    for own in (row_of(scene.admin), row_of(other_login)):
        acts: list[Callable[[], object]] = [
            partial(change_roles, allowed, own, [Role.KEY_ADMINISTRATOR, Role.APPROVER], WHY),
            partial(change_roles, allowed, own, [Role.INCIDENT_RESPONDER], WHY),
            partial(request_factor_reset, allowed, own, WHY),
            partial(disable_operator, allowed, own),
        ]
        for act in acts:
            with pytest.raises(StateConflictError, match="You cannot change your own operator"):
                act()
    assert row_of(scene.admin).roles == {Role.KEY_ADMINISTRATOR}


@pytest.mark.parametrize("who", ["approver", "tam", "responder"])
def test_change_by_another_role_is_refused(scene: Scene, who: str) -> None:
    with pytest.raises(PermissionMissingError):
        grant(getattr(scene, who), P.OPERATORS_WRITE)


def test_change_is_approved_neither_by_its_requester_nor_by_the_person_concerned(scene: Scene) -> None:
    """Guarantee: four eyes, and neither pair is that of the operator who gets the role."""
    concerned = make_operator("concerned", Role.TECHNICAL_ACCOUNT_MANAGER)
    concerned_too = make_operator("concerned-too", Role.APPROVER, person=concerned.person)
    admin_too = make_operator("admin-too", Role.APPROVER, person=scene.admin.person)
    change = request(scene, concerned, Role.APPROVER)
    with pytest.raises(StateConflictError, match="second person"):
        approve(change, admin_too)
    with pytest.raises(StateConflictError, match="second person"):
        # A grant for another request passes the decision; the service compares the persons again.
        approve_change(grant(admin_too, P.OPERATORS_APPROVE, None, "per_other"), change, change.plan_digest)
    with pytest.raises(StateConflictError, match="You cannot change your own operator"):
        approve(change, concerned_too)
    assert row_of(concerned).roles == {Role.TECHNICAL_ACCOUNT_MANAGER}
    assert not OperatorChangeApproval.objects.exists()
    approve(change, scene.approver)
    assert row_of(concerned).roles == {Role.APPROVER}


def test_change_of_an_operator_that_was_changed_meanwhile_is_refused(scene: Scene) -> None:
    """An approval covers the roles before and after, as the approver saw them."""
    change = request(scene, scene.tam, Role.APPROVER)
    request(scene, scene.tam, Role.AUDITOR)
    with pytest.raises(StateConflictError, match="was changed after the request"):
        approve(change, scene.approver)
    assert row_of(scene.tam).roles == {Role.AUDITOR}


def test_change_approved_with_another_digest_is_refused(scene: Scene) -> None:
    change = request(scene, scene.tam, Role.APPROVER)
    with pytest.raises(StateConflictError, match="not what you were shown"):
        approve_change(grant(scene.approver, P.OPERATORS_APPROVE), change, "0" * 64)


def test_change_altered_in_the_database_is_refused(scene: Scene) -> None:
    """The digest is computed again from the row, so that an altered row is not applied."""
    change = request(scene, scene.tam, Role.APPROVER)
    change.roles = "approver key_administrator"
    with pytest.raises(StateConflictError, match="was changed after the request"):
        approve_change(grant(scene.approver, P.OPERATORS_APPROVE), change, change.plan_digest)


@pytest.mark.parametrize("what", ["disabled", "demoted", "limited"])
def test_change_whose_requester_may_no_longer_request_it_is_refused(scene: Scene, what: str) -> None:
    """Guarantee: at the time of the approval, two persons are entitled to the change."""
    requester = make_operator("second", Role.KEY_ADMINISTRATOR)
    change = request(scene, scene.tam, Role.APPROVER, by=requester)
    allowed, row = grant(scene.admin, P.OPERATORS_WRITE), row_of(requester)
    if what == "disabled":
        disable_operator(allowed, row)
    elif what == "demoted":
        change_roles(allowed, row, [Role.AUDITOR], WHY)
    else:
        change_scope(allowed, row, ALL_SANDBOX, WHY)
    with pytest.raises(StateConflictError, match="may no longer change operators"):
        approve(change, scene.approver)
    assert row_of(scene.tam).roles == {Role.TECHNICAL_ACCOUNT_MANAGER}
    assert not OperatorChangeApproval.objects.exists()


def test_change_too_old_is_not_approved(scene: Scene) -> None:
    change = request(scene, scene.tam, Role.APPROVER)
    late = change.created_at + APPROVAL_LIFETIME
    assert list_undecided(late - timedelta(seconds=1)).exists()
    assert not list_undecided(late).exists()
    with pytest.raises(StateConflictError, match="or too old"):
        approve(change, scene.approver, at=late)


def test_change_that_is_decided_stays_decided(scene: Scene) -> None:
    rejected = request(scene, scene.tam, Role.APPROVER)
    reject_change(grant(scene.approver, P.OPERATORS_APPROVE), rejected, "not needed")
    withdrawn = request(scene, scene.tam, Role.APPROVER)
    with pytest.raises(StateConflictError, match="Only the person who made the request"):
        withdraw_change(grant(make_operator("second", Role.KEY_ADMINISTRATOR), P.OPERATORS_WRITE), withdrawn)
    withdraw_change(grant(scene.admin, P.OPERATORS_WRITE), withdrawn)
    for change in (rejected, withdrawn):
        with pytest.raises(StateConflictError, match="does not await approval"):
            approve(change, scene.approver)
        with pytest.raises(StateConflictError, match="does not await approval"):
            reject_change(grant(scene.approver, P.OPERATORS_APPROVE), change, "again")
    assert row_of(scene.tam).roles == {Role.TECHNICAL_ACCOUNT_MANAGER}
    assert details_of("operator_change.rejected")["why"] == "not needed"


def test_change_requested_twice_is_refused(scene: Scene) -> None:
    request(scene, scene.tam, Role.APPROVER)
    with pytest.raises(StateConflictError, match="awaits approval already"):
        request(scene, scene.tam, Role.KEY_ADMINISTRATOR)
    assert OperatorChange.objects.count() == 1


def test_change_without_a_reason_is_refused(scene: Scene) -> None:
    with pytest.raises(RequestInvalidError):
        change_roles(grant(scene.admin, P.OPERATORS_WRITE), row_of(scene.tam), [Role.APPROVER], " ")


def test_change_of_a_disabled_operator_is_refused(scene: Scene) -> None:
    change = request(scene, scene.tam, Role.APPROVER)
    disable_operator(grant(scene.admin, P.OPERATORS_WRITE), row_of(scene.tam))
    for act in (partial(approve, change, scene.approver), partial(request, scene, scene.tam, Role.KEY_ADMINISTRATOR)):
        with pytest.raises(StateConflictError, match="is disabled"):
            act()


def test_change_by_the_hosts_owner_alone_is_refused(scene: Scene) -> None:
    """A shell names two operators, and the approval is reviewed in the console."""
    for act in (
        partial(change_roles, grant(HOST, P.OPERATORS_WRITE), row_of(scene.tam), [Role.APPROVER], WHY),
        partial(request_factor_reset, grant(HOST, P.OPERATORS_WRITE), row_of(scene.tam), WHY),
    ):
        with pytest.raises(StateConflictError, match="requires two operators"):
            act()


def test_factor_reset_needs_a_second_person_and_ends_sessions(scene: Scene) -> None:
    """Guarantee: no single person takes over an account by removing its second factors."""
    prepare_sign_in(grant(HOST, P.OPERATORS_ENROLL), row_of(scene.tam))
    start_session(scene.tam)
    change = request_factor_reset(grant(scene.admin, P.OPERATORS_WRITE), row_of(scene.tam), "lost the phone")
    assert has_second_factor(row_of(scene.tam))
    before = row_of(scene.tam).get_session_auth_hash()
    approve(change, scene.approver)
    assert not has_second_factor(row_of(scene.tam))
    assert details_of("operator.second_factors_reset")["username"] == "tam"
    assert row_of(scene.tam).get_session_auth_hash() != before
    assert not ConsoleSession.objects.exists()
    assert row_of(scene.tam).roles == {Role.TECHNICAL_ACCOUNT_MANAGER}


def test_approval_on_a_command_line_is_reviewed_by_two_persons(scene: Scene) -> None:
    """The person whose operator was changed does not review the change, even if their new role permits reviews."""
    change = request(scene, scene.tam, Role.APPROVER, by=find_operator("admin", "root"))
    approve(change, find_operator("approver", "root"))
    act = BreakGlass.objects.get()
    assert (act.subject, act.event, act.is_claimed) == (change.pk, "operator_change.approved", True)
    tam = operator_principal(row_of(scene.tam))
    assert (tam.channel, find_review_fault(act, tam.person)) == (
        Channel.CONSOLE,
        "You collected the key, approved this too, or this is about you, so another person must review it.",
    )
    with pytest.raises(StateConflictError):
        review_break_glass(grant(tam, P.BREAK_GLASS_REVIEW, None, act.requester_person), act)
    assert find_review_fault(act, scene.admin.person) is not None
    for reviewer in (scene.approver, make_operator("second", Role.APPROVER)):
        assert act.reviewed_at is None
        review_break_glass(grant(reviewer, P.BREAK_GLASS_REVIEW, None, act.requester_person), act)
    assert act.reviewed_at is not None


def test_approvers_made_on_a_command_line_neither_review_each_other_nor_approve(scene: Scene) -> None:
    """One person with a shell makes three approvers, which would close the reviews of each other."""
    admin, approver = find_operator("admin", "root"), find_operator("approver", "root")
    made = [make_operator(f"made-{number}") for number in range(3)]
    for operator in made:
        approve(request(scene, operator, Role.APPROVER, by=admin), approver)
    acts = list(BreakGlass.objects.order_by("created_at"))
    made = [operator_principal(row_of(operator)) for operator in made]
    for act in acts:
        for operator in made:
            with pytest.raises(StateConflictError, match=r"not reviewed yet|this is about you"):
                review_break_glass(grant(operator, P.BREAK_GLASS_REVIEW, None, act.requester_person), act)
    change = request(scene, scene.tam, Role.APPROVER)
    with pytest.raises(StateConflictError, match="Until it is, you neither approve nor review"):
        approve(change, made[0])
    for reviewer in (scene.approver, make_operator("second", Role.APPROVER)):
        review_break_glass(grant(reviewer, P.BREAK_GLASS_REVIEW, None, acts[0].requester_person), acts[0])
    approve(change, made[0])


def test_approver_who_gets_another_role_on_a_command_line_still_approves(scene: Scene) -> None:
    """A person with a shell does not stop the approvers by claims about them."""
    admin, other = find_operator("admin", "root"), make_operator("other", Role.APPROVER)
    twin = make_operator("approvers-twin", person=scene.approver.person)
    change = request(scene, scene.approver, Role.APPROVER, Role.KEY_ADMINISTRATOR, by=admin)
    approve(change, find_operator(other.username, "root"))
    approve(request(scene, twin, Role.APPROVER, by=admin), find_operator(other.username, "root"))
    assert BreakGlass.objects.filter(reviewed_at=None).count() == 2
    approve(request(scene, scene.tam, Role.APPROVER), operator_principal(row_of(scene.approver)))


@pytest.mark.parametrize("kind", ["scope", "second factors"])
def test_approver_whose_scope_or_factors_were_changed_on_a_command_line_waits_for_the_review(
    scene: Scene, kind: str
) -> None:
    third = make_operator("third", Role.APPROVER, scope=ACME if kind == "scope" else EVERYWHERE)
    allowed = grant(find_operator("admin", "root"), P.OPERATORS_WRITE)
    if kind == "scope":
        change = change_scope(allowed, row_of(third), EVERYWHERE, WHY)
    else:
        prepare_sign_in(grant(HOST, P.OPERATORS_ENROLL), row_of(third))
        change = request_factor_reset(allowed, row_of(third), WHY)
    assert change is not None
    approve(change, find_operator("approver", "root"))
    asked = request(scene, scene.tam, Role.APPROVER)
    with pytest.raises(StateConflictError, match="not reviewed yet"):
        approve(asked, operator_principal(row_of(third)))


# --------------------------------------------------------------------------------------------------------- scope


@pytest.mark.parametrize(
    ("before", "after", "needs_approval"),
    [
        (EVERYWHERE, ACME, False),
        (ALL_SANDBOX, ACME_SANDBOX, False),
        (ACME, ACME, False),
        (NOWHERE, ACME_SANDBOX, True),
        (ACME_SANDBOX, ACME, True),
        (ACME, EVERYWHERE, True),
        (ACME, AccessScope(frozenset({"acme", "globex"})), True),
        (ACME, AccessScope(frozenset({"globex"}), frozenset({SANDBOX})), True),
        (ACME, ALL_SANDBOX, True),
    ],
)
def test_scope_widened_needs_a_second_person(
    scene: Scene, before: AccessScope, after: AccessScope, needs_approval: bool
) -> None:
    """Guarantee: no single person gives an operator access to a merchant or an environment."""
    make_merchant("globex")
    new = make_operator("new", Role.APPROVER, scope=before)
    change = change_scope(grant(scene.admin, P.OPERATORS_WRITE), row_of(new), after, WHY)
    assert (change is not None) == needs_approval
    if change is not None:
        assert row_of(new).access_scope == before
        with pytest.raises(StateConflictError, match="second person"):
            approve(change, scene.admin)
        approve(change, scene.approver)
        scopes = {"old": before.as_json(), "new": after.as_json()}
        about = {"change_id": change.pk, "username": "new", "kind": "scope", "plan_digest": change.plan_digest}
        assert details_of("operator_change.approved") == about | scopes
        assert details_of("operator.scope_changed") == {"username": "new", "why": WHY, **scopes}
    assert row_of(new).access_scope == after


def test_scope_widened_by_the_hosts_owner_alone_is_refused(scene: Scene) -> None:
    new = row_of(make_operator("new", Role.AUDITOR, scope=ACME))
    with pytest.raises(StateConflictError, match="requires two operators"):
        change_scope(grant(HOST, P.OPERATORS_WRITE), new, EVERYWHERE, WHY)
    change_scope(grant(HOST, P.OPERATORS_WRITE), new, ACME_SANDBOX, WHY)
    assert Operator.objects.get(username="new").access_scope == ACME_SANDBOX


def test_scope_that_names_nothing_known_is_not_requested(scene: Scene) -> None:
    with pytest.raises(RequestInvalidError):
        change_scope(grant(scene.admin, P.OPERATORS_WRITE), row_of(scene.tam), AccessScope(frozenset({"absent"})), WHY)


def test_change_of_roles_is_approved_with_the_scope_that_was_shown(scene: Scene) -> None:
    """Guarantee: an approved change is carried out with no other scope, and no other person."""
    new = make_operator("new", Role.AUDITOR, scope=EVERYWHERE)
    change = request(scene, new, Role.APPROVER)
    change_scope(grant(scene.admin, P.OPERATORS_WRITE), row_of(new), ACME, WHY)
    with pytest.raises(StateConflictError, match="was changed after the request"):
        approve(change, scene.approver)
    widened = change_scope(grant(scene.admin, P.OPERATORS_WRITE), row_of(new), EVERYWHERE, WHY)
    assert widened is not None
    widened.scope = ALL_SANDBOX.as_json()
    with pytest.raises(StateConflictError, match="was changed after the request"):
        approve_change(grant(scene.approver, P.OPERATORS_APPROVE), widened, widened.plan_digest)
    assert row_of(new).access_scope == ACME


def test_person_with_two_operators_gets_no_scope_without_a_second_person(scene: Scene) -> None:
    """Guarantee: two operators of one person approve nothing for each other, from the first scope on."""
    new = make_operator("new", Role.KEY_ADMINISTRATOR, Role.APPROVER, scope=NOWHERE)
    allowed = grant(scene.admin, P.OPERATORS_WRITE)
    unlinked = change_scope(allowed, row_of(new), EVERYWHERE, WHY)
    assert unlinked is not None
    link_person(allowed, row_of(new), row_of(scene.approver))
    with pytest.raises(StateConflictError, match="You cannot change your own operator"):
        approve(unlinked, scene.approver)
    second = make_operator("second", Role.APPROVER)
    with pytest.raises(StateConflictError, match="was changed after the request"):
        approve(unlinked, second)
    withdraw_change(allowed, unlinked)
    linked = change_scope(allowed, row_of(new), EVERYWHERE, WHY)
    assert linked is not None
    with pytest.raises(StateConflictError, match="You cannot change your own operator"):
        approve(linked, scene.approver)
    approve(linked, second)
    change = request(scene, scene.tam, Role.APPROVER, by=operator_principal(row_of(new)))
    with pytest.raises(StateConflictError, match="second person"):
        approve(change, scene.approver)


# ----------------------------------------------------------------------------------------------------- enrolment


def enroll(username: str, *roles: Role, scope: AccessScope = EVERYWHERE) -> Operator:
    return enroll_operator(grant(HOST, P.OPERATORS_ENROLL), username=username, roles=roles, scope=scope)


@pytest.mark.parametrize("role", sorted(FOUR_EYES_ROLES))
def test_enrolment_gives_no_approving_role_once_two_persons_can_approve(
    scene: Scene, role: Role, settings: Settings
) -> None:
    """Guarantee: with a Vault, one shell alone adds neither an approver nor a key administrator."""
    settings.IS_VAULT = True
    with pytest.raises(StateConflictError, match=f"A second person must approve {role}"):
        enroll("new", role, Role.AUDITOR)
    assert not Operator.objects.filter(username="new").exists()
    assert enroll("new", Role.AUDITOR).roles == {Role.AUDITOR}


def test_enrolment_of_the_first_two_approving_persons_needs_nobody(db: None, settings: Settings) -> None:
    """An empty installation has no approver. The roles are for all of it, so that two persons suffice."""
    settings.IS_VAULT = True
    with pytest.raises(StateConflictError, match="A second person must approve"):
        enroll("limited", Role.APPROVER, scope=ALL_SANDBOX)
    enroll("admin", Role.KEY_ADMINISTRATOR)
    tam = enroll("tam", Role.TECHNICAL_ACCOUNT_MANAGER, scope=ALL_SANDBOX)
    change_scope(grant(HOST, P.OPERATORS_WRITE), tam, EVERYWHERE, "")
    change_roles(grant(HOST, P.OPERATORS_WRITE), tam, [Role.APPROVER], "")
    assert Operator.objects.get(username="tam").roles == {Role.APPROVER}
    with pytest.raises(StateConflictError, match="A second person must approve"):
        enroll("third", Role.APPROVER)


# ---------------------------------------------------------------------------------------------- at the same time


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_change_approved_by_two_persons_concurrently_is_applied_once(scene: Scene) -> None:
    second = make_operator("second", Role.APPROVER)
    change = request(scene, scene.tam, Role.APPROVER)
    with held_open(partial(approve, change, scene.approver)):
        slower = start(partial(approve, change, second))
        wait_until_blocked(slower)
    with pytest.raises(StateConflictError):
        slower.result(TIMEOUT_SECONDS)
    assert OperatorChangeApproval.objects.count() == 1
    assert AuditEntry.objects.filter(event="operator.roles_changed").count() == 1
    assert row_of(scene.tam).roles == {Role.APPROVER}


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_change_approved_while_its_operator_is_disabled_is_refused(scene: Scene) -> None:
    """The operator's version decides: one of the two changes does not happen."""
    change = request(scene, scene.tam, Role.APPROVER)
    with held_open(partial(disable_operator, grant(scene.admin, P.OPERATORS_WRITE), row_of(scene.tam))):
        slower = start(partial(approve, change, scene.approver))
        wait_until_blocked(slower)
    with pytest.raises(StateConflictError):
        slower.result(TIMEOUT_SECONDS)
    assert not OperatorChangeApproval.objects.exists()
    assert row_of(scene.tam).roles == {Role.TECHNICAL_ACCOUNT_MANAGER}


def test_change_approved_by_an_operator_that_was_disabled_meanwhile_is_refused(scene: Scene) -> None:
    """A request that was authenticated before its operator was disabled approves nothing afterwards."""
    make_operator("second", Role.APPROVER)
    change = request(scene, scene.tam, Role.APPROVER)
    allowed = grant(scene.approver, P.OPERATORS_APPROVE, None, change.requester_person)
    disable_operator(grant(scene.admin, P.OPERATORS_WRITE), row_of(scene.approver))
    with pytest.raises(StateConflictError, match="disabled meanwhile"):
        approve_change(allowed, change, change.plan_digest)
