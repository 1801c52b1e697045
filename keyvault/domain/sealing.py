"""Short-lived encryption of show-once secrets: AES-256-GCM under a key derived from a pepper.

A database dump alone cannot decrypt them. The layout is pepper version (4 bytes) ‖ salt (16) ‖ nonce (12) ‖ ciphertext
and tag. The key is HKDF-SHA256 (RFC 5869) of that pepper with a new salt each time. The context is additional
authenticated data and is not stored.
"""

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from keyvault.domain.base62 import RandomBytes
from keyvault.domain.digests import Peppers
from keyvault.domain.errors import IntegrityError
from keyvault.domain.plaintext import Plaintext

_VERSION_BYTES = 4
_SALT_BYTES = 16
_NONCE_BYTES = 12
_HEAD_BYTES = _VERSION_BYTES + _SALT_BYTES + _NONCE_BYTES


def seal(peppers: Peppers, text: Plaintext, context: bytes, random_bytes: RandomBytes) -> bytes:
    """Encrypt a text under the set's current pepper. It can be decrypted only with the same context."""
    version, salt, nonce = peppers.current_version, random_bytes(_SALT_BYTES), random_bytes(_NONCE_BYTES)
    ciphertext = _cipher(peppers, version, salt).encrypt(nonce, text.reveal().encode(), context)
    return version.to_bytes(_VERSION_BYTES) + salt + nonce + ciphertext


def unseal(peppers: Peppers, sealed: bytes, context: bytes) -> Plaintext:
    """Decrypt a sealed text. Raises IntegrityError if text, context or set differ, or the pepper is missing."""
    version, salt = sealed_with(sealed), sealed[_VERSION_BYTES : _HEAD_BYTES - _NONCE_BYTES]
    nonce, ciphertext = sealed[_HEAD_BYTES - _NONCE_BYTES : _HEAD_BYTES], sealed[_HEAD_BYTES:]
    if version not in peppers.versions or len(nonce) < _NONCE_BYTES:
        raise IntegrityError("A sealed secret cannot be decrypted.", internal=f"{peppers!r} has no version {version}")
    try:
        text = _cipher(peppers, version, salt).decrypt(nonce, ciphertext, context)
    except InvalidTag as error:
        raise IntegrityError("A sealed secret cannot be decrypted.", internal="it was altered or moved") from error
    return Plaintext(text.decode())


def sealed_with(sealed: bytes) -> int:
    """Return the pepper version that decrypts it."""
    return int.from_bytes(sealed[:_VERSION_BYTES])


def _cipher(peppers: Peppers, version: int, salt: bytes) -> AESGCM:
    """Derive the cipher. The label separates this use of the pepper from digests, and one environment from another."""
    label = f"keyvault/sealing/{peppers.pepper_set}/{version}".encode()
    return AESGCM(HKDF(SHA256(), 32, salt, label).derive(peppers.versions[version]))
