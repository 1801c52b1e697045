"""Webhook deliveries: at least once, identical on each attempt, retried for days, isolated per endpoint."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.db import DatabaseError
from django.test import override_settings

from keyvault.access.permissions import Permission as P
from keyvault.backends.outbound import OutboundError, Reply, ResolversBusyError
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import (
    Account,
    AuditEntry,
    DeliveryState,
    Notice,
    WebhookBreaker,
    WebhookDelivery,
    WebhookEndpoint,
    WorkLease,
)
from keyvault.services.maintenance import forget_due
from keyvault.services.peppers.ring import load_peppers
from keyvault.services.recording.notifications import announce
from keyvault.services.recording.signals import notice_settled
from keyvault.services.recording.transaction import recorded
from keyvault.services.webhooks import deliveries
from keyvault.services.webhooks.deliveries import (
    HOLD,
    MAX_CONCURRENT,
    MAX_PER_ACCOUNT,
    MAX_WITHOUT_REPLY,
    EndpointTurns,
    SendMessage,
    _next_due,
    deliver_due,
    find_delivery_report,
    forget_old_deliveries,
)
from keyvault.services.webhooks.endpoints import (
    add_endpoint,
    disable_endpoint,
    enable_endpoint,
    rotate_secret,
    send_test,
)
from keyvault.services.work import leases
from keyvault.wire.destinations import Destination
from keyvault.wire.webhooks import FAILURES_TO_OPEN, GIVE_UP_AFTER, MAX_ATTEMPTS, verify
from tests.backends.receivers import LOOPBACK, Receiver, receiver
from tests.clocks import Clock
from tests.factories import account, grant, make_merchant, now
from tests.services.conftest import Scene, make_scene
from tests.services.racing import TIMEOUT_SECONDS, start

pytestmark = [pytest.mark.database, pytest.mark.django_db]

KIND = NoticeKind.REPLACEMENT_AVAILABLE
SUBJECT = "rot_" + "A" * 20
SECOND = timedelta(seconds=1)


@pytest.fixture(autouse=True)
def loopback_networks() -> Iterator[None]:
    with override_settings(WEBHOOK_NETWORKS=LOOPBACK):
        yield


@pytest.fixture
def endpoint_server() -> Iterator[Receiver]:
    with receiver() as found:
        yield found


@pytest.fixture
def clock() -> Clock:
    """A clock one minute ahead, so that new messages are due."""
    return Clock(now() + timedelta(seconds=60))


def add(scene: Scene, url: str, account: Account | None = None) -> tuple[WebhookEndpoint, str]:
    place = account or scene.sandbox
    endpoint, secret = add_endpoint(grant(scene.tam, P.WEBHOOKS_WRITE, place), place, url)
    return endpoint, secret.reveal()


def send_notice(
    scene: Scene, kind: NoticeKind = KIND, account: Account | None = None, subject: str = SUBJECT
) -> Notice:
    place = account or scene.sandbox
    allowed = grant(scene.admin, P.KEYS_REVOKE, place)
    with recorded(allowed, P.KEYS_REVOKE, "key.revoked", account=place):
        return announce(allowed, kind, place, subject, key_id="k" * 16, rotation_id=subject)


def notify_both(scene: Scene) -> None:
    """Register an endpoint in each environment, and announce something to both."""
    for place in (scene.sandbox, scene.production):
        add(scene, f"https://{place.environment}.example/", place)
        send_notice(scene, account=place)


def states_by_environment() -> dict[str, str]:
    return dict(WebhookDelivery.objects.values_list("endpoint__account__environment", "state"))


def the_delivery() -> WebhookDelivery:
    return WebhookDelivery.objects.get()


def replying(status: int, retry_after: str | None = None) -> SendMessage:
    def send(destination: Destination, *args: Any, **options: Any) -> Reply:
        return Reply(status, retry_after)

    return send


def refuse_connection(destination: Destination, *args: Any, **options: Any) -> Reply:
    raise OutboundError("The connection was refused.")


def events() -> list[str]:
    return list(AuditEntry.objects.order_by("id").values_list("event", flat=True))


# --- delivered -------------------------------------------------------------------------------------------------


def test_message_arrives_signed_with_the_event(scene: Scene, endpoint_server: Receiver) -> None:
    """Sent over a real connection; any library of the Standard Webhooks specification accepts it."""
    _, secret = add(scene, endpoint_server.url())
    notice = send_notice(scene)
    assert deliver_due() == 1
    (received,) = endpoint_server.received
    assert verify(secret, received.headers, received.body, now()) == notice.notice_id
    assert json.loads(received.body) == {
        "type": "rotation.replacement_available",
        "timestamp": format_timestamp(notice.created_at),
        "data": {
            "account": {"environment": "sandbox", "merchant_id": "acme"},
            "key_id": "k" * 16,
            "rotation_id": SUBJECT,
            "subject": SUBJECT,
        },
    }
    delivery = the_delivery()
    assert (delivery.state, delivery.attempts, delivery.last_status) == (DeliveryState.DELIVERED, 1, 200)
    assert deliver_due() == 0


def test_message_retried_is_identical_except_for_its_timestamp(
    scene: Scene, endpoint_server: Receiver, clock: Clock
) -> None:
    """The id identifies the duplicate; the signature covers the attempt's own time."""
    _, secret = add(scene, endpoint_server.url())
    send_notice(scene)
    endpoint_server.status = 500
    deliver_due(clock)
    clock.now += timedelta(seconds=6)
    endpoint_server.status = 204
    deliver_due(clock)
    first, second = endpoint_server.received
    assert first.body == second.body
    assert verify(secret, first.headers, first.body, clock()) == verify(secret, second.headers, second.body, clock())
    assert first.headers["webhook-timestamp"] != second.headers["webhook-timestamp"]
    assert the_delivery().state == DeliveryState.DELIVERED


def test_message_during_a_secret_rotation_is_signed_with_both_secrets(scene: Scene, endpoint_server: Receiver) -> None:
    endpoint, first = add(scene, endpoint_server.url())
    second = rotate_secret(grant(scene.tam, P.WEBHOOKS_WRITE, scene.sandbox), endpoint).reveal()
    send_notice(scene)
    deliver_due()
    (received,) = endpoint_server.received
    assert verify(first, received.headers, received.body, now()) == verify(
        second, received.headers, received.body, now()
    )


def test_message_goes_to_the_endpoints_of_its_account_only(scene: Scene, endpoint_server: Receiver) -> None:
    add(scene, endpoint_server.url("/sandbox/1"))
    add(scene, endpoint_server.url("/sandbox/2"))
    add(scene, endpoint_server.url("/production"), scene.production)
    send_notice(scene)
    deliver_due()
    assert sorted(received.path for received in endpoint_server.received) == ["/sandbox/1", "/sandbox/2"]


def test_message_for_operators_only_is_not_sent(scene: Scene, endpoint_server: Receiver) -> None:
    add(scene, endpoint_server.url())
    assert send_notice(scene, NoticeKind.WEBHOOK_FAILED).is_alarm
    assert deliver_due() == 0
    assert endpoint_server.received == []


@override_settings(ENVIRONMENTS=("production",))
def test_message_of_an_unserved_environment_is_left_to_another_worker(endpoint_server: Receiver) -> None:
    """A worker without the environment's peppers cannot sign."""
    with override_settings(ENVIRONMENTS=("sandbox", "production")):
        scene = make_scene()
        add(scene, endpoint_server.url())
        send_notice(scene)
    load_peppers.cache_clear()
    assert deliver_due() == 0
    assert the_delivery().attempts == 0
    load_peppers.cache_clear()


# --- not delivered ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [301, 302, 400, 404, 429, 500, 503])
def test_message_answered_without_2xx_is_retried(scene: Scene, clock: Clock, status: int) -> None:
    add(scene, "https://acme.example/")
    send_notice(scene)
    assert deliver_due(clock, replying(status)) == 1
    delivery = the_delivery()
    assert (delivery.state, delivery.last_status) == (DeliveryState.DUE, status)
    assert timedelta(seconds=4) < delivery.due_at - clock() < timedelta(seconds=6)
    assert deliver_due(clock, replying(status)) == 0


def test_message_without_a_reply_is_retried_with_the_reason(scene: Scene, clock: Clock) -> None:
    add(scene, "https://acme.example/")
    send_notice(scene)
    deliver_due(clock, refuse_connection)
    delivery = the_delivery()
    assert (delivery.state, delivery.last_error) == (DeliveryState.DUE, "The connection was refused.")


def test_message_is_delayed_as_the_endpoint_requests(scene: Scene, clock: Clock) -> None:
    add(scene, "https://acme.example/")
    send_notice(scene)
    deliver_due(clock, replying(503, "600"))
    assert the_delivery().due_at == clock() + timedelta(seconds=600)


def test_message_answered_410_disables_the_endpoint_and_alarms(scene: Scene, clock: Clock) -> None:
    """Nothing is sent to that endpoint again."""
    endpoint, _ = add(scene, "https://acme.example/hooks?secret=1")
    send_notice(scene)
    send_notice(scene)
    deliver_due(clock, replying(410))
    endpoint.refresh_from_db()
    assert (endpoint.disabled_at, endpoint.disabled_why) == (clock(), "answered 410")
    assert set(WebhookDelivery.objects.values_list("state", flat=True)) == {DeliveryState.GIVEN_UP}
    alarm = Notice.objects.get(kind=NoticeKind.WEBHOOK_FAILED)
    assert (alarm.is_alarm, alarm.subject) == (True, str(endpoint.pk))
    assert alarm.payload["is_disabled"] is True
    assert "secret=1" not in json.dumps(alarm.payload)
    assert events()[-1] == "webhook_endpoint.disabled"
    clock.now += timedelta(days=1)
    send_notice(scene)
    assert deliver_due(clock, replying(200)) == 0


def exhaust_attempts(clock: Clock, send: SendMessage) -> timedelta:
    """Retry until the last attempt, and return the time since the first."""
    began = clock()
    for _ in range(MAX_ATTEMPTS - 1):
        assert deliver_due(clock, send) == 1
        clock.now = WebhookDelivery.objects.filter(state=DeliveryState.DUE).earliest("due_at").due_at
    assert deliver_due(clock, send) == 1
    return clock() - began


def test_message_given_up_after_about_75_hours_disables_the_endpoint(scene: Scene, clock: Clock) -> None:
    endpoint, _ = add(scene, "https://acme.example/")
    send_notice(scene)
    assert timedelta(hours=67) < exhaust_attempts(clock, refuse_connection) < timedelta(hours=84)
    delivery = the_delivery()
    assert (delivery.state, delivery.attempts) == (DeliveryState.GIVEN_UP, MAX_ATTEMPTS)
    endpoint.refresh_from_db()
    assert endpoint.disabled_why == "The connection was refused."
    assert Notice.objects.filter(kind=NoticeKind.WEBHOOK_FAILED, is_alarm=True).count() == 1
    clock.now += timedelta(days=30)
    assert deliver_due(clock, refuse_connection) == 0


def test_message_that_alone_fails_is_given_up_alone(scene: Scene, clock: Clock) -> None:
    """One message that a merchant's service cannot process does not stop all others."""
    endpoint, _ = add(scene, "https://acme.example/")
    rejected = send_notice(scene)
    began = the_delivery()

    def send(destination: Destination, headers: Mapping[str, str], *args: Any, **options: Any) -> Reply:
        return Reply(500 if headers["webhook-id"] == rejected.notice_id else 200, None)

    clock.now += SECOND
    deliver_due(clock, send)
    send_notice(scene)
    clock.now += SECOND
    deliver_due(clock, send)
    for _ in range(MAX_ATTEMPTS - 1):
        began.refresh_from_db()
        clock.now = began.due_at
        assert deliver_due(clock, send) == 1
    began.refresh_from_db()
    endpoint.refresh_from_db()
    assert (began.state, endpoint.disabled_at) == (DeliveryState.GIVEN_UP, None)
    alarm = Notice.objects.get(kind=NoticeKind.WEBHOOK_FAILED)
    assert alarm.payload["is_disabled"] is False
    assert events()[-1] == "webhook_endpoint.message_given_up"


def test_test_message_that_fails_is_given_up_immediately_without_an_alarm(scene: Scene, clock: Clock) -> None:
    """Its sender watches the page for the outcome."""
    endpoint, _ = add(scene, "https://acme.example/")
    send_test(grant(scene.tam, P.WEBHOOKS_WRITE, scene.sandbox), endpoint)
    clock.now += SECOND
    deliver_due(clock, refuse_connection)
    assert the_delivery().state == DeliveryState.GIVEN_UP
    endpoint.refresh_from_db()
    assert endpoint.disabled_at is None
    assert not Notice.objects.filter(is_alarm=True).exists()


def test_message_that_cannot_be_built_is_retried_like_any_other(
    scene: Scene, clock: Clock, endpoint_server: Receiver
) -> None:
    """A tampered row, or a network that is no longer listed, stops neither the worker nor other messages."""
    add(scene, endpoint_server.url("/one"))
    add(scene, "https://acme.example/")
    send_notice(scene)
    with override_settings(WEBHOOK_NETWORKS=()):
        assert deliver_due(clock, replying(200)) == 2
    states = {each.endpoint.url: each.state for each in WebhookDelivery.objects.select_related("endpoint")}
    assert states == {endpoint_server.url("/one"): DeliveryState.DUE, "https://acme.example/": DeliveryState.DELIVERED}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("status", [500, 410])
def test_message_to_an_endpoint_disabled_during_the_attempt_stays_given_up(status: int) -> None:
    """The disabling takes precedence over the attempt's outcome."""
    scene = make_scene()
    endpoint, _ = add(scene, "https://acme.example/")
    send_notice(scene)
    allowed = grant(scene.tam, P.WEBHOOKS_WRITE, scene.sandbox)

    def send(destination: Destination, *args: Any, **options: Any) -> Reply:
        start(lambda: disable_endpoint(allowed, endpoint, "moved")).result(TIMEOUT_SECONDS)
        return Reply(status, None)

    assert deliver_due(send=send) == 1
    assert (the_delivery().state, the_delivery().last_error) == (DeliveryState.GIVEN_UP, "the endpoint was disabled")
    assert WebhookEndpoint.objects.get().disabled_why == "moved"
    assert not Notice.objects.filter(kind=NoticeKind.WEBHOOK_FAILED).exists()


# --- isolation and concurrency ---------------------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
def test_endpoint_that_hangs_delays_only_itself(endpoint_server: Receiver) -> None:
    """All messages of another endpoint arrive while this one has not replied."""
    scene = make_scene()
    add(scene, "https://hangs.example/")
    add(scene, endpoint_server.url())
    notices = [send_notice(scene) for _ in range(5)]
    over, sent = threading.Event(), []

    def send(destination: Destination, headers: Mapping[str, str], *args: Any, **options: Any) -> Reply:
        if destination.host == "hangs.example":
            assert over.wait(TIMEOUT_SECONDS)
            raise OutboundError("The request timed out.")
        sent.append(headers["webhook-id"])
        if len(sent) == len(notices):
            over.set()
        return Reply(200, None)

    assert start(lambda: deliver_due(send=send)).result(TIMEOUT_SECONDS) >= len(notices) + 1
    assert sorted(sent) == sorted(notice.notice_id for notice in notices)


def hang(destination: Destination, *args: Any, **options: Any) -> Reply:
    raise OutboundError("The request timed out.")


@pytest.mark.django_db(transaction=True)
def test_alarm_is_sent_before_the_backlog_of_other_accounts(clock: Clock) -> None:
    """Hanging endpoints of other merchants do not delay the notice that a key is compromised."""
    scene = make_scene()
    for number in range(MAX_CONCURRENT):
        make_merchant(f"other{number}")
        add(scene, f"https://other{number}.example/", account(f"other{number}"))
        for _ in range(2):
            send_notice(scene, account=account(f"other{number}"))
    add(scene, "https://acme.example/")
    alarm = send_notice(scene, NoticeKind.KEY_COMPROMISED)
    arrived = threading.Event()

    def send(destination: Destination, headers: Mapping[str, str], *args: Any, **options: Any) -> Reply:
        if headers["webhook-id"] == alarm.notice_id:
            arrived.set()
            return Reply(200, None)
        assert arrived.wait(TIMEOUT_SECONDS), "every slot is occupied by the backlog"
        raise OutboundError("The request timed out.")

    deliver_due(clock, send)
    assert WebhookDelivery.objects.get(notice=alarm).state == DeliveryState.DELIVERED


def test_alarm_is_sent_before_earlier_messages_of_its_account(scene: Scene, clock: Clock) -> None:
    add(scene, "https://acme.example/")
    earlier = send_notice(scene)
    alarm = send_notice(scene, NoticeKind.KEY_COMPROMISED)
    sent = []

    def send(destination: Destination, headers: Mapping[str, str], *args: Any, **options: Any) -> Reply:
        sent.append(headers["webhook-id"])
        return Reply(200, None)

    assert deliver_due(clock, send) == 2
    assert sent == [alarm.notice_id, earlier.notice_id]


@pytest.mark.django_db(transaction=True)
def test_account_holds_at_most_its_share_of_the_attempts(clock: Clock) -> None:
    scene = make_scene()
    make_merchant("other")
    for number in range(MAX_PER_ACCOUNT + 1):
        add(scene, f"https://acme.example/{number}")
    add(scene, "https://other.example/", account("other"))
    send_notice(scene)
    send_notice(scene, account=account("other"))
    over, at_once = threading.Event(), []

    def send(destination: Destination, *args: Any, **options: Any) -> Reply:
        if destination.host == "other.example":
            begun = WebhookDelivery.objects.filter(endpoint__account=scene.sandbox, attempts=1)
            at_once.append(start(begun.count).result(TIMEOUT_SECONDS))
            over.set()
        assert over.wait(TIMEOUT_SECONDS)
        return Reply(200, None)

    assert deliver_due(clock, send) == MAX_PER_ACCOUNT + 2
    assert at_once[0] <= MAX_PER_ACCOUNT


def test_endpoint_without_a_reply_is_paused_and_probed(
    scene: Scene, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The breaker opens after a few attempts, and one attempt decides again. Waiting messages are not counted."""
    monkeypatch.setattr(deliveries, "BEGIN_SECONDS", TIMEOUT_SECONDS)
    endpoint, _ = add(scene, "https://hangs.example/")
    for _ in range(9):
        send_notice(scene)
    assert deliver_due(clock, hang) == FAILURES_TO_OPEN
    breaker = WebhookBreaker.objects.get(endpoint=endpoint)
    assert (breaker.failures, breaker.open_until) == (FAILURES_TO_OPEN, clock() + timedelta(minutes=1))
    clock.now += timedelta(seconds=59)
    assert deliver_due(clock, replying(200)) == 0
    clock.now += SECOND
    assert deliver_due(clock, hang) == 1
    breaker.refresh_from_db()
    assert breaker.open_until == clock() + timedelta(minutes=2)
    assert WebhookDelivery.objects.filter(attempts=0, state=DeliveryState.DUE).count() >= 9 - FAILURES_TO_OPEN - 1
    clock.now += timedelta(minutes=2)
    deliver_due(clock, replying(500))
    assert not WebhookBreaker.objects.exists()
    clock.now += timedelta(minutes=10)
    deliver_due(clock, replying(200))
    assert set(WebhookDelivery.objects.values_list("state", flat=True)) == {DeliveryState.DELIVERED}


def test_endpoints_without_a_reply_leave_room_for_others(scene: Scene, clock: Clock) -> None:
    """However many endpoints hang, they hold a part of the attempts under way."""
    for number in range(MAX_WITHOUT_REPLY + 1):
        make_merchant(f"other{number}")
        endpoint, _ = add(scene, f"https://other{number}.example/", account(f"other{number}"))
        WebhookBreaker.objects.create(endpoint=endpoint, failures=1)
        send_notice(scene, account=account(f"other{number}"))
    add(scene, "https://acme.example/")
    send_notice(scene)
    chosen = _next_due(("sandbox",), clock(), [])
    assert len(chosen) == MAX_WITHOUT_REPLY + 1
    assert scene.sandbox.pk in {delivery.endpoint.account_id for delivery in chosen}


def test_endpoints_are_visited_in_turn_across_searches(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search is bounded, and the next one continues where it stopped."""
    endpoints = [add(scene, f"https://acme.example/{number}")[0].pk for number in range(3)]
    send_notice(scene)
    turns = EndpointTurns(is_urgent=False)
    monkeypatch.setattr(deliveries, "MAX_VISITS", 2)
    searches = [[delivery.endpoint_id for delivery in turns.visit(now())] for _ in range(3)]
    one, two, three = endpoints
    assert searches == [[one, two], [three, one], [two, three]]


def test_endpoints_that_wait_are_not_visited(scene: Scene, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise thousands of endpoints that await their next attempt would delay the one with a new message."""
    monkeypatch.setattr(deliveries, "MAX_VISITS", 2)
    endpoints = [add(scene, f"https://acme.example/{number}")[0].pk for number in range(4)]
    send_notice(scene)
    WebhookDelivery.objects.exclude(endpoint=endpoints[-1]).update(due_at=clock() + timedelta(hours=1))
    assert deliver_due(clock, replying(200)) == 1
    assert WebhookDelivery.objects.get(state=DeliveryState.DELIVERED).endpoint_id == endpoints[-1]


def test_message_delayed_by_its_endpoint_is_given_up_at_its_time_only(scene: Scene, clock: Clock) -> None:
    """Messages that waited behind an open breaker are not retried forever, and none is given up earlier."""
    endpoint, _ = add(scene, "https://hangs.example/")
    send_notice(scene)
    delivery = the_delivery()
    clock.now = delivery.give_up_at - SECOND
    assert deliver_due(clock, hang) == 1
    assert the_delivery().state == DeliveryState.DUE
    clock.now = the_delivery().due_at
    assert deliver_due(clock, hang) == 1
    endpoint.refresh_from_db()
    assert (the_delivery().state, endpoint.disabled_at) == (DeliveryState.GIVEN_UP, clock())
    assert delivery.give_up_at == delivery.notice.created_at + GIVE_UP_AFTER


def test_endpoint_enabled_again_retries_its_messages_from_the_beginning(scene: Scene, clock: Clock) -> None:
    endpoint, _ = add(scene, "https://hangs.example/")
    send_notice(scene)
    clock.now = the_delivery().give_up_at
    deliver_due(clock, hang)
    endpoint.refresh_from_db()
    allowed = replace(grant(scene.tam, P.WEBHOOKS_WRITE, scene.sandbox), at=clock())
    assert enable_endpoint(allowed, endpoint) == 1
    assert not WebhookBreaker.objects.exists()
    assert deliver_due(clock, hang) == 1
    assert (the_delivery().state, the_delivery().attempts) == (DeliveryState.DUE, 1)


def test_attempt_without_a_resolver_says_nothing_about_the_endpoint(scene: Scene, clock: Clock) -> None:
    """Name servers of other merchants that hang do not pause a healthy endpoint."""
    add(scene, "https://acme.example/")
    send_notice(scene)

    def send(destination: Destination, *args: Any, **options: Any) -> Reply:
        raise ResolversBusyError("Too many names are being resolved.")

    assert deliver_due(clock, send=send) == 1
    assert the_delivery().state == DeliveryState.DUE
    assert not WebhookBreaker.objects.exists()


def test_outcome_that_the_database_refuses_does_not_end_the_round(
    scene: Scene, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        add(scene, f"https://{name}.example/")
    send_notice(scene)
    settle = deliveries._settle
    refused: list[int] = []

    def refuse_first(delivery: WebhookDelivery, *args: Any) -> None:
        if not refused:
            refused.append(delivery.pk)
            raise DatabaseError("deadlock detected")
        settle(delivery, *args)

    monkeypatch.setattr(deliveries, "_settle", refuse_first)
    assert deliver_due(clock, send=replying(200)) == 2
    states = dict(WebhookDelivery.objects.values_list("pk", "state"))
    assert states.pop(refused[0]) == DeliveryState.DUE
    assert list(states.values()) == [DeliveryState.DELIVERED]


def test_message_that_cannot_begin_does_not_end_the_round_of_another_environment(
    scene: Scene, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    notify_both(scene)
    begin = deliveries._begin

    def refuse_sandbox(delivery: WebhookDelivery, *args: Any) -> bool:
        if delivery.endpoint.account == scene.sandbox:
            raise DatabaseError("canceling statement due to lock timeout")
        return begin(delivery, *args)

    monkeypatch.setattr(deliveries, "_begin", refuse_sandbox)
    assert deliver_due(clock, replying(200)) == 1
    assert states_by_environment() == {"sandbox": DeliveryState.DUE, "production": DeliveryState.DELIVERED}


def test_outcome_with_an_unexpected_error_does_not_end_the_round(
    scene: Scene, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    notify_both(scene)
    settle = deliveries._settle

    def fail_sandbox(delivery: WebhookDelivery, *args: Any) -> None:
        if delivery.endpoint.account == scene.sandbox:
            raise RuntimeError("unexpected")
        settle(delivery, *args)

    monkeypatch.setattr(deliveries, "_settle", fail_sandbox)
    assert deliver_due(clock, replying(200)) == 2
    assert states_by_environment() == {"sandbox": DeliveryState.DUE, "production": DeliveryState.DELIVERED}
    assert not WorkLease.objects.exists()


def test_message_queued_while_its_endpoint_is_disabled_is_given_up(scene: Scene, clock: Clock) -> None:
    """The transaction that wrote it began before the one that disabled the endpoint, and ended after it."""
    endpoint, _ = add(scene, "https://acme.example/")
    disable_endpoint(grant(scene.tam, P.WEBHOOKS_WRITE, scene.sandbox), endpoint, "moved")
    notice = send_notice(scene)
    WebhookDelivery.objects.create(notice=notice, endpoint=endpoint, due_at=now(), give_up_at=now() + timedelta(days=1))
    settled: list[Notice] = []

    def note(notice: Notice, **_: object) -> None:
        settled.append(notice)

    notice_settled.connect(note)
    try:
        assert deliver_due(clock, send=replying(200)) == 0
    finally:
        notice_settled.disconnect(note)
    assert (the_delivery().state, the_delivery().last_error) == (DeliveryState.GIVEN_UP, "the endpoint was disabled")
    assert settled == [notice], "a rotation may wait for it"


def test_test_message_is_sent_while_the_breaker_is_open(scene: Scene, clock: Clock) -> None:
    """An operator who repaired the endpoint does not wait for the next probe."""
    endpoint, _ = add(scene, "https://acme.example/")
    for _ in range(FAILURES_TO_OPEN):
        send_notice(scene)
    deliver_due(clock, hang)
    test = send_test(grant(scene.tam, P.WEBHOOKS_WRITE, scene.sandbox), endpoint)
    deliver_due(clock, replying(200))
    assert WebhookDelivery.objects.get(notice=test).state == DeliveryState.DELIVERED


@pytest.mark.django_db(transaction=True)
def test_endpoint_gets_one_message_at_a_time_in_order() -> None:
    scene = make_scene()
    add(scene, "https://acme.example/")
    notices = [send_notice(scene).notice_id for _ in range(5)]
    sent, others = [], threading.Event()

    def send(destination: Destination, headers: Mapping[str, str], *args: Any, **options: Any) -> Reply:
        sent.append(headers["webhook-id"])
        if len(sent) > 1:
            others.set()
        else:
            assert not others.wait(0.2)
        return Reply(200, None)

    assert deliver_due(send=send) == 5
    assert sent == notices


def test_environments_are_delivered_at_the_same_time_by_one_thread(scene: Scene, clock: Clock) -> None:
    """Webhooks hold one of a worker's four threads, and an endpoint that hangs delays no other environment."""
    notify_both(scene)
    both = threading.Barrier(2)

    def send(destination: Destination, *args: Any, **options: Any) -> Reply:
        both.wait(TIMEOUT_SECONDS)
        return Reply(200, None)

    assert deliver_due(clock, send) == 2
    assert set(WebhookDelivery.objects.values_list("state", flat=True)) == {DeliveryState.DELIVERED}


@pytest.mark.django_db(transaction=True)
def test_worker_beside_a_working_one_sends_nothing() -> None:
    scene = make_scene()
    add(scene, "https://acme.example/")
    send_notice(scene)
    started, may_end = threading.Event(), threading.Event()

    def send(destination: Destination, *args: Any, **options: Any) -> Reply:
        started.set()
        assert may_end.wait(TIMEOUT_SECONDS)
        return Reply(200, None)

    first = start(lambda: deliver_due(send=send))
    assert started.wait(TIMEOUT_SECONDS)
    try:
        assert deliver_due(send=refuse_connection) == 0
    finally:
        may_end.set()
    assert first.result(TIMEOUT_SECONDS) == 1
    assert the_delivery().attempts == 1


@pytest.mark.django_db(transaction=True)
def test_worker_that_returns_after_its_lease_records_nothing(clock: Clock) -> None:
    """Fencing: a worker that lost its lease cannot undo its successor's record."""
    scene = make_scene()
    add(scene, "https://acme.example/")
    send_notice(scene)
    started, may_end = threading.Event(), threading.Event()

    def slow(destination: Destination, *args: Any, **options: Any) -> Reply:
        started.set()
        assert may_end.wait(TIMEOUT_SECONDS)
        return Reply(410, None)

    first = start(lambda: deliver_due(clock, slow))
    assert started.wait(TIMEOUT_SECONDS)
    clock.now += HOLD + leases.LEASE
    assert deliver_due(clock, replying(200)) == 1
    may_end.set()
    assert first.result(TIMEOUT_SECONDS) == 1
    delivery = the_delivery()
    assert (delivery.state, delivery.attempts, delivery.last_status) == (DeliveryState.DELIVERED, 2, 200)
    assert WebhookEndpoint.objects.get().disabled_at is None


_KILLED_SENDER = """
import os, signal
import django
django.setup()
from keyvault.backends.outbound import post
from keyvault.services.webhooks.deliveries import deliver_due

def send(*args, **options):
    if os.environ["DIES"] == "after":
        post(*args, **options)
    os.kill(os.getpid(), signal.SIGKILL)

deliver_due(send=send)
"""


@pytest.mark.long
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("killed_when", "arrived"), [("before", 1), ("after", 2)])
def test_worker_killed_around_sending_loses_no_message(
    endpoint_server: Receiver, killed_when: str, arrived: int
) -> None:
    """The next worker sends the message with the same id: at least once."""
    scene = make_scene()
    add(scene, endpoint_server.url())
    notice = send_notice(scene)
    environ = {
        **os.environ,
        "DIES": killed_when,
        "DJANGO_SETTINGS_MODULE": "keyvault.project.settings",
        "KEYVAULT_WEBHOOK_NETWORKS": "127.0.0.0/8",
    }
    done = subprocess.run([sys.executable, "-c", _KILLED_SENDER], env=environ, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert the_delivery().state == DeliveryState.DUE
    assert deliver_due() == 0
    assert deliver_due(lambda: now() + HOLD + SECOND) == 1
    assert [each.headers["webhook-id"] for each in endpoint_server.received] == [notice.notice_id] * arrived
    assert the_delivery().state == DeliveryState.DELIVERED


@pytest.mark.django_db(transaction=True)
def test_delivery_holds_no_transaction_open_while_it_sends(endpoint_server: Receiver) -> None:
    """A slow endpoint holds no lock."""
    scene = make_scene()
    add(scene, endpoint_server.url())
    send_notice(scene)

    def once() -> None:
        if len(endpoint_server.received) == 1:
            send_notice(scene)

    endpoint_server.before_answer = lambda: start(once).result(TIMEOUT_SECONDS)
    assert deliver_due() >= 1
    assert Notice.objects.count() == 2


def test_message_with_an_unexpected_error_is_logged_without_its_secret(
    scene: Scene, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    _, secret = add(scene, "https://acme.example/")
    send_notice(scene)

    def send(destination: Destination, headers: Mapping[str, str], *args: Any, **options: Any) -> Reply:
        raise RuntimeError("unexpected")

    with caplog.at_level(logging.INFO):
        assert deliver_due(clock, send) == 1
    assert the_delivery().last_error == "RuntimeError"
    assert secret not in caplog.text


# --- delivery reports ------------------------------------------------------------------------------------------


def test_delivery_report_is_delivered_once_one_endpoint_accepted(scene: Scene, clock: Clock) -> None:
    add(scene, "https://one.example/")
    add(scene, "https://two.example/")
    send_notice(scene)
    assert find_delivery_report(KIND, SUBJECT).delivered_at is None

    def send(destination: Destination, *args: Any, **options: Any) -> Reply:
        return Reply(200 if destination.host == "two.example" else 500, None)

    deliver_due(clock, send)
    notices = find_delivery_report(KIND, SUBJECT)
    assert (notices.delivered_at, notices.has_failed) == (clock(), False)


def test_delivery_report_is_open_while_an_endpoint_is_retried(scene: Scene, clock: Clock) -> None:
    add(scene, "https://one.example/")
    send_notice(scene)
    deliver_due(clock, refuse_connection)
    notices = find_delivery_report(KIND, SUBJECT)
    assert (notices.delivered_at, notices.has_failed, notices.reason) == (None, False, "The connection was refused.")


def test_delivery_report_has_failed_once_every_endpoint_was_given_up(scene: Scene, clock: Clock) -> None:
    add(scene, "https://one.example/")
    send_notice(scene)
    deliver_due(clock, replying(410))
    notices = find_delivery_report(KIND, SUBJECT)
    assert (notices.delivered_at, notices.has_failed, notices.reason) == (None, True, "answered 410")


def test_delivery_report_without_an_endpoint_has_failed(scene: Scene) -> None:
    send_notice(scene)
    notices = find_delivery_report(KIND, SUBJECT)
    assert (notices.has_failed, notices.reason) == (True, "the account had no enabled webhook endpoint")


def test_delivery_report_of_another_notice_is_unknown(scene: Scene) -> None:
    """Another kind or subject does not count."""
    add(scene, "https://one.example/")
    send_notice(scene)
    deliver_due(send=replying(200))
    for kind, subject in ((NoticeKind.ROTATION_ENDED, SUBJECT), (KIND, "rot_" + "B" * 20)):
        notices = find_delivery_report(kind, subject)
        assert (notices.delivered_at, notices.has_failed) == (None, False)


def test_deliveries_are_deleted_after_their_retention_and_notices_kept(scene: Scene, clock: Clock) -> None:
    add(scene, "https://one.example/")
    send_notice(scene)
    deliver_due(clock, replying(200))
    send_notice(scene)
    forget_due()
    assert WebhookDelivery.objects.count() == 2
    clock.now += timedelta(days=30, seconds=31)
    forget_old_deliveries(clock())
    assert [delivery.state for delivery in WebhookDelivery.objects.all()] == [DeliveryState.DUE]
    assert Notice.objects.count() == 2


def test_deliveries_are_deleted_a_limited_number_at_a_time_oldest_first(
    scene: Scene, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backlog is worked off in short steps."""
    monkeypatch.setattr("keyvault.services.work.deletion.MAX_DELETED", 2)
    add(scene, "https://one.example/")
    for _ in range(3):
        send_notice(scene)
        deliver_due(clock, replying(200))
        clock.now += SECOND
    newest = WebhookDelivery.objects.order_by("-pk")[0]
    clock.now += timedelta(days=31)
    forget_old_deliveries(clock())
    assert list(WebhookDelivery.objects.all()) == [newest]
    forget_old_deliveries(clock())
    assert not WebhookDelivery.objects.exists()


def test_delivery_run_releases_its_lease(scene: Scene) -> None:
    add(scene, "https://one.example/")
    send_notice(scene)
    assert deliver_due(send=refuse_connection) == 1
    assert not WorkLease.objects.exists()


def test_delivery_run_without_a_due_message_claims_nothing(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker begins a run every two seconds, and a claim is two commits."""
    monkeypatch.setattr(leases, "claim", lambda *args: pytest.fail("the environment was claimed"))
    assert deliver_due(send=refuse_connection) == 0


def test_delivery_run_that_cannot_claim_each_environment_releases_the_others(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = leases.claim

    def refuse_second(*args: Any) -> leases.Lease | None:
        if WorkLease.objects.exists():
            raise DatabaseError("canceling statement due to lock timeout")
        return claim(*args)

    monkeypatch.setattr(leases, "claim", refuse_second)
    add(scene, "https://one.example/")
    send_notice(scene)
    with pytest.raises(DatabaseError):
        deliver_due(send=refuse_connection)
    assert not WorkLease.objects.exists()
