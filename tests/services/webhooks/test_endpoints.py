"""Webhook endpoints: valid URLs, sealed secrets, and the messages of a disabled endpoint."""

import json
from collections.abc import Callable
from datetime import timedelta
from ipaddress import ip_network
from typing import Any

import pytest
from django.test import override_settings

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.domain.errors import (
    IntegrityError,
    NotFoundError,
    PermissionMissingError,
    RequestInvalidError,
    StateConflictError,
)
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.plaintext import Plaintext
from keyvault.models import Account, AuditEntry, DeliveryState, WebhookDelivery, WebhookEndpoint
from keyvault.services.peppers.ring import load_peppers
from keyvault.services.recording.notifications import announce
from keyvault.services.recording.transaction import recorded
from keyvault.services.webhooks.endpoints import (
    CATCH_UP,
    MAX_ENDPOINTS,
    add_endpoint,
    describe_endpoint,
    disable_endpoint,
    enable_endpoint,
    host_of,
    rotate_secret,
    send_test,
    signing_secrets,
)
from tests.admin.desk import dump
from tests.factories import grant, now
from tests.services.conftest import Scene, make_scene
from tests.services.racing import race

pytestmark = pytest.mark.django_db

URL = "https://acme.example/hooks?token=theirs"


def add(scene: Scene, url: str = URL, account: Account | None = None) -> tuple[WebhookEndpoint, Plaintext]:
    place = account or scene.sandbox
    return add_endpoint(grant(scene.tam, P.WEBHOOKS_WRITE, place), place, url)


def write_grant(scene: Scene, **options: Any) -> Any:
    return grant(scene.tam, P.WEBHOOKS_WRITE, scene.sandbox, **options)


def revealed(endpoint: WebhookEndpoint, at: Any = None) -> list[str]:
    return [secret.reveal() for secret in signing_secrets(endpoint, at or now())]


def send_notice(scene: Scene, at: Any = None) -> None:
    allowed = grant(scene.admin, P.KEYS_REVOKE, scene.sandbox, at=at)
    with recorded(allowed, P.KEYS_REVOKE, "key.revoked", account=scene.sandbox):
        announce(allowed, NoticeKind.KEY_REVOKED, scene.sandbox, "k" * 16)


def last_entry() -> tuple[str, str, dict[str, Any]]:
    entry = AuditEntry.objects.latest("id")
    return entry.event, entry.chain_id, json.loads(bytes(entry.body))["details"]


# --- adding ----------------------------------------------------------------------------------------------------


@pytest.mark.database
def test_endpoint_added_signs_with_the_returned_secret(scene: Scene) -> None:
    endpoint, secret = add(scene)
    assert revealed(endpoint) == [secret.reveal()]
    event, chain, details = last_entry()
    assert (event, chain) == ("webhook_endpoint.added", "account:acme/sandbox")
    assert details["host"] == "acme.example"


def test_endpoint_secret_is_not_stored_in_plaintext(scene: Scene) -> None:
    """A copy of the database cannot sign; the audit log omits secrets in the URL."""
    _, secret = add(scene)
    text = dump()
    assert secret.reveal() not in text
    assert secret.reveal().removeprefix("whsec_") not in text
    assert not any(b"token=theirs" in bytes(entry.body) for entry in AuditEntry.objects.all())


@pytest.mark.database
def test_endpoint_secret_opens_in_its_own_row_only(scene: Scene) -> None:
    """A sealed secret moved to another endpoint or environment signs nothing."""
    endpoint, _ = add(scene)
    other, _ = add(scene, "https://acme.example/other")
    production_endpoint, _ = add(scene, URL, scene.production)
    for target in (other, production_endpoint):
        target.secret = endpoint.secret
        with pytest.raises(IntegrityError):
            signing_secrets(target, now())


@override_settings(ENVIRONMENTS=("sandbox",))
def test_endpoint_of_an_unserved_environment_is_refused(scene: Scene) -> None:
    """A process without the environment's peppers neither creates nor opens its secrets."""
    load_peppers.cache_clear()
    with pytest.raises(NotFoundError):
        add(scene, URL, scene.production)
    load_peppers.cache_clear()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "http://acme.example/",
        "https://user@acme.example/",
        "https://127.0.0.1/",
        "https://acme.example/#x",
        "https://acme.example:22/",
        "https://acme.example/" + "x" * 500,
        "https://acme.example/kv_prv_sbx_" + "A" * 65,
    ],
)
def test_endpoint_with_an_invalid_url_is_refused(scene: Scene, url: str) -> None:
    with pytest.raises(RequestInvalidError) as caught:
        add(scene, url)
    assert [fault.pointer for fault in caught.value.faults] == ["/url"]
    assert "A" * 65 not in str(caught.value.faults)
    assert not WebhookEndpoint.objects.exists()


def test_endpoint_in_a_listed_network_may_use_plain_http(scene: Scene) -> None:
    with override_settings(WEBHOOK_NETWORKS=(ip_network("10.1.0.0/16"),)):
        endpoint, _ = add(scene, "http://10.1.0.9:8080/hooks")
    assert host_of(endpoint) == "10.1.0.9:8080"


@pytest.mark.parametrize("url", [URL, "HTTPS://ACME.example:443/hooks?token=theirs"])
def test_endpoint_that_exists_already_is_refused(scene: Scene, url: str) -> None:
    add(scene)
    with pytest.raises(StateConflictError, match="already"):
        add(scene, url)


def test_endpoint_of_the_other_environment_is_separate(scene: Scene) -> None:
    """Sandbox and production share no endpoint and no secret, even for the same URL."""
    sandbox, secret = add(scene)
    production, other = add(scene, URL, scene.production)
    assert secret.reveal() != other.reveal()
    assert sandbox.pk != production.pk


def test_endpoints_above_the_maximum_are_refused(scene: Scene) -> None:
    endpoints = [add(scene, f"https://acme.example/{number}")[0] for number in range(MAX_ENDPOINTS)]
    with pytest.raises(StateConflictError, match="at most"):
        add(scene)
    disable_endpoint(write_grant(scene), endpoints[0], "moved")
    add(scene)
    with pytest.raises(StateConflictError, match="at most"):
        enable_endpoint(write_grant(scene), endpoints[0])


@pytest.mark.database
@pytest.mark.django_db(transaction=True)
def test_endpoints_added_concurrently_above_the_maximum_are_refused() -> None:
    scene = make_scene()
    for number in range(MAX_ENDPOINTS - 1):
        add(scene, f"https://acme.example/{number}")
    results = race(lambda: add(scene, "https://acme.example/a"), lambda: add(scene, "https://acme.example/b"))
    assert sum(isinstance(result, StateConflictError) for result in results) == 1
    assert WebhookEndpoint.objects.count() == MAX_ENDPOINTS


@pytest.mark.database
@pytest.mark.django_db(transaction=True)
def test_endpoint_added_twice_concurrently_exists_once() -> None:
    scene = make_scene()
    results = race(lambda: add(scene), lambda: add(scene))
    assert sum(isinstance(result, StateConflictError) for result in results) == 1
    assert WebhookEndpoint.objects.count() == 1


@pytest.mark.parametrize("action", ["add", "rotate", "disable", "enable", "test"])
def test_endpoint_changed_with_another_grant_is_refused(scene: Scene, action: str) -> None:
    """A grant for another permission or environment does not suffice."""
    endpoint, _ = add(scene)
    if action == "enable":
        disable_endpoint(write_grant(scene), endpoint, "moved")
    actions: dict[str, Callable[[Grant], object]] = {
        "add": lambda allowed: add_endpoint(allowed, scene.sandbox, "https://acme.example/2"),
        "rotate": lambda allowed: rotate_secret(allowed, endpoint),
        "disable": lambda allowed: disable_endpoint(allowed, endpoint, "moved"),
        "enable": lambda allowed: enable_endpoint(allowed, endpoint),
        "test": lambda allowed: send_test(allowed, endpoint),
    }
    for wrong in (grant(scene.tam, P.WEBHOOKS_WRITE, scene.production), grant(scene.tam, P.KEYS_READ, scene.sandbox)):
        with pytest.raises(PermissionMissingError):
            actions[action](wrong)


# --- secrets ---------------------------------------------------------------------------------------------------


def test_secret_rotated_signs_beside_the_previous_one_during_the_overlap(scene: Scene) -> None:
    endpoint, first = add(scene)
    at = now()
    second = rotate_secret(write_grant(scene, at=at), endpoint, 24)
    assert revealed(endpoint, at) == [second.reveal(), first.reveal()]
    assert revealed(endpoint, at + timedelta(hours=24)) == [second.reveal()]
    with pytest.raises(StateConflictError, match="two secrets sign until"):
        rotate_secret(write_grant(scene, at=at), endpoint, 24)
    assert revealed(endpoint, at) == [second.reveal(), first.reveal()]
    later = at + timedelta(hours=24)
    third = rotate_secret(write_grant(scene, at=later), endpoint, 24)
    assert revealed(endpoint, later) == [third.reveal(), second.reveal()]
    assert last_entry()[0] == "webhook_endpoint.secret_rotated"
    fourth = rotate_secret(write_grant(scene, at=later), endpoint, 0)
    assert revealed(endpoint, later) == [fourth.reveal()]


def test_secret_rotated_without_overlap_signs_alone(scene: Scene) -> None:
    """For use after a leak."""
    endpoint, _ = add(scene)
    second = rotate_secret(write_grant(scene), endpoint, 0)
    assert revealed(endpoint) == [second.reveal()]
    assert endpoint.previous_secret is None


@pytest.mark.parametrize("hours", [-1, 169])
def test_secret_rotated_with_an_invalid_overlap_is_refused(scene: Scene, hours: int) -> None:
    endpoint, first = add(scene)
    with pytest.raises(RequestInvalidError):
        rotate_secret(write_grant(scene), endpoint, hours)
    assert revealed(endpoint) == [first.reveal()]


# --- disabling and enabling ------------------------------------------------------------------------------------


def test_endpoint_disabled_gives_up_pending_messages_and_enabled_sends_them(scene: Scene) -> None:
    endpoint, _ = add(scene)
    send_notice(scene)
    disable_endpoint(write_grant(scene), endpoint, "moved")
    assert (endpoint.disabled_why, last_entry()[0]) == ("moved", "webhook_endpoint.disabled")
    assert WebhookDelivery.objects.get().state == DeliveryState.GIVEN_UP
    send_notice(scene)
    assert WebhookDelivery.objects.count() == 1
    assert enable_endpoint(write_grant(scene), endpoint) == 1
    delivery = WebhookDelivery.objects.get()
    assert (delivery.state, delivery.attempts) == (DeliveryState.DUE, 0)
    assert (endpoint.disabled_at, endpoint.disabled_why) == (None, "")


def test_endpoint_enabled_repeats_no_test(scene: Scene) -> None:
    endpoint, _ = add(scene)
    send_test(write_grant(scene), endpoint)
    disable_endpoint(write_grant(scene), endpoint, "moved")
    assert enable_endpoint(write_grant(scene), endpoint) == 0
    assert WebhookDelivery.objects.get().state == DeliveryState.GIVEN_UP


def test_endpoint_enabled_does_not_send_old_messages(scene: Scene) -> None:
    endpoint, _ = add(scene)
    send_notice(scene, at=now() - CATCH_UP - timedelta(minutes=1))
    disable_endpoint(write_grant(scene), endpoint, "moved")
    assert enable_endpoint(write_grant(scene), endpoint) == 0


def test_endpoint_disabled_or_enabled_twice_is_refused(scene: Scene) -> None:
    endpoint, _ = add(scene)
    with pytest.raises(StateConflictError):
        enable_endpoint(write_grant(scene), endpoint)
    disable_endpoint(write_grant(scene), endpoint, "moved")
    with pytest.raises(StateConflictError):
        disable_endpoint(write_grant(scene), endpoint, "moved")


# --- test messages and listings --------------------------------------------------------------------------------


def test_test_message_goes_to_its_endpoint_only(scene: Scene) -> None:
    endpoint, _ = add(scene)
    add(scene, "https://acme.example/other")
    notice = send_test(write_grant(scene), endpoint)
    assert notice.kind == NoticeKind.WEBHOOK_TEST
    assert not notice.is_alarm
    assert WebhookDelivery.objects.get().endpoint_id == endpoint.pk


def test_test_message_to_a_disabled_endpoint_is_refused(scene: Scene) -> None:
    endpoint, _ = add(scene)
    disable_endpoint(write_grant(scene), endpoint, "moved")
    with pytest.raises(StateConflictError):
        send_test(write_grant(scene), endpoint)
    assert not WebhookDelivery.objects.exists()


def test_endpoint_description_counts_deliveries_without_secrets(scene: Scene) -> None:
    endpoint, secret = add(scene)
    send_notice(scene)
    description = describe_endpoint(endpoint)
    assert (description["url"], description["due"], description["delivered"], description["given_up"]) == (URL, 1, 0, 0)
    assert secret.reveal() not in str(description)
