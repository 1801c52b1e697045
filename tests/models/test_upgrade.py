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


ACTS = """
import django
django.setup()
from django.core.management import call_command
from django.db import connection
call_command("migrate", "keyvault", "0010", verbosity=0)
call_command("migrate", "rotation", "0003", verbosity=0)
from keyvault.models.triggers import drop_triggers
drop_triggers(connection)  # of this version, which know columns that are not there yet
with connection.cursor() as cursor:
    cursor.execute("PRAGMA foreign_keys = OFF")
    cursor.execute("PRAGMA ignore_check_constraints = ON")

    def insert(table, **row):
        cursor.execute(f"PRAGMA table_info({table})")
        for _, name, kind, not_null, default, _ in cursor.fetchall():
            if not_null and default is None and name not in row and name != "id":
                row[name] = "2026-01-01" if kind == "datetime" else 0 if "int" in kind or kind == "bool" else "x"
        marks = ", ".join(["%s"] * len(row))
        cursor.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", list(row.values()))

    insert("keyvault_issuancerequest", request_id="req_1", requester_person="per_issuance")
    insert("rotation_rotation", rotation_id="rot_1", requester_person="per_rotation")
    insert("rotation_campaign", campaign_id="cmp_1", requester_person="per_campaign")
    for number, person in enumerate(["per_earlier", "per_retirement"], 1):
        insert("rotation_retirement", rotation_id="rot_1", requester_person=person, created_at=f"2026-01-0{number}")
    for subject, event in [("req_1", "issuance.approved"), ("rot_1", "rotation.bypassed"),
                           ("rot_1", "rotation.retirement_approved"), ("cmp_1", "campaign.approved")]:
        insert("keyvault_breakglass", act_id=event, event=event, subject=subject, operator_id=1)
    insert("keyvault_breakglass", act_id="reviewed", event="x", subject="req_1", operator_id=1, reviewer_id=2,
           reviewed_at="2026-01-02", reviewer_person="per_issuance")
    cursor.execute("PRAGMA ignore_check_constraints = OFF")
from unittest import mock
from django.db.backends.sqlite3.base import DatabaseWrapper
with mock.patch.object(DatabaseWrapper, "check_constraints"):  # the rows above refer to nothing
    call_command("migrate", verbosity=0)
"""


def test_upgrade_names_who_asked_for_acts_that_nobody_has_reviewed(tmp_path: Path) -> None:
    """Whoever asked before the upgrade does not review afterwards; what was reviewed stays as it was."""
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("KEYVAULT_")},
        "KEYVAULT_DATA_DIR": str(tmp_path),
        "DJANGO_SETTINGS_MODULE": "keyvault.project.settings",
    }
    done = subprocess.run([sys.executable, "-c", ACTS], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    with sqlite3.connect(tmp_path / "keyvault.sqlite3") as database:
        rows = dict(database.execute("SELECT act_id, requester_person FROM keyvault_breakglass").fetchall())
    database.close()
    assert rows == {
        "issuance.approved": "per_issuance",
        "rotation.bypassed": "per_rotation",
        "rotation.retirement_approved": "per_retirement",
        "campaign.approved": "per_campaign",
        "reviewed": "",
    }
