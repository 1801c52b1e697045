"""Puts load on a server from the other core, and watches what the server pays for it meanwhile."""

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
from .machine import Cores, cost, members, pinned, rss_mb

SETTLE_SHARE = 0.15
"""Share of a run, at each end, whose processor time is not counted, since the generator starts and stops."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the generator counted, and what the server's processes, and others on their core, used while it did."""

    counted: dict[str, float]
    share: float
    others: float
    steal: float
    cpu_us: float
    rss_mb: float

    @property
    def rate(self) -> float:
        return self.counted["requests"] / self.counted["seconds"]


def fill(port: int, requests: Path, *, cores: Cores, connections: int) -> None:
    """Sends every request once. Raises RuntimeError when the generator fails, or an answer is an error."""
    asked = [str(port), str(requests), "--connections", str(connections)]
    done = subprocess.run(
        pinned([sys.executable, "-m", "tests.bench.pacer", *asked, "--once"], cores.load),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    counted = _read(done.stdout)
    if done.returncode or counted is None or counted["errors"]:
        raise RuntimeError(f"not every request was answered: {(done.stderr or done.stdout)[-500:]}")


def put_load(
    port: int,
    requests: Path,
    *,
    generators: Generators,
    process: int,
    cores: Cores,
    seconds: float,
    connections: int,
    rate: float | None,
) -> Loaded:
    """As fast as the server answers, or open loop at `rate` a second. Raises RuntimeError when the generator fails."""
    command = pinned(generators.command(port, requests, seconds, connections, rate), cores.load)
    processes = members(process)
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
    counted = _read(output)
    if generator.returncode or counted is None:
        raise RuntimeError(f"the generator failed: {(errors or output)[-500:]}")
    used = after.cpu_seconds - before.cpu_seconds
    answered = counted["requests"] / counted["seconds"]
    return Loaded(
        counted=counted,
        share=used / took,
        others=max(0.0, after.core_seconds - before.core_seconds - used) / took,
        steal=(after.stolen_seconds - before.stolen_seconds) / took / (os.cpu_count() or 1),
        cpu_us=used / took / answered * 1e6 if answered else 0.0,
        rss_mb=memory,
    )


def _read(output: str) -> dict[str, float] | None:
    """The last line, which every generator writes as JSON."""
    lines = output.strip().splitlines()
    try:
        counted: Any = json.loads(lines[-1])
    except (IndexError, ValueError):
        return None
    return counted if isinstance(counted, dict) else None
