"""Acts that went round a rule on purpose: noted with the act, in sight until a second person has looked."""

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
def act(scene: Scene) -> BreakGlass:
    """Tam was shown a production key."""
    request = request_key(scene.production, by=scene.tam)
    issue_request(approve(request))
    collect_key(grant(scene.tam, P.ISSUANCE_COLLECT, scene.production), request)
    return BreakGlass.objects.get()


def test_break_glass_act_is_reviewed_by_a_second_person(scene: Scene, act: BreakGlass) -> None:
    allowed = grant(scene.approver, P.BREAK_GLASS_REVIEW, requester_person=act.person)
    review_break_glass(allowed, act)
    stored = BreakGlass.objects.get()
    assert (stored.reviewer_person, stored.reviewed_at) == (scene.approver.person, allowed.at)
    with pytest.raises(StateConflictError, match="already reviewed"):
        review_break_glass(allowed, stored)


def test_break_glass_act_is_not_reviewed_by_its_own_person(scene: Scene, act: BreakGlass) -> None:
    """Nobody reviews their own act, under no log-in: the decision says so, and the database if it was not asked."""
    too = make_operator("tam-too", Role.KEY_ADMINISTRATOR, person=scene.tam.person)
    with pytest.raises(StateConflictError, match="second person"):
        grant(too, P.BREAK_GLASS_REVIEW, requester_person=act.person)
    misplaced = grant(too, P.BREAK_GLASS_REVIEW, requester_person="per_another")
    # A service that is told so is stopped by the database, which knows better.
    act.person = act.requester_person = "per_another"
    with pytest.raises(IntegrityError, match="does not review it"), transaction.atomic():
        review_break_glass(misplaced, act)
    assert BreakGlass.objects.get().reviewed_at is None


@pytest.fixture
def claimed(scene: Scene) -> BreakGlass:
    """`admin` asked, and whoever sat at the command line claimed the approver's yes: it may have been `admin`."""
    request = request_key(scene.production, by=scene.admin)
    approve(request, by=replace(scene.approver, channel=Channel.COMMAND_LINE, host_user="root"))
    return BreakGlass.objects.get()


def test_break_glass_act_is_not_reviewed_by_whoever_asked_for_it(scene: Scene, claimed: BreakGlass) -> None:
    """One person with a shell does not ask, approve in another's name, and review that: not under a second log-in
    either. The approver whose name was claimed says nothing about it; a third person does."""
    too = make_operator("admin-too", Role.APPROVER, person=scene.admin.person)
    for operator in (scene.admin, too):
        allowed = grant(operator, P.BREAK_GLASS_REVIEW, requester_person=claimed.person)
        with pytest.raises(StateConflictError, match="requester cannot review it"):
            review_break_glass(allowed, claimed)
    with pytest.raises(StateConflictError, match="second person"):
        grant(scene.approver, P.BREAK_GLASS_REVIEW, requester_person=claimed.person)
    claimed.requester_person = "per_another"
    with pytest.raises(IntegrityError, match="does not review it"), transaction.atomic():
        review_break_glass(allowed, claimed)
    claimed = BreakGlass.objects.get()
    assert claimed.reviewed_at is None
    third = make_operator("third", Role.APPROVER)
    review_break_glass(grant(third, P.BREAK_GLASS_REVIEW, requester_person=claimed.person), claimed)
    assert BreakGlass.objects.get().reviewer_person == third.person


def test_break_glass_act_is_reviewed_by_those_who_may(scene: Scene, act: BreakGlass) -> None:
    for operator in (scene.tam, scene.responder):
        with pytest.raises(PermissionMissingError):
            grant(operator, P.BREAK_GLASS_REVIEW, requester_person=act.person)


def test_break_glass_act_is_noted_inside_the_block_of_the_act_only(scene: Scene) -> None:
    """The note is in the transaction of the act: neither without the other."""
    with pytest.raises(UnrecordedWriteError):
        note_break_glass(
            grant(scene.tam, P.ISSUANCE_COLLECT, scene.production),
            event="x",
            subject="y",
            requester_person="p",
            why="z",
        )


def test_break_glass_is_a_person_s(scene: Scene) -> None:
    """Our own machinery has no glass to break."""
    with pytest.raises(TypeError):
        note_break_glass(grant(HOST, P.MERCHANTS_WRITE), event="x", subject="y", requester_person="p", why="z")


@pytest.mark.parametrize("by_host", [True, False])
def test_break_glass_approval_of_what_a_token_of_nobody_asked_is_noted(scene: Scene, by_host: bool) -> None:
    """Whoever made a token on the host in nobody's name may be the approver: no comparison of persons tells."""
    key, _ = issue(scene.production)
    _, text = make_token(P.ROTATIONS_WRITE, by=HOST if by_host else scene.admin)
    service = prove_service_token(text.reveal(), now())
    assert service is not None
    asked = request_rotation(grant(service, P.ROTATIONS_WRITE, scene.production), key.credential, PlanOverrides())
    allowed = grant(scene.approver, P.ROTATIONS_APPROVE, scene.production, asked.requester_person)
    approve_rotation(allowed, asked, asked.plan_digest)
    noted = list(BreakGlass.objects.values_list("event", "subject", "why"))
    why = "requested with a token that was created on the host without an operator"
    assert noted == ([("rotation.approved", asked.pk, why)] if by_host else [])
