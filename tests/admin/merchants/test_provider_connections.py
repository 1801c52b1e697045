"""Provider connections in the console: set, replaced, removed; the credentials are never shown again."""

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
CHOSEN = {"merchant": "acme", "environment": "sandbox", "provider": "stripe", "secret": SECRET}


def put(client: Any, **changed: str) -> Any:
    return client.post(address("keyvault_providerconnection_set"), {**CHOSEN, **changed})


def make(desk: Desk) -> ProviderConnection:
    allowed = grant(desk.tam, P.CONNECTIONS_WRITE, desk.sandbox)
    return set_connection(allowed, desk.sandbox, "stripe", Plaintext(SECRET))


def stored(connection: ProviderConnection) -> str:
    return secret_backend().read(Mount.SANDBOX, connection.backend_path).secret.reveal()


def shown_nowhere(client: Any, *answers: Any) -> None:
    """Assert that no answer, header, cookie, session or row contains the secret."""
    for answer in answers:
        assert SECRET not in text_of(answer) + str(answer.headers)
    assert SECRET not in dump() + str(dict(client.session)) + client.cookies.output()


def test_connection_set_is_stored_and_shown_on_no_page(desk: Desk) -> None:
    """Neither the answer nor the pages of the row, the list or the account show the credentials."""
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
    ("changed", "status", "message"),
    [
        ({"environment": "production"}, 400, "a test key"),
        ({"environment": "moon"}, 400, "valid choice"),
        ({"provider": "Stripe!"}, 400, "inner hyphens"),
        ({"provider": ""}, 400, "required"),
        ({"merchant": "nobody"}, 404, "no merchant"),
        ({"secret": f'{{"key": "{SECRET}"'}, 400, "JSON object of texts"),
        ({"secret": SECRET * 1000}, 400, "at most"),
        ({"secret": ""}, 400, "required"),
    ],
)
def test_connection_invalid_is_refused_without_returning_the_secret(
    desk: Desk, changed: dict[str, str], status: int, message: str
) -> None:
    """A form with an error is shown again with an empty secret field."""
    client = browser(desk.tam)
    answer = put(client, **changed)
    assert answer.status_code == status
    assert message in text_of(answer)
    assert re.search(r"<textarea[^>]*>\s*</textarea>", text_of(answer))
    shown_nowhere(client, answer)
    assert not ProviderConnection.objects.exists()


def test_connection_during_a_backend_outage_is_refused_without_the_secret(
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


def test_connection_internal_fault_logs_no_secret(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The traceback is logged without the typed secret."""

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


def test_connection_form_opened_from_an_account_is_prefilled(desk: Desk) -> None:
    client = browser(desk.tam)
    text = text_of(client.get(address("keyvault_account_change", desk.production.pk)))
    (link,) = re.findall(r'href="([^"]*providerconnection/new/set/[^"]*)"', text)
    form = text_of(client.get(link.replace("&amp;", "&")))
    assert 'value="acme"' in form
    assert 'value="production" selected' in form


def test_connection_form_masks_the_secret(desk: Desk) -> None:
    """The field is masked, not stored by the browser, and not sent to a spelling service."""
    form = text_of(browser(desk.tam).get(address("keyvault_providerconnection_set") + f"?secret={SECRET}"))
    (field,) = re.findall(r'<textarea name="secret"[^>]*>', form)
    assert "concealed" in field
    assert 'autocomplete="off"' in field
    assert 'spellcheck="false"' in field
    assert SECRET not in form


def test_connection_replaced_from_an_outdated_page_is_a_conflict(desk: Desk) -> None:
    connection = make(desk)
    client = browser(desk.tam)
    page = address("keyvault_providerconnection_replace", connection.pk)
    late = client.post(page, {"version": "1", "secret": "second"})
    assert late.status_code == 409
    assert stored(connection) == SECRET
    row = ProviderConnection.objects.get()
    assert client.post(page, {"version": str(row.version), "secret": "second"}).status_code == 302
    assert stored(connection) == "second"


def test_connection_removed_offers_no_actions(desk: Desk) -> None:
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
    again = {"version": str(row.version), "secret": "second"}
    assert client.post(address("keyvault_providerconnection_replace", connection.pk), again).status_code == 409
    assert text_of(client.get(address("keyvault_account_change", desk.sandbox.pk))).count("stripe") == 0


@pytest.mark.parametrize(("state", "is_shown"), [("enabled", True), ("removed", False)])
def test_connections_are_listed_by_state(desk: Desk, state: str, is_shown: bool) -> None:
    make(desk)
    page = browser(desk.auditor).get(address("keyvault_providerconnection_changelist"), {"state": state})
    assert ("stripe" in text_of(page)) == is_shown
