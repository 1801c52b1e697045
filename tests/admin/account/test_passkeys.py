"""Passkeys that an operator adds: the response of the browser is untrusted. See `test_passkeys_in_a_browser`, too."""

import base64
import hashlib
import json
import struct
from typing import Any

import pytest
from django.test import Client
from fido2 import cbor

from keyvault.models import Operator
from keyvault.services.sessions.second_factors import PASSKEY, list_second_factors
from tests.admin.desk import Desk, browser, text_of

PAGE = "/admin/account/second-factors/passkey/"
ORIGIN = "http://localhost"

ES256 = {1: 2, 3: -7, -1: 1, -2: b"x" * 32, -3: b"y" * 32}
"""A public key for ECDSA (RFC 9053). Its point is not examined before it verifies a signature."""


def encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def authenticator_data(public_key: dict[int, Any] | None) -> bytes:
    """Return the data of an authenticator, with a new passkey of this public key; None: with none."""
    passkey = b"" if public_key is None else bytes(16) + struct.pack(">H", 4) + b"pass" + cbor.encode(public_key)
    flags = 0x01 if public_key is None else 0x41
    return hashlib.sha256(b"localhost").digest() + struct.pack(">BI", flags, 0) + passkey


def response(client: Client, data: object, **more: Any) -> str:
    """Return the response of a browser to the challenge of the page, as JSON."""
    challenge = client.get(PAGE).context["passkey_options"]["publicKey"]["challenge"]
    client_data = {"type": "webauthn.create", "challenge": challenge, "origin": ORIGIN}
    attestation = {"fmt": "none", "attStmt": {}, "authData": data}
    parts = {
        "clientDataJSON": encode(json.dumps(client_data).encode()),
        "attestationObject": encode(cbor.encode(attestation)),
    }
    return json.dumps(
        {"id": encode(b"pass"), "rawId": encode(b"pass"), "type": "public-key", "response": parts, **more}
    )


def add(client: Client, credential: str) -> Any:
    return client.post(PAGE, {"name": "laptop", "second_factor_credential": credential})


@pytest.fixture
def client(desk: Desk) -> Client:
    return browser(desk.tam, SERVER_NAME="localhost")


def stored() -> list[dict[str, Any]]:
    factors = list_second_factors(Operator.objects.get(username="tam"))
    return [factor.data["credential"] for factor in factors if factor.type == PASSKEY]


@pytest.mark.database
@pytest.mark.parametrize("extra", ['"\\ud800"', "NaN", '{"\\ud800": 1}'], ids=str)
def test_passkey_is_stored_without_other_members_of_the_response(client: Client, extra: str) -> None:
    """Guarantee: only what verification needs is stored, so that no database refuses it."""
    sent = response(client, authenticator_data(ES256), clientExtensionResults="EXTRA")
    assert add(client, sent.replace('"EXTRA"', extra)).status_code == 302
    (credential,) = stored()
    assert credential.keys() == {"id", "rawId", "response"}
    assert credential["response"].keys() == {"clientDataJSON", "attestationObject"}
    assert client.get("/admin/second-factor/").status_code == 200


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(10**15, id="number"),
        pytest.param(authenticator_data(None), id="no passkey"),
        pytest.param(authenticator_data({**ES256, 3: -65_000}), id="algorithm that nothing verifies"),
    ],
)
def test_passkey_that_cannot_be_verified_is_refused(client: Client, data: object) -> None:
    """Guarantee: no response is a fault of the server. fido2 would allocate as many bytes as a number says."""
    answer = add(client, response(client, data))
    assert answer.status_code == 400
    assert "was not accepted" in text_of(answer)
    assert stored() == []
