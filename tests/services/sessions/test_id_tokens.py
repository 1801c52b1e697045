"""Signatures of ID tokens: asymmetric only, by a published key that is meant for the algorithm."""

import base64
import hashlib
import hmac
import json
from collections.abc import Callable
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st
from jwt.algorithms import ECAlgorithm, HMACAlgorithm, OKPAlgorithm, RSAAlgorithm

from keyvault.access.single_sign_on import SignOnFault
from keyvault.services.sessions.id_tokens import MAX_TOKEN_LENGTH, read_claims
from tests.servers.identity_provider import SigningKey

CLAIMS = {"sub": "248289761001"}
KEY = SigningKey("key-1")
RSA_KEY = rsa.generate_private_key(65537, 2048)
SHORT_KEY = rsa.generate_private_key(65537, 1024)  # noqa: S505  a key that must be refused
ED_KEY = ed25519.Ed25519PrivateKey.generate()

Jwk = dict[str, Any]


def publish(*keys: Jwk) -> Callable[[str], list[Jwk]]:
    return lambda key_id: [key for key in keys if key["kid"] == key_id]


def rsa_jwk(key: rsa.RSAPrivateKey = RSA_KEY, **changes: Any) -> Jwk:
    return {**RSAAlgorithm.to_jwk(key.public_key(), as_dict=True), "kid": "key-1", **changes}


def segment(content: object) -> str:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def unsigned(header: Jwk, signature: bytes = b"") -> str:
    return f"{segment(header)}.{segment(CLAIMS)}.{segment(signature)}"


@pytest.mark.parametrize("algorithm", ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512"])
def test_id_token_of_an_rsa_key_is_accepted(algorithm: str) -> None:
    token = jwt.encode(CLAIMS, RSA_KEY, algorithm, {"kid": "key-1"})
    assert read_claims(token, publish(rsa_jwk())) == CLAIMS


@pytest.mark.parametrize(
    ("algorithm", "curve"), [("ES256", ec.SECP256R1()), ("ES384", ec.SECP384R1()), ("ES512", ec.SECP521R1())]
)
def test_id_token_of_an_elliptic_curve_key_is_accepted(algorithm: str, curve: ec.EllipticCurve) -> None:
    key = ec.generate_private_key(curve)
    published = {**ECAlgorithm.to_jwk(key.public_key(), as_dict=True), "kid": "key-1"}
    assert read_claims(jwt.encode(CLAIMS, key, algorithm, {"kid": "key-1"}), publish(published)) == CLAIMS


def test_id_token_of_an_edwards_curve_key_is_accepted() -> None:
    published = {**OKPAlgorithm.to_jwk(ED_KEY.public_key(), as_dict=True), "kid": "key-1"}
    assert read_claims(jwt.encode(CLAIMS, ED_KEY, "EdDSA", {"kid": "key-1"}), publish(published)) == CLAIMS


@pytest.mark.parametrize("algorithm", ["none", "None", "", None, "HS256", "HS512", "ES256K", ["ES256"], 1])
def test_id_token_with_another_algorithm_is_refused(algorithm: object) -> None:
    token = unsigned({"alg": algorithm, "kid": "key-1"})
    assert read_claims(token, publish(KEY.published)) is SignOnFault.ALGORITHM_NOT_ALLOWED


@pytest.mark.parametrize("encoding", [Encoding.PEM, Encoding.DER])
def test_id_token_with_the_public_key_as_hmac_secret_is_refused(encoding: Encoding) -> None:
    """Everyone knows the public key, so everyone could sign such a token."""
    secret = RSA_KEY.public_key().public_bytes(encoding, PublicFormat.SubjectPublicKeyInfo)
    header = {"alg": "HS256", "kid": "key-1"}
    signature = hmac.new(secret, f"{segment(header)}.{segment(CLAIMS)}".encode(), hashlib.sha256).digest()
    assert read_claims(unsigned(header, signature), publish(rsa_jwk())) is SignOnFault.ALGORITHM_NOT_ALLOWED


def test_id_token_of_a_published_symmetric_key_is_refused() -> None:
    published = {**HMACAlgorithm.to_jwk(b"s" * 32, as_dict=True), "kid": "key-1"}
    header = {"alg": "RS256", "kid": "key-1"}
    assert read_claims(unsigned(header, b"signature"), publish(published)) is SignOnFault.SIGNING_KEY_UNKNOWN


@pytest.mark.parametrize(
    "published",
    [
        KEY.published,
        rsa_jwk(use="enc"),
        rsa_jwk(alg="PS256"),
        rsa_jwk(kid="key-2"),
        {**RSAAlgorithm.to_jwk(RSA_KEY, as_dict=True), "kid": "key-1"},
    ],
    ids=["of another type", "for encryption", "for another algorithm", "with another id", "that is private"],
)
def test_id_token_without_a_published_key_for_it_is_refused(published: Jwk) -> None:
    token = jwt.encode(CLAIMS, RSA_KEY, "RS256", {"kid": "key-1"})
    assert read_claims(token, publish(published)) is SignOnFault.SIGNING_KEY_UNKNOWN


@pytest.mark.parametrize("key_id", [None, 1, ["key-1"]])
def test_id_token_without_a_key_id_is_refused(key_id: object) -> None:
    token = unsigned({"alg": "ES256"} if key_id is None else {"alg": "ES256", "kid": key_id})
    expected = SignOnFault.SIGNING_KEY_UNKNOWN if key_id is None else SignOnFault.TOKEN_MALFORMED
    assert read_claims(token, publish(KEY.published)) is expected


@pytest.mark.filterwarnings("ignore:The RSA key is 1024 bits long")
def test_id_token_of_a_short_key_is_refused() -> None:
    token = jwt.encode(CLAIMS, SHORT_KEY, "RS256", {"kid": "key-1"})
    assert read_claims(token, publish(rsa_jwk(SHORT_KEY))) is SignOnFault.SIGNATURE_INVALID


@pytest.mark.parametrize("broken", [{"x": "!"}, {"x": 1}, {"crv": "P-1"}, {"y": None}])
def test_id_token_of_a_key_that_is_no_key_is_refused(broken: Jwk) -> None:
    """One bad key of the provider does not hide a good one with the same id."""
    bad, token = {**KEY.published, **broken}, KEY.sign(CLAIMS)
    assert read_claims(token, publish(bad)) is SignOnFault.SIGNATURE_INVALID
    assert read_claims(token, publish(bad, KEY.published)) == CLAIMS


def test_id_token_with_changed_claims_is_refused() -> None:
    header, _, signature = KEY.sign(CLAIMS).split(".")
    forged = f"{header}.{segment({'sub': 'admin'})}.{signature}"
    assert read_claims(forged, publish(KEY.published)) is SignOnFault.SIGNATURE_INVALID


def test_id_token_of_another_key_is_refused() -> None:
    assert read_claims(SigningKey("key-1").sign(CLAIMS), publish(KEY.published)) is SignOnFault.SIGNATURE_INVALID


@pytest.mark.parametrize("header", [{"crit": ["exp"], "exp": 1}, {"crit": ["b64"], "b64": False}, {"b64": True}])
def test_id_token_with_a_critical_header_is_refused(header: Jwk) -> None:
    token = unsigned({"alg": "ES256", "kid": "key-1", **header})
    assert read_claims(token, publish(KEY.published)) is SignOnFault.TOKEN_MALFORMED


@pytest.mark.parametrize("payload", [b"[]", b'"text"', b"\xff", b"{", b"[" * 10_000])
def test_id_token_that_signs_no_claims_is_refused(payload: bytes) -> None:
    token = jwt.PyJWS().encode(payload, KEY.private, "ES256", {"kid": "key-1"})
    assert read_claims(token, publish(KEY.published)) is SignOnFault.TOKEN_MALFORMED


def test_id_token_that_is_too_long_is_refused_unread() -> None:
    token = KEY.sign({**CLAIMS, "padding": "p" * MAX_TOKEN_LENGTH})
    assert read_claims(token, publish(KEY.published)) is SignOnFault.TOKEN_MALFORMED


@given(
    st.none()
    | st.integers()
    | st.binary()
    | st.text()
    | st.from_regex(r"\A[A-Za-z0-9_-]{0,9}(\.[A-Za-z0-9_-]{0,9}){2}\Z")
)
def test_id_token_that_is_none_is_refused(token: object) -> None:
    assert isinstance(read_claims(token, publish(KEY.published)), SignOnFault)
