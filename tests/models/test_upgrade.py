"""A database of an earlier version, with its rules in force, takes the migrations that came since."""

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).resolve().parents[2]

UPGRADE = """
import django
django.setup()
from django.core.management import call_command
from django.db import connection
from keyvault.models.triggers import drop_triggers, ensure_triggers, missing_triggers
call_command("migrate", "keyvault", "0002", verbosity=0)
call_command("migrate", "rotation", "0001", verbosity=0)
drop_triggers(connection)  # of this version, which know columns that are not there yet
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
ensure_triggers(connection)
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


UNDER_WAY = """
import django, json
django.setup()
from django.core.management import call_command
from django.db import connection
call_command("migrate", "keyvault", "0004", verbosity=0)
call_command("migrate", "rotation", "0001", verbosity=0)
from keyvault.models.triggers import drop_triggers
drop_triggers(connection)  # of this version, which know columns that are not there yet
plan = json.dumps({"deadline": "2026-12-24T00:00:00+00:00"})
with connection.cursor() as cursor:
    cursor.execute("PRAGMA foreign_keys = OFF")
    cursor.execute(
        "INSERT INTO keyvault_merchant (merchant_id, name, status, created_at, version) "
        "VALUES ('acme', 'Acme', 'active', '2026-01-01', 1)"
    )
    cursor.execute(
        "INSERT INTO keyvault_account (id, version, merchant_id, environment, status, client_configuration, "
        "allowed_origins, customer_token_seconds, created_at) "
        "VALUES (1, 1, 'acme', 'sandbox', 'active', '{}', '[]', 900, '2026-01-01')"
    )
    for number in range(3):
        cursor.execute(
            "INSERT INTO keyvault_credential (version, credential_id, account_id, kind, label, delivery, "
            "origin_header, networks, created_at) "
            "VALUES (1, %s, 1, 'private', 'x', 'secret_backend', 'refuse', '[]', '2026-01-01')",
            [f"crd_{number}"],
        )
        for name in ("old", "new"):
            cursor.execute(
                "INSERT INTO keyvault_key (version, key_id, credential_id, digest, pepper_version, state, created_at, "
                "material) VALUES (1, %s, %s, zeroblob(32), 1, 'pre_activation', '2026-01-01', 'none')",
                [f"{name}{number}", f"crd_{number}"],
            )
    for number, state in enumerate(["overlap", "quarantine", "completed"]):
        cursor.execute(
            "INSERT INTO rotation_rotation (version, rotation_id, state, why, plan, plan_digest, approvals_needed, "
            "requester_person, created_at, approval_expires_at, entered_at, accepted_at, delivered_at, used_at, "
            "silent_at, credential_id, predecessor_id, replacement_id) VALUES (1, %s, %s, '', %s, 'x', "
            "0, 'per_x', '2026-11-01', '2026-11-08', '2026-11-02 10:00:00', '2026-11-01', '2026-11-01', '2026-11-01', "
            "'2026-11-01', %s, %s, %s)",
            [state, state, plan, f"crd_{number}", f"old{number}", f"new{number}"],
        )
call_command("migrate", "rotation", verbosity=0)
"""


def test_upgrade_gives_rotations_under_way_their_deadline_and_their_quarantine(tmp_path: Path) -> None:
    """Else one that was in quarantine would have no way back, and one past its deadline could not be extended."""
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("KEYVAULT_")},
        "KEYVAULT_DATA_DIR": str(tmp_path),
        "DJANGO_SETTINGS_MODULE": "keyvault.project.settings",
    }
    done = subprocess.run([sys.executable, "-c", UNDER_WAY], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    with sqlite3.connect(tmp_path / "keyvault.sqlite3") as database:
        rows = database.execute("SELECT state, deadline_at, quarantined_at FROM rotation_rotation").fetchall()
    database.close()
    assert {state: (deadline is not None, since) for state, deadline, since in rows} == {
        "overlap": (True, None),
        "quarantine": (True, "2026-11-02 10:00:00"),
        "completed": (False, None),
    }
