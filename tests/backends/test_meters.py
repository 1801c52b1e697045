"""Metrics have few labels, and plain counts of durations become histograms in one process and in several."""

import re
from pathlib import Path
from subprocess import run
from sys import executable

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from keyvault.backends import meters
from keyvault.backends.meters import DurationTally

LABELS = {"entry_point", "outcome", "source", "code", "plane", "status", "task", "kind", "queue", "state"} | {
    "channel",
    "login",
    "reason",
    "scope",
    "set",
    "table",
}

ELSEWHERE = """
import os, sys
os.environ["PROMETHEUS_MULTIPROC_DIR"] = sys.argv[1]
from keyvault.backends import meters
for seconds in (0.0004, 0.03, 7.0):
    meters.slow_path.note(seconds)
meters.note_verifier(0, 0.5)
meters.note_verifier(0, 0.5)
"""


def all_meters() -> list[Counter | Gauge | Histogram]:
    return [meter for meter in vars(meters).values() if isinstance(meter, Counter | Gauge | Histogram)]


def test_labels_come_from_this_program() -> None:
    """Guarantee: no merchant, key, address or text of a client becomes a label."""
    assert {label for meter in all_meters() for label in meter._labelnames} == LABELS


def test_names_follow_prometheus() -> None:
    for meter in all_meters():
        (family,) = meter.describe()
        assert re.fullmatch(r"keyvault_[a-z_]+", family.name)
        assert not family.name.endswith(("_total", "_count", "_sum", "_bucket", "_ms", "_minutes"))
        assert family.documentation.endswith(".")


def test_tally_equals_observations() -> None:
    registry = CollectorRegistry()
    tallied, observed = (Histogram(name, "", buckets=(0.1, 1.0), registry=registry) for name in ("tallied", "observed"))
    tally = DurationTally(tallied)
    for round_ in ((0.05, 0.1, 0.2), (), (1.0, 5.0)):
        for seconds in round_:
            tally.note(seconds)
            observed.observe(seconds)
        tally.flush()
    text = generate_latest(registry).decode()

    def lines(name: str) -> list[str]:
        return [
            line.removeprefix(name) for line in text.splitlines() if line.startswith(name) and "_created" not in line
        ]

    assert lines("tallied") == lines("observed") != []


def test_tallies_of_several_processes_are_summed(tmp_path: Path) -> None:
    for _ in range(2):
        run([executable, "-c", ELSEWHERE, str(tmp_path)], check=True)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))  # type: ignore[no-untyped-call]  # the library's
    value = registry.get_sample_value
    name = "keyvault_slow_path_duration_seconds"
    assert value(f"{name}_count") == 6
    assert value(f"{name}_bucket", {"le": "0.05"}) == 4
    assert value(f"{name}_sum") == pytest.approx(14.0608)
