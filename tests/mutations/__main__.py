"""Remove one guard at a time and report which test notices: `python -m tests.mutations [--list] [--only NAME]`.

The tracked files are copied once per core. For each guard, the unchanged copy must pass the guard's test, run alone.
Then the guard is replaced in the copy, the test runs again, and the file is restored. The exit code is 1 when a guard
survives or cannot be judged.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from tests.environment import DATABASE, POSTGRES_URL, ROOT
from tests.mutations.guards import GUARDS, Guard
from tests.servers.postgres import postgres_server
from tests.servers.throwaway import FailedServerError, MissingServerError

_OUTPUT_CHARACTERS = 4_000


class UnusableRunError(Exception):
    """The tests say nothing about a guard, because they fail without a mutation or do not run with it."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations")
    parser.add_argument("--list", action="store_true", help="list the guards and run nothing")
    parser.add_argument("--only", metavar="NAME", action="append", help="check this guard only; may be repeated")
    asked = parser.parse_args(arguments)
    if unknown := set(asked.only or ()) - {guard.name for guard in GUARDS}:
        parser.error(f"unknown guards: {', '.join(sorted(unknown))}; --list shows all of them")
    guards = [guard for guard in GUARDS if asked.only is None or guard.name in asked.only]
    if asked.list:
        for guard in guards:
            say(f"{guard.name} | {guard.file} | {guard.guarantee}")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return check(guards)
    except (UnusableRunError, MissingServerError, FailedServerError) as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        return 130


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def check(guards: Sequence[Guard]) -> int:
    """Check the guards; return 1 when one survives."""
    faults = [fault for guard in guards if (fault := guard.find_fault(ROOT))]
    if faults:
        raise UnusableRunError("\n".join(faults))
    # Every core checks a share of the guards on a copy and a server of its own.
    shares = [guards[start :: os.cpu_count() or 1] for start in range(os.cpu_count() or 1)]
    stops = threading.Event()
    with ThreadPoolExecutor(len(shares)) as pool:
        try:
            survivors = sum(pool.map(partial(count_survivors, stops=stops), shares))
        finally:
            stops.set()
    say(f"{len(guards)} guards removed, {survivors} survived")
    return 1 if survivors else 0


def count_survivors(guards: Sequence[Guard], stops: threading.Event) -> int:
    """Check the guards one by one on a copy of the tree until `stops` is set. Raises UnusableRunError."""
    with ExitStack() as stack:
        copy = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-mutations-")))
        copy_tracked_files(copy)
        url = stack.enter_context(postgres_server()) if any(guard.database == "postgres" for guard in guards) else ""
        passing: set[tuple[str, str]] = set()
        survivors = 0
        for guard in guards:
            if stops.is_set():
                break
            if (guard.test, guard.database) not in passing:
                require_passing(copy, guard, url)
                passing.add((guard.test, guard.database))
            noticed_by = find_noticing_test(copy, guard, url)
            say(f"{guard.name} | {guard.file} | {f'noticed by {noticed_by}' if noticed_by else 'SURVIVED'}")
            survivors += noticed_by is None
    return survivors


def copy_tracked_files(copy: Path) -> None:
    """Copy the tracked files as they are in the working tree."""
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)  # noqa: S607  of the developer
    for name in filter(None, listed.split("\0")):
        source = ROOT / name
        if source.is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy / name)


def require_passing(copy: Path, guard: Guard, url: str) -> None:
    """Require that the unchanged copy passes the guard's test, without the tests of others. Raises UnusableRunError."""
    passed = run_test(copy, guard, url)["PASSED"]
    if not any(name == guard.test or name.startswith(f"{guard.test}[") for name in passed):
        raise UnusableRunError(f"This test did not run on {guard.database}: {guard.test}")


def find_noticing_test(copy: Path, guard: Guard, url: str) -> str | None:
    """Return the first test that fails without the guard; None: the guard survives."""
    path = copy / guard.file
    # Moved, so that it keeps its time, by which Python knows that its compiled form is current.
    original = path.rename(path.with_name(f"{path.name}.unchanged"))
    path.write_text(guard.mutate(original.read_text()))
    try:
        failed = run_test(copy, guard, url, is_mutated=True)["FAILED"]
    finally:
        original.replace(path)
    return failed[0] if failed else None


def run_test(copy: Path, guard: Guard, url: str, *, is_mutated: bool = False) -> dict[str, list[str]]:
    """Run the guard's test in the copy until the first failure; return the node ids by outcome, PASSED and FAILED.

    Raises UnusableRunError when no test ran, one broke outside of its body, or one fails without a mutation.
    """
    # CI: property tests repeat the same examples.
    variables = {**os.environ, DATABASE: guard.database, POSTGRES_URL: url, "CI": "1"}
    variables.pop("DJANGO_SETTINGS_MODULE", None)
    if is_mutated:
        variables["PYTHONDONTWRITEBYTECODE"] = "1"
    options = ("-q", "-x", "--tb=short", "-rfEp", "-p", "no:cacheprovider", "-p", "no:xdist")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, guard.test],
        cwd=copy,
        env=variables,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    outcomes = {
        outcome: [
            line.removeprefix(f"{outcome} ").partition(" - ")[0]
            for line in done.stdout.splitlines()
            if line.startswith(f"{outcome} tests/")
        ]
        for outcome in ("PASSED", "FAILED")
    }
    is_expected = done.returncode == 0 or (is_mutated and done.returncode == 1 and outcomes["FAILED"])
    if not is_expected:
        raise UnusableRunError(
            f"{'A mutated' if is_mutated else 'The unchanged'} copy cannot run {guard.test} on {guard.database}:\n"
            f"{done.stdout[-_OUTPUT_CHARACTERS:]}"
        )
    return outcomes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
