"""Actions that bypassed a rule: recorded in the action's transaction and listed until a second person reviews them."""

from dataclasses import replace

import pytest
from django.db import IntegrityError, transaction

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST, Channel
from keyvault.access.roles import Role
from keyvault.domain.errors import PermissionMissingError, StateConflictError
from keyvault.models import BreakGlass
from keyvault.models.recording import UnrecordedWriteError
from keyvault.services.approvals.break_glass import note_break_glass, review_break_glass
from keyvault.services.issuance.requests import collect_key
from keyvault.services.keys.records import prove_service_token
from rotation.domain.plan_fields import PlanOverrides
from rotation.services.rotations.requests import approve_rotation, request_rotation
from tests.factories import approve, grant, issue, issue_request, make_operator, make_token, now, request_key
from tests.services.conftest import Scene

pytestmark = [pytest.mark.database, pytest.mark.django_db]


@pytest.fixture
def bypass(scene: Scene) -> BreakGlass:
    """The requester collected a production key in person."""
    request = request_key(scene.production, by=scene.tam)
    issue_request(approve(request))
    collect_key(grant(scene.tam, P.ISSUANCE_COLLECT, scene.production), request)
    return BreakGlass.objects.get()


def test_break_glass_is_reviewed_by_a_second_person(scene: Scene, bypass: BreakGlass) -> None:
    allowed = grant(scene.approver, P.BREAK_GLASS_REVIEW, requester_person=bypass.person)
    review_break_glass(allowed, bypass)
    stored = BreakGlass.objects.get()
    assert (stored.reviewer_person, stored.reviewed_at) == (scene.approver.person, allowed.at)
    with pytest.raises(StateConflictError, match="already reviewed"):
        review_break_glass(allowed, stored)


def test_break_glass_reviewed_by_its_own_person_is_refused(scene: Scene, bypass: BreakGlass) -> None:
    """The grant refuses a review under a second login; a database constraint refuses it as well."""
    second_login = make_operator("tam-second-login", Role.KEY_ADMINISTRATOR, person=scene.tam.person)
    with pytest.raises(StateConflictError, match="second person"):
        grant(second_login, P.BREAK_GLASS_REVIEW, requester_person=bypass.person)
    misplaced = grant(second_login, P.BREAK_GLASS_REVIEW, requester_person="per_another")
    # A service that receives the wrong person is stopped by the database constraint.
    bypass.person = bypass.requester_person = "per_another"
    with (
        pytest.raises(IntegrityError, match="reviewed by neither its operator nor the requester"),
        transaction.atomic(),
    ):
        review_break_glass(misplaced, bypass)
    assert BreakGlass.objects.get().reviewed_at is None


@pytest.fixture
def claimed(scene: Scene) -> BreakGlass:
    """`admin` requested; the approval on the command line claims the approver, but `admin` may have entered it."""
    request = request_key(scene.production, by=scene.admin)
    approve(request, by=replace(scene.approver, channel=Channel.COMMAND_LINE, host_user="root"))
    return BreakGlass.objects.get()


def test_break_glass_reviewed_by_the_requester_is_refused(scene: Scene, claimed: BreakGlass) -> None:
    """One person with a shell cannot request, approve in another's name, and review, even with a second login.

    The claimed approver cannot review either; a third person can.
    """
    second_login = make_operator("admin-second-login", Role.APPROVER, person=scene.admin.person)
    for operator in (scene.admin, second_login):
        allowed = grant(operator, P.BREAK_GLASS_REVIEW, requester_person=claimed.person)
        with pytest.raises(StateConflictError, match="requester cannot review it"):
            review_break_glass(allowed, claimed)
    with pytest.raises(StateConflictError, match="second person"):
        grant(scene.approver, P.BREAK_GLASS_REVIEW, requester_person=claimed.person)
    claimed.requester_person = "per_another"
    with (
        pytest.raises(IntegrityError, match="reviewed by neither its operator nor the requester"),
        transaction.atomic(),
    ):
        review_break_glass(allowed, claimed)
    claimed = BreakGlass.objects.get()
    assert claimed.reviewed_at is None
    third = make_operator("third", Role.APPROVER)
    review_break_glass(grant(third, P.BREAK_GLASS_REVIEW, requester_person=claimed.person), claimed)
    assert BreakGlass.objects.get().reviewer_person == third.person


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


@pytest.mark.parametrize("by_host", [True, False])
def test_break_glass_approval_of_a_request_by_an_unowned_token_is_noted(scene: Scene, by_host: bool) -> None:
    """The approver may have created a token that names no operator, so comparing persons proves nothing."""
    key, _ = issue(scene.production)
    _, text = make_token(P.ROTATIONS_WRITE, by=HOST if by_host else scene.admin)
    service = prove_service_token(text.reveal(), now())
    assert service is not None
    rotation = request_rotation(grant(service, P.ROTATIONS_WRITE, scene.production), key.credential, PlanOverrides())
    allowed = grant(scene.approver, P.ROTATIONS_APPROVE, scene.production, rotation.requester_person)
    approve_rotation(allowed, rotation, rotation.plan_digest)
    noted = list(BreakGlass.objects.values_list("event", "subject", "why"))
    why = "requested with a token that was created on the host without an operator"
    assert noted == ([("rotation.approved", rotation.pk, why)] if by_host else [])
