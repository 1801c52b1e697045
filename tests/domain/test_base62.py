"""Digits of key strings: their notation and their uniform distribution."""

import math
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyvault.domain.base62 import ALPHABET, decode_six, encode, random_digits

from .minting import ALPHANUMERIC, drawn_from


def decode(digits: str) -> int:
    """Decode digit by digit."""
    number = 0
    for digit in digits:
        number = number * 62 + ALPHANUMERIC.index(digit)
    return number


def first_bytes(*draws: bytes) -> Callable[[int], bytes]:
    """Return a source that yields these values, one for each call."""
    given_out = iter(draws)
    return lambda count: next(given_out)


def test_alphabet_is_digits_then_upper_then_lower_case() -> None:
    assert ALPHABET == ALPHANUMERIC
    assert len(set(ALPHABET)) == 62


@given(st.integers(0, 62**6 - 1))
def test_encode_any_number_round_trips_zero_padded(number: int) -> None:
    digits = encode(number, 6)
    assert len(digits) == 6
    assert decode(digits) == number == decode_six(digits)


@pytest.mark.parametrize("text", ["", "12345", "1234567", "12345-", "-12345", "1234\u0665\u0665", "123 45"])
def test_six_invalid_digits_have_no_number(text: str) -> None:
    with pytest.raises(KeyError):
        decode_six(text)


@given(st.lists(st.integers(0, 62**4 - 1), min_size=2, max_size=2, unique=True))
def test_encode_keeps_the_order_of_numbers(numbers: list[int]) -> None:
    """Most significant digit first, zero-padded, in ASCII's order: text sorts as numbers do."""
    low, high = sorted(numbers)
    assert encode(low, 4) < encode(high, 4)


@pytest.mark.parametrize(("number", "digits"), [(0, "0000"), (9, "0009"), (10, "000A"), (61, "000z"), (62, "0010")])
def test_encode_known_number_gives_known_digits(number: int, digits: str) -> None:
    assert encode(number, 4) == digits


@pytest.mark.parametrize("number", [-1, 62**4, 2**64])
def test_encode_number_that_does_not_fit_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match="base62"):
        encode(number, 4)


def test_checksum_digits_hold_every_crc32() -> None:
    """Two checksums never share their six digits."""
    assert 62**6 >= 2**32
    assert decode(encode(2**32 - 1, 6)) == 2**32 - 1


def test_random_digits_every_accepted_byte_is_as_likely_as_another() -> None:
    """No modulo bias: of the 256 values of a byte, each digit has exactly four, and eight are drawn again."""
    seen: Counter[str] = Counter()
    drawn_again = 0
    for byte in range(256):
        if byte < 248:
            seen[random_digits(1, first_bytes(bytes([byte])))] += 1
        else:
            assert random_digits(1, first_bytes(bytes([byte]), b"\x07")) == "7"
            drawn_again += 1
    assert seen == dict.fromkeys(ALPHANUMERIC, 4)
    assert drawn_again == 8


def test_random_digits_many_draws_are_spread_evenly() -> None:
    """A chi-squared test at every position of a secret: 61 degrees of freedom, far beyond one in a million."""
    source, rounds = drawn_from("spread"), 6_200
    columns = [Counter[str]() for _ in range(43)]
    for _ in range(rounds):
        for column, digit in zip(columns, random_digits(43, source), strict=True):
            column[digit] += 1
    expected = rounds / 62
    for column in columns:
        assert sum((column[digit] - expected) ** 2 / expected for digit in ALPHANUMERIC) < 130


@given(st.integers(0, 100), st.binary(min_size=8))
def test_random_digits_any_width_is_met_exactly(width: int, seed: bytes) -> None:
    digits = random_digits(width, drawn_from(seed))
    assert len(digits) == width
    assert set(digits) <= set(ALPHANUMERIC)


def test_random_digits_refused_bytes_are_drawn_again_until_there_are_enough() -> None:
    assert random_digits(3, first_bytes(b"\xff\xfe\x00", b"\xf8\xf9\x01", b"\x02\xff\xff")) == "012"


def test_random_digits_of_a_secret_carry_256_bits() -> None:
    """43 digits are enough for 256 bits; 42 are not."""
    assert 43 * math.log2(62) >= 256 > 42 * math.log2(62)
