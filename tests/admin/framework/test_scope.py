"""An operator with a scope: every page and list of the console, and what its forms accept."""

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.contrib import admin
from django.db.models import Model
from django.test import Client

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST, OperatorPrincipal
from keyvault.access.roles import Role
from keyvault.access.scopes import NOWHERE, AccessScope
from keyvault.admin.framework.model_admin import ConsoleModelAdmin
from keyvault.models import IssuanceRequest, Key, Notice, Operator, ServiceToken
from keyvault.services.operators.operators import set_scope
from rotation.domain.pacing import Pace
from rotation.domain.plan_fields import PlanOverrides
from rotation.models import Campaign, Rotation, RotationSchedule
from rotation.services.campaigns.campaigns import request_campaign
from rotation.services.schedules.schedules import ScheduleDraft, ScheduleScope, save_schedule
from tests.admin.desk import Desk, address, browser, hidden, list_routes, text_of
from tests.admin.framework.golden_access import golden_status, require_column
from tests.admin.framework.test_enforcement import (
    OPEN,
    answers,
    as_cell,
    every_address,
    every_row,
    statuses,
)
from tests.factories import (
    PRODUCTION,
    SANDBOX,
    account,
    grant,
    issue,
    make_merchant,
    make_operator,
    make_token,
    now,
    request_key,
)

GLOBEX = AccessScope(frozenset({"globex"}))
GLOBEX_SANDBOX = AccessScope(frozenset({"globex"}), frozenset({SANDBOX}))
ACME_SANDBOX = AccessScope(frozenset({"acme"}), frozenset({SANDBOX}))
ALL_SANDBOX = AccessScope(environments=frozenset({SANDBOX}))
NAMES = {
    GLOBEX: "globex",
    GLOBEX_SANDBOX: "globex/sandbox",
    ACME_SANDBOX: "acme/sandbox",
    ALL_SANDBOX: "sandbox",
    NOWHERE: "nowhere",
}
"""Columns of the golden table."""

SHARED = {"keyvault_catalogendpoint", "rotation_blackoutcalendar", "keyvault_limitoverride"}
"""Rows of `every_row` that concern no merchant and that every operator may read."""

OWN = {"remove_second_factor", "add_passkey", "recovery_codes"}
"""Pages of the operator's own second factors."""

SANDBOX_ROWS = {"keyvault_providerconnection", "keyvault_webhookendpoint", "keyvault_notice", "keyvault_account"} | {
    "keyvault_credential",
    "keyvault_key",
}
"""Rows of `every_row` that belong to acme/sandbox."""


def limited(scope: AccessScope, *roles: Role) -> OperatorPrincipal:
    return make_operator("limited", *(roles or Role), scope=scope)


def comparable(text: str, sent: object) -> str:
    """Return the text of a page without the value that was sent and without its CSRF tokens."""
    return re.sub(r'(name="(?:csrfmiddlewaretoken|form_token)" value=")[^"]*', r"\1", text).replace(str(sent), "SENT")


def list_pages() -> Iterator[tuple[str, str]]:
    """Yield the name and the path of every page that is of no single row."""
    for name, path in list_routes():
        if "<" not in path and name not in OPEN | OWN | {"logout", "environment", "everything else"}:
            yield name, path


def ids_of(models: set[type[Model]]) -> set[str]:
    """Return the ids of all rows of these models; numbers are left out, because any page has some."""
    return {str(pk) for model in models for pk in model._base_manager.values_list("pk", flat=True) if len(str(pk)) > 8}


@pytest.mark.parametrize("scope", [GLOBEX, GLOBEX_SANDBOX])
def test_scope_of_another_merchant_finds_no_object(desk: Desk, scope: AccessScope) -> None:
    """Guarantee: the page and each action of another merchant's object answer 404, in every role."""
    make_merchant("globex")
    addresses = every_address(desk)
    client = browser(limited(scope))
    wrong, cells, pages = [], {}, dict(list_pages())
    for name, path in addresses:
        found = statuses(client, path)
        cells[name] = as_cell(found)
        noun = "_".join(name.split("_")[:2])
        if name in pages or noun in SHARED or name in OPEN | OWN | {"environment", "everything else"}:
            continue
        if found["get"] != 404 or found["post"] not in {404, 405}:
            wrong.append((name, found))
    assert wrong == []
    require_column(NAMES[scope], cells)


@pytest.mark.postgres_once
@pytest.mark.database
@pytest.mark.parametrize("scope", [GLOBEX_SANDBOX, GLOBEX, NOWHERE])
def test_scope_of_another_merchant_shows_no_id_of_it(desk: Desk, scope: AccessScope) -> None:
    """Guarantee: no list, form or overview shows an id of another merchant, and no search finds one."""
    rows = every_row(desk)
    hidden_models = {type(row) for label, row in rows.items() if label not in SHARED}
    others = {model: set(model._base_manager.values_list("pk", flat=True)) for model in hidden_models}
    make_merchant("globex")
    foreign = ids_of(hidden_models) | {"acme/sandbox", "acme/production", ">acme<", "Acme"}
    assert len(foreign) > 20
    client = browser(limited(scope))
    for name, path in list_pages():
        answer = client.get(path)
        assert answer.status_code == golden_status(NAMES[scope], name), name
        text = text_of(answer)
        assert [each for each in foreign if each in text] == [], name
    for model, registered in admin.site._registry.items():
        if model not in hidden_models:
            continue
        assert isinstance(registered, ConsoleModelAdmin)
        for query in ("", "acme", str(rows[f"{model._meta.app_label}_{model._meta.model_name}"].pk)):
            found = client.get(registered.list_url(), {"q": query} if registered.search_fields else {})
            shown_rows = {row.pk for row in found.context["cl"].result_list}
            assert shown_rows & others[model] == set(), (model, query)


def test_scope_nowhere_opens_what_concerns_nobody(desk: Desk) -> None:
    """Guarantee: an operator of single sign-on without a scope finds no object, whatever its roles."""
    addresses = every_address(desk)
    client = browser(limited(NOWHERE))
    require_column("nowhere", {name: as_cell(statuses(client, path, ["get"])) for name, path in addresses})


@pytest.mark.parametrize("scope", [ACME_SANDBOX, ALL_SANDBOX])
def test_scope_in_one_environment_finds_nothing_of_the_other(desk: Desk, scope: AccessScope) -> None:
    addresses = every_address(desk)
    client = browser(limited(scope))
    foreign = {str(key.pk) for key in Key.objects.filter(credential__account__environment=PRODUCTION)}
    foreign |= ids_of({Rotation, Campaign}) | {"acme/production"}
    seen, cells, pages = set(), {}, dict(list_pages())
    for name, path in addresses:
        (answer,) = answers(client, path, ["get"]).values()
        cells[name] = str(answer.status_code)
        if name.endswith("_change") and answer.status_code == 200:
            seen.add(name.removesuffix("_change"))
        if name in pages:
            text = text_of(answer)
            assert [each for each in foreign if each in text] == [], name
    of_environment = {"keyvault_refusal"} if scope == ALL_SANDBOX else set[str]()
    assert seen - {"keyvault_auditentry"} == SHARED | SANDBOX_ROWS | {"keyvault_merchant"} | of_environment
    require_column(NAMES[scope], cells)
    assert "production" not in text_of(client.get(address("keyvault_merchant_change", "acme")))


def test_scope_front_page_counts_only_what_it_has(desk: Desk) -> None:
    make_merchant("globex")
    for merchant in ("acme", "globex"):
        request_key(account(merchant, PRODUCTION), label=f"of-{merchant}", by=desk.tam)
    text = text_of(browser(limited(GLOBEX, Role.APPROVER)).get("/admin/"))
    assert "of-globex" in text
    assert "of-acme" not in text
    assert '<span class="count">1</span>' in text
    assert "of-acme" in text_of(browser(desk.approver).get("/admin/"))


def test_scope_list_has_pages_in_its_order(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    make_merchant("globex")
    noun = admin.site._registry[IssuanceRequest]
    monkeypatch.setattr(noun, "list_per_page", 2)
    place = account("globex", PRODUCTION)
    made = [request_key(place, by=desk.tam, at=now() - timedelta(minutes=ago)) for ago in range(5)]
    request_key(desk.production, by=desk.tam)
    client, page = browser(limited(GLOBEX)), address("keyvault_issuancerequest_changelist")
    pages = list(read_pages(client, page))
    assert pages == [[row.pk for row in made[first : first + 2]] for first in (0, 2, 4)]


def read_pages(client: Client, path: str) -> Iterator[list[Any]]:
    """Yield the ids of each page of a list, by the link to the next one."""
    query = ""
    while True:
        listed = client.get(path + query).context["cl"]
        yield [row.pk for row in listed.result_list]
        query = listed.next_url
        if not query:
            return


@pytest.mark.database
@pytest.mark.parametrize(
    "ordering",
    [("-created_at",), ("label", "-created_at"), ("-key_id", "created_at"), ("key_id", "pk"), ()],
    ids=str,
)
def test_scope_pages_have_each_row_once_in_any_order(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, ordering: tuple[str, ...]
) -> None:
    """Guarantee: pages of a list skip no row and repeat none, whatever the directions, with equal values and NULL."""
    noun = admin.site._registry[IssuanceRequest]
    monkeypatch.setattr(noun, "ordering", ordering)
    at = now()
    for number in range(6):
        request_key(desk.production, label="ab"[number % 2], by=desk.tam, at=at - timedelta(minutes=number // 3))
    issue(desk.sandbox)
    client, path = browser(desk.tam), address("keyvault_issuancerequest_changelist")
    (whole,) = read_pages(client, path)
    assert len(whole) == 7
    monkeypatch.setattr(noun, "list_per_page", 2)
    pages = list(read_pages(client, path))
    assert [len(each) for each in pages] == [2, 2, 2, 1]
    assert [pk for each in pages for pk in each] == whole


@pytest.mark.parametrize("cursor", ["2", "x" * 300, "WyJhIl0:forged"])
def test_scope_list_with_an_invalid_cursor_is_the_first_page(desk: Desk, cursor: str) -> None:
    """Guarantee: no client chooses the values that a list is compared with."""
    made = request_key(desk.production, by=desk.tam)
    listed = browser(desk.tam).get(address("keyvault_issuancerequest_changelist") + f"?p={cursor}")
    assert [row.pk for row in listed.context["cl"].result_list] == [made.pk]


def test_scope_inbox_shows_and_counts_alarms_of_its_accounts(desk: Desk) -> None:
    """Notices about the installation are for operators of the whole installation."""
    make_merchant("globex")
    every_row(desk)
    noun = admin.site._registry[Notice]
    assert isinstance(noun, ConsoleModelAdmin)
    client = browser(limited(GLOBEX))
    request = client.get("/admin/").wsgi_request
    (unseen,) = noun.attention_items(request)
    assert not unseen.rows.exists()
    assert client.get(address("keyvault_notice_all_seen")).status_code == 403


def test_scope_audit_entries_are_those_of_its_accounts(desk: Desk) -> None:
    make_merchant("globex")
    issue(account("globex", SANDBOX), by=desk.tam)
    issue(desk.sandbox)
    for scope, ends in ((GLOBEX, ("globex/sandbox", "globex/production")), (ALL_SANDBOX, ("/sandbox",))):
        client = browser(make_operator(f"limited-{len(ends)}", Role.AUDITOR, scope=scope))
        page = client.get(address("keyvault_auditentry_changelist"))
        chains = {entry.chain_id for entry in page.context["cl"].result_list}
        assert chains
        assert all(chain.endswith(ends) for chain in chains)
        assert "platform" not in {value for value, _ in page.context["cl"].filter_specs[0].lookup_choices}


ISSUE = {"environment": "production", "kind": "private", "label": "checkout", "delivery": "secret_backend"}


def test_scope_form_cannot_tell_another_merchant_from_an_unknown_one(desk: Desk) -> None:
    """Guarantee: a form's answer does not reveal which merchants exist outside of the scope."""
    make_merchant("globex")
    client, page = browser(limited(GLOBEX)), address("keyvault_issuancerequest_request")
    answers = [client.post(page, {**ISSUE, "merchant": name}) for name in ("acme", "absent")]
    assert [answer.status_code for answer in answers] == [404, 404]
    assert comparable(text_of(answers[0]), "acme") == comparable(text_of(answers[1]), "absent")
    assert not IssuanceRequest.objects.exists()
    assert client.post(page, {**ISSUE, "merchant": "globex"}).status_code == 302


def test_scope_form_knows_no_credential_of_another_merchant(desk: Desk) -> None:
    make_merchant("globex")
    key, _ = issue(desk.production)
    client = browser(limited(GLOBEX))
    pages = {"rotation_rotation_request": "credential_id", "rotation_rotationschedule_save": "credential"}
    for page, name in pages.items():
        answers = []
        for credential in (str(key.credential_id), "crd_absent"):
            sent = {name: credential, "environment": "production", "cryptoperiod_days": "90"}
            answers.append(client.post(address(page), sent))
        assert [answer.status_code for answer in answers] == [400, 400]
        assert comparable(text_of(answers[0]), key.credential_id) == comparable(text_of(answers[1]), "crd_absent")


def test_scope_schedule_of_a_credential_cannot_tell_another_merchant_from_an_unknown_one(desk: Desk) -> None:
    """Guarantee: a merchant beside an own credential does not reveal whether it exists."""
    make_merchant("globex")
    own, _ = issue(account("globex", SANDBOX), by=desk.tam)
    client, page = browser(limited(GLOBEX)), address("rotation_rotationschedule_save")
    terms = {"environment": "sandbox", "cryptoperiod_days": "90", "jitter_days": "0", "lead_days": "0"}
    terms |= {"time_zone": "UTC", "proof": "ack", "quiet_seconds": "2h", "quarantine_seconds": "90"}
    terms["credential"] = str(own.credential_id)
    answers = [client.post(page, {**terms, "merchant": name}) for name in ("acme", "absent")]
    assert [answer.status_code for answer in answers] == [400, 400]
    assert comparable(text_of(answers[0]), "acme") == comparable(text_of(answers[1]), "absent")
    assert client.post(page, {**terms, "merchant": "globex"}).status_code == 302


def test_scope_token_is_created_within_it_only(desk: Desk) -> None:
    """A token is no way to act outside of one's own scope."""
    make_merchant("globex")
    client, page = browser(limited(GLOBEX)), address("keyvault_servicetoken_create")
    form = {"name": "gateway", "scope": "all", "permissions": ["keys:read"], "lifetime_days": "9"}
    assert client.post(page, {**form, "all_merchants": "on"}).status_code == 403
    assert client.post(page, {**form, "merchants": "acme"}).status_code == 400
    assert not ServiceToken.objects.exists()
    assert client.post(page, {**form, "merchants": "globex"}).status_code == 200
    wide, _ = make_token(merchants=["acme", "globex"])
    listed = client.get(address("keyvault_servicetoken_changelist")).context["cl"].result_list
    assert [token.merchants for token in listed] == [["globex"]]
    assert client.post(address("keyvault_servicetoken_revoke", wide.pk)).status_code == 404


@pytest.mark.database
def test_scope_lists_tokens_and_campaigns_of_some_of_its_merchants(desk: Desk) -> None:
    """A row that names several merchants is in the scope if all of them are."""
    for name in ("globex", "initech"):
        make_merchant(name)
        issue(account(name, SANDBOX), by=desk.tam)
    issue(desk.sandbox)
    client = browser(limited(AccessScope(frozenset({"acme", "globex"}))))
    named = (["acme"], ["acme", "globex"], ["globex", "initech"], ["initech"], None)
    for merchants in named:
        make_token(merchants=merchants)
    for merchants in (["acme"], ["globex", "initech"], ["initech"]):
        request_campaign(
            grant(desk.tam, P.ROTATIONS_WRITE),
            environment=SANDBOX,
            merchants=merchants,
            older_than_days=None,
            overrides=PlanOverrides(),
            pace=Pace(),
            reason="yearly",
        )
    tokens = client.get(address("keyvault_servicetoken_changelist")).context["cl"].result_list
    assert sorted(token.merchants for token in tokens) == [["acme"], ["acme", "globex"]]
    campaigns = client.get(address("rotation_campaign_changelist")).context["cl"].result_list
    assert [campaign.selection["merchants"] for campaign in campaigns] == [["acme"]]


CAMPAIGN = {
    "environment": "sandbox",
    "merchants": "globex",
    "per_minute": "20",
    "concurrency": "5",
    "proof": "ack",
    "quiet_seconds": "2h",
    "quarantine_seconds": "90",
    "reason": "yearly",
}


def test_scope_campaign_and_schedule_stay_within_it(desk: Desk) -> None:
    """A selection of all merchants is refused by name; it conceals none."""
    make_merchant("globex")
    issue(account("globex", SANDBOX), by=desk.tam)
    issue(desk.sandbox)
    client = browser(limited(GLOBEX))
    page = address("rotation_campaign_request")
    assert client.post(page, {**CAMPAIGN, "merchants": ""}).status_code == 403
    assert client.post(page, {**CAMPAIGN, "merchants": "acme"}).status_code == 400
    assert not Campaign.objects.exists()
    assert client.post(page, CAMPAIGN).status_code == 302
    save = address("rotation_rotationschedule_save")
    terms = {"environment": "sandbox", "cryptoperiod_days": "90", "jitter_days": "0", "lead_days": "0"}
    terms |= {"time_zone": "UTC", "proof": "ack", "quiet_seconds": "2h", "quarantine_seconds": "90"}
    assert client.post(save, terms).status_code == 403
    assert client.post(save, {**terms, "merchant": "acme"}).status_code == 404
    assert not RotationSchedule.objects.exists()
    assert client.post(save, {**terms, "merchant": "globex"}).status_code == 302


def test_scope_approver_sees_campaigns_and_standing_approvals_within_it_only(desk: Desk) -> None:
    make_merchant("globex")
    issue(account("globex", PRODUCTION), by=desk.tam)
    issue(desk.production)
    rows = every_row(desk)
    own = request_campaign(
        grant(desk.tam, P.ROTATIONS_WRITE),
        environment=PRODUCTION,
        merchants=["globex"],
        older_than_days=None,
        overrides=PlanOverrides(),
        pace=Pace(),
        reason="yearly",
    )
    client = browser(limited(GLOBEX, Role.APPROVER))
    for noun in ("rotation_campaign", "rotation_standingapproval"):
        assert client.post(address(f"{noun}_approve", rows[noun].pk)).status_code == 404
    page = address("rotation_campaign_approve", own.pk)
    answer = client.post(page, {"plan_digest": hidden(client.get(page), "plan_digest")})
    assert answer.status_code == 302


def test_scope_merchant_is_suspended_by_an_operator_of_both_environments(desk: Desk) -> None:
    """The action on a merchant concerns both of its accounts."""
    page = address("keyvault_merchant_suspend", "acme")
    narrow = browser(make_operator("narrow", Role.KEY_ADMINISTRATOR, scope=ACME_SANDBOX))
    assert narrow.post(page).status_code == 404
    assert "Suspend merchant" not in text_of(narrow.get(address("keyvault_merchant_change", "acme")))
    wide = browser(make_operator("wide", Role.KEY_ADMINISTRATOR, scope=AccessScope(frozenset({"acme"}))))
    assert wide.post(page).status_code == 302
    desk.sandbox.merchant.refresh_from_db()
    assert desk.sandbox.merchant.status == "suspended"


@pytest.mark.parametrize(
    "page", ["keyvault_merchant_create", "keyvault_catalogendpoint_add", "rotation_blackoutcalendar_save"]
)
def test_scope_changes_nothing_of_the_installation(desk: Desk, page: str) -> None:
    make_merchant("globex")
    client = browser(limited(GLOBEX))
    for answer in (client.get(address(page)), client.post(address(page))):
        assert answer.status_code == 403
        assert "outside your scope" in text_of(answer)
    assert address(page) not in text_of(client.get("/admin/"))


@pytest.mark.parametrize("environment", [SANDBOX, PRODUCTION])
def test_scope_explanation_knows_no_key_of_another_merchant(desk: Desk, environment: str) -> None:
    make_merchant("globex")
    key, _ = issue(desk.sandbox)
    client, page = browser(limited(GLOBEX)), address("explain")
    described = {"environment": environment, "endpoint": "orders.create"}
    texts = [text_of(client.post(page, {**described, "key_id": each})) for each in (str(key.pk), "A" * 16)]
    assert "no key with this id exists" in texts[0]
    assert comparable(texts[0], key.pk) == comparable(texts[1], "A" * 16)
    assert client.post(page, {"subject": "R" * 22}).status_code == 404


def test_scope_calendar_lists_its_credentials_only(desk: Desk) -> None:
    make_merchant("globex")
    for place in (desk.sandbox, account("globex", SANDBOX)):
        issue(place, label=f"of-{place.merchant_id}", by=desk.tam)
    save_schedule(grant(desk.tam, P.SCHEDULES_WRITE), ScheduleScope(SANDBOX), ScheduleDraft(30))
    page = address("rotation_rotationschedule_calendar")
    client = browser(limited(GLOBEX))
    for query in ("", "?merchant=acme", "?environment=sandbox"):
        assert "of-acme" not in text_of(client.get(page + query)), query


def test_scope_change_ends_the_session_and_applies_to_the_next(desk: Desk) -> None:
    client = browser(desk.auditor)
    assert client.get(address("keyvault_account_change", desk.sandbox.pk)).status_code == 200
    make_merchant("globex")
    set_scope(grant(HOST, P.OPERATORS_WRITE), Operator.objects.get(username="auditor"), GLOBEX)
    assert client.get(address("keyvault_account_change", desk.sandbox.pk)).status_code == 302
    assert browser(desk.auditor).get(address("keyvault_account_change", desk.sandbox.pk)).status_code == 404
