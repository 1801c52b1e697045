"""Signatures with an Ed25519 key that never leaves the server (RFC 8032)."""

import base64
from dataclasses import dataclass

from keyvault.backends.vault.kv import VaultBackend
from keyvault.backends.vault.layout import SIGNING_KEY, SecretsEngine, VaultRole
from keyvault.backends.vault.replies import parsing_reply


@dataclass(frozen=True, slots=True)
class Signature:
    """A signature and the version of the public key that verifies it."""

    signature: bytes
    key_version: int


def sign(backend: VaultBackend, scope: str, message: bytes) -> Signature:
    """Sign a message. Raises BackendUnavailableError, BackendDeniedError, BackendInvalidError."""
    body = {"input": base64.b64encode(message).decode()}
    url = f"/v1/{backend.layout.mount(SecretsEngine.ANCHOR, scope)}/sign/{SIGNING_KEY}"
    answer = backend.client(VaultRole.ANCHOR, scope).call(lambda client: client.adapter.post(url, json=body))
    with parsing_reply("signature"):
        _, version, text = answer["data"]["signature"].split(":")
        return Signature(base64.b64decode(text, validate=True), int(version.removeprefix("v")))


def read_public_keys(backend: VaultBackend, scope: str) -> dict[int, bytes]:
    """Return the raw public key (32 bytes) of every version. Raises the errors of `sign`."""
    url = f"/v1/{backend.layout.mount(SecretsEngine.ANCHOR, scope)}/keys/{SIGNING_KEY}"
    answer = backend.client(VaultRole.LOOKUP, scope).call(lambda client: client.adapter.get(url))
    with parsing_reply("public keys"):
        keys = answer["data"]["keys"].items()
        return {int(number): base64.b64decode(key["public_key"], validate=True) for number, key in keys}
