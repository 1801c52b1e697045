"""Claims of an ID token: which ones prove an identity, and which roles they give."""

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyvault.access.roles import Role
from keyvault.access.single_sign_on import (
    LEEWAY_SECONDS,
    MAX_AGE_SECONDS,
    MAX_SUBJECT_LENGTH,
    AuthorizationRequest,
    FederatedIdentity,
    IdentityProvider,
    SignOnFault,
    judge_claims,
)
from keyvault.domain.plaintext import Plaintext

ISSUER = "https://id.example.com"
NOW = 1_800_000_000
HOUR = 3600
NOTHING_PROVED = datetime.fromtimestamp(0, UTC)
PROVIDER = IdentityProvider(
    ISSUER,
    "console",
    Plaintext("secret"),
    "groups",
    {"staff=admins": frozenset({Role.KEY_ADMINISTRATOR, Role.AUDITOR}), "audit": frozenset({Role.AUDITOR})},
    frozenset({("amr", "mfa"), ("acr", "urn:strong")}),
)
REQUEST = AuthorizationRequest(ISSUER, "n-0S6_WzA2Mj", NOW - 30, 8 * HOUR)
CLAIMS: dict[str, Any] = {
    "iss": ISSUER,
    "sub": "248289761001",
    "aud": "console",
    "exp": NOW + 300,
    "iat": NOW - 5,
    "nonce": REQUEST.nonce,
    "preferred_username": "jane",
    "groups": ["audit", "other"],
}


def judge(request: AuthorizationRequest = REQUEST, **changes: Any) -> FederatedIdentity | SignOnFault:
    """Judge the claims with these changes; None removes one."""
    claims = {name: value for name, value in {**CLAIMS, **changes}.items() if value is not None}
    return judge_claims(claims, PROVIDER, request, datetime.fromtimestamp(NOW, UTC))


def identity(**changes: Any) -> FederatedIdentity:
    found = judge(**changes)
    assert isinstance(found, FederatedIdentity), found
    return found


def test_single_sign_on_right_claims_prove_the_identity() -> None:
    assert identity() == FederatedIdentity(ISSUER, "248289761001", "jane", frozenset({Role.AUDITOR}), None)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"iss": f"{ISSUER}/"}, SignOnFault.ISSUER_WRONG),
        ({"iss": None}, SignOnFault.ISSUER_WRONG),
        ({"iss": [ISSUER]}, SignOnFault.ISSUER_WRONG),
        ({"aud": "another"}, SignOnFault.AUDIENCE_WRONG),
        ({"aud": None}, SignOnFault.AUDIENCE_WRONG),
        ({"aud": []}, SignOnFault.AUDIENCE_WRONG),
        ({"aud": "console-2"}, SignOnFault.AUDIENCE_WRONG),
        ({"aud": ["console", "another"]}, SignOnFault.AUDIENCE_WRONG),
        ({"aud": ["console", "another"], "azp": "another"}, SignOnFault.AUDIENCE_WRONG),
        ({"azp": "another"}, SignOnFault.AUDIENCE_WRONG),
        ({"exp": NOW - LEEWAY_SECONDS}, SignOnFault.TOKEN_EXPIRED),
        ({"iat": NOW - MAX_AGE_SECONDS - LEEWAY_SECONDS}, SignOnFault.TOKEN_EXPIRED),
        ({"iat": NOW + LEEWAY_SECONDS + 1}, SignOnFault.ISSUED_IN_FUTURE),
        ({"nbf": NOW + LEEWAY_SECONDS + 1}, SignOnFault.ISSUED_IN_FUTURE),
        ({"auth_time": NOW + LEEWAY_SECONDS + 1}, SignOnFault.ISSUED_IN_FUTURE),
        ({"exp": None}, SignOnFault.TOKEN_MALFORMED),
        ({"iat": None}, SignOnFault.TOKEN_MALFORMED),
        ({"exp": str(NOW + 300)}, SignOnFault.TOKEN_MALFORMED),
        ({"exp": True}, SignOnFault.TOKEN_MALFORMED),
        ({"exp": float("nan")}, SignOnFault.TOKEN_MALFORMED),
        ({"iat": float("-inf")}, SignOnFault.TOKEN_MALFORMED),
        ({"exp": 10**400}, SignOnFault.TOKEN_MALFORMED),
        ({"nbf": "soon"}, SignOnFault.TOKEN_MALFORMED),
        ({"auth_time": "now"}, SignOnFault.TOKEN_MALFORMED),
        ({"nonce": None}, SignOnFault.NONCE_WRONG),
        ({"nonce": ""}, SignOnFault.NONCE_WRONG),
        ({"nonce": "n-0S6_WzA2Mk"}, SignOnFault.NONCE_WRONG),
        ({"nonce": "\ud800"}, SignOnFault.NONCE_WRONG),
        ({"nonce": [REQUEST.nonce]}, SignOnFault.NONCE_WRONG),
        ({"sub": None}, SignOnFault.SUBJECT_INVALID),
        ({"sub": ""}, SignOnFault.SUBJECT_INVALID),
        ({"sub": 248289761001}, SignOnFault.SUBJECT_INVALID),
        ({"sub": "s" * (MAX_SUBJECT_LENGTH + 1)}, SignOnFault.SUBJECT_INVALID),
        ({"sub": "248289761001 "}, SignOnFault.SUBJECT_INVALID),
        ({"sub": "\u0430dmin"}, SignOnFault.SUBJECT_INVALID),
    ],
)
def test_single_sign_on_a_wrong_claim_is_refused(changes: dict[str, Any], fault: SignOnFault) -> None:
    assert judge(**changes) is fault


@pytest.mark.parametrize(
    "changes",
    [
        {"aud": ["console"]},
        {"aud": ["another", "console"], "azp": "console"},
        {"exp": NOW - LEEWAY_SECONDS + 1},
        {"iat": NOW + LEEWAY_SECONDS},
        {"iat": NOW - 0.5},
        {"sub": "s" * MAX_SUBJECT_LENGTH},
        {"sub": "s"},
    ],
)
def test_single_sign_on_the_last_right_value_is_accepted(changes: dict[str, Any]) -> None:
    identity(**changes)


@given(
    st.dictionaries(
        st.sampled_from([*CLAIMS, "azp", "nbf", "auth_time", "amr", "acr"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
            max_leaves=4,
        ),
    )
)
def test_single_sign_on_any_claims_give_a_verdict(claims: dict[str, Any]) -> None:
    """Malformed claims cause a refusal, never an error."""
    verdict = judge_claims({**CLAIMS, **claims}, PROVIDER, REQUEST, datetime.fromtimestamp(NOW, UTC))
    assert isinstance(verdict, SignOnFault | FederatedIdentity)


@pytest.mark.parametrize(
    ("groups", "roles"),
    [
        (["staff=admins"], {Role.KEY_ADMINISTRATOR, Role.AUDITOR}),
        (["audit", "audit"], {Role.AUDITOR}),
        (["AUDIT", "audi", "key_administrator"], set()),
        ([], set()),
        ("audit", set()),
        ({"audit": True}, set()),
        ([["audit"], None], set()),
        (None, set()),
    ],
)
def test_single_sign_on_only_mapped_groups_give_roles(groups: Any, roles: set[Role]) -> None:
    assert identity(groups=groups).roles == roles


@pytest.mark.parametrize(
    ("claims", "proved_at"),
    [
        ({"amr": ["pwd", "mfa"], "auth_time": NOW - 60}, datetime.fromtimestamp(NOW - 60, UTC)),
        ({"acr": "urn:strong", "auth_time": NOW - 60}, datetime.fromtimestamp(NOW - 60, UTC)),
        ({"amr": ["mfa"]}, NOTHING_PROVED),
        ({"amr": ["pwd"], "auth_time": NOW}, None),
        ({"amr": "mfa", "auth_time": NOW}, None),
        ({"acr": "mfa", "auth_time": NOW}, None),
        ({"amr": ["urn:strong"], "acr": ["urn:strong"], "auth_time": NOW}, None),
    ],
)
def test_single_sign_on_only_a_configured_claim_proves_a_second_factor(
    claims: dict[str, Any], proved_at: datetime | None
) -> None:
    """Without the time of the authentication the factor is never a recent one."""
    assert identity(**claims).second_factor_at == proved_at


def test_single_sign_on_an_authentication_before_the_allowed_time_is_refused() -> None:
    again = AuthorizationRequest(ISSUER, REQUEST.nonce, NOW - 30, 0)
    assert judge(again, auth_time=NOW - 30 - LEEWAY_SECONDS - 1) is SignOnFault.AUTHENTICATION_TOO_OLD
    assert isinstance(judge(again, auth_time=NOW - 30), FederatedIdentity)
    assert isinstance(judge(REQUEST, auth_time=NOW - 8 * HOUR), FederatedIdentity)


@pytest.mark.parametrize(
    ("request_issuer", "response_issuer", "names_issuer", "is_mixed_up"),
    [
        (ISSUER, ISSUER, True, False),
        (ISSUER, None, False, False),
        (ISSUER, ISSUER, False, False),
        (ISSUER, None, True, True),
        (ISSUER, "https://evil.example", True, True),
        (ISSUER, "", False, True),
        ("https://evil.example", None, False, True),
        ("https://evil.example", "https://evil.example", True, True),
        ("https://evil.example", ISSUER, True, True),
    ],
)
def test_single_sign_on_a_response_of_another_provider_is_mixed_up(
    request_issuer: str, response_issuer: str | None, names_issuer: bool, is_mixed_up: bool
) -> None:
    request = AuthorizationRequest(request_issuer, "nonce", NOW, 0)
    assert request.is_mixed_up(response_issuer, PROVIDER, names_issuer=names_issuer) is is_mixed_up


def test_single_sign_on_request_survives_the_session() -> None:
    assert AuthorizationRequest.from_stored(REQUEST.stored()) == REQUEST
