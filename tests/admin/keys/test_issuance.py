"""Issuance in the console: two persons, one digest, and a key shown once to one of them."""

import logging
import re
from datetime import datetime
from typing import Any

import pytest
from django.contrib.messages import get_messages

from keyvault.access.permissions import Permission as P
from keyvault.domain.issuance import COLLECT_WITHIN, Delivery, IssuanceState
from keyvault.domain.keys import KeyKind
from keyvault.models import BreakGlass, IssuanceRequest
from keyvault.services.issuance.requests import reject_issuance, request_issuance
from keyvault.services.keys.records import prove_service_token
from keyvault.services.maintenance import discard_due
from tests.admin.desk import SHAPED, Desk, address, browser, dump, hidden, text_of
from tests.factories import (
    PRODUCTION,
    SANDBOX,
    approve,
    grant,
    issue_request,
    make_token,
    now,
    request_key,
)

S = IssuanceState


def fresh(row: IssuanceRequest) -> IssuanceRequest:
    return IssuanceRequest.objects.get(pk=row.pk)


def issued(desk: Desk, environment: str = PRODUCTION) -> IssuanceRequest:
    """Request as `tam` to be shown once, approve where necessary, and issue as the worker does."""
    row = request_key(
        desk.production if environment == PRODUCTION else desk.sandbox, delivery=Delivery.SHOW_ONCE, by=desk.tam
    )
    if row.approvals_needed:
        approve(row, by=desk.approver)
    issue_request(row)
    return row


def ask(desk: Desk, client: Any, **changed: Any) -> Any:
    fields = {"merchant": "acme", "environment": "production", "kind": "private", "label": "checkout"}
    fields |= {"delivery": "show_once", **changed}
    return client.post(address("keyvault_issuancerequest_request"), fields)


# -------------------------------------------------------------------------------------------------- requests


def test_issuance_requested_in_production_awaits_a_second_person(desk: Desk) -> None:
    answer = ask(desk, browser(desk.tam))
    row = IssuanceRequest.objects.get()
    assert answer["Location"] == address("keyvault_issuancerequest_change", row.pk)
    assert (row.state, row.requester_person) == (S.PENDING, desk.tam.person)


def test_issuance_requested_in_sandbox_is_approved_immediately(desk: Desk) -> None:
    ask(desk, browser(desk.tam), environment="sandbox")
    assert IssuanceRequest.objects.get().state == S.APPROVED


@pytest.mark.parametrize(
    ("field", "value"),
    [("label", ""), ("label", "two\x07bells"), ("expires_in_days", "0"), ("kind", "secret"), ("environment", "moon")],
)
def test_issuance_requested_with_an_invalid_field_shows_the_error(desk: Desk, field: str, value: str) -> None:
    answer = ask(desk, browser(desk.tam), **{field: value})
    assert answer.status_code == 400
    assert 'class="errorlist"' in text_of(answer)
    assert not IssuanceRequest.objects.exists()


# -------------------------------------------------------------------------------------------------- approvals


def test_issuance_approval_page_shows_every_field_of_the_plan(desk: Desk) -> None:
    """Merchant, environment, kind, label, delivery, expiry and the digest are on the page."""
    row = request_key(desk.production, by=desk.tam, label="night-batch", expires_in_days=77)
    text = text_of(browser(desk.approver).get(address("keyvault_issuancerequest_approve", row.pk)))
    for value in ("acme", "production", "private", "night-batch", "secret backend", "77", row.plan_digest, "tam"):
        assert value in text


def test_issuance_approved_after_a_rejection_is_a_conflict(desk: Desk) -> None:
    """The second approver sees the decision and changes nothing."""
    row = request_key(desk.production, by=desk.tam)
    client = browser(desk.approver)
    digest = hidden(client.get(address("keyvault_issuancerequest_approve", row.pk)), "plan_digest")
    reject_issuance(grant(desk.admin, P.ISSUANCE_REJECT, desk.production), fresh(row), "not now")
    answer = client.post(address("keyvault_issuancerequest_approve", row.pk), {"plan_digest": digest})
    assert answer.status_code == 409
    assert "already rejected" in text_of(answer)
    assert fresh(row).state == S.REJECTED


def test_issuance_rejected_keeps_the_reason(desk: Desk) -> None:
    row = request_key(desk.production, by=desk.tam)
    client = browser(desk.approver)
    page = address("keyvault_issuancerequest_reject", row.pk)
    assert client.post(page, {"why": ""}).status_code == 400
    assert client.post(page, {"why": "unknown project"}).status_code == 302
    assert fresh(row).state == S.REJECTED


def test_issuance_is_withdrawn_only_by_its_requester(desk: Desk) -> None:
    row = request_key(desk.production, by=desk.tam)
    page = address("keyvault_issuancerequest_withdraw", row.pk)
    assert browser(desk.admin).post(page).status_code == 409
    assert browser(desk.tam).post(page).status_code == 302
    assert fresh(row).state == S.WITHDRAWN


def test_issuance_page_offers_the_requester_to_withdraw_and_another_person_to_decide(desk: Desk) -> None:
    """Guarantee: the requester's banner offers Withdraw, and another operator's offers Reject."""
    row = request_key(desk.production, by=desk.admin)
    url = {name: address(f"keyvault_issuancerequest_{name}", row.pk) for name in ("change", "reject", "withdraw")}
    for operator, offered, other in ((desk.admin, "withdraw", "reject"), (desk.approver, "reject", "withdraw")):
        text = text_of(browser(operator).get(url["change"]))
        assert url[offered] in text
        assert url[other] not in text
        (banner,) = re.findall(r'<section class="banner[^>]*>(.*?)</section>', text, re.DOTALL)
        assert (url["withdraw"] in banner) == (operator == desk.admin)


# ----------------------------------------------------------------------------------------- requests by services

RECIPIENT = "CQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"


def asked_by_service(desk: Desk, delivery: Delivery = Delivery.SEALED, at: datetime | None = None) -> IssuanceRequest:
    """Request with a token that `admin` created."""
    service = prove_service_token(make_token(P.ISSUANCE_REQUEST, by=desk.admin)[1].reveal(), now())
    assert service is not None
    place = desk.production if delivery is Delivery.SEALED else desk.sandbox
    return request_issuance(
        grant(service, P.ISSUANCE_REQUEST, place, at=at),
        place,
        kind=KeyKind.PRIVATE,
        label="checkout",
        delivery=delivery,
        recipient_public_key=RECIPIENT if delivery is Delivery.SEALED else "",
    )


def test_issuance_approver_sees_the_recipient_of_a_sealed_key(desk: Desk) -> None:
    """The recipient is part of what is approved, so the page shows it."""
    row = asked_by_service(desk)
    text = text_of(browser(desk.approver).get(address("keyvault_issuancerequest_approve", row.pk)))
    for value in (RECIPIENT, "sealed", "service gateway", row.plan_digest):
        assert value in text
    page = address("keyvault_issuancerequest_approve", row.pk)
    assert browser(desk.admin).post(page, {"plan_digest": row.plan_digest}).status_code == 409, (
        "this person created the token"
    )
    assert browser(desk.approver).post(page, {"plan_digest": row.plan_digest}).status_code == 302


def test_issuance_sealed_cannot_be_requested_in_the_console(desk: Desk) -> None:
    assert ask(desk, browser(desk.tam), delivery="sealed").status_code == 400
    assert not IssuanceRequest.objects.exists()


def test_issuance_requested_by_a_service_is_not_collectable_in_the_console(desk: Desk) -> None:
    """Not even the creator of the token can collect it."""
    row = approve(asked_by_service(desk, Delivery.SHOW_ONCE))
    issue_request(row)
    client = browser(desk.admin)
    page = address("keyvault_issuancerequest_collect", row.pk)
    text = text_of(client.get(address("keyvault_issuancerequest_change", row.pk)))
    assert page not in text
    assert "Only the requesting service" in text
    answer = client.post(page)
    assert answer.status_code == 409
    assert not SHAPED.search(text_of(answer))
    assert page not in text_of(client.get("/admin/"))


def test_issuance_discarded_shows_it(desk: Desk) -> None:
    row = approve(asked_by_service(desk, Delivery.SHOW_ONCE, at=now() - COLLECT_WITHIN))
    issue_request(row, at=now() - COLLECT_WITHIN)
    discard_due()
    text = text_of(browser(desk.auditor).get(address("keyvault_issuancerequest_change", row.pk)))
    assert "badge-burned" in text
    assert "The key was not collected in time" in text


def test_issuance_of_a_key_in_the_secret_backend_says_who_reads_it(desk: Desk) -> None:
    """The merchant's services read such a key there: no operator has to collect it, and the banner offers no button."""
    row = request_key(desk.production, by=desk.tam)
    client = browser(desk.approver)
    url = address("keyvault_issuancerequest_approve", row.pk)
    answer = client.post(url, {"plan_digest": hidden(client.get(url), "plan_digest")}, follow=True)
    assert "Approved. The worker issues the key now." in text_of(answer)
    assert "collect" not in text_of(answer)
    issue_request(fresh(row))
    where = "Issued. The merchant&#x27;s services read the key in the secret backend: it need not be collected."
    for operator, who in ((desk.tam, "You requested the key, so only you"), (desk.approver, "Only the requester")):
        text = text_of(browser(operator).get(address("keyvault_issuancerequest_change", row.pk)))
        assert f"{where} {who} can collect it, once." in text
        assert '<dt>Collected</dt><dd><span class="quiet">not required</span></dd>' in text
        (banner,) = re.findall(r'<section class="banner.*?</section>', text, re.DOTALL)
        assert "Collect key" not in banner
    button = f'<a class="button" href="{address("keyvault_issuancerequest_collect", row.pk)}">Collect key'
    assert button in text_of(browser(desk.tam).get(address("keyvault_issuancerequest_change", row.pk)))


def test_issuance_of_a_public_key_leads_to_its_page_instead_of_a_collection(desk: Desk) -> None:
    row = request_key(desk.sandbox, kind=KeyKind.PUBLIC, by=desk.tam)
    issue_request(row)
    row = fresh(row)
    text = text_of(browser(desk.tam).get(address("keyvault_issuancerequest_change", row.pk)))
    assert "Issued. Its page shows a public key at any time: it need not be collected." in text
    assert address("keyvault_key_change", row.key_id) in text
    assert address("keyvault_issuancerequest_collect", row.pk) not in text


# ------------------------------------------------------------------------------------------------- collection


@pytest.mark.parametrize("environment", [SANDBOX, PRODUCTION])
def test_issuance_collected_key_is_shown_once(desk: Desk, environment: str, caplog: pytest.LogCaptureFixture) -> None:
    """The key is in the body of one POST answer and nowhere else.

    No redirect, message, cookie, session, log line or row has it, no cache may store it, and a reload does not show it
    again.
    """
    caplog.set_level(logging.DEBUG)
    row = issued(desk, environment)
    client = browser(desk.tam)
    page = address("keyvault_issuancerequest_collect", row.pk)
    before = client.get(page)
    assert not SHAPED.search(text_of(before))
    assert ("break-glass" in text_of(before)) == (environment == PRODUCTION)
    answer = client.post(page)
    assert answer.status_code == 200
    assert ('class="is-production"' in text_of(answer)) == (environment == PRODUCTION)
    assert "no-store" in answer["Cache-Control"]
    (secret,) = set(SHAPED.findall(text_of(answer)))
    assert secret not in str(answer.headers)
    assert secret not in client.cookies.output()
    assert secret not in str(dict(client.session))
    assert not list(get_messages(answer.wsgi_request))
    assert secret not in dump()
    assert secret not in caplog.text
    again = client.post(page)
    assert again.status_code == 409
    assert "collected already" in text_of(again)
    for elsewhere in (page, address("keyvault_issuancerequest_change", row.pk), "/admin/"):
        assert not SHAPED.search(text_of(client.get(elsewhere)))
    assert not SHAPED.search(text_of(again))


def test_issuance_collected_by_another_operator_is_refused(desk: Desk) -> None:
    """Neither the approver nor any other operator sees the key."""
    row = issued(desk)
    page = address("keyvault_issuancerequest_collect", row.pk)
    for operator, status in ((desk.approver, 403), (desk.auditor, 403), (desk.responder, 403), (desk.admin, 409)):
        client = browser(operator)
        for answer in (client.get(page), client.post(page)):
            assert answer.status_code == status
            assert not SHAPED.search(text_of(answer))
    assert fresh(row).state == S.ISSUED


def test_issuance_collected_in_production_is_break_glass(desk: Desk) -> None:
    """A production key shown to a person stays listed until a second person has reviewed it."""
    row = issued(desk)
    assert not BreakGlass.objects.exists()
    browser(desk.tam).post(address("keyvault_issuancerequest_collect", row.pk))
    act = BreakGlass.objects.get()
    assert (act.subject, act.operator.username, act.reviewed_at) == (row.pk, "tam", None)
    assert "Break-glass actions to review" in text_of(browser(desk.approver).get("/admin/"))


def test_issuance_collected_before_it_is_issued_is_a_conflict(desk: Desk) -> None:
    row = request_key(desk.production, by=desk.tam, delivery=Delivery.SHOW_ONCE)
    assert browser(desk.tam).post(address("keyvault_issuancerequest_collect", row.pk)).status_code == 409
    assert fresh(row).state == S.PENDING


def test_issuance_in_progress_shows_it(desk: Desk) -> None:
    row = request_key(desk.sandbox, by=desk.tam)
    text = text_of(browser(desk.tam).get(address("keyvault_issuancerequest_change", row.pk)))
    assert '<noscript><meta http-equiv="refresh" content="5; url=?refreshed=">' in text
