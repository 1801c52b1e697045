"""Recipient keys: a merchant sets the key that its replacements are sealed to, with its API key as the proof.

A holder of a leaked API key could set one, too, and so receive the next replacement. Operators are therefore alarmed.
In production a recipient key applies only after DELAY, unless two persons approve it earlier. A rotation uses the key
that applied when the rotation was requested.
"""

import secrets
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import QuerySet
from django.db.models.functions import Now

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.domain.canonical import JsonValue
from keyvault.domain.environments import Environment
from keyvault.domain.errors import Fault, RequestInvalidError, StateConflictError
from keyvault.domain.free_text import clean_text
from keyvault.domain.ids import mint_id
from keyvault.domain.issuance import Delivery
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.recipient_keys import find_recipient_fault
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import Credential, IssuanceRequest, Key, RecipientKey, RecipientKeyApproval
from keyvault.services.approvals.four_eyes import approving_operator, record_approval
from keyvault.services.limits.limiter import spend_repeat
from keyvault.services.recording.notifications import announce
from keyvault.services.recording.transaction import recorded

DELAY = {Environment.SANDBOX: timedelta(0), Environment.PRODUCTION: timedelta(hours=24)}
"""Time from the request until a recipient key applies."""

APPROVALS_NEEDED = 2
"""Number of approvals that make a recipient key apply immediately: two, as only the API key identifies its setter."""


def set_recipient_key(grant: Grant, key: Key, public_key: str) -> RecipientKey:
    """Set the key that later replacements of the API key's credential are sealed to, and alarm the operators.

    Repeatable: the newest recipient key is returned unchanged if it is the same. An earlier one that does not apply yet
    is withdrawn. Raises RequestInvalidError for an invalid public key, and RateLimitedError.
    """
    if (fault := find_recipient_fault(public_key)) is not None:
        raise RequestInvalidError("The recipient key is invalid.", [Fault("/recipient_public_key", fault)])
    credential = key.credential
    rows = _valid_keys(credential)
    newest = rows.first()
    if newest is not None and newest.public_key == public_key:
        return newest
    # Each new key adds a permanent row and raises an alarm.
    spend_repeat(key.key_id, "recipient_keys")
    recipient = RecipientKey(
        recipient_key_id=mint_id("rcp", secrets.token_bytes),
        credential=credential,
        account=credential.account,
        account_environment=credential.account_environment,
        key=key,
        public_key=public_key,
        approvals_needed=APPROVALS_NEEDED,
        created_at=grant.at,
        applies_at=grant.at + DELAY[credential.environment],
    )
    with transaction.atomic():
        # The lock serializes a concurrent repeat, which then finds the same key.
        Credential.objects.select_for_update(no_key=True).get(pk=credential.pk)
        newest = rows.first()
        if newest is not None and newest.public_key == public_key:
            return newest
        with recorded(grant, P.RECIPIENTS_WRITE, "recipient_key.set", account=credential.account, **_about(recipient)):
            for pending in rows.filter(applies_at__gt=grant.at):
                pending.compare_and_swap(withdrawn_at=grant.at)
            recipient.save()
            announce(
                grant,
                NoticeKind.RECIPIENT_KEY_SET,
                credential.account,
                credential.credential_id,
                **_about(recipient),
                key_id=key.key_id,
            )
    return recipient


def approve_recipient_key(grant: Grant, recipient: RecipientKey, digest: str) -> RecipientKey:
    """Approve, as one of two persons, that the key applies immediately. Raises StateConflictError."""
    _require_pending(grant, recipient)
    operator = approving_operator(grant, recipient, digest)
    event = "recipient_key.approved"
    account = recipient.account
    with recorded(grant, P.RECIPIENTS_APPROVE, event, account=account, **_about(recipient), plan_digest=digest):
        approval = RecipientKeyApproval(recipient_key=recipient)
        environment = recipient.account_environment
        if record_approval(grant, recipient, operator, approval, environment=environment, event=event):
            recipient.compare_and_swap(applies_at=grant.at)
    return recipient


def withdraw_recipient_key(grant: Grant, recipient: RecipientKey, why: str) -> RecipientKey:
    """Withdraw a recipient key: nothing is sealed to it any more, also in open rotations. One person suffices.

    Raises StateConflictError when it is withdrawn already.
    """
    if recipient.withdrawn_at is not None:
        raise StateConflictError("The recipient key is withdrawn already.")
    account, reason = recipient.account, clean_text(why, 300)
    with recorded(
        grant, P.RECIPIENTS_WITHDRAW, "recipient_key.withdrawn", account=account, **_about(recipient), why=reason
    ):
        recipient.compare_and_swap(withdrawn_at=grant.at)
    return recipient


def is_pending(recipient: RecipientKey, now: datetime) -> bool:
    """Whether the key does not apply yet."""
    return recipient.withdrawn_at is None and recipient.applies_at > now


def list_pending(rows: QuerySet[RecipientKey], now: datetime | Now) -> QuerySet[RecipientKey]:
    """Return those of the keys that do not apply yet, in the order in which they will."""
    return rows.filter(withdrawn_at__isnull=True, applies_at__gt=now).order_by("applies_at")


def find_recipient(credential: Credential, requested_at: datetime) -> str | None:
    """Return the public key that seals a replacement requested at this time; None: the replacement is not sealed.

    It is the key that the merchant set last, of those that applied then. Without one, a credential with sealed delivery
    has the key of its issuance request.
    """
    chosen = _valid_keys(credential).filter(applies_at__lte=requested_at).first()
    if chosen is not None:
        return chosen.public_key
    if credential.delivery != Delivery.SEALED:
        return None
    asked = IssuanceRequest.objects.filter(key__credential=credential).exclude(recipient_public_key="")
    return asked.order_by("-created_at").values_list("recipient_public_key", flat=True).first()


def _valid_keys(credential: Credential) -> "QuerySet[RecipientKey]":
    """Return the keys that are not withdrawn, the newest first."""
    rows: QuerySet[RecipientKey] = RecipientKey.objects.filter(credential=credential, withdrawn_at__isnull=True)
    return rows.select_related("account").order_by("-created_at", "-pk")


def _require_pending(grant: Grant, recipient: RecipientKey) -> None:
    if not is_pending(recipient, grant.at):
        raise StateConflictError("The recipient key applies already, or is withdrawn.")


def _about(recipient: RecipientKey) -> dict[str, JsonValue]:
    return {
        "recipient_key_id": recipient.recipient_key_id,
        "credential_id": recipient.credential_id,
        "recipient_public_key": recipient.public_key,
        "applies_at": format_timestamp(recipient.applies_at),
    }
