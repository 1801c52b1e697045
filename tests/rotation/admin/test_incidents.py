"""The leak desk: pasted text is read for ids only, and keys are revoked after a preview."""

import logging
from typing import Any
from unittest import mock

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from keyvault.access.roles import Role
from keyvault.access.scopes import AccessScope
from keyvault.admin.framework import step_up
from keyvault.domain.keys import KeyState
from keyvault.models import AuditEntry, Key
from keyvault.services.keys.lifecycle import get_key, report_compromise
from rotation.admin import incidents
from rotation.models import Rotation
from tests.admin.conftest import desk
from tests.admin.desk import Desk, address, browser, dump, hidden, text_of, with_password
from tests.factories import issue, make_merchant, make_operator, make_token

__all__ = ["desk"]

pytestmark = pytest.mark.django_db


def state_of(key: Key) -> str:
    found = get_key(key.pk)
    assert found is not None
    return str(found.state)


def paste(client: Client, text: str) -> Any:
    return client.post(address("incidents"), {"secret_text": text})


def confirm(client: Client, preview: Any, **fields: str) -> Any:
    return client.post(address("incidents"), {"key_ids": hidden(preview, "key_ids"), **fields}, follow=True)


def test_leak_desk_previews_log_lines_and_revokes_after_confirmation(desk: Desk) -> None:
    """Guarantee: pasting revokes nothing; confirming revokes each key with an audit entry of its own."""
    (first, text), (second, _) = issue(desk.sandbox), issue(desk.production)
    client = browser(desk.responder)
    pasted = f'GET / key="{text.reveal()}"\r\nkey_id={second.key_id} status=200\r\nnothing here\r\n{"0" * 16}'
    preview = paste(client, pasted)
    shown = text_of(preview)
    assert "2 keys to revoke" in shown
    assert "whole private key" in shown
    assert "No key has this id" in shown
    assert {state_of(first), state_of(second)} == {KeyState.ACTIVE}
    receipt = text_of(confirm(client, preview, reason="in a gist", replace="on"))
    assert "2 keys revoked." in receipt
    assert {state_of(first), state_of(second)} == {KeyState.COMPROMISED}
    assert AuditEntry.objects.filter(event="key.compromised").count() == 2
    assert Rotation.objects.count() == 2
    for rotation in Rotation.objects.all():
        assert address("rotation_rotation_change", rotation.pk) in receipt


def test_leak_desk_keeps_no_part_of_a_secret(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """Guarantee: no page, row, session, cookie or log contains a part of a pasted secret, also after a failure."""
    caplog.set_level(logging.DEBUG)
    key, text = issue(desk.sandbox)
    secret, client = text.reveal()[-49:], browser(desk.responder)
    for pasted in (
        text.reveal(),
        text.reveal()[:-3],
        text.reveal().replace("_", "%5F"),
        secret,
        text.reveal() + "x" * 500_000,
    ):
        preview = paste(client, pasted)
        assert secret[:12] not in text_of(preview)
    receipt = confirm(client, paste(client, text.reveal()))
    assert secret[:12] not in text_of(receipt)
    assert state_of(key) == KeyState.COMPROMISED
    with mock.patch.object(incidents, "_find_keys", side_effect=RuntimeError("broken")):
        failed = paste(client, text.reveal())
    assert failed.status_code == 500
    assert secret[:12] not in text_of(failed)
    assert secret[:12] not in dump()
    assert secret[:12] not in caplog.text
    assert secret[:12] not in str(client.cookies) + str(dict(client.session))


def test_leak_desk_after_the_session_ended_keeps_nothing_of_the_text(desk: Desk) -> None:
    _, text = issue(desk.sandbox)
    answer = Client().post(
        address("incidents"), {"secret_text": f"a {text.reveal()[-49:]}"}, headers={"origin": "http://testserver"}
    )
    assert text.reveal()[-49:] not in text_of(answer)


def test_leak_desk_above_twenty_keys_requires_their_number(desk: Desk) -> None:
    made = [issue(desk.sandbox, label=f"key {number}")[0] for number in range(21)]
    client = browser(desk.responder)
    preview = paste(client, "\n".join(key.key_id for key in made))
    for wrong in ("", "20", "x"):
        answer = confirm(client, preview, count=wrong)
        assert answer.status_code == 400
        assert "Nothing was revoked." in text_of(answer)
    assert {state_of(key) for key in made} == {KeyState.ACTIVE}
    assert "21 keys revoked." in text_of(confirm(client, preview, count="21"))
    assert {state_of(key) for key in made} == {KeyState.COMPROMISED}


def test_leak_desk_requires_a_recent_second_factor(desk: Desk) -> None:
    """Guarantee: without a second factor of the last five minutes, nothing is revoked and the preview stays."""
    key, _ = issue(desk.sandbox)
    client = browser(desk.responder)
    preview = paste(client, key.key_id)
    with mock.patch.object(step_up, "is_step_up_due", return_value=True):
        answer = confirm(client, preview)
    assert answer.status_code == 403
    assert "Confirm with your second factor" in text_of(answer)
    assert hidden(answer, "key_ids") == key.key_id
    assert state_of(key) == KeyState.ACTIVE
    assert paste(with_password(desk.responder), key.key_id).status_code == 302


def test_leak_desk_of_another_merchants_key_knows_no_such_key(desk: Desk) -> None:
    """Guarantee: a key outside the scope is unknown in the preview, and a forged confirmation does not revoke it."""
    key, _ = issue(desk.sandbox)
    make_merchant("globex")
    limited = make_operator("limited", Role.INCIDENT_RESPONDER, scope=AccessScope(frozenset({"globex"})))
    client = browser(limited)
    shown = text_of(paste(client, key.key_id))
    assert "No key has this id in your scope" in shown
    assert "acme" not in shown
    forged = client.post(address("incidents"), {"key_ids": key.key_id}, follow=True)
    assert "No key was revoked." in text_of(forged)
    assert "acme" not in text_of(forged)
    assert state_of(key) == KeyState.ACTIVE


@pytest.mark.parametrize("ids", ["", "nonsense", " ".join(f"{number:016}" for number in range(501)), "\x00"])
def test_leak_desk_refuses_a_forged_preview(desk: Desk, ids: str) -> None:
    answer = browser(desk.responder).post(address("incidents"), {"key_ids": ids})
    assert answer.status_code == 400
    assert "Paste the text again" in text_of(answer)


@pytest.mark.parametrize("text", ["", "no key here", "responsibilities of a team", "x" * 500_001])
def test_leak_desk_without_a_key_in_the_text_says_so(desk: Desk, text: str) -> None:
    assert paste(browser(desk.responder), text).status_code == 400


def test_leak_desk_names_a_service_token_and_does_not_revoke_it(desk: Desk) -> None:
    """Its bare id occurs first: the token must not be taken for a word of the log line."""
    token, text = make_token()
    shown = text_of(paste(browser(desk.responder), f"id={token.pk} x\n{text.reveal()}"))
    assert "whole service token" in shown
    assert "Revoke it under Service tokens." in shown
    assert "No key to revoke" in shown


def test_leak_desk_lists_a_compromised_key_as_done(desk: Desk) -> None:
    key, _ = issue(desk.sandbox)
    client = browser(desk.responder)
    confirm(client, paste(client, key.key_id))
    shown = text_of(paste(client, key.key_id))
    assert "Already compromised, and refused." in shown
    assert "No key to revoke" in shown


def test_leak_desk_failure_of_one_key_does_not_affect_the_others(desk: Desk) -> None:
    (first, _), (second, _) = issue(desk.sandbox), issue(desk.production)
    client = browser(desk.responder)
    preview = paste(client, f"{first.key_id}\n{second.key_id}")
    confirm(client, paste(client, first.key_id))
    with mock.patch("rotation.services.rotations.emergency.report_compromise", side_effect=report_compromise):
        receipt = text_of(confirm(client, preview))
    assert state_of(second) == KeyState.COMPROMISED
    assert address("keyvault_key_change", second.pk) in receipt


def test_leak_desk_receipt_without_a_report_says_where_it_appears(desk: Desk) -> None:
    shown = text_of(browser(desk.responder).get(address("incident_receipt")))
    assert "The receipt of your last report appears here." in shown


def test_leak_desk_receipt_reads_no_row_per_key(desk: Desk) -> None:
    """Guarantee: the queries of the preview and of the receipt do not grow with the number of keys."""
    made = [issue(desk.sandbox, label=f"key {number}")[0] for number in range(15)]
    client = browser(desk.responder)
    client.get(address("incidents"))  # counts what the menu shows, for some seconds
    counts = []
    for keys in (made[:1], made[1:]):
        with CaptureQueriesContext(connection) as of_preview:
            preview = paste(client, "\n".join(key.key_id for key in keys))
        of_page = len(of_preview)  # the next request empties the log
        confirm(client, preview)
        with CaptureQueriesContext(connection) as of_receipt:
            client.get(address("incident_receipt"))
        counts.append((of_page, len(of_receipt)))
    assert counts[0] == counts[1]
