"""Public ids: the format of each, and that none can be taken for another."""

import re
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyvault.domain.ids import Prefix, find_account_id, is_key_id, is_merchant_id, mint_id, mint_key_id

from .minting import drawn_from

UNFIT_ANYWHERE = ["", " ", "\n", "a\n", "\x00", "é", "a/b", "a%2fb", "..", "a b", "a.b", "a_b", "A:b", "\ud800"]


@pytest.mark.parametrize("prefix", get_args(Prefix))
def test_id_has_its_prefix_and_119_random_bits(prefix: Prefix) -> None:
    assert re.fullmatch(rf"{prefix}_[0-9A-Za-z]{{20}}", mint_id(prefix, drawn_from(prefix)))


@given(st.binary(min_size=1))
def test_key_id_is_16_base62_digits(seed: bytes) -> None:
    key_id = mint_key_id(drawn_from(seed))
    assert re.fullmatch(r"[0-9A-Za-z]{16}", key_id)
    assert is_key_id(key_id)


def test_ids_are_drawn_from_the_given_randomness_only() -> None:
    assert mint_key_id(drawn_from(1)) == mint_key_id(drawn_from(1)) != mint_key_id(drawn_from(2))
    assert mint_id("crd", drawn_from(1)) == mint_id("crd", drawn_from(1)) != mint_id("crd", drawn_from(2))


@pytest.mark.parametrize("text", ["A" * 15, "A" * 17, "A" * 15 + "_", "A" * 15 + "-", "A" * 16 + "\n", "٣" * 16])
def test_key_id_of_another_shape_is_none(text: str) -> None:
    """A key id occurs unescaped in URLs, paths and logs, so no other text is accepted as one."""
    assert not is_key_id(text)


@pytest.mark.parametrize("text", ["a", "acme", "0", "a-b", "acme-2", "a--b", "a" * 64])
def test_merchant_id_that_is_a_slug_is_accepted(text: str) -> None:
    assert is_merchant_id(text)


@pytest.mark.parametrize("text", ["-a", "a-", "-", "Acme", "a" * 65, "acme\n", "ácme", "a٣"])
def test_merchant_id_that_is_no_slug_is_refused(text: str) -> None:
    """A merchant id occurs unescaped in URLs, paths and labels, so text that needs escaping is refused."""
    assert not is_merchant_id(text)


@pytest.mark.parametrize("text", UNFIT_ANYWHERE)
def test_ids_with_unfit_characters_are_refused(text: str) -> None:
    assert not is_merchant_id(text)
    assert not is_key_id(text)


@given(st.text(max_size=70))
def test_merchant_id_accepted_is_plain_in_every_place(text: str) -> None:
    if is_merchant_id(text):
        assert set(text) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
        assert text.strip("-") == text


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("7/crd_a", 7), ("7", 7), ("7/con/more", 7), ("9" * 18 + "/a", 10**18 - 1),
        ("", None), ("/7", None), ("-7/a", None), ("7a/b", None), ("pending/7", None), ("\u0667/a", None),
        ("9" * 19, None),
    ],
)  # fmt: skip
def test_account_of_a_path_is_its_first_segment(path: str, expected: int | None) -> None:
    """Whatever another program wrote to the secret backend, the result is an id that a database can compare."""
    assert find_account_id(path) == expected
