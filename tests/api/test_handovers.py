"""A key inside a wrapping token over REST: given once for an Idempotency-Key, confirmed, or suspected."""

from functools import partial
from typing import Any

import pytest

from keyvault.access.permissions import Permission as P
from keyvault.domain.plaintext import Plaintext
from keyvault.models import AuditEntry, IssuanceRequest, Key, WrappedHandover
from keyvault.models.idempotency import IdempotentRequest
from keyvault.services import idempotency
from tests.factories import issue_request
from tests.services.racing import race
from tests.services.rows import dump_tables
from tests.services.wrappings import Wrappings, begin_wrapping

from .conftest import Call
from .test_issuance import REQUESTS, ask, bearer, collect, fresh, is_good, issued

pytestmark = [pytest.mark.database, pytest.mark.django_db]


@pytest.fixture
def wraps(db: None, token: str, monkeypatch: pytest.MonkeyPatch, settings: Any) -> Wrappings:
    return begin_wrapping(monkeypatch, settings)


def say(call: Call, request: IssuanceRequest, word: str, key_id: str | None = None, **headers: str) -> Any:
    body = {"key_id": key_id or fresh(request.pk).key_id}
    return call("POST", f"{REQUESTS}/{request.pk}/{word}", body, **headers)


def test_handover_without_a_vault_says_where_the_fault_is(call: Call) -> None:
    answer = ask(call, delivery="wrapped")
    assert (answer.status_code, answer.body["code"]) == (400, "request_invalid")
    assert [error["pointer"] for error in answer.body["errors"]] == ["/delivery"]


@pytest.mark.parametrize("environment", ["sandbox", "production"])
def test_handover_is_collected_opened_and_confirmed(call: Call, wraps: Wrappings, environment: str) -> None:
    """The key itself passes through no answer of ours, so that production allows it too."""
    request = issued(call, delivery="wrapped", environment=environment)
    key = fresh(request.pk).key
    assert key is not None
    answer = collect(call, request.pk)
    assert answer.status_code == 200
    handover = WrappedHandover.objects.get()
    token = answer.body["wrapped"].pop("token")
    assert answer.body == {
        "request_id": request.pk,
        "credential_id": key.credential_id,
        "key_id": key.key_id,
        "wrapped": {"creation_path": handover.creation_path, "expires_at": handover.expires_at.isoformat()},
    }
    text = wraps.open(Plaintext(token)).reveal()
    assert is_good(call, text, environment)
    for _ in range(2):
        confirmed = say(call, request, "confirm")
        assert (confirmed.status_code, confirmed.body["state"]) == (200, "collected")
    for secret in (text, token):
        assert secret not in repr(dump_tables())


def test_handover_replayed_gives_the_same_token_and_no_other(call: Call, wraps: Wrappings) -> None:
    """A lost answer costs no second token; when its time is over a replay says that it has none."""
    request = issued(call, delivery="wrapped")
    first, again = (collect(call, request.pk, "one") for _ in range(2))
    assert again["Idempotent-Replayed"] == "true"
    assert again.content == first.content
    assert WrappedHandover.objects.count() == 1
    row = IdempotentRequest.objects.get(endpoint="issuance_requests.collect")
    assert first.body["wrapped"]["token"] not in row.body
    idempotency.shred_used([fresh(request.pk).key_id or ""])
    shredded = collect(call, request.pk, "one").body
    assert (shredded["wrapped"]["token"], shredded["secret_available"]) == (None, False)
    assert shredded["wrapped"]["creation_path"] == first.body["wrapped"]["creation_path"]


def test_handover_with_another_idempotency_key_takes_the_former_back(call: Call, wraps: Wrappings) -> None:
    """An unopened token goes with its key; the same attempt, made again in a moment, gets one of another key."""
    request = issued(call, delivery="wrapped")
    first, refused = collect(call, request.pk), collect(call, request.pk, "two")
    assert (refused.status_code, refused.body["code"]) == (409, "state_conflict")
    assert "collect that one in a moment" in refused.body["detail"]
    assert call("GET", f"{REQUESTS}/{request.pk}").body["state"] == "approved"
    issue_request(fresh(request.pk))
    second = collect(call, request.pk, "two")
    assert second.body["key_id"] != first.body["key_id"]
    assert list(wraps.unopened) == [wraps.tokens[second.body["wrapped"]["token"]]]


@pytest.mark.parametrize("noticed_by", ["suspect", "collect"])
def test_handover_opened_by_a_thief_is_made_anew(call: Call, wraps: Wrappings, noticed_by: str) -> None:
    request = issued(call, delivery="wrapped")
    stolen = wraps.open(Plaintext(collect(call, request.pk).body["wrapped"]["token"])).reveal()
    assert is_good(call, stolen)
    answer = say(call, request, "suspect") if noticed_by == "suspect" else collect(call, request.pk, "again")
    if noticed_by == "suspect":
        assert (answer.status_code, answer.body["state"], answer.body["key_id"]) == (200, "approved", None)
    else:
        assert (answer.status_code, answer.body["code"]) == (409, "state_conflict")
        assert "another is made" in answer.body["detail"]
    assert not is_good(call, stolen)
    assert Key.objects.get().state == "deactivated"


def test_handover_unopened_is_not_suspected(call: Call, wraps: Wrappings) -> None:
    request = issued(call, delivery="wrapped")
    before = say(call, request, "suspect")
    collect(call, request.pk)
    unopened, other = say(call, request, "suspect"), say(call, request, "confirm", "A" * 16)
    for answer in (before, unopened, other):
        assert (answer.status_code, answer.body["code"]) == (409, "state_conflict")
    assert fresh(request.pk).state == "issued"


@pytest.mark.parametrize("word", ["confirm", "suspect"])
@pytest.mark.parametrize("body", [{}, {"key_id": 7}, {"key_id": "short"}, {"key_id": "A" * 16, "more": 1}, b"[]", b"{"])
def test_handover_word_with_a_bad_body_is_refused(call: Call, wraps: Wrappings, word: str, body: Any) -> None:
    request = issued(call, delivery="wrapped")
    answer = call("POST", f"{REQUESTS}/{request.pk}/{word}", body)
    assert (answer.status_code, answer.body["code"]) == (400, "request_invalid")


@pytest.mark.parametrize("word", ["confirm", "suspect"])
def test_handover_word_is_for_the_token_that_asked(call: Call, wraps: Wrappings, word: str) -> None:
    """Any other service finds nothing; one without the permission is told only that."""
    request = issued(call, delivery="wrapped")
    collect(call, request.pk)
    foreign = say(call, request, word, **bearer(P.ISSUANCE_REQUEST, P.ISSUANCE_COLLECT))
    absent = call("POST", f"{REQUESTS}/req_{'0' * 20}/{word}", {"key_id": "A" * 16})
    powerless = say(call, request, word, **bearer(P.ISSUANCE_REQUEST))
    assert [each.status_code for each in (foreign, absent, powerless)] == [404, 404, 403]
    assert call("GET", f"{REQUESTS}/{request.pk}/{word}").status_code == 405
    assert WrappedHandover.objects.get().confirmed_at is None


@pytest.mark.django_db(transaction=True)
def test_handover_collected_at_once_with_one_key_is_one_token(call: Call, wraps: Wrappings) -> None:
    """Parallel retries: each gets the one token that opens, or is told that it is still at work."""
    for number in range(3):
        request = issued(call, delivery="wrapped")
        answers = race(*[partial(collect, call, request.pk, f"one-{number}") for _ in range(5)])
        assert {answer.status_code for answer in answers} <= {200, 409}
        tokens = {answer.body["wrapped"]["token"] for answer in answers if answer.status_code == 200}
        assert len(tokens) == 1
        assert {wraps.tokens[token] for token in tokens} == set(wraps.unopened)
        wraps.expire()
    assert AuditEntry.objects.filter(event="handover.wrapped").count() == 3
