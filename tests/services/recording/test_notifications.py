"""Notices: written with what happened or not at all, and sent to whom they concern."""

import json
from typing import Any

import pytest

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.domain.notifications import ALARMS, INTERNAL, NoticeKind
from keyvault.models import Notice, WebhookDelivery
from keyvault.models.recording import UnrecordedWriteError
from keyvault.services.recording.notifications import announce, message_of
from keyvault.services.recording.transaction import recorded
from keyvault.services.webhooks.endpoints import add_endpoint, disable_endpoint
from tests.factories import grant
from tests.services.conftest import Scene

pytestmark = [pytest.mark.database, pytest.mark.django_db]


def allowed(scene: Scene) -> Grant:
    return grant(scene.admin, P.KEYS_REVOKE, scene.sandbox)


def tell(scene: Scene, kind: NoticeKind = NoticeKind.KEY_REVOKED, **options: Any) -> Notice:
    with recorded(allowed(scene), P.KEYS_REVOKE, "key.revoked", account=scene.sandbox):
        return announce(allowed(scene), kind, scene.sandbox, "k" * 16, **options)


def test_notice_is_written_with_what_happened_or_not_at_all(scene: Scene) -> None:
    """The outbox and the act are one transaction: nobody is told of what was rolled back."""

    def act() -> None:
        with recorded(allowed(scene), P.KEYS_REVOKE, "key.revoked", account=scene.sandbox):
            announce(allowed(scene), NoticeKind.KEY_REVOKED, scene.sandbox, "k" * 16)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        act()
    assert not Notice.objects.exists()


def test_notice_outside_of_a_recorded_act_is_refused(scene: Scene) -> None:
    with pytest.raises(UnrecordedWriteError):
        announce(allowed(scene), NoticeKind.KEY_REVOKED, scene.sandbox, "k" * 16)


@pytest.mark.parametrize("kind", NoticeKind)
def test_notice_of_each_kind_fits_the_table_and_alarms_as_it_should(scene: Scene, kind: NoticeKind) -> None:
    add_endpoint(grant(scene.tam, P.WEBHOOKS_WRITE, scene.sandbox), scene.sandbox, "https://acme.example/")
    notice = tell(scene, kind)
    assert notice.is_alarm == (kind in ALARMS)
    assert WebhookDelivery.objects.filter(notice=notice).exists() == (kind not in INTERNAL)


def test_notice_alarms_where_its_writer_says_so(scene: Scene) -> None:
    with recorded(allowed(scene), P.KEYS_REVOKE, "key.revoked", account=scene.sandbox):
        notice = announce(allowed(scene), NoticeKind.KEY_REVOKED, scene.sandbox, "k" * 16, True)
    assert notice.is_alarm


def test_notice_goes_to_endpoints_that_are_enabled(scene: Scene) -> None:
    writing = grant(scene.tam, P.WEBHOOKS_WRITE, scene.sandbox)
    enabled, _ = add_endpoint(writing, scene.sandbox, "https://acme.example/1")
    disabled, _ = add_endpoint(writing, scene.sandbox, "https://acme.example/2")
    disable_endpoint(writing, disabled, "moved")
    elsewhere = grant(scene.tam, P.WEBHOOKS_WRITE, scene.production)
    add_endpoint(elsewhere, scene.production, "https://acme.example/3")
    tell(scene)
    assert [delivery.endpoint_id for delivery in WebhookDelivery.objects.all()] == [enabled.pk]


def test_message_is_the_same_bytes_whenever_it_is_made(scene: Scene) -> None:
    """However a database orders a payload's fields, the message of a notice is one text."""
    notice = tell(scene, zebra=1, ant=["b", "a"], none=None, yes=True)
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
