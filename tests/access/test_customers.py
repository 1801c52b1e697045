"""Customer access tokens: refusals before a look-up, proof of possession, owner and expiry."""

import hmac
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyvault.access.customers import (
    Customer,
    CustomerFault,
    CustomerRecord,
    judge_customer_record,
    judge_customer_token,
    read_customer_token,
)
from keyvault.access.principals import KeyHolder
from keyvault.domain.digests import DECOY_DIGEST, DECOY_VERSION, Mac
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind
from keyvault.domain.keystring import STRING_SCOPE, KeyString, StringKind, StringScope, checksum
from tests.domain.minting import keystrings, mint

from .judging import CUSTOMER_TOKEN, NOW, PEPPERS, PRODUCTION, SANDBOX, Case, key_string

HOLDER = KeyHolder("A" * 16, "crd_1", KeyKind.PRIVATE, SANDBOX, "acme")
SECOND = timedelta(seconds=1)


def read(text: str, environment: Environment = SANDBOX) -> KeyString | CustomerFault:
    return read_customer_token(text, environment=environment, key_prefix="kv")


def judge(record: CustomerRecord | None, text: str = CUSTOMER_TOKEN, holder: KeyHolder = HOLDER) -> object:
    keystring = read(text)
    assert isinstance(keystring, KeyString)
    return judge_customer_token(keystring, record, holder, PEPPERS[SANDBOX], NOW)


def forged() -> str:
    head = CUSTOMER_TOKEN[:27] + key_string(seed="another")[27:70]
    return head + checksum(head)


# --- before any look-up -----------------------------------------------------------------------------------


@pytest.mark.parametrize("environment", Environment)
def test_read_token_of_the_environment_is_read(environment: Environment) -> None:
    text = mint(StringKind.CUSTOMER_TOKEN, STRING_SCOPE[environment])
    found = read(text, environment)
    assert isinstance(found, KeyString)
    assert found.key_id == text[11:27]


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "x",
        CUSTOMER_TOKEN[:-1],
        CUSTOMER_TOKEN + " ",
        CUSTOMER_TOKEN[:-6] + "000000",
        CUSTOMER_TOKEN[:40] + "é" + CUSTOMER_TOKEN[41:],
        "Bearer " + CUSTOMER_TOKEN,
        mint(StringKind.CUSTOMER_TOKEN, StringScope.PRODUCTION),
        mint(StringKind.CUSTOMER_TOKEN, key_prefix="other"),
        mint(StringKind.SERVICE_TOKEN),
        key_string(),
        key_string(KeyKind.PUBLIC),
    ],
    ids=lambda text: ascii(text[:24]),
)
def test_read_token_that_is_malformed_or_of_another_environment_is_invalid(text: str) -> None:
    """A key, a service token or the other environment's token is no Bearer and causes no look-up."""
    assert read(text) is CustomerFault.INVALID


@given(st.text() | keystrings)
def test_read_token_of_any_text_raises_nothing(text: str) -> None:
    found = read(text)
    assert isinstance(found, KeyString) == (found is not CustomerFault.INVALID)


# --- proof ------------------------------------------------------------------------------------------------


def test_judge_token_with_the_right_secret_is_its_customer() -> None:
    record = Case().customer_record()
    assert judge(record) == Customer("cust-1", CUSTOMER_TOKEN[11:27], record.expires_at)


@pytest.mark.parametrize("revoked_at", [None, NOW])
@pytest.mark.parametrize("expires_at", [NOW - SECOND, NOW + SECOND])
def test_judge_token_without_proof_reveals_no_state(revoked_at: object, expires_at: object) -> None:
    """Guarantee: without the secret, a client learns neither the state of a token nor its existence."""
    record = Case().but(customer_revoked_at=revoked_at, customer_expires_at=expires_at).customer_record()
    assert judge(record, forged()) is CustomerFault.INVALID
    assert judge(None) is CustomerFault.INVALID


@pytest.mark.parametrize("holder", [replace(HOLDER, merchant_id="globex"), replace(HOLDER, environment=PRODUCTION)])
@pytest.mark.parametrize("revoked_at", [None, NOW])
@pytest.mark.parametrize("expires_at", [NOW - SECOND, NOW + SECOND])
def test_judge_token_with_another_account_s_key_is_invalid(
    holder: KeyHolder, revoked_at: object, expires_at: object
) -> None:
    """Guarantee: with a key of another merchant or environment, a client does not learn the token's state."""
    record = Case().but(customer_revoked_at=revoked_at, customer_expires_at=expires_at).customer_record()
    assert judge(record, holder=holder) is CustomerFault.INVALID


def test_judge_token_against_the_decoy_s_digest_is_invalid() -> None:
    for version in (DECOY_VERSION, 1):
        record = replace(Case().customer_record(), digest=DECOY_DIGEST, pepper_version=version)
        assert judge(record) is CustomerFault.INVALID


@pytest.mark.parametrize("how", ["unknown id", "wrong secret", "right secret", "revoked", "another merchant's"])
def test_judge_token_computes_one_digest_for_every_verdict(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown and a wrong token take the same computation, so the time of the response distinguishes neither."""
    record = Case().customer_record()
    if how == "revoked":
        record = replace(record, revoked_at=NOW)
    if how == "another merchant's":
        record = replace(record, merchant_id="globex")
    keystring = read(forged() if how == "wrong secret" else CUSTOMER_TOKEN)
    assert isinstance(keystring, KeyString)
    done: list[str] = []

    def counted(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            done.append(name)
            return real(*args)

        return call

    monkeypatch.setattr(Mac, "digest", counted("mac", Mac.digest))
    monkeypatch.setattr(hmac, "compare_digest", counted("comparison", hmac.compare_digest))
    judge_customer_token(keystring, None if how == "unknown id" else record, HOLDER, PEPPERS[SANDBOX], NOW)
    assert done == ["mac", "comparison"]


# --- state ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("revoked_at", "expires_at", "fault"),
    [
        (None, NOW + SECOND, None),
        (None, NOW + timedelta(microseconds=1), None),
        (None, NOW, CustomerFault.EXPIRED),
        (None, NOW - SECOND, CustomerFault.EXPIRED),
        (NOW, NOW + SECOND, CustomerFault.REVOKED),
        (NOW, NOW - SECOND, CustomerFault.EXPIRED),
        (NOW + SECOND, NOW + SECOND, CustomerFault.REVOKED),
    ],
)
def test_judge_token_by_its_state(revoked_at: object, expires_at: object, fault: CustomerFault | None) -> None:
    """A token is valid before its expiry and not at it. A revocation counts whatever its date is."""
    record = Case().but(customer_revoked_at=revoked_at, customer_expires_at=expires_at).customer_record()
    found = judge(record)
    assert isinstance(found, Customer) if fault is None else found is fault
    assert judge_customer_record(record, HOLDER, NOW) == found
