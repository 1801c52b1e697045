"""How many answers a second, and how late: every server beside every other, in interleaved rounds."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .cases import Case, find_wrong
from .figures import HIT, TAIL, Run, Spread, find_noise, number, spread
from .generators import find_generators
from .launch import Started, StartError, launched
from .load import Loaded, fill, put_load
from .machine import Cores
from .pacer import write_requests
from .servers import SERVERS, Plan, Server
from .site import PEER_KEYS, NotRunError, Site
from .telling import tell

PACE = 0.8
"""Offered load in open loop, as a share of the server's own maximum."""

CHECKED_AFTER = 20
"""Number of the last probes that are checked; they include those that must be refused."""

MOST_STEAL_OF_TAIL = 0.004
"""Largest stolen share for a valid p99: on two cores, one core stolen for 1 % of the time makes up the whole p99."""

LEAST_ACHIEVED = 0.98
MOST_LATE_SHARE = 0.5
"""Largest lateness of the generator, as a share of the p99; with more it has measured itself."""


def add_options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--rounds", type=int, default=5, help="5 unless told")
    parser.add_argument("--seconds", type=float, default=2, help="each case is measured, whole seconds; 2 unless told")
    parser.add_argument("--warm-up", type=float, default=1, help="seconds before that; 1 unless told")
    parser.add_argument("--connections", type=int, default=32, help="32 unless told")
    parser.add_argument("--keys", type=int, default=PEER_KEYS, help="in rotation; as many as the peers'")
    parser.add_argument("--listed", type=int, default=10, help="percent of them with an allow-list; 10 unless told")
    parser.add_argument("--paced-rounds", type=int, default=3, help="in open loop at 80 %%; 3 unless told")
    parser.add_argument("--paced-turns", type=int, default=3, help="so often in each of these rounds; 3 unless told")
    parser.add_argument("--paced-seconds", type=float, default=3, help="3 unless told")
    parser.add_argument("--only", action="append", metavar="SERVER", help="these servers (--list names them)")


@dataclass(frozen=True, slots=True)
class Paced:
    """One case in open loop. `flags`: why the round is noisy."""

    case: str
    round: int
    offered: float
    achieved: float
    p50_us: float
    p99_us: float
    p999_us: float
    flags: list[str]


class Verify:
    """One benchmark under way. `states` says of each case that has no figures why not."""

    def __init__(self, site: Site, cores: Cores, asked: argparse.Namespace) -> None:
        self._site, self._cores, self._asked = site, cores, asked
        self._generators = find_generators(site.folder)
        self._servers = [each for each in SERVERS if not asked.only or each.name in asked.only]
        self.runs: list[Run] = []
        self.paced: list[Paced] = []
        self.states: dict[str, str] = {}

    def run(self) -> dict[str, Any]:
        for advice in self._generators.advice:
            tell(advice)
        for server in SERVERS:
            if server not in self._servers:
                self.states |= dict.fromkeys(server.cases, "not run: left out by --only")
        plans = {server: plan for server in self._servers if (plan := self._plan(server)) is not None}
        for turn in range(1, self._asked.rounds + 1):
            tell(f"\nround {turn} of {self._asked.rounds}: requests a second, closed loop")
            for server, plan in plans.items():
                self._measure(server, plan, turn)
        for turn in range(1, self._asked.paced_rounds + 1):
            tell(f"\nround {turn} of {self._asked.paced_rounds}: open loop at {PACE:.0%} of each one's own maximum")
            for server, plan in plans.items():
                self._pace(server, plan, turn)
        return self._told()

    def _plan(self, server: Server) -> Plan | None:
        try:
            return server.plan(self._site)
        except NotRunError as missing:
            why = f"not run: {missing}"
        except (RuntimeError, OSError) as error:
            why = f"failed: {error}"
        self._give_up(server.cases, why)
        return None

    def _give_up(self, cases: tuple[str, ...], why: str) -> None:
        """Its figures of earlier rounds go too: a server that answers wrongly is not measured."""
        for case in cases:
            self.states[case] = why
            tell(f"  {case:<28} {why}")
        self.runs = [run for run in self.runs if run.case not in cases]
        self.paced = [each for each in self.paced if each.case not in cases]

    @contextmanager
    def _serving(self, server: Server, plan: Plan) -> Iterator[tuple[Started, list[Case]]]:
        log = self._site.folder / f"{server.name.replace(' ', '-')}.log"
        with launched(plan.command, plan.environ, log, self._cores.server, plan.port) as started:
            cases = plan.cases_at(started.port)
            yield started, [case for case in cases if case.name not in self.states]

    def _measure(self, server: Server, plan: Plan, turn: int) -> None:
        if all(case in self.states for case in server.cases):
            return
        try:
            with self._serving(server, plan) as (started, cases):
                for case in cases:
                    self._measure_case(server, started, case, turn)
        except (StartError, RuntimeError, OSError) as error:
            self._give_up(server.cases, f"failed: {error}")

    def _measure_case(self, server: Server, started: Started, case: Case, turn: int) -> None:
        wrong = find_wrong(started.port, case.probes)
        if wrong is None:
            path = self._warm_up(started, case)
            loaded = self._load(started, path, self._asked.seconds)
            wrong = find_wrong(started.port, case.probes[-CHECKED_AFTER:])
        if wrong is not None:
            self._give_up((case.name,), f"failed: {wrong}")
            return
        run = Run(
            case=case.name,
            round=turn,
            requests_per_second=loaded.rate,
            p50_us=loaded.counted["p50_us"],
            p99_us=loaded.counted["p99_us"],
            share=loaded.share,
            others=loaded.others,
            steal=loaded.steal,
            cpu_us=loaded.cpu_us,
            rss_mb=loaded.rss_mb,
            errors=int(loaded.counted["errors"]),
            is_waiting=server.is_waiting,
        )
        self.runs.append(run)
        flags = f"  ! {', '.join(run.flags)}" if run.flags else ""
        tell(f"  {case.name:<28} {run.requests_per_second:>10,.0f}/s  p99 {number(run.p99_us)} us{flags}")

    def _pace(self, server: Server, plan: Plan, turn: int) -> None:
        if not server.is_paced or not any(map(self._was_measured, server.cases)):
            return
        try:
            with self._serving(server, plan) as (started, cases):
                for case in cases:
                    if self._was_measured(case.name):
                        path = self._warm_up(started, case)
                        for _ in range(self._asked.paced_turns):
                            self._pace_case(started, case, path, turn)
        except (StartError, RuntimeError, OSError) as error:
            self._give_up(server.cases, f"failed: {error}")

    def _pace_case(self, started: Started, case: Case, path: Path, turn: int) -> None:
        """Its maximum is measured right before: a machine that has become slower since would be offered too much."""
        offered = PACE * self._load(started, path, self._asked.seconds).rate
        loaded = self._load(started, path, self._asked.paced_seconds, offered)
        counted = loaded.counted
        paced = Paced(
            case=case.name,
            round=turn,
            offered=offered,
            achieved=loaded.rate,
            p50_us=counted["p50_us"],
            p99_us=counted["p99_us"],
            p999_us=counted["p999_us"],
            flags=find_paced_faults(loaded, offered),
        )
        self.paced.append(paced)
        flags = f"  ! {', '.join(paced.flags)}" if paced.flags else ""
        tails = f"p50 {number(paced.p50_us)}  p99 {number(paced.p99_us)}  p99.9 {number(paced.p999_us)} us"
        tell(f"  {case.name:<28} {offered:>10,.0f}/s  {tails}{flags}")

    def _was_measured(self, case: str) -> bool:
        return case not in self.states and any(run.case == case for run in self.runs)

    def _load(self, started: Started, requests: Path, seconds: float, rate: float | None = None) -> Loaded:
        return put_load(
            started.port,
            requests,
            generators=self._generators,
            process=started.process,
            cores=self._cores,
            seconds=seconds,
            connections=self._asked.connections,
            rate=rate,
        )

    def _warm_up(self, started: Started, case: Case) -> Path:
        """The file of the case's requests."""
        path = self._site.folder / "requests"
        write_requests(path, case.requests)
        if case.is_remembered:
            fill(started.port, path, cores=self._cores, connections=self._asked.connections)
        self._load(started, path, self._asked.warm_up)
        return path

    def _told(self) -> dict[str, Any]:
        return {
            "runs": [asdict(run) for run in self.runs],
            "paced": [asdict(each) for each in self.paced],
            "states": self.states,
            "generator": self._generators.names,
            "options": {name: value for name, value in vars(self._asked).items() if name != "json"},
            "cores": self._cores.words,
        }


def find_paced_faults(loaded: Loaded, offered: float) -> list[str]:
    """Why an open-loop round says less than it should."""
    counted, found = loaded.counted, find_noise(loaded.others, loaded.steal, MOST_STEAL_OF_TAIL)
    if counted["errors"] or counted["unanswered"]:
        found.append(f"{counted['errors']:.0f} errors, {counted['unanswered']:.0f} unanswered")
    if loaded.rate < LEAST_ACHIEVED * offered:
        found.append(f"only {loaded.rate / offered:.0%} of what was offered was answered in time")
    if counted["late_us"] > MOST_LATE_SHARE * counted["p99_us"]:
        found.append(f"the generator itself was {number(counted['late_us'])} us late")
    return found


def figures_of(told: dict[str, Any]) -> dict[str, Spread]:
    """What the table of targets takes from the open loop: the verifier's tail, in milliseconds."""
    tails = [(each["p99_us"] / 1000, not each["flags"]) for each in told["paced"] if each["case"] == HIT]
    return {TAIL: spread(tails)} if tails else {}
