"""The Idempotency-Key header: which values are the same key, and which are invalid."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyvault.domain.errors import ErrorCode, IdempotencyError, RequestInvalidError
from keyvault.wire.idempotency import read_idempotency_key

PRINTABLE = st.characters(min_codepoint=0x20, max_codepoint=0x7E)


def quoted(text: str) -> str:
    """A String of Structured Fields."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ("abc", "abc"),
        ('"abc"', "abc"),
        ("  abc\t", "abc"),
        ('" abc "', " abc "),
        (r'"a\"b\\c"', 'a"b\\c'),
        ("a,b", "a,b"),
        ('"abc', '"abc'),
        ('abc"', 'abc"'),
        ('"', '"'),
        (r'"a\bc"', r'"a\bc"'),
        ('"a"b"', '"a"b"'),
        ('"a";q=1', '"a";q=1'),
        ("x" * 255, "x" * 255),
        (quoted('"' * 255), '"' * 255),
    ],
)
def test_idempotency_key_quoted_and_bare_is_the_same_key(value: str, key: str) -> None:
    """Only a complete Structured-Fields string is unquoted; any other value is used unchanged."""
    assert read_idempotency_key(value) == key


@pytest.mark.parametrize("value", [None, "", "   ", "\t", '""'])
def test_idempotency_key_missing_or_empty_is_missing(value: str | None) -> None:
    with pytest.raises(IdempotencyError) as caught:
        read_idempotency_key(value)
    assert caught.value.code is ErrorCode.IDEMPOTENCY_KEY_MISSING


@pytest.mark.parametrize(
    "value", ["x" * 256, quoted("x" * 256), "caf\xe9", "a\tb", "a\x00b", "a\x7fb", "\u2603", "a\nb"]
)
def test_idempotency_key_that_is_invalid_is_refused_with_the_header_name(value: str) -> None:
    with pytest.raises(RequestInvalidError) as caught:
        read_idempotency_key(value)
    (fault,) = caught.value.faults
    assert fault.pointer == ""
    assert "Idempotency-Key" in fault.detail
    assert value not in fault.detail


@given(st.text(PRINTABLE, min_size=1, max_size=255))
def test_idempotency_key_of_any_printable_text_survives_quoting(text: str) -> None:
    assert read_idempotency_key(quoted(text)) == text


@given(st.text(max_size=300))
def test_idempotency_key_of_any_text_is_read_or_refused_by_name(text: str) -> None:
    """Every header value gives a key, or an error that states the reason."""
    try:
        key = read_idempotency_key(text)
    except (IdempotencyError, RequestInvalidError):
        return
    assert 1 <= len(key) <= 255
    assert key.isascii()
    assert key.isprintable()
