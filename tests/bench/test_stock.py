"""The keys that the benchmarks ask for."""

import pytest

from .stock import id_of, is_listed


@pytest.mark.parametrize("percent", [0, 1, 10, 33, 100])
def test_allow_lists_are_spread_evenly(percent: int) -> None:
    """Whoever asks for a part of the keys, in their order, asks for as many with a list."""
    listed = [is_listed(number, percent) for number in range(1000)]
    assert sum(listed) == 10 * percent
    assert abs(sum(listed[:500]) - 5 * percent) <= 1


def test_id_of_a_key_string_is_its_public_part() -> None:
    assert id_of(f"kv_prv_prd_{'k' * 16}{'s' * 43}{'c' * 6}") == "k" * 16
