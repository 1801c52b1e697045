"""Explanation of a refusal by request id or description, without secrets and without side effects."""

import re
from typing import Any
from unittest import mock

import pytest

from keyvault.access.catalog import NoMatchingEndpoint
from keyvault.access.permissions import Permission as P
from keyvault.access.roles import Role
from keyvault.access.scopes import AccessScope
from keyvault.domain.revocation import RevocationReason
from keyvault.models import Refusal, UseBucket
from keyvault.services.keys.lifecycle import revoke_key, suspend_key
from keyvault.services.verification import judging
from keyvault.services.verification.judging import VerificationRequest, judge_presented
from keyvault.services.verification.refusals import RefusalLog
from tests.admin.desk import Desk, address, browser, make_endpoint, make_refusal, text_of
from tests.domain.minting import mint
from tests.factories import SANDBOX, grant, issue, make_merchant, make_operator, now

DESCRIBED = {"environment": "sandbox", "endpoint": "orders.retrieve"}
IDS = ["key_id", "customer_token_id", "subject"]


def explain(desk: Desk, **fields: str) -> Any:
    return browser(desk.approver).post(address("explain"), fields)


def looked_up(desk: Desk, request_id: str) -> str:
    """Return the page of the refusal to which the form leads."""
    answer = explain(desk, subject=request_id)
    assert answer.status_code == 302
    return text_of(browser(desk.approver).get(answer["Location"]))


def described(desk: Desk, **fields: str) -> str:
    answer = explain(desk, **{**DESCRIBED, **fields})
    assert answer.status_code == 200
    return text_of(answer)


def test_explain_by_request_id_shows_the_refusal_rule_by_rule(desk: Desk) -> None:
    """The page leads from the client's answer to the rule that refused it, with cause and remedy."""
    key, text = issue(desk.sandbox)
    revoke_key(grant(desk.admin, P.KEYS_REVOKE, desk.sandbox), key, RevocationReason.SUPERSEDED)
    presented = VerificationRequest(
        key=text.reveal(), environment=SANDBOX, endpoint=NoMatchingEndpoint(), client_address="192.0.2.7"
    )
    log = RefusalLog()
    place = {"entry_point": "verify", "environment": SANDBOX, "endpoint": "", "source": "192.0.2.7"}
    log.note(judge_presented(presented, now()), request_id="Q" * 22, at=now(), **place)  # type: ignore[arg-type]  # a mixed dict
    log.flush()
    page = looked_up(desk, f" {'Q' * 22} ")
    for phrase in (
        "401 Key revoked",
        "key_revoked",
        "The key was revoked.",
        "the key is deactivated",
        "Remedy",
        "192.0.2.7",
    ):
        assert phrase in page
    assert address("keyvault_key_change", key.pk) in page
    assert page.index("Possession of the key is proved") < page.index("The key was not revoked")


def test_explain_of_an_id_in_a_batch_is_found(desk: Desk) -> None:
    make_refusal("B" * 22 + "-99")
    assert "credential_invalid" in looked_up(desk, "B" * 22 + "-99")


def test_explain_of_an_unknown_request_id_lists_possible_reasons(desk: Desk) -> None:
    answer = explain(desk, subject="nothing")
    assert answer.status_code == 404
    assert "older than 30 days" in text_of(answer)


def test_explain_described_allowed_shows_the_limits_and_uses_none(desk: Desk) -> None:
    """It uses no bucket and records neither use nor refusal."""
    key, _ = issue(desk.sandbox)
    with mock.patch.object(judging, "limiter", side_effect=AssertionError("a limit was spent")):
        page = described(desk, key_id=key.pk)
    assert "200 Allowed" in page
    assert "25 per 1 s (default)" in page
    assert "spends no requests" in page
    assert not UseBucket.objects.exists()
    assert not Refusal.objects.exists()


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"key_id": ""}, "credential_missing"),
        ({"key_id": "", "endpoint": "no.such"}, "endpoint_unknown"),
        ({"key_id": "A" * 16}, "credential_invalid"),
        ({"environment": "production"}, "environment_mismatch"),
        ({"merchant": "globex"}, "merchant_mismatch"),
        ({"endpoint": "no.such"}, "endpoint_unknown"),
        ({"endpoint": "", "method": "PATCH", "path": "/merchants/orders/1"}, "method_not_allowed"),
        ({"endpoint": "", "method": "GET", "path": "/merchants/orders/%2f"}, "endpoint_unknown"),
        ({"endpoint": "client.configuration"}, "method_not_supported"),
        ({"endpoint": "orders.create", "has_bearer": "on"}, "bearer_not_supported"),
        ({"has_origin": "on"}, "private_key_in_browser"),
        ({"endpoint": "customers.me"}, "customer_token_missing"),
        ({"has_bearer": "on", "customer_token_id": "B" * 16}, "customer_token_invalid"),
        ({"endpoint": "refunds.create"}, "context_missing"),
        ({"endpoint": "", "method": "POST", "path": "/sandbox/refunds/other", "store": "1"}, "merchant_mismatch"),
    ],
)
def test_explain_described_gives_the_verdict_of_verify(desk: Desk, fields: dict[str, str], code: str) -> None:
    make_endpoint(path="/refunds/<merchant>", merchant_from="path:merchant", store_from="header:X-Store-Id")
    key, _ = issue(desk.sandbox)
    page = described(desk, **{"key_id": key.pk, **fields})
    assert f"<dt>Code</dt><dd><code>{code}</code></dd>" in page


def test_explain_described_names_the_state_of_the_key_and_of_its_network(desk: Desk) -> None:
    key, _ = issue(desk.sandbox)
    browser(desk.admin).post(
        address("keyvault_credential_restrict", key.credential_id),
        {"version": key.credential.version, "networks": "192.0.2.0/24", "origin_header": "refuse"},
    )
    assert "ip_not_allowed" in described(desk, key_id=key.pk)
    assert "ip_not_allowed" in described(desk, key_id=key.pk, client_address="198.51.100.1")
    assert "200 Allowed" in described(desk, key_id=key.pk, client_address="192.0.2.9")
    suspend_key(grant(desk.admin, P.KEYS_SUSPEND, desk.sandbox), key)
    assert "key_not_active" in described(desk, key_id=key.pk, client_address="192.0.2.9")


@pytest.mark.parametrize("field", ["key_id", "customer_token_id", "subject", "path", "merchant", "endpoint", "store"])
def test_explain_never_shows_a_whole_key_again(desk: Desk, field: str) -> None:
    """A secret in any field is neither looked up nor shown, whole, bare or escaped."""
    _, text = issue(desk.sandbox)
    whole = text.reveal()
    for pasted in (whole, mint(), whole.replace("_", "%5F")):
        fields = {field: pasted} if field == "subject" else {**DESCRIBED, field: pasted}
        answer = explain(desk, **fields)
        assert answer.status_code == 400
        assert whole[-49:] not in text_of(answer)
        assert pasted not in text_of(answer)
        assert "The input contains a whole key or token" in text_of(answer)


@pytest.mark.parametrize("field", IDS)
def test_explain_never_shows_a_bare_secret_again(desk: Desk, field: str) -> None:
    """A bare secret has no recognizable format, but it is longer than any valid id."""
    secret = mint()[-49:]
    fields = {field: secret} if field == "subject" else {**DESCRIBED, field: secret}
    answer = explain(desk, **fields)
    assert answer.status_code == 400
    assert secret not in text_of(answer)


@pytest.mark.parametrize(
    "fields",
    [{}, {"environment": "moon"}, {**DESCRIBED, "path": "/x", "method": "GET"}, {**DESCRIBED, "client_address": "x"}],
)
def test_explain_of_an_incomplete_description_shows_the_errors(desk: Desk, fields: dict[str, str]) -> None:
    answer = explain(desk, **fields)
    assert answer.status_code == 400
    assert "Correct the errors below" in text_of(answer)


def test_explain_is_reached_from_the_front_page_and_the_list(desk: Desk) -> None:
    url = address("explain")
    make_refusal()
    client = browser(desk.auditor)
    assert url in text_of(client.get("/admin/"))
    listed = text_of(client.get(address("keyvault_refusal_changelist"), {"q": "R" * 22}))
    assert url in listed
    assert address("keyvault_refusal_change", "R" * 22) in listed


def test_explain_by_key_id_says_what_every_request_gets(desk: Desk) -> None:
    """A key id is answered by the state of the key and its latest denials."""
    key, _ = issue(desk.sandbox)
    assert "The key itself is accepted." in text_of(explain(desk, subject=key.pk))
    revoke_key(grant(desk.admin, P.KEYS_REVOKE, desk.sandbox), key, RevocationReason.SUPERSEDED)
    make_refusal("K" * 22, key_id=key.pk, merchant_id="acme", code="key_revoked")
    text = text_of(explain(desk, subject=f" {key.pk} "))
    assert f"Every request with key {key.pk} is denied: Key revoked." in text
    assert address("keyvault_refusal_change", "K" * 22) in text


def test_explain_by_key_id_outside_the_scope_knows_no_such_key(desk: Desk) -> None:
    """Guarantee: a key of another merchant and an unknown key have the same answer."""
    key, _ = issue(desk.sandbox)
    make_merchant("globex")
    limited = make_operator("limited", Role.APPROVER, scope=AccessScope(frozenset({"globex"})))
    pages = [text_of(browser(limited).post(address("explain"), {"subject": subject})) for subject in (key.pk, "0" * 16)]
    assert all("No key has this id." in page for page in pages)
    assert "acme" not in pages[0]


def test_explain_answer_for_the_merchant_has_no_internal_detail(desk: Desk) -> None:
    """Guarantee: the text to copy contains what the caller may know, and nothing for operators only."""
    make_refusal("M" * 22, internal="the digest of pepper 3 differs")
    page = looked_up(desk, "M" * 22)
    copied = re.search(r'data-copy="([^"]*)" hidden>Copy answer', page)
    assert copied is not None
    assert "M" * 22 in copied[1]
    assert "401 credential_invalid" in copied[1]
    assert "pepper" in page
    assert "pepper" not in copied[1]


def test_explain_of_a_long_text_does_not_call_it_a_key(desk: Desk) -> None:
    answer = explain(desk, subject="0b8a5f4e-1d2c-4b3a-9f8e-7d6c5b4a3f2e")
    assert answer.status_code == 400
    assert "longer than any id" in text_of(answer)
    assert "contains a whole key" not in text_of(answer)
