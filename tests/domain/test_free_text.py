"""Free text that is stored permanently: no key string stays in it, and a chosen name may not contain one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyvault.domain.free_text import clean_text, escape_unprintable, find_text_fault
from keyvault.domain.keystring import SHAPED

from .minting import keystrings, mint

KEY = mint(seed="free text")


@given(st.text(max_size=60), keystrings, st.text(max_size=60), st.integers(0, 200))
def test_clean_text_holds_no_key_string_and_is_no_longer_than_asked(
    before: str, text: str, after: str, longest: int
) -> None:
    """Text is masked before it is cut, so half a secret never remains."""
    clean = clean_text(before + text + after, longest)
    assert len(clean) <= longest
    assert text[text.rindex("_") + 17 :][:8] not in clean
    assert clean_text(clean, longest) == clean


def test_clean_text_leaves_what_is_no_secret() -> None:
    assert clean_text("leaked by acme, see INC-12", 300) == "leaked by acme, see INC-12"


@pytest.mark.parametrize("name", ["", "x" * 11, "a\x00b", "a\nb"])
def test_find_text_fault_of_an_invalid_name_states_what_is_accepted(name: str) -> None:
    assert find_text_fault(name, 10) == "1 to 10 printable characters"


@pytest.mark.parametrize("name", [KEY, f"shop {KEY}", KEY[:40], KEY.replace("_", "%255F")])
def test_find_text_fault_of_a_key_string_does_not_quote_it(name: str) -> None:
    fault = find_text_fault(name, 200)
    assert fault is not None
    assert "key string" in fault
    assert SHAPED.search(fault) is None


@pytest.mark.parametrize("name", ["x", "Acme & Söhne", "kv_prv_sbx checkout", KEY[:27]])
def test_find_text_fault_of_a_good_name_is_none(name: str) -> None:
    """The public part of a key string is no secret: support names keys by it."""
    assert find_text_fault(name, 100) is None


@given(st.text(st.characters() | st.sampled_from("\n\r\x1b\x85\x9b\u2028\u202e\ud800")))
def test_escape_unprintable_makes_one_printable_line(text: str) -> None:
    """Guarantee: text of clients neither begins a line nor controls a terminal."""
    shown = escape_unprintable(text)
    assert shown.isprintable()
    assert not text.isprintable() or shown == text


def test_escape_unprintable_leaves_ordinary_text_readable() -> None:
    text = "Söhne 日本語 \U0001f511 C:\\new"
    assert escape_unprintable(f"{text}\n\x1b[2J\x9b1m\x1b]0;x\x07") == f"{text}\\n\\x1b[2J\\x9b1m\\x1b]0;x\\x07"
