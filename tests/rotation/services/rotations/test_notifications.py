"""Which parties a rotation waits for, and which it notifies."""

import json

import pytest

from keyvault.access.catalog import RECIPIENT_KEY, REPLACEMENT
from keyvault.access.permissions import Permission as P
from keyvault.access.roles import Role
from keyvault.domain.errors import StateConflictError
from keyvault.domain.notifications import NoticeKind
from keyvault.models import AuditEntry, Notice
from keyvault.models.usage import UseOutcome
from keyvault.services.change_feed import receipts
from keyvault.services.keys.records import prove_service_token
from keyvault.services.recording.authorization import authorize
from keyvault.services.usage.recorder import UsageLog
from rotation.domain.events import RotationState as S
from rotation.domain.plan_fields import PlanOverrides
from rotation.models import Rotation
from rotation.services.rotations.interventions import collect_replacement, confirm_rotation
from rotation.services.rotations.reports import describe, get_rotation
from rotation.services.rotations.requests import approve_rotation, reissue_key, request_rotation
from tests.clocks import Clock
from tests.factories import make_token, the_operator
from tests.rotation import scene
from tests.rotation.steps import advance, begun, quarantined, revoke, wait

pytestmark = pytest.mark.django_db


def notified_kinds(rotation: Rotation) -> list[str]:
    return sorted(Notice.objects.filter(subject=rotation.rotation_id).values_list("kind", flat=True))


@pytest.mark.database
def test_staged_rotation_waits_for_every_verifier_that_has_not_confirmed(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No merchant gets a key that some verifier would still refuse; the delivered key is the confirmed one."""
    caching = ["verifier-1"]
    monkeypatch.setattr(receipts, "list_unconfirmed", lambda sequence: caching)
    rotation = advance(begun(clock), clock)
    assert (rotation.state, rotation.delivered_at) == (S.STAGED, None)
    assert describe(rotation, clock())["waiting_for"] == "every verifier to accept the replacement: verifier-1"
    caching.clear()
    rotation = advance(rotation, clock, 3)
    assert rotation.state == S.AWAITING_PROOF
    assert rotation.credential.keys.count() == 2


def test_rotation_notifies_its_merchant_once_per_step(clock: Clock, verifier: UsageLog) -> None:
    rotation = quarantined(clock, verifier)
    rotation = wait(rotation, clock, verifier, 6)
    assert rotation.state == S.COMPLETED
    assert notified_kinds(rotation) == [
        NoticeKind.ROTATION_ENDED,
        NoticeKind.ROTATION_PLANNED,
        NoticeKind.PREDECESSOR_RETIRING,
        NoticeKind.REPLACEMENT_AVAILABLE,
    ]
    assert not Notice.objects.filter(is_alarm=True).exists()
    assert Notice.objects.filter(kind=NoticeKind.KEY_REVOKED, subject=rotation.predecessor_id).count() == 1


def test_merchant_that_does_not_use_the_replacement_is_reminded_and_an_alarm_follows(
    clock: Clock, verifier: UsageLog
) -> None:
    """Reminders are sent once each at 25, 50 and 75 % of the time; at the deadline it stalls, and both keys stay."""
    rotation = advance(begun(clock, deadline=scene.later(clock(), 1_000)), clock)
    percents: list[int] = []
    for _ in range(20):
        rotation = wait(rotation, clock, verifier, 47)
        reminders = Notice.objects.filter(kind=NoticeKind.REPLACEMENT_AWAITED).order_by("created_at")
        percents = [notice.payload["percent_of_deadline"] for notice in reminders]
    assert percents == [25, 50, 75]
    assert rotation.state == S.STALLED
    assert Notice.objects.get(kind=NoticeKind.ROTATION_STALLED).is_alarm


def test_notice_shares_the_transaction_of_its_transition(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outbox is part of the transaction: a rolled-back transition notifies no party."""
    rotation = begun(clock, deadline=scene.later(clock(), 60))
    advance(rotation, clock)
    before = Notice.objects.count()

    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("the log is full")

    with monkeypatch.context() as full:
        full.setattr("keyvault.services.recording.transaction.append_entries", refuse)
        assert advance(rotation, clock, 120).state == S.AWAITING_PROOF
    assert Notice.objects.count() == before
    stalled = advance(rotation, clock, 60)
    assert stalled.state == S.STALLED
    assert Notice.objects.count() == before + 1


def test_evidence_cited_by_the_revocation_belongs_to_its_rotation(clock: Clock, verifier: UsageLog) -> None:
    rotation = wait(quarantined(clock, verifier), clock, verifier, 6)
    entries = AuditEntry.objects.filter(event="key.revoked")
    cited = [json.loads(bytes(entry.body))["details"]["evidence"] for entry in entries]
    assert cited == [list(rotation.evidence.order_by("created_at").values_list("evidence_id", flat=True))]


def test_confirmation_of_a_dormant_credential_in_use_is_refused(clock: Clock, verifier: UsageLog) -> None:
    """A confirmation proves nothing against traffic."""
    rotation = advance(begun(clock, proof=None), clock)
    assert rotation.approved_plan.is_dormant
    scene.use(verifier, rotation.predecessor_id, 20)
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, rotation.credential.account, now=clock())
    with pytest.raises(StateConflictError, match="no confirmation"):
        confirm_rotation(grant, rotation, "Ada of Acme, by telephone")
    scene.acknowledge_replacement(rotation.rotation_id, clock())
    rotation = wait(rotation, clock, verifier, 6)
    assert rotation.state == S.AWAITING_PROOF


@pytest.mark.parametrize("is_acknowledged", [True, False])
def test_dormant_credential_stays_dormant_while_its_old_key_only_fetches_the_replacement(
    clock: Clock, verifier: UsageLog, is_acknowledged: bool
) -> None:
    """A sealed replacement is fetched with the old key, which is no traffic."""
    rotation = advance(begun(clock, proof=None), clock)
    for endpoint in (RECIPIENT_KEY, REPLACEMENT):
        seen = {"source": "192.0.2.1", "user_agent": "test", "endpoint": endpoint}
        verifier.note(rotation.predecessor_id, **seen, outcome=UseOutcome.ALLOWED)
    verifier.flush()
    if is_acknowledged:
        scene.acknowledge_replacement(rotation.rotation_id, clock())
    else:
        grant = authorize(scene.tam(), P.ROTATIONS_WRITE, rotation.credential.account, now=clock())
        confirm_rotation(grant, get_rotation(rotation.rotation_id), "Ada of Acme, by telephone")
    assert wait(rotation, clock, verifier, 3).state == S.OVERLAP


def test_replacement_requested_by_a_service_is_collected_by_a_non_approver(clock: Clock, verifier: UsageLog) -> None:
    key, _ = scene.first_key(clock())
    _, token = make_token(P.ROTATIONS_WRITE)
    service = prove_service_token(token.reveal(), clock())
    assert service is not None
    account = key.credential.account
    overrides = PlanOverrides(quiet_seconds=5, quarantine_seconds=5)
    rotation = request_rotation(authorize(service, P.ROTATIONS_WRITE, account, now=clock()), key.credential, overrides)
    approving = authorize(scene.admin(), P.ROTATIONS_APPROVE, account, now=clock())
    approve_rotation(approving, rotation, rotation.plan_digest)
    rotation = advance(rotation, clock)
    with pytest.raises(StateConflictError, match="approved the rotation"):
        collect_replacement(authorize(scene.admin(), P.ISSUANCE_COLLECT, account, now=clock()), rotation)
    collect_replacement(authorize(scene.tam(), P.ISSUANCE_COLLECT, account, now=clock()), rotation)
    assert get_rotation(rotation.rotation_id).collected_at is not None


def test_replacement_requested_by_a_responder_is_collected_with_the_permission(
    clock: Clock, verifier: UsageLog
) -> None:
    """After a leak some authorized person can always collect the key for the merchant."""
    key, _ = scene.first_key(clock())
    responder = the_operator("responder", Role.INCIDENT_RESPONDER)
    account = key.credential.account
    revoke(key, clock)
    asking = authorize(responder, P.ROTATIONS_WRITE, account, now=clock())
    rotation = advance(reissue_key(asking, key.credential, "it leaked"), clock)
    assert rotation.state == S.COMPLETED
    collect_replacement(authorize(scene.tam(), P.ISSUANCE_COLLECT, account, now=clock()), rotation)
    assert get_rotation(rotation.rotation_id).collected_at is not None
