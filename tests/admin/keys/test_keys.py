"""Keys in the console: suspended, resumed, revoked with a reason, reported; shown only if public."""

import json
import re
from unittest import mock

import pytest
from django.db import DatabaseError

from keyvault.access.permissions import Permission as P
from keyvault.domain.keys import KeyKind, KeyState
from keyvault.models import AuditEntry, Confirmation, Key, Verifier
from keyvault.services.keys.lifecycle import get_key, last_sequence, suspend_key
from keyvault.services.keys.records import find_key_record
from keyvault.services.recording import transaction
from tests.admin.desk import Desk, address, browser, hidden, text_of
from tests.factories import grant, issue, now
from tests.verifiers import confirm, fall_silent, make_verifier


def fresh(key: Key) -> Key:
    found = get_key(key.pk)
    assert found is not None
    return found


def last_entry() -> AuditEntry:
    return AuditEntry.objects.latest("id")


@pytest.mark.database
def test_key_revoked_with_a_reason_never_verifies_again(desk: Desk) -> None:
    """The reason is kept, the action is audited under the operator's name, and the verdict changes."""
    key, _ = issue(desk.production)
    client = browser(desk.responder)
    form = client.get(address("keyvault_key_revoke", key.pk))
    assert form.status_code == 200
    assert "only active key" in text_of(form)
    answer = client.post(address("keyvault_key_revoke", key.pk), {"reason": "superseded"}, follow=True)
    assert "is revoked" in text_of(answer)
    assert (fresh(key).state, fresh(key).reason) == (KeyState.DEACTIVATED, "superseded")
    record = find_key_record(key.pk)
    assert record is not None
    assert not record.may_verify(now())
    assert (last_entry().event, last_entry().actor) == ("key.revoked", "operator:responder")
    assert b'"channel":"console"' in bytes(last_entry().body)


@pytest.mark.parametrize("reason", ["", "because", "certificate_hold"])
def test_key_revoked_without_a_standard_reason_stays_good(desk: Desk, reason: str) -> None:
    key, _ = issue(desk.sandbox)
    answer = browser(desk.responder).post(address("keyvault_key_revoke", key.pk), {"reason": reason})
    assert answer.status_code == 400
    assert fresh(key).state == KeyState.ACTIVE


def test_key_revoked_for_compromise_is_compromised(desk: Desk) -> None:
    key, _ = issue(desk.sandbox)
    browser(desk.responder).post(address("keyvault_key_revoke", key.pk), {"reason": "key_compromise"})
    assert fresh(key).state == KeyState.COMPROMISED


def test_key_reported_compromised_by_one_person_is_refused_immediately(desk: Desk) -> None:
    """Revoking takes one person and no current page."""
    key, _ = issue(desk.production)
    answer = browser(desk.responder).post(address("keyvault_key_report-compromise", key.pk))
    assert answer.status_code == 302
    assert fresh(key).state == KeyState.COMPROMISED


def test_key_is_not_changed_by_get(desk: Desk) -> None:
    """Only a POST changes anything, so a link that someone sends changes nothing."""
    key, _ = issue(desk.sandbox)
    client = browser(desk.admin)
    for act in ("suspend", "revoke", "report-compromise"):
        assert client.get(address(f"keyvault_key_{act}", key.pk)).status_code == 200
    assert fresh(key).state == KeyState.ACTIVE


def test_key_suspended_and_resumed_verifies_again(desk: Desk) -> None:
    key, _ = issue(desk.sandbox)
    client = browser(desk.admin)
    client.post(address("keyvault_key_suspend", key.pk))
    assert fresh(key).state == KeyState.SUSPENDED
    page = client.get(address("keyvault_key_resume", key.pk))
    client.post(address("keyvault_key_resume", key.pk), {"version": hidden(page, "version")})
    assert fresh(key).state == KeyState.ACTIVE


def test_key_resumed_from_an_outdated_page_is_a_conflict(desk: Desk) -> None:
    """Resuming is bound to the version shown: a page from before a second suspension is refused."""
    key, _ = issue(desk.sandbox)
    client = browser(desk.admin)
    client.post(address("keyvault_key_suspend", key.pk))
    seen = hidden(client.get(address("keyvault_key_resume", key.pk)), "version")
    client.post(address("keyvault_key_resume", key.pk), {"version": seen})
    suspend_key(grant(desk.responder, P.KEYS_SUSPEND, desk.sandbox), fresh(key))
    answer = client.post(address("keyvault_key_resume", key.pk), {"version": seen})
    assert answer.status_code == 409
    assert "changed by another operator" in text_of(answer)
    assert fresh(key).state == KeyState.SUSPENDED


def test_key_suspended_twice_is_a_conflict_and_no_fault(desk: Desk) -> None:
    key, _ = issue(desk.sandbox)
    client = browser(desk.responder)
    client.post(address("keyvault_key_suspend", key.pk))
    answer = client.post(address("keyvault_key_suspend", key.pk))
    assert answer.status_code == 409
    assert "cannot become suspended" in text_of(answer)


def test_key_that_is_private_is_never_shown(desk: Desk) -> None:
    """No role can read a private key's string in the console, even while the backend holds it."""
    key, text = issue(desk.sandbox)
    for operator in (desk.admin, desk.tam, desk.approver, desk.auditor, desk.responder):
        answer = browser(operator).get(address("keyvault_key_show", key.pk))
        assert answer.status_code == 409
        assert text.reveal() not in text_of(answer)


def test_key_that_is_public_is_shown_repeatedly(desk: Desk) -> None:
    key, text = issue(desk.sandbox, kind=KeyKind.PUBLIC)
    client = browser(desk.tam)
    for _ in range(2):
        answer = client.get(address("keyvault_key_show", key.pk))
        assert text.reveal() in text_of(answer)
        assert "no-store" in answer["Cache-Control"]
    assert text.reveal() not in text_of(client.get(address("keyvault_key_change", key.pk)))
    shown = AuditEntry.objects.filter(event="key.shown")
    assert [(entry.actor, json.loads(bytes(entry.body))["details"]["key_id"]) for entry in shown] == [
        ("operator:tam", key.key_id)
    ] * 2


def test_key_is_not_shown_without_an_audit_entry(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guarantee: the entry is committed before the page is; without it the operator does not see the string."""
    key, text = issue(desk.sandbox, kind=KeyKind.PUBLIC)
    client = browser(desk.tam)
    client.raise_request_exception = False
    monkeypatch.setattr(transaction, "append_entries", mock.Mock(side_effect=DatabaseError("disk full")))
    answer = client.get(address("keyvault_key_show", key.pk))
    assert answer.status_code >= 500
    assert text.reveal() not in text_of(answer)


def test_key_pages_show_no_digest(desk: Desk) -> None:
    """No page of a key shows its digest."""
    key, _ = issue(desk.sandbox)
    client = browser(desk.admin)
    for page in (address("keyvault_key_change", key.pk), address("keyvault_credential_change", key.credential_id)):
        assert bytes(key.digest).hex() not in text_of(client.get(page))


def test_key_page_offers_the_actions_of_the_role(desk: Desk) -> None:
    key, _ = issue(desk.sandbox)
    page = address("keyvault_key_change", key.pk)
    revoke = address("keyvault_key_revoke", key.pk)
    assert revoke in text_of(browser(desk.responder).get(page))
    assert revoke not in text_of(browser(desk.tam).get(page))


@pytest.mark.database
def test_key_search_finds_it_by_its_id(desk: Desk) -> None:
    key, _ = issue(desk.sandbox)
    other, _ = issue(desk.sandbox, label="other")
    text = text_of(browser(desk.tam).get("/admin/keyvault/key/", {"q": key.pk}))
    assert key.pk in text
    assert other.pk not in text


# --- receipts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", ["revoke", "report-compromise"])
def test_key_revoked_shows_its_receipt_which_refreshes_until_complete(desk: Desk, act: str) -> None:
    """The receipt lists confirmed, pending and expired verifiers by name, and stops refreshing once complete."""
    first, _, third = (make_verifier(f"verifier-{number}") for number in (1, 2, 3))
    fall_silent(third)
    key, _ = issue(desk.sandbox)
    client = browser(desk.responder)
    answer = client.post(address(f"keyvault_key_{act}", key.pk), {"reason": "superseded"}, follow=True)
    sequence = last_sequence(fresh(key))
    page = address("keyvault_key_receipt", key.pk, sequence)
    assert answer.redirect_chain == [(page, 302)]
    assert "permanently refused" in text_of(answer)
    confirm(first, sequence)
    text = text_of(client.get(page))
    assert 'http-equiv="refresh"' in text
    assert "1 of 2 verifiers" in text
    states = re.findall(r"<code>(verifier-\d)</code>.*?badge-(\w+)", text, re.DOTALL)
    assert states == [("verifier-1", "confirmed"), ("verifier-2", "waiting"), ("verifier-3", "expired")]
    for verifier in Verifier.objects.exclude(pk="verifier-1"):
        confirm(verifier, sequence)
    text = text_of(client.get(page))
    assert 'http-equiv="refresh"' not in text
    assert "3 of 3 verifiers" in text
    assert "no longer kept" not in text
    Confirmation.objects.filter(verifier=first).delete()
    text = text_of(client.get(page))
    assert (text.count("no longer kept"), "not yet" in text) == (1, False)


def test_key_page_links_the_receipt_of_its_revocation(desk: Desk) -> None:
    key, _ = issue(desk.sandbox)
    client = browser(desk.responder)
    page = address("keyvault_key_change", key.pk)
    assert "/receipt/" not in text_of(client.get(page))
    client.post(address("keyvault_key_revoke", key.pk), {"reason": "superseded"})
    assert "no live verifiers" in text_of(client.get(page))
    make_verifier()
    text = text_of(client.get(page))
    assert address("keyvault_key_receipt", key.pk, last_sequence(fresh(key))) in text
    assert "0 of 1 verifiers" in text


def test_key_receipt_of_another_keys_change_is_not_found(desk: Desk) -> None:
    """Another key's change is not shown under this key."""
    key, _ = issue(desk.sandbox)
    other, _ = issue(desk.sandbox, label="other")
    client = browser(desk.responder)
    assert client.get(address("keyvault_key_receipt", key.pk, last_sequence(key))).status_code == 200
    for number in (0, last_sequence(other), 2**40, 2**63, 10**30):
        assert client.get(address("keyvault_key_receipt", key.pk, number)).status_code == 404
    assert client.get(address("keyvault_key_receipt", "0" * 16, last_sequence(key))).status_code == 404
