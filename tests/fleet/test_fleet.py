"""A short form of `make fleet`."""

import os
import subprocess
import sys

import pytest

from tests.environment import ROOT

pytestmark = pytest.mark.long


@pytest.mark.timeout(600)
def test_fleet_takes_up_a_replacement_while_the_service_is_killed_and_started_again() -> None:
    """Guarantee: no order of a merchant's processes fails or is created twice, and no operator carries a key."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fleet", "killed", "--processes", "3"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "clients" / "python")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "1 of 1 rotations completed" in done.stdout
