"""The restore drill: a whole installation of its own, its database put back from a backup, as an operator would.

What was revoked since the backup lives again in the restored rows. The service does not start on them, one command
mends them, and from then on everything is as it was answered.
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
from tests.servers.postgres import find_postgres

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[3]

START = "import keyvault.project.wsgi"

MAKE = """
import json, django
django.setup()
from keyvault.management.json_command import call
call("setup")
call("seed_demo")
words = ["--environment", "sandbox", "--kind", "private", "--requested-by", "tam", "--approved-by", "approver"]
keys = {name: call("issue_key", "--merchant", merchant, "--label", name, *words)["key_id"]
        for name, merchant in [("good", "acme"), ("revoked", "acme"), ("leaked", "acme"), ("left", "globex")]}
token = call("create_service_token", "gateway", "--environment", "sandbox", "--permission", "keys:read")["key_id"]
print(json.dumps({**keys, "token": token}))
"""

END = """
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

LOOK = """
import json, django
django.setup()
from keyvault.models import Change, Key, Merchant, ServiceToken
from keyvault.services.recording.audit_chain import verify_audit
from keyvault.services.revocations.replay import read_counter
print(json.dumps({
    "keys": {key.key_id: [key.state, key.reason] for key in Key.objects.all()},
    "revoked_tokens": list(ServiceToken.objects.filter(revoked_at__isnull=False).values_list("pk", flat=True)),
    "left": list(Merchant.objects.filter(status="offboarded").values_list("pk", flat=True)),
    "audit": str(verify_audit().first_broken),
    "counter": read_counter(),
}))
"""


class Database(Protocol):
    url: str

    def back_up(self) -> None: ...

    def restore(self) -> None: ...


class Copied:
    """SQLite: its own online copy, and the file copied back."""

    def __init__(self, folder: Path) -> None:
        self.path, self.kept = folder / "keyvault.sqlite3", folder / "backup.sqlite3"
        self.url = f"sqlite:///{self.path}"

    def back_up(self) -> None:
        with sqlite3.connect(self.path) as there, sqlite3.connect(self.kept) as here:
            there.backup(here)
        there.close()
        here.close()

    def restore(self) -> None:
        for ending in ("-wal", "-shm"):
            self.path.with_name(self.path.name + ending).unlink(missing_ok=True)
        shutil.copyfile(self.kept, self.path)


class Dumped:
    """PostgreSQL: `pg_dump`, and `pg_restore` into a database made anew."""

    def __init__(self, folder: Path) -> None:
        binary = find_postgres()
        if binary is None:
            pytest.skip("there is no pg_dump beside a server of this machine")
        self.programs, self.kept = binary.parent, folder / "backup.dump"
        self.server = os.environ["KEYVAULT_TEST_POSTGRES_URL"]
        self.name = f"drill_{os.getpid()}"
        self.url = urlunsplit(urlsplit(self.server)._replace(path=f"/{self.name}"))
        self.make()

    def make(self) -> None:
        with psycopg.connect(self.server, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{self.name}"')

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
def copied(tmp_path: Path) -> Database:
    return Copied(tmp_path)


@pytest.fixture
def dumped(tmp_path: Path) -> Iterator[Database]:
    database = Dumped(tmp_path)
    yield database
    database.drop()


class Host:
    """An installation in a folder of its own, and the programs that are started in it."""

    def __init__(self, folder: Path, database: Database) -> None:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("KEYVAULT_", "VAULT_"))}
        self.environ = {
            **own,
            "DJANGO_SETTINGS_MODULE": "keyvault.project.settings",
            "KEYVAULT_DATA_DIR": str(folder / "data"),
            "KEYVAULT_DATABASE_URL": database.url,
        }

    def start(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=self.environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    def answer(self, *arguments: str) -> Any:
        done = self.start(*arguments)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


def drill(folder: Path, database: Database) -> None:
    host = Host(folder, database)
    made = host.answer("-c", MAKE)
    database.back_up()
    last = host.answer("-c", END, json.dumps(made))
    before = host.answer("-c", LOOK)
    assert host.start("-c", START).returncode == 0, "an ordinary restart is not refused"

    database.restore()
    lost = host.answer("-c", LOOK)
    assert {lost["keys"][made[name]][0] for name in ("revoked", "leaked", "left")} == {"active"}
    assert (lost["revoked_tokens"], lost["left"]) == ([], [])

    server = host.start("-c", START)
    worker = host.start("-m", "celery", "-A", "keyvault.project", "worker", "--pool", "threads", "--concurrency", "1")
    for refused in (server, worker):
        assert refused.returncode != 0
        assert "is behind the revocation journal" in refused.stderr
        assert "manage.py replay_revocations" in refused.stderr
    assert host.start("manage.py", "replay_revocations", "--dry-run").returncode == 1
    assert host.answer("-c", LOOK) == lost

    replay = host.answer("manage.py", "replay_revocations", "--json")
    assert (replay["ok"], len(replay["replayed"]), replay["unknown"]) == (True, 5, [])
    after = host.answer("-c", LOOK)
    assert after["keys"] == before["keys"]
    assert after["keys"][made["leaked"]] == ["compromised", "key_compromise"]
    assert after["keys"][made["good"]][0] == "active"
    assert (after["revoked_tokens"], after["left"]) == ([made["token"]], ["globex"])
    assert after["counter"] > before["counter"] - 1 >= last, "no receipt goes back"
    assert after["audit"] == "None"
    assert host.start("-c", START).returncode == 0
    assert host.answer("manage.py", "replay_revocations", "--json")["replayed"] == []


def test_restore_drill_of_a_sqlite_file_brings_nothing_revoked_back(tmp_path: Path, copied: Database) -> None:
    """Restored, refused, replayed, started: nothing that was revoked is good again, and nothing else was touched."""
    drill(tmp_path, copied)


@pytest.mark.postgres
def test_restore_drill_of_a_postgresql_dump_brings_nothing_revoked_back(tmp_path: Path, dumped: Database) -> None:
    """The same with `pg_dump` and `pg_restore`."""
    drill(tmp_path, dumped)


ALARMED = """
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


def drill_without_journal(folder: Path, database: Database) -> None:
    host = Host(folder, database)
    journal = folder / "data" / "revocations.journal"
    made = host.answer("-c", MAKE)
    database.back_up()
    host.answer("-c", END, json.dumps(made))
    kept = journal.read_bytes()
    database.restore()

    journal.unlink()
    for name, arguments in PROGRAMS.items():
        refused = host.start(*arguments)
        assert refused.returncode != 0, f"the {name} starts, and {made['leaked']} is good again"
        assert "manage.py replay_revocations --accept-loss" in refused.stderr, name
        assert "Traceback" not in refused.stderr, name
    replay = host.start("manage.py", "replay_revocations")
    assert (replay.returncode, "--accept-loss" in replay.stderr) == (1, True)
    assert host.answer("manage.py", "revoke_key", made["good"], "--by", "admin", "--reason", "superseded", "--json")
    assert not journal.exists(), "a revocation makes no journal that passes for the lost one"
    database.restore()

    journal.write_bytes(kept)
    assert "is behind the revocation journal" in host.start("-c", START).stderr
    assert host.answer("manage.py", "replay_revocations", "--json")["ok"]
    assert host.start("-c", START).returncode == 0, "the journal came back from its own backup"

    journal.unlink()
    database.restore()
    accept = ("manage.py", "replay_revocations", "--accept-loss", "--by", "admin", "--reason", "the disk is gone")
    assert host.answer(*accept, "--json")["accepted"]
    assert host.start("-c", START).returncode == 0, "somebody has answered for it"
    assert [kind for kind, _ in host.answer("-c", ALARMED)] == ["journal.loss_accepted"]
    assert host.answer("-c", LOOK)["audit"] == "None"


@pytest.mark.timeout(300)  # some twenty processes
def test_restore_drill_without_the_journal_starts_nothing(tmp_path: Path, copied: Database) -> None:
    """A backup of before a revocation and no journal beside it: nothing starts until the journal is back, or until
    somebody has accepted the loss by name. So no key that was revoked is good again unnoticed."""
    drill_without_journal(tmp_path, copied)


@pytest.mark.postgres
@pytest.mark.timeout(300)
def test_restore_drill_without_the_journal_on_postgresql_starts_nothing(tmp_path: Path, dumped: Database) -> None:
    """The same with `pg_dump` and `pg_restore`."""
    drill_without_journal(tmp_path, dumped)
