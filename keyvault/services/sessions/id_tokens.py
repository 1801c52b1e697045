"""Verify the signature of an ID token with the identity provider's published keys.

Only asymmetric algorithms are accepted, and the algorithm must fit the key: a public key is never used as the secret
of an HMAC, and `none` is no algorithm. The claims are judged afterwards, see `access.single_sign_on`.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

import jwt

from keyvault.access.single_sign_on import (
    AuthorizationRequest,
    FederatedIdentity,
    IdentityProvider,
    SignOnFault,
    judge_claims,
)

MAX_TOKEN_LENGTH = 16_384
"""Maximum length of an ID token, in characters."""

KEY_TYPES: Mapping[str, str] = {
    **dict.fromkeys(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"), "RSA"),
    **dict.fromkeys(("ES256", "ES384", "ES512"), "EC"),
    "EdDSA": "OKP",
}
"""The accepted algorithms (RFC 7518, RFC 8037), and the type of key of each."""

FindKeys = Callable[[str], Iterable[Mapping[str, Any]]]
"""Returns the provider's published keys with a key id."""


def verify_id_token(
    token: object,
    find_keys: FindKeys,
    provider: IdentityProvider,
    authorization: AuthorizationRequest,
    now: datetime,
) -> FederatedIdentity | SignOnFault:
    """Return the identity that an ID token proves, or why it proves none."""
    claims = read_claims(token, find_keys)
    return claims if isinstance(claims, SignOnFault) else judge_claims(claims, provider, authorization, now)


def read_claims(token: object, find_keys: FindKeys) -> Mapping[str, Any] | SignOnFault:
    """Return the claims of a token with a valid signature."""
    if not isinstance(token, str) or len(token) > MAX_TOKEN_LENGTH:
        return SignOnFault.TOKEN_MALFORMED
    try:
        header = jwt.get_unverified_header(token)
    except (jwt.PyJWTError, ValueError):
        return SignOnFault.TOKEN_MALFORMED
    algorithm, key_id = header.get("alg"), header.get("kid")
    if not isinstance(algorithm, str) or algorithm not in KEY_TYPES:
        return SignOnFault.ALGORITHM_NOT_ALLOWED
    if "crit" in header or "b64" in header:
        return SignOnFault.TOKEN_MALFORMED
    keys = [] if not isinstance(key_id, str) else [key for key in find_keys(key_id) if _fits(key, algorithm)]
    if not keys:
        return SignOnFault.SIGNING_KEY_UNKNOWN
    for key in keys:
        payload = _verified_payload(token, key, algorithm)
        if payload is not None:
            return _read_object(payload)
    return SignOnFault.SIGNATURE_INVALID


def _fits(key: Mapping[str, Any], algorithm: str) -> bool:
    """Whether a published key is for signatures, and for this algorithm. A published private key proves nothing."""
    return (
        key.get("kty") == KEY_TYPES[algorithm]
        and "d" not in key
        and key.get("use", "sig") == "sig"
        and key.get("alg", algorithm) == algorithm
    )


def _verified_payload(token: str, key: Mapping[str, Any], algorithm: str) -> bytes | None:
    """Return the payload if this key signed it. A key that is unusable or too short has signed nothing."""
    try:
        payload: bytes = jwt.PyJWS().decode(
            token,
            jwt.PyJWK(dict(key), algorithm),
            algorithms=[algorithm],
            options={"verify_signature": True, "enforce_minimum_key_length": True},
        )
    except (jwt.PyJWTError, ValueError, TypeError, KeyError):
        return None
    return payload


def _read_object(payload: bytes) -> Mapping[str, Any] | SignOnFault:
    try:
        claims = json.loads(payload)
    except (ValueError, RecursionError):
        return SignOnFault.TOKEN_MALFORMED
    return claims if isinstance(claims, dict) else SignOnFault.TOKEN_MALFORMED
