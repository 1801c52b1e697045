"""Keys that services request with a token: sealed or plain, collected once by that token's lineage, or discarded."""

import base64
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
from django.db.models import QuerySet
from django.test import override_settings

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER, Service
from keyvault.backends.base import Mount
from keyvault.domain.environments import Environment
from keyvault.domain.errors import NotFoundError, PermissionMissingError, RequestInvalidError, StateConflictError
from keyvault.domain.issuance import COLLECT_WITHIN, Delivery, IssuanceState
from keyvault.domain.keys import KeyKind
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Account, BreakGlass, IssuanceRequest, Key, KeyUse, Material, Notice, ServiceToken
from keyvault.services import maintenance
from keyvault.services.issuance import collection
from keyvault.services.issuance import requests as issuance
from keyvault.services.issuance.collection import Handover
from keyvault.services.keys.lifecycle import report_compromise, revoke_key, suspend_key
from keyvault.services.keys.records import prove_service_token
from keyvault.services.secrets.backend import secret_backend
from keyvault.services.secrets.stored_copies import read_public_string, read_string
from keyvault.services.tokens.service_tokens import rotate_service_token
from keyvault.services.work import row_turns
from tests.factories import account, approve, grant, issue_request, make_token, now, request_key
from tests.services.conftest import Scene, make_scene
from tests.services.keys.test_lifecycle import verdict
from tests.services.racing import race
from tests.services.rows import disable_triggers, dump_tables, last_body, last_ids, written_since

pytestmark = pytest.mark.django_db

S = IssuanceState
MOMENT = timedelta(microseconds=1)
RECIPIENT = X25519PrivateKey.from_private_bytes(bytes(range(32)))


def encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


PUBLIC = encode(RECIPIENT.public_key().public_bytes_raw())


@dataclass(frozen=True)
class Requester:
    """A service and its token, created by `admin`."""

    token: ServiceToken
    service: Service


def authenticate(text: Plaintext) -> Service:
    service = prove_service_token(text.reveal(), now())
    assert service is not None
    return service


def make_requester(scene: Scene) -> Requester:
    token, text = make_token(P.ISSUANCE_REQUEST, P.ISSUANCE_COLLECT, by=scene.admin)
    return Requester(token, authenticate(text))


@pytest.fixture
def requester(scene: Scene) -> Requester:
    return make_requester(scene)


def request_key_for(
    service: Service,
    place: Account,
    *,
    kind: KeyKind = KeyKind.PRIVATE,
    delivery: Delivery = Delivery.SEALED,
    recipient: str | None = None,
    at: datetime | None = None,
) -> IssuanceRequest:
    return issuance.request_issuance(
        grant(service, P.ISSUANCE_REQUEST, place, at=at),
        place,
        kind=kind,
        label="checkout",
        delivery=delivery,
        recipient_public_key=(PUBLIC if delivery is Delivery.SEALED else "") if recipient is None else recipient,
    )


def request_and_issue(service: Service, place: Account, **options: Any) -> IssuanceRequest:
    request = request_key_for(service, place, **options)
    if request.state == S.PENDING:
        approve(request, at=options.get("at"))
    issue_request(request, at=options.get("at"))
    return fresh(request)


def fresh(request: IssuanceRequest) -> IssuanceRequest:
    found = issuance.get_request(request.pk)
    assert found is not None
    return found


def collect(service: Service, request: IssuanceRequest, at: datetime | None = None) -> Handover:
    """Read the handover, then record the collection, as the view does."""
    allowed = grant(service, P.ISSUANCE_COLLECT, request.account, at=at)
    handover = collection.read_handover(allowed, request)
    with collection.record_collection(allowed, request):
        pass
    return handover


def unseal(handover: Handover) -> Plaintext:
    assert handover.text is None
    assert handover.sealed is not None
    enc, ciphertext = (
        base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))
        for part in (handover.sealed.enc, handover.sealed.ciphertext)
    )
    suite = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)
    return Plaintext(suite.decrypt(enc + ciphertext, RECIPIENT).decode())


# ---------------------------------------------------------------------------------------------------- requesting


@pytest.mark.database
def test_service_request_names_its_token_and_the_responsible_person(scene: Scene, requester: Requester) -> None:
    request = request_key_for(requester.service, scene.production)
    assert (request.requested_via, request.requester) == (requester.token, None)
    assert request.requester_person == scene.admin.person
    assert last_body("issuance.requested")["actor"] == f"service:{requester.token.pk}"


@pytest.mark.parametrize("environment", list(Environment))
def test_service_request_is_approved_by_an_operator_who_did_not_create_the_token(
    scene: Scene, requester: Requester, environment: Environment
) -> None:
    """No service gets a key without a person, in the sandbox neither. The creator of its token is the requester."""
    request = request_key_for(requester.service, account("acme", environment))
    assert (request.state, request.approvals_needed) == (S.PENDING, 1)
    with pytest.raises(StateConflictError, match="second person"):
        approve(request, by=scene.admin)
    assert approve(request, by=scene.approver).state == S.APPROVED


@pytest.mark.database
def test_service_request_with_a_changed_recipient_is_not_issued(scene: Scene, requester: Requester) -> None:
    """The recipient's public key is part of the approved plan."""
    other = encode(X25519PrivateKey.generate().public_key().public_bytes_raw())
    first, second = (
        request_key_for(requester.service, scene.production),
        request_key_for(requester.service, scene.production, recipient=other),
    )
    assert first.plan_digest != second.plan_digest
    approve(first)
    disable_triggers()
    QuerySet(IssuanceRequest).filter(pk=first.pk).update(recipient_public_key=other)
    with pytest.raises(StateConflictError, match="differs from the approved plan"):
        issue_request(fresh(first))
    assert not Key.objects.exists()


@pytest.mark.database
def test_service_request_with_a_recipient_changed_after_issuance_is_not_handed_over(
    scene: Scene, requester: Requester
) -> None:
    request = request_and_issue(requester.service, scene.production)
    attacker = X25519PrivateKey.generate().public_key().public_bytes_raw()
    disable_triggers()
    QuerySet(IssuanceRequest).filter(pk=request.pk).update(recipient_public_key=encode(attacker))
    with pytest.raises(StateConflictError, match="differs from the approved plan"):
        collect(requester.service, fresh(request))


@pytest.mark.parametrize(
    ("delivery", "recipient", "pointer"),
    [
        (Delivery.SEALED, "", "/recipient_public_key"),
        (Delivery.SEALED, "A" * 43, "/recipient_public_key"),
        (Delivery.SEALED, "A" * 42, "/recipient_public_key"),
        (Delivery.SECRET_BACKEND, PUBLIC, "/delivery"),
        (Delivery.SHOW_ONCE, PUBLIC, "/delivery"),
    ],
)
def test_service_request_delivery_and_recipient_must_match(
    scene: Scene, requester: Requester, delivery: Delivery, recipient: str, pointer: str
) -> None:
    with pytest.raises(RequestInvalidError) as caught:
        request_key_for(requester.service, scene.sandbox, delivery=delivery, recipient=recipient)
    assert [fault.pointer for fault in caught.value.faults] == [pointer]


def test_service_request_to_show_a_production_key_is_refused(scene: Scene, requester: Requester) -> None:
    """In production a service receives a key sealed or through the secret backend; only a person may be shown one."""
    with pytest.raises(RequestInvalidError) as caught:
        request_key_for(requester.service, scene.production, delivery=Delivery.SHOW_ONCE)
    assert [fault.pointer for fault in caught.value.faults] == ["/delivery"]
    assert request_key(scene.production, delivery=Delivery.SHOW_ONCE).state == S.PENDING
    assert request_key_for(requester.service, scene.sandbox, delivery=Delivery.SHOW_ONCE).state == S.PENDING


# ------------------------------------------------------------------------------------------------- collecting


@pytest.mark.database
@pytest.mark.parametrize("environment", list(Environment))
def test_collection_of_a_sealed_key_is_opened_by_its_recipient_and_verifies(
    scene: Scene, requester: Requester, environment: Environment
) -> None:
    """Only the recipient can open the key, and no copy remains."""
    request = request_and_issue(requester.service, account("acme", environment))
    text = unseal(collect(requester.service, request))
    assert request.state == S.COLLECTED
    assert verdict(text, environment=environment) is None
    assert text.reveal() not in repr(dump_tables())
    assert last_body("issuance.collected")["actor"] == f"service:{requester.token.pk}"
    assert not BreakGlass.objects.exists(), "no person saw the key"
    maintenance.destroy_due()
    assert Key.objects.get().material == Material.DESTROYED


@pytest.mark.parametrize("delivery", [Delivery.SHOW_ONCE, Delivery.SECRET_BACKEND])
def test_collection_of_a_plain_key_in_sandbox_returns_the_string(
    scene: Scene, requester: Requester, delivery: Delivery
) -> None:
    request = request_and_issue(requester.service, scene.sandbox, delivery=delivery)
    handover = collect(requester.service, request)
    assert handover.sealed is None
    assert handover.text is not None
    assert verdict(handover.text) is None
    maintenance.destroy_due()
    kept = Key.objects.get().material == Material.HELD
    assert kept == (delivery is Delivery.SECRET_BACKEND)


def test_collection_of_an_unsealed_production_key_is_refused(scene: Scene, requester: Requester) -> None:
    request = request_and_issue(requester.service, scene.production, delivery=Delivery.SECRET_BACKEND)
    with pytest.raises(StateConflictError, match="secret backend"):
        collect(requester.service, request)
    assert fresh(request).state == S.ISSUED


def test_collection_by_another_token_is_refused_and_by_a_successor_allowed(scene: Scene, requester: Requester) -> None:
    """Another token of the same creator and permissions finds no request; a rotated token collects."""
    request = request_and_issue(requester.service, scene.sandbox)
    with pytest.raises(NotFoundError):
        collect(make_requester(scene).service, request)
    _, text = rotate_service_token(grant(scene.admin, P.TOKENS_WRITE), requester.token, 0)
    assert verdict(unseal(collect(authenticate(text), request))) is None


def test_collection_by_the_predecessor_of_the_requesting_token_is_allowed(scene: Scene, requester: Requester) -> None:
    """During the overlap both tokens belong to the same service."""
    _, text = rotate_service_token(grant(scene.admin, P.TOKENS_WRITE), requester.token, 1)
    request = request_and_issue(authenticate(text), scene.sandbox)
    assert verdict(unseal(collect(requester.service, request))) is None


@pytest.mark.parametrize("delivery", [Delivery.SEALED, Delivery.SHOW_ONCE])
def test_collection_by_the_person_responsible_for_the_token_is_refused(
    scene: Scene, requester: Requester, delivery: Delivery
) -> None:
    """No person collects what a service requested."""
    request = request_and_issue(requester.service, scene.sandbox, delivery=delivery)
    allowed = grant(scene.admin, P.ISSUANCE_COLLECT, scene.sandbox)
    with pytest.raises(StateConflictError, match="A service requested"):
        issuance.collect_key(allowed, request)
    with pytest.raises(NotFoundError):
        collection.read_handover(allowed, request)
    assert fresh(request).state == S.ISSUED


def test_collection_by_a_service_of_an_operator_request_is_refused(scene: Scene, requester: Requester) -> None:
    request = request_key(scene.sandbox)
    issue_request(request)
    with pytest.raises(NotFoundError):
        collect(requester.service, fresh(request))


def test_collection_with_a_grant_to_request_is_refused(scene: Scene, requester: Requester) -> None:
    """Requesting and collecting are separate permissions."""
    request = request_and_issue(requester.service, scene.sandbox)
    misplaced = grant(requester.service, P.ISSUANCE_REQUEST, scene.sandbox)
    with pytest.raises(PermissionMissingError), collection.record_collection(misplaced, request):
        pytest.fail("the collection was recorded")
    assert fresh(request).state == S.ISSUED


def test_collection_before_the_key_is_issued_is_a_conflict(scene: Scene, requester: Requester) -> None:
    request = request_key_for(requester.service, scene.production)
    for state in ("pending", "approved"):
        with pytest.raises(StateConflictError, match=state):
            collect(requester.service, fresh(request))
        if state == "pending":
            approve(request)


@pytest.mark.parametrize("end", [revoke_key, report_compromise])
def test_collection_of_a_revoked_key_is_refused(scene: Scene, requester: Requester, end: Any) -> None:
    """A key revoked before its collection is not handed out."""
    request = request_and_issue(requester.service, scene.sandbox)
    assert request.key is not None
    allowed = grant(scene.responder, P.KEYS_REVOKE, scene.sandbox)
    end(allowed, request.key, *([RevocationReason.SUPERSEDED] if end is revoke_key else []))
    with pytest.raises(StateConflictError, match="ended before it was collected"):
        collect(requester.service, fresh(request))
    maintenance.destroy_due()
    with pytest.raises(StateConflictError, match="ended before it was collected"):
        collect(requester.service, fresh(request))


# ---------------------------------------------------------------------------------------------------- discarding


def discard(request: IssuanceRequest, at: datetime | None = None) -> None:
    assert request.issued_at is not None
    allowed = grant(WORKER, P.ISSUANCE_EXECUTE, request.account, at=at or request.issued_at + COLLECT_WITHIN)
    collection.discard_uncollected(allowed, request)


def test_discard_of_an_uncollected_key_notifies_the_merchant(scene: Scene, requester: Requester) -> None:
    """A key that was revoked earlier causes no second notice."""
    requests = [request_and_issue(requester.service, scene.sandbox, at=now() - COLLECT_WITHIN) for _ in range(2)]
    discarded, revoked = (request.key for request in requests)
    assert discarded is not None
    assert revoked is not None
    report_compromise(grant(scene.admin, P.KEYS_REPORT_COMPROMISE, scene.sandbox), revoked)
    maintenance.discard_due()
    notice = Notice.objects.get(kind=NoticeKind.KEY_REVOKED)
    assert (notice.subject, notice.account, notice.is_alarm) == (discarded.key_id, scene.sandbox, False)
    assert notice.payload == {
        "reason": "cessation_of_operation",
        "key_id": discarded.key_id,
        "credential_id": discarded.credential_id,
    }


@pytest.mark.parametrize("delivery", [Delivery.SEALED, Delivery.SHOW_ONCE])
def test_discard_after_the_collection_period_revokes_the_key(
    scene: Scene, requester: Requester, delivery: Delivery
) -> None:
    """After 72 hours one transaction revokes the key, closes the request and schedules the copy for destruction."""
    request = request_and_issue(requester.service, scene.sandbox, delivery=delivery, at=now() - COLLECT_WITHIN)
    assert request.key is not None
    text = read_string(request.key)
    before = last_ids()
    maintenance.discard_due()
    assert written_since(before) == (["issuance.burned", "key.burned"], [("key", request.key.pk)])
    assert fresh(request).state == S.BURNED
    key = Key.objects.get()
    assert (key.state, key.retirement, key.reason) == ("deactivated", "revoked", "cessation_of_operation")
    assert verdict(text) is not None
    maintenance.destroy_due()
    versions = secret_backend().versions(Mount.SANDBOX, key.credential.backend_path)
    assert [version.state for version in versions] == ["destroyed"]
    before = last_ids()
    maintenance.discard_due()
    maintenance.destroy_due()
    assert written_since(before) == ([], [])
    with pytest.raises(StateConflictError, match="not collected in time"):
        collect(requester.service, fresh(request))


def test_discard_of_a_key_in_the_secret_backend_is_refused(scene: Scene, requester: Requester) -> None:
    """The merchant reads that key in the secret backend, without a collection."""
    request = request_and_issue(
        requester.service, scene.sandbox, delivery=Delivery.SECRET_BACKEND, at=now() - 2 * COLLECT_WITHIN
    )
    maintenance.discard_due()
    assert fresh(request).state == S.ISSUED
    with pytest.raises(StateConflictError, match="may still be collected"):
        discard(request)


@pytest.mark.parametrize("delivery", [Delivery.SEALED, Delivery.SHOW_ONCE])
def test_discard_of_a_public_key_is_refused(scene: Scene, requester: Requester, delivery: Delivery) -> None:
    """Its string may be shown again, so shipped apps may hold a key without a collection."""
    long_ago = now() - 2 * COLLECT_WITHIN
    request = request_and_issue(requester.service, scene.sandbox, delivery=delivery, kind=KeyKind.PUBLIC, at=long_ago)
    assert request.key is not None
    shown = read_public_string(grant(scene.tam, P.KEYS_READ, scene.sandbox), request.key)
    maintenance.discard_due()
    assert Key.objects.get().state == "active"
    with pytest.raises(StateConflictError, match="may still be collected"):
        discard(request, now())
    handover = collect(requester.service, fresh(request))
    assert (handover.text or unseal(handover)).reveal() == shown.reveal()


def use(key: Key) -> None:
    KeyUse(key=key, first_at=now(), last_at=now(), count=1).save()


def test_discard_of_a_used_key_is_refused_and_logged_once(
    scene: Scene, requester: Requester, caplog: pytest.LogCaptureFixture
) -> None:
    """A used key has a holder; revoking it would stop a merchant, so a person decides."""
    request = request_and_issue(requester.service, scene.sandbox, at=now() - COLLECT_WITHIN)
    assert request.key is not None
    use(request.key)
    before = last_ids()
    for _ in range(2):
        maintenance.discard_due()
    assert written_since(before) == ([], [])
    assert (fresh(request).state, Key.objects.get().state) == (S.ISSUED, "active")
    with pytest.raises(StateConflictError, match="in use"):
        discard(request)
    warnings = [record for record in caplog.records if record.getMessage() == "an uncollected key was used"]
    assert [(each.levelname, each.__dict__["issuance_request_id"], each.__dict__["key_id"]) for each in warnings] == [
        ("WARNING", request.pk, request.key.pk)
    ]
    with pytest.raises(StateConflictError, match="not collected in time"):
        collect(requester.service, fresh(request))


def test_discard_with_more_used_keys_than_one_sweep_logs_each(
    scene: Scene, requester: Requester, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unresolved used keys do not hide others from the log."""
    monkeypatch.setattr(row_turns, "BATCH", 2)
    monkeypatch.setattr(maintenance, "_used_uncollected", maintenance.UsedUncollected())
    requests = [request_and_issue(requester.service, scene.sandbox, at=now() - COLLECT_WITHIN) for _ in range(5)]
    for request in requests:
        assert request.key is not None
        use(request.key)

    def sweep() -> list[str]:
        caplog.clear()
        maintenance.discard_due()
        return [each.__dict__["issuance_request_id"] for each in caplog.records if "uncollected" in each.getMessage()]

    sweeps = [sweep() for _ in range(4)]
    assert [len(each) for each in sweeps] == [2, 2, 1, 0]
    assert {issuance_request_id for each in sweeps for issuance_request_id in each} == {
        request.pk for request in requests
    }
    late = request_and_issue(requester.service, scene.sandbox, at=now() - COLLECT_WITHIN)
    assert late.key is not None
    use(late.key)
    assert sweep() == [late.pk]
    # After a day without resolution, all of them are logged again.
    maintenance._used_uncollected.again_at = now()
    assert len(sweep()) == 2


def test_discard_of_a_used_key_that_was_revoked_closes_its_request(
    scene: Scene, requester: Requester, caplog: pytest.LogCaptureFixture
) -> None:
    request = request_and_issue(requester.service, scene.sandbox, at=now() - COLLECT_WITHIN)
    assert request.key is not None
    use(request.key)
    revoke_key(grant(scene.admin, P.KEYS_REVOKE, scene.sandbox), request.key, RevocationReason.SUPERSEDED)
    maintenance.discard_due()
    assert fresh(request).state == S.BURNED
    assert Key.objects.get().reason == "superseded"
    assert "an uncollected key was used" not in caplog.text


def test_collection_period_ends_by_the_clock(scene: Scene, requester: Requester) -> None:
    """Up to 72 hours the key can be collected, after that it can be discarded; the sweep's timing does not matter."""
    request = request_and_issue(requester.service, scene.sandbox)
    assert request.issued_at is not None
    end = request.issued_at + COLLECT_WITHIN
    with pytest.raises(StateConflictError, match="may still be collected"):
        discard(fresh(request), end - MOMENT)
    with pytest.raises(StateConflictError, match="not collected in time"):
        collect(requester.service, fresh(request), end)
    assert unseal(collect(requester.service, fresh(request), end - MOMENT)).reveal()
    with pytest.raises(StateConflictError, match="was collected, or may still be"):
        discard(fresh(request), end)


def test_collection_period_applies_to_operator_requests(scene: Scene) -> None:
    request = request_key(scene.sandbox, delivery=Delivery.SHOW_ONCE, at=now() - COLLECT_WITHIN)
    issue_request(request, at=now() - COLLECT_WITHIN)
    with pytest.raises(StateConflictError, match="not collected in time"):
        issuance.collect_key(grant(scene.tam, P.ISSUANCE_COLLECT, scene.sandbox), fresh(request))
    maintenance.discard_due()
    assert fresh(request).state == S.BURNED


@pytest.mark.parametrize("was", ["suspended", "deactivated"])
def test_discard_revokes_a_suspended_key_and_keeps_a_revoked_one(scene: Scene, requester: Requester, was: str) -> None:
    request = request_and_issue(requester.service, scene.sandbox, at=now() - COLLECT_WITHIN)
    assert request.key is not None
    if was == "suspended":
        suspend_key(grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox), request.key)
    else:
        revoke_key(grant(scene.admin, P.KEYS_REVOKE, scene.sandbox), request.key, RevocationReason.SUPERSEDED)
    maintenance.discard_due()
    key = Key.objects.get()
    assert (key.state, key.material) == ("deactivated", Material.DESTROY_DUE)
    assert key.reason == ("cessation_of_operation" if was == "suspended" else "superseded")
    assert fresh(request).state == S.BURNED


@pytest.mark.database
def test_discard_killed_midway_is_repeated(scene: Scene, requester: Requester, monkeypatch: pytest.MonkeyPatch) -> None:
    """The discard is one transaction; a killed worker leaves the request to the next sweep."""
    request = request_and_issue(requester.service, scene.sandbox, at=now() - COLLECT_WITHIN)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    before = dump_tables()
    with monkeypatch.context() as patch:
        patch.setattr(collection, "discard_key", die)
        with pytest.raises(KeyboardInterrupt):
            maintenance.discard_due()
    assert dump_tables() == before
    maintenance.discard_due()
    assert fresh(request).state == S.BURNED


def test_discard_in_a_pinned_process_skips_other_environments(scene: Scene, requester: Requester) -> None:
    requests = [request_and_issue(requester.service, place, at=now() - COLLECT_WITHIN) for place in _both(scene)]
    with override_settings(ENVIRONMENTS=("production",)):
        maintenance.discard_due()
    assert [fresh(request).state for request in requests] == [S.ISSUED, S.BURNED]


def test_collection_in_a_pinned_process_of_another_environment_is_refused(scene: Scene, requester: Requester) -> None:
    elsewhere, served = (request_and_issue(requester.service, place) for place in _both(scene))
    with override_settings(ENVIRONMENTS=("production",)):
        with pytest.raises(NotFoundError, match="does not serve sandbox"):
            collect(requester.service, elsewhere)
        assert verdict(unseal(collect(requester.service, served)), environment=Environment.PRODUCTION) is None


def _both(scene: Scene) -> tuple[Account, Account]:
    return scene.sandbox, scene.production


# ------------------------------------------------------------------------------------------------------ races


@pytest.mark.database
@pytest.mark.django_db(transaction=True)
def test_collection_by_eight_concurrent_callers_succeeds_once() -> None:
    scene = make_scene()
    requester = make_requester(scene)
    for _ in range(3):
        request = request_and_issue(requester.service, scene.sandbox)
        outcomes = race(*[partial(collect, requester.service, fresh(request)) for _ in range(8)])
        handovers = [each for each in outcomes if isinstance(each, Handover)]
        others = {type(other) for other in outcomes if not isinstance(other, Handover)}
        assert (len(handovers), others) == (1, {StateConflictError})


@pytest.mark.database
@pytest.mark.django_db(transaction=True)
def test_collection_concurrent_with_discard_has_one_outcome() -> None:
    """At the end of the period a key is either collected and active, or discarded and revoked."""
    scene = make_scene()
    requester = make_requester(scene)
    for _ in range(5):
        request = request_and_issue(requester.service, scene.sandbox)
        assert request.issued_at is not None
        end = request.issued_at + COLLECT_WITHIN
        collected, discarded = race(
            partial(collect, requester.service, fresh(request), end - MOMENT), partial(discard, fresh(request), end)
        )
        outcome = fresh(request)
        assert outcome.key is not None
        if outcome.state == S.COLLECTED:
            assert isinstance(discarded, StateConflictError)
            assert verdict(unseal(collected)) is None
        else:
            assert isinstance(collected, StateConflictError), collected
            assert (outcome.state, outcome.key.state) == (S.BURNED, "deactivated")
