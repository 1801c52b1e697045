"""Secrets planted in log lines: a sample of each shape; `make fuzz ARGS=redaction` plants 100,000."""

from itertools import islice

import pytest

from .planted import SHAPES, Secret, _is_shown, find_leaks

SAMPLE = 100 * len(SHAPES)


def test_redaction_leaves_no_planted_secret_in_any_shape_of_line() -> None:
    """Guarantee: no part of a secret is readable in a log line, whatever the line's shape."""
    assert len(SHAPES) >= 30
    assert [str(find) for find in islice(find_leaks(range(SAMPLE)), 5)] == []


@pytest.mark.parametrize(
    "line",
    ["x hunter2-ab y", "x%68unter2 y", "hun\nter2-ab", "hunt\x1b[0mer2-ab", "aGVsbG86aHVudGVyMi1hYmNkZWZnaGlqaw=="],
)
def test_search_finds_a_secret_in_each_encoding(line: str) -> None:
    """The search itself can fail: it decodes what a reader would."""
    assert _is_shown("hunter2-abcdefghijk", line)
    assert not _is_shown("hunter2-abcdefghijk", "x *** y")


def test_secret_is_not_shown_by_its_public_part() -> None:
    secret = Secret("kv_prv_sbx_0123456789abcdefSECRET", "SECRET", "key")
    assert not _is_shown(secret.hidden, "kv_prv_sbx_0123456789abcdef***")
