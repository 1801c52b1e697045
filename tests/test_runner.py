"""`python -m tests`, the command behind `make test`: its last line and its exit code."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis.strategies import integers

from .__main__ import Counts
from .conftest import TimedOutError

ROOT = Path(__file__).resolve().parent.parent
HERE = "tests/test_runner.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    """Run the SQLite half with these options."""
    return subprocess.run(
        [sys.executable, "-m", "tests", "-n0", "-q", *options],
        cwd=ROOT,
        env={**os.environ, "KEYVAULT_TEST_DATABASE": "sqlite"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_runner_adds_the_halves() -> None:
    assert str(Counts(passed=3, failed=1) + Counts(passed=2, skipped=4)) == "5 passed, 1 failed, 4 skipped"


def test_runner_ends_on_the_plain_line() -> None:
    done = run(HERE, "-k", "adds_the_halves")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "1 passed, 0 failed, 0 skipped")


@pytest.mark.parametrize(
    ("options", "line", "code"),
    [
        ((HERE, "-k", "no_such_test"), "0 passed, 0 failed, 0 skipped", 5),
        (("--no-such-option",), "0 passed, 1 failed, 0 skipped", 1),
    ],
)
def test_runner_that_ran_nothing_does_not_look_like_a_success(options: tuple[str, ...], line: str, code: int) -> None:
    """A typing error in ARGS must not pass for a green suite."""
    done = run(*options)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (code, line)


def test_timeout_in_an_example_is_reported_as_a_timeout() -> None:
    """Hypothesis repeats no example that only the clock ended."""
    if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
        pytest.skip("tests run without timeouts here")
    began: list[int] = []

    @settings(database=None)
    @given(integers())
    def slow_once(example: int) -> None:
        began.append(example)
        if len(began) == 3:
            signal.raise_signal(signal.SIGALRM)

    with pytest.raises(TimedOutError, match="Timeout"):
        slow_once()
    assert len(began) == 3
