"""A database of an earlier version, with its rules in force, takes the migrations that came since."""

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

UPGRADE = """
import django
django.setup()
from django.core.management import call_command
from django.db import connection
from keyvault.models.triggers import ensure_triggers, missing_triggers
call_command("migrate", "keyvault", "0002", verbosity=0)
call_command("migrate", "rotation", verbosity=0)
ensure_triggers(connection)
with connection.cursor() as cursor:
    cursor.execute(
        "INSERT INTO keyvault_merchant (merchant_id, name, status, created_at, version) "
        "VALUES ('acme', 'Acme', 'active', '2026-01-01', 1)"
    )
    cursor.execute(
        "INSERT INTO keyvault_servicetoken (token_id, name, digest, pepper_version, scope, permissions, "
        "creator_person, created_at, expires_at, version) VALUES ('0123456789abcdef', 'gateway', "
        "zeroblob(32), 1, 'all', '[]', 'system:host', '2026-01-01', '2027-01-01', 1)"
    )
call_command("migrate", verbosity=0)
assert not missing_triggers(connection), missing_triggers(connection)
"""


def test_upgrade_of_a_sqlite_database_with_its_triggers_keeps_rows_and_rules(tmp_path: Path) -> None:
    """SQLite renames a table to rebuild it, which a trigger of another table that names it would not survive."""
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("KEYVAULT_")},
        "KEYVAULT_DATA_DIR": str(tmp_path),
        "DJANGO_SETTINGS_MODULE": "keyvault.project.settings",
    }
    done = subprocess.run([sys.executable, "-c", UPGRADE], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    with sqlite3.connect(tmp_path / "keyvault.sqlite3") as database:
        assert database.execute("SELECT merchant_id FROM keyvault_merchant").fetchall() == [("acme",)]
        lineages = database.execute("SELECT token_id, lineage FROM keyvault_servicetoken").fetchall()
    database.close()
    assert lineages == [("0123456789abcdef", "0123456789abcdef")]


pytestmark = pytest.mark.timeout(120)
