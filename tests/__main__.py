"""The suite as `make test` runs it: once on SQLite, and the database and race tests again on PostgreSQL.

`python -m tests [pytest's options]` runs all but the tests marked `long`, which `-m long` runs.
`KEYVAULT_TEST_DATABASE=sqlite|postgres` runs only that half. The last line is the sum of both, for people and for CI;
the exit code is 0 only when something ran and nothing failed.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import pytest

from .environment import DATABASE, DATABASES, POSTGRES_URL, ROOT, TALLY, chosen_database, required_servers
from .servers.postgres import postgres_server
from .servers.throwaway import FailedServerError, MissingServerError

WORKERS = ("-n", "3", "--dist", "worksteal")
"""One more than the cores of CI, because tests wait for servers and processes. The caller's `-n0` wins."""

WITHOUT_LONG = ("-m", "not long")
"""For a run without paths: a file or folder that is named runs whole. `-m` among the caller's options wins."""

TIDY_WITHIN_SECONDS = 20

FINE = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
"""Exit codes that the counts explain."""


@dataclass(frozen=True)
class Counts:
    """What became of the tests; an error outside a test's own body is a failure."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        """The counts of both."""
        return Counts(self.passed + other.passed, self.failed + other.failed, self.skipped + other.skipped)

    def __str__(self) -> str:
        """The plain closing line that CI reads."""
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def main(options: list[str]) -> int:
    """Run the requested halves, print the totals, and return the exit status."""
    try:
        asked = chosen_database() if DATABASE in os.environ else None
        required = required_servers()
    except pytest.UsageError as wrong:
        say(str(wrong))
        return int(pytest.ExitCode.USAGE_ERROR)
    total, story = Counts(), []
    for database in (asked,) if asked else DATABASES:
        started = time.monotonic()
        say(f"\n=== {database} ===")
        try:
            counts = run_half(database, options)
        except MissingServerError as missing:
            wanted = asked == database or database in required
            counts = Counts(failed=1 if wanted else 0)
            story.append(f"{database}: {'missing' if wanted else 'skipped'}, {missing.reason}")
        except FailedServerError as failed:
            counts = Counts(failed=1)
            story.append(f"{database}: {failed}")
        except KeyboardInterrupt:
            return 130
        else:
            story.append(f"{database}: {counts} in {time.monotonic() - started:.0f} s")
        total += counts
    ran = total.passed + total.failed
    say("", *(story if ran else [*story, "no test ran"]), str(total))
    if total.failed:
        return 1
    return 0 if ran else int(pytest.ExitCode.NO_TESTS_COLLECTED)


def say(*lines: str) -> None:
    """Print in step with pytest, which writes to the same place."""
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def run_half(database: str, options: list[str]) -> Counts:
    """One pytest run on one database; its output goes straight through."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-tally-"))
        tally = Path(folder, "tally.json")
        variables = _without_a_run_around_us() | {DATABASE: database, TALLY: str(tally)}
        if database == "postgres" and not variables.get(POSTGRES_URL):
            variables[POSTGRES_URL] = stack.enter_context(postgres_server())
        # A cache for each half, or `--lf` would only know the failures of the second.
        cache = ("-o", f"cache_dir=.pytest_cache/{database}")
        selection = () if any(_is_path(option) for option in options) else WITHOUT_LONG
        command = [sys.executable, "-m", "pytest", *cache, *WORKERS, *selection, *options]
        code = _run_to_the_end(command, variables)
        stats = json.loads(tally.read_text()) if tally.exists() else {}
    failed = stats.get("failed", 0) + stats.get("error", 0)
    if code not in FINE or (code == pytest.ExitCode.TESTS_FAILED and not failed):
        # The run broke off (a usage error, an interrupt, a crash): no count may look like a success.
        failed = failed or 1
    return Counts(
        passed=stats.get("passed", 0) + stats.get("xpassed", 0),
        failed=failed,
        skipped=stats.get("skipped", 0) + stats.get("xfailed", 0),
    )


def _is_path(option: str) -> bool:
    return Path(ROOT, option.partition("::")[0]).exists()


def _without_a_run_around_us() -> dict[str, str]:
    """The environment, less what would choose the settings too early or make us part of another pytest run.

    Without bytecode files, each worker and each process that a test starts would compile all modules again.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if name not in {"DJANGO_SETTINGS_MODULE", "PYTHONDONTWRITEBYTECODE"} and not name.startswith("PYTEST_XDIST_")
    }


def _run_to_the_end(command: list[str], variables: dict[str, str]) -> int:
    """Run pytest, and forward an interrupt to it."""
    with subprocess.Popen(command, cwd=ROOT, env=variables) as run:

        def pass_on(number: int, frame: FrameType | None) -> None:
            run.send_signal(signal.SIGINT)
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGTERM, pass_on)
        try:
            return run.wait()
        except KeyboardInterrupt:
            _wait_for_the_tidy_end(run)
            raise
        finally:
            signal.signal(signal.SIGTERM, before)


def _wait_for_the_tidy_end(run: "subprocess.Popen[bytes]") -> None:
    """Let an interrupted pytest tear down what it set up, but not forever."""
    try:
        run.wait(TIDY_WITHIN_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        run.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
