"""Notices: written in the transaction that they report, and sent to the endpoints of their account."""

import json
from typing import Any

import pytest

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.domain.notifications import ALARMS, INTERNAL, NoticeKind
from keyvault.models import Notice, WebhookDelivery
from keyvault.models.recording import UnrecordedWriteError
from keyvault.services.recording.notifications import alarm_due, announce, message_of
from keyvault.services.recording.transaction import recorded
from keyvault.services.webhooks.endpoints import add_endpoint, disable_endpoint
from tests.factories import grant, now
from tests.services.conftest import Scene

pytestmark = [pytest.mark.database, pytest.mark.django_db]


def allowed(scene: Scene) -> Grant:
    return grant(scene.admin, P.KEYS_REVOKE, scene.sandbox)


def send_notice(scene: Scene, kind: NoticeKind = NoticeKind.KEY_REVOKED, **options: Any) -> Notice:
    with recorded(allowed(scene), P.KEYS_REVOKE, "key.revoked", account=scene.sandbox):
        return announce(allowed(scene), kind, scene.sandbox, "k" * 16, **options)


def test_alarms_of_two_hosts_with_long_names_are_both_due() -> None:
    """Guarantee: the alarm of one host does not hold back that of another, whose name differs at its end only."""
    hosts = [f"{'keyvault-server-in-the-second-data-center-of-the-region-':x<60}{number}" for number in (1, 2)]
    with (
        alarm_due(NoticeKind.CLOCK_DIFFERS, hosts[0], now()) as is_due,
        alarm_due(NoticeKind.CLOCK_DIFFERS, hosts[1], now()) as is_also_due,
        alarm_due(NoticeKind.CLOCK_DIFFERS, hosts[0], now()) as is_due_again,
    ):
        assert (is_due, is_also_due, is_due_again) == (True, True, False)


def test_notice_of_a_rolled_back_transaction_is_not_written(scene: Scene) -> None:
    """The outbox row and its cause share one transaction."""

    def announce_and_fail() -> None:
        with recorded(allowed(scene), P.KEYS_REVOKE, "key.revoked", account=scene.sandbox):
            announce(allowed(scene), NoticeKind.KEY_REVOKED, scene.sandbox, "k" * 16)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        announce_and_fail()
    assert not Notice.objects.exists()


def test_notice_outside_a_recorded_block_is_refused(scene: Scene) -> None:
    with pytest.raises(UnrecordedWriteError):
        announce(allowed(scene), NoticeKind.KEY_REVOKED, scene.sandbox, "k" * 16)


@pytest.mark.postgres_once
@pytest.mark.parametrize("kind", NoticeKind)
def test_notice_of_each_kind_is_stored_and_alarms_as_listed(scene: Scene, kind: NoticeKind) -> None:
    add_endpoint(grant(scene.tam, P.WEBHOOKS_WRITE, scene.sandbox), scene.sandbox, "https://acme.example/")
    notice = send_notice(scene, kind)
    assert notice.is_alarm == (kind in ALARMS)
    assert WebhookDelivery.objects.filter(notice=notice).exists() == (kind not in INTERNAL)


def test_notice_alarms_if_its_writer_requires_it(scene: Scene) -> None:
    with recorded(allowed(scene), P.KEYS_REVOKE, "key.revoked", account=scene.sandbox):
        notice = announce(allowed(scene), NoticeKind.KEY_REVOKED, scene.sandbox, "k" * 16, True)
    assert notice.is_alarm


def test_notice_goes_to_enabled_endpoints_only(scene: Scene) -> None:
    writing = grant(scene.tam, P.WEBHOOKS_WRITE, scene.sandbox)
    enabled, _ = add_endpoint(writing, scene.sandbox, "https://acme.example/1")
    disabled, _ = add_endpoint(writing, scene.sandbox, "https://acme.example/2")
    disable_endpoint(writing, disabled, "moved")
    elsewhere = grant(scene.tam, P.WEBHOOKS_WRITE, scene.production)
    add_endpoint(elsewhere, scene.production, "https://acme.example/3")
    send_notice(scene)
    assert [delivery.endpoint_id for delivery in WebhookDelivery.objects.all()] == [enabled.pk]


def test_message_of_a_notice_is_always_the_same_bytes(scene: Scene) -> None:
    """The field order of the stored payload does not matter."""
    notice = send_notice(scene, zebra=1, ant=["b", "a"], none=None, yes=True)
    fresh = Notice.objects.get()
    assert message_of(notice) == message_of(fresh)
    assert b" " not in message_of(fresh)
    assert json.loads(message_of(fresh))["data"] == {
        "account": {"merchant_id": "acme", "environment": "sandbox"},
        "subject": "k" * 16,
        "zebra": 1,
        "ant": ["b", "a"],
        "none": None,
        "yes": True,
    }
