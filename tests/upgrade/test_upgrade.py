"""A short form of `make upgrade-test`, in the order that upgrades first and then rolls back."""

import os
import subprocess
import sys

import pytest

from tests.environment import ROOT, required_servers
from tests.servers.postgres import find_postgres
from tests.servers.redis import find_redis

pytestmark = pytest.mark.long


@pytest.mark.timeout(600)
def test_upgrade_and_roll_back_under_traffic_refuse_no_request() -> None:
    """Guarantee: two releases run side by side through migrations of every kind, and every request is answered."""
    if find_postgres() is None or find_redis() is None:
        if required_servers() & {"postgres", "redis"}:
            pytest.fail("KEYVAULT_REQUIRE names PostgreSQL and Redis, and one is missing", pytrace=False)
        pytest.skip("needs PostgreSQL and Redis")
    done = subprocess.run(
        [sys.executable, "-m", "tests.upgrade", "roll-back", "--seconds", "10", "--rate", "100", "--rows", "5000"],
        cwd=ROOT,
        env={**os.environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "0 failed, 0 processes exited, 0 tracebacks" in done.stdout
