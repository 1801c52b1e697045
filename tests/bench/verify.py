"""Rate and latency of every server, in interleaved rounds."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .cases import BenchmarkCase, find_wrong_response
from .figures import HIT, TAIL, Run, Spread, find_noise, number, spread
from .generators import find_generators
from .launch import RunningServer, StartError, running_server
from .load import LoadResult, run_load, send_each_once
from .machine import Cores
from .pacer import write_requests
from .progress import report
from .servers import SERVERS, LaunchPlan, Server
from .testbed import PEER_KEYS, NotRunError, Testbed

PACE = 0.8
"""Offered load in open loop, as a share of the server's own maximum."""

CHECKED_AFTER = 20
"""Number of probes that are checked after the measurement, including those that must be denied."""

MAX_STEAL_OF_TAIL = 0.004
"""Maximum stolen share for a valid p99: one of two cores stolen for 1 % of the time determines the p99."""

MIN_ACHIEVED = 0.98
"""Minimum share of the offered requests that must have a response in time."""

MAX_LATE_SHARE = 0.5
"""Maximum delay of the generator itself, as a share of the p99."""


def add_options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--seconds", type=float, default=2, help="of each measurement, whole seconds; default 2")
    parser.add_argument("--warm-up", type=float, default=1, help="seconds before each measurement; default 1")
    parser.add_argument("--connections", type=int, default=32, help="default 32")
    parser.add_argument(
        "--keys", type=int, default=PEER_KEYS, help="keys in rotation; default as many as the peers have"
    )
    parser.add_argument("--listed", type=int, default=10, help="percent of the keys with an allow-list; default 10")
    parser.add_argument("--paced-rounds", type=int, default=3, help="rounds in open loop; default 3")
    parser.add_argument("--paced-turns", type=int, default=3, help="measurements in each round in open loop; default 3")
    parser.add_argument("--paced-seconds", type=float, default=3, help="default 3")
    parser.add_argument("--only", action="append", metavar="SERVER", help="measure only this server; see --list")


@dataclass(frozen=True, slots=True)
class OpenLoopRun:
    """One case in open loop. `flags`: why the round is noisy."""

    case: str
    round: int
    offered: float
    achieved: float
    p50_us: float
    p99_us: float
    p999_us: float
    flags: list[str]


class VerifyBenchmark:
    """One run of the benchmark. `states`: for each case without figures, the reason."""

    def __init__(self, testbed: Testbed, cores: Cores, options: argparse.Namespace) -> None:
        self._testbed, self._cores, self._options = testbed, cores, options
        self._generators = find_generators(testbed.folder)
        self._servers = [each for each in SERVERS if not options.only or each.name in options.only]
        self.runs: list[Run] = []
        self.paced: list[OpenLoopRun] = []
        self.states: dict[str, str] = {}

    def run(self) -> dict[str, Any]:
        for advice in self._generators.advice:
            report(advice)
        for server in SERVERS:
            if server not in self._servers:
                self.states |= dict.fromkeys(server.cases, "not run: excluded by --only")
        plans = {server: plan for server in self._servers if (plan := self._plan(server)) is not None}
        for turn in range(1, self._options.rounds + 1):
            report(f"\nround {turn} of {self._options.rounds}: requests a second, closed loop")
            for server, plan in plans.items():
                self._measure(server, plan, turn)
        for turn in range(1, self._options.paced_rounds + 1):
            report(f"\nround {turn} of {self._options.paced_rounds}: open loop at {PACE:.0%} of each server's maximum")
            for server, plan in plans.items():
                self._pace(server, plan, turn)
        return self._results()

    def _plan(self, server: Server) -> LaunchPlan | None:
        try:
            return server.plan(self._testbed)
        except NotRunError as missing:
            why = f"not run: {missing}"
        except (RuntimeError, OSError) as error:
            why = f"failed: {error}"
        self._drop(server.cases, why)
        return None

    def _drop(self, cases: tuple[str, ...], why: str) -> None:
        """Drop cases with their earlier figures: a server with wrong responses is not measured."""
        for case in cases:
            self.states[case] = why
            report(f"  {case:<28} {why}")
        self.runs = [run for run in self.runs if run.case not in cases]
        self.paced = [each for each in self.paced if each.case not in cases]

    @contextmanager
    def _serving(self, server: Server, plan: LaunchPlan) -> Iterator[tuple[RunningServer, list[BenchmarkCase]]]:
        log = self._testbed.folder / f"{server.name.replace(' ', '-')}.log"
        with running_server(plan.command, plan.environ, log, self._cores.server, plan.port) as started:
            cases = plan.cases_at(started.port)
            yield started, [case for case in cases if case.name not in self.states]

    def _measure(self, server: Server, plan: LaunchPlan, turn: int) -> None:
        if all(case in self.states for case in server.cases):
            return
        try:
            with self._serving(server, plan) as (started, cases):
                for case in cases:
                    self._measure_case(server, started, case, turn)
        except (StartError, RuntimeError, OSError) as error:
            self._drop(server.cases, f"failed: {error}")

    def _measure_case(self, server: Server, started: RunningServer, case: BenchmarkCase, turn: int) -> None:
        wrong = find_wrong_response(started.port, case.probes)
        if wrong is None:
            path = self._warm_up(started, case)
            loaded = self._load(started, path, self._options.seconds)
            wrong = find_wrong_response(started.port, case.probes[-CHECKED_AFTER:])
        if wrong is not None:
            self._drop((case.name,), f"failed: {wrong}")
            return
        run = Run(
            case=case.name,
            round=turn,
            requests_per_second=loaded.rate,
            p50_us=loaded.counts["p50_us"],
            p99_us=loaded.counts["p99_us"],
            share=loaded.share,
            others=loaded.others,
            steal=loaded.steal,
            cpu_us=loaded.cpu_us,
            rss_mb=loaded.rss_mb,
            errors=int(loaded.counts["errors"]),
            is_waiting=server.is_waiting,
        )
        self.runs.append(run)
        flags = f"  ! {', '.join(run.flags)}" if run.flags else ""
        report(f"  {case.name:<28} {run.requests_per_second:>10,.0f}/s  p99 {number(run.p99_us)} us{flags}")

    def _pace(self, server: Server, plan: LaunchPlan, turn: int) -> None:
        if not server.is_paced or not any(map(self._was_measured, server.cases)):
            return
        try:
            with self._serving(server, plan) as (started, cases):
                for case in cases:
                    if self._was_measured(case.name):
                        path = self._warm_up(started, case)
                        for _ in range(self._options.paced_turns):
                            self._pace_case(started, case, path, turn)
        except (StartError, RuntimeError, OSError) as error:
            self._drop(server.cases, f"failed: {error}")

    def _pace_case(self, started: RunningServer, case: BenchmarkCase, path: Path, turn: int) -> None:
        """Measure in open loop, right after the maximum rate, because the machine's speed changes."""
        offered = PACE * self._load(started, path, self._options.seconds).rate
        loaded = self._load(started, path, self._options.paced_seconds, offered)
        counts = loaded.counts
        paced = OpenLoopRun(
            case=case.name,
            round=turn,
            offered=offered,
            achieved=loaded.rate,
            p50_us=counts["p50_us"],
            p99_us=counts["p99_us"],
            p999_us=counts["p999_us"],
            flags=find_paced_faults(loaded, offered),
        )
        self.paced.append(paced)
        flags = f"  ! {', '.join(paced.flags)}" if paced.flags else ""
        tails = f"p50 {number(paced.p50_us)}  p99 {number(paced.p99_us)}  p99.9 {number(paced.p999_us)} us"
        report(f"  {case.name:<28} {offered:>10,.0f}/s  {tails}{flags}")

    def _was_measured(self, case: str) -> bool:
        return case not in self.states and any(run.case == case for run in self.runs)

    def _load(self, started: RunningServer, requests: Path, seconds: float, rate: float | None = None) -> LoadResult:
        return run_load(
            started.port,
            requests,
            generators=self._generators,
            process=started.process,
            cores=self._cores,
            seconds=seconds,
            connections=self._options.connections,
            rate=rate,
        )

    def _warm_up(self, started: RunningServer, case: BenchmarkCase) -> Path:
        """Write the case's requests to a file, send some of them, and return the file."""
        path = self._testbed.folder / "requests"
        write_requests(path, case.requests)
        if case.is_repeated:
            send_each_once(started.port, path, cores=self._cores, connections=self._options.connections)
        self._load(started, path, self._options.warm_up)
        return path

    def _results(self) -> dict[str, Any]:
        return {
            "runs": [asdict(run) for run in self.runs],
            "paced": [asdict(each) for each in self.paced],
            "states": self.states,
            "generator": self._generators.names,
            "options": {name: value for name, value in vars(self._options).items() if name != "json"},
            "cores": self._cores.description,
        }


def find_paced_faults(loaded: LoadResult, offered: float) -> list[str]:
    """Return why an open-loop round is noisy."""
    counts, found = loaded.counts, find_noise(loaded.others, loaded.steal, MAX_STEAL_OF_TAIL)
    if counts["errors"] or counts["unanswered"]:
        found.append(f"{counts['errors']:.0f} errors, {counts['unanswered']:.0f} unanswered")
    if loaded.rate < MIN_ACHIEVED * offered:
        found.append(f"only {loaded.rate / offered:.0%} of the offered requests had a response in time")
    if counts["late_us"] > MAX_LATE_SHARE * counts["p99_us"]:
        found.append(f"the generator itself was {number(counts['late_us'])} us late")
    return found


def figures_of(results: dict[str, Any]) -> dict[str, Spread]:
    """Return the figures of the targets: the verifier's p99 in open loop, in milliseconds."""
    tails = [(each["p99_us"] / 1000, not each["flags"]) for each in results["paced"] if each["case"] == HIT]
    return {TAIL: spread(tails)} if tails else {}
