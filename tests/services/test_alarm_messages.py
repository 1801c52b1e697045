"""Alarms reach operators by e-mail and webhook, again until they are acknowledged, and never with a secret."""

import json
import smtplib
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from email import message_from_bytes, policy
from email.message import EmailMessage
from typing import Any

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, Envelope, Session
from django.db import connection
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from keyvault.access.permissions import Permission as P
from keyvault.backends import meters
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import AlarmDelivery, Notice, WorkLease
from keyvault.project.configuration import SmtpServer
from keyvault.services import alarm_messages
from keyvault.services.alarm_messages import GIVE_UP_AFTER, HOLD, MAX_LISTED, AlarmThread, forget_old, send_due
from keyvault.services.approvals.inbox import mark_all_seen, mark_seen
from keyvault.services.recording.notifications import announce
from keyvault.services.recording.transaction import recorded
from keyvault.services.work import leases
from keyvault.wire.webhooks import mint_secret, verify
from tests.backends.receivers import LOOPBACK, Receiver, receiver
from tests.clocks import Clock
from tests.factories import grant, issue, now
from tests.services.conftest import Scene
from tests.services.racing import TIMEOUT_SECONDS

pytestmark = pytest.mark.django_db

REPEAT = 3_600
SECRET = mint_secret(lambda size: bytes(range(size)))


@dataclass
class Sink:
    """An SMTP server that keeps what it accepts, or answers `refusal`; it refuses the recipients in `unknown`."""

    refusal: str = ""
    unknown: tuple[str, ...] = ()
    mails: list[EmailMessage] = field(default_factory=list)
    recipients: list[str] = field(default_factory=list)

    async def handle_RCPT(  # noqa: N802  the library's
        self, server: SMTP, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        if address in self.unknown:
            return "550 no such user"
        envelope.rcpt_tos.append(address)
        return "250 accepted"

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:  # noqa: N802  the library's
        if self.refusal:
            return self.refusal
        parsed = message_from_bytes(envelope.original_content or b"", policy=policy.default)
        assert isinstance(parsed, EmailMessage)
        self.mails.append(parsed)
        self.recipients += envelope.rcpt_tos
        return "250 accepted"


def server_at(port: int) -> SmtpServer:
    return SmtpServer("127.0.0.1", port, "", Plaintext(""), is_tls=False, is_starttls=False)


@contextmanager
def sink() -> Iterator[tuple[Sink, int]]:
    kept = Sink()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    controller = Controller(kept, hostname="127.0.0.1", port=port)
    controller.start()
    try:
        yield kept, port
    finally:
        controller.stop()


@pytest.fixture
def mail() -> Iterator[Sink]:
    with (
        sink() as (kept, port),
        override_settings(
            EMAIL_BACKEND="django.core.mail.backends.smtp.EmailBackend",
            SMTP_SERVER=server_at(port),
            ALARM_CHANNELS=("email",),
            ALARM_EMAILS=("oncall@example.com", "security@example.com"),
            DEFAULT_FROM_EMAIL="keyvault@example.com",
            ALARM_REPEAT_SECONDS=REPEAT,
        ),
    ):
        yield kept


@pytest.fixture
def hook() -> Iterator[Receiver]:
    with (
        receiver() as found,
        override_settings(
            ALARM_CHANNELS=("webhook",),
            ALARM_WEBHOOK=found.url("/alarms"),
            ALARM_WEBHOOK_SECRET=SECRET,
            ALARM_REPEAT_SECONDS=REPEAT,
            WEBHOOK_NETWORKS=LOOPBACK,
        ),
    ):
        yield found


@pytest.fixture
def clock() -> Clock:
    return Clock(now() + timedelta(seconds=5))


def raise_alarm(
    scene: Scene, subject: str = "rot_1", kind: NoticeKind = NoticeKind.ROTATION_STALLED, **payload: str
) -> Notice:
    allowed = grant(scene.admin, P.KEYS_REVOKE, scene.sandbox)
    with recorded(allowed, P.KEYS_REVOKE, "key.revoked", account=scene.sandbox):
        return announce(allowed, kind, scene.sandbox, subject, True, **{"why": "a reason of the payload", **payload})


def messages(hook: Receiver) -> list[dict[str, Any]]:
    found = []
    for request in hook.received:
        assert verify(SECRET.reveal(), request.headers, request.body, now()) == request.headers["webhook-id"]
        found.append(json.loads(request.body))
    return found


def acknowledge_all(scene: Scene) -> None:
    mark_all_seen(grant(scene.admin, P.NOTICES_MARK), now() + timedelta(days=30))


@pytest.mark.database
def test_alarm_is_mailed_once_to_every_address(scene: Scene, mail: Sink, clock: Clock, settings: Any) -> None:
    settings.CONSOLE_ORIGIN = "https://console.example"
    notice = raise_alarm(scene)
    for _ in range(3):
        send_due(clock)
    (sent,) = mail.mails
    assert mail.recipients == ["oncall@example.com", "security@example.com"]
    assert sent["Subject"] == "[Keyvault] 1 new alarm: rotation.stalled"
    text = sent.get_content()
    assert f"rotation.stalled: rot_1, acme in sandbox, {notice.created_at:%Y-%m-%dT%H:%M}" in text
    assert "https://console.example/admin/keyvault/notice/?what=unseen" in text, "the console may have its own host"
    assert "a reason of the payload" not in text
    assert not AlarmDelivery.objects.exists()


def test_mail_names_each_alarm_as_the_inbox_does_and_links_its_page(
    scene: Scene, mail: Sink, clock: Clock, settings: Any
) -> None:
    """By one query for all of them; a secret in a name is masked."""
    settings.CONSOLE_ORIGIN = "https://console.example"
    key, text = issue(scene.sandbox, label="checkout")
    rows: tuple[tuple[NoticeKind, str, dict[str, str], str], ...] = (
        (NoticeKind.ROTATION_STALLED, "rot_1", {"credential_id": key.credential_id}, "checkout"),
        (NoticeKind.WEBHOOK_FAILED, "1", {"host": "hooks.acme.example"}, "hooks.acme.example"),
        (NoticeKind.CAMPAIGN_HALTED, "cmp_1", {"why": "3 of 5 stalled"}, "3 of 5 stalled"),
        (NoticeKind.BACKEND_UNATTRIBUTED, "crd_1", {"why": text.reveal()}, f"kv_prv_sbx_{key.key_id}***"),
        (NoticeKind.BACKEND_DENIED, "sandbox", {}, ""),
    )
    raised = [raise_alarm(scene, subject, kind, **payload) for kind, subject, payload, _ in rows]
    with CaptureQueriesContext(connection) as made:
        send_due(clock)
    (sent,) = mail.mails
    lines = sent.get_content().splitlines()
    for notice, (kind, subject, _, name) in zip(raised, rows, strict=True):
        quoted = f', named "{name}"' if name else ""
        place = lines.index(f"- {kind}: {subject}, acme in sandbox, {format_timestamp(notice.created_at)}{quoted}")
        url = reverse("admin:keyvault_notice_change", args=[notice.notice_id])
        assert lines[place + 1] == f"  https://console.example{url}"
    assert sum("keyvault_credential" in query["sql"] for query in made) == 1
    assert text.reveal() not in sent.as_string()


@pytest.mark.parametrize("end", ["\r\n", "\n", "\x0b", "\x85", "\u2028"], ids=ascii)
def test_mail_has_one_line_for_each_alarm_whatever_its_names_have(
    scene: Scene, mail: Sink, clock: Clock, end: str
) -> None:
    """Guarantee: a name adds no header, no line, no text after its quotation, and no link."""
    forged = f'x{end}Bcc: evil@example.com{end}- key.compromised", see https://evil.example/'
    notice = raise_alarm(scene, forged, NoticeKind.CAMPAIGN_HALTED, why=forged)
    send_due(clock)
    (sent,) = mail.mails
    assert sent["Bcc"] is None
    begin, own, link, *rest = [line for line in sent.get_content().splitlines() if line]
    assert begin.startswith("1 new alarm of Keyvault")
    at = f"{format_timestamp(notice.created_at)}, named "
    assert own.partition(at)[2] == '"x Bcc: evil@example.com - key.compromised\', see https: //evil.example/"'
    assert link.endswith(f"/{notice.notice_id}/")
    assert [line.split()[0] for line in rest] == ["Open", "Until"]


def test_alarms_are_posted_together_and_signed(scene: Scene, hook: Receiver, clock: Clock) -> None:
    raised = [raise_alarm(scene, f"rot_{number}") for number in range(3)]
    send_due(clock)
    (sent,) = messages(hook)
    assert sent["type"] == "alarms.raised"
    assert {each["notice_id"] for each in sent["data"]["alarms"]} == {notice.notice_id for notice in raised}
    assert sent["data"]["alarms"][0].keys() == {
        "notice_id", "kind", "subject", "created_at", "merchant_id", "environment",
    }  # fmt: skip


def test_many_alarms_are_sent_in_bounded_messages(scene: Scene, hook: Receiver, clock: Clock) -> None:
    for number in range(MAX_LISTED + 1):
        raise_alarm(scene, f"rot_{number}")
    send_due(clock)
    send_due(clock)
    assert [len(sent["data"]["alarms"]) for sent in messages(hook)] == [MAX_LISTED, 1]


def test_failed_message_is_repeated_with_pauses_and_the_same_id(scene: Scene, hook: Receiver, clock: Clock) -> None:
    """Guarantee: a receiver that was down gets the alarm, and can recognize a repetition."""
    raise_alarm(scene)
    hook.status = 500
    send_due(clock)
    send_due(clock)
    assert len(hook.received) == 1
    row = AlarmDelivery.objects.get()
    assert (row.attempts, row.last_error) == (1, "the webhook answered 500")
    clock.now = row.due_at
    hook.status = 204
    send_due(clock)
    assert not AlarmDelivery.objects.exists()
    first, second = hook.received
    assert (first.headers["webhook-id"], first.body) == (second.headers["webhook-id"], second.body)


def test_refused_mail_is_repeated_without_the_text_of_the_server(
    scene: Scene, mail: Sink, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    raise_alarm(scene)
    mail.refusal = "554 user keyvault with password hunter2 may not"
    send_due(clock)
    row = AlarmDelivery.objects.get()
    assert row.last_error == "the mail server answered 554"
    assert "hunter2" not in caplog.text
    mail.refusal = ""
    clock.now = row.due_at
    send_due(clock)
    assert len(mail.mails) == 1


def test_recipient_that_the_server_refuses_is_logged_and_delays_no_other(
    scene: Scene, mail: Sink, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    raise_alarm(scene)
    mail.unknown = ("oncall@example.com",)
    send_due(clock)
    assert not AlarmDelivery.objects.exists()
    assert mail.recipients == ["security@example.com"]
    (line,) = [record for record in caplog.records if "refused a recipient" in record.message]
    assert line.__dict__["recipient"] == "oncall@example.com"


def test_mail_of_which_the_server_refuses_all_recipients_is_repeated(scene: Scene, mail: Sink, clock: Clock) -> None:
    raise_alarm(scene)
    mail.unknown = ("oncall@example.com", "security@example.com")
    send_due(clock)
    assert AlarmDelivery.objects.get().last_error == "the mail server cannot be used: SMTPRecipientsRefused"


def test_mail_server_with_a_malformed_name_delays_the_alarm_as_one_that_is_unreachable(
    scene: Scene, mail: Sink, clock: Clock
) -> None:
    """Such an error is neither of SMTP nor of the operating system, and may contain the password."""
    raise_alarm(scene)
    with override_settings(SMTP_SERVER=replace(server_at(25), host="mail..example.com")):
        send_due(clock)
    assert AlarmDelivery.objects.get().last_error == "the mail server cannot be used: UnicodeError"


def test_unreachable_servers_delay_nothing_else(scene: Scene, hook: Receiver, clock: Clock) -> None:
    """Guarantee: each channel is served whatever happens to the other one."""
    with override_settings(
        ALARM_CHANNELS=("email", "webhook"),
        ALARM_EMAILS=("oncall@example.com",),
        EMAIL_BACKEND="django.core.mail.backends.smtp.EmailBackend",
        SMTP_SERVER=server_at(1),
    ):
        raise_alarm(scene)
        send_due(clock)
    assert len(messages(hook)) == 1
    assert [row.channel for row in AlarmDelivery.objects.all()] == ["email"]
    assert AlarmDelivery.objects.get().last_error == "the mail server cannot be used: ConnectionRefusedError"


def test_webhook_at_an_address_that_is_not_allowed_is_not_called(scene: Scene, hook: Receiver, clock: Clock) -> None:
    """Guarantee: no alarm leaves for an internal address that the host's owner has not allowed."""
    raise_alarm(scene)
    with override_settings(WEBHOOK_NETWORKS=()):
        send_due(clock)
    assert hook.received == []
    assert AlarmDelivery.objects.get().last_error == "the URL is not allowed"


def test_unacknowledged_alarm_is_repeated_until_an_operator_has_seen_it(
    scene: Scene, hook: Receiver, clock: Clock
) -> None:
    notice = raise_alarm(scene)
    for _ in range(3 * REPEAT // 60 + 2):
        send_due(clock)
        clock.tick(60)
    kinds = [sent["type"] for sent in messages(hook)]
    assert kinds == ["alarms.raised", *["alarms.unacknowledged"] * 3]
    assert messages(hook)[-1]["data"]["alarms"][0]["notice_id"] == notice.notice_id
    mark_seen(grant(scene.admin, P.NOTICES_MARK, scene.sandbox), notice)
    for _ in range(2 * REPEAT // 60):
        send_due(clock)
        clock.tick(60)
    assert len(hook.received) == 4


def test_reminder_counts_all_and_lists_the_oldest(scene: Scene, hook: Receiver, clock: Clock) -> None:
    with override_settings(ALARM_CHANNELS=()):
        for number in range(MAX_LISTED + 2):
            raise_alarm(scene, f"rot_{number}")
    clock.tick(REPEAT)
    send_due(clock)
    (sent,) = messages(hook)
    assert (sent["data"]["count"], len(sent["data"]["alarms"])) == (MAX_LISTED + 2, MAX_LISTED)


def test_reminder_that_takes_longer_than_a_lease_is_sent_by_one_process(
    scene: Scene, hook: Receiver, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    raise_alarm(scene)
    send_due(clock)
    clock.tick(REPEAT)
    deliver, others = alarm_messages._deliver, []

    def slowly(*arguments: Any, **options: Any) -> str:
        clock.tick(60)
        others.append(leases.claim("alarm-reminder:webhook", clock()))
        return deliver(*arguments, **options)

    monkeypatch.setattr(alarm_messages, "_deliver", slowly)
    send_due(clock)
    assert (others, len(messages(hook))) == ([None], 2)


def test_failed_reminder_is_repeated(scene: Scene, hook: Receiver, clock: Clock) -> None:
    raise_alarm(scene)
    send_due(clock)
    hook.status = 503
    clock.tick(REPEAT)
    send_due(clock)
    hook.status = 200
    clock.tick(61)
    send_due(clock)
    assert [sent["type"] for sent in messages(hook)] == ["alarms.raised", *["alarms.unacknowledged"] * 2]


def test_acknowledged_alarm_is_not_sent_any_more(scene: Scene, hook: Receiver, clock: Clock) -> None:
    raise_alarm(scene)
    acknowledge_all(scene)
    send_due(clock)
    assert hook.received == []
    assert not AlarmDelivery.objects.exists()


def test_worker_that_dies_while_it_sends_leaves_the_alarm_to_the_next(
    scene: Scene, hook: Receiver, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: at least once, however a worker ends."""
    raise_alarm(scene)

    def die(*_: Any, **__: Any) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(alarm_messages, "_deliver", die)
        with pytest.raises(KeyboardInterrupt):
            send_due(clock)
    send_due(clock)
    assert hook.received == []
    clock.tick(HOLD.total_seconds())
    send_due(clock)
    assert len(messages(hook)) == 1


@pytest.mark.database
def test_channel_of_another_worker_is_left_to_it(scene: Scene, hook: Receiver, clock: Clock) -> None:
    raise_alarm(scene)
    assert leases.claim("alarms:webhook", clock()) is not None
    send_due(clock)
    assert hook.received == []


def test_alarm_without_channels_writes_nothing(scene: Scene, clock: Clock) -> None:
    with override_settings(ALARM_CHANNELS=()):
        raise_alarm(scene)
        send_due(clock)
    assert not AlarmDelivery.objects.exists()
    assert not WorkLease.objects.filter(subject__startswith="alarm").exists()


def test_ordinary_notice_is_not_sent(scene: Scene, hook: Receiver, clock: Clock) -> None:
    allowed = grant(scene.admin, P.KEYS_REVOKE, scene.sandbox)
    with recorded(allowed, P.KEYS_REVOKE, "key.revoked", account=scene.sandbox):
        announce(allowed, NoticeKind.KEY_ISSUED, scene.sandbox, "k" * 16)
    send_due(clock)
    assert hook.received == []


def test_undelivered_alarm_is_forgotten_after_a_week(scene: Scene, hook: Receiver) -> None:
    notice = raise_alarm(scene)
    forget_old(notice.created_at + GIVE_UP_AFTER)
    assert AlarmDelivery.objects.count() == 1
    forget_old(notice.created_at + GIVE_UP_AFTER + timedelta(seconds=1))
    assert AlarmDelivery.objects.count() == 0


def test_messages_are_counted(scene: Scene, hook: Receiver, clock: Clock) -> None:
    def count(outcome: str) -> float:
        return float(meters._alarm_messages.labels("webhook", outcome)._value.get())

    before = count("delivered"), count("failed")
    raise_alarm(scene)
    hook.status = 500
    send_due(clock)
    hook.status = 200
    clock.now = AlarmDelivery.objects.get().due_at
    send_due(clock)
    assert (count("delivered"), count("failed")) == (before[0] + 1, before[1] + 1)


def test_mail_server_error_without_a_code_is_named(
    scene: Scene, mail: Sink, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disconnect(*_: Any, **__: Any) -> None:
        raise smtplib.SMTPServerDisconnected("hunter2")

    raise_alarm(scene)
    monkeypatch.setattr(smtplib.SMTP, "sendmail", disconnect)
    send_due(clock)
    assert AlarmDelivery.objects.get().last_error == "the mail server cannot be used: SMTPServerDisconnected"


def test_thread_of_a_console_sends_alarms_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: an alarm about lost workers, a lost beat or Redis leaves the console without them."""
    sent = threading.Semaphore(0)
    monkeypatch.setattr(alarm_messages, "CONSOLE_SECONDS", 0.001)
    monkeypatch.setattr(alarm_messages, "send_due", sent.release)
    thread = AlarmThread()
    thread.start()
    try:
        assert all(sent.acquire(timeout=TIMEOUT_SECONDS) for _ in range(2))
    finally:
        thread.stop()
