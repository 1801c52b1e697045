"""The console's frame: search, environment switch, live pages, late forms and the number of queries."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import pytest
from django import forms
from django.db import connection
from django.test import Client

from keyvault.access.permissions import Permission as P
from keyvault.access.roles import Role
from keyvault.access.scopes import AccessScope
from keyvault.admin.merchants.provider_connections import ConcealedText, SecretField
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Change, UsageTotal, UseBucket, UseContext
from keyvault.models.usage import UseOutcome
from keyvault.services.keys.lifecycle import revoke_key
from keyvault.services.usage.totals import start_of_slot, write_totals
from rotation.admin.incidents import PasteForm
from tests.admin.desk import Desk, address, browser, make_refusal, text_of
from tests.factories import PRODUCTION, SANDBOX, grant, issue, make_operator, now, request_key

pytestmark = pytest.mark.database

MAX_QUERIES = 12
"""Maximum queries of the overview with rows that need attention, and of a list."""


@contextmanager
def counted() -> Iterator[list[str]]:
    queries: list[str] = []

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        queries.append(sql)
        return execute(sql, params, many, context)

    with connection.execute_wrapper(note):
        yield queries


def forms_of_console(form: Any) -> Iterator[Any]:
    for each in form.__subclasses__():
        if hasattr(each, "base_fields"):
            yield each
        yield from forms_of_console(each)


def search(client: Client, word: str) -> Any:
    return client.get(address("search"), {"q": word})


@pytest.mark.parametrize("by", ["id", "tail", "credential", "label"])
def test_search_with_one_hit_opens_it(desk: Desk, by: str) -> None:
    """Guarantee: an id, the end of a key id or a label leads straight to its page."""
    key, _ = issue(desk.sandbox, label="orders-worker")
    pages = {
        "id": (key.key_id, "keyvault_key_change", key.key_id),
        "tail": (key.key_id[-6:], "keyvault_key_change", key.key_id),
        "credential": (key.credential_id, "keyvault_credential_change", key.credential_id),
        "label": ("orders-w", "keyvault_credential_change", key.credential_id),
    }
    word, page, pk = pages[by]
    answer = search(browser(desk.admin), word)
    assert (answer.status_code, answer.get("Location")) == (302, address(page, pk))


def test_search_shows_all_hits_or_says_that_there_are_none(desk: Desk) -> None:
    issue(desk.sandbox, label="web-1")
    issue(desk.sandbox, label="web-2")
    client = browser(desk.admin)
    shown = text_of(search(client, "web-"))
    assert "web-1" in shown
    assert "web-2" in shown
    assert "Nothing matches" in text_of(search(client, "absent"))


def test_environment_switch_limits_lists_and_marks_production(desk: Desk) -> None:
    """Guarantee: with production chosen no list shows a sandbox row, and every page is marked."""
    (sandbox, _), (production, _) = issue(desk.sandbox), issue(desk.production)
    client, keys = browser(desk.admin), address("keyvault_key_changelist")
    answer = client.post(address("environment"), {"environment": PRODUCTION, "next": keys})
    assert answer["Location"] == keys
    listed = client.get(keys)
    assert [row.pk for row in listed.context["cl"].result_list] == [production.pk]
    assert 'class="is-production"' in text_of(listed)
    calendar = address("rotation_rotationschedule_calendar")
    assert "Calendar of rotations" in text_of(client.get(calendar, {"environment": SANDBOX}))
    assert client.get(calendar, {"environment": SANDBOX}).context["page_environment"] == PRODUCTION
    assert "Show sandbox" not in text_of(client.get(calendar))
    client.post(address("environment"), {"environment": ""})
    assert "Show sandbox" in text_of(client.get(calendar))
    assert {row.pk for row in client.get(keys).context["cl"].result_list} == {sandbox.pk, production.pk}


@pytest.mark.parametrize(
    ("name", "environment"),
    [
        ("keyvault_key", "credential.account.environment"),
        ("keyvault_credential", "account.environment"),
        ("keyvault_issuancerequest", "account.environment"),
        ("keyvault_auditentry", "chain_id"),
        ("keyvault_refusal", "environment"),
    ],
)
def test_list_marks_the_rows_of_production(desk: Desk, name: str, environment: str) -> None:
    """Guarantee: production is recognized in a list of both environments."""
    for place in (desk.sandbox, desk.production):
        issue(place)
        make_refusal(f"{place.environment:R<22}", environment=place.environment)
    listed = browser(desk.admin).get(address(f"{name}_changelist"))
    rows = listed.context["cl"].result_list
    table = text_of(listed).partition("<tbody>")[2].partition("</tbody>")[0]
    marked = re.findall(r'<tr( class="of-production")?><', table)
    assert [bool(mark) for mark in marked] == [attrgetter(environment)(row).endswith(PRODUCTION) for row in rows]
    assert len({bool(mark) for mark in marked}) == 2


@pytest.mark.parametrize("is_production", [True, False])
def test_page_of_a_denied_request_and_of_a_receipt_is_marked_in_production(desk: Desk, is_production: bool) -> None:
    place = desk.production if is_production else desk.sandbox
    refusal, (key, _) = make_refusal(environment=place.environment), issue(place)
    revoke_key(grant(desk.admin, P.KEYS_REVOKE, place), key, RevocationReason.SUPERSEDED)
    sequence = Change.objects.filter(subject_kind="key", subject_id=key.pk).latest("sequence").sequence
    client = browser(desk.admin)
    for url in (
        address("keyvault_refusal_change", refusal.pk),
        address("keyvault_key_receipt", key.pk, sequence),
    ):
        answer = client.get(url)
        assert answer.status_code == 200
        assert ('class="is-production"' in text_of(answer)) is is_production, url


def test_form_of_a_new_row_is_marked_in_production(desk: Desk) -> None:
    """Guarantee: a form that was opened for something of production is marked, and so is one that was sent for it.

    It does not reveal where a credential outside the operator's scope is.
    """
    (sandbox, _), (production, _) = issue(desk.sandbox), issue(desk.production)
    client = browser(desk.admin)
    rotate, schedule = address("rotation_rotation_request"), address("rotation_rotationschedule_save")
    limit = address("keyvault_limitoverride_set")
    marked = {
        f"{rotate}?credential={production.credential_id}": True,
        f"{rotate}?credential={sandbox.credential_id}": False,
        f"{rotate}?credential=unknown": False,
        f"{rotate}?credential=%01": False,
        rotate: False,
        f"{schedule}?credential={production.credential_id}": True,
        f"{schedule}?environment=production&merchant=acme": True,
        f"{limit}?environment=production&merchant=acme": True,
        f"{limit}?environment=sandbox&merchant=acme": False,
        f"{limit}?environment=prod": False,
    }
    found = {}
    for url in marked:
        answer = client.get(url)
        shown = text_of(answer)
        assert answer.status_code == 200, url
        found[url] = 'class="is-production"' in shown
        assert found[url] == ("badge-production" in shown), url
    assert found == marked
    sent = client.post(limit, {"environment": "production", "merchant": "acme", "endpoint": ""})
    assert sent.status_code == 400
    assert 'class="is-production"' in text_of(sent)
    limited = make_operator("elsewhere", *Role, scope=AccessScope(environments=frozenset({SANDBOX})))
    assert 'class="is-production"' not in text_of(
        browser(limited).get(f"{rotate}?credential={production.credential_id}")
    )


def test_overview_of_an_operator_of_one_merchant_states_nothing_about_all_verifications(desk: Desk) -> None:
    """Guarantee: the overview claims nothing about numbers that the operator may not see."""
    limited = make_operator("limited", Role.KEY_ADMINISTRATOR, scope=AccessScope(frozenset({"acme"})))
    assert "No verifications" in text_of(browser(desk.admin).get("/admin/"))
    shown = text_of(browser(limited).get("/admin/"))
    assert "Rotations in progress" in shown
    assert "Verifications" not in shown


def test_live_page_answers_its_fragment_by_etag(desk: Desk) -> None:
    """Guarantee: an unchanged page costs no body, although CSRF tokens differ in each response."""
    request_key(desk.production, label="checkout", by=desk.tam)
    client = browser(desk.approver)
    first = client.get("/admin/", headers={"X-Keyvault-Fragment": "live"})
    assert "<html" not in text_of(first)
    assert "checkout" in text_of(first)
    again = {"X-Keyvault-Fragment": "live", "If-None-Match": first["ETag"]}
    assert client.get("/admin/", headers=again).status_code == 304
    request_key(desk.production, label="billing", by=desk.tam)
    assert "billing" in text_of(client.get("/admin/", headers=again))


def test_form_of_an_expired_session_keeps_what_was_typed_except_secrets(desk: Desk) -> None:
    """Guarantee: the operator does not type a reason twice; no page repeats a password, code or key."""
    key, text = issue(desk.sandbox)
    typed = {"why": "leaked in a ticket", "second_factor_code": "123456", "extra": text.reveal()}
    page = address("keyvault_key_revoke", key.pk)
    answer = Client().post(page, typed, headers={"Origin": "http://testserver"})
    shown = text_of(answer)
    assert answer.status_code == 403
    assert "leaked in a ticket" in shown
    assert "123456" not in shown
    assert text.reveal() not in shown
    assert f'action="{page}"' in shown


def test_form_of_an_expired_session_keeps_no_secret_field_of_any_form(desk: Desk) -> None:
    """Guarantee: a new field for a secret cannot be forgotten; the page of an expired session does not show it."""
    page = address("keyvault_key_revoke", issue(desk.sandbox)[0].pk)
    names = {
        name
        for form in forms_of_console(forms.BaseForm)
        for name, field in form.base_fields.items()
        if isinstance(field, SecretField) or isinstance(field.widget, forms.PasswordInput | ConcealedText)
    } | set(PasteForm.base_fields)
    assert {"secret", "password", "password_again"} <= names
    typed = {name: f"typed as {name}" for name in names}
    shown = text_of(Client().post(page, {"why": "typed why", **typed}, headers={"Origin": "http://testserver"}))
    assert "typed why" in shown
    assert [name for name, value in typed.items() if value in shown] == []


def test_form_of_another_site_keeps_nothing(desk: Desk) -> None:
    """Guarantee: no other site can prepare a form that an operator sends by mistake."""
    key, _ = issue(desk.sandbox)
    client = browser(desk.responder, enforce_csrf_checks=True)
    answer = client.post(
        address("keyvault_key_revoke", key.pk), {"why": "forged"}, headers={"Origin": "https://evil.example"}
    )
    assert answer.status_code == 403
    assert "forged" not in text_of(answer)


@pytest.mark.django_db
@pytest.mark.parametrize(("accept", "status"), [("text/html,*/*", 302), ("application/json", 404)])
def test_root_leads_a_browser_to_the_console(accept: str, status: int) -> None:
    assert Client().get("/", headers={"Accept": accept}).status_code == status


@pytest.mark.usefixtures("menu_counts")
def test_pages_need_a_bounded_number_of_queries(desk: Desk) -> None:
    """Guarantee: the overview and the lists cost a fixed number of queries, however many rows there are."""
    for number in range(8):
        request_key(desk.production, label=f"label-{number}", by=desk.tam)
        issue(desk.sandbox, label=f"key-{number}")
    client = browser(desk.approver)
    client.get("/admin/")
    with counted() as queries:
        assert client.get("/admin/").status_code == 200
    assert len(queries) <= MAX_QUERIES
    for page in ("keyvault_key_changelist", "keyvault_credential_changelist", "keyvault_issuancerequest_changelist"):
        with counted() as queries:
            assert client.get(address(page)).status_code == 200
        assert len(queries) <= MAX_QUERIES, page


def test_totals_are_of_all_keys_and_a_repeated_run_adds_nothing(desk: Desk) -> None:
    """Guarantee: the overview's chart shows the stored uses, each counted once."""
    minute = now().replace(second=0, microsecond=0)
    for key in (issue(desk.sandbox)[0], issue(desk.production)[0]):
        context = UseContext.objects.create(key=key, outcome=UseOutcome.ALLOWED, source="192.0.2.1")
        UseBucket.objects.create(context=context, minute=minute, first_at=minute, last_at=minute, count=3)
    for _ in range(2):
        write_totals(now())
    totals = UsageTotal.objects.filter(at=start_of_slot(now()), outcome=UseOutcome.ALLOWED)
    assert dict(totals.values_list("environment", "count")) == {SANDBOX: 3, PRODUCTION: 3}


@pytest.mark.parametrize(
    ("entry", "page"), [("Rotations", "rotation_rotation"), ("Schedules", "rotation_rotationschedule")]
)
def test_entry_of_the_menu_opens_the_list_with_its_name(desk: Desk, entry: str, page: str) -> None:
    assert f'<a href="{address(f"{page}_changelist")}">{entry}' in text_of(browser(desk.admin).get("/admin/"))


def test_overview_offers_what_to_create_in_the_order_of_the_menu(desk: Desk) -> None:
    page = text_of(browser(desk.admin).get("/admin/"))
    places = [
        page.index(f">{label}</a>") for label in ("Request a key", "Rotate a key", "Create merchant", "Set limit")
    ]
    assert places == sorted(places)
