"""Ten seeds of `make simulate` with few steps each, and one run for each rule that is broken on purpose."""

import pytest

from tests.simulator.__main__ import main
from tests.simulator.broken import BROKEN
from tests.simulator.fleet import FleetOptions
from tests.simulator.report import format_result
from tests.simulator.simulation import Simulation

BUSY = FleetOptions(credentials=40, forgotten=0.4, pauses=0.03)
"""A small fleet in which much happens within few steps."""


@pytest.mark.parametrize("seed", range(1, 11))
def test_simulation_of_the_product_violates_nothing(seed: int) -> None:
    simulation = Simulation(seed, BUSY)
    result = simulation.run(1_500)
    assert result.violation is None, format_result(result, simulation.began_at, 0)
    assert result.counts["steps of consumer"]
    assert result.counts["rotation staged"]


WITHIN = 20_000
"""Steps in which a broken rule must be noticed."""

# For each broken rule: a seed that shows it soon, the fleet, and what the report says.
FOUND = {
    "silence is judged by key": (10, BUSY, "may be silent for"),
    "the minutes of one run are a habit": (
        5,
        FleetOptions(credentials=100, forgotten=0.2, new=0.7, pauses=0),
        "it was seen once",
    ),
    "a source has moved with its first host": (
        8,
        FleetOptions(credentials=60, forgotten=0.5, pauses=0),
        "may be silent for",
    ),
    "quarantine never reinstates": (
        1,
        FleetOptions(credentials=40, forgotten=0.3, sandbox=0.8),
        "its first attempt did not reinstate the key",
    ),
    "the clock revokes at the deadline": (1, BUSY, "the deadline has passed"),
    "a key is taken away beside one that may be dead": (
        4,
        FleetOptions(credentials=40, forgotten=0, races=0.4),
        "took the merchant's last key",
    ),
    "a dead key may live again": (6, BUSY, ", by the person"),
    "quarantine is skipped": (6, BUSY, "without a whole quarantine"),
    "a lost message is not sent again": (2, BUSY, "is stuck in"),
    "a campaign does not count its open rotations": (6, FleetOptions(credentials=100), "a campaign "),
    "the deadline has no effect": (2, BUSY, "is stuck in"),
}


def test_every_broken_rule_has_a_seed() -> None:
    assert FOUND.keys() == BROKEN.keys()


@pytest.mark.parametrize("rule", FOUND)
def test_broken_rule_violates_an_invariant(rule: str) -> None:
    """The simulator can fail: it reports every rule that is broken on purpose, with seed, step and events."""
    seed, options, what = FOUND[rule]
    simulation = Simulation(seed, options, BROKEN[rule])
    result = simulation.run(WITHIN)
    assert result.violation is not None, f"nothing was found in {WITHIN} steps"
    assert what in result.violation.what
    assert result.violation.events
    printed = format_result(result, simulation.began_at, 0)
    assert f"seed {seed}, step {result.steps}, " in printed
    assert printed.endswith(f"{result.steps} steps, 1 violations\n")


def test_command_prints_the_seed_and_the_count(capsys: pytest.CaptureFixture[str]) -> None:
    """A run depends on its seed only, so the command prints the counts of the same run here."""
    expected = Simulation(5, FleetOptions(credentials=20)).run(400)
    assert main(["--seed", "5", "--steps", "400", "--credentials", "20"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "seed 5"
    counts = [f"{count:>10,} {what}" for what, count in sorted(expected.counts.items())]
    assert printed[1:-2] == counts
    assert printed[-1] == "400 steps, 0 violations"
