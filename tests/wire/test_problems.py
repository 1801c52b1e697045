"""Error codes on the wire: status, check and headers of each, as in the table of the contract."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyvault.domain.errors import (
    DependencyUnavailableError,
    ErrorCode,
    Fault,
    IdempotencyError,
    IntegrityError,
    KeyvaultError,
    NotFoundError,
    PermissionMissingError,
    RequestInvalidError,
    StateConflictError,
)
from keyvault.wire.problems import CONTENT_TYPE, PROBLEM_TYPES, Problem, problem, problems_page

# The reviewed table of codes, which docs/errors.md documents: code, status, check.
CONTRACT = """
| credential_in_url       | 400 | 1 |
| credential_ambiguous    | 400 | 1 |
| credential_missing      | 401 | 1 |
| credential_invalid      | 401 | 1 |
| environment_mismatch    | 401 | 2 |
| key_not_active          | 401 | 4 |
| key_expired             | 401 | 4 |
| key_revoked             | 401 | 4 |
| merchant_mismatch       | 403 | 2 |
| merchant_suspended      | 403 | 5 |
| endpoint_unknown        | 404 | 3 |
| method_not_allowed      | 405 | 3 |
| method_not_supported    | 403 | 3 |
| bearer_not_supported    | 401 | 3 |
| private_key_in_browser  | 403 | 3 |
| ip_not_allowed          | 403 | 5 |
| context_missing         | 403 | 5 |
| customer_token_missing  | 401 | 5 |
| customer_token_invalid  | 401 | 5 |
| customer_token_expired  | 401 | 4 |
| customer_token_revoked  | 401 | 4 |
| rate_limited            | 429 | - |
| verifier_stale          | 503 | - |
| not_found               | 404 | - |
| service_token_invalid   | 401 | ? |
| permission_missing      | 403 | - |
| request_invalid         | 400 | - |
| uri_too_long            | 414 | - |
| payload_too_large       | 413 | - |
| request_timeout         | 408 | - |
| media_type_unsupported  | 415 | - |
| state_conflict          | 409 | - |
| cursor_expired          | 410 | - |
| idempotency_key_missing   | 400 | - |
| idempotency_in_progress   | 409 | - |
| idempotency_body_mismatch | 422 | - |
| dependency_unavailable  | 503 | - |
| internal_error          | 500 | - |
"""
EXPECTED = {
    code: (int(status), None if check in "-?" else int(check))
    for code, status, check in re.findall(r"\| (\w+) +\| (\d+) \| (\S) \|", CONTRACT)
}
TRY_AGAIN = {
    ErrorCode.RATE_LIMITED,
    ErrorCode.VERIFIER_STALE,
    ErrorCode.DEPENDENCY_UNAVAILABLE,
    ErrorCode.IDEMPOTENCY_IN_PROGRESS,
}
"""Codes for which the contract demands Retry-After."""

CHALLENGES = {code for code in ErrorCode if PROBLEM_TYPES[code].status == 401}
TOKENS = {
    ErrorCode.CUSTOMER_TOKEN_MISSING,
    ErrorCode.CUSTOMER_TOKEN_INVALID,
    ErrorCode.CUSTOMER_TOKEN_EXPIRED,
    ErrorCode.CUSTOMER_TOKEN_REVOKED,
    ErrorCode.SERVICE_TOKEN_INVALID,
}

every_code = pytest.mark.parametrize("code", ErrorCode)


def answer(code: ErrorCode, **more: object) -> Problem:
    return problem(code, "In plain words.", "R1", **more)  # type: ignore[arg-type]  # a test's own words


def test_codes_are_those_of_the_contract() -> None:
    """Clients branch on codes: none is missing or renamed."""
    assert {code.value for code in ErrorCode} == set(EXPECTED)


def test_problem_types_exist_for_every_code() -> None:
    assert set(PROBLEM_TYPES) == set(ErrorCode)


@every_code
def test_problem_type_has_the_contract_s_status_and_check(code: ErrorCode) -> None:
    status, check = EXPECTED[code]
    assert PROBLEM_TYPES[code].status == status
    if code is not ErrorCode.SERVICE_TOKEN_INVALID:  # The contract gives it no check.
        assert PROBLEM_TYPES[code].check == check


@every_code
def test_problem_type_check_is_a_documented_rule_number(code: ErrorCode) -> None:
    assert PROBLEM_TYPES[code].check in {None, 1, 2, 3, 4, 5}


def test_problem_type_titles_are_distinct() -> None:
    titles = [kind.title for kind in PROBLEM_TYPES.values()]
    assert len(set(titles)) == len(titles)
    assert all(re.fullmatch(r"[A-Z][A-Za-z -]+", title) for title in titles)


@every_code
def test_problem_type_has_a_cause_and_a_remedy(code: ErrorCode) -> None:
    """The errors page explains each code: what happened and what to do, each in a sentence."""
    kind = PROBLEM_TYPES[code]
    for text in (kind.cause, kind.remedy):
        assert re.fullmatch(r"[A-Z].{10,}[.]", text)
        assert "|" not in text
    assert kind.cause != kind.remedy


def test_problems_page_lists_every_code_once_with_its_status() -> None:
    page = problems_page()
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| (\d?) \| (.+) \| (.+) \|$", page, re.MULTILINE)
    assert [code for _, code, *_ in rows] == [code.value for code in PROBLEM_TYPES]
    for status, code, check, cause, remedy in rows:
        kind = PROBLEM_TYPES[ErrorCode(code)]
        assert (int(status), check, cause, remedy) == (kind.status, str(kind.check or ""), kind.cause, kind.remedy)


# --- the body ---------------------------------------------------------------------------------------------


@every_code
def test_problem_body_has_the_members_of_rfc_9457_and_ours(code: ErrorCode) -> None:
    found = answer(code)
    status, _ = EXPECTED[code]
    assert found.status == found.body["status"] == status
    assert found.body["code"] == code.value
    assert found.body["request_id"] == "R1"
    assert found.body["detail"] == "In plain words."
    assert found.body["type"] == f"urn:keyvault:problem:{code.value}"
    assert found.body["title"] == PROBLEM_TYPES[code].title
    assert found.body.get("check") == PROBLEM_TYPES[code].check
    assert set(found.body) <= {"type", "title", "status", "code", "detail", "request_id", "check"}
    assert json.loads(json.dumps(dict(found.body))) == found.body
    assert CONTENT_TYPE == "application/problem+json"


def test_problem_lists_each_fault_with_its_pointer() -> None:
    faults = [Fault("/label", "too long"), Fault("/a~1b/0", "unknown")]
    body = answer(ErrorCode.REQUEST_INVALID, faults=faults).body
    assert body["errors"] == [
        {"pointer": "/label", "detail": "too long"},
        {"pointer": "/a~1b/0", "detail": "unknown"},
    ]
    assert "errors" not in answer(ErrorCode.REQUEST_INVALID).body


# --- headers ----------------------------------------------------------------------------------------------


@every_code
def test_problem_is_never_stored_by_a_cache(code: ErrorCode) -> None:
    assert answer(code).headers["Cache-Control"] == "no-store"


@every_code
def test_problem_of_401_alone_carries_a_challenge(code: ErrorCode) -> None:
    """RFC 9110: every 401 states how to authenticate; the schemes distinguish keys from tokens."""
    challenge = answer(code).headers.get("WWW-Authenticate")
    if code not in CHALLENGES:
        assert challenge is None
    elif code in TOKENS:
        assert challenge is not None
        assert challenge.startswith("Bearer ")
    else:
        assert challenge == 'ApiKey realm="keyvault", header="X-Api-Key"'


@every_code
def test_problem_challenge_is_well_formed(code: ErrorCode) -> None:
    challenge = PROBLEM_TYPES[code].challenge
    if challenge is not None:
        assert re.fullmatch(r'[A-Za-z]+ [a-z_]+="[^"\\]*"(, [a-z_]+="[^"\\]*")*', challenge)
        assert challenge.isascii()


@every_code
def test_problem_of_405_alone_carries_the_allowed_methods(code: ErrorCode) -> None:
    headers = answer(code, allowed_methods=("GET", "DELETE")).headers
    assert headers.get("Allow") == ("GET, DELETE" if code is ErrorCode.METHOD_NOT_ALLOWED else None)


def test_problem_of_405_without_methods_carries_an_empty_allow() -> None:
    assert answer(ErrorCode.METHOD_NOT_ALLOWED).headers["Allow"] == ""


@given(st.sampled_from(ErrorCode), st.integers(-(10**6), 10**6))
def test_problem_retry_after_is_whole_seconds_and_at_least_one(code: ErrorCode, seconds: int) -> None:
    """The header is a whole number of at least one second."""
    value = answer(code, retry_after_seconds=seconds).headers["Retry-After"]
    assert re.fullmatch(r"[1-9][0-9]*", value)
    assert int(value) == max(1, seconds)


@every_code
def test_problem_retry_after_is_always_there_where_waiting_helps(code: ErrorCode) -> None:
    """Each of these codes has a default Retry-After; the others have none."""
    assert answer(code).headers.get("Retry-After") == ("1" if code in TRY_AGAIN else None)
    assert answer(code, retry_after_seconds=7).headers["Retry-After"] == "7"


# --- the exceptions that carry a code ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyvaultError("d"), "internal_error"),
        (RequestInvalidError("d", [Fault("/a", "b")]), "request_invalid"),
        (NotFoundError("d"), "not_found"),
        (PermissionMissingError("d"), "permission_missing"),
        (StateConflictError("d"), "state_conflict"),
        (IdempotencyError(ErrorCode.IDEMPOTENCY_KEY_MISSING, "d"), "idempotency_key_missing"),
        (IdempotencyError(ErrorCode.IDEMPOTENCY_IN_PROGRESS, "d"), "idempotency_in_progress"),
        (IdempotencyError(ErrorCode.IDEMPOTENCY_BODY_MISMATCH, "d"), "idempotency_body_mismatch"),
        (DependencyUnavailableError("d"), "dependency_unavailable"),
        (IntegrityError("d"), "internal_error"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value,
)
def test_error_has_its_code_and_one_root(error: KeyvaultError, code: str) -> None:
    assert isinstance(error, KeyvaultError)
    assert (error.code, error.detail, error.internal) == (code, "d", "")


def test_error_keeps_its_internal_reason_out_of_its_text() -> None:
    """Guarantee: the internal reason is not in `str(error)`, which responses contain."""
    assert "table" not in str(NotFoundError("There is no such thing.", internal="table keys"))
