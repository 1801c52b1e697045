"""Cost of large tables: periodic jobs, rotations, console pages and revocations, at full size and at a hundredth.

Both databases are on one PostgreSQL and are measured alternately in the same run. `scale_rows` creates the rows.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from keyvault.management.supervisor import start_child_process
from tests.environment import ROOT

from .command_process import CommandProcess, receive_reply, run_command, send_command, start_command_process
from .figures import EVENT, JOBS, PAGES, QUERIES, ROTATIONS, Spread, number, spread
from .machine import Cores
from .progress import report
from .revoke import NOT_COPIED
from .testbed import POSTGRES, BenchmarkInstallation, Testbed

COMMANDS = "tests.bench.scale_commands"

FULL = 1_000_000
HUNDREDTH = 100
DUE = 1_000
PROCESSES = 2
REPEATS = 200

FLOOR_MS = 2
"""Processor time in full, in ms, below which a job is not compared, whatever it takes at a hundredth: times as short as
that double by chance. Each job runs at most once a second in each environment, so it costs at most 0.4 % of a core."""

ROTATIONS_A_DAY = 100_000 / 30
USES = {"keyvault_usebucket": 1_440}
"""Rows per day of a key that one source uses in each minute at one endpoint."""


def add_options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--size", type=int, default=FULL, help="credentials; default 1,000,000")
    parser.add_argument("--completed", type=int, default=200, help="rotations to complete; default 200")
    parser.add_argument(
        "--per-second", type=int, default=5, help="rotations started per second for the workers; default 5"
    )


class Scale:
    """One run of the benchmark."""

    def __init__(self, testbed: Testbed, cores: Cores, options: argparse.Namespace) -> None:
        self._testbed, self._options = testbed, options
        # Rotations are measured on all cores, so everything in this part is.
        if cores.server is not None and cores.load is not None:
            os.sched_setaffinity(0, {cores.server, cores.load})

    def run(self) -> dict[str, Any]:
        installation, sizes = self._testbed.on_postgres, (self._options.size // HUNDREDTH, self._options.size)
        with ExitStack() as stack:
            broker = self._testbed.redis
            installations = {size: self._open(installation, size, broker) for size in sizes}
            processes = {
                size: stack.enter_context(start_command_process(COMMANDS, installations[size].environ))
                for size in sizes
            }
            results: dict[str, Any] = {"sizes": list(sizes), "loaded": [], "idle": []}
            for size, process in processes.items():
                loaded = run_command(process, f"load {size}")
                results["loaded"].append({"credentials": size, **loaded})
                report(f"  {size:,} credentials and their rows: {loaded['seconds']:.0f} s")
            results["tables"] = run_command(processes[sizes[1]], "sizes")
            for turn in range(1, self._options.rounds + 1):
                results["idle"].append([run_command(process, "idle 3") for process in processes.values()])
                ratios = _ratios(results["idle"][-1])
                worst = max(ratios, key=lambda name: ratios[name], default="none")
                report(f"  periodic jobs, round {turn}: the worst ratio is {number(_worst(ratios))}, of {worst}")
            results["pages"] = [run_command(process, "pages") for process in processes.values()]
            results["revoke"] = [run_command(process, f"revoke {REPEATS}") for process in processes.values()]
            results["repeat"] = [run_command(process, f"repeat {REPEATS}") for process in processes.values()]
            report(f"  {len(results['pages'][1])} pages and {REPEATS} revocations")
            large = processes[sizes[1]]
            results |= self._complete(stack, installations[sizes[1]], large)
            results["driven"] = self._drive(installations[sizes[1]], large)
            results["due"] = run_command(large, f"due {DUE}")
        return results

    def _open(self, installation: BenchmarkInstallation, size: int, broker: str) -> BenchmarkInstallation:
        """Return an installation with its own database and data folder, because a folder belongs to one database."""
        folder = self._testbed.folder / f"scale-{size}"
        shutil.copytree(installation.data, folder, ignore=shutil.ignore_patterns(*NOT_COPIED))
        folder.chmod(0o700)
        environ = {
            **installation.environ,
            "KEYVAULT_DATA_DIR": str(folder),
            "KEYVAULT_DATABASE_URL": self._testbed.new_database(f"scale_{size}", template="keyvault"),
            "KEYVAULT_BROKER_URL": broker,
        }
        return BenchmarkInstallation(
            environ,
            folder,
            installation.token,
            installation.keys,
            installation.revoked,
            installation.unknown,
            installation.to_revoke,
        )

    def _complete(self, stack: ExitStack, installation: BenchmarkInstallation, large: CommandProcess) -> dict[str, Any]:
        """Complete rotations in PROCESSES processes at their maximum rate; count the rows that this inserts."""
        others = [stack.enter_context(start_command_process(COMMANDS, installation.environ)) for _ in range(PROCESSES)]
        before = {}
        for process in others:
            run_command(process, f"prepare {self._options.completed // PROCESSES}")
        before = run_command(large, "written")
        for process in others:
            send_command(process, "complete")
        done = [receive_reply(process, "complete") for process in others]
        seconds = max(each["ended"] for each in done) - min(each["began"] for each in done)
        completed, turns = sum(each["completed"] for each in done), sum(each["turns"] for each in done)
        after = run_command(large, "written")
        report(f"  {number(completed / seconds)} rotations and {number(turns / seconds)} turns a second")
        return {
            "completed": completed,
            "completed_per_second": completed / seconds,
            "turns_per_second": turns / seconds,
            "per_second_by_cpu": PROCESSES * completed / sum(each["cpu"] for each in done),
            "rows_each": {name: (after[name] - before.get(name, 0)) / completed for name in after},
        }

    def _drive(self, installation: BenchmarkInstallation, large: CommandProcess) -> dict[str, Any]:
        """Start rotations at a steady rate for Celery workers to complete; each acknowledgement is an event."""
        with _workers(installation, self._testbed.folder / "workers.log"):
            count = self._options.completed
            driven: dict[str, Any] = run_command(large, f"drive {count} {self._options.per_second}")
        shown = number(driven["p99_ms"]) if driven["p99_ms"] is not None else "-"
        report(f"  {driven['completed']} of {count} completed by workers, p99 from event to step {shown} ms")
        return driven


@contextmanager
def _workers(installation: BenchmarkInstallation, log: Path) -> Iterator[None]:
    """Run beat and PROCESSES workers with the documented commands."""
    celery = [sys.executable, "-m", "celery", "-A", "keyvault.project"]
    worker = [*celery, "worker", "--pool", "threads", "--concurrency", "4", "--loglevel", "WARNING"]
    worker += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    beat = [*celery, "beat", "--loglevel", "WARNING", "--pidfile", ""]
    commands = [[*worker, "-n", f"scale{number_of}@%h"] for number_of in range(PROCESSES)] + [beat]
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    environ = {**installation.environ, "C_FORCE_ROOT": "1"}
    processes = [start_child_process(each, environ=environ, folder=ROOT, output=descriptor) for each in commands]
    os.close(descriptor)
    try:
        time.sleep(5)
        if any(process.poll() is not None for process in processes):
            raise RuntimeError(f"A worker has ended: {log.read_text(errors='replace')[-1500:]}")
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ratios(round_of: list[Mapping[str, list[float]]]) -> dict[str, float]:
    """Return each job's cost at full size divided by its cost at a hundredth, in one round, from FLOOR_MS in full."""
    small, large = round_of
    return {name: median(large[name]) / median(small[name]) for name in large if median(large[name]) >= FLOOR_MS}


def _worst(ratios: Mapping[str, float]) -> float:
    """Return the largest ratio; 1 if every job is below FLOOR_MS, because then no growth matters."""
    return max(ratios.values(), default=1.0)


# --- tables -----------------------------------------------------------------------------------------------------

JOB_HEADS = ["job", "nothing due, a hundredth, CPU ms", "in full, CPU ms", "ratio", f"{DUE:,} due, in full, CPU ms"]
PAGE_HEADS = ["page", "a hundredth, CPU ms", "in full, CPU ms", "ratio", "queries", "status"]
TABLE_HEADS = ["table", "rows", "bytes each", "rows for each rotation", "MB a day"]


def describe(results: Mapping[str, Any]) -> str:
    small, large = (f"{size:,}" for size in results["sizes"])
    loaded = " and ".join(f"{each['seconds']:.0f} s" for each in results["loaded"])
    driven = results["driven"]
    return (
        f"{small} and {large} credentials, 3 % of them in open rotations, each with 3 changes, 3 audit entries and 10"
        f" usage rows; loaded in {loaded}. PostgreSQL with {' '.join(POSTGRES)}, without fsync, shares the cores with"
        f" all programs. Costs are processor time of Python and of its database connection. A job that takes less than"
        f" {FLOOR_MS} ms in full, at most once a second in each environment, has no ratio. Rates, and times from an"
        f" event to its step, are wall clock time, which other programs on the machine distort. {PROCESSES} processes"
        f" completed {results['completed']} rotations, {number(results['completed_per_second'])} a second, in"
        f" {number(results['turns_per_second'])} turns a second. {PROCESSES} Celery workers completed"
        f" {driven['completed']} of {driven['rotations']} rotations, started on the same cores at"
        f" {number(driven['started_per_second'])} a second ({driven['rate']} requested); from an acknowledgement to"
        f" the next step: p50 {_shown(driven['p50_ms'])} ms, p99 {_shown(driven['p99_ms'])} ms."
    )


def job_rows(results: Mapping[str, Any]) -> Iterator[list[str]]:
    for name in results["idle"][0][1]:
        small, large = ([median(each[turn][name]) for each in results["idle"]] for turn in (0, 1))
        ratios = [(found[name], True) for found in map(_ratios, results["idle"]) if name in found]
        ratio = str(spread(ratios)) if ratios else "-"
        yield [name, number(median(small)), number(median(large)), ratio, _shown(results["due"].get(name))]


def page_rows(results: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield the rows of pages, then those of revocations."""
    small, large = ({page["page"]: page for page in pages} for pages in results["pages"])
    for name, page in large.items():
        before = small.get(name)
        first, last = before and before["ms"], page["ms"]
        ratio = "-" if first is None or last is None else number(last / first)
        yield [name, _shown(first), _shown(last), ratio, _shown(page["queries"]), str(page["status"])]
    for title, part in (("revoke, p50", "revoke"), ("revoke-self repeated, p50", "repeat")):
        times = [each["p50_ms"] for each in results[part]]
        statuses = ", ".join(f"{status}: {count}" for status, count in results[part][1].get("statuses", {}).items())
        yield [title, number(times[0]), number(times[1]), number(times[1] / times[0]), "-", statuses]


def table_rows(results: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield each table's growth at 100,000 rotations a month; of usage, also for a key used in every minute."""
    for name, table in sorted(results["tables"].items(), key=lambda item: -item[1]["bytes"]):
        each, rows_each = table["bytes"] / table["rows"], results["rows_each"].get(name, 0.0)
        if table["rows"] < MANY_ROWS and not rows_each:
            continue
        daily = each * rows_each * ROTATIONS_A_DAY / 1e6
        shown = number(daily)
        if name in USES:
            shown += f", and {number(each * USES[name] / 1e6)} for each busy key"
        yield [name, f"{table['rows']:,.0f}", number(each), number(rows_each), shown]


MANY_ROWS = 1_000
"""Tables with fewer rows are omitted unless rotations write to them."""


def figures_of(results: Mapping[str, Any]) -> dict[str, Spread]:
    driven = results["driven"]
    worst = [(_worst(_ratios(each)), True) for each in results["idle"]]
    found = {JOBS: spread(worst), ROTATIONS: _single(results["completed_per_second"])}
    pages = results["pages"][1]
    found[PAGES] = _single(max(1e9 if page["ms"] is None else page["ms"] for page in pages))
    found[QUERIES] = _single(max(page["queries"] or 0 for page in pages))
    # An incomplete rotation is an event without a step.
    is_done = driven["completed"] == driven["rotations"] and driven["p99_ms"] is not None
    return found | {EVENT: _single(driven["p99_ms"] / 1e3 if is_done else 1e9)}


def by_cpu(results: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures computed from processor time of Python and PostgreSQL."""
    return {ROTATIONS: results["per_second_by_cpu"]}


def _single(value: float) -> Spread:
    return Spread(value, value, value, 1)


def _shown(value: float | None) -> str:
    return "-" if value is None else number(value)
