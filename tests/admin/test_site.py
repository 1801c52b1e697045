"""Login and logout of the console, and its answers to invalid requests."""

import re
from typing import Any
from unittest import mock

import pytest
from django.contrib import admin
from django.contrib.admin.utils import get_fields_from_path
from django.db import IntegrityError
from django.test import Client

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.access.roles import Role
from keyvault.admin.framework import attention, model_admin
from keyvault.admin.keys.keys import KeyAdmin
from keyvault.models import Operator
from keyvault.models.recording import collect_subjects
from keyvault.services.operators.operators import disable_operator
from tests.factories import PASSWORD, SANDBOX, account, grant, issue, make_merchant, make_operator, request_key

from .desk import Desk, address, browser, text_of


def log_in(username: str, password: str = PASSWORD) -> Any:
    client = Client()
    return client.post("/admin/login/?next=/admin/", {"username": username, "password": password})


def test_site_login_with_the_password_succeeds(desk: Desk) -> None:
    answer = log_in("tam")
    assert (answer.status_code, answer["Location"]) == (302, "/admin/second-factor/?next=%2Fadmin%2F")


def test_site_login_with_a_wrong_password_is_refused(desk: Desk) -> None:
    answer = log_in("tam", "something else entirely")
    assert answer.status_code == 200
    assert "Wrong user name or password" in text_of(answer)


def test_site_login_without_a_role_is_refused_as_a_wrong_password_is(desk: Desk) -> None:
    """A login without a role gets no session and does not learn that its password was right."""
    make_operator("nobody")
    answer = log_in("nobody")
    assert answer.status_code == 200
    assert not answer.cookies.get("session") or "_auth_user_id" not in answer.wsgi_request.session
    assert "Wrong user name or password" in text_of(answer)


def test_site_suspended_operator_is_signed_out_immediately(desk: Desk) -> None:
    """A disabled operator is signed out with the next request and cannot sign in again."""
    client = browser(desk.admin)
    assert client.get("/admin/").status_code == 200
    make_operator("second", Role.KEY_ADMINISTRATOR)
    disable_operator(grant(HOST, P.OPERATORS_WRITE), Operator.objects.get(username="admin"))
    assert client.get("/admin/").status_code == 302
    assert client.post(address("keyvault_merchant_suspend", "acme")).status_code == 302
    desk.sandbox.merchant.refresh_from_db()
    assert desk.sandbox.merchant.status == "active"
    assert log_in("admin").status_code == 200


def test_site_user_without_staff_status_is_refused(desk: Desk) -> None:
    """The console requires a staff login."""
    client = browser(desk.admin)
    with collect_subjects():
        Operator.objects.get(username="admin").swap_beside({}, is_staff=False)
    assert client.get("/admin/").status_code == 302


def test_site_logout_requires_a_post(desk: Desk) -> None:
    """No link or image on another page logs an operator out."""
    client = browser(desk.tam)
    assert client.get("/admin/logout/").status_code == 405
    assert client.get("/admin/").status_code == 200
    assert client.post("/admin/logout/").status_code == 200
    assert client.get("/admin/").status_code == 302


def test_site_post_without_csrf_token_is_refused(desk: Desk) -> None:
    """No other site can act through an operator's browser."""
    client = browser(desk.admin, enforce_csrf_checks=True)
    assert client.post(address("keyvault_merchant_suspend", "acme")).status_code == 403
    desk.sandbox.merchant.refresh_from_db()
    assert desk.sandbox.merchant.status == "active"


@pytest.mark.parametrize("path", ["", "login/", "keyvault/key/", "keyvault/auditentry/", "keyvault/key/nothing/"])
def test_site_page_sends_and_follows_its_content_security_policy(desk: Desk, path: str) -> None:
    """Only the console's own files run: pages contain no inline script or style and none from elsewhere."""
    issue(desk.sandbox)
    client = Client() if path == "login/" else browser(desk.admin)
    answer = client.get(f"/admin/{path}")
    policy = answer["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    text = text_of(answer)
    assert not re.search(r"<script(?![^>]*\bsrc=\"/static/)", text)
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:", text)
    assert not re.search(r"(?:src|href)=\"(?:https?:)?//", text)


def test_site_page_is_not_cacheable(desk: Desk) -> None:
    """Pages of the console are stored in no cache, on the way or in the browser."""
    client = browser(desk.auditor)
    for path in ("/admin/", "/admin/keyvault/key/", "/admin/keyvault/merchant/acme/"):
        assert "no-store" in client.get(path)["Cache-Control"]


def test_site_key_in_the_address_is_refused_and_not_repeated(desk: Desk) -> None:
    """A whole key pasted into a search field is neither searched nor shown."""
    _, text = issue(desk.sandbox)
    answer = browser(desk.tam).get("/admin/keyvault/key/", {"q": text.reveal()})
    assert answer.status_code == 400
    assert text.reveal() not in text_of(answer)
    assert "search by key id" in text_of(answer)


def test_site_refusal_names_the_missing_permission(desk: Desk) -> None:
    answer = browser(desk.approver).get(address("keyvault_merchant_create"))
    assert answer.status_code == 403
    assert "merchants:write" in text_of(answer)


@pytest.mark.parametrize("path", ["no/such/page/", "keyvault/account/nothing/", "keyvault/account/%00/", "auth/"])
def test_site_unknown_address_is_a_page_and_no_fault(desk: Desk, path: str) -> None:
    answer = browser(desk.admin).get(f"/admin/{path}")
    assert answer.status_code in {400, 404}
    assert "Go to the overview" in text_of(answer)


def test_site_refusal_by_the_database_is_a_conflict_and_no_fault(desk: Desk) -> None:
    """When concurrent actions meet in a constraint, the slower one gets a conflict."""
    with mock.patch.object(KeyAdmin, "find_row", side_effect=IntegrityError("a trigger")):
        answer = browser(desk.admin).get(address("keyvault_key_change", "x"))
    assert answer.status_code == 409
    assert "Review the current version and try again" in text_of(answer)


def test_site_front_page_shows_each_operators_pending_work(desk: Desk) -> None:
    """The requester is not offered to approve; possible approvers are."""
    request_key(desk.production, label="live-checkout", by=desk.tam)
    assert "Key requests to approve" in text_of(browser(desk.approver).get("/admin/"))
    tams = text_of(browser(desk.tam).get("/admin/"))
    assert "Key requests to approve" not in tams
    assert "Your key requests awaiting approval" in tams
    assert "live-checkout" in tams


def test_site_front_page_of_a_person_with_two_log_ins_offers_no_own_request(desk: Desk) -> None:
    """Persons are compared, not logins: a requester's second login is not offered to approve."""
    request_key(desk.production, label="live-checkout", by=desk.tam)
    twin = make_operator("tam-approves", Role.APPROVER, person=desk.tam.person)
    assert "live-checkout" not in text_of(browser(twin).get("/admin/"))


def test_site_front_page_states_that_more_items_exist_than_it_counts(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The overview reads a bounded number of rows, and does not present that number as the total."""
    monkeypatch.setattr(attention, "MAX_ROWS", 2)
    monkeypatch.setattr(attention, "MAX_DECIDABLE", 2)
    for label in ("first", "second"):
        request_key(desk.production, label=label, by=desk.tam)
    counted = '<span class="count">2{}</span>'.format
    assert counted("") in text_of(browser(desk.tam).get("/admin/"))
    assert "2 items you can act on" in text_of(browser(desk.approver).get("/admin/"))
    request_key(desk.production, label="third", by=desk.tam)
    assert counted("+") in text_of(browser(desk.tam).get("/admin/"))
    assert "2+ items you can act on" in text_of(browser(desk.approver).get("/admin/"))


@pytest.mark.parametrize("word", ["KEY", "CREDENTIAL", "acme"])
def test_site_search_finds_rows_by_any_field_and_by_all_words(desk: Desk, word: str) -> None:
    make_merchant("other")
    issue(account("other", SANDBOX))
    key, _ = issue(desk.sandbox)
    client = browser(desk.admin)
    text = {"KEY": key.key_id, "CREDENTIAL": key.credential_id}.get(word, word)
    for page, row in (("keyvault_key_changelist", key), ("keyvault_credential_changelist", key.credential)):
        for query, expected in ((text, [row]), (f"{text} acme", [row]), (f"{text} other", []), (f"{text}x", [])):
            found = list(client.get(address(page), {"q": query}).context["cl"].result_list)
            assert found == expected, query


@pytest.mark.parametrize("page", ["keyvault_key", "keyvault_credential", "keyvault_issuancerequest"])
def test_site_search_finds_the_beginning_of_a_label(desk: Desk, page: str) -> None:
    """A label of several words is found by its first word, or in quotes."""
    issue(desk.sandbox, label="Web shop")
    issue(desk.sandbox, label="Webhooks")
    client = browser(desk.admin)
    counts = {"Web": 2, '"Web shop"': 1, "'Web s' acme": 1, "shop": 0, "Web_": 0, "'": 0, '"Web shop': 0}
    for query, count in counts.items():
        listed = client.get(address(f"{page}_changelist"), {"q": query})
        assert len(listed.context["cl"].result_list) == count, query


def test_site_search_states_that_more_rows_match_than_it_reads(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator learns that a row may be missing, and an id still finds every row."""
    monkeypatch.setattr(model_admin, "_MAX_FOUND", 2)
    keys = [issue(desk.sandbox, label=f"label-{number}")[0] for number in range(3)]
    client, page = browser(desk.admin), address("keyvault_key_changelist")
    for query, count, is_cut in (("acme", 2, True), ("label", 2, True), ("label-1", 1, False), (keys[0].pk, 1, False)):
        listed = client.get(page, {"q": query})
        assert len(listed.context["cl"].result_list) == count, query
        assert ("some rows are missing. Search for the id of one row, or for a longer" in text_of(listed)) is is_cut


def test_site_list_of_keys_is_not_sorted_by_a_column_of_the_query_string(desk: Desk) -> None:
    """Sorting by a column without an index would read all keys."""
    client, page = browser(desk.admin), address("keyvault_key_changelist")
    for query in ({}, {"o": "1"}, {"o": "-6.2"}):
        found = client.get(page, query).context["cl"].queryset
        assert set(found.query.order_by) == {"-created_at", "-pk"}


def test_site_side_bar_lists_what_the_role_may_see(desk: Desk) -> None:
    client = browser(desk.approver)
    text = text_of(client.get("/admin/"))
    assert "Audit log" in text
    assert "Service tokens" not in text
    assert "Break-glass actions" in text_of(client.get(address("keyvault_breakglass_changelist")))


def test_site_filters_list_no_values_of_rows() -> None:
    """The cost of opening a list does not grow with its rows: a filter's values are those that the code defines."""
    fields = [
        (model._meta.label, name, get_fields_from_path(model, name)[-1])
        for model, registered in admin.site._registry.items()
        for name in registered.list_filter
        if isinstance(name, str)
    ]
    assert len(fields) > 20
    assert [(label, name) for label, name, field in fields if not getattr(field, "flatchoices", None)] == []


@pytest.mark.django_db
def test_session_outside_the_console_is_ignored(client: Client, django_assert_num_queries: Any) -> None:
    """A console cookie is ignored on the other planes: it costs no query, and no answer varies by it."""
    client.cookies["session"] = "x" * 32
    with django_assert_num_queries(0):
        answer = client.get("/healthz")
    assert answer.status_code == 200
    assert "Cookie" not in answer.headers.get("Vary", "")


def test_front_page_shows_requests_of_others_behind_many_of_ones_own(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_MAX_AUTHORIZED", 1)
    both = make_operator("both", Role.TECHNICAL_ACCOUNT_MANAGER, Role.APPROVER)
    for label, by in (("own-1", both), ("own-2", both), ("theirs-1", desk.tam), ("theirs-2", desk.tam)):
        request_key(desk.production, label=label, by=by)
    (item,) = (
        item
        for item in browser(both).get("/admin/").context["attention_items"]
        if item.title == "Key requests to approve"
    )
    assert (item.count, item.has_more) == (2, False)
    assert [line.label for line in item.lines] == ["acme/production · theirs-1"]
    assert "theirs-1" in item.lines[0].label
