"""Memory and processor time of idle processes: those of `make run`, and those of a production set-up.

`make run` is the embedded default: SQLite, and a folder as the message broker. The production set-up has PostgreSQL and
Redis. No process gets a request while it is measured.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from keyvault.management import service
from keyvault.management.supervisor import start_child_process
from tests.environment import ROOT

from . import cases
from .figures import IDLE, Spread, number
from .launch import clean_environ, running_server, stop_process
from .machine import Cores, cost, list_children, list_process_tree, read_command, rss_mb
from .progress import report
from .servers import verifier_command
from .testbed import NotRunError, Testbed

SETTLE_SECONDS = 15.0
"""Time between the start of the processes and the measurement, in seconds."""

MAKE_RUN = "make run"
WHOLE = f"{MAKE_RUN}, all processes"

HEADS = ["process", "resident MB", "idle, % of a core"]


def add_options(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--idle-seconds", type=float, default=60, help="length of each measurement; default 60")


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources of one process with its children."""

    process: str
    rss_mb: float
    idle_percent: float


class Processes:
    """One run of the benchmark."""

    def __init__(self, testbed: Testbed, cores: Cores, options: argparse.Namespace) -> None:
        self._testbed, self._cores, self._options = testbed, cores, options

    def run(self) -> dict[str, Any]:
        measured, failed = self._measure_make_run(), ""
        try:
            measured += self._measure_production()
        except NotRunError as missing:
            failed = f"not run: {missing}"
        for each in measured:
            report("  " + " | ".join(row(asdict(each))))
        return {
            "processes": [asdict(each) for each in measured],
            "production_failed": failed,
            "seconds": self._options.idle_seconds,
            "cores": self._cores.description,
        }

    def _measure_make_run(self) -> list[Usage]:
        environ = clean_environ(KEYVAULT_DATA_DIR=str(self._testbed.folder / "make-run"))
        command = [sys.executable, "manage.py", "run", "--port", "{port}"]
        with running_server(command, environ, self._testbed.folder / "make-run.log", self._cores.server) as started:
            time.sleep(SETTLE_SECONDS)
            programs = {_program_name(child): list_process_tree(child) for child in list_children(started.process)}
            programs = {f"{MAKE_RUN}: supervisor": [started.process], **programs}
            found = self._measure(programs)
        whole = Usage(WHOLE, sum(each.rss_mb for each in found), sum(each.idle_percent for each in found))
        return [whole, *found]

    def _measure_production(self) -> list[Usage]:
        environ = {
            **self._testbed.on_postgres.environ,
            "KEYVAULT_BROKER_URL": self._testbed.redis,
            "KEYVAULT_ORIGIN": f"http://{cases.ADDRESS}:{{port}}",
        }
        server = list(service.server_program(0).command)
        server[server.index("--port") + 1] = "{port}"
        log = self._testbed.folder / "production.log"
        with ExitStack() as stack:
            roots = {
                name: stack.enter_context(running_server(command, environ, log, self._cores.server)).process
                for name, command in (("web", server), ("verifier", verifier_command()))
            }
            for name, program in (("worker", service.worker_program()), ("beat", service.beat_program())):
                roots[name] = stack.enter_context(_running(list(program.command), environ, log))
            time.sleep(SETTLE_SECONDS)
            return self._measure({name: list_process_tree(root) for name, root in roots.items()})

    def _measure(self, programs: Mapping[str, list[int]]) -> list[Usage]:
        """Measure the processor time and then the memory of idle programs, each a list of process ids."""
        before = {name: cost(processes, None).cpu_seconds for name, processes in programs.items()}
        began = time.monotonic()
        time.sleep(self._options.idle_seconds)
        found = []
        for name, processes in programs.items():
            used = cost(processes, None).cpu_seconds - before[name]
            found.append(Usage(name, rss_mb(processes), 100 * used / (time.monotonic() - began)))
        return found


def _program_name(process: int) -> str:
    kind = "worker with beat" if "celery" in read_command(process) else "server"
    return f"{MAKE_RUN}: {kind}"


@contextmanager
def _running(command: list[str], environ: Mapping[str, str], log: Path) -> Iterator[int]:
    """Run a program that does not listen; yield its process id. Raises RuntimeError if it exits."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    environ = {name: text.replace("{port}", "1") for name, text in environ.items()}
    try:
        process = start_child_process(command, environ=environ, folder=ROOT, output=descriptor)
    finally:
        os.close(descriptor)
    try:
        yield process.pid
        if process.poll() is not None:
            raise RuntimeError(f"A program exited: {' '.join(command)}")
    finally:
        stop_process(process)


def row(results: Mapping[str, Any]) -> list[str]:
    return [results["process"], number(results["rss_mb"]), number(results["idle_percent"])]


def describe(results: Mapping[str, Any]) -> str:
    missing = f" The production set-up was {results['production_failed']}." if results["production_failed"] else ""
    return (
        f"Processor time of {results['seconds']:.0f} s without requests, then resident memory, of each process with its"
        " children; pages that processes share are counted for each. `make run` is the embedded default (SQLite, a"
        " folder as the broker). Web, verifier, worker and beat use PostgreSQL and Redis, which are not included."
        f"{missing} {results['cores']}."
    )


def figures_of(results: Mapping[str, Any]) -> dict[str, Spread]:
    (whole,) = (each for each in results["processes"] if each["process"] == WHOLE)
    return {IDLE: Spread(whole["idle_percent"], whole["idle_percent"], whole["idle_percent"], 1)}
