"""Break the service on purpose and count the violations: `make faults`, or

    python -m tests.faults [NAME...] [--seed N] [--minutes N] [--json PATH] [--list]

Each experiment is a process of its own, with real servers, a real beat and real workers. Merchants use their keys over
HTTP the whole time. The experiments run one after the other; the one that needs no server runs beside them. The last
output is a table. The exit status is 1 if anything was violated. An experiment whose servers this machine lacks is not
run, which is a failure if KEYVAULT_REQUIRE names the server. All of them take less than 35 minutes on two cores.
"""

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from keyvault.backends.private_files import ensure_private_directory
from keyvault.management.supervisor import StopRequestedError, start_child_process, stopping_on_signals
from tests.environment import ROOT, required_servers
from tests.faults.catalog import EXPERIMENTS, Experiment, choose
from tests.faults.servers import find_missing

MINUTES = 34.0
TIMEOUT_FACTOR = 10
"""Factor of the expected duration after which an experiment is aborted and counted as a violation.

A busy machine is slow.
"""

CLEANUP_SECONDS = 60

COLUMNS = {
    "requests": "requests",
    "refused that should pass": "wrongly refused",
    "credentials without a usable key": "keyless",
    "rotations stuck": "stuck",
}
"""Counts that have a column in the table, by the column's heading."""


def main() -> int:
    arguments = _read_arguments()
    if arguments.list:
        for each in EXPERIMENTS:
            servers = ", ".join(sorted(each.servers)) or "no server"
            _print(f"{each.name:<16} {each.what} (about {each.minutes:g} min, {servers})")
        return 0
    try:
        chosen = choose(arguments.names)
    except LookupError as unknown:
        sys.stderr.write(f"There is no experiment {unknown}; --list names them.\n")
        return 2
    seed = secrets.randbelow(10**6) if arguments.seed is None else arguments.seed
    _print(f"{len(chosen)} experiments, seed {seed}")
    began = time.monotonic()
    try:
        with stopping_on_signals(), ExitStack() as stack:
            outcomes = _perform_all(chosen, seed, arguments.minutes, stack)
    except StopRequestedError as stop:
        sys.stderr.write(f"Stopped by {stop}.\n")
        return 128 + stop.number
    _show(outcomes)
    _print(f"\n{len(outcomes)} experiments in {(time.monotonic() - began) / 60:.1f} minutes, seed {seed}")
    path = arguments.json or ensure_private_directory(ROOT / ".keyvault") / "faults.json"
    path.write_text(json.dumps({"at": datetime.now(UTC).isoformat(), "seed": seed, "experiments": outcomes}, indent=1))
    _print(f"\nAll counts: {path}")
    return 0 if all(outcome["held"] for outcome in outcomes) else 1


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="name of an experiment, or first word of several names; default: all"
    )
    parser.add_argument(
        "--seed", type=int, default=None, help="seed of all random choices; default: a new one, which is printed"
    )
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="duration of all experiments together, in minutes (default 34)"
    )
    parser.add_argument("--json", type=Path, default=None, help="file for the counts (default .keyvault/faults.json)")
    parser.add_argument("--list", action="store_true", help="only list the experiments")
    return parser.parse_args()


def _perform_all(chosen: list[Experiment], seed: int, minutes: float, stack: ExitStack) -> list[dict[str, Any]]:
    """Run the experiments in order and return their results. `held`: nothing was violated."""
    waiting = (each for each in chosen if not each.is_beside)
    queue = [list(group) for _, group in groupby(waiting, key=lambda each: each.group or each.name)]
    pace = min(1.0, minutes / sum(max(each.minutes for each in group) for group in queue)) if queue else 1.0
    outcomes: dict[str, dict[str, Any]] = {}
    beside = []
    for each in chosen:
        missing = find_missing(each.servers)
        if missing:
            outcomes[each.name] = _left_out(each, missing)
        elif each.is_beside:
            beside.append(_Trial(each, seed, each.minutes, stack))
    for group in queue:
        runnable = [each for each in group if each.name not in outcomes]
        together = [_Trial(each, seed, each.minutes * pace, stack) for each in runnable]
        outcomes |= {trial.experiment.name: trial.outcome() for trial in together}
    outcomes |= {trial.experiment.name: trial.outcome() for trial in beside}
    return [outcomes[each.name] for each in chosen]


def _left_out(experiment: Experiment, missing: list[str]) -> dict[str, Any]:
    why = f"no {', no '.join(missing)} on this machine"
    _print(f"\n=== {experiment.name}: not run, {why} ===")
    is_wanted = bool(required_servers() & set(missing))
    return {**_blank(experiment), "why_not": why, "held": not is_wanted}


def _blank(experiment: Experiment) -> dict[str, Any]:
    return {"name": experiment.name, "what": experiment.what, "held": True, "violations": []}


class _Trial:
    """A running experiment. It starts when it is constructed and ends with the stack at the latest."""

    def __init__(self, experiment: Experiment, seed: int, minutes: float, stack: ExitStack) -> None:
        _print(f"\n=== {experiment.name}: {experiment.what} ===")
        self.experiment = experiment
        self._began_at, self._limit = time.time(), time.monotonic() + minutes * 60 * TIMEOUT_FACTOR
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-faults-"))
        self._result = Path(folder, "result.json")
        order = (experiment.name, str(seed), str(minutes), str(self._result))
        environ = {name: text for name, text in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
        command = [sys.executable, "-m", "tests.faults.experiment_process", *order]
        self._process = start_child_process(command, environ=environ, folder=ROOT, orphan_signal=signal.SIGTERM)
        stack.callback(self._end)

    def outcome(self) -> dict[str, Any]:
        """Wait for the experiment's end and return its counts."""
        try:
            status = self._process.wait(max(0.0, self._limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            status = self._end()
        outcome = _blank(self.experiment)
        ended_at = time.time()
        if self._result.exists():
            outcome |= json.loads(self._result.read_text())
            ended_at = self._result.stat().st_mtime
        outcome["seconds"] = round(ended_at - self._began_at)
        if status != 0 or "n" not in outcome:
            outcome["violations"] = [f"it broke off with status {status}", *outcome["violations"]]
            outcome["number_of_violations"] = outcome.get("number_of_violations", 0) + 1
        outcome["held"] = not outcome["number_of_violations"]
        return outcome

    def _end(self) -> int:
        if self._process.poll() is not None:
            return self._process.returncode
        self._process.terminate()
        try:
            return self._process.wait(CLEANUP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


# --- report -------------------------------------------------------------------------------------------


def _show(outcomes: list[dict[str, Any]]) -> None:
    heads = ["experiment", "n", *COLUMNS.values(), "seconds", "outcome"]
    rows = [heads, *(_row(outcome) for outcome in outcomes)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(heads))]
    _print("")
    for row in rows:
        _print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for outcome in outcomes:
        if "n" in outcome:
            more = {name: count for name, count in outcome["counts"].items() if name not in COLUMNS}
            _print(f"\n{outcome['name']}: {'; '.join(f'{name} {_number(count)}' for name, count in more.items())}")
        for violation in outcome["violations"]:
            _print(f"  VIOLATED  {violation}")


def _row(outcome: dict[str, Any]) -> list[str]:
    name = outcome["name"]
    if "why_not" in outcome:
        wanted = "" if outcome["held"] else ", and KEYVAULT_REQUIRE wants it"
        return [name, "", *("" for _ in COLUMNS), "", f"not run: {outcome['why_not']}{wanted}"]
    counts = outcome.get("counts", {})
    n = f"{outcome['n']} {outcome['unit']}" if "n" in outcome else ""
    outcome_text = "held" if outcome["held"] else f"{outcome['number_of_violations']} VIOLATIONS"
    columns = (_number(counts[count]) if count in counts else "-" for count in COLUMNS)
    return [name, n, *columns, str(outcome["seconds"]), outcome_text]


def _number(count: float) -> str:
    return f"{count:g}" if count != int(count) else str(int(count))


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
