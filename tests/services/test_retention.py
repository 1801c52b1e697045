"""Retention: every table has one rule, and expired rows are deleted in batches."""

from datetime import datetime, timedelta

import pytest
from allauth.mfa.models import Authenticator
from allauth.socialaccount.models import SocialAccount
from django.apps import apps
from django.db import DatabaseError

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import KeyHolder
from keyvault.domain.keys import KeyKind
from keyvault.domain.notifications import NoticeKind
from keyvault.models import AuditEntry, CustomerToken, Notice, WebhookDelivery, WorkLease
from keyvault.services import retention
from keyvault.services.approvals.inbox import mark_seen
from keyvault.services.recording.notifications import announce
from keyvault.services.recording.transaction import recorded
from keyvault.services.tokens.customer_tokens import issue_customer_token
from keyvault.services.webhooks.endpoints import add_endpoint
from keyvault.services.work import leases
from rotation.services import retention as rotation_retention
from tests.factories import SANDBOX, grant, issue, now
from tests.services.conftest import Scene

DAY = timedelta(days=1)


def test_retention_has_one_rule_for_each_table() -> None:
    ruled = [rule.table for rule in (*retention.RULES, *rotation_retention.RULES)]
    ours = {model for app in ("keyvault", "rotation") for model in apps.get_app_config(app).get_models()}
    assert len(ruled) == len(set(ruled))
    assert set(ruled) == {*ours, Authenticator, SocialAccount}


def test_retention_never_deletes_audit_entries() -> None:
    (rule,) = (rule for rule in retention.RULES if rule.table is AuditEntry)
    assert rule.forget is None


def forget_expired_rows(at: datetime) -> None:
    """Delete a batch of each table."""
    for forget in retention.list_deletions().values():
        forget(at)


@pytest.mark.database
@pytest.mark.django_db
def test_customer_tokens_are_deleted_long_after_their_expiry(scene: Scene) -> None:
    """The database refuses to delete one that has not expired, and the audit entry of each stays."""
    key, _ = issue(scene.sandbox)
    holder = KeyHolder(key.key_id, key.credential_id, KeyKind.PRIVATE, SANDBOX, "acme")
    tokens = {
        days: issue_customer_token(
            grant(holder, P.CUSTOMER_TOKENS_WRITE, scene.sandbox, at=now() - days * DAY),
            scene.sandbox,
            key,
            customer_id="alice",
        )[0]
        for days in (0, 29, 31)
    }
    forget_expired_rows(now())
    assert set(CustomerToken.objects.values_list("pk", flat=True)) == {tokens[0].pk, tokens[29].pk}
    assert AuditEntry.objects.filter(event="customer_token.issued").count() == 3
    with pytest.raises(DatabaseError, match="not deleted before they expire"):
        forget_expired_rows(now() + 31 * DAY)


@pytest.mark.database
@pytest.mark.django_db
def test_notices_are_deleted_except_unseen_alarms_and_those_with_deliveries(scene: Scene) -> None:
    def send(subject: str, kind: NoticeKind, days: int) -> Notice:
        allowed = grant(scene.admin, P.KEYS_REVOKE, scene.sandbox, at=now() - days * DAY)
        with recorded(allowed, P.KEYS_REVOKE, "key.revoked", account=scene.sandbox):
            return announce(allowed, kind, scene.sandbox, subject)

    send("old", NoticeKind.KEY_REVOKED, 401)
    send("young", NoticeKind.KEY_REVOKED, 399)
    send("unseen", NoticeKind.KEY_COMPROMISED, 401)
    seen = send("seen", NoticeKind.KEY_COMPROMISED, 401)
    mark_seen(grant(scene.admin, P.NOTICES_MARK, scene.sandbox), seen)
    add_endpoint(grant(scene.tam, P.WEBHOOKS_WRITE, scene.sandbox), scene.sandbox, "https://acme.example/")
    send("undelivered", NoticeKind.KEY_REVOKED, 401)
    forget_expired_rows(now())
    assert set(Notice.objects.values_list("subject", flat=True)) == {"young", "unseen", "undelivered"}
    assert WebhookDelivery.objects.count() == 1


@pytest.mark.database
@pytest.mark.django_db
def test_leases_of_abandoned_work_are_deleted() -> None:
    """Finished work leaves no row; work that failed and is never claimed again leaves one for a week."""
    for subject, days in (("abandoned", 8), ("failing", 6)):
        lease = leases.claim(subject, now() - days * DAY)
        assert lease is not None
        leases.postpone(lease, now() - days * DAY, "failed")
    leases.claim("crashed", now() - 8 * DAY)
    done = leases.claim("done", now())
    assert done is not None
    leases.release(done)
    WorkLease.objects.create(subject="claimed again", due_at=now() - 8 * DAY, until=now() + DAY)
    forget_expired_rows(now())
    assert set(WorkLease.objects.values_list("subject", flat=True)) == {"failing", "claimed again"}
