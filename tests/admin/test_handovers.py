"""A wrapping token in the console: shown once with its path, and what its receiver says then."""

import html
import logging
import re
from typing import Any

import pytest

from keyvault.domain.issuance import Delivery
from keyvault.domain.issuance import IssuanceState as S
from keyvault.domain.plaintext import Plaintext
from keyvault.models import BreakGlass, IssuanceRequest, KeyUse, WrappedHandover
from keyvault.services import upkeep
from keyvault.services.issuance import get_request
from rotation.models import Rotation
from rotation.services.engine import advance_rotation
from rotation.services.reports import get_rotation
from tests.factories import approve, issue_request, now, request_key
from tests.rotation.scene import rotate
from tests.services.wrappings import Wrappings, begin_wrapping

from .desk import Desk, address, browser, dump, hidden, set_up_desk, text_of

pytestmark = pytest.mark.database

TOKEN = re.compile(r"\bs\.[0-9a-f]{24}\b")


@pytest.fixture
def desk(db: None) -> Desk:
    return set_up_desk()


@pytest.fixture
def wraps(desk: Desk, monkeypatch: pytest.MonkeyPatch, settings: Any) -> Wrappings:
    return begin_wrapping(monkeypatch, settings)


def issued(place: Any) -> IssuanceRequest:
    request = request_key(place, delivery=Delivery.WRAPPED)
    if request.state == S.PENDING:
        approve(request)
    issue_request(request)
    return fresh(request)


def fresh(request: IssuanceRequest) -> IssuanceRequest:
    found = get_request(request.pk)
    assert found is not None
    return found


def page(row: Any, act: str = "change") -> str:
    kind = "rotation_rotation" if isinstance(row, Rotation) else "keyvault_issuancerequest"
    return address(f"{kind}_{act}", row.pk)


def collected(client: Any, row: Any) -> Plaintext:
    (token,) = set(TOKEN.findall(text_of(client.post(page(row, "collect")))))
    return Plaintext(token)


def say(client: Any, row: Any, word: str) -> Any:
    return client.post(page(row, word), {"key_id": hidden(client.get(page(row, word)), "key_id")}, follow=True)


def test_wrapped_is_offered_where_there_is_a_vault(desk: Desk, settings: Any) -> None:
    client, form = browser(desk.tam), address("keyvault_issuancerequest_request")
    assert 'value="wrapped"' not in text_of(client.get(form))
    settings.IS_VAULT = True
    assert 'value="wrapped"' in text_of(client.get(form))


def test_wrapped_token_is_shown_once_with_its_path(
    desk: Desk, wraps: Wrappings, caplog: pytest.LogCaptureFixture
) -> None:
    """In the body of one answer and nowhere else; what to do when it does not open stands beside it."""
    caplog.set_level(logging.DEBUG)
    row, client = issued(desk.production), browser(desk.tam)
    before = text_of(client.get(page(row, "collect")))
    assert "break-glass" in before, "whoever has the token can open it"
    assert page(row, "not-opened") not in text_of(client.get(page(row)))
    answer = client.post(page(row, "collect"))
    assert (answer.status_code, answer["Referrer-Policy"]) == (200, "no-referrer")
    assert "no-store" in answer["Cache-Control"]
    handover = WrappedHandover.objects.get()
    (token,) = set(TOKEN.findall(text_of(answer)))
    assert handover.creation_path in html.unescape(text_of(answer))
    assert "It did not open" in text_of(answer)
    assert page(row, "not-opened") in text_of(answer)
    for elsewhere in (dump(), caplog.text, str(answer.headers), text_of(client.get(page(row)))):
        assert token not in elsewhere
    assert BreakGlass.objects.filter(event="handover.wrapped", subject=row.pk).count() == 1


def test_wrapped_key_that_arrived_is_collected(desk: Desk, wraps: Wrappings) -> None:
    row, client = issued(desk.sandbox), browser(desk.tam)
    wraps.open(collected(client, row))
    assert "Confirmed" in text_of(say(client, row, "arrived"))
    assert fresh(row).state == S.COLLECTED
    assert page(row, "arrived") not in text_of(client.get(page(row)))


def test_wrapped_key_that_did_not_open_is_made_anew(desk: Desk, wraps: Wrappings) -> None:
    row, client = issued(desk.sandbox), browser(desk.tam)
    wraps.open(collected(client, row))
    assert "interception" in text_of(say(client, row, "not-opened"))
    assert fresh(row).state == S.APPROVED


def test_wrapped_key_that_somebody_uses_may_still_be_reported(desk: Desk, wraps: Wrappings) -> None:
    """A thief's use takes the button away from nobody."""
    row, client = issued(desk.sandbox), browser(desk.tam)
    wraps.open(collected(client, row))
    KeyUse(key=row.key, first_at=now(), last_at=now(), count=1).save()
    upkeep.suspect_due()
    assert fresh(row).state == S.COLLECTED
    assert "until a person decides" in text_of(say(client, row, "not-opened"))
    assert page(row, "not-opened") not in text_of(client.get(page(row)))


def test_wrapped_key_of_an_older_page_is_not_ended(desk: Desk, wraps: Wrappings) -> None:
    """What a page says of one key never ends the one that was made in its place."""
    row, client = issued(desk.sandbox), browser(desk.tam)
    wraps.open(collected(client, row))
    old = row.key_id
    say(client, row, "not-opened")
    issue_request(fresh(row))
    wraps.open(collected(client, row))
    assert client.post(page(row, "not-opened"), {"key_id": old}).status_code == 409
    assert fresh(row).state == S.ISSUED


def test_wrapped_word_is_for_whoever_asked(desk: Desk, wraps: Wrappings) -> None:
    row = issued(desk.sandbox)
    collected(browser(desk.tam), row)
    for word in ("arrived", "not-opened"):
        for operator, status in ((desk.approver, 403), (desk.auditor, 403), (desk.admin, 409)):
            assert browser(operator).post(page(row, word), {"key_id": row.key_id}).status_code == status
    assert fresh(row).state == S.ISSUED


def replaced(desk: Desk) -> Rotation:
    credential = issued(desk.sandbox).credential
    assert credential is not None
    row = rotate(credential, now())
    advance_rotation(row.pk)
    return get_rotation(row.pk)


def test_wrapped_replacement_is_shown_once_and_arrives(desk: Desk, wraps: Wrappings) -> None:
    row, client = replaced(desk), browser(desk.tam)
    assert (row.replacement_id or "?") in wraps.open(collected(client, row)).reveal()
    assert "Confirmed" in text_of(say(client, row, "arrived"))
    assert get_rotation(row.pk).collected_at is not None


def test_wrapped_replacement_that_did_not_open_is_made_anew(desk: Desk, wraps: Wrappings) -> None:
    row, client = replaced(desk), browser(desk.tam)
    wraps.open(collected(client, row))
    assert browser(desk.admin).post(page(row, "not-opened"), {"key_id": row.replacement_id}).status_code == 409
    assert "interception" in text_of(say(client, row, "not-opened"))
    assert get_rotation(row.pk).replacement_id is None
