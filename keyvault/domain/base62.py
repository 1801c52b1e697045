"""Base62 encoding of key strings: `0-9A-Za-z`, most significant digit first, zero-padded."""

from collections.abc import Callable

ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

RandomBytes = Callable[[int], bytes]

_PAIRS = tuple(high + low for high in ALPHABET for low in ALPHABET)
_VALUES = {pair: value for value, pair in enumerate(_PAIRS)}


def encode(number: int, width: int) -> str:
    """Encode a number in exactly `width` digits. Raises ValueError when it is negative or does not fit."""
    if number < 0:
        raise ValueError("base62 cannot encode a negative number")
    text = ""
    for _ in range(width // 2):
        number, pair = divmod(number, 62 * 62)
        text = _PAIRS[pair] + text
    if width % 2:
        number, digit = divmod(number, 62)
        text = ALPHABET[digit] + text
    if number:
        raise ValueError(f"the number needs more than {width} base62 digits")
    return text


def decode_six(digits: str) -> int:
    """Decode six digits by table lookup, which is faster than encoding a number. Raises KeyError on other text."""
    return _VALUES[digits[:2]] * 62**4 + _VALUES[digits[2:4]] * 62**2 + _VALUES[digits[4:]]


def random_digits(width: int, random_bytes: RandomBytes) -> str:
    """Return `width` uniformly random digits.

    Rejection sampling: bytes from 248 (4 * 62) up are drawn again, so that all digits are equally likely.
    43 digits carry 43 * log2(62) = 256.03 bits.
    """
    digits: list[str] = []
    while len(digits) < width:
        digits.extend(ALPHABET[byte % 62] for byte in random_bytes(width) if byte < 248)
    return "".join(digits[:width])
