"""Notices about a key's lifecycle, written in the transaction of the event that they report."""

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER
from keyvault.domain.errors import ErrorCode, StateConflictError
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Key, Notice, WebhookDelivery, WebhookEndpoint
from keyvault.services.keys import lifecycle
from keyvault.services.recording import transaction
from keyvault.services.recording.transaction import recorded
from tests.factories import grant, issue, now
from tests.services.conftest import Scene
from tests.services.keys.test_lifecycle import verdict
from tests.services.rows import last_body
from tests.services.tokens.test_customer_tokens import holder_of

pytestmark = pytest.mark.django_db

SUPERSEDED = RevocationReason.SUPERSEDED


def notices_about(key: Key) -> list[tuple[str, bool]]:
    """Return the notices about a key and its credential, except the one about its issuance."""
    about = Notice.objects.filter(subject__in=[key.key_id, key.credential_id]).exclude(kind="key.issued")
    return list(about.order_by("created_at", "kind").values_list("kind", "is_alarm"))


def add_second_key(scene: Scene, key: Key, expires_in_days: int | None = None) -> Key:
    """Add a second active key to the key's credential."""
    worker = grant(WORKER, P.ISSUANCE_EXECUTE, scene.sandbox)
    second, _ = lifecycle.stage_key(worker, key.credential, expires_in_days=expires_in_days)
    lifecycle.activate_key(worker, second)
    return second


def revoke(scene: Scene, key: Key) -> None:
    lifecycle.revoke_key(grant(scene.responder, P.KEYS_REVOKE, scene.sandbox), key, SUPERSEDED)


def report(scene: Scene, key: Key) -> None:
    lifecycle.report_compromise(grant(scene.responder, P.KEYS_REPORT_COMPROMISE, scene.sandbox), key)


def report_own(scene: Scene, key: Key) -> None:
    lifecycle.revoke_own_key(grant(holder_of(key), P.KEYS_REVOKE_SELF, scene.sandbox), key)


@pytest.mark.database
def test_notice_of_an_issued_key_names_it_and_contains_no_secret(scene: Scene) -> None:
    """The payload holds ids and kinds only: no key material and no person."""
    key, text = issue(scene.sandbox)
    notice = Notice.objects.get(kind="key.issued")
    assert (notice.subject, notice.is_alarm) == (key.key_id, False)
    assert notice.payload == {
        "key_id": key.key_id,
        "credential_id": key.credential_id,
        "key_kind": "private",
        "issuance_request_id": key.requests.get().issuance_request_id,
    }
    assert text.reveal() not in str(vars(notice))


@pytest.mark.parametrize(
    ("end", "kind", "is_alarm", "reason"),
    [
        (revoke, "key.revoked", False, "superseded"),
        (report, "key.compromised", True, "key_compromise"),
        (report_own, "key.compromised", True, "key_compromise"),
    ],
)
def test_notice_of_a_revocation_names_the_reason_and_that_the_credential_has_no_key(
    scene: Scene, end: Callable[[Scene, Key], None], kind: str, is_alarm: bool, reason: str
) -> None:
    key, _ = issue(scene.sandbox)
    end(scene, key)
    assert notices_about(key) == [("credential.without_key", True), (kind, is_alarm)]
    for notice in Notice.objects.exclude(kind="key.issued"):
        assert notice.payload == {"key_id": key.key_id, "credential_id": key.credential_id, "reason": reason}


@pytest.mark.parametrize("end", [revoke, report, report_own])
def test_notice_of_a_repeated_revocation_is_sent_once(scene: Scene, end: Callable[[Scene, Key], None]) -> None:
    key, _ = issue(scene.sandbox)
    end(scene, key)
    end(scene, key)
    assert len(notices_about(key)) == 2


@pytest.mark.parametrize("end", [revoke, report])
def test_notice_of_no_key_left_with_another_active_key_is_not_sent(
    scene: Scene, end: Callable[[Scene, Key], None]
) -> None:
    first, _ = issue(scene.sandbox)
    second = add_second_key(scene, first)
    end(scene, first)
    assert ("credential.without_key", True) not in notices_about(first)
    end(scene, second)
    assert notices_about(second).count(("credential.without_key", True)) == 1


def test_notice_of_no_key_left_ignores_expired_and_suspended_keys(scene: Scene) -> None:
    """A suspended key, or one whose expiry is not recorded yet, does not count as usable."""
    for cause in ("suspended", "expired"):
        first, _ = issue(scene.sandbox)
        second = add_second_key(scene, first, expires_in_days=1)
        at = now()
        if cause == "suspended":
            lifecycle.suspend_key(grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox), second)
        else:
            at += timedelta(days=2)
        lifecycle.revoke_key(grant(scene.admin, P.KEYS_REVOKE, scene.sandbox, at=at), first, SUPERSEDED)
        assert notices_about(first).count(("credential.without_key", True)) == 1, cause


def test_notice_of_no_key_left_for_a_suspended_revoked_or_staged_key_is_not_sent_again(scene: Scene) -> None:
    """Only an action that removes the last usable key raises the alarm: here the suspension."""
    suspended, _ = issue(scene.sandbox)
    lifecycle.suspend_key(grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox), suspended)
    before = Notice.objects.filter(kind="credential.without_key").count()
    assert before == 1
    revoke(scene, suspended)
    report(scene, suspended)
    told = [("credential.without_key", True), ("key.revoked", False), ("key.compromised", True)]
    assert notices_about(suspended) == told
    discarded, _ = issue(scene.sandbox)
    lifecycle.discard_key(grant(WORKER, P.ISSUANCE_EXECUTE, scene.sandbox), discarded)
    assert Notice.objects.filter(kind="credential.without_key").count() == before
    assert notices_about(discarded) == []


def test_notice_of_no_key_left_is_sent_when_a_person_suspends_the_last_one(scene: Scene) -> None:
    """The engine suspends a key only beside another usable one, so a quarantine raises no such alarm."""
    first, _ = issue(scene.sandbox)
    second = add_second_key(scene, first)
    quarantined, _ = issue(scene.sandbox)
    lifecycle.suspend_key(grant(WORKER, P.ROTATIONS_ADVANCE, scene.sandbox), quarantined)
    lifecycle.suspend_key(grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox), first)
    assert not Notice.objects.filter(kind="credential.without_key").exists()
    lifecycle.suspend_key(grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox), second)
    notice = Notice.objects.get(kind="credential.without_key")
    assert (notice.subject, notice.is_alarm) == (first.credential_id, True)
    assert notice.payload["reason"] == "suspended"


def test_notice_of_no_key_left_is_sent_at_expiry(scene: Scene) -> None:
    key, _ = issue(scene.sandbox, expires_in_days=1)
    lifecycle.expire_key(grant(WORKER, P.ISSUANCE_EXECUTE, scene.sandbox, at=key.expires_at), key)
    assert sorted(notices_about(key)) == [("credential.without_key", True), ("key.revoked", False)]
    assert Notice.objects.get(kind="credential.without_key").payload["reason"] == "expired"


def test_notice_is_queued_for_each_endpoint_of_the_account(scene: Scene) -> None:
    with recorded(
        grant(scene.admin, P.MERCHANTS_WRITE, scene.sandbox), P.MERCHANTS_WRITE, "t.x", account=scene.sandbox
    ):
        for number in range(2):
            url = f"https://hooks.example/{number}"
            WebhookEndpoint(account=scene.sandbox, url=url, secret=b"sealed", created_at=now()).save()
    key, _ = issue(scene.sandbox)
    revoke(scene, key)
    assert WebhookDelivery.objects.filter(notice__kind="key.revoked").count() == 2


def test_notice_of_a_failed_revocation_is_not_written(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The notice and the revocation share one transaction."""
    key, text = issue(scene.sandbox)

    def fail(**_: object) -> None:
        raise StateConflictError("The log cannot be written.")

    with monkeypatch.context() as broken:
        broken.setattr(transaction, "append_entries", fail)
        with pytest.raises(StateConflictError):
            report(scene, key)
    assert notices_about(key) == []
    assert verdict(text) is None
    report(scene, key)
    assert verdict(text) is ErrorCode.KEY_REVOKED


@pytest.mark.database
def test_notices_of_a_revocation_take_a_fixed_number_of_queries(scene: Scene) -> None:
    """The number of queries does not depend on the number of keys of the credential."""
    first, _ = issue(scene.sandbox)
    many, _ = issue(scene.sandbox)
    for _ in range(6):
        revoke(scene, add_second_key(scene, many))
    counts = []
    for key in (first, many):
        with CaptureQueriesContext(connection) as queries:
            revoke(scene, key)
        counts.append(len(queries))
    assert counts[0] == counts[1]


def test_compromise_report_reason_is_redacted_in_the_audit_log(scene: Scene) -> None:
    """A secret in the reason is redacted, and the report succeeds."""
    key, text = issue(scene.sandbox)
    allowed = grant(scene.responder, P.KEYS_REPORT_COMPROMISE, scene.sandbox)
    lifecycle.report_compromise(allowed, key, why=f"found {text.reveal()} in a gist")
    why = last_body("key.compromised")["details"]["why"]
    assert why.startswith("found ")
    assert text.reveal() not in why
