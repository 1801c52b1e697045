"""The operator's own sessions in the console, and the session's cookie."""

import json
from datetime import timedelta
from typing import Any
from urllib.parse import quote

import pytest
from django.test import Client

from keyvault.access.limits import SESSION_IDLE_SECONDS
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.models import AuditEntry, ConsoleSession, Operator
from keyvault.services.sessions.invitations import prepare_sign_in
from keyvault.services.sessions.second_factors import (
    PASSKEY,
    NewFactor,
    add_second_factor,
    list_second_factors,
    totp_code,
)
from keyvault.services.sessions.store import session_id
from tests.admin.desk import Desk, address, browser, dump, pass_second_factor, text_of, with_password
from tests.factories import PASSWORD, grant, issue, now

LOGIN, FACTOR = "/admin/login/", "/admin/second-factor/"
FIREFOX = "Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101 Firefox/128.0"

pytestmark = pytest.mark.django_db


def row_of(client: Client) -> ConsoleSession:
    return ConsoleSession.objects.get(pk=session_id(client.cookies["session"].value))


def is_known(client: Client) -> bool:
    return ConsoleSession.objects.filter(pk=session_id(client.cookies["session"].value)).exists()


def grow_older(**age: float) -> None:
    for row in ConsoleSession.objects.all():
        ConsoleSession.objects.filter(pk=row.pk).update(
            last_used_at=row.last_used_at - timedelta(**age), expire_date=row.expire_date - timedelta(**age)
        )


@pytest.mark.database
def test_link_from_outside_leads_to_sign_in_and_then_to_the_page(desk: Desk) -> None:
    """An alarm's link opens its page after the sign-in, and opening it signed out writes no row."""
    key, _ = issue(desk.sandbox)
    page = address("keyvault_key_change", key.pk)
    tam = prepare_sign_in(grant(HOST, P.OPERATORS_ENROLL), Operator.objects.get(username="tam"))
    client, before = Client(), dump()
    to_sign_in: Any = client.get(page)
    assert (to_sign_in.status_code, to_sign_in["Location"]) == (302, f"{LOGIN}?next={quote(page, safe='')}")
    assert f'name="next" value="{page}"' in text_of(client.get(to_sign_in["Location"]))
    assert dump() == before
    fields = {"username": "tam", "password": tam.password.reveal(), "next": page}
    to_factor: Any = client.post(to_sign_in["Location"], fields)
    assert to_factor["Location"].startswith(FACTOR)
    assert f'name="next" value="{page}"' in text_of(client.get(to_factor["Location"]))
    code = totp_code(tam.totp_seed, now())
    signed_in: Any = client.post(FACTOR, {"second_factor_code": code, "next": page})
    assert (signed_in.status_code, signed_in["Location"]) == (302, page)
    assert client.get(page).status_code == 200


def test_session_cookie_follows_links_and_forged_forms_get_neither_cookie(desk: Desk) -> None:
    """The session's cookie is sent with a link of another site, the token of forms never is."""
    client = Client()
    answer: Any = client.post(LOGIN, {"username": "tam", "password": PASSWORD})
    cookies = answer.cookies
    assert (cookies["session"]["samesite"], cookies["session"]["httponly"]) == ("Lax", True)
    assert (cookies["session"]["max-age"], cookies["session"]["expires"]) == ("", "")
    assert cookies["csrf"]["samesite"] == "Strict"
    pass_second_factor(client, now())
    strict = Client(enforce_csrf_checks=True)
    strict.cookies["session"] = client.cookies["session"].value
    assert strict.get("/admin/").status_code == 200
    assert strict.post(address("keyvault_consolesession_end", row_of(client).pk)).status_code == 403


def test_session_unused_for_fifteen_minutes_leads_to_sign_in(desk: Desk) -> None:
    client = browser(desk.tam)
    assert client.get("/admin/").status_code == 200
    grow_older(seconds=SESSION_IDLE_SECONDS)
    assert client.get("/admin/").status_code == 302


def test_session_is_extended_by_a_page_but_not_by_one_that_reloads_itself(desk: Desk) -> None:
    """An unattended page that reloads itself does not keep its operator signed in."""
    client = browser(desk.tam)
    grow_older(minutes=10)
    old = row_of(client)
    client.get("/admin/?refreshed")
    assert row_of(client).expire_date == old.expire_date
    client.get("/admin/", headers={"user-agent": FIREFOX}, REMOTE_ADDR="192.0.2.7")
    used = row_of(client)
    assert used.expire_date > old.expire_date
    assert (used.address, used.browser) == ("192.0.2.7", "Firefox 128 on Linux")


def test_sessions_page_lists_the_operators_own_and_marks_the_current_one(desk: Desk) -> None:
    here, there, other = browser(desk.tam), browser(desk.tam), browser(desk.approver)
    grow_older(minutes=2)
    for client, host in ((here, "192.0.2.1"), (there, "192.0.2.2")):
        client.get("/admin/", headers={"user-agent": FIREFOX}, REMOTE_ADDR=host)
    text = text_of(here.get(address("keyvault_consolesession_changelist")))
    assert "Firefox 128 on Linux" in text
    assert ("192.0.2.1" in text, "192.0.2.2" in text) == (True, True)
    assert text.count('<span class="badge badge-current badge-good">') == 1
    assert text.count('<span class="badge badge-active badge-good">') == 1
    assert row_of(other).pk not in text
    detail = address("keyvault_consolesession_change", row_of(here).pk)
    assert "Sign out to end it" in text_of(here.get(detail))
    assert "End session" not in text_of(here.get(detail))
    assert other.get(detail).status_code == 404


def test_session_ended_elsewhere_is_signed_out_there(desk: Desk) -> None:
    here, there, other = browser(desk.tam), browser(desk.tam), browser(desk.approver)
    end = address("keyvault_consolesession_end", row_of(there).pk)
    assert other.get(end).status_code == 404
    assert other.post(end).status_code == 404
    assert here.get(end).status_code == 200
    assert here.post(end).status_code == 302
    assert [here.get("/admin/").status_code, there.get("/admin/").status_code] == [200, 302]
    assert AuditEntry.objects.filter(event="session.ended").count() == 1


def test_other_sessions_are_ended_from_the_page_of_own_sessions(desk: Desk) -> None:
    """Only the requesting session remains, and no session of another operator ends."""
    here, there, also, other = browser(desk.tam), browser(desk.tam), with_password(desk.tam), browser(desk.approver)
    end = address("keyvault_consolesession_end-others", row_of(here).pk)
    assert f'href="{end}"' in text_of(here.get(address("keyvault_consolesession_changelist")))
    assert "End all other sessions" in text_of(here.get(end))
    assert "Other sessions that have ended: 2." in text_of(here.post(end, follow=True))
    assert [client.get("/admin/").status_code for client in (here, there, other)] == [200, 302, 200]
    assert not is_known(also)
    body = json.loads(bytes(AuditEntry.objects.get(event="session.others_ended").body))
    assert (body["actor"], body["details"]) == ("operator:tam", {"sessions_ended": 2})


def test_other_sessions_are_kept_without_the_current_one(desk: Desk) -> None:
    """The page of another own session does not offer to end the current one with the others."""
    here, there, other = browser(desk.tam), browser(desk.tam), browser(desk.approver)
    end = address("keyvault_consolesession_end-others", row_of(there).pk)
    assert "not available" in text_of(here.get(end))
    assert other.post(end).status_code == 404
    assert [client.get("/admin/").status_code for client in (here, there)] == [200, 200]


def test_session_that_removed_a_factor_stays_and_the_others_are_no_longer_listed(desk: Desk) -> None:
    """The list shows what is open: the operator who removes a factor sees that the other browsers are signed out."""
    row = Operator.objects.get(username="tam")
    prepare_sign_in(grant(HOST, P.OPERATORS_ENROLL), row)
    add_second_factor(grant(desk.tam, P.SESSIONS_WRITE), row, NewFactor(PASSKEY, {"name": "key"}))
    here, there = browser(desk.tam), browser(desk.tam)
    factor = list_second_factors(row)[0]
    assert here.post(f"/admin/account/second-factors/{factor.pk}/remove/").status_code == 302
    page = text_of(here.get(address("keyvault_consolesession_changelist")))
    assert (page.count("badge-current"), page.count("badge-active")) == (1, 0)
    assert [client.get("/admin/").status_code for client in (here, there)] == [200, 302]


def test_session_that_has_expired_is_not_listed(desk: Desk) -> None:
    here, there = browser(desk.tam), browser(desk.tam)
    gone = row_of(there).pk
    ConsoleSession.objects.filter(pk=gone).update(expire_date=now())
    assert gone not in text_of(here.get(address("keyvault_consolesession_changelist")))
    assert here.get(address("keyvault_consolesession_change", gone)).status_code == 404
