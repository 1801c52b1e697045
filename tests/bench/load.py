"""Generate load on a server from the other core, and measure the server's processor time and memory."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.environment import ROOT

from .generators import Generators
from .machine import Cores, cost, list_process_tree, pinned, rss_mb

SETTLE_SHARE = 0.15
"""Share of a run, at each end, that is not measured, because the generator starts and stops."""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Result of one load: counts of the generator, and use of resources meanwhile. Members as in `figures.Run`."""

    counts: dict[str, float]
    share: float
    others: float
    steal: float
    cpu_us: float
    rss_mb: float

    @property
    def rate(self) -> float:
        return self.counts["requests"] / self.counts["seconds"]


def send_each_once(port: int, requests: Path, *, cores: Cores, connections: int) -> None:
    """Send every request once. Raises RuntimeError if the generator fails or a response is an error."""
    arguments = [str(port), str(requests), "--connections", str(connections)]
    done = subprocess.run(
        pinned([sys.executable, "-m", "tests.bench.pacer", *arguments, "--once"], cores.load),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    counts = _read(done.stdout)
    if done.returncode or counts is None or counts["errors"]:
        raise RuntimeError(f"Not every request had a response: {(done.stderr or done.stdout)[-500:]}")


def run_load(
    port: int,
    requests: Path,
    *,
    generators: Generators,
    process: int,
    cores: Cores,
    seconds: float,
    connections: int,
    rate: float | None,
) -> LoadResult:
    """Run a closed loop, or an open loop at `rate` per second. Raises RuntimeError if the generator fails."""
    command = pinned(generators.command(port, requests, seconds, connections, rate), cores.load)
    processes = list_process_tree(process)
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as generator:
        time.sleep(SETTLE_SHARE * seconds)
        before, began = cost(processes, cores.server), time.perf_counter()
        time.sleep((1 - 2 * SETTLE_SHARE) * seconds)
        after, took = cost(processes, cores.server), time.perf_counter() - began
        memory = rss_mb(processes)
        output, errors = generator.communicate(timeout=60)
    counts = _read(output)
    if generator.returncode or counts is None:
        raise RuntimeError(f"The generator failed: {(errors or output)[-500:]}")
    used = after.cpu_seconds - before.cpu_seconds
    answered = counts["requests"] / counts["seconds"]
    return LoadResult(
        counts=counts,
        share=used / took,
        others=max(0.0, after.core_seconds - before.core_seconds - used) / took,
        steal=(after.stolen_seconds - before.stolen_seconds) / took / (os.cpu_count() or 1),
        cpu_us=used / took / answered * 1e6 if answered else 0.0,
        rss_mb=memory,
    )


def _read(output: str) -> dict[str, float] | None:
    """Parse the last line, which every generator writes as JSON."""
    lines = output.strip().splitlines()
    try:
        counts: Any = json.loads(lines[-1])
    except (IndexError, ValueError):
        return None
    return counts if isinstance(counts, dict) else None
