"""Emergencies in the console: two clicks from a leak to its revocation and replacement."""

import html
import re
from datetime import timedelta

import pytest

from keyvault.domain.keys import KeyState
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Key
from keyvault.services.keys.lifecycle import get_key
from rotation.domain.events import RotationState as S
from rotation.models import Rotation
from tests.admin.conftest import desk
from tests.admin.desk import Desk, address, browser, text_of
from tests.factories import issue, now
from tests.rotation.services.rotations.test_emergency_races import revoke

__all__ = ["desk"]

pytestmark = pytest.mark.django_db

ON = {"replace": "on"}


def fresh(key: Key) -> Key:
    found = get_key(key.pk)
    assert found is not None
    return found


def test_key_reported_in_the_console_gets_a_replacement_with_one_click(desk: Desk) -> None:
    """The key's page offers a button with a prefilled form; one responder suffices, in production too."""
    key, _ = issue(desk.production)
    client, page = browser(desk.responder), address("keyvault_key_report-compromise", key.pk)
    assert page in text_of(client.get(address("keyvault_key_change", key.pk)))
    form = text_of(client.get(page))
    assert "only active key" in form
    assert "checked" in form
    shown = text_of(client.post(page, {"reason": "in a gist", **ON}, follow=True))
    rotation = Rotation.objects.get()
    assert f"The replacement comes with rotation {rotation}." in shown
    assert (fresh(key).state, rotation.state) == (KeyState.COMPROMISED, S.EMERGENCY)


def test_key_reported_without_replacement_is_only_revoked(desk: Desk) -> None:
    """Revoking a key requires no field."""
    key, _ = issue(desk.production)
    answer = browser(desk.responder).post(address("keyvault_key_report-compromise", key.pk))
    assert answer.status_code == 302
    assert fresh(key).state == KeyState.COMPROMISED
    assert not Rotation.objects.exists()


def test_credential_reported_revokes_all_keys_and_requests_one_replacement(desk: Desk) -> None:
    key, _ = issue(desk.sandbox)
    client, page = browser(desk.responder), address("keyvault_credential_compromised", key.credential_id)
    assert page in text_of(client.get(address("keyvault_credential_change", key.credential_id)))
    shown = text_of(client.post(page, ON, follow=True))
    assert "1 key is revoked and permanently refused." in shown
    assert fresh(key).state == KeyState.COMPROMISED
    assert Rotation.objects.get().state == S.EMERGENCY
    assert client.post(page, ON).status_code == 400, "there is nothing left to revoke"


def test_credential_without_a_usable_key_is_reissued_in_two_clicks(desk: Desk) -> None:
    """The page offers it, the form asks for a reason, and the rotation awaits approval."""
    key, _ = issue(desk.production)
    client, page = browser(desk.tam), address("keyvault_credential_reissue", key.credential_id)
    credential_page = address("keyvault_credential_change", key.credential_id)
    assert page not in text_of(client.get(credential_page)), "it has a good key"
    assert client.post(page, {"reason": "x"}).status_code == 409
    revoke(desk.responder, key)
    assert page in text_of(client.get(credential_page))
    assert client.post(page, {"reason": ""}).status_code == 400
    shown = text_of(client.post(page, {"reason": "the last one\nleaked"}, follow=True))
    rotation = Rotation.objects.get()
    assert f"Requested rotation {rotation}" in shown
    assert (rotation.state, rotation.approvals_needed, rotation.approved_plan.reason) == (
        S.EMERGENCY,
        1,
        "the last one leaked",
    )
    assert page not in shown, "a rotation is already open"


def ended(desk: Desk, how: str) -> Rotation:
    """Return a reissue, awaiting approval, of a credential whose only key ended that way."""
    is_expired = how == "expired"
    key, _ = issue(desk.production, at=now() - timedelta(days=40), expires_in_days=30 if is_expired else None)
    if how == "compromised":
        browser(desk.responder).post(address("keyvault_key_report-compromise", key.pk))
    elif how == "revoked":
        revoke(desk.responder, key)
    browser(desk.tam).post(address("keyvault_credential_reissue", key.credential_id), {"reason": "it leaked"})
    return Rotation.objects.get(credential_id=key.credential_id)


UNTRUE_OF_A_DEAD_KEY = (
    "both keys stay",
    "both keys verify",
    "old key stays",
    "the key stays unchanged",
    "shop",
)


@pytest.mark.parametrize("how", ["compromised", "revoked", "expired"])
def test_emergency_plan_is_true_for_a_dead_key(desk: Desk, how: str) -> None:
    """The approval page describes what will happen: nothing waits for the silence of a dead key."""
    rotation = ended(desk, how)
    assert rotation.state == S.EMERGENCY
    client = browser(desk.approver)
    page = text_of(client.get(address("rotation_rotation_change", rotation.pk)))
    timeline = page.split('<ol class="stepper">')[1].split("</ol>")[0]
    for state in ("overlap", "quarantine", "revoking"):
        assert state not in timeline
    for url in (
        address("rotation_rotation_change", rotation.pk),
        address("rotation_rotation_approve", rotation.pk),
        address("rotation_rotation_reject", rotation.pk),
    ):
        shown = text_of(client.get(url))
        for label in (
            *(
                "Deadline",
                "When the deadline passes",
                "Proof",
                "Authentications",
                "Sources",
                "Soak time",
                "Quiet period",
                "Quarantine",
            ),
            *("Old key unused at request", "Old key used in quarantine"),
        ):
            row = fact(shown, label)
            assert row.endswith("no effect: the old key has ended"), (url, label, row)
        for phrase in UNTRUE_OF_A_DEAD_KEY:
            assert phrase not in without_plan(shown).lower(), (url, phrase)


def test_emergency_plan_shows_every_field_of_the_digest(desk: Desk) -> None:
    rotation = ended(desk, "revoked")
    shown = text_of(browser(desk.approver).get(address("rotation_rotation_approve", rotation.pk)))
    assert "stall: both keys stay" in fact(shown, "When the deadline passes")
    assert rotation.plan_digest in shown


def test_emergency_aborted_shows_the_state_of_the_credential(desk: Desk) -> None:
    rotation = ended(desk, "compromised")
    client, url = browser(desk.tam), address("rotation_rotation_abort", rotation.pk)
    page = text_of(client.get(url))
    assert "The credential has no usable key." in page
    assert "The old key stays unchanged" not in page
    form = {"version": rotation.version, "why": "not needed"}
    shown = text_of(client.post(url, form, follow=True))
    assert "Rotation aborted. The credential has no usable key." in shown


def fact(shown: str, label: str) -> str:
    """Return the value that the page shows beside the label."""
    found = re.search(rf"<dt>{re.escape(label)}</dt>\s*<dd>(.*?)</dd>", shown, re.DOTALL)
    assert found is not None, label
    return re.sub(r"<[^>]*>", "", html.unescape(found[1])).strip()


def without_plan(shown: str) -> str:
    """Return the page without the plan's rows, each of which is marked as without effect."""
    return re.sub(r"<dd>[^<]*(<[^>]*>[^<]*)*?no effect: the old key has ended\s*</dd>", "", shown)


def test_key_revoked_page_says_what_happens(desk: Desk) -> None:
    """The page names the affected merchant, the immediate effect, and a gentler alternative."""
    key, _ = issue(desk.sandbox)
    form = text_of(browser(desk.responder).get(address("keyvault_key_revoke", key.pk)))
    for phrase in ("immediately and permanently", "cannot be undone", "The key was never used.", "Rotate it instead"):
        assert phrase in form
    assert "acme/production" not in form
    assert RevocationReason.SUPERSEDED in form
