"""The arithmetic: percentiles, ratios round by round, noisy rounds, and what is held against a target."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

LEAST_SHARE = 0.94
"""Least share of its core for a busy server; with less, another process used the core."""

MOST_OTHERS = 1 - LEAST_SHARE
"""Largest share of the core that other processes may use, for a server that is not saturated."""

MOST_STEAL = 0.01
"""Largest share of the machine's time that the host may steal."""

FEWEST_QUIET = 2
"""Number of quiet rounds from which the noisy ones are left out."""


def find_noise(others: float, steal: float, most_steal: float = MOST_STEAL) -> list[str]:
    """Who else was at work, on the server's core and on the machine below this one."""
    found = []
    if others > MOST_OTHERS:
        found.append(f"others used {others:.0%} of the core")
    if steal > most_steal:
        found.append(f"{steal:.1%} of the machine was stolen")
    return found


@dataclass(frozen=True, slots=True)
class Run:
    """One case in one round. `share` of its core the server used, `others` was used by other processes; `steal` of the
    machine its host took away.

    `is_waiting`: it spends time waiting for a database on another core, so that its share says nothing of noise.
    `errors`: answers that were no answer, or no 2xx.
    """

    case: str
    round: int
    requests_per_second: float
    p50_us: float
    p99_us: float
    share: float
    others: float
    steal: float
    cpu_us: float
    rss_mb: float
    errors: int = 0
    is_waiting: bool = False

    @property
    def flags(self) -> list[str]:
        found = find_noise(self.others if self.is_waiting else 0.0, self.steal)
        if self.share < LEAST_SHARE and not self.is_waiting:
            found.append(f"server had {self.share:.0%} of its core")
        if self.errors:
            found.append(f"{self.errors} errors")
        return found


@dataclass(frozen=True, slots=True)
class Spread:
    """What several rounds came to. `is_noisy`: too few of them were quiet to leave the others out."""

    median: float
    least: float
    most: float
    rounds: int
    is_noisy: bool = False

    @property
    def is_single(self) -> bool:
        return self.rounds == 1

    def __str__(self) -> str:
        return self.told()

    def told(self, unit: str = "") -> str:
        """Median and range."""
        text = number(self.median)
        if not self.is_single:
            text += f" ({number(self.least)}..{number(self.most)})"
        return f"{text}{unit}, noisy" if self.is_noisy else f"{text}{unit}"


def number(value: float) -> str:
    """Three figures where there are no more: `106,199`, `52.1`, `0.521`, `0`."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that at least this share of them does not exceed. Raises ValueError without any."""
    if not values:
        raise ValueError("no values, no percentile")
    ordered = sorted(values)
    place = -int(-share * len(ordered) // 1) - 1  # rounded up
    return ordered[min(max(place, 0), len(ordered) - 1)]


def spread(values: Sequence[tuple[float, bool]]) -> Spread:
    """Of each round's value and whether it was quiet. Noisy rounds are left out where enough are quiet."""
    quiet = [value for value, is_quiet in values if is_quiet]
    is_noisy = len(quiet) < min(FEWEST_QUIET, len(values))
    used = [value for value, _ in values] if is_noisy else quiet
    return Spread(median(used), min(used), max(used), len(used), is_noisy)


def ratio(runs: Iterable[Run], above: str, below: str, factor: float = 1.0) -> Spread | None:
    """Round by round, `factor` times the rate of one case over another's; None where no round has both."""
    by_round: dict[int, dict[str, Run]] = {}
    for run in runs:
        by_round.setdefault(run.round, {})[run.case] = run
    pairs = [(each[above], each[below]) for each in by_round.values() if {above, below} <= each.keys()]
    ratios = [
        (factor * one.requests_per_second / two.requests_per_second, not one.flags and not two.flags)
        for one, two in pairs
        if two.requests_per_second
    ]
    return spread(ratios) if ratios else None


def ratio_by_cpu(runs: Sequence[Run], above: str, below: str, factor: float = 1.0) -> float | None:
    """The same of the processor time that a request cost each of them: who else was at work changes little of it."""
    costs = {
        case: [run.cpu_us for run in runs_of if run.cpu_us]
        for case, runs_of in ((name, [run for run in runs if run.case == name]) for name in (above, below))
    }
    if not all(costs.values()):
        return None
    return factor * median(costs[below]) / median(costs[above])


class Met(StrEnum):
    """How a measured value stands to its target."""

    AIM = "aim"
    LEAST = "yes"
    NO = "no"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Target:
    """A row of the table of what is to be met. `is_ceiling`: smaller is better, `least` is the most it may be.

    Rates are compared case over case (`above`, `below`, `factor`); everything else is a figure of that name.
    """

    title: str
    least: float
    aim: float
    unit: str = ""
    is_ceiling: bool = False
    above: str = ""
    below: str = ""
    factor: float = 1.0
    figure: str = ""

    def judge(self, measured: Spread | None) -> Met:
        if measured is None:
            return Met.NOT_RUN
        if self._is_within(measured.median, self.aim):
            return Met.AIM
        return Met.LEAST if self._is_within(measured.median, self.least) else Met.NO

    def measure(self, runs: Iterable[Run], figures: Mapping[str, Spread]) -> Spread | None:
        if self.figure:
            return figures.get(self.figure)
        return ratio(runs, self.above, self.below, self.factor)

    def _is_within(self, value: float, bound: float) -> bool:
        return value <= bound if self.is_ceiling else value >= bound


HIT, OWN_HELLO, UVICORN_HELLO, GRANIAN_HELLO = "verifier", "own hello", "uvicorn hello", "Granian WSGI hello"
ANEW = "verifier, asked anew"
WSGI_FRONTEND, MISS, MISS_SQLITE, BATCH = "WSGI frontend", "miss, PostgreSQL", "miss, SQLite", "batch of 100"
WEB_SERVER = "server of make run"
NGINX_HELLO, API_KEY, KNOX = "nginx return 200", "djangorestframework-api-key", "django-rest-knox"
BAO_TOKEN, BAO_KV = "OpenBao token look-up", "OpenBao KV read"
BATCH_SIZE = 100

TAIL, STALE, EVICTION, GROWTH = "p99 at 80 %", "stale", "eviction p99", "growth"
JOBS, ROTATIONS, EVENT = "jobs", "rotations", "event to step"
SIGN_IN = "sign-in"

TARGETS = (
    Target("verifier, all features / own hello", 0.50, 0.60, above=HIT, below=OWN_HELLO),
    Target("verifier / uvicorn hello", 1.5, 2, above=HIT, below=UVICORN_HELLO),
    Target("verifier / drf-api-key on PostgreSQL", 50, 100, above=HIT, below=API_KEY),
    Target("WSGI frontend / Granian WSGI hello", 0.70, 0.85, above=WSGI_FRONTEND, below=GRANIAN_HELLO),
    Target("100 % miss / hit, PostgreSQL", 0.35, 0.5, above=MISS, below=HIT),
    Target("keys per second in batches of 100 / single", 3, 4.5, above=BATCH, below=HIT, factor=BATCH_SIZE),
    Target("p99 at 80 % of own maximum, open loop", 1, 0.3, " ms", is_ceiling=True, figure=TAIL),
    Target('stale "valid" after revoke returned, same host', 0, 0, is_ceiling=True, figure=STALE),
    Target("commit → last of 4 verifiers evicted, loaded, p99", 20, 5, " ms", is_ceiling=True, figure=EVICTION),
    Target("look-up p50 at 1 million / 10 thousand keys", 1.25, 1.1, is_ceiling=True, figure=GROWTH),
    Target("p99 of `orders.retrieve` under 16 sign-ins / idle", 2, 1.25, is_ceiling=True, figure=SIGN_IN),
    Target("worst periodic job, nothing due, in full / at a hundredth", 2, 1.25, is_ceiling=True, figure=JOBS),
    Target("rotations completed a second on two cores, with audit", 5, 20, figure=ROTATIONS),
    Target("event → step of its rotation, workers under load, p99", 2, 0.5, " s", is_ceiling=True, figure=EVENT),
)
