"""Statistics of the benchmarks: percentiles, ratios per round, noisy rounds, and targets."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

MIN_SHARE = 0.94
"""Minimum share of its core for a saturated server; below it, another process used the core."""

MAX_OTHERS = 1 - MIN_SHARE
"""Maximum share of the core for other processes, beside a server that is not saturated."""

MAX_STEAL = 0.01
"""Maximum share of the machine's time that its host may steal."""

MIN_QUIET_ROUNDS = 2
"""Number of quiet rounds from which noisy ones are ignored."""


def find_noise(others: float, steal: float, max_steal: float = MAX_STEAL) -> list[str]:
    """Return why a round is noisy. `others`: share of the core; `steal`: share of the machine."""
    found = []
    if others > MAX_OTHERS:
        found.append(f"others used {others:.0%} of the core")
    if steal > max_steal:
        found.append(f"{steal:.1%} of the machine was stolen")
    return found


@dataclass(frozen=True, slots=True)
class Run:
    """One case in one round.

    Args:
        share: Share of its core that the server used.
        others: Share of that core that other processes used.
        steal: Share of the machine's time that its host stole.
        cpu_us: Processor time of the server per request, in microseconds.
        errors: Number of requests without a 2xx response.
        is_waiting: Whether the server waits for a database on another core, so that its share does not show noise.
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
        if self.share < MIN_SHARE and not self.is_waiting:
            found.append(f"server had {self.share:.0%} of its core")
        if self.errors:
            found.append(f"{self.errors} errors")
        return found


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of several rounds. `is_noisy`: there were too few quiet rounds to ignore the others."""

    median: float
    minimum: float
    maximum: float
    rounds: int
    is_noisy: bool = False

    @property
    def is_single(self) -> bool:
        return self.rounds == 1

    def __str__(self) -> str:
        return self.format()

    def format(self, unit: str = "") -> str:
        """Return median and range as text."""
        text = number(self.median)
        if not self.is_single:
            text += f" ({number(self.minimum)}..{number(self.maximum)})"
        return f"{text}{unit}, noisy" if self.is_noisy else f"{text}{unit}"


def number(value: float) -> str:
    """Format with three significant digits, or as an integer from 100: `106,199`, `52.1`, `0.521`, `0`."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed. Raises ValueError if empty."""
    if not values:
        raise ValueError("There is no percentile of no values.")
    ordered = sorted(values)
    place = -int(-share * len(ordered) // 1) - 1  # rounded up
    return ordered[min(max(place, 0), len(ordered) - 1)]


def spread(values: Sequence[tuple[float, bool]]) -> Spread:
    """Summarize each round's value, with whether the round was quiet. Ignore noisy rounds if enough are quiet."""
    quiet = [value for value, is_quiet in values if is_quiet]
    is_noisy = len(quiet) < min(MIN_QUIET_ROUNDS, len(values))
    used = [value for value, _ in values] if is_noisy else quiet
    return Spread(median(used), min(used), max(used), len(used), is_noisy)


def ratio(runs: Iterable[Run], above: str, below: str, factor: float = 1.0) -> Spread | None:
    """Return `factor` times the rate of one case divided by that of another, per round. None without a common round."""
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
    """Return the ratio by processor time per request, which other processes affect little."""
    costs = {
        case: [run.cpu_us for run in runs_of if run.cpu_us]
        for case, runs_of in ((name, [run for run in runs if run.case == name]) for name in (above, below))
    }
    if not all(costs.values()):
        return None
    return factor * median(costs[below]) / median(costs[above])


class Met(StrEnum):
    """Result of comparing a measured value with its target."""

    AIM = "aim"
    REQUIRED = "yes"
    NO = "no"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Target:
    """A row of the table of targets: a required value, and a better one to aim for.

    The value is either a ratio of rates (`factor` * `above` / `below`, both names of cases), or a `figure` of a part.
    `is_ceiling`: the value must not exceed the bound.
    """

    title: str
    required: float
    aim: float
    unit: str = ""
    is_ceiling: bool = False
    above: str = ""
    below: str = ""
    factor: float = 1.0
    figure: str = ""

    def compare(self, measured: Spread | None) -> Met:
        if measured is None:
            return Met.NOT_RUN
        if self._is_within(measured.median, self.aim):
            return Met.AIM
        return Met.REQUIRED if self._is_within(measured.median, self.required) else Met.NO

    def measure(self, runs: Iterable[Run], figures: Mapping[str, Spread]) -> Spread | None:
        if self.figure:
            return figures.get(self.figure)
        return ratio(runs, self.above, self.below, self.factor)

    def _is_within(self, value: float, bound: float) -> bool:
        return value <= bound if self.is_ceiling else value >= bound


HIT, OWN_HELLO, UVICORN_HELLO, GRANIAN_HELLO = "verifier", "own hello", "uvicorn hello", "Granian WSGI hello"
NEW_REQUESTS = "verifier, asked anew"
EMBEDDED = "verifier, embedded default"
WSGI_FRONTEND, MISS, MISS_SQLITE, BATCH = "WSGI frontend", "miss, PostgreSQL", "miss, SQLite", "batch of 100"
WEB_SERVER = "server of make run"
NGINX_HELLO, API_KEY, KNOX = "nginx return 200", "djangorestframework-api-key", "django-rest-knox"
BAO_TOKEN, BAO_KV = "OpenBao token look-up", "OpenBao KV read"
BATCH_SIZE = 100

TAIL, STALE, EVICTION, GROWTH = "p99 at 80 %", "stale", "eviction p99", "growth"
JOBS, ROTATIONS, EVENT, PAGES = "jobs", "rotations", "event to step", "pages"
SIGN_IN, IDLE = "sign-in", "idle"
LOCAL_RATE, LOCAL_P50, LOCAL_STALE = "local rate", "local p50", "local stale"
QUERIES = "queries"

TARGETS = (
    Target("verifier, all features / own hello", 0.50, 0.60, above=HIT, below=OWN_HELLO),
    Target("verifier / uvicorn hello", 1.5, 2, above=HIT, below=UVICORN_HELLO),
    Target("known keys in new requests / own hello", 0.35, 0.5, above=NEW_REQUESTS, below=OWN_HELLO),
    Target("verifier on the embedded default, two limits / uvicorn hello", 1.6, 2, above=EMBEDDED, below=UVICORN_HELLO),
    Target("verifier / drf-api-key on PostgreSQL", 50, 100, above=HIT, below=API_KEY),
    Target("WSGI frontend / Granian WSGI hello", 0.70, 0.85, above=WSGI_FRONTEND, below=GRANIAN_HELLO),
    Target("100 % miss / hit, PostgreSQL", 0.35, 0.5, above=MISS, below=HIT),
    Target("keys per second in batches of 100 / single", 3, 4.5, above=BATCH, below=HIT, factor=BATCH_SIZE),
    Target("p99 at 80 % of own maximum, open loop", 1, 0.3, " ms", is_ceiling=True, figure=TAIL),
    Target('stale "valid" after revoke returned, same host', 0, 0, is_ceiling=True, figure=STALE),
    Target("commit → last of 4 verifiers evicted, loaded, p99", 20, 5, " ms", is_ceiling=True, figure=EVICTION),
    Target("LocalVerifier, decisions a second on one core, uses counted", 50_000, 75_000, figure=LOCAL_RATE),
    Target("LocalVerifier, p50 of a decision", 20, 12, " us", is_ceiling=True, figure=LOCAL_P50),
    Target('LocalVerifier, stale "valid" after the receipt', 0, 0, is_ceiling=True, figure=LOCAL_STALE),
    Target("look-up p50 at 1 million / 10 thousand keys", 1.25, 1.1, is_ceiling=True, figure=GROWTH),
    Target("p99 of `orders.retrieve` under 16 sign-ins / idle", 2, 1.25, is_ceiling=True, figure=SIGN_IN),
    Target("processor time of an idle `make run`", 5, 3, " % of a core", is_ceiling=True, figure=IDLE),
    Target("worst periodic job, nothing due, in full / at a hundredth", 2, 1.25, is_ceiling=True, figure=JOBS),
    Target("worst console page in full, processor time", 100, 50, " ms", is_ceiling=True, figure=PAGES),
    Target("most queries of a console page", 12, 8, is_ceiling=True, figure=QUERIES),
    Target("rotations completed a second on two cores, with audit", 5, 20, figure=ROTATIONS),
    Target("event → step of its rotation, workers under load, p99", 2, 0.5, " s", is_ceiling=True, figure=EVENT),
)
