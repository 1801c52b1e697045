"""The page of the second factor, and the pages of an operator's own factors."""

import base64
import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.admin.framework.step_up import check_factor
from keyvault.domain.plaintext import Plaintext
from keyvault.models import AuditEntry, ConsoleSession, Operator
from keyvault.services.sessions.invitations import prepare_sign_in
from keyvault.services.sessions.second_factors import (
    PASSKEY,
    NewFactor,
    add_second_factor,
    list_second_factors,
    new_recovery_codes,
    totp_code,
)
from keyvault.services.sessions.step_up import STEP_UP
from tests.admin.desk import Desk, browser, pass_second_factor, text_of, with_password
from tests.factories import grant, now

PAGE = "/admin/second-factor/"
FACTORS = "/admin/account/second-factors/"


@pytest.fixture
def tam(desk: Desk) -> Operator:
    row: Operator = Operator.objects.get(username="tam")
    return row


@pytest.fixture
def seed(tam: Operator) -> Plaintext:
    return prepare_sign_in(grant(HOST, P.OPERATORS_ENROLL), tam).totp_seed


def answer(client: Client, code: str, **more: str) -> Any:
    return client.post(PAGE, {"second_factor_code": code, **more})


def last_event() -> dict[str, Any]:
    body: dict[str, Any] = json.loads(bytes(AuditEntry.objects.latest("pk").body))
    return body


def test_second_factor_completes_the_sign_in(desk: Desk, tam: Operator, seed: Plaintext) -> None:
    client = with_password(desk.tam)
    before = client.session.session_key
    assert client.get("/admin/")["Location"] == f"{PAGE}?next=%2Fadmin%2F"
    response = answer(client, totp_code(seed, now()), next="/admin/keyvault/key/")
    assert (response.status_code, response["Location"]) == (302, "/admin/keyvault/key/")
    cookie = response.cookies["device"]
    assert (cookie["path"], cookie["httponly"], cookie["samesite"]) == ("/admin/", True, "Lax")
    assert 0 < cookie["max-age"] <= 90 * 24 * 60 * 60
    assert client.session.session_key != before, "a session key from before the sign-in is not a signed-in one"
    assert client.get("/admin/").status_code == 200
    assert last_event()["event"] == "operator.signed_in"


def test_second_factor_shows_the_last_sign_in(desk: Desk, tam: Operator, seed: Plaintext) -> None:
    answer(with_password(desk.tam), totp_code(seed, now()))
    last = Operator.objects.get(username="tam").last_login
    assert last is not None
    client = with_password(desk.tam)
    answer(client, totp_code(seed, now() + timedelta(seconds=30)))
    assert f"Your last sign-in was on {last:%Y-%m-%d at %H:%M} UTC." in text_of(client.get("/admin/"))


@pytest.mark.parametrize("is_step_up", [False, True])
def test_session_ended_while_its_second_factor_is_checked_stays_ended(
    desk: Desk, tam: Operator, seed: Plaintext, monkeypatch: pytest.MonkeyPatch, *, is_step_up: bool
) -> None:
    """Guarantee: a session that was ended does not come back with a new key."""
    client = browser(desk.tam) if is_step_up else with_password(desk.tam)

    def check(*arguments: Any) -> str:
        device = check_factor(*arguments)
        ConsoleSession.objects.all().delete()
        return device

    monkeypatch.setattr("keyvault.admin.account.second_factor.check_factor", check)
    assert answer(client, totp_code(seed, now())).status_code == 400
    assert client.get("/admin/")["Location"].startswith("/admin/login/")
    assert not ConsoleSession.objects.exists()


def test_second_factor_wrong_code_opens_nothing(desk: Desk, tam: Operator, seed: Plaintext) -> None:
    client = with_password(desk.tam)
    response = answer(client, "000000")
    assert response.status_code == 403
    assert "Wrong code" in text_of(response)
    assert client.get("/admin/").status_code == 302
    statuses = [answer(client, "000000").status_code for _ in range(9)]
    assert statuses == [403] * 8 + [429]
    locked = answer(client, totp_code(seed, now()))
    assert (locked.status_code, 0 < int(locked["Retry-After"]) <= 1800) == (429, True)


_ENORMOUS = 10**15
"""Size of a buffer that no machine allocates, in bytes."""


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _response(**changes: Any) -> str:
    """Return a browser's response for a passkey, as JSON, with other values in these members."""
    parts = {"clientDataJSON": _encode(b"{}"), "authenticatorData": "AA", "signature": "AA"}
    whole = {"id": "AA", "rawId": "AA"}
    return json.dumps(
        {name: changes.get(name, value) for name, value in whole.items()}
        | {"response": {name: changes.get(name, value) for name, value in parts.items()}}
    )


@pytest.mark.parametrize(
    "credential",
    [
        *("", "no JSON", "null", "[]", "{}", '{"id": 1}', '{"rawId": "AA", "response": {}}'),
        *(pytest.param("[" * 60_000, id="deep"), pytest.param(r'{"id": "\u0000"}', id="NUL")),
        pytest.param(_response(id=_ENORMOUS, rawId=_ENORMOUS), id="number as id"),
        pytest.param(_response(authenticatorData=_ENORMOUS), id="number as data"),
        pytest.param(
            _response(clientDataJSON=_encode(b'{"type": "webauthn.get", "challenge": %d}' % _ENORMOUS)),
            id="number as challenge",
        ),
    ],
)
def test_second_factor_malformed_passkey_is_refused(desk: Desk, tam: Operator, credential: str) -> None:
    """The browser's response is untrusted: no text of it ends in a fault of the server."""
    add_second_factor(grant(desk.tam, P.SESSIONS_WRITE), tam, NewFactor(PASSKEY, {"name": "laptop"}))
    client = with_password(desk.tam)
    assert client.post(PAGE, {"second_factor_credential": credential}).status_code == 403


@pytest.mark.parametrize(
    "target", ["https://evil.example/", "//evil.example/admin/", "/v1/docs", "javascript:alert(1)"]
)
def test_second_factor_continues_within_the_console_only(
    desk: Desk, tam: Operator, seed: Plaintext, target: str
) -> None:
    client = with_password(desk.tam)
    assert answer(client, totp_code(seed, now()), next=target)["Location"] == "/admin/"


def test_second_factor_of_an_operator_without_one_names_the_invitation(desk: Desk) -> None:
    """A password alone never enrolls a second factor."""
    client = with_password(desk.tam)
    assert "Ask the host administrator for an invitation" in text_of(client.get(PAGE))
    assert answer(client, "123456").status_code == 403
    assert client.post(f"{FACTORS}totp/").status_code == 302


def test_second_factor_page_requires_the_password(db: None) -> None:
    for response in (Client().get(PAGE), Client().post(PAGE, {"second_factor_code": "123456"})):
        assert response["Location"] == "/admin/login/"


def test_second_factor_ends_with_the_next_password(desk: Desk, tam: Operator, seed: Plaintext) -> None:
    """A new sign-in in the same browser requires the second factor again."""
    client = browser(desk.tam)
    prepared = prepare_sign_in(grant(HOST, P.OPERATORS_ENROLL), Operator.objects.get(username="tam"))
    client.post("/admin/login/", {"username": "tam", "password": prepared.password.reveal()})
    assert client.get("/admin/").status_code == 302


def test_sign_out_is_possible_with_the_password_alone(desk: Desk) -> None:
    client = with_password(desk.tam)
    assert client.post("/admin/logout/").status_code == 200
    assert client.get(PAGE)["Location"] == "/admin/login/"


# ---------------------------------------------------------------------------------------------------- own factors


def test_own_factors_require_a_recent_second_factor(desk: Desk, tam: Operator, seed: Plaintext) -> None:
    """Somebody at an unlocked screen cannot add a factor of their own."""
    client = with_password(desk.tam)
    pass_second_factor(client, now() - STEP_UP)
    for name in ("second_factors", "add_totp", "add_passkey"):
        assert client.get(reverse(f"admin:{name}"))["Location"].startswith(PAGE), name
    for path in ("totp/", "recovery-codes/", f"{list_second_factors(tam)[0].pk}/remove/"):
        assert client.post(FACTORS + path)["Location"].startswith(PAGE), path
    assert answer(client, totp_code(seed, now()), next=FACTORS)["Location"] == FACTORS
    assert last_event()["event"] == "operator.second_factor_confirmed"
    assert client.get(FACTORS).status_code == 200


def test_own_authenticator_app_is_added_with_its_code(desk: Desk, tam: Operator) -> None:
    client = browser(desk.tam)
    shown = text_of(client.get(f"{FACTORS}totp/"))
    assert "<svg" in shown
    new = re.search(r"<code>([A-Z2-7]{32})</code>", shown)
    assert new is not None
    assert new[1] in text_of(client.post(f"{FACTORS}totp/", {"second_factor_code": "000000"})), "the same seed again"
    code = totp_code(Plaintext(new[1]), datetime.now(UTC))
    assert client.post(f"{FACTORS}totp/", {"second_factor_code": code})["Location"] == FACTORS
    assert [factor.type for factor in list_second_factors(tam)] == ["totp"]
    assert "Authenticator" in text_of(client.get(FACTORS))
    assert answer(with_password(desk.tam), code).status_code == 403, "the code is used up"
    later = datetime.now(UTC) + timedelta(seconds=30)
    assert answer(with_password(desk.tam), totp_code(Plaintext(new[1]), later)).status_code == 302


def test_own_recovery_codes_are_shown_once(desk: Desk, tam: Operator, seed: Plaintext) -> None:
    client = browser(desk.tam)
    response = client.post(f"{FACTORS}recovery-codes/")
    codes = re.findall(r"<code>(\d{4} \d{4})</code>", text_of(response))
    assert len(codes) == 10
    assert response["Cache-Control"] == "no-store"
    assert codes[0] not in text_of(client.get(FACTORS))
    assert answer(with_password(desk.tam), codes[0]).status_code == 302


def test_own_recovery_codes_replaced_end_other_sessions(desk: Desk, tam: Operator, seed: Plaintext) -> None:
    """Guarantee: a session that an attacker opened with a lost code ends when the codes are replaced."""
    client, other = browser(desk.tam), browser(desk.tam)
    for _ in range(2):
        assert client.post(f"{FACTORS}recovery-codes/").status_code == 200
    assert (last_event()["event"], last_event()["details"]["replaced"]) == ("operator.second_factor_added", True)
    assert client.get(FACTORS).status_code == 200
    assert other.get("/admin/").status_code == 302


def test_own_factor_is_removed_and_ends_other_sessions(desk: Desk, tam: Operator, seed: Plaintext) -> None:
    add_second_factor(grant(desk.tam, P.SESSIONS_WRITE), tam, NewFactor(PASSKEY, {"name": "lost <key>"}))
    (passkey,) = (factor for factor in list_second_factors(tam) if factor.type == PASSKEY)
    client, other = browser(desk.tam), browser(desk.tam)
    assert "lost &lt;key&gt;" in text_of(client.get(FACTORS))
    assert client.post(f"{FACTORS}{passkey.pk}/remove/")["Location"] == FACTORS
    assert "lost" not in text_of(client.get(FACTORS))
    assert other.get("/admin/").status_code == 302
    (app,) = list_second_factors(tam)
    assert client.post(f"{FACTORS}{app.pk}/remove/").status_code == 409


def test_own_factors_have_names_and_unused_recovery_codes_are_counted(
    desk: Desk, tam: Operator, seed: Plaintext
) -> None:
    factor, _ = new_recovery_codes()
    for each in (factor, NewFactor(PASSKEY, {})):
        add_second_factor(grant(desk.tam, P.SESSIONS_WRITE), tam, each)
    page = text_of(browser(desk.tam).get(FACTORS))
    names = re.findall(r"<td>(Authenticator app|Passkey|Recovery codes)\b", page)
    assert sorted(names) == ["Authenticator app", "Passkey", "Recovery codes"]
    assert "10 unused" in page
