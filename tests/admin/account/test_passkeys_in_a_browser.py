"""Passkeys in a real browser with a virtual authenticator: enrolled with an invitation, then used to sign in."""

import json
from pathlib import Path

import pytest
from pytest_django.live_server_helper import LiveServer

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.access.roles import Role
from keyvault.access.scopes import EVERYWHERE
from keyvault.models import AuditEntry, Operator
from keyvault.services.operators.operators import create_operator
from keyvault.services.sessions.invitations import invite
from keyvault.services.sessions.second_factors import list_second_factors
from tests.factories import PASSWORD, grant
from tests.servers.chromium import Chromium, chromium
from tests.servers.throwaway import MissingServerError

PASSKEY_BUTTON = "[data-passkey]"


@pytest.mark.long
@pytest.mark.django_db(transaction=True)
def test_passkey_is_enrolled_and_signs_in(live_server: LiveServer, tmp_path: Path) -> None:
    allowed = grant(HOST, P.OPERATORS_ENROLL)
    row = create_operator(allowed, username="new", roles=[Role.AUDITOR], scope=EVERYWHERE, password=None)
    token = invite(allowed, row)
    try:
        with chromium(tmp_path) as browser:
            browser.add_authenticator()
            browser.open(f"{live_server.url}/admin/invitation/?token={token.reveal()}")
            _enroll(browser)
            browser.click(".who > summary")
            browser.click("#logout-form button")
            browser.wait_for_title("You are signed out")
            browser.open(f"{live_server.url}/admin/")
            browser.write("[name=username]", "new")
            browser.write("[name=password]", PASSWORD)
            browser.click("#login-form button")
            browser.wait_for_title("Second factor")
            browser.click(PASSKEY_BUTTON)
            browser.wait_for_title("Overview")
    except MissingServerError as missing:
        pytest.skip(missing.reason)
    passkey, _ = list_second_factors(Operator.objects.get())
    assert passkey.type == "webauthn"
    assert passkey.last_used_at is not None
    events = [json.loads(bytes(entry.body)) for entry in AuditEntry.objects.order_by("pk")]
    assert [(each["event"], each["details"].get("factor")) for each in events][-4:] == [
        ("operator.enrolled", "webauthn"),
        ("operator.signed_out", None),
        ("operator.password_accepted", None),
        ("operator.signed_in", "webauthn"),
    ]


def _enroll(browser: Chromium) -> None:
    browser.wait_for_title("Welcome, new")
    browser.write("[name=password]", PASSWORD)
    browser.write("[name=password_again]", PASSWORD)
    browser.click(PASSKEY_BUTTON)
    browser.wait_for_title("Recovery codes")
    browser.click("main .buttons a")
    browser.wait_for_title("Overview")
