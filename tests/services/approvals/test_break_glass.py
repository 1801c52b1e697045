"""Actions that bypassed a rule: recorded in the action's transaction and listed until they are reviewed."""

from collections.abc import Callable

import pytest
from django.db import IntegrityError, transaction
from django.test import override_settings

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST, OperatorPrincipal, Principal
from keyvault.access.roles import Role
from keyvault.domain.environments import Environment
from keyvault.domain.errors import PermissionMissingError, StateConflictError
from keyvault.models import BreakGlass, IssuanceRequest, Notice
from keyvault.models.recording import UnrecordedWriteError
from keyvault.services.approvals.break_glass import disown_approval, note_break_glass, review_break_glass
from keyvault.services.issuance.requests import collect_key
from keyvault.services.keys.records import prove_service_token
from rotation.domain.plan_fields import PlanOverrides
from rotation.services.rotations.requests import approve_rotation, bypass_rotation, request_rotation
from tests.factories import (
    account,
    approve,
    grant,
    issue,
    issue_request,
    make_operator,
    make_token,
    now,
    on_host,
    request_key,
)
from tests.services.conftest import Scene

pytestmark = pytest.mark.django_db

CLAIMED_REQUEST = "requested on a command line, or with a token created on one, which does not prove an identity"


@pytest.fixture
def bypass(scene: Scene) -> BreakGlass:
    """The requester collected a production key in person."""
    request = request_key(scene.production, by=scene.tam)
    issue_request(approve(request))
    collect_key(grant(scene.tam, P.ISSUANCE_COLLECT, scene.production), request)
    return BreakGlass.objects.get()


@pytest.mark.database
def test_break_glass_is_reviewed_by_a_second_person(scene: Scene, bypass: BreakGlass) -> None:
    allowed = grant(scene.approver, P.BREAK_GLASS_REVIEW, requester_person=bypass.person)
    review_break_glass(allowed, bypass)
    stored = BreakGlass.objects.get()
    assert (stored.reviewer_person, stored.reviewed_at) == (scene.approver.person, allowed.at)
    with pytest.raises(StateConflictError, match="already reviewed"):
        review_break_glass(allowed, stored)


@pytest.mark.database
def test_break_glass_reviewed_by_its_own_person_is_refused(scene: Scene, bypass: BreakGlass) -> None:
    """The grant refuses a review under a second login; a database constraint refuses it as well."""
    second_login = make_operator("tam-second-login", Role.KEY_ADMINISTRATOR, person=scene.tam.person)
    with pytest.raises(StateConflictError, match="second person"):
        grant(second_login, P.BREAK_GLASS_REVIEW, requester_person=bypass.person)
    misplaced = grant(second_login, P.BREAK_GLASS_REVIEW, requester_person="per_another")
    with pytest.raises(StateConflictError, match="You requested this"):
        review_break_glass(misplaced, bypass)
    # A service that receives the wrong person is stopped by the database.
    bypass.person = bypass.requester_person = bypass.excluded_persons = "per_another"
    with (
        pytest.raises(IntegrityError, match="reviewed by neither its operator, the requester nor a collector"),
        transaction.atomic(),
    ):
        review_break_glass(misplaced, bypass)
    assert BreakGlass.objects.get().reviewed_at is None


@pytest.mark.parametrize("event", ["rotation.bypassed", "issuance.collected"])
def test_break_glass_bypass_or_collection_claimed_for_another_takes_two_others(scene: Scene, event: str) -> None:
    """The approver, who may have entered the command in the name of `admin`, does not review it alone."""
    admin = on_host(scene.admin)
    if event == "issuance.collected":
        request = request_key(scene.production, by=scene.admin)
        issue_request(approve(request))
        collect_key(grant(admin, P.ISSUANCE_COLLECT, scene.production), request)
    else:
        key, _ = issue(scene.production)
        rotation = request_rotation(grant(admin, P.ROTATIONS_WRITE, scene.production), key.credential, PlanOverrides())
        bypass_rotation(grant(admin, P.ROTATIONS_BYPASS, scene.production), rotation, rotation.plan_digest, "urgent")
    act = BreakGlass.objects.get(event=event)
    assert (act.is_claimed, act.host_user) == (True, "root")
    with pytest.raises(StateConflictError, match="done in your name on a command line"):
        review_break_glass(grant(scene.admin, P.BREAK_GLASS_REVIEW), act)
    with pytest.raises(StateConflictError, match="Only the claimed approver can disown"):
        disown_approval(grant(scene.admin, P.BREAK_GLASS_REVIEW), act)
    assert review(scene.approver, act).reviewed_at is None
    with pytest.raises(StateConflictError, match="You have reviewed this"):
        review(scene.approver, act)
    assert review(make_operator("third", Role.APPROVER), act).reviewed_at is not None


@pytest.fixture
def claimed(scene: Scene) -> BreakGlass:
    """`admin` requested; the approval on the command line claims the approver, but `admin` may have entered it."""
    request = request_key(scene.production, by=scene.admin)
    approve(request, by=on_host(scene.approver))
    return BreakGlass.objects.get()


def review(operator: OperatorPrincipal, act: BreakGlass) -> BreakGlass:
    """Review the act as it is stored now, and return it as it is stored then."""
    stored = BreakGlass.objects.get(pk=act.pk)
    review_break_glass(grant(operator, P.BREAK_GLASS_REVIEW, requester_person=act.requester_person), stored)
    return BreakGlass.objects.get(pk=act.pk)


@pytest.mark.database
def test_break_glass_reviewed_by_the_requester_is_refused(scene: Scene, claimed: BreakGlass) -> None:
    """One person with a shell cannot request, approve in another's name, and review, even with a second login."""
    second_login = make_operator("admin-second-login", Role.APPROVER, person=scene.admin.person)
    for operator in (scene.admin, second_login):
        with pytest.raises(StateConflictError, match="second person"):
            review(operator, claimed)
        misplaced = grant(operator, P.BREAK_GLASS_REVIEW, requester_person=claimed.person)
        with pytest.raises(StateConflictError, match="You requested this"):
            review_break_glass(misplaced, claimed)
    claimed.requester_person = claimed.excluded_persons = "per_another"
    with (
        pytest.raises(IntegrityError, match="reviewed by neither its operator, the requester nor a collector"),
        transaction.atomic(),
    ):
        review_break_glass(misplaced, claimed)
    stored = BreakGlass.objects.get()
    assert (stored.reviewed_at, stored.first_reviewer) == (None, None)


@pytest.mark.parametrize("is_first", [True, False])
def test_break_glass_claim_is_closed_by_the_claimed_approver_and_another(
    scene: Scene, claimed: BreakGlass, is_first: bool
) -> None:
    """The command line named both persons, so an approver with a shell alone does not close it."""
    third = make_operator("third", Role.APPROVER)
    reviewers = (scene.approver, third) if is_first else (third, scene.approver)
    assert review(reviewers[0], claimed).reviewed_at is None
    with pytest.raises(StateConflictError, match="You have reviewed this"):
        review(reviewers[0], claimed)
    closed = review(reviewers[1], claimed)
    assert [closed.first_reviewer_person, closed.reviewer_person] == [each.person for each in reviewers]
    assert closed.reviewed_at is not None


@pytest.mark.database
def test_break_glass_claim_reviewed_by_the_claimed_approver_alone_is_refused_by_the_database(
    scene: Scene, claimed: BreakGlass
) -> None:
    claimed.is_claimed = False
    with pytest.raises(IntegrityError, match="reviewed by two persons"), transaction.atomic():
        review_break_glass(grant(scene.approver, P.BREAK_GLASS_REVIEW), claimed)
    assert BreakGlass.objects.get().reviewed_at is None


@pytest.mark.database
def test_break_glass_claim_is_closed_by_two_others(scene: Scene, claimed: BreakGlass) -> None:
    """One other person may be the one who entered the command; two logins of one person count once."""
    third, fourth = make_operator("third", Role.APPROVER), make_operator("fourth", Role.KEY_ADMINISTRATOR)
    third_too = make_operator("third-too", Role.KEY_ADMINISTRATOR, person=third.person)
    assert review(third, claimed).reviewed_at is None
    for again in (third, third_too):
        with pytest.raises(StateConflictError, match="another person must review it too"):
            review(again, claimed)
    stored = BreakGlass.objects.get()
    stored.first_reviewer_person = "per_another"
    with pytest.raises(IntegrityError, match="reviewed by two persons"), transaction.atomic():
        review_break_glass(grant(third_too, P.BREAK_GLASS_REVIEW), stored)
    closed = review(fourth, claimed)
    assert (closed.first_reviewer_person, closed.reviewer_person) == (third.person, fourth.person)
    assert closed.reviewed_at is not None


def test_break_glass_claim_disowned_alarms_and_takes_two_others(scene: Scene, claimed: BreakGlass) -> None:
    """The approver answers "this was not me" once, and cannot confirm afterwards."""
    third, fourth = make_operator("third", Role.APPROVER), make_operator("fourth", Role.APPROVER)
    for other in (third, scene.admin):
        with pytest.raises(StateConflictError, match="Only the claimed approver"):
            disown_approval(grant(other, P.BREAK_GLASS_REVIEW), claimed)
    allowed = grant(scene.approver, P.BREAK_GLASS_REVIEW, requester_person=claimed.requester_person)
    disown_approval(allowed, claimed)
    alarm = Notice.objects.get(kind="approval.disowned")
    assert (alarm.subject, alarm.is_alarm, alarm.payload["host_user"]) == (claimed.subject, True, "root")
    with pytest.raises(StateConflictError, match="Only the claimed approver"):
        disown_approval(allowed, claimed)
    with pytest.raises(StateConflictError, match="under your name"):
        review(scene.approver, claimed)
    assert review(third, claimed).reviewed_at is None
    assert review(fourth, claimed).reviewed_at is not None


@pytest.mark.parametrize("answer", [review_break_glass, disown_approval])
def test_break_glass_answered_on_a_command_line_is_refused(
    scene: Scene, claimed: BreakGlass, answer: Callable[[Grant, BreakGlass], None]
) -> None:
    """A second claim does not confirm the first."""
    allowed = grant(on_host(scene.approver), P.BREAK_GLASS_REVIEW, requester_person=claimed.requester_person)
    with pytest.raises(StateConflictError, match="in the console"):
        answer(allowed, claimed)


def test_break_glass_claim_about_a_token_without_operator_is_reviewed_by_two_others(scene: Scene) -> None:
    """The claimed approver may have created the token that requested."""
    key, _ = issue(scene.production)
    _, text = make_token(P.ROTATIONS_WRITE, by=HOST)
    service = prove_service_token(text.reveal(), now())
    assert service is not None
    rotation = request_rotation(grant(service, P.ROTATIONS_WRITE, scene.production), key.credential, PlanOverrides())
    shell = on_host(scene.approver)
    approve_rotation(grant(shell, P.ROTATIONS_APPROVE, scene.production), rotation, rotation.plan_digest)
    act = BreakGlass.objects.get()
    with pytest.raises(StateConflictError, match="under your name"):
        review(scene.approver, act)
    assert review(scene.admin, act).reviewed_at is None
    assert review(make_operator("third", Role.APPROVER), act).reviewed_at is not None


@override_settings(APPROVALS_NEEDED={"sandbox": 2, "production": 2})
@pytest.mark.parametrize("environment", list(Environment))
def test_approval_on_the_command_line_is_refused_where_several_are_needed(
    scene: Scene, environment: Environment
) -> None:
    """One of two approvers cannot claim the other."""
    request = request_key(account("acme", environment))
    approve(request, by=scene.admin)
    with pytest.raises(StateConflictError, match="requires 2 approvals"):
        approve(request, by=on_host(scene.approver))
    assert [approval.person for approval in request.approvals.all()] == [scene.admin.person]
    assert not BreakGlass.objects.exists()


def test_break_glass_reviewed_without_the_permission_is_refused(scene: Scene, bypass: BreakGlass) -> None:
    for operator in (scene.tam, scene.responder):
        with pytest.raises(PermissionMissingError):
            grant(operator, P.BREAK_GLASS_REVIEW, requester_person=bypass.person)


def test_break_glass_noted_outside_a_recorded_block_is_refused(scene: Scene) -> None:
    """The note and the action share one transaction."""
    with pytest.raises(UnrecordedWriteError):
        note_break_glass(
            grant(scene.tam, P.ISSUANCE_COLLECT, scene.production),
            event="x",
            subject="y",
            requester_person="p",
            why="z",
        )


def test_break_glass_noted_for_a_service_principal_is_refused(scene: Scene) -> None:
    """Only persons break glass."""
    with pytest.raises(TypeError):
        note_break_glass(grant(HOST, P.MERCHANTS_WRITE), event="x", subject="y", requester_person="p", why="z")


@pytest.mark.parametrize("creator", ["host", "named on the host", "in the console"])
def test_break_glass_approval_of_a_request_by_a_claimed_token_is_noted(scene: Scene, creator: str) -> None:
    """The approver may have created the token in another's name, so comparing persons proves nothing."""
    key, _ = issue(scene.production)
    creators: dict[str, Principal] = {
        "host": HOST,
        "named on the host": on_host(scene.admin),
        "in the console": scene.admin,
    }
    _, text = make_token(P.ROTATIONS_WRITE, by=creators[creator])
    service = prove_service_token(text.reveal(), now())
    assert service is not None
    rotation = request_rotation(grant(service, P.ROTATIONS_WRITE, scene.production), key.credential, PlanOverrides())
    allowed = grant(scene.approver, P.ROTATIONS_APPROVE, scene.production, rotation.requester_person)
    approve_rotation(allowed, rotation, rotation.plan_digest)
    noted = list(BreakGlass.objects.values_list("event", "subject", "why"))
    assert noted == ([] if creator == "in the console" else [("rotation.approved", rotation.pk, CLAIMED_REQUEST)])


@pytest.mark.parametrize("what", ["issuance", "rotation"])
def test_break_glass_request_claimed_for_another_takes_one_more_person(scene: Scene, what: str) -> None:
    """The approver, who may have entered the request in the name of `admin`, does not review it."""
    claiming = on_host(scene.admin)
    if what == "issuance":
        subject = request_key(scene.production, by=claiming).pk
        approve(IssuanceRequest.objects.get(pk=subject))
    else:
        key, _ = issue(scene.production)
        asked = grant(claiming, P.ROTATIONS_WRITE, scene.production)
        rotation = request_rotation(asked, key.credential, PlanOverrides())
        allowed = grant(scene.approver, P.ROTATIONS_APPROVE, scene.production, rotation.requester_person)
        subject = approve_rotation(allowed, rotation, rotation.plan_digest).pk
    act = BreakGlass.objects.get()
    assert (act.event, act.subject, act.why) == (f"{what}.approved", subject, CLAIMED_REQUEST)
    with pytest.raises(StateConflictError, match="done under your name"):
        review_break_glass(grant(scene.approver, P.BREAK_GLASS_REVIEW), act)
    with pytest.raises(StateConflictError, match="You requested this"):
        review_break_glass(grant(scene.admin, P.BREAK_GLASS_REVIEW), act)
    assert review(make_operator("third", Role.APPROVER), act).reviewed_at is not None


TWO_APPROVALS = {"sandbox": 0, "production": 2}


@pytest.mark.database
def test_break_glass_approvals_of_a_claimed_request_are_not_reviewed_by_each_other(scene: Scene) -> None:
    """Guarantee: with several approvals, too, a request that is only claimed takes one more person."""
    second, third = (make_operator(name, Role.APPROVER) for name in ("second", "third"))
    with override_settings(APPROVALS_NEEDED=TWO_APPROVALS):
        request = request_key(scene.production, by=on_host(scene.admin))
    for approver in (scene.approver, second):
        approve(IssuanceRequest.objects.get(pk=request.pk), by=approver)
    acts = BreakGlass.objects.order_by("created_at")
    assert [act.person for act in acts] == [scene.approver.person, second.person]
    for act, approver in zip(acts, (second, scene.approver), strict=True):
        with pytest.raises(StateConflictError, match="approved this too"):
            review_break_glass(grant(approver, P.BREAK_GLASS_REVIEW), act)
        assert review(third, act).reviewed_at is not None


def test_break_glass_reviewer_of_an_approval_does_not_approve_the_same_request(scene: Scene) -> None:
    second, third = (make_operator(name, Role.APPROVER) for name in ("second", "third"))
    with override_settings(APPROVALS_NEEDED=TWO_APPROVALS):
        request = request_key(scene.production, by=on_host(scene.admin))
    approve(request)
    review(second, BreakGlass.objects.get())
    with pytest.raises(StateConflictError, match="You reviewed another approval"):
        approve(IssuanceRequest.objects.get(pk=request.pk), by=second)
    assert approve(IssuanceRequest.objects.get(pk=request.pk), by=third).state == "approved"


def test_break_glass_request_in_the_console_or_in_the_sandbox_is_not_noted(scene: Scene) -> None:
    approve(request_key(scene.production, by=scene.admin))
    with override_settings(APPROVALS_NEEDED={"sandbox": 1, "production": 1}):
        approve(request_key(scene.sandbox, by=on_host(scene.admin)))
    assert not BreakGlass.objects.exists()
