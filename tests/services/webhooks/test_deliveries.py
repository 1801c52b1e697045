"""Messages to merchants: at least once and the same each time, tried for days, and nobody held up by a neighbour."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.test import override_settings

from keyvault.access.permissions import Permission as P
from keyvault.backends.outbound import OutboundError, Reply
from keyvault.domain.notifications import NoticeKind
from keyvault.models import Account, AuditEntry, DeliveryState, Notice, WebhookDelivery, WebhookEndpoint, WorkLease
from keyvault.services.maintenance import forget_due
from keyvault.services.peppers.ring import load_peppers
from keyvault.services.recording.notifications import announce
from keyvault.services.recording.transaction import recorded
from keyvault.services.webhooks.deliveries import (
    HOLD,
    KEEP,
    Send,
    deliver_due,
    find_delivery_report,
    forget_old_deliveries,
)
from keyvault.services.webhooks.endpoints import add_endpoint, disable_endpoint, rotate_secret, send_test
from keyvault.services.work import leases
from keyvault.wire.destinations import Destination
from keyvault.wire.webhooks import MOST_ATTEMPTS, verify
from tests.backends.receivers import LOOPBACK, Receiver, receiver
from tests.factories import grant, now
from tests.services.conftest import Scene, make_scene
from tests.services.racing import TIMEOUT_SECONDS, start

pytestmark = [pytest.mark.database, pytest.mark.django_db]

KIND = NoticeKind.REPLACEMENT_AVAILABLE
SUBJECT = "rot_" + "A" * 20
SECOND = timedelta(seconds=1)


@pytest.fixture(autouse=True)
def own_networks() -> Iterator[None]:
    with override_settings(WEBHOOK_NETWORKS=LOOPBACK):
        yield


@pytest.fixture
def here() -> Iterator[Receiver]:
    with receiver() as found:
        yield found


class Clock:
    """Goes when it is told to. It is a little ahead, so that what the test has just announced is due."""

    def __init__(self) -> None:
        self.now = now() + timedelta(seconds=60)

    def __call__(self) -> datetime:
        return self.now

    def go(self, by: timedelta) -> None:
        self.now += by


@pytest.fixture
def clock() -> Clock:
    return Clock()


def add(scene: Scene, url: str, account: Account | None = None) -> tuple[WebhookEndpoint, str]:
    place = account or scene.sandbox
    endpoint, secret = add_endpoint(grant(scene.tam, P.WEBHOOKS_WRITE, place), place, url)
    return endpoint, secret.reveal()


def tell(scene: Scene, kind: NoticeKind = KIND, account: Account | None = None, subject: str = SUBJECT) -> Notice:
    place = account or scene.sandbox
    allowed = grant(scene.admin, P.KEYS_REVOKE, place)
    with recorded(allowed, P.KEYS_REVOKE, "key.revoked", account=place):
        return announce(allowed, kind, place, subject, key_id="k" * 16, rotation_id=subject)


def the_delivery() -> WebhookDelivery:
    return WebhookDelivery.objects.get()


def answering(status: int, retry_after: str | None = None) -> Send:
    def send(destination: Destination, *args: Any, **options: Any) -> Reply:
        return Reply(status, retry_after)

    return send


def failing(destination: Destination, *args: Any, **options: Any) -> Reply:
    raise OutboundError("The connection was refused.")


def events() -> list[str]:
    return list(AuditEntry.objects.order_by("id").values_list("event", flat=True))


# --- what arrives ----------------------------------------------------------------------------------------------


def test_message_arrives_signed_and_says_what_happened(scene: Scene, here: Receiver) -> None:
    """What a merchant's service receives, over a real connection, is what any library of the standard takes."""
    _, secret = add(scene, here.url())
    notice = tell(scene)
    assert deliver_due() == 1
    (received,) = here.received
    assert verify(secret, received.headers, received.body, now()) == notice.notice_id
    assert json.loads(received.body) == {
        "type": "rotation.replacement_available",
        "timestamp": notice.created_at.isoformat().replace("+00:00", "Z"),
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


def test_message_tried_again_is_the_same_to_the_byte_but_for_the_time(
    scene: Scene, here: Receiver, clock: Clock
) -> None:
    """The id tells the merchant that it has seen this one; the signature is of the attempt's own time."""
    _, secret = add(scene, here.url())
    tell(scene)
    here.status = 500
    deliver_due(clock)
    clock.go(timedelta(seconds=6))
    here.status = 204
    deliver_due(clock)
    first, second = here.received
    assert first.body == second.body
    assert verify(secret, first.headers, first.body, clock()) == verify(secret, second.headers, second.body, clock())
    assert first.headers["webhook-timestamp"] != second.headers["webhook-timestamp"]
    assert the_delivery().state == DeliveryState.DELIVERED


def test_message_during_a_rotation_of_the_secret_is_proved_by_either(scene: Scene, here: Receiver) -> None:
    endpoint, first = add(scene, here.url())
    second = rotate_secret(grant(scene.tam, P.WEBHOOKS_WRITE, scene.sandbox), endpoint).reveal()
    tell(scene)
    deliver_due()
    (received,) = here.received
    assert verify(first, received.headers, received.body, now()) == verify(
        second, received.headers, received.body, now()
    )


def test_message_goes_to_the_endpoints_of_its_account_only(scene: Scene, here: Receiver) -> None:
    """What happens in one environment is told in no other (D12)."""
    add(scene, here.url("/sandbox/1"))
    add(scene, here.url("/sandbox/2"))
    add(scene, here.url("/production"), scene.production)
    tell(scene)
    deliver_due()
    assert sorted(received.path for received in here.received) == ["/sandbox/1", "/sandbox/2"]


def test_message_for_operators_alone_goes_nowhere(scene: Scene, here: Receiver) -> None:
    add(scene, here.url())
    assert tell(scene, NoticeKind.WEBHOOK_FAILED).is_alarm
    assert deliver_due() == 0
    assert here.received == []


@override_settings(ENVIRONMENTS=("production",))
def test_message_of_an_environment_that_is_not_served_is_left_to_another_worker(here: Receiver) -> None:
    """A worker without the environment's peppers cannot sign, and does not try."""
    with override_settings(ENVIRONMENTS=("sandbox", "production")):
        scene = make_scene()
        add(scene, here.url())
        tell(scene)
    load_peppers.cache_clear()
    assert deliver_due() == 0
    assert the_delivery().attempts == 0
    load_peppers.cache_clear()


# --- what does not ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [301, 302, 400, 404, 429, 500, 503])
def test_message_answered_with_anything_but_2xx_is_tried_again(scene: Scene, clock: Clock, status: int) -> None:
    add(scene, "https://acme.example/")
    tell(scene)
    assert deliver_due(clock, answering(status)) == 1
    delivery = the_delivery()
    assert (delivery.state, delivery.last_status) == (DeliveryState.DUE, status)
    assert timedelta(seconds=4) < delivery.due_at - clock() < timedelta(seconds=6)
    assert deliver_due(clock, answering(status)) == 0


def test_message_without_an_answer_is_tried_again_and_says_why(scene: Scene, clock: Clock) -> None:
    add(scene, "https://acme.example/")
    tell(scene)
    deliver_due(clock, failing)
    delivery = the_delivery()
    assert (delivery.state, delivery.last_error) == (DeliveryState.DUE, "The connection was refused.")


def test_message_is_held_back_as_long_as_the_endpoint_asks(scene: Scene, clock: Clock) -> None:
    add(scene, "https://acme.example/")
    tell(scene)
    deliver_due(clock, answering(503, "600"))
    assert the_delivery().due_at == clock() + timedelta(seconds=600)


def test_message_answered_410_ends_the_endpoint_and_alarms_the_operators(scene: Scene, clock: Clock) -> None:
    """Gone means gone: nothing is sent there again, and somebody hears of it."""
    endpoint, _ = add(scene, "https://acme.example/hooks?secret=1")
    tell(scene)
    tell(scene)
    deliver_due(clock, answering(410))
    endpoint.refresh_from_db()
    assert (endpoint.disabled_at, endpoint.disabled_why) == (clock(), "answered 410")
    assert set(WebhookDelivery.objects.values_list("state", flat=True)) == {DeliveryState.GIVEN_UP}
    alarm = Notice.objects.get(kind=NoticeKind.WEBHOOK_FAILED)
    assert (alarm.is_alarm, alarm.subject) == (True, str(endpoint.pk))
    assert alarm.payload["is_disabled"] is True
    assert "secret=1" not in json.dumps(alarm.payload)
    assert events()[-1] == "webhook_endpoint.disabled"
    clock.go(timedelta(days=1))
    tell(scene)
    assert deliver_due(clock, answering(200)) == 0


def _try_to_the_end(clock: Clock, send: Send) -> timedelta:
    """How long it took from the first attempt to the last."""
    began = clock()
    for _ in range(MOST_ATTEMPTS - 1):
        assert deliver_due(clock, send) == 1
        clock.now = WebhookDelivery.objects.filter(state=DeliveryState.DUE).earliest("due_at").due_at
    assert deliver_due(clock, send) == 1
    return clock() - began


def test_message_is_given_up_after_about_75_hours_and_with_it_the_endpoint(scene: Scene, clock: Clock) -> None:
    endpoint, _ = add(scene, "https://acme.example/")
    tell(scene)
    assert timedelta(hours=67) < _try_to_the_end(clock, failing) < timedelta(hours=84)
    delivery = the_delivery()
    assert (delivery.state, delivery.attempts) == (DeliveryState.GIVEN_UP, MOST_ATTEMPTS)
    endpoint.refresh_from_db()
    assert endpoint.disabled_why == "The connection was refused."
    assert Notice.objects.filter(kind=NoticeKind.WEBHOOK_FAILED, is_alarm=True).count() == 1
    clock.go(timedelta(days=30))
    assert deliver_due(clock, failing) == 0


def test_message_that_alone_is_refused_ends_alone(scene: Scene, clock: Clock) -> None:
    """One message that a merchant's service cannot take does not silence all the others."""
    endpoint, _ = add(scene, "https://acme.example/")
    poison = tell(scene)
    began = the_delivery()

    def send(destination: Destination, headers: Mapping[str, str], *args: Any, **options: Any) -> Reply:
        return Reply(500 if headers["webhook-id"] == poison.notice_id else 200, None)

    clock.go(SECOND)
    deliver_due(clock, send)
    tell(scene)
    clock.go(SECOND)
    deliver_due(clock, send)
    for _ in range(MOST_ATTEMPTS - 1):
        began.refresh_from_db()
        clock.now = began.due_at
        assert deliver_due(clock, send) == 1
    began.refresh_from_db()
    endpoint.refresh_from_db()
    assert (began.state, endpoint.disabled_at) == (DeliveryState.GIVEN_UP, None)
    alarm = Notice.objects.get(kind=NoticeKind.WEBHOOK_FAILED)
    assert alarm.payload["is_disabled"] is False
    assert events()[-1] == "webhook_endpoint.message_given_up"


def test_test_that_fails_says_so_at_once_and_ends_nothing(scene: Scene, clock: Clock) -> None:
    """Whoever sends a test looks at the page for its outcome; it is no reason for an alarm."""
    endpoint, _ = add(scene, "https://acme.example/")
    send_test(grant(scene.tam, P.WEBHOOKS_WRITE, scene.sandbox), endpoint)
    clock.go(SECOND)
    deliver_due(clock, failing)
    assert the_delivery().state == DeliveryState.GIVEN_UP
    endpoint.refresh_from_db()
    assert endpoint.disabled_at is None
    assert not Notice.objects.filter(is_alarm=True).exists()


def test_message_that_cannot_even_be_made_is_a_failure_like_any_other(
    scene: Scene, clock: Clock, here: Receiver
) -> None:
    """A row that was tampered with, or a network that is no longer named, stops neither the worker nor the others."""
    add(scene, here.url("/one"))
    add(scene, "https://acme.example/")
    tell(scene)
    WebhookEndpoint.objects.get(url=here.url("/one"))
    with override_settings(WEBHOOK_NETWORKS=()):
        assert deliver_due(clock, answering(200)) == 2
    states = {each.endpoint.url: each.state for each in WebhookDelivery.objects.select_related("endpoint")}
    assert states == {here.url("/one"): DeliveryState.DUE, "https://acme.example/": DeliveryState.DELIVERED}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("status", [500, 410])
def test_message_to_an_endpoint_disabled_meanwhile_stays_given_up(status: int) -> None:
    """Disabling wins: an attempt that was under way when it happened changes nothing of it."""
    scene = make_scene()
    endpoint, _ = add(scene, "https://acme.example/")
    tell(scene)
    allowed = grant(scene.tam, P.WEBHOOKS_WRITE, scene.sandbox)

    def send(destination: Destination, *args: Any, **options: Any) -> Reply:
        start(lambda: disable_endpoint(allowed, endpoint, "moved")).result(TIMEOUT_SECONDS)
        return Reply(status, None)

    assert deliver_due(send=send) == 1
    assert (the_delivery().state, the_delivery().last_error) == (DeliveryState.GIVEN_UP, "the endpoint was disabled")
    assert WebhookEndpoint.objects.get().disabled_why == "moved"
    assert not Notice.objects.filter(kind=NoticeKind.WEBHOOK_FAILED).exists()


# --- workers, and neighbours -----------------------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
def test_endpoint_that_hangs_holds_up_nobody_but_itself(here: Receiver) -> None:
    """All messages of a good endpoint arrive while a neighbour's has not answered a single one."""
    scene = make_scene()
    add(scene, "https://hangs.example/")
    add(scene, here.url())
    told = [tell(scene) for _ in range(5)]
    over, sent = threading.Event(), []

    def send(destination: Destination, headers: Mapping[str, str], *args: Any, **options: Any) -> Reply:
        if destination.host == "hangs.example":
            assert over.wait(TIMEOUT_SECONDS)
            raise OutboundError("The request timed out.")
        sent.append(headers["webhook-id"])
        if len(sent) == len(told):
            over.set()
        return Reply(200, None)

    assert start(lambda: deliver_due(send=send)).result(TIMEOUT_SECONDS) >= len(told) + 1
    assert sorted(sent) == sorted(notice.notice_id for notice in told)


@pytest.mark.django_db(transaction=True)
def test_endpoint_gets_one_message_at_a_time_in_their_order() -> None:
    scene = make_scene()
    add(scene, "https://acme.example/")
    told = [tell(scene).notice_id for _ in range(5)]
    sent, others = [], threading.Event()

    def send(destination: Destination, headers: Mapping[str, str], *args: Any, **options: Any) -> Reply:
        sent.append(headers["webhook-id"])
        if len(sent) > 1:
            others.set()
        else:
            assert not others.wait(0.2)
        return Reply(200, None)

    assert deliver_due(send=send) == 5
    assert sent == told


@pytest.mark.django_db(transaction=True)
def test_second_worker_does_nothing_while_the_first_is_at_it() -> None:
    scene = make_scene()
    add(scene, "https://acme.example/")
    tell(scene)
    begun, may_end = threading.Event(), threading.Event()

    def send(destination: Destination, *args: Any, **options: Any) -> Reply:
        begun.set()
        assert may_end.wait(TIMEOUT_SECONDS)
        return Reply(200, None)

    first = start(lambda: deliver_due(send=send))
    assert begun.wait(TIMEOUT_SECONDS)
    try:
        assert deliver_due(send=failing) == 0
    finally:
        may_end.set()
    assert first.result(TIMEOUT_SECONDS) == 1
    assert the_delivery().attempts == 1


@pytest.mark.django_db(transaction=True)
def test_worker_that_comes_back_late_notes_nothing(clock: Clock) -> None:
    """Fencing: whoever was thought dead cannot undo what its successor has noted."""
    scene = make_scene()
    add(scene, "https://acme.example/")
    tell(scene)
    begun, may_end = threading.Event(), threading.Event()

    def slow(destination: Destination, *args: Any, **options: Any) -> Reply:
        begun.set()
        assert may_end.wait(TIMEOUT_SECONDS)
        return Reply(410, None)

    first = start(lambda: deliver_due(clock, slow))
    assert begun.wait(TIMEOUT_SECONDS)
    clock.go(HOLD + leases.LEASE)
    assert deliver_due(clock, answering(200)) == 1
    may_end.set()
    assert first.result(TIMEOUT_SECONDS) == 1
    delivery = the_delivery()
    assert (delivery.state, delivery.attempts, delivery.last_status) == (DeliveryState.DELIVERED, 2, 200)
    assert WebhookEndpoint.objects.get().disabled_at is None


_DYING = """
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


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("dies", "arrived"), [("before", 1), ("after", 2)])
def test_worker_killed_around_sending_loses_no_message(here: Receiver, dies: str, arrived: int) -> None:
    """Killed with -9 before or after the message left, the next worker sends it, with the same id: at least once."""
    scene = make_scene()
    add(scene, here.url())
    notice = tell(scene)
    environ = {
        **os.environ,
        "DIES": dies,
        "DJANGO_SETTINGS_MODULE": "keyvault.project.settings",
        "KEYVAULT_WEBHOOK_NETWORKS": "127.0.0.0/8",
    }
    done = subprocess.run([sys.executable, "-c", _DYING], env=environ, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert the_delivery().state == DeliveryState.DUE
    assert deliver_due() == 0
    assert deliver_due(lambda: now() + HOLD + SECOND) == 1
    assert [each.headers["webhook-id"] for each in here.received] == [notice.notice_id] * arrived
    assert the_delivery().state == DeliveryState.DELIVERED


@pytest.mark.django_db(transaction=True)
def test_delivery_holds_no_transaction_open_while_it_sends(here: Receiver) -> None:
    """An endpoint that takes its time keeps no lock: others write meanwhile."""
    scene = make_scene()
    add(scene, here.url())
    tell(scene)

    def once() -> None:
        if len(here.received) == 1:
            tell(scene)

    here.before_answer = lambda: start(once).result(TIMEOUT_SECONDS)
    assert deliver_due() >= 1
    assert Notice.objects.count() == 2


def test_fault_of_one_message_is_logged_without_its_secret(
    scene: Scene, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    _, secret = add(scene, "https://acme.example/")
    tell(scene)

    def send(destination: Destination, headers: Mapping[str, str], *args: Any, **options: Any) -> Reply:
        raise RuntimeError("something that nobody foresaw")

    with caplog.at_level(logging.INFO):
        assert deliver_due(clock, send) == 1
    assert the_delivery().last_error == "RuntimeError"
    assert secret not in caplog.text


# --- what is known afterwards ----------------------------------------------------------------------------------


def test_telling_is_known_once_one_endpoint_took_it(scene: Scene, clock: Clock) -> None:
    add(scene, "https://one.example/")
    add(scene, "https://two.example/")
    tell(scene)
    assert find_delivery_report(KIND, SUBJECT).delivered_at is None

    def send(destination: Destination, *args: Any, **options: Any) -> Reply:
        return Reply(200 if destination.host == "two.example" else 500, None)

    deliver_due(clock, send)
    told = find_delivery_report(KIND, SUBJECT)
    assert (told.delivered_at, told.has_failed) == (clock(), False)


def test_telling_is_under_way_while_an_endpoint_is_tried(scene: Scene, clock: Clock) -> None:
    add(scene, "https://one.example/")
    tell(scene)
    deliver_due(clock, failing)
    told = find_delivery_report(KIND, SUBJECT)
    assert (told.delivered_at, told.has_failed, told.reason) == (None, False, "The connection was refused.")


def test_telling_has_failed_once_every_endpoint_was_given_up(scene: Scene, clock: Clock) -> None:
    add(scene, "https://one.example/")
    tell(scene)
    deliver_due(clock, answering(410))
    told = find_delivery_report(KIND, SUBJECT)
    assert (told.delivered_at, told.has_failed, told.reason) == (None, True, "answered 410")


def test_telling_has_failed_where_there_was_no_endpoint(scene: Scene) -> None:
    tell(scene)
    told = find_delivery_report(KIND, SUBJECT)
    assert (told.has_failed, told.reason) == (True, "the account had no enabled webhook endpoint")


def test_telling_of_what_was_never_announced_is_unknown(scene: Scene) -> None:
    """Another kind, or another subject, does not count."""
    add(scene, "https://one.example/")
    tell(scene)
    deliver_due(send=answering(200))
    for kind, subject in ((NoticeKind.ROTATION_ENDED, SUBJECT), (KIND, "rot_" + "B" * 20)):
        told = find_delivery_report(kind, subject)
        assert (told.delivered_at, told.has_failed) == (None, False)


def test_deliveries_are_forgotten_in_time_and_notices_are_not(scene: Scene, clock: Clock) -> None:
    add(scene, "https://one.example/")
    tell(scene)
    deliver_due(clock, answering(200))
    tell(scene)
    forget_due()
    assert WebhookDelivery.objects.count() == 2
    clock.go(KEEP + SECOND)
    forget_old_deliveries(clock())
    assert [delivery.state for delivery in WebhookDelivery.objects.all()] == [DeliveryState.DUE]
    assert Notice.objects.count() == 2


def test_round_leaves_its_lease_free(scene: Scene) -> None:
    deliver_due(send=failing)
    assert WorkLease.objects.get(subject="webhooks").until is None
