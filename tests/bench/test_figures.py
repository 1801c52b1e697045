"""The arithmetic of the benchmarks: ratios, medians, noisy rounds, and whether a target is met."""

from dataclasses import replace
from typing import Any

import pytest

from .figures import HIT, OWN_HELLO, TARGETS, Met, Run, Spread, Target, number, percentile, ratio, ratio_by_cpu, spread


def run(
    case: str,
    turn: int,
    rate: float,
    *,
    share: float = 0.98,
    others: float = 0.0,
    steal: float = 0.0,
    errors: int = 0,
    is_waiting: bool = False,
) -> Run:
    return Run(
        case=case,
        round=turn,
        requests_per_second=rate,
        p50_us=1.0,
        p99_us=2.0,
        share=share,
        others=others,
        steal=steal,
        cpu_us=1.0,
        rss_mb=1.0,
        errors=errors,
        is_waiting=is_waiting,
    )


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1), (0.01, 1), (0.5, 50), (0.501, 51), (0.99, 99), (0.999, 100), (1.0, 100)]
)
def test_percentile_of_a_hundred_is_the_smallest_that_covers_the_share(share: float, expected: int) -> None:
    assert percentile(list(range(100, 0, -1)), share) == expected


def test_ratio_is_taken_round_by_round() -> None:
    """The machine is twice as fast in the second round; a ratio of medians would mix the rounds."""
    runs = [run("a", 1, 50), run("b", 1, 100), run("a", 2, 120), run("b", 2, 200), run("a", 3, 90), run("b", 3, 100)]
    assert ratio(runs, "a", "b") == Spread(0.6, 0.5, 0.9, 3)


def test_ratio_leaves_out_rounds_without_both_runs() -> None:
    runs = [run("a", 1, 50), run("b", 1, 100), run("a", 2, 120), run("b", 3, 1)]
    assert ratio(runs, "a", "b") == Spread(0.5, 0.5, 0.5, 1)


def test_ratio_without_a_common_round_is_none() -> None:
    assert ratio([run("a", 1, 50), run("b", 2, 100)], "a", "b") is None


def test_ratio_by_cpu_compares_the_processor_time_per_request() -> None:
    runs = [replace(run("a", turn, 50), cpu_us=8.0) for turn in (1, 2)] + [replace(run("b", 1, 100), cpu_us=4.0)]
    assert ratio_by_cpu(runs, "a", "b") == 0.5
    assert ratio_by_cpu(runs, "a", "c") is None


def test_ratio_counts_each_key_of_a_batch() -> None:
    assert ratio([run("a", 1, 3), run("b", 1, 100)], "a", "b", factor=100) == Spread(3.0, 3.0, 3.0, 1)


def test_ratio_leaves_noisy_rounds_out_where_enough_are_quiet() -> None:
    noisy = run("b", 3, 500, share=0.5)
    runs = [run("a", 1, 50), run("b", 1, 100), run("a", 2, 60), run("b", 2, 100), run("a", 3, 100), noisy]
    found = ratio(runs, "a", "b")
    assert found is not None
    assert (found.minimum, found.maximum, found.is_noisy) == (0.5, 0.6, False)


def test_ratio_with_too_few_quiet_rounds_uses_all_and_is_marked_noisy() -> None:
    runs = [run("a", turn, 50 * turn, share=0.5) for turn in (1, 2, 3)] + [run("b", turn, 100) for turn in (1, 2, 3)]
    assert ratio(runs, "a", "b") == Spread(1.0, 0.5, 1.5, 3, is_noisy=True)


@pytest.mark.parametrize(
    ("noise", "flags"),
    [
        ({}, 0),
        ({"share": 0.94}, 0),
        ({"share": 0.93}, 1),
        ({"share": 0.5, "is_waiting": True}, 0),
        ({"share": 0.5, "is_waiting": True, "others": 0.07}, 1),
        ({"others": 0.07}, 0),
        ({"steal": 0.011}, 1),
        ({"steal": 0.011, "is_waiting": True}, 1),
        ({"errors": 1}, 1),
        ({"share": 0.5, "steal": 0.5, "errors": 3}, 3),
    ],
)
def test_flags_name_each_disturbance_of_a_round(noise: dict[str, Any], flags: int) -> None:
    assert len(run("a", 1, 100, **noise).flags) == flags


def test_spread_of_one_quiet_round_is_not_noisy() -> None:
    assert spread([(3.0, True)]) == Spread(3.0, 3.0, 3.0, 1)
    assert spread([(3.0, False)]).is_noisy


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.521, "0.521"), (0.52149, "0.521"), (52.14, "52.1"), (106_199.4, "106,199")]
)
def test_number_shows_at_least_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_spread_shows_median_and_range() -> None:
    assert str(spread([(0.5, True), (0.6, True), (0.52, True)])) == "0.52 (0.5..0.6)"
    assert spread([(0.5, False)]).format(" ms") == "0.5 ms, noisy"


@pytest.mark.parametrize(
    ("is_ceiling", "measured", "met"),
    [
        (False, 0.49, Met.NO),
        (False, 0.5, Met.REQUIRED),
        (False, 0.6, Met.AIM),
        (True, 0.61, Met.NO),
        (True, 0.6, Met.REQUIRED),
        (True, 0.5, Met.AIM),
    ],
)
def test_target_is_compared_in_its_direction(is_ceiling: bool, measured: float, met: Met) -> None:
    required, aim = (0.6, 0.5) if is_ceiling else (0.5, 0.6)
    target = Target("t", required, aim, is_ceiling=is_ceiling)
    assert target.compare(Spread(measured, measured, measured, 1)) is met


def test_target_without_a_measurement_is_reported_as_not_run() -> None:
    assert Target("t", 1, 2).compare(None) is Met.NOT_RUN


def test_targets_have_the_agreed_bounds() -> None:
    """A changed bound fails this test: required value and aim of each target."""
    assert [(target.required, target.aim) for target in TARGETS] == [
        (0.5, 0.6),
        (1.5, 2),
        (0.35, 0.5),
        (1.6, 2),
        (50, 100),
        (0.7, 0.85),
        (0.35, 0.5),
        (3, 4.5),
        (1, 0.3),
        (0, 0),
        (20, 5),
        (50_000, 75_000),
        (20, 12),
        (0, 0),
        (1.25, 1.1),
        (2, 1.25),
        (5, 3),
        (2, 1.25),
        (100, 50),
        (12, 8),
        (5, 20),
        (2, 0.5),
    ]
    assert (TARGETS[0].above, TARGETS[0].below) == (HIT, OWN_HELLO)
