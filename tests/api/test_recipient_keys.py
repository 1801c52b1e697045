"""The merchant's side of a rotation: it sets a recipient key, fetches the sealed replacement and acknowledges it."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from keyvault.access.limits import REPEAT_LIMIT
from keyvault.access.permissions import Permission as P
from keyvault.domain.environments import Environment
from keyvault.domain.errors import PermissionMissingError, StateConflictError
from keyvault.domain.issuance import Delivery
from keyvault.domain.keys import KeyKind
from keyvault.domain.plaintext import Plaintext
from keyvault.models import AuditEntry, Key, Notice, RecipientKey
from keyvault.services.keys import recipient_keys
from keyvault.services.keys.lifecycle import get_key
from keyvault.services.keys.recipient_keys import (
    DELAY,
    approve_recipient_key,
    find_recipient,
    set_recipient_key,
    withdraw_recipient_key,
)
from keyvault.services.limits.limiter import spend_repeat
from rotation.models import Rotation
from rotation.services.rotations.engine import advance_rotation
from rotation.services.rotations.reports import get_rotation
from tests.domain.test_recipient_keys import decoded, public_text
from tests.factories import account, grant, issue
from tests.rotation import scene

from .integration import Ask, expect, pointers

pytestmark = [pytest.mark.django_db, pytest.mark.database]

RECIPIENT = "/sandbox/credentials/recipient-key"
REPLACEMENT = "/sandbox/credentials/replacement"
ACKNOWLEDGE = "/sandbox/credentials/acknowledge"
PRODUCTION = Environment.PRODUCTION


def new_recipient() -> tuple[X25519PrivateKey, str]:
    secret = X25519PrivateKey.generate()
    return secret, public_text(secret)


def opened(secret: X25519PrivateKey, sealed: dict[str, str]) -> str:
    suite = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)
    return suite.decrypt(decoded(sealed["enc"]) + decoded(sealed["ciphertext"]), secret).decode()


def set_key(ask: Ask, key: Plaintext, public_key: str, plane: str = RECIPIENT) -> Any:
    return ask("PUT", plane, {"recipient_public_key": public_key}, key=key)


def delivered(key: Key) -> Rotation:
    rotation = scene.rotate(key.credential, datetime.now(UTC))
    advance_rotation(rotation.rotation_id)
    return get_rotation(rotation.rotation_id)


@pytest.mark.parametrize("delivery", [Delivery.SECRET_BACKEND, Delivery.SHOW_ONCE])
def test_replacement_is_fetched_again_and_again_until_it_is_acknowledged(ask: Ask, delivery: Delivery) -> None:
    """Guarantee: a merchant with a recipient key gets its replacement without an operator, and loses none."""
    key, old = issue(account(), delivery=delivery)
    secret, public_key = new_recipient()
    assert set_key(ask, old, public_key).status_code == 200
    expect(ask("GET", REPLACEMENT, key=old), 404, "not_found")
    rotation = delivered(key)
    assert not rotation.awaits_requester
    first, second = ask("GET", REPLACEMENT, key=old), ask("GET", REPLACEMENT, key=old)
    assert first.status_code == 200
    assert first.body == second.body
    assert (first.body["rotation_id"], first.body["key_id"]) == (rotation.rotation_id, rotation.replacement_id)
    new = Plaintext(opened(secret, first.body["sealed"]))
    expect(ask("GET", REPLACEMENT, key=new), 404, "not_found")
    assert ask("POST", ACKNOWLEDGE, key=new).status_code == 204
    expect(ask("GET", REPLACEMENT, key=old), 404, "not_found")


def test_replacement_without_a_recipient_key_is_not_found(ask: Ask) -> None:
    key, old = issue(account())
    delivered(key)
    expect(ask("GET", REPLACEMENT, key=old), 404, "not_found")


def test_replacement_of_a_rotation_that_is_rolled_back_is_not_found(ask: Ask) -> None:
    from rotation.services.rotations.interventions import abort_rotation

    key, old = issue(account())
    set_key(ask, old, new_recipient()[1])
    rotation = delivered(key)
    abort_rotation(grant(scene.tam(), P.ROTATIONS_WRITE, account()), rotation, "wrong one")
    assert get_rotation(rotation.rotation_id).state == "rolling_back"
    expect(ask("GET", REPLACEMENT, key=old), 404, "not_found")


def test_replacement_of_another_credential_is_not_found(ask: Ask) -> None:
    """Guarantee: only the holder of the key that is replaced fetches its replacement."""
    key, old = issue(account())
    set_key(ask, old, new_recipient()[1])
    delivered(key)
    for other in (issue(account())[1], issue(account("globex"))[1]):
        expect(ask("GET", REPLACEMENT, key=other), 404, "not_found")


def test_recipient_key_set_after_the_request_is_not_used(ask: Ask) -> None:
    """Guarantee: an open rotation keeps its delivery, even if a recipient key is set meanwhile."""
    key, old = issue(account())
    rotation = scene.rotate(key.credential, datetime.now(UTC))
    set_key(ask, old, new_recipient()[1])
    advance_rotation(rotation.rotation_id)
    assert get_rotation(rotation.rotation_id).handover is None


def test_recipient_key_alarms_the_operators_once_and_is_repeatable(ask: Ask) -> None:
    key, text = issue(account())
    public_key = new_recipient()[1]
    first, second = set_key(ask, text, public_key), set_key(ask, text, public_key)
    assert first.body == second.body
    assert first.body["credential_id"] == key.credential_id
    assert first.body["recipient_public_key"] == public_key
    notice = Notice.objects.get(kind="credential.recipient_key_set")
    assert notice.is_alarm
    assert notice.payload["recipient_public_key"] == public_key
    assert AuditEntry.objects.filter(event="recipient_key.set", actor=f"key:{key.key_id}").count() == 1


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({}, "/recipient_public_key"),
        ({"recipient_public_key": "x"}, "/recipient_public_key"),
        ({"recipient_public_key": "A" * 43}, "/recipient_public_key"),
        ({"recipient_public_key": 7}, "/recipient_public_key"),
        ({"recipient_public_key": "A" * 44}, "/recipient_public_key"),
        ({"recipient_public_key": "\u0661" * 43}, "/recipient_public_key"),
        ({"recipient_public_key": new_recipient()[1], "credential_id": "crd_1"}, "/credential_id"),
    ],
)
def test_invalid_recipient_key_is_refused(ask: Ask, body: dict[str, Any], pointer: str) -> None:
    _, text = issue(account())
    response = ask("PUT", RECIPIENT, body, key=text)
    expect(response, 400, "request_invalid")
    assert pointers(response) == [pointer]


def test_recipient_key_needs_a_private_key(ask: Ask) -> None:
    expect(ask("PUT", RECIPIENT, {"recipient_public_key": new_recipient()[1]}), 401, "credential_missing")
    public = issue(account(), kind=KeyKind.PUBLIC)[1]
    expect(set_key(ask, public, new_recipient()[1]), 403, "method_not_supported")


def test_recipient_key_in_production_applies_after_a_day(ask: Ask) -> None:
    """Guarantee: a leaked production key cannot immediately direct the next replacement to the thief."""
    key, text = issue(account("acme", PRODUCTION))
    response = set_key(ask, text, new_recipient()[1], "/production/credentials/recipient-key")
    assert response.status_code == 200
    row = RecipientKey.objects.get()
    assert row.applies_at - row.created_at == timedelta(hours=24) == DELAY[PRODUCTION]
    assert find_recipient(key.credential, row.applies_at - timedelta(microseconds=1)) is None
    assert find_recipient(key.credential, row.applies_at) == row.public_key


@pytest.fixture
def pending(ask: Ask) -> RecipientKey:
    _, text = issue(account("acme", PRODUCTION))
    set_key(ask, text, new_recipient()[1], "/production/credentials/recipient-key")
    row: RecipientKey = RecipientKey.objects.select_related("account__merchant").get()
    return row


def approval(operator: Any) -> Any:
    return grant(operator, P.RECIPIENTS_APPROVE, account("acme", PRODUCTION))


def test_two_persons_let_a_recipient_key_apply_at_once(pending: RecipientKey) -> None:
    """Guarantee: in production the delay is shortened by two different persons, never by one."""
    later = pending.applies_at
    approve_recipient_key(approval(scene.approver()), pending, pending.plan_digest)
    assert pending.applies_at == later
    with pytest.raises(StateConflictError, match="already approved"):
        approve_recipient_key(approval(scene.approver()), pending, pending.plan_digest)
    given = approval(scene.admin())
    approve_recipient_key(given, pending, pending.plan_digest)
    pending.refresh_from_db()
    assert pending.applies_at == given.at
    with pytest.raises(StateConflictError, match="applies already"):
        approve_recipient_key(approval(scene.admin()), pending, pending.plan_digest)


def test_one_statement_cannot_shorten_the_delay(pending: RecipientKey) -> None:
    """Guarantee: the database refuses an earlier time without the approvals of two persons."""
    from django.db import DatabaseError, models, transaction

    rows: models.QuerySet[Any] = models.QuerySet(RecipientKey).filter(pk=pending.pk)
    for changes in (
        {"applies_at": pending.created_at},
        {"applies_at": pending.applies_at + timedelta(days=1)},
        {"public_key": new_recipient()[1]},
        {"approvals_needed": 0},
    ):
        with pytest.raises(DatabaseError), transaction.atomic():
            rows.update(**changes)


def test_holder_of_a_key_cannot_set_recipient_keys_without_end(ask: Ask) -> None:
    """Guarantee: the rows and alarms that one leaked key causes are limited; the same recipient key is not counted."""
    _, old = issue(account())
    _, public_key = new_recipient()
    for _ in range(REPEAT_LIMIT.count + 1):
        assert set_key(ask, old, public_key).status_code == 200
    answers = [set_key(ask, old, new_recipient()[1]) for _ in range(4 * REPEAT_LIMIT.count)]
    refused = [answer for answer in answers if answer.status_code != 200]
    assert refused
    expect(refused[0], 429, "rate_limited")
    assert RecipientKey.objects.count() == 1 + len(answers) - len(refused)


def test_approval_of_another_digest_is_refused(pending: RecipientKey) -> None:
    with pytest.raises(StateConflictError, match="not what you were shown"):
        approve_recipient_key(approval(scene.approver()), pending, "0" * 64)
    with pytest.raises(PermissionMissingError):
        approval(scene.tam())


def test_withdrawn_recipient_key_is_used_by_no_rotation(ask: Ask) -> None:
    """Guarantee: one operator stops a thief's recipient key, in open rotations too."""
    key, old = issue(account())
    set_key(ask, old, new_recipient()[1])
    rotation = scene.rotate(key.credential, datetime.now(UTC))
    row = RecipientKey.objects.select_related("account__merchant").get()
    withdraw_recipient_key(grant(scene.admin(), P.RECIPIENTS_WITHDRAW, account()), row, "not the merchant's")
    advance_rotation(rotation.rotation_id)
    assert get_rotation(rotation.rotation_id).handover is None
    with pytest.raises(StateConflictError):
        withdraw_recipient_key(grant(scene.admin(), P.RECIPIENTS_WITHDRAW, account()), row, "again")


def test_newer_recipient_key_withdraws_one_that_does_not_apply_yet(ask: Ask, pending: RecipientKey) -> None:
    """Guarantee: the merchant's own key replaces a thief's before it applies; a key that applies stays until then."""
    key = get_key(pending.key_id)
    assert key is not None
    credential, first = key.credential, pending
    holder = scene.holder_of(key)
    at = pending.created_at + timedelta(hours=25)
    second = set_recipient_key(grant(holder, P.RECIPIENTS_WRITE, first.account, at=at), key, new_recipient()[1])
    at += timedelta(hours=1)
    third = set_recipient_key(grant(holder, P.RECIPIENTS_WRITE, first.account, at=at), key, new_recipient()[1])
    assert RecipientKey.objects.get(pk=second.pk).withdrawn_at == at
    assert find_recipient(credential, at + timedelta(hours=23)) == first.public_key
    assert find_recipient(credential, at + timedelta(hours=24)) == third.public_key


def test_recipient_key_that_is_sent_twice_at_once_is_set_once(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """In production a second row would withdraw the first and restart its delay."""
    _, key = issue(account())
    _, public_key = new_recipient()
    answers = []

    def meet(*_: object) -> None:
        monkeypatch.setattr(recipient_keys, "spend_repeat", spend_repeat)
        answers.append(set_key(ask, key, public_key))

    monkeypatch.setattr(recipient_keys, "spend_repeat", meet)
    answers.append(set_key(ask, key, public_key))
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].body == answers[1].body
    assert RecipientKey.objects.count() == 1
