"""Keys for services: asked for with a token, sealed or plain, collected once by that token's line, or burned."""

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
from tests.factories import account, approve, grant, issue_request, make_token, now, request_key
from tests.services.conftest import Scene, make_scene
from tests.services.keys.test_lifecycle import verdict
from tests.services.racing import race
from tests.services.rows import dump_tables, last_body, last_ids, lift_triggers, written_since

pytestmark = [pytest.mark.database, pytest.mark.django_db]

S = IssuanceState
MOMENT = timedelta(microseconds=1)
RECIPIENT = X25519PrivateKey.from_private_bytes(bytes(range(32)))


def spelled(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


PUBLIC = spelled(RECIPIENT.public_key().public_bytes_raw())


@dataclass(frozen=True)
class Asker:
    """A service with its token, made by `admin`."""

    token: ServiceToken
    service: Service


def proved(text: Plaintext) -> Service:
    service = prove_service_token(text.reveal(), now())
    assert service is not None
    return service


def make_asker(scene: Scene) -> Asker:
    token, text = make_token(P.ISSUANCE_REQUEST, P.ISSUANCE_COLLECT, by=scene.admin)
    return Asker(token, proved(text))


@pytest.fixture
def asker(scene: Scene) -> Asker:
    return make_asker(scene)


def ask(
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


def asked_and_issued(service: Service, place: Account, **asked: Any) -> IssuanceRequest:
    request = ask(service, place, **asked)
    if request.state == S.PENDING:
        approve(request, at=asked.get("at"))
    issue_request(request, at=asked.get("at"))
    return fresh(request)


def fresh(request: IssuanceRequest) -> IssuanceRequest:
    found = issuance.get_request(request.pk)
    assert found is not None
    return found


def collect(service: Service, request: IssuanceRequest, at: datetime | None = None) -> Handover:
    """As the view does it: read first, then recorded."""
    allowed = grant(service, P.ISSUANCE_COLLECT, request.account, at=at)
    handover = collection.read_handover(allowed, request)
    with collection.record_collection(allowed, request):
        pass
    return handover


def opened(handover: Handover) -> Plaintext:
    assert handover.text is None
    assert handover.sealed is not None
    enc, ciphertext = (
        base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))
        for part in (handover.sealed.enc, handover.sealed.ciphertext)
    )
    suite = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)
    return Plaintext(suite.decrypt(enc + ciphertext, RECIPIENT).decode())


# ---------------------------------------------------------------------------------------------------- asking


def test_collection_service_s_request_names_its_token_and_the_person_who_answers(scene: Scene, asker: Asker) -> None:
    request = ask(asker.service, scene.production)
    assert (request.requested_via, request.requester) == (asker.token, None)
    assert request.requester_person == scene.admin.person
    assert (request.state, request.approvals_needed) == (S.PENDING, 1)
    assert last_body("issuance.requested")["actor"] == f"service:{asker.token.pk}"
    assert ask(asker.service, scene.sandbox).state == S.APPROVED


def test_collection_token_s_creator_cannot_approve_what_it_asked(scene: Scene, asker: Asker) -> None:
    """Four eyes see through a token: whoever made it is the person who asks."""
    request = ask(asker.service, scene.production)
    with pytest.raises(StateConflictError, match="second person"):
        approve(request, by=scene.admin)
    assert approve(request, by=scene.approver).state == S.APPROVED


def test_collection_recipient_is_part_of_what_is_approved(scene: Scene, asker: Asker) -> None:
    """Who can open it is approved with the rest: another recipient's key is another plan."""
    other = spelled(X25519PrivateKey.generate().public_key().public_bytes_raw())
    first, second = ask(asker.service, scene.production), ask(asker.service, scene.production, recipient=other)
    assert first.plan_digest != second.plan_digest
    approve(first)
    lift_triggers()
    QuerySet(IssuanceRequest).filter(pk=first.pk).update(recipient_public_key=other)
    with pytest.raises(StateConflictError, match="differs from the approved plan"):
        issue_request(fresh(first))
    assert not Key.objects.exists()


def test_collection_recipient_exchanged_after_the_approval_gets_nothing(scene: Scene, asker: Asker) -> None:
    """Nor is an issued key sealed to somebody whom nobody approved."""
    request = asked_and_issued(asker.service, scene.production)
    thief = X25519PrivateKey.generate().public_key().public_bytes_raw()
    lift_triggers()
    QuerySet(IssuanceRequest).filter(pk=request.pk).update(recipient_public_key=spelled(thief))
    with pytest.raises(StateConflictError, match="differs from the approved plan"):
        collect(asker.service, fresh(request))


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
def test_collection_sealed_and_a_recipient_go_together(
    scene: Scene, asker: Asker, delivery: Delivery, recipient: str, pointer: str
) -> None:
    with pytest.raises(RequestInvalidError) as caught:
        ask(asker.service, scene.sandbox, delivery=delivery, recipient=recipient)
    assert [fault.pointer for fault in caught.value.faults] == [pointer]


def test_collection_production_key_is_never_shown_to_a_service(scene: Scene, asker: Asker) -> None:
    """In production a service is given a key sealed or in the secret backend; showing it takes a person."""
    with pytest.raises(RequestInvalidError) as caught:
        ask(asker.service, scene.production, delivery=Delivery.SHOW_ONCE)
    assert [fault.pointer for fault in caught.value.faults] == ["/delivery"]
    assert request_key(scene.production, delivery=Delivery.SHOW_ONCE).state == S.PENDING
    assert ask(asker.service, scene.sandbox, delivery=Delivery.SHOW_ONCE).state == S.APPROVED


# ------------------------------------------------------------------------------------------------- collecting


@pytest.mark.parametrize("environment", list(Environment))
def test_collection_sealed_key_is_opened_by_its_recipient_and_works(
    scene: Scene, asker: Asker, environment: Environment
) -> None:
    """The key leaves us for its recipient's eyes only, and no copy of it stays."""
    request = asked_and_issued(asker.service, account("acme", environment))
    text = opened(collect(asker.service, request))
    assert request.state == S.COLLECTED
    assert verdict(text, environment=environment) is None
    assert text.reveal() not in repr(dump_tables())
    assert last_body("issuance.collected")["actor"] == f"service:{asker.token.pk}"
    assert not BreakGlass.objects.exists(), "nobody saw it"
    maintenance.destroy_due()
    assert Key.objects.get().material == Material.DESTROYED


@pytest.mark.parametrize("delivery", [Delivery.SHOW_ONCE, Delivery.SECRET_BACKEND])
def test_collection_plain_key_in_sandbox_is_the_string(scene: Scene, asker: Asker, delivery: Delivery) -> None:
    request = asked_and_issued(asker.service, scene.sandbox, delivery=delivery)
    handover = collect(asker.service, request)
    assert handover.sealed is None
    assert handover.text is not None
    assert verdict(handover.text) is None
    maintenance.destroy_due()
    kept = Key.objects.get().material == Material.HELD
    assert kept == (delivery is Delivery.SECRET_BACKEND)


def test_collection_unsealed_in_production_is_refused(scene: Scene, asker: Asker) -> None:
    """Over REST a production key leaves here sealed or not at all."""
    request = asked_and_issued(asker.service, scene.production, delivery=Delivery.SECRET_BACKEND)
    with pytest.raises(StateConflictError, match="secret backend"):
        collect(asker.service, request)
    assert fresh(request).state == S.ISSUED


def test_collection_is_for_the_token_that_asked_and_its_successors(scene: Scene, asker: Asker) -> None:
    """Another token of the same creator, and with the same rights, finds nothing; a rotated one goes on."""
    request = asked_and_issued(asker.service, scene.sandbox)
    with pytest.raises(NotFoundError):
        collect(make_asker(scene).service, request)
    _, text = rotate_service_token(grant(scene.admin, P.TOKENS_WRITE), asker.token, 0)
    assert verdict(opened(collect(proved(text), request))) is None


def test_collection_predecessor_collects_what_its_successor_asked(scene: Scene, asker: Asker) -> None:
    """During the overlap both tokens are the same service."""
    _, text = rotate_service_token(grant(scene.admin, P.TOKENS_WRITE), asker.token, 1)
    request = asked_and_issued(proved(text), scene.sandbox)
    assert verdict(opened(collect(asker.service, request))) is None


@pytest.mark.parametrize("delivery", [Delivery.SEALED, Delivery.SHOW_ONCE])
def test_collection_by_the_person_behind_the_token_is_refused(scene: Scene, asker: Asker, delivery: Delivery) -> None:
    """What a service asked for no person collects, not even the one who answers for it."""
    request = asked_and_issued(asker.service, scene.sandbox, delivery=delivery)
    allowed = grant(scene.admin, P.ISSUANCE_COLLECT, scene.sandbox)
    with pytest.raises(StateConflictError, match="A service requested"):
        issuance.collect_key(allowed, request)
    with pytest.raises(NotFoundError):
        collection.read_handover(allowed, request)
    assert fresh(request).state == S.ISSUED


def test_collection_of_what_an_operator_asked_is_not_for_services(scene: Scene, asker: Asker) -> None:
    request = request_key(scene.sandbox)
    issue_request(request)
    with pytest.raises(NotFoundError):
        collect(asker.service, fresh(request))


def test_collection_takes_its_own_permission(scene: Scene, asker: Asker) -> None:
    """Who may ask may not therefore collect."""
    request = asked_and_issued(asker.service, scene.sandbox)
    misplaced = grant(asker.service, P.ISSUANCE_REQUEST, scene.sandbox)
    with pytest.raises(PermissionMissingError), collection.record_collection(misplaced, request):
        pytest.fail("it was recorded")
    assert fresh(request).state == S.ISSUED


def test_collection_before_the_key_is_issued_is_a_conflict(scene: Scene, asker: Asker) -> None:
    request = ask(asker.service, scene.production)
    for state in ("pending", "approved"):
        with pytest.raises(StateConflictError, match=state):
            collect(asker.service, fresh(request))
        if state == "pending":
            approve(request)


@pytest.mark.parametrize("end", [revoke_key, report_compromise])
def test_collection_of_a_key_that_was_ended_gives_nothing(scene: Scene, asker: Asker, end: Any) -> None:
    """A key that was ended before anybody held it is not handed out any more."""
    request = asked_and_issued(asker.service, scene.sandbox)
    assert request.key is not None
    allowed = grant(scene.responder, P.KEYS_REVOKE, scene.sandbox)
    end(allowed, request.key, *([RevocationReason.SUPERSEDED] if end is revoke_key else []))
    with pytest.raises(StateConflictError, match="ended before it was collected"):
        collect(asker.service, fresh(request))
    maintenance.destroy_due()
    with pytest.raises(StateConflictError, match="ended before it was collected"):
        collect(asker.service, fresh(request))


# ---------------------------------------------------------------------------------------------------- burning


def burn(request: IssuanceRequest, at: datetime | None = None) -> None:
    assert request.issued_at is not None
    allowed = grant(WORKER, P.ISSUANCE_EXECUTE, request.account, at=at or request.issued_at + COLLECT_WITHIN)
    collection.discard_uncollected(allowed, request)


def test_collection_merchant_is_told_of_the_burning(scene: Scene, asker: Asker) -> None:
    """Who was told that a key was issued is told of its end; of one that had ended before, not again."""
    requests = [asked_and_issued(asker.service, scene.sandbox, at=now() - COLLECT_WITHIN) for _ in range(2)]
    burned, ended = (request.key for request in requests)
    assert burned is not None
    assert ended is not None
    report_compromise(grant(scene.admin, P.KEYS_REPORT_COMPROMISE, scene.sandbox), ended)
    maintenance.discard_due()
    notice = Notice.objects.get(kind=NoticeKind.KEY_REVOKED)
    assert (notice.subject, notice.account, notice.is_alarm) == (burned.key_id, scene.sandbox, False)
    assert notice.payload == {
        "reason": "cessation_of_operation",
        "key_id": burned.key_id,
        "credential_id": burned.credential_id,
    }


@pytest.mark.parametrize("delivery", [Delivery.SEALED, Delivery.SHOW_ONCE])
def test_collection_key_that_nobody_collected_is_burned_after_three_days(
    scene: Scene, asker: Asker, delivery: Delivery
) -> None:
    """After 72 hours the key is dead, its copy destroyed and the request closed, in one entry's transaction."""
    request = asked_and_issued(asker.service, scene.sandbox, delivery=delivery, at=now() - COLLECT_WITHIN)
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
        collect(asker.service, fresh(request))


def test_collection_key_in_the_secret_backend_is_never_burned(scene: Scene, asker: Asker) -> None:
    """Nobody collects what the merchant reads in the secret backend."""
    request = asked_and_issued(
        asker.service, scene.sandbox, delivery=Delivery.SECRET_BACKEND, at=now() - 2 * COLLECT_WITHIN
    )
    maintenance.discard_due()
    assert fresh(request).state == S.ISSUED
    with pytest.raises(StateConflictError, match="may still be collected"):
        burn(request)


@pytest.mark.parametrize("delivery", [Delivery.SEALED, Delivery.SHOW_ONCE])
def test_collection_public_key_is_never_burned(scene: Scene, asker: Asker, delivery: Delivery) -> None:
    """Its string may be shown again, so that shipped apps hold keys that nobody ever collected."""
    long_ago = now() - 2 * COLLECT_WITHIN
    request = asked_and_issued(asker.service, scene.sandbox, delivery=delivery, kind=KeyKind.PUBLIC, at=long_ago)
    assert request.key is not None
    shown = read_public_string(request.key)
    maintenance.discard_due()
    assert Key.objects.get().state == "active"
    with pytest.raises(StateConflictError, match="may still be collected"):
        burn(request, now())
    handover = collect(asker.service, fresh(request))
    assert (handover.text or opened(handover)).reveal() == shown.reveal()


def use(key: Key) -> None:
    KeyUse(key=key, first_at=now(), last_at=now(), count=1).save()


def test_collection_uncollected_key_that_is_in_use_goes_on_and_is_told_of(
    scene: Scene, asker: Asker, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever uses it has it: ending it would stop a merchant, and is for a person to decide. Told once, not always."""
    request = asked_and_issued(asker.service, scene.sandbox, at=now() - COLLECT_WITHIN)
    assert request.key is not None
    use(request.key)
    before = last_ids()
    for _ in range(2):
        maintenance.discard_due()
    assert written_since(before) == ([], [])
    assert (fresh(request).state, Key.objects.get().state) == (S.ISSUED, "active")
    with pytest.raises(StateConflictError, match="in use"):
        burn(request)
    told = [record for record in caplog.records if record.getMessage() == "an uncollected key was used"]
    assert [(each.levelname, each.__dict__["request_id"], each.__dict__["key_id"]) for each in told] == [
        ("WARNING", request.pk, request.key.pk)
    ]
    with pytest.raises(StateConflictError, match="not collected in time"):
        collect(asker.service, fresh(request))


def test_collection_of_more_used_keys_than_one_sweep_holds_tells_of_each(
    scene: Scene, asker: Asker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: keys in use that nobody has seen to hide no other from whoever reads the log."""
    monkeypatch.setattr(issuance, "_LIST_LIMIT", 2)
    monkeypatch.setattr(maintenance, "_used_uncollected", maintenance.UsedUncollected())
    requests = [asked_and_issued(asker.service, scene.sandbox, at=now() - COLLECT_WITHIN) for _ in range(5)]
    for request in requests:
        assert request.key is not None
        use(request.key)

    def sweep() -> list[str]:
        caplog.clear()
        maintenance.discard_due()
        return [each.__dict__["request_id"] for each in caplog.records if "uncollected" in each.getMessage()]

    told = [sweep() for _ in range(4)]
    assert [len(each) for each in told] == [2, 2, 1, 0]
    assert {request_id for each in told for request_id in each} == {request.pk for request in requests}
    late = asked_and_issued(asker.service, scene.sandbox, at=now() - COLLECT_WITHIN)
    assert late.key is not None
    use(late.key)
    assert sweep() == [late.pk]
    # Nobody has seen to them for a day: all are told of again.
    maintenance._used_uncollected.again_at = now()
    assert len(sweep()) == 2


def test_collection_used_key_that_was_revoked_since_closes_its_request(
    scene: Scene, asker: Asker, caplog: pytest.LogCaptureFixture
) -> None:
    request = asked_and_issued(asker.service, scene.sandbox, at=now() - COLLECT_WITHIN)
    assert request.key is not None
    use(request.key)
    revoke_key(grant(scene.admin, P.KEYS_REVOKE, scene.sandbox), request.key, RevocationReason.SUPERSEDED)
    maintenance.discard_due()
    assert fresh(request).state == S.BURNED
    assert Key.objects.get().reason == "superseded"
    assert "an uncollected key was used" not in caplog.text


def test_collection_ends_at_the_second_whether_swept_or_not(scene: Scene, asker: Asker) -> None:
    """The clock decides: up to 72 hours it is collected, from then on it is burned, and never both."""
    request = asked_and_issued(asker.service, scene.sandbox)
    assert request.issued_at is not None
    end = request.issued_at + COLLECT_WITHIN
    with pytest.raises(StateConflictError, match="may still be collected"):
        burn(fresh(request), end - MOMENT)
    with pytest.raises(StateConflictError, match="not collected in time"):
        collect(asker.service, fresh(request), end)
    assert opened(collect(asker.service, fresh(request), end - MOMENT)).reveal()
    with pytest.raises(StateConflictError, match="was collected, or may still be"):
        burn(fresh(request), end)


def test_collection_operator_s_key_burns_too(scene: Scene) -> None:
    request = request_key(scene.sandbox, delivery=Delivery.SHOW_ONCE, at=now() - COLLECT_WITHIN)
    issue_request(request, at=now() - COLLECT_WITHIN)
    with pytest.raises(StateConflictError, match="not collected in time"):
        issuance.collect_key(grant(scene.tam, P.ISSUANCE_COLLECT, scene.sandbox), fresh(request))
    maintenance.discard_due()
    assert fresh(request).state == S.BURNED


@pytest.mark.parametrize("was", ["suspended", "deactivated"])
def test_collection_burning_ends_a_suspended_key_and_leaves_a_dead_one(scene: Scene, asker: Asker, was: str) -> None:
    request = asked_and_issued(asker.service, scene.sandbox, at=now() - COLLECT_WITHIN)
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


def test_collection_burning_killed_in_the_middle_is_done_again(
    scene: Scene, asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it or nothing: a death in the middle leaves the request to the next sweep."""
    request = asked_and_issued(asker.service, scene.sandbox, at=now() - COLLECT_WITHIN)

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


def test_collection_pinned_process_burns_its_own_environment_s_only(scene: Scene, asker: Asker) -> None:
    requests = [asked_and_issued(asker.service, place, at=now() - COLLECT_WITHIN) for place in _both(scene)]
    with override_settings(ENVIRONMENTS=("production",)):
        maintenance.discard_due()
    assert [fresh(request).state for request in requests] == [S.ISSUED, S.BURNED]


def test_collection_pinned_process_reads_no_other_environment_s_keys(scene: Scene, asker: Asker) -> None:
    """What the process is not for, it does not even open (D12, D15)."""
    elsewhere, here = (asked_and_issued(asker.service, place) for place in _both(scene))
    with override_settings(ENVIRONMENTS=("production",)):
        with pytest.raises(NotFoundError, match="does not serve sandbox"):
            collect(asker.service, elsewhere)
        assert verdict(opened(collect(asker.service, here)), environment=Environment.PRODUCTION) is None


def _both(scene: Scene) -> tuple[Account, Account]:
    return scene.sandbox, scene.production


# ------------------------------------------------------------------------------------------------------ races


@pytest.mark.django_db(transaction=True)
def test_collection_by_eight_at_once_reaches_exactly_one() -> None:
    """However many of a service's processes ask at the same moment, one is handed the key."""
    scene = make_scene()
    asker = make_asker(scene)
    for _ in range(3):
        request = asked_and_issued(asker.service, scene.sandbox)
        outcomes = race(*[partial(collect, asker.service, fresh(request)) for _ in range(8)])
        got = [outcome for outcome in outcomes if isinstance(outcome, Handover)]
        others = {type(outcome) for outcome in outcomes if not isinstance(outcome, Handover)}
        assert (len(got), others) == (1, {StateConflictError})


@pytest.mark.django_db(transaction=True)
def test_collection_against_burning_has_one_winner() -> None:
    """At the last moment a key is either collected and good, or burned and nobody's: never both, never neither."""
    scene = make_scene()
    asker = make_asker(scene)
    for _ in range(5):
        request = asked_and_issued(asker.service, scene.sandbox)
        assert request.issued_at is not None
        end = request.issued_at + COLLECT_WITHIN
        collected, burned = race(
            partial(collect, asker.service, fresh(request), end - MOMENT), partial(burn, fresh(request), end)
        )
        won = fresh(request)
        assert won.key is not None
        if won.state == S.COLLECTED:
            assert isinstance(burned, StateConflictError)
            assert verdict(opened(collected)) is None
        else:
            assert isinstance(collected, StateConflictError), collected
            assert (won.state, won.key.state) == (S.BURNED, "deactivated")
