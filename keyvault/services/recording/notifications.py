"""What merchants and operators are told of: written in the transaction of what happened, sent afterwards."""

import secrets
from collections.abc import Mapping
from datetime import UTC

from keyvault.access.decision import Grant
from keyvault.domain.canonical import JsonValue, canonical_bytes
from keyvault.domain.ids import mint_id
from keyvault.domain.notifications import ALARMS, INTERNAL, NoticeKind
from keyvault.models import Account, Notice, WebhookDelivery, WebhookEndpoint


def announce(
    grant: Grant,
    kind: NoticeKind,
    account: Account | None,
    subject: str,
    is_alarm: bool = False,
    /,
    **payload: JsonValue,
) -> Notice:
    """Inside the `recorded` block of what happened: the notice, and its way to each endpoint of the account.

    `account`: None for a notice about the installation. `subject`: the id of what it is about. `is_alarm`: somebody
    has to see it, though not each of its kind.
    `payload`: ids, states and times; no material, and nothing of a person.
    """
    notice = _written(grant, kind, account, subject, payload, is_alarm or kind in ALARMS)
    if account is None or kind in INTERNAL:
        return notice
    for endpoint in WebhookEndpoint.objects.filter(account=account, disabled_at__isnull=True):
        WebhookDelivery.objects.create(notice=notice, endpoint=endpoint, due_at=grant.at)
    return notice


def announce_to(grant: Grant, endpoint: WebhookEndpoint, kind: NoticeKind, subject: str, /) -> Notice:
    """The same for one endpoint alone."""
    notice = _written(grant, kind, endpoint.account, subject, {}, kind in ALARMS)
    WebhookDelivery.objects.create(notice=notice, endpoint=endpoint, due_at=grant.at)
    return notice


def message_of(notice: Notice) -> bytes:
    """What is sent of it: the same bytes each time, since a notice never changes."""
    account = notice.account
    if account is None:
        raise TypeError(f"{notice.kind} is for operators alone")
    told = {"merchant_id": account.merchant_id, "environment": account.environment}
    data = {**notice.payload, "account": told, "subject": notice.subject}
    timestamp = notice.created_at.astimezone(UTC).isoformat().replace("+00:00", "Z")
    return canonical_bytes({"type": notice.kind, "timestamp": timestamp, "data": data})


def _written(
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
        kind=kind,
        subject=subject,
        payload=payload,
        is_alarm=is_alarm,
        created_at=grant.at,
    )
    notice.save()
    return notice
