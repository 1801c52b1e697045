"""Keys that never leave the server: an Ed25519 key signs (RFC 8032), an AES-256-GCM key wraps a master key."""

import base64
from dataclasses import dataclass
from typing import Any, Final

from keyvault.backends.vault.kv import VaultBackend
from keyvault.backends.vault.layout import SIGNING_KEY, WRAPPING_KEY, SecretsEngine, VaultRole, scopes_of
from keyvault.backends.vault.replies import parsing_reply

WRAPPED: Final = "vault:v"
"""Start of a wrapped master key: Transit's ciphertext, `vault:v<version of the wrapping key>:<base64>`."""


@dataclass(frozen=True, slots=True)
class Signature:
    """A signature and the version of the public key that verifies it."""

    signature: bytes
    key_version: int


def sign(backend: VaultBackend, scope: str, message: bytes) -> Signature:
    """Sign a message. Raises BackendUnavailableError, BackendDeniedError, BackendInvalidError."""
    body = {"input": base64.b64encode(message).decode()}
    answer = backend.call_transit(VaultRole.SIGNING, SecretsEngine.SIGNING, scope, f"sign/{SIGNING_KEY}", body)
    with parsing_reply("signature"):
        _, version, text = answer["data"]["signature"].split(":")
        return Signature(base64.b64decode(text, validate=True), int(version.removeprefix("v")))


def read_public_keys(backend: VaultBackend, scope: str) -> dict[int, bytes]:
    """Return the raw public key (32 bytes) of every version. Raises the errors of `sign`."""
    url = f"/v1/{backend.layout.mount(SecretsEngine.SIGNING, scope)}/keys/{SIGNING_KEY}"
    answer = backend.client(VaultRole.LOOKUP, scope).call(lambda client: client.adapter.get(url))
    with parsing_reply("public keys"):
        keys = answer["data"]["keys"].items()
        return {int(number): base64.b64decode(key["public_key"], validate=True) for number, key in keys}


def unwrap_master_key(backend: VaultBackend, wrapped: str) -> str:
    """Return the master key, 32 bytes in base64. Raises the errors of `sign`."""
    answer = _call_wrapping(backend, "decrypt", {"ciphertext": wrapped})
    with parsing_reply("master key"):
        return str(answer["data"]["plaintext"])


def make_wrapped_master_key(backend: VaultBackend) -> str:
    """Return a new master key that the server has made and wrapped. Raises the errors of `sign`."""
    answer = _call_wrapping(backend, "datakey/wrapped", {"bits": 256})
    with parsing_reply("wrapped master key"):
        return str(answer["data"]["ciphertext"])


def _call_wrapping(backend: VaultBackend, operation: str, body: dict[str, Any]) -> Any:
    (scope,) = scopes_of(SecretsEngine.WRAPPING)
    path = f"{operation}/{WRAPPING_KEY}"
    return backend.call_transit(VaultRole.UNWRAPPER, SecretsEngine.WRAPPING, scope, path, body)
