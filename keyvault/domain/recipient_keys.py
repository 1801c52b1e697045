"""Encryption of a new key to its recipient: HPKE (RFC 9180) in base mode, one suite, empty info and aad.

The holder of the recipient's private key decrypts with any HPKE library. The service cannot decrypt.
"""

import base64
import binascii
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from keyvault.domain.plaintext import Plaintext

SUITE = "DHKEM(X25519, HKDF-SHA256), HKDF-SHA256, AES-256-GCM"

KEY_BYTES = 32
KEY_CHARACTERS = 43
_ENC_BYTES = 32
_FIELD_PRIME = 2**255 - 19

# Any scalar detects a point of low order: clamping makes each a multiple of the cofactor (RFC 7748, section 5).
_PROBE = X25519PrivateKey.from_private_bytes(bytes(KEY_BYTES))

_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)


@dataclass(frozen=True, slots=True)
class Sealed:
    """The encapsulated key and the ciphertext, each in base64url without padding."""

    enc: str
    ciphertext: str


def find_recipient_fault(text: str) -> str | None:
    """Return the requirement that a recipient's public key fails, or None.

    Anybody could decrypt a message to a point of low order. No recipient could decrypt one to a non-canonical encoding.
    """
    shape = f"{KEY_CHARACTERS} characters of base64url without padding: the {KEY_BYTES} bytes of an X25519 public key"
    raw = _decode(text)
    if raw is None:
        return shape
    if int.from_bytes(raw, "little") >= _FIELD_PRIME:
        return "an X25519 public key in its canonical form"
    try:
        _PROBE.exchange(X25519PublicKey.from_public_bytes(raw))
    except ValueError:
        return "an X25519 public key that is not of low order"
    return None


def seal_to(recipient_public_key: str, text: Plaintext) -> Sealed:
    """Encrypt a text to the holder of the matching private key. Raises ValueError on an invalid public key."""
    raw = _decode(recipient_public_key)
    if raw is None:
        raise ValueError("not an X25519 public key")
    sealed = _SUITE.encrypt(text.reveal().encode("ascii"), X25519PublicKey.from_public_bytes(raw))
    return Sealed(_encode(sealed[:_ENC_BYTES]), _encode(sealed[_ENC_BYTES:]))


def _decode(text: str) -> bytes | None:
    """Decode base64url without padding. Returns None for any encoding that `_encode` does not produce."""
    if len(text) != KEY_CHARACTERS or not text.isascii():
        return None
    try:
        raw = base64.b64decode(text + "=", altchars=b"-_", validate=True)
    except binascii.Error:
        return None
    return raw if _encode(raw) == text else None


def _encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode("ascii")
