"""What a platform's size costs: periodic jobs, rotations, the console and revocations, in full and at a hundredth.

Both databases are on one PostgreSQL and are measured in turn in the same run. The rows are those of `scale_rows`.
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
from tests.servers.redis import redis_server
from tests.servers.throwaway import FailedServerError, MissingServerError

from .books import Book, ask, open_book, receive, send
from .figures import EVENT, JOBS, ROTATIONS, Spread, number, spread
from .machine import Cores
from .revoke import NOT_COPIED
from .site import POSTGRES, House, NotRunError, Site
from .telling import tell

BOOK = "tests.bench.scaling"

FULL = 1_000_000
HUNDREDTH = 100
DUE = 1_000
PROCESSES = 2
REPEATS = 200

ROTATIONS_A_DAY = 100_000 / 30
USES = {"keyvault_usebucket": 1_440}
"""Rows that a key which is used in each minute adds in a day, by one source at one endpoint."""


def add_options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--size", type=int, default=FULL, help="credentials; 1,000,000 unless told")
    parser.add_argument("--completed", type=int, default=200, help="rotations that are completed; 200 unless told")
    parser.add_argument("--per-second", type=int, default=5, help="rotations that real workers get a second; 5")


class Scale:
    """One benchmark under way."""

    def __init__(self, site: Site, cores: Cores, asked: argparse.Namespace) -> None:
        self._site, self._asked = site, asked
        # Rotations are measured on all cores, and with them everything that is compared with them.
        if cores.server is not None and cores.load is not None:
            os.sched_setaffinity(0, {cores.server, cores.load})

    def run(self) -> dict[str, Any]:
        house, sizes = self._site.on_postgres, (self._asked.size // HUNDREDTH, self._asked.size)
        with ExitStack() as stack:
            broker = _start_redis(stack)
            houses = {size: self._open(house, size, broker) for size in sizes}
            books = {size: stack.enter_context(open_book(BOOK, houses[size].environ)) for size in sizes}
            told: dict[str, Any] = {"sizes": list(sizes), "loaded": [], "idle": []}
            for size, book in books.items():
                loaded = ask(book, f"load {size}")
                told["loaded"].append({"credentials": size, **loaded})
                tell(f"  {size:,} credentials with all that belongs to them: {loaded['seconds']:.0f} s")
            told["tables"] = ask(books[sizes[1]], "sizes")
            for turn in range(1, self._asked.rounds + 1):
                told["idle"].append([ask(book, "idle 3") for book in books.values()])
                worst = max(_ratios(told["idle"][-1]).values())
                tell(f"  periodic jobs, round {turn}: the worst ratio is {number(worst)}")
            told["pages"] = [ask(book, "pages") for book in books.values()]
            told["revoke"] = [ask(book, f"revoke {REPEATS}") for book in books.values()]
            told["repeat"] = [ask(book, f"repeat {REPEATS}") for book in books.values()]
            tell(f"  {len(told['pages'][1])} pages and {REPEATS} revocations")
            large = books[sizes[1]]
            told |= self._complete(stack, houses[sizes[1]], large)
            told["driven"] = self._drive(houses[sizes[1]], large)
            told["due"] = ask(large, f"due {DUE}")
        return told

    def _open(self, house: House, size: int, broker: str) -> House:
        """Return a house with its own database and data folder, because a folder belongs to one database."""
        folder = self._site.folder / f"scale-{size}"
        shutil.copytree(house.data, folder, ignore=shutil.ignore_patterns(*NOT_COPIED))
        folder.chmod(0o700)
        environ = {
            **house.environ,
            "KEYVAULT_DATA_DIR": str(folder),
            "KEYVAULT_DATABASE_URL": self._site.new_database(f"scale_{size}", template="keyvault"),
            "KEYVAULT_BROKER_URL": broker,
        }
        return House(environ, folder, house.token, house.keys, house.revoked, house.unknown, house.to_revoke)

    def _complete(self, stack: ExitStack, house: House, large: Book) -> dict[str, Any]:
        """Complete rotations in two processes, as fast as they can; count the rows that this writes."""
        others = [stack.enter_context(open_book(BOOK, house.environ)) for _ in range(PROCESSES)]
        before = {}
        for book in others:
            ask(book, f"prepare {self._asked.completed // PROCESSES}")
        before = ask(large, "written")
        for book in others:
            send(book, "complete")
        done = [receive(book, "complete") for book in others]
        seconds = max(each["ended"] for each in done) - min(each["began"] for each in done)
        completed, turns = sum(each["completed"] for each in done), sum(each["turns"] for each in done)
        after = ask(large, "written")
        tell(f"  {number(completed / seconds)} rotations and {number(turns / seconds)} turns a second")
        return {
            "completed": completed,
            "completed_per_second": completed / seconds,
            "turns_per_second": turns / seconds,
            "per_second_by_cpu": PROCESSES * completed / sum(each["cpu"] for each in done),
            "rows_each": {name: (after[name] - before.get(name, 0)) / completed for name in after},
        }

    def _drive(self, house: House, large: Book) -> dict[str, Any]:
        """Let real workers complete rotations at a steady rate; each acknowledgement is an event."""
        with _workers(house, self._site.folder / "workers.log"):
            count = self._asked.completed
            driven: dict[str, Any] = ask(large, f"drive {count} {self._asked.per_second}")
        shown = number(driven["p99_ms"]) if driven["p99_ms"] is not None else "-"
        tell(f"  {driven['completed']} of {count} completed by workers, p99 from event to step {shown} ms")
        return driven


def _start_redis(stack: ExitStack) -> str:
    try:
        return stack.enter_context(redis_server())
    except (MissingServerError, FailedServerError) as error:
        raise NotRunError(str(error)) from None


@contextmanager
def _workers(house: House, log: Path) -> Iterator[None]:
    """Run the workers and the beat as documented, with as many workers as cores."""
    celery = [sys.executable, "-m", "celery", "-A", "keyvault.project"]
    worker = [*celery, "worker", "--pool", "threads", "--concurrency", "4", "--loglevel", "WARNING"]
    worker += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    beat = [*celery, "beat", "--loglevel", "WARNING", "--pidfile", ""]
    commands = [[*worker, "-n", f"scale{number_of}@%h"] for number_of in range(PROCESSES)] + [beat]
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    environ = {**house.environ, "C_FORCE_ROOT": "1"}
    processes = [start_child_process(each, environ=environ, folder=ROOT, output=descriptor) for each in commands]
    os.close(descriptor)
    try:
        time.sleep(5)
        if any(process.poll() is not None for process in processes):
            raise RuntimeError(f"a worker has ended: {log.read_text(errors='replace')[-1500:]}")
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
    """Return each job's ratio of costs in one round: at full size to at a hundredth."""
    small, large = round_of
    return {name: median(large[name]) / median(small[name]) for name in large}


# --- the page ---------------------------------------------------------------------------------------------------

JOB_HEADS = ["job", "nothing due, a hundredth, CPU ms", "in full, CPU ms", "ratio", f"{DUE:,} due, in full, CPU ms"]
PAGE_HEADS = ["page", "a hundredth, CPU ms", "in full, CPU ms", "ratio", "status"]
TABLE_HEADS = ["table", "rows", "bytes each", "rows for each rotation", "MB a day"]


def describe(told: Mapping[str, Any]) -> str:
    small, large = (f"{size:,}" for size in told["sizes"])
    loaded = " and ".join(f"{each['seconds']:.0f} s" for each in told["loaded"])
    driven = told["driven"]
    return (
        f"{small} and {large} credentials, each with 3 % in open rotations, 3 changes, 3 audit entries and 10 usage"
        f" rows, loaded in {loaded}. PostgreSQL with {' '.join(POSTGRES)}, a throwaway without fsync, and all programs"
        f" share the cores with it. Costs are processor time of Python and of its database connection; rates and times"
        f" from an event to its step are wall clock, which is meaningless while other programs use the machine."
        f" {told['completed']} rotations in {PROCESSES} processes came to {number(told['completed_per_second'])} a"
        f" second in {number(told['turns_per_second'])} turns a second. {PROCESSES} Celery workers, which got"
        f" {driven['rate']} rotations a second, completed {driven['completed']} of {driven['rotations']}; from an"
        f" acknowledgement to the next step: p50 {_shown(driven['p50_ms'])} ms, p99 {_shown(driven['p99_ms'])} ms."
    )


def job_rows(told: Mapping[str, Any]) -> Iterator[list[str]]:
    for name in told["idle"][0][1]:
        small, large = ([median(each[turn][name]) for each in told["idle"]] for turn in (0, 1))
        ratio = spread([(_ratios(each)[name], True) for each in told["idle"]])
        yield [name, number(median(small)), number(median(large)), str(ratio), _shown(told["due"].get(name))]


def page_rows(told: Mapping[str, Any]) -> Iterator[list[str]]:
    """The pages, then revocations."""
    small, large = ({page["page"]: page for page in pages} for pages in told["pages"])
    for name, page in large.items():
        before = small.get(name)
        first, last = before and before["ms"], page["ms"]
        ratio = "-" if first is None or last is None else number(last / first)
        yield [name, _shown(first), _shown(last), ratio, str(page["status"])]
    for title, part in (("revoke, p50", "revoke"), ("revoke-self repeated, p50", "repeat")):
        times = [each["p50_ms"] for each in told[part]]
        statuses = ", ".join(f"{status}: {count}" for status, count in told[part][1].get("statuses", {}).items())
        yield [title, number(times[0]), number(times[1]), number(times[1] / times[0]), statuses]


def table_rows(told: Mapping[str, Any]) -> Iterator[list[str]]:
    """Growth of each table by 100,000 rotations a month, and of usage by each key that is used in every minute."""
    for name, table in sorted(told["tables"].items(), key=lambda item: -item[1]["bytes"]):
        each, rows_each = table["bytes"] / table["rows"], told["rows_each"].get(name, 0.0)
        if table["rows"] < MANY_ROWS and not rows_each:
            continue
        daily = each * rows_each * ROTATIONS_A_DAY / 1e6
        shown = number(daily)
        if name in USES:
            shown += f", and {number(each * USES[name] / 1e6)} for each busy key"
        yield [name, f"{table['rows']:,.0f}", number(each), number(rows_each), shown]


MANY_ROWS = 1_000
"""Tables with fewer rows that no rotation writes are left out."""


def figures_of(told: Mapping[str, Any]) -> dict[str, Spread]:
    driven = told["driven"]
    worst = [(max(_ratios(each).values()), True) for each in told["idle"]]
    found = {JOBS: spread(worst), ROTATIONS: _single(told["completed_per_second"])}
    # A rotation that was not completed is an event without its step.
    is_done = driven["completed"] == driven["rotations"] and driven["p99_ms"] is not None
    return found | {EVENT: _single(driven["p99_ms"] / 1e3 if is_done else 1e9)}


def by_cpu(told: Mapping[str, Any]) -> dict[str, float]:
    """The figures again, of the processor time that Python and PostgreSQL spent."""
    return {ROTATIONS: told["per_second_by_cpu"]}


def _single(value: float) -> Spread:
    return Spread(value, value, value, 1)


def _shown(value: float | None) -> str:
    return "-" if value is None else number(value)
