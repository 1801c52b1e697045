"""Send the operators' alarms by e-mail and webhook, at least once each, and again until they are acknowledged.

A new alarm has a row for each channel, written with it. A worker or a console sends what is due together, at most
MAX_LISTED in one message, and deletes the rows. A failed message is sent again with growing pauses. While there are
alarms that no operator has marked as seen, each channel gets a reminder of them every KEYVAULT_ALARM_REPEAT_MINUTES.

One process at a time serves a channel. A console needs neither workers nor beat nor Redis for it, so that alarms about
these are sent. If a process dies after sending, the message is sent again, with the same id.
Messages have kinds, ids of subjects and times. An e-mail also links the page of each alarm and quotes the name that the
console's inbox has for its subject, such as a label. The secrets that redaction recognizes are masked in it.
"""

import logging
import smtplib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import sha256
from typing import ClassVar, Protocol, cast
from urllib.parse import urlsplit

from django.conf import settings
from django.core.mail import EmailMessage
from django.core.mail.backends.smtp import EmailBackend

from keyvault.backends import meters
from keyvault.backends.outbound import OutboundError, post
from keyvault.domain.canonical import JsonValue, canonical_bytes
from keyvault.domain.free_text import clean_text
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import AlarmChannel, AlarmDelivery, Notice
from keyvault.models.notifications import UNSEEN_NOTICE
from keyvault.services.approvals.inbox import find_name, with_label
from keyvault.services.usage.recorder import utc_now
from keyvault.services.work import leases
from keyvault.services.work.background_thread import BackgroundThread, forget_at_fork
from keyvault.services.work.deletion import delete_batch
from keyvault.wire.destinations import parse_url
from keyvault.wire.webhooks import sign

MAX_LISTED = 20
"""Maximum alarms listed in one message."""

HOLD = timedelta(minutes=2)
"""Duration of the exclusive claim of an attempt; longer than an attempt can take."""

CONSOLE_SECONDS = 15.0
"""Interval at which a console sends what is due, in seconds. Workers do so every 5 s."""

GIVE_UP_AFTER = timedelta(days=7)
"""Age at which the service stops sending an undelivered alarm by itself. Reminders still list it."""

_FIRST_PAUSE, _LONGEST_PAUSE = timedelta(seconds=10), timedelta(minutes=10)
_MAX_COUNTED = 1_000
_MAX_NAME_LENGTH = 300
_INBOX = "/admin/keyvault/notice/"

_log = logging.getLogger(__name__)


class UndeliveredError(Exception):
    """The message was not accepted; the text says why, without secrets."""


class Deliver(Protocol):
    """Sends one message about alarms, of which there are `count`. Raises UndeliveredError."""

    def __call__(self, message_id: str, notices: Sequence[Notice], count: int, *, is_reminder: bool) -> None: ...


def send_due(clock: Callable[[], datetime] = utc_now) -> None:
    """Send what is due over each configured channel: one message of new alarms, and one reminder."""
    for channel in settings.ALARM_CHANNELS:
        lease = leases.claim(f"alarms:{channel}", clock())
        if lease is not None:
            try:
                _send_new(AlarmChannel(channel), clock)
                _send_reminder(AlarmChannel(channel), clock)
            finally:
                leases.release(lease)


@dataclass(slots=True, eq=False)
class AlarmThread(BackgroundThread):
    """Thread of a console server that sends what is due. It needs neither beat nor Redis."""

    thread_name: ClassVar[str] = "alarms"

    def forget(self) -> None:
        self.__init__()  # type: ignore[misc]  # a dataclass's own

    def _loop(self) -> None:
        self._repeat(send_due, CONSOLE_SECONDS)


alarm_thread = AlarmThread()
forget_at_fork(alarm_thread)


def forget_old(now: datetime) -> int:
    """Delete a batch of alarms that were not delivered for GIVE_UP_AFTER. Return how many."""
    return delete_batch(AlarmDelivery.objects.filter(created_at__lt=now - GIVE_UP_AFTER).order_by("created_at"))


def _send_new(channel: AlarmChannel, clock: Callable[[], datetime]) -> None:
    now = clock()
    due = AlarmDelivery.objects.filter(channel=channel, due_at__lte=now).select_related("notice__account")
    rows = list(due.order_by("due_at", "pk")[:MAX_LISTED])
    held = AlarmDelivery.objects.filter(pk__in=[row.pk for row in rows])
    unseen = [row.notice for row in rows if row.notice.seen_at is None]
    if unseen:
        held.update(due_at=now + HOLD)
        failure = _deliver(channel, "new", unseen, len(unseen))
        if failure:
            for row in rows:
                pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(row.attempts, 10))
                changes = {"attempts": min(row.attempts + 1, 1_000), "due_at": clock() + pause, "last_error": failure}
                AlarmDelivery.objects.filter(pk=row.pk).update(**changes)
            return
    held.delete()


def _send_reminder(channel: AlarmChannel, clock: Callable[[], datetime]) -> None:
    now, every = clock(), timedelta(seconds=settings.ALARM_REPEAT_SECONDS)
    timer = leases.claim(f"alarm-reminder:{channel}", now)
    if timer is None:
        return
    leases.renew(timer, now + HOLD)  # A slow mail server takes longer than a lease.
    oldest, count = list_unacknowledged(now - every)
    failure = _deliver(channel, f"reminder:{now.isoformat()}", oldest, count, is_reminder=True) if oldest else ""
    if failure:
        leases.postpone(timer, clock(), failure)
    else:
        leases.release(timer, due_at=now + (every if oldest else min(every, timedelta(minutes=1))))


def list_unacknowledged(until: datetime) -> tuple[list[Notice], int]:
    """Return the oldest alarms up to a time that no operator has seen, and how many there are, counted up to 1,000."""
    unseen = Notice.objects.filter(UNSEEN_NOTICE, created_at__lte=until)
    oldest = unseen.select_related("account").order_by("created_at")[:MAX_LISTED]
    return list(oldest), unseen[:_MAX_COUNTED].count()


def _deliver(
    channel: AlarmChannel, occasion: str, notices: Sequence[Notice], count: int, *, is_reminder: bool = False
) -> str:
    """Send one message and return why it was not delivered; "" if it was."""
    named = "\n".join([channel, occasion, *(notice.notice_id for notice in notices)])
    message_id = f"alm_{sha256(named.encode()).hexdigest()[:32]}"
    deliver: Deliver = _deliver_email if channel is AlarmChannel.EMAIL else _deliver_webhook
    failure = ""
    try:
        deliver(message_id, notices, count, is_reminder=is_reminder)
    except UndeliveredError as error:
        failure = str(error)[:300]
        _log.warning("alarms were not delivered", extra={"channel": channel.value, "why": failure})
    meters.note_alarm_message(channel, is_delivered=not failure)
    return failure


# --- e-mail ----------------------------------------------------------------------------------------------------


def _deliver_email(message_id: str, notices: Sequence[Notice], count: int, *, is_reminder: bool) -> None:
    kinds = ", ".join(sorted({str(notice.kind) for notice in notices}))
    what = "alarm" if count == 1 else "alarms"
    number = f"{count} or more" if count >= _MAX_COUNTED else str(count)
    begin = f"{number} unacknowledged {what}" if is_reminder else f"{number} new {what}"
    named = with_label(Notice.objects.filter(pk__in=[notice.pk for notice in notices]))
    names = {notice.pk: find_name(notice) for notice in named}
    lines = [
        f"{begin} of Keyvault at {settings.ORIGIN}.",
        "",
        *(line for notice in notices for line in _lines(notice, names.get(notice.pk, ""))),
        *([f"... and {number} in all."] if count > len(notices) else []),
        "",
        f"Open the inbox, and mark each alarm as seen: {settings.CONSOLE_ORIGIN}{_INBOX}?what=unseen",
        f"Until then this message is repeated every {settings.ALARM_REPEAT_SECONDS // 60} minutes.",
    ]
    server = settings.SMTP_SERVER
    if server is None:
        raise UndeliveredError("KEYVAULT_SMTP_URL is not set")
    headers = {
        "Message-ID": f"<{message_id}@{urlsplit(settings.ORIGIN).hostname}>",
        "Auto-Submitted": "auto-generated",
    }
    sender, recipients = settings.DEFAULT_FROM_EMAIL, list(settings.ALARM_EMAILS)
    mail = EmailMessage(f"[Keyvault] {begin}: {kinds}"[:200], "\n".join(lines), sender, recipients, headers=headers)
    backend = EmailBackend(
        host=server.host,
        port=server.port,
        username=server.user,
        password=server.password.reveal(),
        use_ssl=server.is_tls,
        use_tls=server.is_starttls,
    )
    try:
        with backend:
            # `mail.send()` would hide a recipient that the server refuses while it accepts another one.
            refused = cast(smtplib.SMTP, backend.connection).send_message(mail.message(), sender, recipients)
    except smtplib.SMTPResponseException as error:
        # The server's text may repeat the user's name.
        raise UndeliveredError(f"the mail server answered {error.smtp_code}") from error
    except (smtplib.SMTPException, OSError, ValueError) as error:
        # An error of an encoding contains the text, which can be the password.
        raise UndeliveredError(f"the mail server cannot be used: {type(error).__name__}") from None
    for recipient in refused:
        _log.warning("the mail server refused a recipient of alarms", extra={"recipient": recipient})


def _lines(notice: Notice, name: str) -> tuple[str, str]:
    """Return what the alarm is about, and the address of its page."""
    account = notice.account
    where = "" if account is None else f", {account.merchant_id} in {account.environment}"
    quoted = f', named "{_quotable(name)}"' if name else ""
    return (
        f"- {notice.kind}: {_one_line(notice.subject)}{where}, {format_timestamp(notice.created_at)}{quoted}",
        f"  {settings.CONSOLE_ORIGIN}{_INBOX}{notice.notice_id}/",
    )


def _one_line(text: str) -> str:
    """Return the text without line breaks: a line of its own would look like another alarm."""
    return " ".join(text.split())


def _quotable(name: str) -> str:
    """Return a name that others chose, to be quoted: it can neither end the quotation nor have a URL with a scheme."""
    return clean_text(_one_line(name), _MAX_NAME_LENGTH).replace('"', "'").replace("://", ": //")


# --- webhook ---------------------------------------------------------------------------------------------------


def _deliver_webhook(message_id: str, notices: Sequence[Notice], count: int, *, is_reminder: bool) -> None:
    now = utc_now()
    # The same for each attempt to send new alarms, so that the message has the same bytes.
    at = now if is_reminder else max(notice.created_at for notice in notices)
    data: dict[str, JsonValue] = {
        "alarms": [_describe(notice) for notice in notices],
        "count": count,
        "console": f"{settings.CONSOLE_ORIGIN}/admin/",
    }
    kind = "alarms.unacknowledged" if is_reminder else "alarms.raised"
    body = canonical_bytes({"type": kind, "timestamp": format_timestamp(at), "data": data})
    try:
        destination = parse_url(settings.ALARM_WEBHOOK, settings.WEBHOOK_NETWORKS)
        headers = sign([settings.ALARM_WEBHOOK_SECRET], message_id, now, body)
        reply = post(destination, headers, body, own_networks=settings.WEBHOOK_NETWORKS)
    except (OutboundError, ValueError) as error:
        raise UndeliveredError(
            error.detail if isinstance(error, OutboundError) else "the URL is not allowed"
        ) from error
    if not 200 <= reply.status <= 299:
        raise UndeliveredError(f"the webhook answered {reply.status}")


def _describe(notice: Notice) -> JsonValue:
    account = notice.account
    about: dict[str, JsonValue] = {
        "notice_id": notice.notice_id,
        "kind": str(notice.kind),
        "subject": notice.subject,
        "created_at": format_timestamp(notice.created_at),
    }
    if account is not None:
        about |= {"merchant_id": account.merchant_id, "environment": str(account.environment)}
    return about
