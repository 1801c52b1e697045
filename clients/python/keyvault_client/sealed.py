"""Keys that are sealed to the merchant's recipient key. Requires `pip install keyvault_client[sealed]`."""

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from keyvault.domain.plaintext import Plaintext
from keyvault_client.errors import SealedError
from keyvault_client.keystrings import as_plaintext

_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)
_KEY_BYTES = 32


def create_recipient_key() -> tuple[Plaintext, str]:
    """Return a new recipient key: the private key to keep, and the public key for `set_recipient_key`."""
    private = Plaintext(_encode(X25519PrivateKey.generate().private_bytes_raw()))
    return private, recipient_public_key(private)


def recipient_public_key(private_key: str | Plaintext) -> str:
    """Return the public key of a recipient key, for `set_recipient_key`. Raises SealedError for text that is none."""
    private_key = as_plaintext(private_key)
    try:
        recipient = X25519PrivateKey.from_private_bytes(_decode(private_key.reveal()))
        return _encode(recipient.public_key().public_bytes_raw())
    except ValueError:
        pass
    raise SealedError("the private recipient key is not 32 bytes in base64url without padding")


def open_sealed(private_key: str | Plaintext, sealed: Mapping[str, Any]) -> Plaintext:
    """Decrypt a sealed key: HPKE (RFC 9180) in base mode, empty info and aad.

    Args:
        private_key: 32 bytes of X25519 in base64url without padding.
        sealed: `enc` and `ciphertext`, as webhooks and answers contain them.

    Raises SealedError.
    """
    private_key = as_plaintext(private_key)
    try:
        recipient = X25519PrivateKey.from_private_bytes(_decode(private_key.reveal()))
        enc, ciphertext = _decode(sealed["enc"]), _decode(sealed["ciphertext"])
        if len(enc) == _KEY_BYTES:
            return Plaintext(_SUITE.decrypt(enc + ciphertext, recipient).decode("ascii"))
    except (ValueError, KeyError, TypeError, AttributeError, InvalidTag):
        pass
    raise SealedError("the sealed key cannot be opened with this private key")


def _decode(text: str) -> bytes:
    """Decode base64url without padding. Raises ValueError for any encoding that `_encode` does not produce."""
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError("not base64url") from error
    if _encode(raw) != text:
        raise ValueError("not base64url without padding")
    return raw


def _encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode("ascii")
