"""A stalled rotation in the console: two clicks from the overview to the remedy and the action."""

import html
import re
from collections.abc import Callable
from datetime import timedelta
from unittest import mock

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.access.roles import Role
from keyvault.admin.framework.attention import AttentionItem
from keyvault.backends.base import BackendDeniedError, Mount
from keyvault.backends.local import LocalKeystore
from keyvault.domain.errors import StateConflictError
from keyvault.domain.issuance import Delivery
from keyvault.domain.keys import KeyKind
from keyvault.domain.plaintext import Plaintext
from keyvault.models import DeliveryState, Key, WebhookDelivery
from keyvault.services.keys.lifecycle import get_key, resume_key, suspend_key
from keyvault.services.recording.authorization import authorize
from keyvault.services.secrets.backend import secret_backend
from keyvault.services.usage.recorder import UsageLog
from keyvault.services.webhooks.endpoints import add_endpoint
from rotation.admin.rotation_actions import ROW_ACTIONS
from rotation.domain.events import RotationState as S
from rotation.domain.plan_fields import DeliveryChannel
from rotation.domain.runbook import REMEDY_LABELS, STALLS, Case, Remedy, fit_advice
from rotation.domain.windows import Window
from rotation.models import Rotation
from rotation.services.rotations.engine import MAX_ATTEMPTS
from tests.admin.desk import address, browser, text_of
from tests.clocks import Clock
from tests.factories import now, the_operator
from tests.rotation import scene
from tests.rotation.steps import advance, begun, damage, overlapping, quarantined, wait

pytestmark = pytest.mark.django_db


@pytest.fixture
def clock() -> Clock:
    """Start at today's time, since the console uses the real clock."""
    return Clock(now())


def _key(key_id: str | None) -> Key:
    key = get_key(key_id or "")
    assert key is not None
    return key


def _suspended(key_id: str | None, rotation: Rotation, clock: Clock) -> Rotation:
    key = _key(key_id)
    suspend_key(authorize(scene.admin(), P.KEYS_SUSPEND, key.credential.account, now=clock()), key)
    return advance(rotation, clock, 3)


def late(clock: Clock, verifier: UsageLog) -> Rotation:
    rotation = overlapping(clock, verifier, deadline=clock() + timedelta(seconds=60))
    return wait(rotation, clock, verifier, 61)


def replacement_suspended(clock: Clock, verifier: UsageLog) -> Rotation:
    rotation = overlapping(clock, verifier)
    return _suspended(rotation.replacement_id, rotation, clock)


def predecessor_suspended(clock: Clock, verifier: UsageLog) -> Rotation:
    rotation = overlapping(clock, verifier)
    return _suspended(rotation.predecessor_id, rotation, clock)


def quarantine_lifted(clock: Clock, verifier: UsageLog) -> Rotation:
    rotation = quarantined(clock, verifier)
    key = _key(rotation.predecessor_id)
    resume_key(authorize(scene.admin(), P.KEYS_RESUME, key.credential.account, now=clock()), key)
    return advance(rotation, clock, 3)


def step_failing(clock: Clock, verifier: UsageLog) -> Rotation:
    rotation = begun(clock)
    refused = StateConflictError("The backend denies access.", internal="403: permission denied")
    with mock.patch.object(LocalKeystore, "put", side_effect=refused):
        for _ in range(MAX_ATTEMPTS):
            rotation = advance(rotation, clock, 120)
    return rotation


def backend_refuses(clock: Clock, verifier: UsageLog) -> Rotation:
    rotation = begun(clock)
    with mock.patch.object(LocalKeystore, "put", side_effect=BackendDeniedError("Access is denied.", status=403)):
        return advance(rotation, clock)


def foreign_writer(clock: Clock, verifier: UsageLog) -> Rotation:
    rotation = begun(clock)
    path = rotation.credential.backend_path
    secret_backend().put(Mount.SANDBOX, path, Plaintext("theirs"), {"who": "somebody"}, expected_version=1)
    return advance(rotation, clock)


def window_closed(clock: Clock, verifier: UsageLog) -> Rotation:
    rotation = begun(clock, window=Window("UTC", (0, 1, 2, 3, 4, 5, 6)))
    with mock.patch.object(Window, "next_opening", return_value=None):
        return advance(rotation, clock)


def message_not_accepted(clock: Clock, verifier: UsageLog) -> Rotation:
    account = scene.account()
    add_endpoint(authorize(scene.tam(), P.WEBHOOKS_WRITE, account, now=clock()), account, "https://merchant.example/x")
    rotation = advance(begun(clock, channels=tuple(DeliveryChannel)), clock)
    WebhookDelivery.objects.update(state=DeliveryState.GIVEN_UP, last_error="answered 500")
    return wait(rotation, clock, verifier, 3)


def plan_of_a_newer_release(clock: Clock, verifier: UsageLog) -> Rotation:
    return advance(damage(begun(clock), {"skip_weekends": True}), clock)


CAUSES: dict[str, tuple[Callable[[Clock, UsageLog], Rotation], set[Remedy]]] = {
    "The deadline has passed": (late, {Remedy.EXTEND, Remedy.ROLL_BACK}),
    "The webhook message about the replacement was not accepted": (
        message_not_accepted,
        {Remedy.ACCOUNT, Remedy.RESUME, Remedy.ROLL_BACK},
    ),
    "The replacement was suspended": (replacement_suspended, {Remedy.REPLACEMENT, Remedy.RESUME, Remedy.ROLL_BACK}),
    "The old key was suspended": (predecessor_suspended, {Remedy.PREDECESSOR, Remedy.RESUME, Remedy.ROLL_BACK}),
    "The quarantine was lifted by hand": (quarantine_lifted, {Remedy.PREDECESSOR, Remedy.RESUME, Remedy.ROLL_BACK}),
    "A step kept failing": (step_failing, {Remedy.RESUME, Remedy.ABORT}),
    "The secret backend denies access": (backend_refuses, {Remedy.RESUME, Remedy.ABORT}),
    "The secret backend holds an unknown version": (foreign_writer, {Remedy.RESUME, Remedy.ABORT}),
    "This release cannot read the plan": (plan_of_a_newer_release, {Remedy.RESUME, Remedy.ABORT}),
    "The window has no further opening": (window_closed, {Remedy.ABORT, Remedy.REQUEST_AGAIN}),
}
"""For each runbook entry: how a rotation gets there, and what its page then offers."""


def remedy_of(page: str) -> str:
    """Return the banner, which says what happened and has the actions, and the steps of the runbook."""
    banner = re.search(r'<section class="banner.*?</section>', page, re.DOTALL)
    steps = re.search(r"<h2>What to do: .*?</section>", page, re.DOTALL)
    assert banner is not None
    assert steps is not None
    return html.unescape(banner[0] + steps[0])


def test_stall_of_every_kind_in_the_runbook_is_tested() -> None:
    assert set(CAUSES) == {entry.title for entry in STALLS}


@pytest.mark.parametrize("title", CAUSES)
def test_stall_is_two_clicks_from_its_remedy(title: str, clock: Clock, verifier: UsageLog) -> None:
    """The overview leads to the rotation, whose page shows the remedy with working links."""
    make, expected = CAUSES[title]
    rotation = make(clock, verifier)
    assert rotation.state == S.STALLED
    client = browser(scene.tam())
    page = address("rotation_rotation_change", rotation.pk)
    front = text_of(client.get("/admin/"))
    assert "Stalled rotations" in front
    assert f'href="{page}"' in front
    advice_text = remedy_of(text_of(client.get(page)))
    entry = next(entry for entry in STALLS if entry.title == title)
    assert entry.title.lower() in advice_text.lower()
    case = Case(Delivery.SECRET_BACKEND, KeyKind.PRIVATE, has_old_key=True, has_endpoint=False)
    advice = fit_advice(entry, case)
    assert all(step in advice_text for step in (advice.happened, *advice.steps))
    links = dict(re.findall(r'<a class="button" href="([^"]*)">([^<]*)</a>', advice_text))
    assert set(links.values()) == {REMEDY_LABELS[remedy] for remedy in expected}
    for url in links:
        assert client.get(url).status_code == 200, url


def test_stall_for_an_unforeseen_reason_offers_the_general_remedies(clock: Clock, verifier: UsageLog) -> None:
    rotation = late(clock, verifier)
    with mock.patch("rotation.domain.runbook.STALLS", ()):
        advice_text = remedy_of(text_of(browser(scene.tam()).get(address("rotation_rotation_change", rotation.pk))))
    assert "It stalled".lower() in advice_text.lower()
    assert REMEDY_LABELS[Remedy.EXTEND] in advice_text


def test_stall_shown_to_an_auditor_offers_no_action(clock: Clock, verifier: UsageLog) -> None:
    """Every role may read the remedy; only permitted actions are links."""
    rotation = replacement_suspended(clock, verifier)
    auditor = the_operator("auditor", Role.AUDITOR)
    advice_text = remedy_of(text_of(browser(auditor).get(address("rotation_rotation_change", rotation.pk))))
    assert REMEDY_LABELS[Remedy.REPLACEMENT] in advice_text
    assert address("rotation_rotation_resume", rotation.pk) not in advice_text


def test_rotation_with_a_refusing_webhook_endpoint_links_the_account(clock: Clock, verifier: UsageLog) -> None:
    place = scene.account()
    add_endpoint(authorize(scene.tam(), P.WEBHOOKS_WRITE, place, now=clock()), place, "https://acme.example/")
    rotation = advance(begun(clock, channels=tuple(DeliveryChannel)), clock)
    assert rotation.state == S.PUBLISHING
    text = text_of(browser(scene.tam()).get(address("rotation_rotation_change", rotation.pk)))
    advice_text = remedy_of(text)
    assert address("rotation_rotation_change", rotation.pk) in text_of(browser(scene.tam()).get("/admin/"))
    assert "webhook endpoint does not accept the message" in advice_text
    assert address("keyvault_account_change", place.pk) in advice_text
    assert address("rotation_rotation_roll-back", rotation.pk) in advice_text
    assert "Notified: the merchant&#x27;s webhook endpoint accepted the notification" in text


def test_rotation_during_a_backend_outage_shows_the_last_error(clock: Clock, verifier: UsageLog) -> None:
    rotation = begun(clock)
    page = address("rotation_rotation_change", rotation.pk)
    client = browser(scene.tam())
    assert "What to do" not in text_of(client.get(page))
    assert page not in text_of(client.get("/admin/"))
    with mock.patch.object(LocalKeystore, "put", scene.unavailable):
        rotation = advance(rotation, clock)
    assert rotation.state == S.PUBLISHING
    assert "Rotations blocked by a failing step" in text_of(client.get("/admin/")).split("No items:")[0]
    assert page in text_of(client.get(f"{address('rotation_rotation_changelist')}?held=up"))
    text = text_of(client.get(page))
    assert "a step that needs the secret backend fails" in remedy_of(text)
    assert "The backend is sealed." in text


@pytest.mark.parametrize(
    ("delivery", "place"),
    [
        (Delivery.SECRET_BACKEND, "The replacement waits in the secret backend"),
        (Delivery.SHOW_ONCE, "The replacement is shown once, in the console"),
    ],
)
def test_rotation_waiting_for_the_merchant_names_the_place_of_the_replacement(
    delivery: Delivery, place: str, clock: Clock, verifier: UsageLog
) -> None:
    """A merchant is not sent to a secret backend that it does not read. Reminders need a webhook endpoint."""
    is_shown, account = delivery is Delivery.SHOW_ONCE, scene.account()
    key, _ = scene.issue(account, clock(), delivery=delivery)
    if is_shown:
        add_endpoint(authorize(scene.tam(), P.WEBHOOKS_WRITE, account, now=clock()), account, "https://acme.example/")
    rotation = advance(scene.rotate(key.credential, clock()), clock)
    assert rotation.state == S.AWAITING_PROOF
    advice_text = remedy_of(text_of(browser(scene.tam()).get(address("rotation_rotation_change", rotation.pk))))
    assert place in advice_text
    assert ("secret backend" in advice_text) == (not is_shown)
    assert ("Collected in the console" in advice_text) == is_shown
    assert ("reminds them at 25" in advice_text, "no enabled webhook endpoint" in advice_text) == (
        is_shown,
        not is_shown,
    )
    assert (REMEDY_LABELS[Remedy.COLLECT] in advice_text) == is_shown


def test_runbook_names_existing_actions() -> None:
    acts = {act.name: act.label for act in ROW_ACTIONS}
    pages = {Remedy.PREDECESSOR, Remedy.REPLACEMENT, Remedy.ACCOUNT, Remedy.REQUEST_AGAIN}
    assert {remedy.value: REMEDY_LABELS[remedy] for remedy in set(Remedy) - pages} == acts


def test_front_page_shows_alarms_first(clock: Clock, verifier: UsageLog) -> None:
    late(clock, verifier)
    response = browser(scene.tam()).get("/admin/")
    waiting: list[AttentionItem] = response.context["attention_items"]
    tones = [item.tone == "alarm" for item in waiting]
    assert tones == sorted(tones, reverse=True)
    assert True in tones
