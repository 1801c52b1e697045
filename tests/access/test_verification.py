"""Judging a presented key: refusals before a look-up, proof of possession, and indistinguishable denials."""

import hmac
from collections.abc import Callable
from datetime import timedelta
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from keyvault.access.decision import Denial
from keyvault.access.principals import KeyHolder
from keyvault.access.verification import (
    INVALID,
    find_ambiguous,
    find_exposed,
    judge_key,
    judge_record,
    read_exposed,
    read_key,
)
from keyvault.domain.digests import DECOY_DIGEST, DECOY_VERSION, Mac
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode as Code
from keyvault.domain.keys import KeyKind, KeyState, RetirementReason
from keyvault.domain.keystring import KeyString, StringKind, StringScope, checksum
from tests.domain.minting import ALPHANUMERIC, keystrings, mint

from .judging import BASE_URLS, NOW, PEPPERS, PRODUCTION, SANDBOX, Case, key_string

DAY = timedelta(days=1)


def read(text: str | None, environment: Environment = SANDBOX) -> KeyString | Denial:
    return read_key(text, environment=environment, key_prefix="kv", base_urls=BASE_URLS)


def denied(text: str | None, environment: Environment = SANDBOX) -> Denial:
    found = read(text, environment)
    assert isinstance(found, Denial)
    return found


def keystring(text: str, environment: Environment = SANDBOX) -> KeyString:
    found = read(text, environment)
    assert isinstance(found, KeyString)
    return found


def forged(text: str) -> str:
    """Return a string with the same id, another secret and a correct checksum."""
    head = text[:27] + key_string(seed="another")[27:70]
    return head + checksum(head)


def judge_stored(case: Case, text: str | None = None) -> KeyHolder | Denial:
    return judge_key(keystring(text or key_string(case.kind)), case.record(), PEPPERS[SANDBOX], NOW)


# --- before any look-up -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KeyKind)
@pytest.mark.parametrize("environment", Environment)
def test_read_key_of_the_environment_is_read(kind: KeyKind, environment: Environment) -> None:
    text = key_string(kind, environment)
    found = keystring(text, environment)
    assert found.key_id == text[11:27]
    assert found.text.reveal() == text


def test_read_key_absent_is_missing() -> None:
    assert denied(None).code is Code.CREDENTIAL_MISSING


@pytest.mark.parametrize(
    "text",
    [
        f"{key_string()},{key_string()}",
        f"{key_string()}, {key_string(seed=2)}",
        f"{key_string()},",
        f",{key_string()}",
        ",",
        "a,b",
        f"{key_string(environment=PRODUCTION)},{key_string()}",
    ],
)
def test_ambiguous_credential_with_a_comma_is_found_and_none_is_chosen(text: str) -> None:
    """Servers join a repeated header with a comma: a repeated credential is refused, even if one of them is valid."""
    for name, found in (
        ("X-Api-Key", find_ambiguous(text, None)),
        ("X-Api-Key", find_ambiguous(text, "x")),
        ("Authorization", find_ambiguous(None, text)),
        ("Authorization", find_ambiguous(key_string(), text)),
    ):
        assert found is not None
        assert found.code is Code.CREDENTIAL_AMBIGUOUS
        assert name in found.detail
        assert found.holder is None
        assert text[-40:] not in repr(found) or text in {",", "a,b"}


@pytest.mark.parametrize("key", [None, "", " ", "x", key_string()])
@pytest.mark.parametrize("bearer", [None, "", "x", mint(StringKind.CUSTOMER_TOKEN)])
def test_ambiguous_credentials_without_a_comma_are_left_alone(key: str | None, bearer: str | None) -> None:
    assert find_ambiguous(key, bearer) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "kv",
        key_string()[:-1],
        key_string() + "A",
        key_string() + " ",
        " " + key_string(),
        key_string()[:-6] + "000000",
        key_string().upper(),
        key_string()[:40] + "é" + key_string()[41:],
        key_string()[:40] + "\ud800" + key_string()[41:],
        key_string() + "\x00",
        "Bearer " + key_string(),
        mint(key_prefix="other"),
        mint(StringKind.CUSTOMER_TOKEN),
        mint(StringKind.SERVICE_TOKEN),
        mint(StringKind.SERVICE_TOKEN, StringScope.ALL),
        mint(StringKind.SERVICE_TOKEN, StringScope.PRODUCTION),
        mint(StringKind.CUSTOMER_TOKEN, StringScope.PRODUCTION),
        "A" * 1_000_000,
    ],
    ids=lambda text: ascii(text[:24]),
)
def test_read_key_that_is_malformed_is_invalid(text: str) -> None:
    """Malformed and mistyped keys, keys with another prefix, and other tokens get the same refusal, without details."""
    assert denied(text) is INVALID


@given(st.text())
def test_read_key_of_any_text_raises_nothing(text: str) -> None:
    assert denied(text) is INVALID


@pytest.mark.parametrize("kind", KeyKind)
@pytest.mark.parametrize(("home", "asked"), [(SANDBOX, PRODUCTION), (PRODUCTION, SANDBOX)])
def test_read_key_of_the_other_environment_names_the_right_base_url(
    kind: KeyKind, home: Environment, asked: Environment
) -> None:
    """The key string names its environment, so the refusal needs no look-up and no pepper of the other environment."""
    found = denied(key_string(kind, home), asked)
    assert found.code is Code.ENVIRONMENT_MISMATCH
    assert BASE_URLS[home] in found.detail
    assert f"//{BASE_URLS[asked].partition('//')[2]}." not in found.detail
    assert found.holder is None


@given(keystrings, st.sampled_from(Environment))
def test_read_key_denial_never_repeats_what_was_presented(text: str, environment: Environment) -> None:
    """No response, log or dashboard repeats a refused key, not even its public part."""
    found = read(text, environment)
    if isinstance(found, Denial):
        assert text[-65:-49] not in found.detail + found.internal
        assert text[-49:] not in repr(found)


# --- in a URL ---------------------------------------------------------------------------------------------

ESCAPES: dict[str, Callable[[str], str]] = {
    "as it is": lambda text: text,
    "underscores escaped": lambda text: text.replace("_", "%5F"),
    "underscores escaped in lower case": lambda text: text.replace("_", "%5f"),
    "every character escaped": lambda text: "".join(f"%{ord(char):02X}" for char in text),
    "first character escaped": lambda text: f"%{ord(text[0]):02x}{text[1:]}",
    "some characters escaped": lambda text: "".join(
        f"%{ord(char):02x}" if at % 3 == 0 else char for at, char in enumerate(text)
    ),
    "escaped twice": lambda text: quote(quote("".join(f"%{ord(char):02X}" for char in text))),
    "escape escaped": lambda text: text.replace("_", "%255F"),
}


@pytest.mark.parametrize("escape", ESCAPES)
@pytest.mark.parametrize(
    "text",
    [
        key_string(),
        key_string(KeyKind.PUBLIC, PRODUCTION),
        mint(StringKind.SERVICE_TOKEN, StringScope.ALL),
        mint(StringKind.CUSTOMER_TOKEN, key_prefix="acme"),
        key_string()[:-6] + "000000",
        key_string()[:40],
    ],
    ids=["private", "public", "service", "another key prefix", "wrong checksum", "cut short"],
)
def test_exposed_credential_in_a_url_is_found(escape: str, text: str) -> None:
    """A credential in a path or query is refused whatever its kind and however often it was escaped."""
    for place in (
        "/merchants/orders/{}",
        "/orders?key={}",
        "/{}",
        "?a=b&x={}&c=d",
        "/a#{}",
        "https://u:{}@h/",
        "/a;k={}",
    ):
        found = find_exposed(place.format(ESCAPES[escape](text)))
        assert found is not None, place
        assert found.code is Code.CREDENTIAL_IN_URL
        assert found.holder is None
        assert text[-40:] not in repr(found)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "/",
        "/merchants/orders/ord_1?a=b",
        f"/v1/keys/{key_string()[11:27]}/revoke",
        f"/v1/keys/{key_string()[:27]}",
        "/a?b=" + "A" * 4000,
        "/%",
        "/%zz%5",
        "/%ff%fe",
        "/kv_prv_sbx_",
        "/é\ud800",
    ],
    ids=lambda url: ascii(url[:30]),
)
def test_exposed_url_without_a_credential_is_left_alone(url: str) -> None:
    """Key ids are public and occur in the service's own URLs."""
    assert find_exposed(url) is None


@pytest.mark.parametrize("escape", ESCAPES)
@pytest.mark.parametrize("kind", KeyKind)
@pytest.mark.parametrize("environment", Environment)
def test_exposed_key_in_a_url_is_attributed_after_proof(escape: str, kind: KeyKind, environment: Environment) -> None:
    """Only a complete, well-formed API key can be attributed to a key."""
    text = key_string(kind, environment)
    found = read_exposed(f"/orders?a=b&x={ESCAPES[escape](text)}&c=d", "kv")
    assert found is not None
    assert (found.key_id, found.text.reveal()) == (text[11:27], text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        key_string()[:-1],
        key_string()[:-6] + "000000",
        mint(StringKind.SERVICE_TOKEN, StringScope.ALL),
        mint(StringKind.CUSTOMER_TOKEN),
        mint(key_prefix="other"),
        "kv_prv_sbx_" + "a" * 65,
    ],
)
def test_exposed_string_that_is_no_key_of_ours_is_attributed_to_none(text: str) -> None:
    assert read_exposed(f"/orders?x={text}", "kv") is None


def test_exposed_key_behind_a_forged_one_is_still_read() -> None:
    """A string that only looks like a key, put before the real one, does not hide the real one."""
    decoy = "kv_prv_sbx_" + "a" * 65
    found = read_exposed(f"/orders?x={decoy}&y={key_string()}", "kv")
    assert found is not None
    assert found.key_id == key_string()[11:27]


# --- proof ------------------------------------------------------------------------------------------------


def test_judge_key_with_the_right_secret_is_its_holder() -> None:
    found = judge_stored(Case(reports_origin=True, merchant_active=False))
    assert isinstance(found, KeyHolder)
    assert (found.key_id, found.credential_id, found.merchant_id) == (key_string()[11:27], "crd_1", "acme")
    assert (found.kind, found.environment) == (KeyKind.PRIVATE, SANDBOX)
    assert (found.merchant_active, found.account_active, found.reports_origin) == (False, True, True)


def test_judge_key_unknown_and_wrong_give_the_identical_denial() -> None:
    """No text and no field of a refusal reveals which key ids exist."""
    unknown = judge_key(keystring(key_string()), None, PEPPERS[SANDBOX], NOW)
    wrong = judge_stored(Case(), forged(key_string()))
    malformed = denied("nonsense")
    assert unknown is wrong is malformed is INVALID
    assert INVALID.holder is None
    assert INVALID.internal == ""


@pytest.mark.parametrize("state", KeyState)
def test_judge_key_without_proof_reveals_no_state(state: KeyState) -> None:
    """Guarantee: without the secret, a client learns neither the state of a key nor its existence."""
    for retirement in (None, *RetirementReason):
        assert judge_stored(Case(state=state, retirement=retirement, expires_at=NOW), forged(key_string())) is INVALID


@given(st.integers(27, 69), st.sampled_from(ALPHANUMERIC))
def test_judge_key_with_any_digit_of_the_secret_changed_is_invalid(at: int, digit: str) -> None:
    right = key_string()
    head = right[:at] + digit + right[at + 1 : 70]
    found = judge_stored(Case(), head + checksum(head))
    assert (found is INVALID) == (head != right[:70])


def test_judge_key_under_another_environment_s_peppers_is_invalid() -> None:
    """The pepper sets are separate: a digest copied from one environment's table proves nothing in the other."""
    assert judge_key(keystring(key_string()), Case().record(), PEPPERS[PRODUCTION], NOW) is INVALID


def test_judge_key_against_the_decoy_s_digest_is_invalid() -> None:
    """Guarantee: a stored record with the decoy digest, which is public in the source, matches no key."""
    for version in (DECOY_VERSION, 1):
        record = replace(Case().record(), digest=DECOY_DIGEST, pepper_version=version)
        assert judge_key(keystring(key_string()), record, PEPPERS[SANDBOX], NOW) is INVALID


@pytest.mark.parametrize("how", ["unknown id", "wrong secret", "right secret", "revoked", "unknown pepper"])
def test_judge_key_computes_one_digest_for_every_verdict(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown key id takes the same computation as a wrong secret, so the time reveals no key ids."""
    record, text = Case().record(), key_string()
    if how == "wrong secret":
        text = forged(text)
    if how == "revoked":
        record = replace(record, state=KeyState.DEACTIVATED, retirement=RetirementReason.REVOKED)
    if how == "unknown pepper":
        record = replace(record, pepper_version=7)
    presented = keystring(text)
    done: list[str] = []

    def counted(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            done.append(name)
            return real(*args)

        return call

    monkeypatch.setattr(Mac, "digest", counted("mac", Mac.digest))
    monkeypatch.setattr(hmac, "compare_digest", counted("comparison", hmac.compare_digest))
    judge_key(presented, None if how == "unknown id" else record, PEPPERS[SANDBOX], NOW)
    assert done == ["mac", "comparison"]


# --- state ------------------------------------------------------------------------------------------------

S, EXPIRED, REVOKED = KeyState, RetirementReason.EXPIRED, RetirementReason.REVOKED


@pytest.mark.parametrize(
    ("state", "retirement", "expires_at", "code"),
    [
        (S.PRE_ACTIVATION, None, None, "key_not_active"),
        (S.PRE_ACTIVATION, None, NOW - DAY, "key_not_active"),
        (S.ACTIVE, None, None, None),
        (S.ACTIVE, None, NOW + DAY, None),
        (S.ACTIVE, None, NOW + timedelta(microseconds=1), None),
        (S.ACTIVE, None, NOW, "key_expired"),
        (S.ACTIVE, None, NOW - DAY, "key_expired"),
        (S.SUSPENDED, None, None, "key_not_active"),
        (S.SUSPENDED, None, NOW - DAY, "key_not_active"),
        (S.DEACTIVATED, EXPIRED, NOW - DAY, "key_expired"),
        (S.DEACTIVATED, REVOKED, None, "key_revoked"),
        (S.DEACTIVATED, REVOKED, NOW - DAY, "key_revoked"),
        (S.DEACTIVATED, None, None, "key_revoked"),
        (S.COMPROMISED, None, None, "key_revoked"),
        (S.COMPROMISED, None, NOW - DAY, "key_revoked"),
        (S.COMPROMISED, EXPIRED, NOW - DAY, "key_revoked"),
        (S.COMPROMISED, REVOKED, NOW + DAY, "key_revoked"),
        (S.DESTROYED, None, None, "key_revoked"),
        (S.DESTROYED, EXPIRED, NOW - DAY, "key_revoked"),
    ],
)
def test_judge_key_by_its_state(
    state: KeyState, retirement: RetirementReason | None, expires_at: object, code: str | None
) -> None:
    """The contract's row of `key_*` verdicts: expiry deactivated what is expired; a compromise is a revocation."""
    found = judge_stored(Case().but(state=state, retirement=retirement, expires_at=expires_at))
    if code is None:
        assert isinstance(found, KeyHolder)
    else:
        assert isinstance(found, Denial)
        assert found.code == code
        assert found.holder is not None
        assert found.holder.key_id == key_string()[11:27]


@pytest.mark.parametrize("state", KeyState)
@pytest.mark.parametrize("retirement", [None, *RetirementReason])
@pytest.mark.parametrize("expires_at", [None, NOW - DAY, NOW, NOW + DAY])
def test_judge_key_allows_an_active_unexpired_key_only(
    state: KeyState, retirement: RetirementReason | None, expires_at: object
) -> None:
    """Of all states, retirements and times before and after the expiry, exactly one combination is valid."""
    found = judge_stored(Case().but(state=state, retirement=retirement, expires_at=expires_at))
    is_good = state is KeyState.ACTIVE and (expires_at is None or expires_at == NOW + DAY)
    assert isinstance(found, KeyHolder) == is_good


@pytest.mark.parametrize("state", KeyState)
@pytest.mark.parametrize("retirement", [None, *RetirementReason])
@pytest.mark.parametrize("expires_at", [None, NOW - DAY, NOW, NOW + DAY])
def test_judge_record_explains_what_judge_key_answers_after_proof(
    state: KeyState, retirement: RetirementReason | None, expires_at: object
) -> None:
    """An explanation without the secret gives the verdict that the holder of the key gets."""
    case = Case().but(state=state, retirement=retirement, expires_at=expires_at)
    assert judge_record(case.record(), NOW) == judge_stored(case)
