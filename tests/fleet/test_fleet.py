"""A short form of `make fleet`."""

import os
import subprocess
import sys

import pytest

from tests.environment import FOLDER, ROOT

pytestmark = pytest.mark.long

OF_THIS_RUN = {"PYTEST_XDIST_WORKER", FOLDER, "DJANGO_SETTINGS_MODULE"}
"""Variables of the tests, which lay a place of their own for the command."""


@pytest.mark.timeout(600)
def test_fleet_takes_up_a_replacement_while_the_service_is_killed_and_started_again() -> None:
    """Guarantee: no order of a merchant's processes fails or is created twice, and no operator carries a key."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fleet", "killed", "--processes", "3"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in OF_THIS_RUN}
        | {"PYTHONPATH": str(ROOT / "clients" / "python")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "1 of 1 rotations completed" in done.stdout
