"""Notices to merchants and operators: written in the transaction of the event, delivered afterwards."""

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime

from django.conf import settings

from keyvault.access.decision import Grant
from keyvault.domain.canonical import JsonValue, canonical_bytes
from keyvault.domain.ids import mint_id
from keyvault.domain.notifications import ALARMS, INTERNAL, NoticeKind
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import Account, AlarmDelivery, Notice, WebhookDelivery, WebhookEndpoint
from keyvault.services.work import leases
from keyvault.wire.webhooks import GIVE_UP_AFTER


@contextmanager
def alarm_due(kind: NoticeKind, subject: str, now: datetime) -> Iterator[bool]:
    """Yield True if no alarm of this kind and subject is unseen, and no other worker is raising one."""
    unseen = Notice.objects.filter(kind=kind, subject=subject, seen_at__isnull=True)
    name = leases.make_subject(f"alarm:{kind}:{subject}")
    lease = None if unseen.exists() else leases.claim(name, now, ignore_due_at=True)
    if lease is None:
        yield False
        return
    try:
        yield not unseen.exists()
    finally:
        leases.release(lease)


def announce(
    grant: Grant,
    kind: NoticeKind,
    account: Account | None,
    subject: str,
    is_alarm: bool = False,
    /,
    **payload: JsonValue,
) -> Notice:
    """Write a notice and one delivery per webhook endpoint of the account, inside the `recorded` block of the event.

    `account`: None for a notice about the installation. `subject`: the id of the affected object. `is_alarm`: an
    operator must acknowledge this notice, even if its kind is not always an alarm. `payload`: ids, states and times; no
    key material and no personal data.
    """
    notice = _write_notice(grant, kind, account, subject, payload, is_alarm or kind in ALARMS)
    if account is None or kind in INTERNAL:
        return notice
    for endpoint in WebhookEndpoint.objects.filter(account=account, disabled_at__isnull=True):
        _queue_delivery(grant, notice, endpoint, is_urgent=notice.is_alarm)
    return notice


def announce_to(grant: Grant, endpoint: WebhookEndpoint, kind: NoticeKind, subject: str, /) -> Notice:
    """Write a notice and its delivery to one webhook endpoint, before the endpoint's other messages."""
    notice = _write_notice(grant, kind, endpoint.account, subject, {}, kind in ALARMS)
    _queue_delivery(grant, notice, endpoint, is_urgent=True)
    return notice


def message_of(notice: Notice) -> bytes:
    """Return the request body of a notice: the same bytes on each delivery, because a notice never changes."""
    account = notice.account
    if account is None:
        raise TypeError(f"{notice.kind} is for operators only")
    account_ids = {"merchant_id": account.merchant_id, "environment": account.environment}
    data = {**notice.payload, "account": account_ids, "subject": notice.subject}
    timestamp = format_timestamp(notice.created_at)
    return canonical_bytes({"type": notice.kind, "timestamp": timestamp, "data": data})


def _queue_delivery(grant: Grant, notice: Notice, endpoint: WebhookEndpoint, *, is_urgent: bool) -> None:
    WebhookDelivery.objects.create(
        notice=notice,
        endpoint=endpoint,
        is_urgent=is_urgent,
        due_at=grant.at,
        give_up_at=grant.at + GIVE_UP_AFTER,
    )


def _write_notice(
    grant: Grant,
    kind: NoticeKind,
    account: Account | None,
    subject: str,
    payload: Mapping[str, JsonValue],
    is_alarm: bool,
) -> Notice:
    notice = Notice(
        notice_id=mint_id("ntc", secrets.token_bytes),
        account=account,
        account_environment=None if account is None else account.environment,
        kind=kind,
        subject=subject,
        payload=payload,
        is_alarm=is_alarm,
        created_at=grant.at,
    )
    notice.save()
    if is_alarm:
        due = {"created_at": grant.at, "due_at": grant.at}
        AlarmDelivery.objects.bulk_create(
            AlarmDelivery(notice=notice, channel=channel, **due) for channel in settings.ALARM_CHANNELS
        )
    return notice
