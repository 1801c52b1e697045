"""Isolation of the tests: each finds the database as `migrate` made it, in a place of this run alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from django.contrib.auth.models import Group
from django.db import connection

from keyvault.models import Key
from keyvault.models.triggers import expected_triggers, list_triggers
from keyvault.services import maintenance
from keyvault.services.revocations import anchor, log_backfill
from keyvault.services.revocations.log_opening import late_comparison
from keyvault.services.work.shared_jobs import shared_jobs

from .conftest import PLACE

pytestmark = pytest.mark.database

ROOT = Path(__file__).resolve().parent.parent
COUNT_GROUPS = (
    "import django; django.setup(); from django.contrib.auth.models import Group; print(Group.objects.count())"
)


@pytest.mark.parametrize("turn", ["first", "second"])
@pytest.mark.django_db(transaction=True)
def test_isolation_transactional_test_finds_what_migrate_made(turn: str) -> None:
    """The first turn's flush takes neither the groups nor the append-only triggers from the second."""
    assert not Group.objects.filter(name="left by a test").exists()
    assert Group.objects.exists()
    assert expected_triggers() <= list_triggers(connection)
    Group.objects.create(name="left by a test")


@pytest.mark.parametrize("turn", ["first", "second"])
def test_isolation_periodic_jobs_begin_without_the_position_of_an_earlier_test(turn: str) -> None:
    """A position in the database of an earlier test would let a job pass over the rows of this one."""
    assert not late_comparison.is_due
    assert (anchor._writer.position, log_backfill._backfill.position) == (None, 0)
    assert maintenance._turns == maintenance.MaintenanceTurns()
    assert shared_jobs.begin("job", turn)
    late_comparison.is_due = True
    anchor._writer.position = log_backfill._backfill.position = 7
    maintenance._turns.expired.last = Key()


@pytest.mark.django_db(transaction=True)
def test_isolation_started_process_sees_the_rows_of_the_test() -> None:
    Group.objects.create(name="made by a test")
    done = subprocess.run([sys.executable, "-c", COUNT_GROUPS], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) == Group.objects.count()


def test_isolation_environment_is_the_run_s_own() -> None:
    """Nothing that a developer exported reaches the tests, and no test reaches a developer's data."""
    names = {name for name in os.environ if name.startswith(("KEYVAULT_", "VAULT_"))}
    allowed = {"KEYVAULT_DATA_DIR", "KEYVAULT_DATABASE_URL", "KEYVAULT_REQUIRE"}
    assert {name for name in names - allowed if not name.startswith("KEYVAULT_TEST_")} == set()
    assert Path(os.environ["KEYVAULT_DATA_DIR"]) == PLACE.data_dir
    assert PLACE.database_name in os.environ["KEYVAULT_DATABASE_URL"]
