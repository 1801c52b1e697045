"""Sealing to a recipient: only the private key opens it, with independent implementations."""

import base64
import hmac
from hashlib import sha256

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
from hypothesis import given
from hypothesis import strategies as st

from keyvault.domain.plaintext import Plaintext
from keyvault.domain.recipient_keys import SUITE, find_recipient_fault, seal_to

PRIME = 2**255 - 19
LOW_ORDER = (
    0,
    1,
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
    PRIME - 1,
)
"""Every point of X25519 whose order divides the cofactor."""

secrets_ = st.binary(min_size=32, max_size=32).map(X25519PrivateKey.from_private_bytes)
strings = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=200)


def encoded(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def decoded(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def public_text(secret: X25519PrivateKey) -> str:
    return encoded(secret.public_key().public_bytes_raw())


def sealed_bytes(secret: X25519PrivateKey, text: str) -> tuple[bytes, bytes]:
    sealed = seal_to(public_text(secret), Plaintext(text))
    return decoded(sealed.enc), decoded(sealed.ciphertext)


def _extract(suite: bytes, salt: bytes, label: bytes, material: bytes) -> bytes:
    return hmac.digest(salt or bytes(32), b"HPKE-v1" + suite + label + material, sha256)


def _expand(suite: bytes, key: bytes, label: bytes, info: bytes, length: int) -> bytes:
    """One block of HKDF-Expand is enough here."""
    text = length.to_bytes(2, "big") + b"HPKE-v1" + suite + label + info + b"\x01"
    return hmac.digest(key, text, sha256)[:length]


def open_by_the_book(secret: X25519PrivateKey, enc: bytes, ciphertext: bytes) -> bytes:
    """RFC 9180, written from its sections 4.1, 5.1 and 5.2: base mode, empty info, empty aad, first message."""
    kem = b"KEM" + (0x0020).to_bytes(2, "big")
    shared = secret.exchange(X25519PublicKey.from_public_bytes(enc))
    prk = _extract(kem, b"", b"eae_prk", shared)
    context = enc + secret.public_key().public_bytes_raw()
    shared_secret = _expand(kem, prk, b"shared_secret", context, 32)
    hpke = b"HPKE" + b"".join(number.to_bytes(2, "big") for number in (0x0020, 0x0001, 0x0002))
    schedule = b"\x00" + _extract(hpke, b"", b"psk_id_hash", b"") + _extract(hpke, b"", b"info_hash", b"")
    master = _extract(hpke, shared_secret, b"secret", b"")
    key, nonce = _expand(hpke, master, b"key", schedule, 32), _expand(hpke, master, b"base_nonce", schedule, 12)
    return AESGCM(key).decrypt(nonce, ciphertext, b"")


@given(secrets_, strings)
def test_recipients_sealed_text_is_opened_by_its_recipient(secret: X25519PrivateKey, text: str) -> None:
    """Any HPKE library opens it: that of `cryptography`, and the steps of the RFC written out here."""
    enc, ciphertext = sealed_bytes(secret, text)
    suite = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)
    assert suite.decrypt(enc + ciphertext, secret).decode() == text
    assert open_by_the_book(secret, enc, ciphertext).decode() == text
    assert SUITE == "DHKEM(X25519, HKDF-SHA256), HKDF-SHA256, AES-256-GCM"


@given(secrets_, strings, st.data())
def test_recipients_sealed_text_that_was_touched_does_not_open(
    secret: X25519PrivateKey, text: str, data: st.DataObject
) -> None:
    """A text with one altered bit, at any place, cannot be opened."""
    enc, ciphertext = sealed_bytes(secret, text)
    whole = bytearray(enc + ciphertext)
    # The top bit of `enc` is masked by X25519, and yet it goes into the key by its bytes.
    place = data.draw(st.integers(0, len(whole) * 8 - 1))
    whole[place // 8] ^= 1 << place % 8
    with pytest.raises((InvalidTag, ValueError)):
        open_by_the_book(secret, bytes(whole[:32]), bytes(whole[32:]))


@given(secrets_, secrets_, strings)
def test_recipients_sealed_text_is_closed_to_everybody_else(
    secret: X25519PrivateKey, other: X25519PrivateKey, text: str
) -> None:
    if public_text(secret) == public_text(other):
        return
    enc, ciphertext = sealed_bytes(secret, text)
    with pytest.raises(InvalidTag):
        open_by_the_book(other, enc, ciphertext)


@given(secrets_, strings)
def test_recipients_sealing_twice_gives_unrelated_ciphertexts(secret: X25519PrivateKey, text: str) -> None:
    """Guarantee: each sealing uses a new ephemeral key, so equal texts give unrelated ciphertexts."""
    first, second = sealed_bytes(secret, text), sealed_bytes(secret, text)
    assert first[0] != second[0]
    assert first[1] != second[1]


@given(secrets_)
def test_recipients_every_public_key_of_a_private_one_is_taken(secret: X25519PrivateKey) -> None:
    text = public_text(secret)
    assert find_recipient_fault(text) is None
    assert len(text) == 43


@pytest.mark.parametrize("point", LOW_ORDER)
def test_recipients_point_of_low_order_is_refused(point: int) -> None:
    """Guarantee: a point of low order, whose shared secret is public, is refused as a recipient."""
    fault = find_recipient_fault(encoded(point.to_bytes(32, "little")))
    assert fault is not None
    assert "low order" in fault


@pytest.mark.parametrize("point", [PRIME, PRIME + 1, PRIME + 9, 2**255 + 9, 2**256 - 1])
def test_recipients_point_written_in_another_way_is_refused(point: int) -> None:
    """The recipient's library would hash another spelling of the key, and could never open the text."""
    fault = find_recipient_fault(encoded(point.to_bytes(32, "little")))
    assert fault is not None
    assert "canonical" in fault


@pytest.mark.parametrize(
    "text",
    [
        "",
        "A" * 42,
        "A" * 44,
        "CQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=",
        "CQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA\n",
        "CQAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAB",
        "CQ+AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
        "CQ/AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA",
        "\u00e9" * 43,
        "\ud800" * 43,
        "\u0660" * 43,
    ],
)
def test_recipients_text_of_another_form_is_refused(text: str) -> None:
    """Wrong lengths, padding, the other alphabet, unused bits and other characters get one clear error."""
    fault = find_recipient_fault(text)
    assert fault is not None
    assert "43 characters" in fault
    with pytest.raises(ValueError, match="public key"):
        seal_to(text, Plaintext("x"))


@given(st.text(max_size=60))
def test_recipients_no_text_breaks_the_check(text: str) -> None:
    find_recipient_fault(text)
