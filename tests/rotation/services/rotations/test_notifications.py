"""Who is waited for, and who is told what, on the way of a rotation."""

import json

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.access.roles import Role
from keyvault.domain.errors import StateConflictError
from keyvault.domain.notifications import NoticeKind
from keyvault.models import AuditEntry, Notice
from keyvault.services.change_feed import receipts
from keyvault.services.keys.records import prove_service_token
from keyvault.services.recording.authorization import authorize
from keyvault.services.usage.recorder import UsageLog
from rotation.domain.events import RotationState as S
from rotation.domain.plan_fields import PlanOverrides
from rotation.models import Rotation
from rotation.services.rotations import engine
from rotation.services.rotations.interventions import collect_replacement, confirm_rotation
from rotation.services.rotations.reports import describe, get_rotation
from rotation.services.rotations.requests import approve_rotation, reissue_key, request_rotation
from tests.factories import make_token, the_operator
from tests.rotation import scene
from tests.rotation.scene import Clock
from tests.rotation.steps import advance, begun, quarantined, revoke, wait

pytestmark = [pytest.mark.database, pytest.mark.django_db]


def told(rotation: Rotation) -> list[str]:
    return sorted(Notice.objects.filter(subject=rotation.rotation_id).values_list("kind", flat=True))


def test_staged_rotation_waits_for_every_verifier_that_has_not_confirmed(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is given a key that some verifier would still refuse; and it is the same key that they confirmed."""
    caching = ["verifier-1"]
    seen: list[tuple[str, object]] = []

    def pause(seconds: float) -> None:
        rotation = Rotation.objects.get()
        seen.append((rotation.state, rotation.delivered_at))
        caching.clear()

    monkeypatch.setattr(receipts, "list_unconfirmed", lambda sequence: caching)
    monkeypatch.setattr(engine, "pause", pause)
    rotation = advance(begun(clock), clock)
    assert seen == [(S.STAGED, None)]
    assert rotation.state == S.AWAITING_PROOF
    assert rotation.credential.keys.count() == 2


def test_staged_rotation_that_a_verifier_never_confirms_says_so_and_delivers_nothing(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    caching = ["verifier-1"]
    monkeypatch.setattr(receipts, "list_unconfirmed", lambda sequence: caching)
    monkeypatch.setattr(engine, "ACCEPTED_WITHIN_SECONDS", 0.0)
    rotation = advance(begun(clock), clock)
    assert (rotation.state, rotation.delivered_at) == (S.STAGED, None)
    assert describe(rotation, clock())["waiting_for"] == "every verifier to accept the replacement: verifier-1"
    # The string went with the turn: that key is burned, and another is made and accepted.
    caching.clear()
    rotation = advance(rotation, clock, 3)
    assert rotation.state == S.AWAITING_PROOF
    assert rotation.credential.keys.count() == 3


def test_rotation_tells_its_merchant_each_step_once(clock: Clock, verifier: UsageLog) -> None:
    rotation = quarantined(clock, verifier)
    rotation = wait(rotation, clock, verifier, 6)
    assert rotation.state == S.COMPLETED
    assert told(rotation) == [
        NoticeKind.ROTATION_ENDED,
        NoticeKind.ROTATION_PLANNED,
        NoticeKind.PREDECESSOR_RETIRING,
        NoticeKind.REPLACEMENT_AVAILABLE,
    ]
    assert not Notice.objects.filter(is_alarm=True).exists()
    assert Notice.objects.filter(kind=NoticeKind.KEY_REVOKED, subject=rotation.predecessor_id).count() == 1


def test_merchant_who_does_not_take_the_replacement_up_is_reminded_and_then_somebody_is_paged(
    clock: Clock, verifier: UsageLog
) -> None:
    """At 25, 50 and 75 % of the time to the deadline, each once; at the deadline it stalls, and both keys stay."""
    rotation = advance(begun(clock, deadline=scene.later(clock(), 1_000)), clock)
    percents: list[int] = []
    for _ in range(20):
        rotation = wait(rotation, clock, verifier, 47)
        reminders = Notice.objects.filter(kind=NoticeKind.REPLACEMENT_AWAITED).order_by("created_at")
        percents = [notice.payload["percent_of_deadline"] for notice in reminders]
    assert percents == [25, 50, 75]
    assert rotation.state == S.STALLED
    assert Notice.objects.get(kind=NoticeKind.ROTATION_STALLED).is_alarm


def test_notice_is_written_with_its_transition_or_not_at_all(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outbox is the same transaction: what was rolled back is told to nobody."""
    rotation = begun(clock, deadline=scene.later(clock(), 60))
    advance(rotation, clock)
    before = Notice.objects.count()

    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("the log is full")

    with monkeypatch.context() as full:
        full.setattr("keyvault.services.recording.transaction.append_entry", refuse)
        assert advance(rotation, clock, 120).state == S.AWAITING_PROOF
    assert Notice.objects.count() == before
    stalled = advance(rotation, clock, 60)
    assert stalled.state == S.STALLED
    assert Notice.objects.count() == before + 1


def test_evidence_cited_by_the_revocation_is_that_of_its_rotation(clock: Clock, verifier: UsageLog) -> None:
    rotation = wait(quarantined(clock, verifier), clock, verifier, 6)
    entries = AuditEntry.objects.filter(event="key.revoked")
    cited = [json.loads(bytes(entry.body))["details"]["evidence"] for entry in entries]
    assert cited == [list(rotation.evidence.order_by("created_at").values_list("evidence_id", flat=True))]


def test_credential_that_was_dormant_is_not_confirmed_once_its_old_key_is_in_use(
    clock: Clock, verifier: UsageLog
) -> None:
    """One person's word proves nothing against traffic."""
    rotation = advance(begun(clock, proof=None), clock)
    assert rotation.approved_plan.is_dormant
    scene.use(verifier, rotation.predecessor_id, 20)
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, rotation.credential.account, now=clock())
    with pytest.raises(StateConflictError, match="no confirmation"):
        confirm_rotation(grant, rotation, "Ada of Acme, by telephone")
    scene.acknowledge_replacement(rotation.rotation_id, clock())
    rotation = wait(rotation, clock, verifier, 6)
    assert rotation.state == S.AWAITING_PROOF


def test_replacement_that_a_service_asked_for_is_collected_by_somebody_who_did_not_approve(
    clock: Clock, verifier: UsageLog
) -> None:
    key, _ = scene.issue(scene.account(), clock())
    _, token = make_token(P.ROTATIONS_WRITE)
    service = prove_service_token(token.reveal(), clock())
    assert service is not None
    account = key.credential.account
    wish = PlanOverrides(quiet_seconds=5, quarantine_seconds=5)
    rotation = request_rotation(authorize(service, P.ROTATIONS_WRITE, account, now=clock()), key.credential, wish)
    approving = authorize(scene.admin(), P.ROTATIONS_APPROVE, account, now=clock())
    approve_rotation(approving, rotation, rotation.plan_digest)
    rotation = advance(rotation, clock)
    with pytest.raises(StateConflictError, match="requester can collect"):
        collect_replacement(authorize(scene.admin(), P.ISSUANCE_COLLECT, account, now=clock()), rotation)
    collect_replacement(authorize(scene.tam(), P.ISSUANCE_COLLECT, account, now=clock()), rotation)
    assert get_rotation(rotation.rotation_id).collected_at is not None


def test_replacement_that_a_responder_asked_for_is_collected_by_somebody_who_may(
    clock: Clock, verifier: UsageLog
) -> None:
    """After a leak the merchant is not left with a key that nobody can give to it."""
    key, _ = scene.issue(scene.account(), clock())
    responder = the_operator("responder", Role.INCIDENT_RESPONDER)
    account = key.credential.account
    revoke(key, clock)
    asking = authorize(responder, P.ROTATIONS_WRITE, account, now=clock())
    rotation = advance(reissue_key(asking, key.credential, "it leaked"), clock)
    assert rotation.state == S.COMPLETED
    collect_replacement(authorize(scene.tam(), P.ISSUANCE_COLLECT, account, now=clock()), rotation)
    assert get_rotation(rotation.rotation_id).collected_at is not None
