"""Emergencies in the console: two clicks from what leaked to its end, and to the replacement."""

import pytest

from keyvault.domain.keys import KeyState
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Key
from keyvault.services.keys import get_key
from rotation.events import RotationState as S
from rotation.models import Rotation
from tests.admin.conftest import desk
from tests.admin.desk import Desk, address, browser, text_of
from tests.factories import PRODUCTION, issue

from .test_emergency_races import revoke

__all__ = ["desk"]

pytestmark = [pytest.mark.database, pytest.mark.django_db]

ON = {"replace": "on"}


def fresh(key: Key) -> Key:
    found = get_key(key.pk)
    assert found is not None
    return found


def test_key_reported_in_the_console_gets_a_replacement_in_the_same_click(desk: Desk) -> None:
    """From the key's page: the button, and the form that is filled in already; one responder, in production."""
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


def test_key_reported_without_the_wish_is_revoked_and_nothing_more(desk: Desk) -> None:
    """What stops a key needs no field to be filled in."""
    key, _ = issue(desk.production)
    answer = browser(desk.responder).post(address("keyvault_key_report-compromise", key.pk))
    assert answer.status_code == 302
    assert fresh(key).state == KeyState.COMPROMISED
    assert not Rotation.objects.exists()


def test_credential_reported_ends_all_its_keys_and_asks_once(desk: Desk) -> None:
    key, _ = issue(desk.sandbox)
    client, page = browser(desk.responder), address("keyvault_credential_compromised", key.credential_id)
    assert page in text_of(client.get(address("keyvault_credential_change", key.credential_id)))
    shown = text_of(client.post(page, ON, follow=True))
    assert "1 key is revoked: refused for ever." in shown
    assert fresh(key).state == KeyState.COMPROMISED
    assert Rotation.objects.get().state == S.EMERGENCY
    assert client.post(page, ON).status_code == 400, "there is nothing left to end"


def test_leaked_keys_pasted_end_and_their_strings_are_shown_nowhere(desk: Desk) -> None:
    """Whole keys may be pasted as they were found: neither the answer nor a later page has them."""
    made = [issue(desk.sandbox), issue(desk.production)]
    client, page = browser(desk.responder), address("keyvault_key_leak")
    assert page in text_of(client.get("/admin/"))
    pasted = "\r\n".join([made[0][1].reveal(), made[1][0].key_id, "0" * 16, "nonsense"])
    shown = text_of(client.post(page, {"key_ids": pasted, **ON}, follow=True))
    assert "2 keys are revoked: refused for ever." in shown
    assert f"NOT revoked, 2: {'0' * 16}: There is no such key; no. 4: This is no key id" in shown
    assert made[0][1].reveal() not in shown
    assert {fresh(key).state for key, _ in made} == {KeyState.COMPROMISED}
    assert Rotation.objects.count() == 2


def test_leak_of_too_many_keys_is_refused_in_words(desk: Desk) -> None:
    many = "\n".join(f"{number:016}" for number in range(501))
    answer = browser(desk.responder).post(address("keyvault_key_leak"), {"key_ids": many})
    assert answer.status_code == 400
    assert "1 to 500 of them" in text_of(answer)


def test_leak_of_a_key_can_be_preset_by_the_address(desk: Desk) -> None:
    key, _ = issue(desk.sandbox)
    form = browser(desk.responder).get(f"{address('keyvault_key_leak')}?key={key.key_id}")
    assert key.key_id in text_of(form)


def test_credential_without_a_usable_key_is_reissued_in_two_clicks(desk: Desk) -> None:
    """Its page offers it, the form asks why, and the rotation waits for its approval."""
    key, _ = issue(desk.production)
    client, page = browser(desk.tam), address("keyvault_credential_reissue", key.credential_id)
    credential_page = address("keyvault_credential_change", key.credential_id)
    assert page not in text_of(client.get(credential_page)), "it has a key that is good"
    assert client.post(page, {"reason": "x"}).status_code == 409
    revoke(desk.responder, key)
    assert page in text_of(client.get(credential_page))
    assert client.post(page, {"reason": ""}).status_code == 400
    shown = text_of(client.post(page, {"reason": "the last one\nleaked"}, follow=True))
    rotation = Rotation.objects.get()
    assert f"Rotation {rotation} is asked for" in shown
    assert (rotation.state, rotation.approvals_needed, rotation.approved_plan.reason) == (
        S.EMERGENCY,
        1,
        "the last one leaked",
    )
    assert page not in shown, "one is open already"


def test_credential_reissue_is_not_offered_to_who_may_not_ask(desk: Desk) -> None:
    key, _ = issue(desk.sandbox)
    revoke(desk.responder, key)
    page = address("keyvault_credential_reissue", key.credential_id)
    for operator in (desk.auditor, desk.approver):
        client = browser(operator)
        assert page not in text_of(client.get(address("keyvault_credential_change", key.credential_id)))
        assert client.post(page, {"reason": "x"}).status_code == 403


def test_key_revoked_page_says_what_happens(desk: Desk) -> None:
    """Before the button: whom it hits, that nothing holds it up, and what would be gentler."""
    key, _ = issue(desk.sandbox)
    form = text_of(browser(desk.responder).get(address("keyvault_key_revoke", key.pk)))
    for words in ("refused at once and for ever", "no way back", "It was never used.", "Rotate it instead"):
        assert words in form
    assert PRODUCTION not in form
    assert RevocationReason.SUPERSEDED in form
