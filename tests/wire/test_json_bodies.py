"""Faults of a JSON body: each names its place in fixed text and repeats no input."""

import pytest

from keyvault.wire.json_bodies import read_object


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "Expecting value at line 1, column 1."),
        (b'{"a" 1}', "Expecting ':' delimiter at line 1, column 6."),
        (b'{"a":\n"\x01"}', "Invalid control character at line 2, column 2."),
        (b'{"a":"b', "Unterminated string starting at line 1, column 6."),
        (b"\xff", "it is not UTF-8."),
        (b'{"a":NaN}', "NaN is not a JSON number."),
        (b'{"a":1,"a":2}', "a name appears twice."),
    ],
)
def test_body_that_is_not_json_is_refused_with_the_position(body: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=r"^The body is not JSON: ") as refused:
        read_object(body)
    assert str(refused.value) == f"The body is not JSON: {reason}"
