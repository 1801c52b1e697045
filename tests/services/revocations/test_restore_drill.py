"""Restore drill: an installation with its own database, restored from a backup as an operator does.

Keys revoked since the backup are active in the restored rows. The service refuses to start on them; one command
replays the revocations, and afterwards the state is as acknowledged.
"""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest

from keyvault.management.service import find_free_port
from tests.conftest import PLACE
from tests.servers.postgres import find_postgres
from tests.template_database import copy_sqlite_template, name_of_postgres_template

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[3]

START = "import keyvault.project.wsgi"

CREATE = """
import json, django
django.setup()
from keyvault.management.json_command import call
call("setup")
call("seed_demo")
options = ["--environment", "sandbox", "--kind", "private", "--requested-by", "tam", "--approved-by", "approver"]
keys = {name: call("issue_key", "--merchant", merchant, "--label", name, *options)["key_id"]
        for name, merchant in [("kept", "acme"), ("revoked", "acme"), ("leaked", "acme"), ("offboarded", "globex")]}
token = call("create_service_token", "gateway", "--environment", "sandbox", "--permission", "keys:read")["key_id"]
print(json.dumps({**keys, "token": token}))
"""

REVOKE = """
import sys, json, django
django.setup()
from keyvault.management.json_command import call
made = json.loads(sys.argv[1])
call("revoke_key", made["revoked"], "--reason", "superseded", "--by", "admin")
last = call("revoke_key", made["leaked"], "--reason", "key_compromise", "--by", "admin")["sequence"]
call("revoke_service_token", made["token"], "--by", "admin")
call("offboard_merchant", "globex", "--by", "admin", "--why", "contract ended", "--yes")
print(last)
"""

DUMP_STATE = """
import json, django
django.setup()
from keyvault.models import Change, Key, Merchant, ServiceToken
from keyvault.services.recording.audit_chain import verify_audit
from keyvault.services.revocations.replay import read_counter
print(json.dumps({
    "keys": {key.key_id: [key.state, key.reason] for key in Key.objects.all()},
    "revoked_tokens": list(ServiceToken.objects.filter(revoked_at__isnull=False).values_list("pk", flat=True)),
    "offboarded": list(Merchant.objects.filter(status="offboarded").values_list("pk", flat=True)),
    "audit": str(verify_audit().first_broken),
    "counter": read_counter(),
}))
"""


class Database(Protocol):
    url: str

    def back_up(self) -> None: ...

    def restore(self) -> None: ...


class SqliteCopy:
    """SQLite: a migrated file, an online copy, and the file copied back."""

    def __init__(self, folder: Path) -> None:
        self.path, self.kept = folder / "keyvault.sqlite3", folder / "backup.sqlite3"
        self.url = f"sqlite:///{self.path}"
        copy_sqlite_template(self.path)

    def back_up(self) -> None:
        with sqlite3.connect(self.path) as source, sqlite3.connect(self.kept) as target:
            source.backup(target)
        source.close()
        target.close()

    def restore(self) -> None:
        for ending in ("-wal", "-shm"):
            self.path.with_name(self.path.name + ending).unlink(missing_ok=True)
        shutil.copyfile(self.kept, self.path)


class PostgresDump:
    """PostgreSQL: a migrated database, `pg_dump`, and `pg_restore` into a new database."""

    def __init__(self, folder: Path) -> None:
        binary = find_postgres()
        if binary is None:
            pytest.skip("there is no pg_dump beside a server of this machine")
        self.programs, self.kept = binary.parent, folder / "backup.dump"
        self.server = os.environ["KEYVAULT_TEST_POSTGRES_URL"]
        self.name = f"drill_{os.getpid()}"
        self.url = urlunsplit(urlsplit(self.server)._replace(path=f"/{self.name}"))
        self.make(name_of_postgres_template(PLACE))

    def make(self, template: str = "template1") -> None:
        with psycopg.connect(self.server, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{self.name}" TEMPLATE "{template}"')

    def drop(self) -> None:
        with psycopg.connect(self.server, autocommit=True) as connection:
            connection.execute(f'DROP DATABASE "{self.name}" WITH (FORCE)')

    def back_up(self) -> None:
        self.run("pg_dump", "--format=custom", f"--file={self.kept}", self.url)

    def restore(self) -> None:
        self.drop()
        self.make()
        self.run("pg_restore", "--exit-on-error", f"--dbname={self.url}", str(self.kept))

    def run(self, program: str, *arguments: str) -> None:
        subprocess.run([self.programs / program, *arguments], check=True, capture_output=True)


@pytest.fixture
def sqlite_copy(tmp_path: Path) -> Database:
    return SqliteCopy(tmp_path)


@pytest.fixture
def postgres_dump(tmp_path: Path) -> Iterator[Database]:
    database = PostgresDump(tmp_path)
    yield database
    database.drop()


class DrillHost:
    """An installation in its own directory, and the processes that run in it."""

    def __init__(self, folder: Path, database: Database) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("KEYVAULT_", "VAULT_"))}
        self.environ = {
            **inherited,
            "DJANGO_SETTINGS_MODULE": "keyvault.project.settings",
            "KEYVAULT_DATA_DIR": str(folder / "data"),
            "KEYVAULT_DATABASE_URL": database.url,
        }

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=self.environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    def run_json(self, *arguments: str) -> Any:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


def drill(folder: Path, database: Database) -> None:
    host = DrillHost(folder, database)
    created = host.run_json("-c", CREATE)
    database.back_up()
    last = host.run_json("-c", REVOKE, json.dumps(created))
    before = host.run_json("-c", DUMP_STATE)
    assert host.run("-c", START).returncode == 0, "an ordinary restart must not be refused"

    database.restore()
    lost = host.run_json("-c", DUMP_STATE)
    assert {lost["keys"][created[name]][0] for name in ("revoked", "leaked", "offboarded")} == {"active"}
    assert (lost["revoked_tokens"], lost["offboarded"]) == ([], [])

    server = host.run("-c", START)
    worker = host.run("-m", "celery", "-A", "keyvault.project", "worker", "--pool", "threads", "--concurrency", "1")
    for refused in (server, worker):
        assert refused.returncode != 0
        assert "is behind the revocation log" in refused.stderr
        assert "manage.py replay_revocations" in refused.stderr
    assert host.run("manage.py", "replay_revocations", "--dry-run").returncode == 1
    assert host.run_json("-c", DUMP_STATE) == lost

    replay = host.run_json("manage.py", "replay_revocations", "--json")
    assert (replay["ok"], len(replay["replayed"]), replay["unknown"]) == (True, 5, [])
    after = host.run_json("-c", DUMP_STATE)
    assert after["keys"] == before["keys"]
    assert after["keys"][created["leaked"]] == ["compromised", "key_compromise"]
    assert after["keys"][created["kept"]][0] == "active"
    assert (after["revoked_tokens"], after["offboarded"]) == ([created["token"]], ["globex"])
    assert after["counter"] > before["counter"] - 1 >= last, "the change counter must not go back"
    assert after["audit"] == "None"
    assert host.run("-c", START).returncode == 0
    assert host.run_json("manage.py", "replay_revocations", "--json")["replayed"] == []


def test_restore_drill_on_sqlite_leaves_nothing_revoked_active(tmp_path: Path, sqlite_copy: Database) -> None:
    """Restored, refused, replayed, started: every revocation holds, and nothing else changed."""
    drill(tmp_path, sqlite_copy)


@pytest.mark.postgres
def test_restore_drill_on_postgresql_leaves_nothing_revoked_active(tmp_path: Path, postgres_dump: Database) -> None:
    drill(tmp_path, postgres_dump)


LIST_ALARMS = """
import json, django
django.setup()
from keyvault.models import Notice
print(json.dumps(list(Notice.objects.filter(is_alarm=True, seen_at=None).values_list("kind", "payload"))))
"""

PROGRAMS = {
    "server": ("-c", START),
    "verifier": ("-m", "keyvault.project.verifier", "--port", "0", "--ready", "2"),
    "worker": ("-m", "celery", "-A", "keyvault.project", "worker", "--pool", "threads", "--concurrency", "1"),
    "beat": ("-m", "celery", "-A", "keyvault.project", "beat", "--pidfile", ""),
    "run": ("manage.py", "run", "--port", str(find_free_port())),
}


def drill_without_log(folder: Path, database: Database) -> None:
    host = DrillHost(folder, database)
    log = folder / "data" / "revocation_log"
    created = host.run_json("-c", CREATE)
    database.back_up()
    host.run_json("-c", REVOKE, json.dumps(created))
    kept = log.read_bytes()
    database.restore()

    log.unlink()
    for name, arguments in PROGRAMS.items():
        refused = host.run(*arguments)
        assert refused.returncode != 0, f"the {name} starts although {created['leaked']} is active again"
        assert "manage.py replay_revocations --accept-loss" in refused.stderr, name
        assert "Traceback" not in refused.stderr, name
    replay = host.run("manage.py", "replay_revocations")
    assert (replay.returncode, "--accept-loss" in replay.stderr) == (1, True)
    assert host.run_json(
        "manage.py", "revoke_key", created["kept"], "--by", "admin", "--reason", "superseded", "--json"
    )
    assert not log.exists(), "a revocation must not create a log that passes for the lost one"
    database.restore()

    log.write_bytes(kept)
    assert "is behind the revocation log" in host.run("-c", START).stderr
    assert host.run_json("manage.py", "replay_revocations", "--json")["ok"]
    assert host.run("-c", START).returncode == 0, "the log was restored from a backup"

    log.unlink()
    database.restore()
    accept = ("manage.py", "replay_revocations", "--accept-loss", "--by", "admin")
    more = ("--approved-by", "approver", "--reason", "the disk is gone")
    assert host.run_json(*accept, *more, "--json")["accepted"]
    assert host.run("-c", START).returncode == 0, "an operator accepted the loss"
    assert [kind for kind, _ in host.run_json("-c", LIST_ALARMS)] == ["journal.loss_accepted"]
    assert host.run_json("-c", DUMP_STATE)["audit"] == "None"


def test_restore_drill_without_the_log_on_sqlite_starts_nothing(tmp_path: Path, sqlite_copy: Database) -> None:
    """Nothing starts until the log is restored or an operator accepts the loss by name."""
    drill_without_log(tmp_path, sqlite_copy)


@pytest.mark.postgres
def test_restore_drill_without_the_log_on_postgresql_starts_nothing(tmp_path: Path, postgres_dump: Database) -> None:
    drill_without_log(tmp_path, postgres_dump)


ANCHOR = """
import django
django.setup()
from keyvault.services.maintenance import anchor_revocations
anchor_revocations()
"""


def test_restore_drill_with_an_anchor_needs_no_log(tmp_path: Path, sqlite_copy: Database) -> None:
    """A new host without a log, on a restored database: refused, replayed from the anchor, started."""
    host = DrillHost(tmp_path, sqlite_copy)
    log = tmp_path / "data" / "revocation_log"
    created = host.run_json("-c", CREATE)
    sqlite_copy.back_up()
    host.run_json("-c", REVOKE, json.dumps(created))
    before = host.run_json("-c", DUMP_STATE)
    assert host.run("-c", ANCHOR).returncode == 0
    log.unlink()
    assert host.run("-c", START).returncode == 0, "the database is not behind the anchor"
    assert log.exists()
    sqlite_copy.restore()
    log.unlink()
    assert "5 revoked items are valid again" in host.run("-c", START).stderr
    assert host.run_json("manage.py", "replay_revocations", "--json")["ok"]
    assert host.run_json("-c", DUMP_STATE)["keys"] == before["keys"]
    assert host.run("-c", START).returncode == 0
