"""Rotations as operators request, decide and read them."""

import pytest
from django.db import IntegrityError, connection, transaction
from django.test.utils import CaptureQueriesContext

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import OperatorPrincipal, Service
from keyvault.access.roles import Role
from keyvault.backends.base import BackendUnavailableError
from keyvault.backends.local import LocalKeystore
from keyvault.domain.environments import Environment
from keyvault.domain.errors import NotFoundError, RequestInvalidError, StateConflictError
from keyvault.domain.issuance import Delivery
from keyvault.domain.keys import KeyState
from keyvault.domain.keystring import StringScope
from keyvault.models import BreakGlass, Key, Material
from keyvault.services.approvals.break_glass import review_break_glass
from keyvault.services.recording.authorization import authorize
from keyvault.services.tokens.service_tokens import create_service_token
from keyvault.services.usage.recorder import UsageLog
from keyvault.services.usage.reports import MAX_USERS
from rotation.admin.rotation_sections import awaited_table
from rotation.domain.events import RotationState as S
from rotation.domain.plan_fields import PlanOverrides
from rotation.domain.silence import AwaitedSource
from rotation.models import Rotation
from rotation.services.rotations import reports
from rotation.services.rotations.engine import advance_rotation
from rotation.services.rotations.interventions import abort_rotation, acknowledge, collect_replacement, may_collect
from rotation.services.rotations.reports import MAX_AWAITED, describe, get_rotation
from rotation.services.rotations.requests import approve_rotation, reissue_key, reject_rotation, request_rotation
from tests.clocks import Clock
from tests.factories import make_operator, on_host, the_operator
from tests.rotation import scene
from tests.rotation.scene import unavailable

pytestmark = pytest.mark.django_db

PRODUCTION = Environment.PRODUCTION


def in_production(clock: Clock) -> Rotation:
    key, _ = scene.first_key(clock(), environment=PRODUCTION)
    return scene.rotate(key.credential, clock(), quiet_seconds=3_600, quarantine_seconds=600)


def approve(rotation: Rotation, who: OperatorPrincipal, clock: Clock, digest: str | None = None) -> None:
    grant = authorize(
        who,
        P.ROTATIONS_APPROVE,
        rotation.credential.account,
        now=clock(),
        requester_person=rotation.requester_person,
    )
    approve_rotation(grant, rotation, digest or rotation.plan_digest)


@pytest.mark.database
def test_rotation_in_production_awaits_a_second_person(clock: Clock) -> None:
    rotation = in_production(clock)
    assert rotation.state == S.AWAITING_APPROVAL
    advance_rotation(rotation.rotation_id, clock)
    assert get_rotation(rotation.rotation_id).replacement is None
    approve(get_rotation(rotation.rotation_id), scene.approver(), clock)
    assert get_rotation(rotation.rotation_id).state == S.SCHEDULED


def test_rotation_request_computes_what_its_plan_depends_on_once(clock: Clock) -> None:
    """The key is read twice, its traffic and the account's endpoints only for the plan."""
    with CaptureQueriesContext(connection) as made:
        in_production(clock)
    assert sum("EXISTS" in query["sql"] and "keyvault_webhookendpoint" in query["sql"] for query in made) == 1


def test_rotation_approved_by_its_requester_is_refused(clock: Clock) -> None:
    """Four eyes compare persons: a second login of the same person does not count."""
    rotation = in_production(clock)
    twin = make_operator("tams-other-login", Role.APPROVER, person=rotation.requester_person)
    with pytest.raises(StateConflictError):
        approve(rotation, twin, clock)


def test_rotation_approval_is_bound_to_the_plan_that_was_shown(clock: Clock) -> None:
    rotation = in_production(clock)
    with pytest.raises(StateConflictError, match="not what you were shown"):
        approve(rotation, scene.approver(), clock, digest="0" * 64)


@pytest.mark.database
def test_rotation_advanced_without_approval_is_refused_by_the_database(clock: Clock) -> None:
    """Even raw SQL cannot schedule an unapproved rotation."""
    rotation = in_production(clock)
    with pytest.raises(IntegrityError), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(
            "UPDATE rotation_rotation SET state = 'scheduled' WHERE rotation_id = %s", [rotation.rotation_id]
        )


def test_rotation_without_approval_expires(clock: Clock) -> None:
    rotation = in_production(clock)
    clock.tick(8 * 86_400)
    advance_rotation(rotation.rotation_id, clock)
    assert get_rotation(rotation.rotation_id).state == S.EXPIRED


def test_rotation_rejected_creates_no_key(clock: Clock) -> None:
    rotation = in_production(clock)
    grant = authorize(
        scene.approver(),
        P.ROTATIONS_APPROVE,
        rotation.credential.account,
        now=clock(),
        requester_person=rotation.requester_person,
    )
    reject_rotation(grant, rotation, "not now")
    advance_rotation(rotation.rotation_id, clock)
    fresh = get_rotation(rotation.rotation_id)
    assert (fresh.state, fresh.replacement, fresh.why) == (S.REJECTED, None, "not now")


def test_rotation_requested_by_a_service_requires_an_operator_even_in_the_sandbox(clock: Clock) -> None:
    """A service's request alone never suffices, and the creator of its token cannot approve it."""
    key, _ = scene.first_key(clock())
    grant = authorize(scene.admin(), P.TOKENS_WRITE, now=clock())
    token, _ = create_service_token(grant, name="gw", scope=StringScope.SANDBOX, permissions=[P.ROTATIONS_WRITE])
    service = Service(token.token_id, token.name, token.creator_person, token.permission_set, token.access_scope)
    place = key.credential.account
    rotation = request_rotation(
        authorize(service, P.ROTATIONS_WRITE, place, now=clock()), key.credential, PlanOverrides()
    )
    assert rotation.state == S.AWAITING_APPROVAL
    with pytest.raises(StateConflictError):
        approve(rotation, scene.admin(), clock)
    approve(rotation, scene.approver(), clock)
    assert rotation.state == S.SCHEDULED


def test_rotation_beside_an_open_one_is_refused(clock: Clock) -> None:
    key, _ = scene.first_key(clock())
    scene.rotate(key.credential, clock())
    with pytest.raises(StateConflictError, match="open rotation"):
        scene.rotate(key.credential, clock())


def test_rotation_of_a_credential_with_two_good_keys_is_refused(clock: Clock) -> None:
    rotation = scene.rotate(scene.first_key(clock())[0].credential, clock())
    advance_rotation(rotation.rotation_id, clock)
    assert rotation.credential.keys.filter(state=KeyState.ACTIVE).count() == 2
    with pytest.raises(StateConflictError, match=f"open rotation already: {rotation.rotation_id}, which is "):
        scene.rotate(rotation.credential, clock())


@pytest.mark.parametrize(
    ("overrides", "pointer"),
    [
        ({"quiet_seconds": 60}, "/quiet_seconds"),
        ({"quarantine_seconds": 5}, "/quarantine_seconds"),
        ({"proof_count": 0}, "/proof_count"),
    ],
)
def test_rotation_plan_below_the_production_minimum_is_refused(
    clock: Clock, overrides: dict[str, int], pointer: str
) -> None:
    key, _ = scene.first_key(clock(), environment=PRODUCTION)
    chosen = {"quiet_seconds": 3_600, "quarantine_seconds": 600, **overrides}
    with pytest.raises(RequestInvalidError) as refused:
        scene.rotate(key.credential, clock(), **chosen)
    assert [fault.pointer for fault in refused.value.faults] == [pointer]


@pytest.mark.database
def test_rotation_aborted_before_delivery_discards_the_replacement(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, _ = scene.first_key(clock())
    rotation = scene.rotate(key.credential, clock())

    with monkeypatch.context() as outage:
        outage.setattr(LocalKeystore, "put", unavailable)
        advance_rotation(rotation.rotation_id, clock)
    rotation = get_rotation(rotation.rotation_id)
    assert rotation.state == S.PUBLISHING
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, rotation.credential.account, now=clock())
    abort_rotation(grant, rotation, "changed our mind")
    fresh = get_rotation(rotation.rotation_id)
    assert fresh.replacement is not None
    assert (fresh.state, fresh.replacement.state, fresh.predecessor.state) == (
        S.CANCELLED,
        KeyState.DEACTIVATED,
        KeyState.ACTIVE,
    )


def test_acknowledgement_by_any_other_key_is_not_found(clock: Clock) -> None:
    """Only possession of the replacement proves that the merchant has it."""
    key, _ = scene.first_key(clock())
    rotation = scene.rotate(key.credential, clock())
    advance_rotation(rotation.rotation_id, clock)
    rotation = get_rotation(rotation.rotation_id)
    place = key.credential.account
    with pytest.raises(NotFoundError):
        acknowledge(authorize(scene.holder_of(key), P.ROTATIONS_ACKNOWLEDGE, place, now=clock()), rotation)
    assert get_rotation(rotation.rotation_id).acknowledged_at is None
    scene.acknowledge_replacement(rotation.rotation_id, clock())
    scene.acknowledge_replacement(rotation.rotation_id, clock.tick(1))
    assert get_rotation(rotation.rotation_id).acknowledged_at is not None


def test_replacement_is_collected_once(clock: Clock) -> None:
    """Key material is shown to one person, once."""
    rotation = scene.rotate(scene.first_key(clock())[0].credential, clock())
    place = rotation.credential.account
    with pytest.raises(StateConflictError, match="not delivered yet"):
        collect_replacement(authorize(scene.tam(), P.ISSUANCE_COLLECT, place, now=clock()), rotation)
    advance_rotation(rotation.rotation_id, clock)
    rotation = get_rotation(rotation.rotation_id)
    text = collect_replacement(authorize(scene.tam(), P.ISSUANCE_COLLECT, place, now=clock()), rotation)
    assert rotation.replacement_id is not None
    assert rotation.replacement_id in text.reveal()
    for person in (scene.tam(), scene.admin()):
        with pytest.raises(StateConflictError, match="already"):
            collect_replacement(authorize(person, P.ISSUANCE_COLLECT, place, now=clock()), rotation)


def test_replacement_of_an_absent_requester_is_collected_by_an_operator_who_did_not_approve(clock: Clock) -> None:
    """An approver never gets the key; the collection still awaits a review."""
    rotation = in_production(clock)
    approve(rotation, scene.admin(), clock)
    advance_rotation(rotation.rotation_id, clock)
    rotation = get_rotation(rotation.rotation_id)
    place = rotation.credential.account
    with pytest.raises(StateConflictError, match="approved the rotation"):
        collect_replacement(authorize(scene.admin(), P.ISSUANCE_COLLECT, place, now=clock()), rotation)
    deputy = the_operator("deputy", Role.KEY_ADMINISTRATOR)
    collect_replacement(authorize(deputy, P.ISSUANCE_COLLECT, place, now=clock()), rotation)
    shown = BreakGlass.objects.get(event="rotation.collected", subject=rotation.pk)
    assert (shown.person, shown.requester_person) == (deputy.person, rotation.requester_person)


def test_replacement_of_a_shown_key_leaves_the_backend_once_collected(clock: Clock) -> None:
    key, _ = scene.issue(scene.account(), clock(), delivery=Delivery.SHOW_ONCE)
    rotation = scene.rotate(key.credential, clock())
    advance_rotation(rotation.rotation_id, clock)
    rotation = get_rotation(rotation.rotation_id)
    place = rotation.credential.account
    collect_replacement(authorize(scene.tam(), P.ISSUANCE_COLLECT, place, now=clock()), rotation)
    fresh = get_rotation(rotation.rotation_id).replacement
    assert fresh is not None
    assert fresh.material == Material.DESTROY_DUE


def test_replacement_that_is_rolled_back_is_not_collected(clock: Clock) -> None:
    rotation = scene.rotate(scene.first_key(clock())[0].credential, clock())
    advance_rotation(rotation.rotation_id, clock)
    rotation = get_rotation(rotation.rotation_id)
    place = rotation.credential.account
    abort_rotation(authorize(scene.tam(), P.ROTATIONS_WRITE, place, now=clock()), rotation, "not now")
    with pytest.raises(StateConflictError, match="being retired"):
        collect_replacement(authorize(scene.tam(), P.ISSUANCE_COLLECT, place, now=clock()), rotation)
    assert get_rotation(rotation.rotation_id).collected_at is None


def test_credential_whose_issuance_is_unfinished_is_not_reissued(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    place = scene.account()
    monkeypatch.setattr(LocalKeystore, "put", unavailable)
    with pytest.raises(BackendUnavailableError):
        scene.issue(place, clock())
    credential = Key.objects.select_related("credential__account").get(state=KeyState.PRE_ACTIVATION).credential
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, place, now=clock())
    with pytest.raises(StateConflictError, match="issuance is not completed"):
        reissue_key(grant, credential, "it has no key")


def test_replacement_of_a_sealed_key_is_never_shown(clock: Clock) -> None:
    """No person ever sees a sealed credential's key; its replacement stays where the merchant reads it."""
    key, _ = scene.first_key(clock())
    rotation = scene.rotate(key.credential, clock())
    advance_rotation(rotation.rotation_id, clock)
    rotation = get_rotation(rotation.rotation_id)
    rotation.credential.delivery = Delivery.SEALED
    place = rotation.credential.account
    with pytest.raises(StateConflictError, match="never shown to a person"):
        collect_replacement(authorize(scene.tam(), P.ISSUANCE_COLLECT, place, now=clock()), rotation)
    fresh = get_rotation(rotation.rotation_id)
    assert fresh.replacement is not None
    assert (fresh.collected_at, fresh.replacement.material) == (None, Material.HELD)


def test_replacement_shown_in_production_awaits_review(clock: Clock) -> None:
    rotation = in_production(clock)
    approve(rotation, scene.approver(), clock)
    advance_rotation(rotation.rotation_id, clock)
    rotation = get_rotation(rotation.rotation_id)
    before = BreakGlass.objects.filter(event="rotation.collected").count()
    place = rotation.credential.account
    collect_replacement(authorize(scene.tam(), P.ISSUANCE_COLLECT, place, now=clock()), rotation)
    shown = BreakGlass.objects.filter(event="rotation.collected", reviewed_at=None)
    assert shown.count() == before + 1
    assert {act.requester_person for act in shown.filter(subject=rotation.pk)} == {rotation.requester_person}


def delivered_for_responder(clock: Clock) -> Rotation:
    """Return a delivered rotation of an incident responder, who collects no keys, approved on a command line."""
    key, _ = scene.first_key(clock(), environment=PRODUCTION)
    responder = the_operator("responder", Role.INCIDENT_RESPONDER)
    allowed = authorize(responder, P.ROTATIONS_WRITE, key.credential.account, now=clock())
    rotation = request_rotation(allowed, key.credential, PlanOverrides())
    approve(rotation, on_host(scene.approver()), clock)
    advance_rotation(rotation.rotation_id, clock)
    return get_rotation(rotation.rotation_id)


def collect(rotation: Rotation, who: OperatorPrincipal, clock: Clock) -> None:
    allowed = authorize(who, P.ISSUANCE_COLLECT, rotation.credential.account, now=clock())
    collect_replacement(allowed, get_rotation(rotation.rotation_id))


def review(rotation: Rotation, who: OperatorPrincipal, clock: Clock) -> None:
    """Review the approval that was claimed on the command line."""
    act = BreakGlass.objects.get(subject=rotation.rotation_id, is_claimed=True)
    review_break_glass(authorize(who, P.BREAK_GLASS_REVIEW, now=clock(), requester_person=act.requester_person), act)


def test_replacement_collector_does_not_review_its_approval(clock: Clock) -> None:
    """One person with a shell cannot request and approve in others' names, collect the key, and review."""
    rotation = delivered_for_responder(clock)
    collect(rotation, scene.admin(), clock)
    act = BreakGlass.objects.get(is_claimed=True)
    assert act.excluded_persons.split() == [rotation.requester_person, scene.admin().person]
    with pytest.raises(StateConflictError, match="You collected the key"):
        review(rotation, scene.admin(), clock)
    review(rotation, scene.approver(), clock)


def test_replacement_whose_approval_a_person_reviewed_is_not_shown_to_that_person(clock: Clock) -> None:
    rotation = delivered_for_responder(clock)
    review(rotation, scene.admin(), clock)
    assert not may_collect(rotation, scene.admin().person)
    with pytest.raises(StateConflictError, match="bypassed or reviewed its approval, cannot collect"):
        collect(rotation, scene.admin(), clock)
    assert get_rotation(rotation.rotation_id).collected_at is None
    other = make_operator("other", Role.KEY_ADMINISTRATOR)
    collect(rotation, other, clock)
    review(rotation, scene.approver(), clock)
    assert BreakGlass.objects.get(is_claimed=True).reviewed_at is not None


def test_rotation_description_names_its_wait_and_the_users_of_the_old_key(clock: Clock, verifier: UsageLog) -> None:
    key, text = scene.first_key(clock())
    rotation = scene.rotate(key.credential, clock())
    scene.use(verifier, key.key_id, 3, source="192.0.2.7")
    advance_rotation(rotation.rotation_id, clock)
    description = describe(get_rotation(rotation.rotation_id), clock())
    assert description["state"] == S.AWAITING_PROOF
    assert str(description["waiting_for"]).startswith("the merchant to acknowledge with the replacement")
    assert [(user["source"], user["count"]) for user in description["predecessor_users"]] == [("192.0.2.7", 3)]  # type: ignore[index,union-attr,call-overload]  # parsed JSON
    assert description["has_more_predecessor_users"] is False
    assert text.reveal() not in str(description)


def test_rotation_description_and_page_tell_that_awaited_sources_are_missing(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, _ = scene.first_key(clock())
    rotation = scene.rotate(key.credential, clock())
    awaited = [AwaitedSource(f"192.0.{number}.0/24 shop", clock(), None) for number in range(MAX_AWAITED + 1)]
    monkeypatch.setattr(reports, "list_awaited_sources", lambda facts: awaited)
    description = describe(get_rotation(rotation.rotation_id), clock())
    assert isinstance(description["waiting_sources"], list)
    assert len(description["waiting_sources"]) == MAX_AWAITED
    assert description["has_more_waiting_sources"] is True
    assert awaited_table(awaited).title.endswith("latest 50 of 51")
    assert awaited_table(awaited[:-1]).title == "Sources that the rotation waits for"


def test_rotation_description_tells_that_users_of_the_old_key_are_missing(clock: Clock, verifier: UsageLog) -> None:
    key, _ = scene.first_key(clock())
    rotation = scene.rotate(key.credential, clock())
    for number in range(MAX_USERS + 1):
        scene.use(verifier, key.key_id, source=f"192.0.2.{number}")
    description = describe(get_rotation(rotation.rotation_id), clock())
    assert isinstance(description["predecessor_users"], list)
    assert len(description["predecessor_users"]) == MAX_USERS
    assert description["has_more_predecessor_users"] is True
