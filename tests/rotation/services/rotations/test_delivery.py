"""Delivery of a replacement: always to the secret backend, sealed to its recipient, announced by webhook."""

import base64

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from keyvault.access.permissions import Permission as P
from keyvault.backends.base import BackendConflictError
from keyvault.backends.local import LocalKeystore
from keyvault.domain.errors import RequestInvalidError, StateConflictError
from keyvault.domain.issuance import Delivery
from keyvault.domain.notifications import NoticeKind
from keyvault.models import DeliveryState, Key, Notice, WebhookDelivery, WebhookEndpoint
from keyvault.services.keys.lifecycle import last_sequence
from keyvault.services.keys.records import prove_service_token
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.transaction import recorded
from keyvault.services.secrets.stored_copies import find_stored
from keyvault.services.usage.recorder import UsageLog
from keyvault.services.webhooks.endpoints import disable_endpoint
from rotation.domain.events import RotationState as S
from rotation.domain.plan_fields import DeliveryChannel
from rotation.models import Rotation
from rotation.services.rotations.engine import advance_rotation
from rotation.services.rotations.interventions import abort_rotation, resume_rotation
from rotation.services.rotations.reports import describe, get_rotation
from tests.clocks import Clock
from tests.factories import make_token
from tests.rotation import scene
from tests.rotation.copies import DelayedKeystore
from tests.rotation.steps import advance, begun, run_due, wait
from tests.verifiers import confirm, make_verifier

pytestmark = pytest.mark.django_db

RECIPIENT = X25519PrivateKey.from_private_bytes(bytes(range(32)))
BOTH_WAYS = (DeliveryChannel.SECRET_BACKEND, DeliveryChannel.WEBHOOK)


def make_endpoint(clock: Clock) -> WebhookEndpoint:
    account = scene.account()
    endpoint = WebhookEndpoint(account=account, url="https://merchant.example/hooks", created_at=clock())
    grant = authorize(scene.tam(), P.WEBHOOKS_WRITE, account, now=clock())
    with recorded(grant, P.WEBHOOKS_WRITE, "webhook_endpoint.added", account=account):
        endpoint.save()
    return endpoint


def sealed_key(clock: Clock) -> Key:
    """Return a credential's key whose keys are sealed to RECIPIENT; only a service may request one."""
    _, token = make_token(P.ISSUANCE_REQUEST, P.ISSUANCE_COLLECT)
    service = prove_service_token(token.reveal(), clock())
    public = base64.urlsafe_b64encode(RECIPIENT.public_key().public_bytes_raw()).decode().rstrip("=")
    delivery = Delivery.SEALED
    return scene.issue(scene.account(), clock(), delivery=delivery, recipient_public_key=public, by=service)[0]


def opened(rotation: Rotation, clock: Clock) -> str:
    handover = describe(rotation, clock())["handover"]
    assert isinstance(handover, dict)
    enc, ciphertext = (base64.urlsafe_b64decode(str(handover[part]) + "===") for part in ("enc", "ciphertext"))
    return Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM).decrypt(enc + ciphertext, RECIPIENT).decode()


def webhook_delivery(rotation: Rotation) -> WebhookDelivery:
    notices = Notice.objects.filter(kind=NoticeKind.REPLACEMENT_AVAILABLE, subject=rotation.rotation_id)
    newest = notices.order_by("-created_at", "-pk").first()
    assert newest is not None
    delivery: WebhookDelivery = newest.deliveries.get()
    return delivery


@pytest.mark.database
def test_rotation_by_webhook_waits_until_the_endpoint_accepts_the_message(clock: Clock, verifier: UsageLog) -> None:
    make_endpoint(clock)
    rotation = advance(begun(clock, channels=BOTH_WAYS), clock)
    assert (rotation.state, rotation.delivered_at is None) == (S.PUBLISHING, False)
    assert "webhook endpoint" in str(describe(rotation, clock())["waiting_for"])
    WebhookDelivery.objects.filter(pk=webhook_delivery(rotation).pk).update(
        state=DeliveryState.DELIVERED, delivered_at=clock()
    )
    rotation = wait(rotation, clock, verifier, 3)
    assert rotation.state == S.AWAITING_PROOF
    assert rotation.notified_at is not None


def test_rotation_whose_message_is_not_accepted_stalls_and_resends_when_resumed(
    clock: Clock, verifier: UsageLog
) -> None:
    make_endpoint(clock)
    rotation = advance(begun(clock, channels=BOTH_WAYS), clock)
    first = webhook_delivery(rotation)
    WebhookDelivery.objects.filter(pk=first.pk).update(state=DeliveryState.GIVEN_UP, last_error="HTTP 500")
    rotation = wait(rotation, clock, verifier, 3)
    assert (rotation.state, rotation.stalled_from) == (S.STALLED, S.PUBLISHING)
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, rotation.credential.account, now=clock.tick(1))
    resume_rotation(grant, rotation)
    assert wait(rotation, clock, verifier, 3).state == S.PUBLISHING
    assert webhook_delivery(rotation).pk != first.pk


def test_rotation_whose_endpoint_is_disabled_stalls_in_the_turn_that_this_makes_due(
    clock: Clock, verifier: UsageLog
) -> None:
    """The message is given up then, and no worker settles it later."""
    endpoint = make_endpoint(clock)
    rotation = advance(begun(clock, channels=BOTH_WAYS), clock)
    advance(rotation, clock, 7_200)
    assert run_due(clock) == 0
    grant = authorize(scene.tam(), P.WEBHOOKS_WRITE, endpoint.account, now=clock())
    disable_endpoint(grant, endpoint, "they moved")
    assert run_due(clock) == 1
    assert get_rotation(rotation.rotation_id).state == S.STALLED


def test_plan_by_webhook_without_an_endpoint_is_refused(clock: Clock) -> None:
    with pytest.raises(RequestInvalidError) as refused:
        begun(clock, channels=BOTH_WAYS)
    assert [fault.pointer for fault in refused.value.faults] == ["/channels"]


def test_message_of_a_replacement_holds_ids_and_no_secret(clock: Clock, verifier: UsageLog) -> None:
    rotation = advance(begun(clock), clock)
    payload = Notice.objects.get(kind=NoticeKind.REPLACEMENT_AVAILABLE).payload
    assert payload == {
        "rotation_id": rotation.rotation_id,
        "credential_id": rotation.credential_id,
        "replacement_key_id": rotation.replacement_id,
    }


@pytest.mark.database
@pytest.mark.parametrize("is_down", [False, True])
def test_sealed_replacement_is_collectable_with_the_backend_down(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch, *, is_down: bool
) -> None:
    """Only the holder of the recipient's private key can read the string."""
    key = sealed_key(clock)
    rotation = scene.rotate(key.credential, clock())
    with monkeypatch.context() as outage:
        for name in ("put", "read", "versions") if is_down else ():
            outage.setattr(LocalKeystore, name, scene.unavailable)
        rotation = advance(rotation, clock)
    assert rotation.state == S.AWAITING_PROOF
    assert rotation.replacement is not None
    assert rotation.replacement.key_id in opened(rotation, clock)
    assert rotation.replacement.backend_version == (None if is_down else 2)


def test_rotation_resumed_past_its_deadline_is_refused(clock: Clock, verifier: UsageLog) -> None:
    rotation = advance(begun(clock, deadline=scene.later(clock(), 60)), clock)
    rotation = wait(rotation, clock, verifier, 120)
    assert rotation.state == S.STALLED
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, rotation.credential.account, now=clock())
    with pytest.raises(StateConflictError, match="Extend it to resume"):
        resume_rotation(grant, rotation)


def test_sealed_replacement_after_a_worker_death_is_still_collectable(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipient can read only the sealed key: the next worker seals it from the backend's copy."""
    rotation = scene.rotate(sealed_key(clock).credential, clock())
    put = LocalKeystore.put

    def put_and_die(*args: object, **kwargs: object) -> int:
        put(*args, **kwargs)  # type: ignore[arg-type]  # forwarded arguments
        raise KeyboardInterrupt

    with monkeypatch.context() as death:
        death.setattr(LocalKeystore, "put", put_and_die)
        with pytest.raises(KeyboardInterrupt):
            advance_rotation(rotation.rotation_id, clock)
    rotation = wait(rotation, clock, verifier, 60)
    assert rotation.state == S.AWAITING_PROOF
    assert (rotation.replacement_id or "nothing") in opened(rotation, clock)


def test_sealed_replacement_rolled_back_makes_its_unanswered_write_fail(
    clock: Clock, verifier: UsageLog, keystore: DelayedKeystore
) -> None:
    """It is delivered without the backend. Guarantee: the merchant does not read it there after the rollback."""
    rotation = scene.rotate(sealed_key(clock).credential, clock())
    with keystore.delaying():
        rotation = advance(rotation, clock)
    assert rotation.delivered_at is not None
    grant = authorize(scene.tam(), P.ROTATIONS_WRITE, rotation.credential.account, now=clock())
    rotation = advance(abort_rotation(grant, rotation, "not today"), clock)
    assert rotation.written_back_at is not None
    assert keystore.arrive() == [BackendConflictError]
    newest = find_stored(rotation.credential)
    assert newest is not None
    assert newest.labels["key_id"] == rotation.predecessor_id


@pytest.mark.database
def test_sealed_replacement_staged_during_an_outage_is_sealed_at_once_and_shown_once_accepted(
    clock: Clock, verifier: UsageLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the backend down its string has no pending copy; a verifier may still refuse the key."""
    caching = make_verifier()
    rotation = scene.rotate(sealed_key(clock).credential, clock())
    with monkeypatch.context() as outage:
        for method in ("put", "read", "versions"):
            outage.setattr(LocalKeystore, method, scene.unavailable)
        rotation = advance(rotation, clock)
        assert (rotation.state, rotation.delivered_at) == (S.STAGED, None)
        assert rotation.handover is not None
        assert describe(rotation, clock())["handover"] is None
        assert rotation.replacement is not None
        confirm(caching, last_sequence(rotation.replacement))
        rotation = advance(rotation, clock, 60)
    assert rotation.state == S.AWAITING_PROOF
    assert (rotation.replacement_id or "none") in opened(rotation, clock)
    assert rotation.credential.keys.count() == 2
