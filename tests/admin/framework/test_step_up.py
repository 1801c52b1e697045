"""Step-up: sensitive actions require a recent second factor, which their own form asks for."""

import re
from typing import Any

import pytest
from django.test import Client

from keyvault.access.limits import SIGN_IN_FAILURES
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.admin.framework import step_up
from keyvault.domain.keys import KeyKind
from keyvault.domain.plaintext import Plaintext
from keyvault.models import Key, Operator, ServiceToken
from keyvault.services.sessions.invitations import prepare_sign_in
from keyvault.services.sessions.second_factors import totp_code
from keyvault.services.sessions.step_up import STEP_UP
from tests.admin.desk import Desk, address, browser, pass_second_factor, text_of, with_password
from tests.admin.framework.test_actions import model_admins
from tests.factories import grant, issue, now, request_key

REVOKE = {"reason": "superseded"}

STEP_UP_ACTIONS = {
    "keyvault_breakglass_confirm",
    "keyvault_breakglass_review",
    "keyvault_credential_compromised",
    "keyvault_issuancerequest_approve",
    "keyvault_issuancerequest_collect",
    "keyvault_key_report-compromise",
    "keyvault_key_revoke",
    "keyvault_operator_disable",
    "keyvault_operator_reset-factors",
    "keyvault_operator_roles",
    "keyvault_operator_same-person",
    "keyvault_operator_scope",
    "keyvault_operatorchange_approve",
    "keyvault_key_show",
    "keyvault_merchant_offboard",
    "keyvault_recipientkey_approve",
    "keyvault_servicetoken_create",
    "keyvault_servicetoken_revoke",
    "keyvault_servicetoken_rotate",
    "rotation_campaign_approve",
    "rotation_retirement_approve",
    "rotation_rotation_approve",
    "rotation_rotation_bypass",
    "rotation_rotation_retire",
    "rotation_rotation_roll-back",
    "rotation_rotation_collect",
    "rotation_standingapproval_approve",
    "keyvault_webhookendpoint_add",
    "keyvault_webhookendpoint_rotate",
}
"""Actions that approve, bypass, revoke, offboard, collect, show, create a token or change an operator.

They are written down apart from the code.
"""


@pytest.fixture
def seed(desk: Desk) -> Plaintext:
    return prepare_sign_in(grant(HOST, P.OPERATORS_ENROLL), Operator.objects.get(username="admin")).totp_seed


@pytest.fixture
def client(desk: Desk, seed: Plaintext) -> Client:
    """An administrator whose second factor is five minutes old."""
    client = with_password(desk.admin)
    pass_second_factor(client, now() - STEP_UP)
    return client


def revoke(client: Client, key: Key, **form: str) -> Any:
    return client.post(address("keyvault_key_revoke", key.pk), {**REVOKE, **form})


def state_of(key: Key) -> str:
    return str(Key.objects.get(pk=key.pk).state)


def test_step_up_actions_are_flagged() -> None:
    flagged = {
        f"{label}_{action.name}"
        for label, model_admin in model_admins()
        for actions in (model_admin.row_actions, model_admin.create_actions)
        for action in actions
        if action.step_up
    }
    shown = {f"{label}_{view.name}" for label, model_admin in model_admins() for view in model_admin.secret_views}
    assert flagged | shown == STEP_UP_ACTIONS


def test_step_up_with_a_recent_factor_asks_for_none(desk: Desk) -> None:
    key, _ = issue(desk.sandbox)
    client = browser(desk.admin)
    assert "second_factor_code" not in text_of(client.get(address("keyvault_key_revoke", key.pk)))
    assert revoke(client, key).status_code == 302
    assert state_of(key) == "deactivated"


def test_step_up_after_five_minutes_asks_for_a_code_in_the_form(desk: Desk, client: Client, seed: Plaintext) -> None:
    key, other = issue(desk.sandbox)[0], issue(desk.sandbox, label="other")[0]
    assert "second_factor_code" in text_of(client.get(address("keyvault_key_revoke", key.pk)))
    assert revoke(client, key, second_factor_code=totp_code(seed, now())).status_code == 302
    assert revoke(client, other).status_code == 302, "the factor is recent now"
    assert (state_of(key), state_of(other)) == ("deactivated", "deactivated")


def test_step_up_by_single_sign_on_is_never_the_button_that_enter_presses(
    desk: Desk, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guarantee: Enter in a field sends the form itself: single sign-on has a form of its own, which returns here."""
    monkeypatch.setattr(step_up, "may_prove_second_factor", lambda operator: True)
    key, _ = issue(desk.sandbox)
    request = request_key(desk.production, by=desk.tam)
    approval = f"{address('approvals_review')}?item=keyvault.issuancerequest:{request.pk}"
    for page in (
        client.get(address("keyvault_key_revoke", key.pk)),
        client.get(address("keyvault_issuancerequest_change", request.pk)),
        client.get(approval),
        client.post(address("incidents"), {"secret_text": key.key_id}),
    ):
        shown = text_of(page)
        forms = [each.partition("</form>")[0] for each in shown.split("<form ")[1:]]
        (form,) = [each for each in forms if 'name="second_factor_code"' in each]
        elsewhere, default = re.findall(r"<button type=\"submit\"([^>]*)>([^<]*)", form)
        assert elsewhere == (' form="single-sign-on" class="button button-plain"', "Confirm with single sign-on")
        assert "form" not in default[0]
        (single_sign_on,) = [each for each in forms if each.startswith('id="single-sign-on" ')]
        assert 'action="/admin/login/sso/"' in single_sign_on
        assert f'name="next" value="{page.wsgi_request.get_full_path()}"' in single_sign_on
        assert single_sign_on.count("<input") == 2


@pytest.mark.parametrize("code", [None, "", "000000"])
def test_step_up_without_the_right_code_changes_nothing_and_keeps_the_input(
    desk: Desk, client: Client, seed: Plaintext, code: str | None
) -> None:
    """The form comes back as it was filled in."""
    form = {"name": "a backend of ours", "scope": "sandbox", "permissions": ["keys:verify"], "lifetime_days": "17"}
    response = client.post(
        address("keyvault_servicetoken_create"), form if code is None else {**form, "second_factor_code": code}
    )
    assert response.status_code == 403
    shown = text_of(response)
    assert 'value="a backend of ours"' in shown
    assert 'value="17"' in shown
    assert "second_factor_code" in shown
    assert not ServiceToken.objects.exists()


def test_step_up_guesses_are_locked(desk: Desk, client: Client, seed: Plaintext) -> None:
    """Somebody at an unlocked screen cannot try codes. A form without a code is no guess."""
    key, _ = issue(desk.sandbox)
    for _ in range(SIGN_IN_FAILURES):
        assert revoke(client, key).status_code == 403
    statuses = [revoke(client, key, second_factor_code="000000").status_code for _ in range(SIGN_IN_FAILURES)]
    assert statuses == [403] * (SIGN_IN_FAILURES - 1) + [429]
    locked = revoke(client, key, second_factor_code=totp_code(seed, now()))
    assert (locked.status_code, int(locked["Retry-After"]) > 0) == (429, True)
    assert state_of(key) == "active"


def test_step_up_of_other_actions_is_not_required(desk: Desk, client: Client) -> None:
    key, _ = issue(desk.sandbox)
    assert client.post(address("keyvault_key_suspend", key.pk)).status_code == 302


def test_step_up_for_a_shown_key_returns_to_its_page(desk: Desk, client: Client, seed: Plaintext) -> None:
    key, text = issue(desk.sandbox, kind=KeyKind.PUBLIC)
    page = address("keyvault_key_show", key.pk)
    response = client.get(page)
    assert response["Location"].startswith("/admin/second-factor/?next=")
    code = {"second_factor_code": totp_code(seed, now())}
    assert client.post(response["Location"], code)["Location"] == page
    assert text.reveal() in text_of(client.get(page))
