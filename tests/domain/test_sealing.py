"""Show-once secrets at rest: only the pepper of their set opens them, and only in their own context."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyvault.domain.digests import Peppers, PepperSet
from keyvault.domain.errors import IntegrityError
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.sealing import seal, unseal

OLD, NEW = bytes(range(32)), bytes(range(32, 64))
PEPPERS = Peppers(PepperSet.SANDBOX, {1: OLD})
CONTEXT = b"crd_1|orders.create|00"
SECRET = "kv_cat_sbx_0123456789"


def sealed(peppers: Peppers = PEPPERS, text: str = SECRET) -> bytes:
    return seal(peppers, Plaintext(text), CONTEXT, os.urandom)


@given(st.text(max_size=200), st.binary(max_size=100))
def test_sealing_opens_to_what_was_sealed(text: str, context: bytes) -> None:
    assert unseal(PEPPERS, seal(PEPPERS, Plaintext(text), context, os.urandom), context).reveal() == text


def test_sealing_the_same_text_twice_gives_unrelated_ciphertexts() -> None:
    """Salt and nonce are new each time: equal secrets cannot be recognized, and no key is used twice."""
    one, other = sealed(), sealed()
    assert one[:4] == other[:4]
    assert one[4:20] != other[4:20]
    assert one[20:32] != other[20:32]
    assert one[32:] != other[32:]
    assert SECRET.encode() not in one


def test_sealing_names_the_pepper_so_that_a_newer_one_does_not_lock_it_out() -> None:
    before = sealed()
    both = Peppers(PepperSet.SANDBOX, {1: OLD, 2: NEW})
    assert unseal(both, before, CONTEXT).reveal() == SECRET
    assert sealed(both)[:4] == (2).to_bytes(4)


@given(st.data())
def test_sealing_altered_anywhere_does_not_open(data: st.DataObject) -> None:
    """Every bit counts: version, salt, nonce, ciphertext and tag."""
    whole = sealed(Peppers(PepperSet.SANDBOX, {1: OLD, 2: NEW}))
    at = data.draw(st.integers(0, len(whole) * 8 - 1))
    altered = bytearray(whole)
    altered[at // 8] ^= 1 << at % 8
    with pytest.raises(IntegrityError):
        unseal(Peppers(PepperSet.SANDBOX, {1: OLD, 2: NEW}), bytes(altered), CONTEXT)


@given(st.integers(0, 200))
def test_sealing_cut_short_does_not_open(length: int) -> None:
    whole = sealed()
    with pytest.raises(IntegrityError):
        unseal(PEPPERS, whole[: min(length, len(whole) - 1)], CONTEXT)


@pytest.mark.parametrize(
    ("peppers", "context"),
    [
        (PEPPERS, b"crd_2|orders.create|00"),
        (Peppers(PepperSet.PRODUCTION, {1: OLD}), CONTEXT),
        (Peppers(PepperSet.SANDBOX, {1: NEW}), CONTEXT),
        (Peppers(PepperSet.SANDBOX, {2: OLD}), CONTEXT),
    ],
    ids=["another row", "another environment", "another pepper", "a pepper that is gone"],
)
def test_sealing_opens_nowhere_else(peppers: Peppers, context: bytes) -> None:
    """A sealed secret moved to another row or environment is refused, as is one whose pepper is not there."""
    whole = sealed()
    with pytest.raises(IntegrityError) as caught:
        unseal(peppers, whole, context)
    assert SECRET not in f"{caught.value} {caught.value.internal}"
