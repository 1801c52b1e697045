"""Single sign-on of operators: which claims of an ID token are accepted, and which roles they give.

`judge_claims` makes the checks of OpenID Connect Core 1.0, section 3.1.3.7, that follow the signature's. It never reads
an e-mail address: an operator is identified by issuer and subject.
"""

import hmac
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Self

from keyvault.access.roles import Role
from keyvault.domain.plaintext import Plaintext

LEEWAY_SECONDS = 60
"""Tolerated difference between the identity provider's clock and ours, in seconds."""

MAX_AGE_SECONDS = 600
"""Maximum age of an ID token when it is redeemed, in seconds."""

MAX_ISSUER_LENGTH = 200
MAX_SUBJECT_LENGTH = 191
"""Maximum lengths that the link between a subject and its operator stores, in characters."""

_SUBJECT = re.compile(rf"[!-~](?:[ -~]{{0,{MAX_SUBJECT_LENGTH - 2}}}[!-~])?")


class SignOnFault(StrEnum):
    """Why a single sign-on was refused. The audit log records the value as `reason`."""

    STATE_INVALID = "state_invalid"
    """The state is unknown, was used before, has expired or belongs to another browser."""
    ISSUER_MIXED_UP = "issuer_mixed_up"
    """The response names another issuer than the request's, or lacks the issuer that the provider announces."""
    PROVIDER_REFUSED = "provider_refused"
    """The identity provider answered with an error instead of a code."""
    PROVIDER_UNAVAILABLE = "provider_unavailable"
    CODE_REFUSED = "code_refused"
    """The identity provider did not redeem the code: it was used before, has expired or lacks its PKCE verifier."""
    TOKEN_MALFORMED = "token_malformed"  # noqa: S105  a reason, no secret
    ALGORITHM_NOT_ALLOWED = "algorithm_not_allowed"
    SIGNING_KEY_UNKNOWN = "signing_key_unknown"
    SIGNATURE_INVALID = "signature_invalid"
    ISSUER_WRONG = "issuer_wrong"
    AUDIENCE_WRONG = "audience_wrong"
    TOKEN_EXPIRED = "token_expired"  # noqa: S105  a reason, no secret
    ISSUED_IN_FUTURE = "issued_in_future"
    NONCE_WRONG = "nonce_wrong"
    AUTHENTICATION_TOO_OLD = "authentication_too_old"
    """The person authenticated earlier than the request allows."""
    SUBJECT_INVALID = "subject_invalid"
    NO_ROLE = "no_role"
    """No group of the subject maps to a role."""
    NAME_INVALID = "name_invalid"
    NAME_TAKEN = "name_taken"
    """The subject signs in for the first time, and another operator already has its name."""
    OPERATOR_DISABLED = "operator_disabled"


@dataclass(frozen=True, slots=True)
class IdentityProvider:
    """The configured OpenID Connect provider, and what its claims mean here.

    `second_factors`: pairs of a claim, `amr` or `acr`, and a value that proves a second factor; empty: none does.
    """

    issuer: str
    client_id: str
    client_secret: Plaintext = field(compare=False)
    groups_claim: str
    group_roles: Mapping[str, frozenset[Role]]
    second_factors: frozenset[tuple[str, str]] = frozenset()

    @property
    def requested_acr(self) -> tuple[str, ...]:
        """The `acr` values that the authorization request asks for."""
        return tuple(sorted(value for claim, value in self.second_factors if claim == "acr"))


@dataclass(frozen=True, slots=True)
class AuthorizationRequest:
    """The data to which the state of a pending sign-in is bound.

    `max_age_seconds`: maximum time from the person's authentication to `begun_at`. With 1 the provider asks the person
    to authenticate again.
    """

    issuer: str
    nonce: str
    begun_at: int
    max_age_seconds: int

    @classmethod
    def from_stored(cls, stored: Mapping[str, Any]) -> Self:
        return cls(stored["issuer"], stored["nonce"], stored["begun_at"], stored["max_age_seconds"])

    def stored(self) -> dict[str, Any]:
        """Return the request as JSON, for the session."""
        return asdict(self)

    def is_mixed_up(self, response_issuer: str | None, provider: IdentityProvider, *, names_issuer: bool) -> bool:
        """Return whether a response may come from a provider to which this request was not sent (RFC 9207).

        Args:
            response_issuer: the `iss` parameter of the response.
            names_issuer: whether the provider announces that its responses have the parameter.
        """
        if response_issuer is None:
            return names_issuer or self.issuer != provider.issuer
        return not self.issuer == provider.issuer == response_issuer


@dataclass(frozen=True, slots=True)
class FederatedIdentity:
    """A person whom the identity provider has authenticated. `name` is "" without a `preferred_username`.

    `second_factor_at`: when the person authenticated, if a second factor was used. Without an `auth_time` it is the
    epoch, which no action accepts that requires a recent factor.
    """

    issuer: str
    subject: str
    name: str
    roles: frozenset[Role]
    second_factor_at: datetime | None


def judge_claims(
    claims: Mapping[str, Any], provider: IdentityProvider, authorization: AuthorizationRequest, now: datetime
) -> FederatedIdentity | SignOnFault:
    """Return the identity that the claims of a token with a valid signature prove, or why they do not."""
    subject, name = claims.get("sub"), claims.get("preferred_username")
    if claims.get("iss") != provider.issuer:
        return SignOnFault.ISSUER_WRONG
    if not _is_for(claims, provider.client_id):
        return SignOnFault.AUDIENCE_WRONG
    if (fault := _find_time_fault(claims, authorization, now.timestamp())) is not None:
        return fault
    if not _is_equal(claims.get("nonce"), authorization.nonce):
        return SignOnFault.NONCE_WRONG
    if not isinstance(subject, str) or _SUBJECT.fullmatch(subject) is None:
        return SignOnFault.SUBJECT_INVALID
    return FederatedIdentity(
        provider.issuer,
        subject,
        name if isinstance(name, str) else "",
        _roles(claims.get(provider.groups_claim), provider),
        _find_second_factor(claims, provider),
    )


def _is_for(claims: Mapping[str, Any], client_id: str) -> bool:
    """Return whether this client is the audience. With several audiences, `azp` must name it, too."""
    audience, party = claims.get("aud"), claims.get("azp")
    audiences = audience if isinstance(audience, list) else [audience]
    if client_id not in audiences or (len(audiences) > 1 and party is None):
        return False
    return party is None or party == client_id


def _find_time_fault(claims: Mapping[str, Any], request: AuthorizationRequest, now: float) -> SignOnFault | None:
    times = {name: _read_time(claims[name]) for name in ("exp", "iat", "nbf", "auth_time") if name in claims}
    expires, issued = times.get("exp"), times.get("iat")
    if None in times.values() or expires is None or issued is None:
        return SignOnFault.TOKEN_MALFORMED
    begins, authenticated = times.get("nbf") or 0, times.get("auth_time")
    if now >= expires + LEEWAY_SECONDS or now >= issued + MAX_AGE_SECONDS + LEEWAY_SECONDS:
        return SignOnFault.TOKEN_EXPIRED
    if max(issued, begins, authenticated or 0) > now + LEEWAY_SECONDS:
        return SignOnFault.ISSUED_IN_FUTURE
    if authenticated is not None and authenticated < request.begun_at - request.max_age_seconds - LEEWAY_SECONDS:
        return SignOnFault.AUTHENTICATION_TOO_OLD
    return None


def _read_time(claim: object) -> float | None:
    """Return a NumericDate, or None. Python's JSON also reads NaN, which no comparison would refuse."""
    if isinstance(claim, bool) or not isinstance(claim, int | float) or not 0 <= claim < 2**53:
        return None
    return claim


def _is_equal(claim: object, expected: str) -> bool:
    return isinstance(claim, str) and hmac.compare_digest(claim.encode("utf-8", "surrogatepass"), expected.encode())


def _roles(groups: object, provider: IdentityProvider) -> frozenset[Role]:
    """Return the roles of the groups; none for anything but a list of texts."""
    names = groups if isinstance(groups, list) else []
    return frozenset().union(*(provider.group_roles.get(name, ()) for name in names if isinstance(name, str)))


def _find_second_factor(claims: Mapping[str, Any], provider: IdentityProvider) -> datetime | None:
    methods, context = claims.get("amr"), claims.get("acr")
    proved = {("amr", value) for value in (methods if isinstance(methods, list) else ()) if isinstance(value, str)}
    if isinstance(context, str):
        proved.add(("acr", context))
    if proved.isdisjoint(provider.second_factors):
        return None
    return datetime.fromtimestamp(claims.get("auth_time", 0), UTC)
