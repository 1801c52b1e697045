"""clients/conformance.json equals what the service's code produces, and what a whole service answers."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from django.test import Client

import keyvault.project.urls  # noqa: F401  loads all environments, whichever test runs first
from keyvault.access.limits import Limit
from keyvault.access.permissions import Permission as P
from keyvault.access.roles import Role
from keyvault.domain.keys import KeyKind
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.recipient_keys import seal_to
from keyvault.domain.revocation import RevocationReason
from keyvault.models.keys import OriginHeader
from keyvault.services.keys.credentials import restrict_credential
from keyvault.services.keys.lifecycle import revoke_key, suspend_key
from keyvault.services.limits.overrides import set_account_limit
from keyvault.wire.webhooks import SIGNATURE_HEADER, SecretInvalidError, SignatureInvalidError, verify
from tests.api.conftest import usage as usage
from tests.clients.conformance import PATH, RECIPIENT, decided, to_text
from tests.clients.service_answers import KEYS
from tests.domain.test_recipient_keys import decoded, open_by_the_book, public_text
from tests.factories import PRODUCTION, account, grant, issue, make_merchant, make_token, the_operator

CASES: dict[str, list[Any]] = json.loads(PATH.read_text())
OF_A_BODY = {"request_id", "key_id", "credential_id", "limit", "detail"}
"""Members whose values differ between two services."""


def test_conformance_file_equals_the_code() -> None:
    """Run `python -m tests.clients.conformance` to write it."""
    assert PATH.read_text() == to_text()


@pytest.fixture
def stored(client: Client) -> dict[str, str]:
    """Return the real string of each name in the file, in the state that its name says."""
    make_merchant("acme")
    place, admin = account(), the_operator("admin", Role.KEY_ADMINISTRATOR)
    revoked, suspended, restricted = issue(place), issue(place), issue(place)
    revoke_key(grant(admin, P.KEYS_REVOKE, place), revoked[0], RevocationReason.SUPERSEDED)
    suspend_key(grant(admin, P.KEYS_SUSPEND, place), suspended[0])
    allowed = grant(admin, P.CREDENTIALS_RESTRICT, place)
    restrict_credential(allowed, restricted[0].credential, ["192.0.2.0/24"], OriginHeader.REFUSE)
    texts = {
        "private_sandbox": issue(place)[1],
        "revoked_sandbox": revoked[1],
        "suspended_sandbox": suspended[1],
        "restricted_sandbox": restricted[1],
        "public_sandbox": issue(place, kind=KeyKind.PUBLIC)[1],
        "private_production": issue(account("acme", PRODUCTION))[1],
        "service_token": make_token(P.KEYS_VERIFY)[1],
    }
    strings = KEYS | {name: text.reveal() for name, text in texts.items()}
    sent = {"X-Api-Key": strings["private_sandbox"], "Idempotency-Key": "one"}
    issued = client.post("/sandbox/customers/cust-1/access-tokens", {}, "application/json", headers=sent)
    return strings | {"customer_token": issued.json()["token"]}


@pytest.mark.django_db
def test_conformance_decisions_are_those_of_the_service(client: Client, stored: dict[str, str]) -> None:
    """Guarantee: a client that passes the cases understands the service's own answers."""
    cases = [case for case in decided() if case["reply"]["body"]["code"] != "verifier_stale"]
    assert len(cases) > 20
    for case in cases:
        if case["reply"]["body"]["code"] == "rate_limited":
            limiting = grant(the_operator("admin", Role.KEY_ADMINISTRATOR), P.LIMITS_WRITE, account())
            set_account_limit(limiting, account(), Limit(1, 3600))
            ask(client, case, stored)
        answer = ask(client, case, stored)
        assert answer.status_code == case["reply"]["status"]
        assert comparable(answer.json()) == comparable(case["reply"]["body"]), case["name"]


def ask(client: Client, case: Any, stored: dict[str, str]) -> Any:
    """Send the question of a case, with real strings."""
    text = json.dumps(case["asked"])
    for name, placeholder in KEYS.items():
        text = text.replace(placeholder, stored[name])
    sent = {"Authorization": f"Bearer {stored['service_token']}"}
    return client.post("/v1/keys/verify", text, "application/json", headers=sent)


def comparable(body: Any) -> Any:
    """Return what two services answer alike: everything but ids, texts and the numbers of a limit."""
    limits = {"RateLimit", "RateLimit-Policy", "Retry-After"}
    headers = {name: "" if name in limits else value for name, value in body["headers"].items()}
    kept = {name: "" if name in OF_A_BODY else value for name, value in body.items()}
    problem = {name: "" if name in OF_A_BODY else value for name, value in body.get("problem", {}).items()}
    return {**kept, "headers": headers, "problem": problem}


@pytest.mark.parametrize("case", CASES["webhooks"], ids=lambda case: case["name"])
def test_conformance_webhooks_are_judged_as_by_the_service(case: Any) -> None:
    """The service's own verification takes one secret. A receiver accepts what any of its secrets verifies."""
    now = datetime.fromtimestamp(case["now"], UTC)
    headers = {name.lower(): value for name, value in case["headers"].items()}
    outcomes = {judged(secret, headers, case["body"].encode(), now) for secret in case["secrets"]} or {"secret"}
    expected = case["expect"].get("id") or case["expect"]["error"]
    if expected == "secret":
        assert "secret" in outcomes
    elif expected == "signature":
        assert outcomes == {"signature"}
    else:
        assert outcomes - {"signature"} == {expected}


def judged(secret: str, headers: dict[str, str], body: bytes, now: datetime) -> str:
    try:
        return verify(secret, headers, body, now)
    except SecretInvalidError:
        return "secret"
    except SignatureInvalidError:
        return "signature"


def test_conformance_webhook_signatures_differ_in_what_they_test() -> None:
    """Guarantee: refused messages have a signature, so that none of them is refused for a missing one only."""
    refused = [case for case in CASES["webhooks"] if case["expect"].get("error") == "signature"]
    assert sum(SIGNATURE_HEADER not in case["headers"] for case in refused) == 1


@pytest.mark.parametrize("case", CASES["sealed"], ids=lambda case: case["name"])
def test_conformance_sealed_keys_open_by_the_book(case: Any) -> None:
    expected = case["expect"].get("text")
    try:
        secret = X25519PrivateKey.from_private_bytes(decoded(case["private_key"]))
        opened = open_by_the_book(secret, decoded(case["sealed"]["enc"]), decoded(case["sealed"]["ciphertext"]))
    except (InvalidTag, ValueError):
        assert expected is None
    else:
        assert opened.decode() == expected or case["name"] == "text that is not base64url"


def test_conformance_recipient_is_one_that_the_service_seals_to() -> None:
    secret = X25519PrivateKey.from_private_bytes(decoded(RECIPIENT["private_key"]))
    assert public_text(secret) == RECIPIENT["public_key"]
    sealed = seal_to(RECIPIENT["public_key"], Plaintext("text"))
    assert open_by_the_book(secret, decoded(sealed.enc), decoded(sealed.ciphertext)) == b"text"
