"""What is announced of a key's life: in the transaction of what happened, and never in its way."""

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

pytestmark = [pytest.mark.database, pytest.mark.django_db]

SUPERSEDED = RevocationReason.SUPERSEDED


def told(key: Key) -> list[tuple[str, bool]]:
    """The notices about a key's end, and its credential's; that it was issued apart."""
    about = Notice.objects.filter(subject__in=[key.key_id, key.credential_id]).exclude(kind="key.issued")
    return list(about.order_by("created_at", "kind").values_list("kind", "is_alarm"))


def beside(scene: Scene, key: Key, expires_in_days: int | None = None) -> Key:
    """A second key of the credential that is good."""
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


def test_notice_of_an_issued_key_names_it_and_holds_no_material(scene: Scene) -> None:
    """Ids and kinds: nothing of the key itself, nor of a person."""
    key, text = issue(scene.sandbox)
    notice = Notice.objects.get(kind="key.issued")
    assert (notice.subject, notice.is_alarm) == (key.key_id, False)
    assert notice.payload == {
        "key_id": key.key_id,
        "credential_id": key.credential_id,
        "key_kind": "private",
        "issuance_request_id": key.requests.get().request_id,
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
def test_notice_of_a_key_s_end_says_why_and_that_the_credential_has_none_left(
    scene: Scene, end: Callable[[Scene, Key], None], kind: str, is_alarm: bool, reason: str
) -> None:
    key, _ = issue(scene.sandbox)
    end(scene, key)
    assert told(key) == [("credential.without_key", True), (kind, is_alarm)]
    for notice in Notice.objects.exclude(kind="key.issued"):
        assert notice.payload == {"key_id": key.key_id, "credential_id": key.credential_id, "reason": reason}


@pytest.mark.parametrize("end", [revoke, report, report_own])
def test_notice_of_an_end_repeated_is_given_once(scene: Scene, end: Callable[[Scene, Key], None]) -> None:
    key, _ = issue(scene.sandbox)
    end(scene, key)
    end(scene, key)
    assert len(told(key)) == 2


@pytest.mark.parametrize("end", [revoke, report])
def test_notice_of_no_key_left_is_not_given_while_another_is_good(
    scene: Scene, end: Callable[[Scene, Key], None]
) -> None:
    first, _ = issue(scene.sandbox)
    second = beside(scene, first)
    end(scene, first)
    assert ("credential.without_key", True) not in told(first)
    end(scene, second)
    assert told(second).count(("credential.without_key", True)) == 1


def test_notice_of_no_key_left_does_not_count_on_an_expired_or_suspended_one(scene: Scene) -> None:
    """Usable is what would be accepted now: neither a suspended key nor one whose expiry nobody recorded yet."""
    for spoil in ("suspended", "expired"):
        first, _ = issue(scene.sandbox)
        second = beside(scene, first, expires_in_days=1)
        at = now()
        if spoil == "suspended":
            lifecycle.suspend_key(grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox), second)
        else:
            at += timedelta(days=2)
        lifecycle.revoke_key(grant(scene.admin, P.KEYS_REVOKE, scene.sandbox, at=at), first, SUPERSEDED)
        assert told(first).count(("credential.without_key", True)) == 1, spoil


def test_notice_of_no_key_left_is_not_given_for_what_was_suspended_dead_or_in_nobody_s_hands(scene: Scene) -> None:
    """Only an act that takes the last usable key away raises the alarm."""
    suspended, _ = issue(scene.sandbox)
    lifecycle.suspend_key(grant(scene.admin, P.KEYS_SUSPEND, scene.sandbox), suspended)
    before = Notice.objects.filter(kind="credential.without_key").count()
    revoke(scene, suspended)
    report(scene, suspended)
    burned, _ = issue(scene.sandbox)
    lifecycle.discard_key(grant(WORKER, P.ISSUANCE_EXECUTE, scene.sandbox), burned)
    assert Notice.objects.filter(kind="credential.without_key").count() == before
    assert told(suspended) == [("key.revoked", False), ("key.compromised", True)]
    assert told(burned) == []


def test_notice_of_no_key_left_is_given_at_an_expiry(scene: Scene) -> None:
    key, _ = issue(scene.sandbox, expires_in_days=1)
    lifecycle.expire_key(grant(WORKER, P.ISSUANCE_EXECUTE, scene.sandbox, at=key.expires_at), key)
    assert sorted(told(key)) == [("credential.without_key", True), ("key.revoked", False)]
    assert Notice.objects.get(kind="credential.without_key").payload["reason"] == "expired"


def test_notice_is_on_its_way_to_each_endpoint_of_the_account(scene: Scene) -> None:
    with recorded(
        grant(scene.admin, P.MERCHANTS_WRITE, scene.sandbox), P.MERCHANTS_WRITE, "t.x", account=scene.sandbox
    ):
        for number in range(2):
            url = f"https://hooks.example/{number}"
            WebhookEndpoint(account=scene.sandbox, url=url, secret=b"sealed", created_at=now()).save()
    key, _ = issue(scene.sandbox)
    revoke(scene, key)
    assert WebhookDelivery.objects.filter(notice__kind="key.revoked").count() == 2


def test_notice_is_not_written_when_the_revocation_is_not(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """One transaction: no notice of what did not happen, and nothing that happened without its notice."""
    key, text = issue(scene.sandbox)

    def fail(**_: object) -> None:
        raise StateConflictError("The log cannot be written.")

    with monkeypatch.context() as broken:
        broken.setattr(transaction, "append_entry", fail)
        with pytest.raises(StateConflictError):
            report(scene, key)
    assert told(key) == []
    assert verdict(text) is None
    report(scene, key)
    assert verdict(text) is ErrorCode.KEY_REVOKED


def test_notices_of_a_revocation_cost_a_fixed_number_of_queries(scene: Scene) -> None:
    """However many keys a credential or an account has, ending one of them asks the same."""
    first, _ = issue(scene.sandbox)
    many, _ = issue(scene.sandbox)
    for _ in range(6):
        revoke(scene, beside(scene, many))
    counts = []
    for key in (first, many):
        with CaptureQueriesContext(
            connection,
        ) as queries:
            revoke(scene, key)
        counts.append(len(queries))
    assert counts[0] == counts[1]


def test_report_s_reason_is_kept_in_the_audit_log_without_its_secrets(scene: Scene) -> None:
    """What somebody pastes along is redacted; the report does not fail for it."""
    key, text = issue(scene.sandbox)
    allowed = grant(scene.responder, P.KEYS_REPORT_COMPROMISE, scene.sandbox)
    lifecycle.report_compromise(allowed, key, why=f"found {text.reveal()} in a gist")
    why = last_body("key.compromised")["details"]["why"]
    assert why.startswith("found ")
    assert text.reveal() not in why
