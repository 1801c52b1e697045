"""The keys that the benchmarks use."""

import pytest

from .seed_keys import has_allow_list


@pytest.mark.parametrize("percent", [0, 1, 10, 33, 100])
def test_allow_lists_are_spread_evenly(percent: int) -> None:
    """Any consecutive part of the keys has the same share with an allow-list."""
    listed = [has_allow_list(number, percent) for number in range(1000)]
    assert sum(listed) == 10 * percent
    assert abs(sum(listed[:500]) - 5 * percent) <= 1
