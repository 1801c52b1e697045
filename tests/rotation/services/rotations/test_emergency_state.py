"""A credential without a good key: the new key waits for its approval only; a revocation waits for nothing."""

import pytest
from django.db import IntegrityError, connection, transaction

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER
from keyvault.backends.local import LocalKeystore
from keyvault.domain.environments import Environment
from keyvault.domain.errors import RequestInvalidError, StateConflictError
from keyvault.domain.keys import KeyState
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.revocation import RevocationReason
from keyvault.models import BreakGlass, Key, Notice
from keyvault.services.keys.lifecycle import expire_key
from keyvault.services.offboarding import offboard_merchant
from keyvault.services.recording.authorization import authorize
from keyvault.services.usage.recorder import UsageLog
from rotation.domain.events import RotationState as S
from rotation.models import Rotation
from rotation.services.rotations.interventions import abort_rotation
from rotation.services.rotations.reports import describe, get_rotation
from rotation.services.rotations.requests import approve_rotation, bypass_rotation, reissue_key
from tests.clocks import Clock
from tests.rotation import scene
from tests.rotation.steps import advance, begun, key_states, overlapping, revoke, run_due, wait

pytestmark = pytest.mark.django_db

COMPROMISE, PRODUCTION = RevocationReason.KEY_COMPROMISE, Environment.PRODUCTION


def asked_in_production(clock: Clock, **overrides: object) -> Rotation:
    key, _ = scene.first_key(clock(), environment=PRODUCTION)
    chosen: dict[str, object] = {"quiet_seconds": 3_600, "quarantine_seconds": 600, **overrides}
    return scene.rotate(key.credential, clock(), **chosen)


def approve(rotation: Rotation, clock: Clock) -> Rotation:
    grant = authorize(scene.approver(), P.ROTATIONS_APPROVE, rotation.credential.account, now=clock())
    return approve_rotation(grant, get_rotation(rotation.rotation_id), rotation.plan_digest)


def bypass(rotation: Rotation, clock: Clock, reason: str = "the leak is on the front page") -> Rotation:
    grant = authorize(scene.admin(), P.ROTATIONS_BYPASS, rotation.credential.account, now=clock())
    return bypass_rotation(grant, get_rotation(rotation.rotation_id), rotation.plan_digest, reason)


def reissue(rotation: Rotation, clock: Clock) -> Rotation:
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, rotation.credential.account, now=clock())
    return reissue_key(grant, rotation.credential, "the last key leaked")


@pytest.mark.database
def test_compromise_before_the_replacement_makes_it_an_emergency_without_window(
    clock: Clock, verifier: UsageLog
) -> None:
    rotation = begun(clock, not_before=scene.later(clock(), 86_400))
    assert advance(rotation, clock).state == S.SCHEDULED
    revoke(rotation.predecessor, clock, COMPROMISE)
    rotation = advance(rotation, clock, 3)
    assert (rotation.state, key_states(rotation)) == (S.COMPLETED, ("compromised", "active"))
    alarms = set(Notice.objects.filter(is_alarm=True).values_list("kind", flat=True))
    assert alarms == {NoticeKind.KEY_COMPROMISED, NoticeKind.CREDENTIAL_WITHOUT_KEY}


@pytest.mark.database
@pytest.mark.parametrize("is_expired", [True, False])
def test_predecessor_that_ends_before_the_delivery_raises_one_alarm(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch, is_expired: bool
) -> None:
    """The replacement verifies from `staged` on, but the merchant cannot read it yet."""
    key, _ = scene.issue(scene.account(), clock(), expires_in_days=1)
    overrides = {"predecessor_may_expire": True, "deadline": scene.later(clock(), 3 * 86_400)}
    rotation = scene.rotate(key.credential, clock(), **overrides)
    with monkeypatch.context() as outage:
        outage.setattr(LocalKeystore, "put", scene.unavailable)
        rotation = advance(rotation, clock)
        assert (rotation.state, key_states(rotation)) == (S.PUBLISHING, ("active", "active"))
        if is_expired:
            clock.tick(86_400)
            grant = authorize(WORKER, P.ISSUANCE_EXECUTE, key.credential.account, now=clock())
            expire_key(grant, Key.objects.get(pk=key.pk))
        else:
            revoke(key, clock)
        rotation = advance(rotation, clock, 3)
    assert rotation.state == S.PUBLISHING
    assert list_alarms() == [NoticeKind.CREDENTIAL_WITHOUT_KEY]
    assert advance(rotation, clock, 60).state == S.COMPLETED
    assert list_alarms() == [NoticeKind.CREDENTIAL_WITHOUT_KEY], "and no second one at its end"


def test_predecessor_that_ends_after_it_was_written_back_raises_an_alarm(clock: Clock, verifier: UsageLog) -> None:
    rotation = overlapping(clock, verifier)
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, rotation.credential.account, now=clock())
    abort_rotation(grant, get_rotation(rotation.rotation_id), "wrong merchant")
    rotation = wait(rotation, clock, verifier, 3)
    assert (rotation.state, rotation.written_back_at is None) == (S.ROLLING_BACK, False)
    revoke(rotation.predecessor, clock)
    assert list_alarms() == [NoticeKind.CREDENTIAL_WITHOUT_KEY]


def test_replacement_that_ends_after_the_predecessor_and_before_its_delivery_raises_no_second_alarm(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merchant cannot read it, so its end takes no access away."""
    key, _ = scene.issue(scene.account(), clock())
    rotation = scene.rotate(key.credential, clock())
    monkeypatch.setattr(LocalKeystore, "put", scene.unavailable)
    rotation = advance(rotation, clock)
    assert (rotation.state, key_states(rotation)) == (S.PUBLISHING, ("active", "active"))
    assert rotation.replacement is not None
    revoke(rotation.predecessor, clock)
    revoke(rotation.replacement, clock)
    assert list_alarms() == [NoticeKind.CREDENTIAL_WITHOUT_KEY]


def list_alarms() -> list[str]:
    return list(Notice.objects.filter(is_alarm=True).values_list("kind", flat=True))


def test_emergency_in_production_creates_the_key_only_after_approval(clock: Clock, verifier: UsageLog) -> None:
    """Approval gates issuance, never revocation."""
    rotation = asked_in_production(clock)
    revoke(rotation.predecessor, clock, COMPROMISE)
    rotation = advance(rotation, clock, 3)
    assert (rotation.state, rotation.replacement) == (S.EMERGENCY, None)
    assert describe(rotation, clock())["waiting_for"] == "approval by a second person"
    approve(rotation, clock)
    rotation = advance(rotation, clock, 3)
    assert (rotation.state, key_states(rotation)) == (S.COMPLETED, ("compromised", "active"))


def test_emergency_without_approval_expires(clock: Clock, verifier: UsageLog) -> None:
    rotation = asked_in_production(clock)
    revoke(rotation.predecessor, clock, COMPROMISE)
    assert advance(rotation, clock, 3).state == S.EMERGENCY
    assert advance(rotation, clock, 8 * 86_400).state == S.EXPIRED


def test_credential_without_a_usable_key_is_reissued_under_the_same_approval(clock: Clock, verifier: UsageLog) -> None:
    rotation = asked_in_production(clock)
    revoke(rotation.predecessor, clock)
    assert advance(rotation, clock, 3).state == S.CANCELLED
    reissued = reissue(rotation, clock)
    assert reissued.state == S.EMERGENCY
    assert advance(reissued, clock).replacement is None
    approve(reissued, clock)
    reissued = advance(reissued, clock, 3)
    assert (reissued.state, key_states(reissued)) == (S.COMPLETED, ("deactivated", "active"))


def test_emergency_of_an_offboarded_merchant_is_canceled(clock: Clock, verifier: UsageLog) -> None:
    """An offboarded merchant gets no key, and nothing stalls for it."""
    rotation = asked_in_production(clock)
    revoke(rotation.predecessor, clock, COMPROMISE)
    assert advance(rotation, clock, 3).state == S.EMERGENCY
    merchant = rotation.credential.account.merchant
    offboard_merchant(authorize(scene.admin(), P.MERCHANTS_OFFBOARD, now=clock()), merchant, "they closed")
    assert run_due(clock) == 1, "offboarding makes its turn due, although it changes none of its keys"
    rotation = get_rotation(rotation.rotation_id)
    assert (rotation.state, rotation.why) == (S.CANCELLED, "the merchant is offboarded")
    with pytest.raises(StateConflictError, match="was offboarded"):
        reissue(rotation, clock)


def test_credential_with_a_usable_or_suspended_key_is_not_reissued(clock: Clock, verifier: UsageLog) -> None:
    key, _ = scene.first_key(clock())
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, key.credential.account, now=clock())
    with pytest.raises(StateConflictError, match="has a key that is active"):
        reissue_key(grant, key.credential, "why not")
    with pytest.raises(RequestInvalidError, match="reason"):
        reissue_key(grant, key.credential, " ")


@pytest.mark.database
def test_revoke_with_the_backend_down_holds_and_the_new_key_follows(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compromise report takes effect immediately, during any outage."""
    rotation = begun(clock, not_before=scene.later(clock(), 86_400))
    with monkeypatch.context() as outage:
        for name in ("put", "read", "versions", "destroy"):
            outage.setattr(LocalKeystore, name, scene.unavailable)
        revoke(rotation.predecessor, clock, COMPROMISE)
        rotation = advance(rotation, clock, 3)
        assert (rotation.state, key_states(rotation)) == (S.EMERGENCY, ("compromised", None))
    rotation = advance(rotation, clock, 60)
    assert (rotation.state, key_states(rotation)) == (S.COMPLETED, ("compromised", "active"))


def test_replacement_compromised_after_the_predecessor_allows_a_reissue(clock: Clock, verifier: UsageLog) -> None:
    rotation = overlapping(clock, verifier)
    revoke(rotation.predecessor, clock, COMPROMISE)
    assert rotation.replacement is not None
    revoke(rotation.replacement, clock, COMPROMISE)
    rotation = advance(rotation, clock, 3)
    assert rotation.state == S.CANCELLED
    assert Notice.objects.filter(kind=NoticeKind.CREDENTIAL_WITHOUT_KEY, is_alarm=True).exists()
    reissued = advance(reissue(rotation, clock), clock)
    assert (reissued.state, key_states(reissued)) == (S.COMPLETED, ("compromised", "active"))


# --- break-glass ------------------------------------------------------------------------------------------


def test_bypass_starts_without_a_second_person_and_awaits_review(clock: Clock, verifier: UsageLog) -> None:
    """A bypass needs a reason, raises an alarm, and stays unreviewed until another person reviews it."""
    rotation = asked_in_production(clock)
    with pytest.raises(RequestInvalidError):
        bypass(rotation, clock, " ")
    bypass(rotation, clock)
    rotation = advance(rotation, clock, 3)
    assert rotation.state == S.AWAITING_PROOF
    assert describe(rotation, clock())["is_bypass"] is True
    act = BreakGlass.objects.get(subject=rotation.rotation_id)
    assert (act.event, act.reviewed_at) == ("rotation.bypassed", None)
    assert act.requester_person == rotation.requester_person
    notice = Notice.objects.get(kind=NoticeKind.ROTATION_BYPASSED)
    assert notice.is_alarm
    assert not notice.deliveries.exists()


def test_bypass_of_a_rotation_not_awaiting_approval_is_refused(clock: Clock, verifier: UsageLog) -> None:
    rotation = begun(clock)
    with pytest.raises(StateConflictError, match="does not wait for approval"):
        bypass(rotation, clock)
    assert get_rotation(rotation.rotation_id).predecessor.state == KeyState.ACTIVE


@pytest.mark.database
def test_bypass_by_the_database_alone_is_refused(clock: Clock, verifier: UsageLog) -> None:
    """Setting the column without its break-glass row has no effect: a trigger compares the two."""
    rotation = asked_in_production(clock)
    with pytest.raises(IntegrityError), transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(
            "UPDATE rotation_rotation SET state = 'scheduled', bypassed_at = created_at WHERE rotation_id = %s",
            [rotation.rotation_id],
        )
    assert wait(rotation, clock, verifier, 3).state == S.AWAITING_APPROVAL
