"""The inbox in the console: alarms first, each with links to its subject, marked as seen by an operator."""

import re
from typing import Any

import pytest
from django.urls import NoReverseMatch

from keyvault.access.permissions import Permission as P
from keyvault.admin.framework import model_admin
from keyvault.admin.oversight import inbox as page_of
from keyvault.domain.notifications import NoticeKind
from keyvault.models import Notice
from keyvault.services.approvals.inbox import list_unseen, mark_seen
from keyvault.services.recording.notifications import announce
from keyvault.services.recording.transaction import recorded
from keyvault.services.webhooks.endpoints import add_endpoint
from tests.admin.desk import Desk, address, browser, hidden, text_of
from tests.factories import grant, issue, now

ALARM, NOTIFICATION = NoticeKind.ROTATION_STALLED, NoticeKind.KEY_ISSUED
LIST = "/admin/keyvault/notice/"


def create_notice(desk: Desk, kind: NoticeKind = ALARM, subject: str = "rot_" + "A" * 20, **payload: Any) -> Notice:
    allowed = grant(desk.admin, P.KEYS_REVOKE, desk.sandbox)
    with recorded(allowed, P.KEYS_REVOKE, "key.revoked", account=desk.sandbox):
        return announce(allowed, kind, desk.sandbox, subject, **payload)


def test_inbox_lists_alarms_first(desk: Desk) -> None:
    create_notice(desk)
    create_notice(desk, NOTIFICATION, "k" * 16)
    text = text_of(browser(desk.auditor).get(LIST))
    assert text.index('<a href="/admin/keyvault/notice/') > 0
    rows = re.findall(r"badge badge-(unseen|seen|notice) ", text)
    assert rows == ["unseen", "notice"]


def test_inbox_search_that_is_cut_finds_unseen_alarms_then_the_newest(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: a merchant with many notices hides none of its unseen alarms from the search."""
    monkeypatch.setattr(model_admin, "_MAX_FOUND", 2)
    alarm = create_notice(desk)
    *_, newest = [create_notice(desk, NOTIFICATION, "k" * 16) for _ in range(3)]
    listed = browser(desk.auditor).get(LIST, {"q": "acme"})
    assert [notice.pk for notice in listed.context["cl"].result_list] == [alarm.pk, newest.pk]
    assert "Search for the id of one row." in text_of(listed)


@pytest.mark.parametrize(("what", "count"), [("unseen", 1), ("alarms", 1), (None, 2)])
def test_inbox_filters_by_status(desk: Desk, what: str | None, count: int) -> None:
    create_notice(desk)
    create_notice(desk, NOTIFICATION, "k" * 16)
    text = text_of(browser(desk.auditor).get(LIST, {} if what is None else {"what": what}))
    assert len(re.findall(r"badge badge-(?:unseen|notice) ", text)) == count


@pytest.mark.usefixtures("menu_counts")
def test_inbox_counts_unseen_alarms_on_every_page_and_on_the_front(desk: Desk) -> None:
    """Every page of the console shows the unseen alarms."""
    client = browser(desk.approver)
    assert "all caught up" in text_of(client.get("/admin/"))
    assert '<span class="count count-urgent">' not in text_of(client.get("/admin/keyvault/key/"))
    notice = create_notice(desk)
    front = text_of(client.get("/admin/"))
    assert "Unseen alarms" in front
    assert address("keyvault_notice_change", notice.pk) in front
    assert '<span class="count count-urgent">1</span>' in text_of(client.get("/admin/keyvault/key/"))


def test_alarms_of_one_kind_are_one_line_of_the_front_page(desk: Desk) -> None:
    """Guarantee: several alarms with one cause take one line, which leads to the unseen alarms."""
    first, second = create_notice(desk, subject="rot_" + "A" * 20), create_notice(desk, subject="rot_" + "B" * 20)
    front = text_of(browser(desk.approver).get("/admin/"))
    assert front.count("Open alarm") == 1
    assert first.subject in front
    assert second.subject in front
    assert f'href="{LIST}?what=unseen">Open alarm' in front


def test_alarms_name_what_a_person_knows_instead_of_an_id(desk: Desk) -> None:
    """On the overview and in the list: a label, a host or a reason, beside the merchant and the environment."""
    key, _ = issue(desk.sandbox, label="checkout")
    of_credential = {"credential_id": key.credential_id}
    rows: tuple[tuple[NoticeKind, str, dict[str, Any], str], ...] = (
        (NoticeKind.KEY_COMPROMISED, key.pk, of_credential, f"checkout, key …{key.pk[-6:]}"),
        (NoticeKind.CREDENTIAL_WITHOUT_KEY, key.credential_id, of_credential, "checkout"),
        (NoticeKind.ROTATION_STALLED, "rot_" + "A" * 20, of_credential, "checkout"),
        (NoticeKind.SCHEDULE_STALLED, "1", {"scope": key.credential_id, "why": "w"}, "checkout"),
        (NoticeKind.STANDING_APPROVAL_EXPIRED, "sta_" + "A" * 20, {"scope": "production"}, "production"),
        (NoticeKind.CAMPAIGN_HALTED, "cmp_" + "A" * 20, {"why": "3 of 5 stalled"}, "3 of 5 stalled"),
        (NoticeKind.BACKEND_UNATTRIBUTED, "crd_" + "A" * 20, {"path": "p", "why": "a copy is gone"}, "a copy is gone"),
        (NoticeKind.WEBHOOK_FAILED, "1", {"host": "hooks.acme.example", "why": "404"}, "hooks.acme.example"),
    )
    client = browser(desk.approver)
    for kind, subject, payload, named in rows:
        notice = create_notice(desk, kind, subject, **payload)
        text = text_of(client.get("/admin/"))
        assert f"{desk.sandbox} · {named}</span>" in text, kind
        mark_seen(grant(desk.approver, P.NOTICES_MARK, desk.sandbox), notice)
    listed = text_of(client.get(LIST))
    assert [named for *_, named in rows if f">{named}</" not in listed] == []
    assert "webhook endpoint 1" not in listed


def test_events_are_named_in_words(desk: Desk) -> None:
    notice, client = create_notice(desk), browser(desk.auditor)
    text = text_of(client.get(LIST))
    assert "Rotation stalled" in text
    assert [kind for kind in NoticeKind if f">{kind}<" in re.sub(r"\s", "", text)] == []
    assert "<h1>Rotation stalled</h1>" in text_of(client.get(address("keyvault_notice_change", notice.pk)))


def test_notice_links_its_subject(desk: Desk) -> None:
    key, _ = issue(desk.sandbox)
    endpoint, _ = add_endpoint(grant(desk.tam, P.WEBHOOKS_WRITE, desk.sandbox), desk.sandbox, "https://acme.example/")
    client = browser(desk.auditor)
    for subject, kind, place in (
        (key.pk, NOTIFICATION, address("keyvault_key_change", key.pk)),
        (
            key.credential_id,
            NoticeKind.CREDENTIAL_WITHOUT_KEY,
            address("keyvault_credential_change", key.credential_id),
        ),
        ("rot_" + "A" * 20, ALARM, address("rotation_rotation_change", "rot_" + "A" * 20)),
        (str(endpoint.pk), NoticeKind.WEBHOOK_FAILED, address("keyvault_webhookendpoint_change", endpoint.pk)),
    ):
        notice = create_notice(desk, kind, subject)
        assert f'href="{place}"' in text_of(client.get(address("keyvault_notice_change", notice.pk)))


def test_notice_about_a_subject_without_a_page_is_shown(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rotation app its ids are no links, and the page still works."""

    def reverse(name: str, args: list[str]) -> str:
        if name.startswith("admin:rotation"):
            raise NoReverseMatch
        return "/somewhere"

    monkeypatch.setattr(page_of, "reverse", reverse)
    notice = create_notice(desk)
    text = text_of(browser(desk.auditor).get(f"{LIST}{notice.pk}/"))
    assert "<code>rot_AAAA" in text


def test_notice_payload_is_escaped(desk: Desk) -> None:
    notice = create_notice(desk, why="<b>no</b>", key_ids=["one", "two"], expires_at=None)
    text = text_of(browser(desk.auditor).get(address("keyvault_notice_change", notice.pk)))
    assert "&lt;b&gt;no&lt;/b&gt;" in text
    assert "one, two" in text


def test_notice_payload_of_lists_and_objects_is_in_words(desk: Desk) -> None:
    """Guarantee: a text of a client is set apart, escaped and cut, so that it cannot pass for other values."""
    attempts = [
        {"source": "203.0.113.7", "user_agent": "<b>, is known: yes", "is_known": False, "count": 2},
        {"source": "x" * 200, "last_at": None},
    ]
    notice = create_notice(desk, attempts=[*attempts, *[{"source": "y"}] * 50], sealed={"nonce": "n", "sizes": [1, 2]})
    text = text_of(browser(desk.auditor).get(address("keyvault_notice_change", notice.pk)))
    first = (
        "count: 2, is known: no, source: <code>203.0.113.7</code>, user agent: <code>&lt;b&gt;, is known: yes</code>"
    )
    assert f"<ul><li>{first}</li><li>last at: none, source: <code>{'x' * 120}…</code></li><li>" in text
    assert text.count("<li>source: <code>y</code></li>") == 48
    assert "<li>and 2 more</li></ul>" in text
    assert "nonce: <code>n</code>, sizes: 1, 2" in text


def test_alarm_marked_as_seen_shows_the_operator(desk: Desk) -> None:
    notice = create_notice(desk)
    client = browser(desk.approver)
    act = address("keyvault_notice_seen", notice.pk)
    assert client.post(act).status_code == 302
    assert list_unseen().count() == 0
    text = text_of(client.get(address("keyvault_notice_change", notice.pk)))
    assert "approver" in text
    assert "Mark as seen" not in text
    assert client.post(act).status_code == 409


def test_alarms_marked_together_are_those_on_the_page(desk: Desk) -> None:
    """Alarms that arrived after the page was opened stay unmarked."""
    create_notice(desk)
    client = browser(desk.approver)
    act = address("keyvault_notice_all_seen")
    until = hidden(client.get(act), "until")
    late = create_notice(desk)
    assert client.post(act, {"until": until}).status_code == 302
    assert [notice.pk for notice in Notice.objects.filter(seen_at=None)] == [late.pk]
    for invalid in ("whenever", "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"):
        assert client.post(act, {"until": invalid}).status_code == 400, invalid
    assert client.post(act, {"until": now().replace(year=2000).isoformat()}).status_code == 409


def test_alarm_is_not_marked_by_an_auditor(desk: Desk) -> None:
    """An auditor's reading leaves the alarms unseen for the others."""
    notice = create_notice(desk)
    client = browser(desk.auditor)
    assert client.post(address("keyvault_notice_seen", notice.pk)).status_code == 403
    assert client.get(address("keyvault_notice_all_seen")).status_code == 403
    assert "Mark as seen" not in text_of(client.get(address("keyvault_notice_change", notice.pk)))
    assert list_unseen().count() == 1
