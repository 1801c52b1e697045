"""Customer ids: the merchant's own ids, if they need no escaping in a path."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyvault.access.catalog import is_plain_segment
from keyvault.access.customers import find_customer_id_fault
from tests.domain.minting import mint


@given(st.text(max_size=140) | st.from_regex(r"[A-Za-z0-9._~!$&'()*+,=:@-]{0,140}", fullmatch=True))
def test_customer_id_is_a_plain_segment_of_at_most_128_characters(text: str) -> None:
    """An id that a body accepts can be requested in a path, and the reverse."""
    assert (find_customer_id_fault(text) is None) == (len(text) <= 128 and is_plain_segment(text))


@pytest.mark.parametrize("text", ["", ".", "..", "a/b", "a b", "a;b", "a%2fb", "ä", "a\n", "a" * 129, mint()])
def test_customer_id_that_is_invalid_is_refused_without_quoting_it(text: str) -> None:
    fault = find_customer_id_fault(text)
    assert fault is not None
    assert len(text) < 5 or text not in fault


@pytest.mark.parametrize("text", ["a", "...", ".a", "cust-1", "me", "access-tokens", "a" * 128, "x@example.com"])
def test_customer_id_of_plain_characters_is_accepted(text: str) -> None:
    assert find_customer_id_fault(text) is None
