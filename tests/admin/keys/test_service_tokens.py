"""Service tokens in the console: shown once, afterwards only by name."""

from typing import Any

import pytest

from keyvault.access.permissions import SERVICE_PERMISSIONS
from keyvault.models import ServiceToken
from keyvault.services.keys.records import prove_service_token
from tests.admin.desk import SHAPED, Desk, address, browser, dump, text_of
from tests.factories import make_token, now

CHOSEN = {
    "name": "gateway",
    "scope": "sbx",
    "permissions": ["keys:verify"],
    "merchants": ["acme"],
    "lifetime_days": "30",
}


def create(client: Any, **changed: Any) -> Any:
    return client.post(address("keyvault_servicetoken_create"), {**CHOSEN, **changed})


def test_token_created_is_shown_once_and_works(desk: Desk) -> None:
    """The token is in the body of one answer, which no cache stores, and in no cookie, session or row."""
    client = browser(desk.admin)
    answer = create(client)
    assert answer.status_code == 200
    assert "no-store" in answer["Cache-Control"]
    (secret,) = set(SHAPED.findall(text_of(answer)))
    service = prove_service_token(secret, now())
    assert service is not None
    assert (service.scope.merchants, service.person) == (frozenset({"acme"}), desk.admin.person)
    assert secret not in dump()
    assert secret not in str(dict(client.session))
    assert secret not in client.cookies.output()
    token = ServiceToken.objects.get()
    for page in (address("keyvault_servicetoken_change", token.pk), address("keyvault_servicetoken_changelist")):
        assert not SHAPED.search(text_of(client.get(page)))


@pytest.mark.parametrize(
    "changed",
    [
        {"merchants": []},
        {"all_merchants": "on"},
        {"permissions": []},
        {"permissions": ["issuance:approve"]},
        {"permissions": ["operators:write"]},
        {"lifetime_days": "0"},
        {"lifetime_days": "9999"},
        {"scope": "moon"},
    ],
)
def test_token_created_too_broad_or_invalid_is_refused(desk: Desk, changed: dict[str, Any]) -> None:
    """A token never approves, always expires, and covers all merchants only on explicit choice."""
    assert create(browser(desk.admin), **changed).status_code == 400
    assert not ServiceToken.objects.exists()


def test_token_created_for_probes_shows_it_on_its_page(desk: Desk) -> None:
    client = browser(desk.admin)
    create(client)
    create(client, is_probe="on", name="probe")
    for token in ServiceToken.objects.all():
        assert token.is_probe is (token.name == "probe")
        page = text_of(client.get(address("keyvault_servicetoken_change", token.pk)))
        assert ("do not count as key use" in page) is token.is_probe


def test_token_form_offers_only_service_permissions(desk: Desk) -> None:
    text = text_of(browser(desk.admin).get(address("keyvault_servicetoken_create")))
    assert text.count('name="permissions"') == len(SERVICE_PERMISSIONS)


def test_token_revoked_is_refused(desk: Desk) -> None:
    token, text = make_token()
    client = browser(desk.admin)
    page = address("keyvault_servicetoken_revoke", token.pk)
    assert client.post(page).status_code == 302
    assert prove_service_token(text.reveal(), now()) is None
    assert client.post(page).status_code == 409


def test_token_rotated_is_shown_once_beside_the_old_one(desk: Desk) -> None:
    """The successor is in the body of one answer; the old token expires after the requested overlap."""
    token, old = make_token()
    client = browser(desk.admin)
    page = address("keyvault_servicetoken_rotate", token.pk)
    assert client.post(page, {"overlap_hours": "169"}).status_code == 400
    answer = client.post(page, {"overlap_hours": "0"})
    assert answer.status_code == 200
    assert "no-store" in answer["Cache-Control"]
    (secret,) = set(SHAPED.findall(text_of(answer)))
    service = prove_service_token(secret, now())
    assert service is not None
    assert (service.lineage, service.person) == (token.pk, desk.admin.person)
    assert prove_service_token(old.reveal(), now()) is None
    assert secret not in dump()
    assert client.post(page, {"overlap_hours": "1"}).status_code == 409
    for row in ServiceToken.objects.all():
        assert not SHAPED.search(text_of(client.get(address("keyvault_servicetoken_change", row.pk))))


@pytest.mark.parametrize(("state", "count"), [("active", 1), ("revoked", 0), ("expired", 0)])
def test_token_list_filters_by_state(desk: Desk, state: str, count: int) -> None:
    token, _ = make_token()
    text = text_of(browser(desk.auditor).get(address("keyvault_servicetoken_changelist"), {"state": state}))
    assert (token.pk in text) == bool(count)
