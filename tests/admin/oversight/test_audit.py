"""The audit chains in the console: searchable and read-only."""

import json
import re
from collections import Counter
from html import unescape
from typing import Any
from unittest import mock

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.access.roles import Role
from keyvault.access.scopes import AccessScope
from keyvault.admin.oversight import audit
from keyvault.backends.base import BackendUnavailableError
from keyvault.models import AuditChain, AuditCheckpoint, AuditEntry
from keyvault.services.audit.checkpoints import sign_due
from keyvault.services.audit.signers import LocalSigner
from keyvault.services.keys.lifecycle import suspend_key
from keyvault.services.recording.audit_chain import verify_audit
from tests.admin.desk import Desk, address, browser, text_of
from tests.factories import SANDBOX, grant, issue, make_merchant, make_operator, now
from tests.services.rows import disable_triggers

pytestmark = pytest.mark.database


def found(desk: Desk, **query: str) -> str:
    answer = browser(desk.auditor).get(address("keyvault_auditentry_changelist"), query)
    assert answer.status_code == 200
    return text_of(answer)


def test_audit_search_by_key_id_finds_the_keys_entries(desk: Desk) -> None:
    key, _ = issue(desk.sandbox)
    issue(desk.sandbox, label="another")
    suspend_key(grant(desk.responder, P.KEYS_SUSPEND, desk.sandbox), key)
    text = found(desk, q=key.pk)
    assert "Key suspended by responder" in text
    assert "5 audit entries" in text  # staged, stored, activated, issued, suspended


@pytest.mark.parametrize("term", ["req_", "operator:tam", "per cent %", "'; DROP TABLE", "ä"])
def test_audit_search_accepts_any_text(desk: Desk, term: str) -> None:
    """A search compares text literally: no character has a special meaning."""
    issue(desk.sandbox)
    text = found(desk, q=term)
    assert ("0 audit entries" in text) == (term not in {"req_", "operator:tam"})


def test_audit_search_reads_a_bounded_number_of_entries_and_continues(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost of a search does not grow with the log, and each entry can still be found."""
    for _ in range(3):
        issue(desk.sandbox)
    monkeypatch.setattr(audit, "_MAX_SEARCHED", 4)
    sought, seen = "key.activated", set[str]()
    client, page = browser(desk.auditor), f"?q={sought}"
    for _ in range(AuditEntry.objects.count()):
        text = text_of(client.get(address("keyvault_auditentry_changelist") + page))
        seen.update(re.findall(rf'auditentry/(\d+)/[^\0]*?class="field-event">{sought}<', text))
        older = re.search(r'href="([^"]+)">Search older entries', text)
        if older is None:
            break
        page = unescape(older.group(1))
    assert older is None
    assert seen == {str(pk) for pk in AuditEntry.objects.filter(event=sought).values_list("pk", flat=True)}
    assert len(seen) == 3


def test_audit_list_filters_by_chain_and_event(desk: Desk) -> None:
    make_merchant("globex")
    issue(desk.sandbox)
    text = found(desk, chain="account:acme/sandbox")
    assert "issuance.requested" in text
    assert "merchant.created</a>" in text or "merchant.created" in text
    assert "platform #" not in text
    assert "1 audit entry" in found(desk, event="key.activated")
    assert "0 audit entries" in found(desk, chain="account:nobody/sandbox")


def test_audit_list_filters_by_actor_and_merchant(desk: Desk) -> None:
    """Guarantee: one finds what a person did, and what happened at a merchant, also combined with an event."""
    make_merchant("globex")
    issue(desk.sandbox, by=desk.tam)
    issue(desk.production, by=desk.tam)
    for actor in ("tam", "operator:tam"):
        text = found(desk, actor=actor)
        assert "Key requested by tam" in text
        assert "by worker" not in text
    assert "Key requested by tam" not in found(desk, actor="worker")
    assert "2 audit entries" in found(desk, actor="worker", event="key.activated")
    assert "0 audit entries" in found(desk, actor="tam", event="key.activated")
    assert "2 audit entries" in found(desk, merchant="acme", event="key.activated")
    assert "1 audit entry" in found(desk, merchant="acme", event="key.activated", chain="account:acme/sandbox")
    assert "0 audit entries" in found(desk, merchant="globex", event="key.activated")
    assert 'name="event" value="key.activated"' in found(desk, merchant="acme", event="key.activated")


def test_audit_list_of_an_actors_event_reads_a_bounded_number_of_entries(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: no index has both, so the event is looked for in the actor's newest entries, then in older ones."""
    issue(desk.sandbox)
    monkeypatch.setattr(audit, "_MAX_SEARCHED", 1)
    text = found(desk, actor="worker", event="key.staged")
    assert "0 audit entries" in text
    assert "Search older entries" in text


def test_audit_actors_are_offered_by_the_beginning_of_their_name(desk: Desk) -> None:
    """Guarantee: an auditor of one merchant learns no operators by it."""
    url = address("choices_actors")
    offered = browser(desk.auditor).get(url, {"q": "ta"}).json()["choices"]
    assert offered == [{"value": "operator:tam", "label": "tam", "detail": "operator"}]
    limited = make_operator("limited", Role.AUDITOR, scope=AccessScope(frozenset({"acme"})))
    values = [each["value"] for each in browser(limited).get(url).json()["choices"]]
    assert "system:worker" in values
    assert not any(value.startswith("operator:") for value in values)
    assert browser(desk.tam).get(url).status_code == 403


@pytest.mark.parametrize(
    "query",
    [{"at__gte": "0001-01-01T00:00:00+14:00"}, {"at__lt": "9999-12-31T23:59:59-14:00"}, {"at__gte": "x"}],
    ids=str,
)
def test_audit_list_of_an_impossible_time_is_no_fault(desk: Desk, query: dict[str, str]) -> None:
    answer = browser(desk.auditor).get(address("keyvault_auditentry_changelist"), query, follow=True)
    assert answer.status_code == 200


def test_audit_entry_page_shows_its_details_and_its_place(desk: Desk) -> None:
    key, _ = issue(desk.sandbox)
    entry = AuditEntry.objects.get(event="key.activated")
    text = text_of(browser(desk.auditor).get(address("keyvault_auditentry_change", entry.pk)))
    assert address("keyvault_key_change", key.pk) in text
    assert bytes(entry.hash).hex() in text
    assert "system:worker" in text


def test_audit_pages_leave_the_chains_unchanged(desk: Desk) -> None:
    """Reading writes no entry, and every chain is intact afterwards."""
    issue(desk.production)
    count = AuditEntry.objects.count()
    for operator in (desk.admin, desk.auditor, desk.responder):
        client = browser(operator)
        for page in ("/admin/", "/admin/keyvault/auditentry/", "/admin/keyvault/key/"):
            assert client.get(page).status_code == 200
    assert AuditEntry.objects.count() == count
    assert verify_audit().first_broken is None


def test_audit_page_shows_the_newest_checkpoint_of_each_scope(desk: Desk) -> None:
    issue(desk.sandbox)
    sign_due(now())
    text = found(desk)
    assert "Signed checkpoints" in text
    assert "badge-holds" in text
    assert "The audit log matches its newest signed checkpoints." in text
    assert "<code>local</code> version 1" in text
    assert "badge-pending" in text  # production, without entries so far
    assert "badge-broken" not in text


def test_audit_page_shows_an_invalid_checkpoint(desk: Desk) -> None:
    """An auditor sees on the page that the log differs from what was signed."""
    issue(desk.sandbox)
    sign_due(now())
    disable_triggers()
    head = AuditChain.objects.get(name="account:acme/sandbox")
    AuditEntry.objects.get(chain=head, sequence=head.sequence).delete()
    AuditChain.objects.filter(name=head.name).update(sequence=head.sequence - 1)
    text = found(desk)
    assert "badge-broken" in text
    assert "The audit log does not match its checkpoints." in text
    assert f"ends before entry {head.sequence}, which it signs" in text


def test_audit_page_during_a_signer_outage_is_shown(desk: Desk) -> None:
    """A sealed Vault breaks no page, and no signature is shown as checked meanwhile."""
    issue(desk.sandbox)
    sign_due(now())
    unavailable = BackendUnavailableError("The secrets manager does not answer.", internal="sealed")
    with mock.patch.object(LocalSigner, "read_public_keys", side_effect=unavailable):
        text = found(desk)
    assert "badge-not_checked" in text
    assert "Signatures are not checked now." in text
    assert "badge-holds" not in text


def export(desk: Desk, page: str, **query: str) -> Any:
    return browser(desk.auditor).get(address(page), query)


def test_audit_export_in_the_browser_has_every_entry_and_the_public_keys(desk: Desk) -> None:
    """Guarantee: the log is streamed with all its entries and checkpoints, and the keys of its signers are offered."""
    issue(desk.sandbox)
    sign_due(now())
    log, keys = export(desk, "audit_export_log"), export(desk, "audit_export_keys")
    assert log.streaming
    assert log["Content-Disposition"].startswith("attachment")
    records = [json.loads(line) for line in text_of(log).splitlines()]
    kinds = Counter(record["record"] for record in records)
    assert kinds["entry"] == AuditEntry.objects.count()
    assert kinds["checkpoint"] == AuditCheckpoint.objects.count() > 0
    assert records[-1]["record"] == "end"
    assert "public_key" in text_of(keys)


def test_audit_export_is_recorded_and_runs_once_at_a_time(desk: Desk) -> None:
    """Guarantee: each export is in the log under its operator's name, and one operator runs one at a time."""
    issue(desk.sandbox)
    sign_due(now())
    running = export(desk, "audit_export_log")
    assert running.status_code == 200
    refused = export(desk, "audit_export_log")
    assert refused.status_code == 409
    assert "Another export of yours runs" in text_of(refused)
    assert '"record": "end"' in text_of(browser(desk.admin).get(address("audit_export_log"))).replace('":"', '": "')
    assert text_of(running)
    again = export(desk, "audit_export_log")
    assert again.status_code == 200
    assert text_of(again)
    entries = AuditEntry.objects.filter(event="audit.exported")
    assert sorted(entry.actor.partition(":")[2] for entry in entries) == ["admin", "auditor", "auditor"]


@pytest.mark.parametrize("since", ["", "x", "2001-01-01", "9999-12-31"])
def test_audit_export_of_an_invalid_period_shows_the_form(desk: Desk, since: str) -> None:
    answer = export(desk, "audit_export_log", since=since)
    assert answer.status_code == 400
    assert "Correct the errors below" in text_of(answer)


def test_audit_export_has_only_scopes_that_the_operator_may_read(desk: Desk) -> None:
    """Guarantee: an operator of one environment exports that one; an operator of some merchants exports nothing."""
    issue(desk.sandbox)
    issue(desk.production)
    of_sandbox = make_operator("sam", Role.AUDITOR, scope=AccessScope(environments=frozenset({SANDBOX})))
    shown = text_of(browser(of_sandbox).get(address("audit_export_log")))
    assert "acme/sandbox" in shown
    assert "acme/production" not in shown
    assert "platform" not in shown
    of_acme = make_operator("ada", Role.AUDITOR, scope=AccessScope(frozenset({"acme"})))
    client = browser(of_acme)
    pages = ("audit_export", "audit_export_log", "audit_export_keys")
    assert {client.get(address(page)).status_code for page in pages} == {403}
    assert address("audit_export") not in text_of(client.get(address("keyvault_auditentry_changelist")))
