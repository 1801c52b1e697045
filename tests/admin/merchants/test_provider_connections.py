"""Provider connections in the console: set, replaced, removed; no page and no answer has the credentials again."""

import re
from typing import Any

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.backends.base import BackendUnavailableError, Mount
from keyvault.backends.local import LocalKeystore
from keyvault.domain.plaintext import Plaintext
from keyvault.models import ProviderConnection
from keyvault.services.secrets.backend import secret_backend
from keyvault.services.secrets.provider_connections import set_connection
from tests.admin.desk import Desk, address, browser, dump, text_of
from tests.factories import grant

SECRET = "sk_test_" + "Zq7" * 8
CHOSEN = {"merchant": "acme", "environment": "sandbox", "provider": "stripe", "credentials": SECRET}


def put(client: Any, **changed: str) -> Any:
    return client.post(address("keyvault_providerconnection_set"), {**CHOSEN, **changed})


def make(desk: Desk) -> ProviderConnection:
    allowed = grant(desk.tam, P.CONNECTIONS_WRITE, desk.sandbox)
    return set_connection(allowed, desk.sandbox, "stripe", Plaintext(SECRET))


def stored(connection: ProviderConnection) -> str:
    return secret_backend().read(Mount.SANDBOX, connection.backend_path).secret.reveal()


def shown_nowhere(client: Any, *answers: Any) -> None:
    """No answer, header, cookie, session or row has it."""
    for answer in answers:
        assert SECRET not in text_of(answer) + str(answer.headers)
    assert SECRET not in dump() + str(dict(client.session)) + client.cookies.output()


def test_connection_set_is_stored_and_shown_on_no_page(desk: Desk) -> None:
    """It goes in by a form and comes out by no page: neither the answer, nor the row's, the list's or the account's."""
    client = browser(desk.tam)
    answer = put(client)
    assert answer.status_code == 302
    connection = ProviderConnection.objects.get()
    assert stored(connection) == SECRET
    pages = [
        client.get(address("keyvault_providerconnection_change", connection.pk)),
        client.get(address("keyvault_providerconnection_changelist")),
        client.get(address("keyvault_providerconnection_replace", connection.pk)),
        client.get(address("keyvault_account_change", desk.sandbox.pk)),
    ]
    shown_nowhere(client, answer, *pages)
    for page in pages:
        assert "stripe" in text_of(page)
    assert "operator:tam" in text_of(pages[0])


@pytest.mark.parametrize(
    ("changed", "status", "said"),
    [
        ({"environment": "production"}, 400, "a test key"),
        ({"environment": "moon"}, 400, "valid choice"),
        ({"provider": "Stripe!"}, 400, "inner hyphens"),
        ({"provider": ""}, 400, "required"),
        ({"merchant": "nobody"}, 404, "no merchant"),
        ({"credentials": f'{{"key": "{SECRET}"'}, 400, "JSON object of texts"),
        ({"credentials": SECRET * 1000}, 400, "at most"),
        ({"credentials": ""}, 400, "required"),
    ],
)
def test_connection_that_does_not_fit_is_refused_and_the_secret_is_not_sent_back(
    desk: Desk, changed: dict[str, str], status: int, said: str
) -> None:
    """A form that comes back with a fault comes back with an empty field for the secret."""
    client = browser(desk.tam)
    answer = put(client, **changed)
    assert answer.status_code == status
    assert said in text_of(answer)
    assert re.search(r"<textarea[^>]*>\s*</textarea>", text_of(answer))
    shown_nowhere(client, answer)
    assert not ProviderConnection.objects.exists()


def test_connection_not_stored_for_the_backend_is_away_is_told_without_the_secret(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unavailable(*_: object, **__: object) -> None:
        raise BackendUnavailableError("The backend is sealed.")

    client = browser(desk.tam)
    with monkeypatch.context() as outage, caplog.at_level("DEBUG"):
        outage.setattr(LocalKeystore, "put", unavailable)
        answer = put(client)
    assert answer.status_code == 503
    assert SECRET not in caplog.text
    shown_nowhere(client, answer)


def test_connection_fault_of_ours_leaves_the_secret_in_no_log(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A traceback is logged, and what was typed is not in it."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    client = browser(desk.tam)
    with monkeypatch.context() as outage, caplog.at_level("DEBUG"):
        outage.setattr(LocalKeystore, "put", broken)
        answer = put(client)
    assert answer.status_code == 500
    assert "a bug" in caplog.text
    assert SECRET not in caplog.text
    shown_nowhere(client, answer)


def test_connection_form_knows_the_account_that_it_was_opened_from(desk: Desk) -> None:
    client = browser(desk.tam)
    text = text_of(client.get(address("keyvault_account_change", desk.production.pk)))
    (link,) = re.findall(r'href="([^"]*providerconnection/new/set/[^"]*)"', text)
    form = text_of(client.get(link.replace("&amp;", "&")))
    assert 'value="acme"' in form
    assert 'value="production" selected' in form


def test_connection_form_conceals_what_is_typed(desk: Desk) -> None:
    """Dots as in a password field, nothing kept by the browser, and nothing sent to a spelling service."""
    form = text_of(browser(desk.tam).get(address("keyvault_providerconnection_set") + f"?credentials={SECRET}"))
    (field,) = re.findall(r'<textarea name="credentials"[^>]*>', form)
    assert "concealed" in field
    assert 'autocomplete="off"' in field
    assert 'spellcheck="false"' in field
    assert SECRET not in form


def test_connection_is_replaced_by_whoever_saw_it_as_it_is(desk: Desk) -> None:
    connection = make(desk)
    client = browser(desk.tam)
    page = address("keyvault_providerconnection_replace", connection.pk)
    late = client.post(page, {"version": "1", "credentials": "second"})
    assert late.status_code == 409
    assert stored(connection) == SECRET
    row = ProviderConnection.objects.get()
    assert client.post(page, {"version": str(row.version), "credentials": "second"}).status_code == 302
    assert stored(connection) == "second"


def test_connection_is_removed_and_then_offers_nothing_more(desk: Desk) -> None:
    connection = make(desk)
    client = browser(desk.tam)
    page = address("keyvault_providerconnection_remove", connection.pk)
    assert client.get(page).status_code == 200
    assert client.post(page).status_code == 302
    assert client.post(page).status_code == 409
    text = text_of(client.get(address("keyvault_providerconnection_change", connection.pk)))
    assert "Erased" in text
    assert "Replace credentials" not in text
    row = ProviderConnection.objects.get()
    again = {"version": str(row.version), "credentials": "second"}
    assert client.post(address("keyvault_providerconnection_replace", connection.pk), again).status_code == 409
    assert text_of(client.get(address("keyvault_account_change", desk.sandbox.pk))).count("stripe") == 0


@pytest.mark.parametrize(("state", "is_shown"), [("enabled", True), ("removed", False)])
def test_connections_are_listed_by_state(desk: Desk, state: str, is_shown: bool) -> None:
    make(desk)
    page = browser(desk.auditor).get(address("keyvault_providerconnection_changelist"), {"state": state})
    assert ("stripe" in text_of(page)) == is_shown
