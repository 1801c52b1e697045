"""Public keys in shipped apps: confirmed by an operator, retired on an approved date, reinstated by no traffic."""

from typing import Any

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import OperatorPrincipal
from keyvault.domain.environments import Environment
from keyvault.domain.errors import RequestInvalidError, StateConflictError
from keyvault.domain.keys import KeyKind
from keyvault.models import BreakGlass, Material, Notice
from keyvault.models.usage import UseOutcome
from keyvault.services.recording.authorization import authorize
from keyvault.services.usage.recorder import UsageLog
from rotation.domain.events import RotationState as S
from rotation.domain.plan_fields import PlanOverrides
from rotation.models import Retirement, Rotation
from rotation.services.rotations.interventions import (
    approve_retirement,
    collect_replacement,
    confirm_rotation,
    request_retirement,
)
from rotation.services.rotations.reports import get_rotation
from rotation.services.rotations.requests import approve_rotation, request_rotation
from tests.clocks import Clock
from tests.factories import on_host
from tests.rotation import scene
from tests.rotation.steps import advance, key_states, wait

pytestmark = pytest.mark.django_db

PRODUCTION = Environment.PRODUCTION


def public_rotation(clock: Clock, environment: Environment = Environment.SANDBOX, **overrides: Any) -> Rotation:
    key, _ = scene.issue(scene.account(environment=environment), clock(), kind=KeyKind.PUBLIC)
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, key.credential.account, now=clock())
    rotation = request_rotation(grant, key.credential, PlanOverrides(**{"quarantine_seconds": 600, **overrides}))
    if environment is PRODUCTION:
        account = key.credential.account
        approval = authorize(scene.approver(), P.ROTATIONS_APPROVE, account, now=clock())
        approve_rotation(approval, rotation, rotation.plan_digest)
    return advance(rotation, clock)


def confirm(rotation: Rotation, clock: Clock) -> Rotation:
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, rotation.credential.account, now=clock())
    return confirm_rotation(grant, rotation, "Ada of Acme, by telephone: app 4.2 is out with it")


def retire(rotation: Rotation, clock: Clock, seconds: float, who: OperatorPrincipal | None = None) -> Retirement:
    grant = authorize(who or scene.tam(), P.ROTATIONS_WRITE, rotation.credential.account, now=clock())
    return request_retirement(grant, rotation, scene.later(clock(), seconds))


@pytest.mark.database
def test_public_key_is_confirmed_by_an_operator_and_overlaps_without_a_deadline(
    clock: Clock, verifier: UsageLog
) -> None:
    rotation = public_rotation(clock)
    assert rotation.state == S.AWAITING_PROOF
    scene.use(verifier, rotation.replacement_id or "", 500)
    assert wait(rotation, clock, verifier, 60).state == S.AWAITING_PROOF
    rotation = advance(confirm(rotation, clock), clock, 3)
    assert rotation.state == S.OVERLAP
    rotation = wait(rotation, clock, verifier, 500 * 86_400)
    assert (rotation.state, key_states(rotation)) == (S.OVERLAP, ("active", "active"))
    assert not Notice.objects.filter(is_alarm=True).exists()


def test_public_key_in_use_is_retired_on_its_date_and_never_reinstated(clock: Clock, verifier: UsageLog) -> None:
    rotation = confirm(public_rotation(clock), clock)
    rotation = advance(rotation, clock, 3)
    scene.use(verifier, rotation.predecessor_id, 100)
    retire(rotation, clock, 86_400)
    rotation = wait(rotation, clock, verifier, 3_600)
    assert rotation.state == S.OVERLAP
    rotation = wait(rotation, clock, verifier, 86_400)
    assert (rotation.state, key_states(rotation)) == (S.QUARANTINE, ("suspended", "active"))
    scene.use(verifier, rotation.predecessor_id, 50, outcome=UseOutcome.REFUSED)
    rotation = wait(rotation, clock, verifier, 60)
    assert (rotation.state, key_states(rotation)) == (S.QUARANTINE, ("suspended", "active"))
    assert not Notice.objects.filter(is_alarm=True).exists()
    scene.use(verifier, rotation.predecessor_id, 50, outcome=UseOutcome.REFUSED)
    rotation = wait(rotation, clock, verifier, 600)
    assert (rotation.state, key_states(rotation)) == (S.COMPLETED, ("deactivated", "active"))
    assert rotation.silent_at is None


def test_retirement_in_production_requires_a_second_person(clock: Clock, verifier: UsageLog) -> None:
    """The requester of the date cannot approve it, and until approval nothing is retired."""
    rotation = advance(confirm(public_rotation(clock, PRODUCTION), clock), clock, 3)
    retirement = retire(rotation, clock, 60)
    rotation = wait(rotation, clock, verifier, 3)
    account = rotation.credential.account
    own = retire(rotation, clock, 60, scene.admin())
    with pytest.raises(StateConflictError, match="second person"):
        approve_retirement(authorize(scene.admin(), P.ROTATIONS_APPROVE, account, now=clock()), own)
    with pytest.raises(StateConflictError, match="Another date"):
        approve_retirement(authorize(scene.approver(), P.ROTATIONS_APPROVE, account, now=clock()), retirement)
    retirement = own
    assert rotation.retire_at is None
    approve_retirement(authorize(scene.approver(), P.ROTATIONS_APPROVE, account, now=clock()), retirement)
    rotation = wait(rotation, clock, verifier, 60)
    assert rotation.state == S.QUARANTINE


def test_retirement_during_quarantine_is_refused(clock: Clock, verifier: UsageLog) -> None:
    """Neither a request nor an approval succeeds that no longer changes anything."""
    rotation = advance(confirm(public_rotation(clock, PRODUCTION), clock), clock, 3)
    account, first = rotation.credential.account, retire(rotation, clock, 60)
    approve_retirement(authorize(scene.approver(), P.ROTATIONS_APPROVE, account, now=clock()), first)
    late = retire(get_rotation(rotation.rotation_id), clock, 86_400)
    rotation = wait(rotation, clock, verifier, 61)
    assert rotation.state == S.QUARANTINE
    with pytest.raises(StateConflictError, match="no effect"):
        retire(rotation, clock, 3_600)
    with pytest.raises(StateConflictError, match="no effect"):
        approve_retirement(authorize(scene.approver(), P.ROTATIONS_APPROVE, account, now=clock()), late)
    late.refresh_from_db()
    assert late.approved_at is None


def test_retirement_requested_on_a_command_line_requires_a_review(clock: Clock, verifier: UsageLog) -> None:
    """The approver may have named another operator there."""
    rotation = advance(confirm(public_rotation(clock, PRODUCTION), clock), clock, 3)
    retirement = retire(rotation, clock, 60, on_host(scene.admin()))
    place = rotation.credential.account
    approve_retirement(authorize(scene.approver(), P.ROTATIONS_APPROVE, place, now=clock()), retirement)
    act = BreakGlass.objects.get()
    assert (act.event, act.subject) == ("rotation.retirement_approved", rotation.pk)
    assert act.excluded_persons.split() == [scene.admin().person, scene.approver().person]


@pytest.mark.parametrize(
    ("overrides", "pointer"),
    [({"deadline": 86_400}, "/deadline"), ({"proof": "traffic"}, "/proof"), ({"retire_at": -5}, "/retire_at")],
)
def test_public_plan_with_private_key_fields_is_refused(clock: Clock, overrides: dict[str, Any], pointer: str) -> None:
    chosen: dict[str, Any] = {
        name: scene.later(clock(), value) if isinstance(value, int) else value for name, value in overrides.items()
    }
    with pytest.raises(RequestInvalidError) as refused:
        public_rotation(clock, **chosen)
    assert pointer in [fault.pointer for fault in refused.value.faults]


def test_public_replacement_collected_stays_in_the_backend_without_break_glass(
    clock: Clock, verifier: UsageLog
) -> None:
    """A public key is no secret: the console shows it again at any time."""
    rotation = public_rotation(clock, PRODUCTION)
    before = BreakGlass.objects.count()
    grant = authorize(scene.tam(), P.ISSUANCE_COLLECT, rotation.credential.account, now=clock())
    collect_replacement(grant, rotation)
    fresh = get_rotation(rotation.rotation_id).replacement
    assert fresh is not None
    assert fresh.material == Material.HELD
    assert BreakGlass.objects.count() == before
