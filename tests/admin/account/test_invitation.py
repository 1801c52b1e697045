"""The page of an invitation."""

import re
from datetime import UTC, datetime
from typing import Any

import pytest
from django.test import Client

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST
from keyvault.access.roles import Role
from keyvault.access.scopes import EVERYWHERE
from keyvault.domain.plaintext import Plaintext
from keyvault.models import ConsoleSession, Operator
from keyvault.services.operators.operators import create_operator
from keyvault.services.sessions.invitations import invite
from keyvault.services.sessions.second_factors import list_second_factors, totp_code
from tests.admin.desk import dump, text_of
from tests.factories import PASSWORD, grant


@pytest.fixture
def page(db: None) -> str:
    allowed = grant(HOST, P.OPERATORS_ENROLL)
    row = create_operator(allowed, username="new", roles=[Role.AUDITOR], scope=EVERYWHERE, password=None)
    return f"/admin/invitation/?token={invite(allowed, row).reveal()}"


def seed_on(response: Any) -> Plaintext:
    found = re.search(r"<code>([A-Z2-7]{32})</code>", text_of(response))
    assert found is not None
    return Plaintext(found[1])


def accept(client: Client, page: str, seed: Plaintext, **changed: str) -> Any:
    form = {"password": PASSWORD, "password_again": PASSWORD, "second_factor_code": totp_code(seed, datetime.now(UTC))}
    return client.post(page, {**form, **changed})


def test_invitation_page_signs_the_operator_in_and_shows_recovery_codes(page: str) -> None:
    client = Client()
    shown = client.get(page)
    assert shown["Referrer-Policy"] == "same-origin", "no other site learns the link"
    seed = seed_on(shown)
    response = accept(client, page, seed)
    assert response.status_code == 200
    assert len(re.findall(r"<code>\d{4} \d{4}</code>", text_of(response))) == 10
    assert "device" in response.cookies
    assert client.get("/admin/").status_code == 200
    assert client.get(page).status_code == 404
    assert [factor.type for factor in list_second_factors(Operator.objects.get())] == ["totp", "recovery_codes"]
    assert seed.reveal() not in dump()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"second_factor_code": "000000"}, "Wrong code"),
        ({"second_factor_code": ""}, "Wrong code"),
        ({"password_again": "another long pass phrase"}, "The two passwords differ"),
        ({"password": "short", "password_again": "short"}, "too short"),
        ({"password": "", "password_again": ""}, "required"),
        ({"second_factor_credential": "{}"}, "Wrong code"),
        ({"second_factor_credential": "no JSON"}, "Wrong code"),
    ],
)
def test_invitation_page_refuses_and_keeps_the_seed(page: str, changed: dict[str, str], message: str) -> None:
    """A mistake costs neither the invitation nor the app that is already set up."""
    client = Client()
    seed = seed_on(client.get(page))
    response = accept(client, page, seed, **changed)
    assert response.status_code in {400, 422}
    assert message in text_of(response)
    assert seed_on(response).reveal() == seed.reveal()
    assert not Operator.objects.get().has_usable_password()
    assert accept(client, page, seed).status_code == 200


def test_invitation_page_without_a_valid_token_stores_nothing(page: str) -> None:
    client = Client()
    for path in ("/admin/invitation/", "/admin/invitation/?token=x"):
        assert client.get(path).status_code == 404
        assert client.post(path, {"password": PASSWORD}).status_code == 404
    assert not ConsoleSession.objects.exists()


def test_invitation_page_seed_is_of_its_session_only(page: str) -> None:
    """Somebody who saw the page elsewhere does not know the seed that the operator sets up."""
    first, second = Client(), Client()
    assert seed_on(first.get(page)).reveal() != seed_on(second.get(page)).reveal()
    assert accept(second, page, seed_on(first.get(page))).status_code in {400, 422}
