"""Base62 as key strings use it: `0-9A-Za-z`, most significant digit first, zero-padded."""

from collections.abc import Callable

ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

RandomBytes = Callable[[int], bytes]

_PAIRS = tuple(high + low for high in ALPHABET for low in ALPHABET)
_VALUES = {pair: value for value, pair in enumerate(_PAIRS)}


def encode(number: int, width: int) -> str:
    """Returns exactly `width` digits. Raises ValueError when the number is negative or does not fit."""
    if number < 0:
        raise ValueError("base62 has no sign")
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
    """The number of six digits, which is read sooner than it is written. Raises KeyError for what is none."""
    return _VALUES[digits[:2]] * 62**4 + _VALUES[digits[2:4]] * 62**2 + _VALUES[digits[4:]]


def random_digits(width: int, random_bytes: RandomBytes) -> str:
    """`width` uniformly random digits.

    Bytes from 248 up are drawn again (248 = 4 * 62), so that no digit is likelier than another; 43 digits
    carry 43 * log2(62) = 256.03 bits.
    """
    digits: list[str] = []
    while len(digits) < width:
        digits.extend(ALPHABET[byte % 62] for byte in random_bytes(width) if byte < 248)
    return "".join(digits[:width])
