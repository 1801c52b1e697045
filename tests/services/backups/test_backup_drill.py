"""`backup` and `restore` as an operator runs them, on both databases: nothing revoked after the backup is valid again.

Each host is a folder with processes of its own. Some restores are killed on the way and run again.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.services.revocations.test_restore_drill import (
    ANCHOR,
    CREATE,
    DUMP_STATE,
    REVOKE,
    START,
    Database,
    DrillHost,
    PostgresDump,
    SqliteCopy,
)

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]  # starts some thirty processes

KILL_AT = """
import os, signal, sys, django
from unittest import mock
from django.core.management import execute_from_command_line
django.setup()
def kill(*arguments, **options): os.kill(os.getpid(), signal.SIGKILL)
with mock.patch(sys.argv[1], kill):
    execute_from_command_line(["manage.py", *sys.argv[2:]])
"""

EVENTS = """
import json, django
django.setup()
from keyvault.models import AuditEntry
found = AuditEntry.objects.filter(event__startswith="backup.").order_by("id")
print(json.dumps(list(found.values_list("event", flat=True))))
"""

USE = """
import django
django.setup()
from django.utils import timezone
from keyvault.models import ServiceProcess
from keyvault.services.sessions.store import SessionStore
SessionStore().create()
ServiceProcess.objects.create(name="worker host", kind="worker", seen_at=timezone.now())
"""

COUNT_ENDED = """
import json, django
django.setup()
from keyvault.models import ConsoleSession, ServiceProcess
print(json.dumps([ConsoleSession.objects.count(), ServiceProcess.objects.count()]))
"""

READ_MEMBERS = """
import sys
from pathlib import Path
from keyvault.backends.backup_archive import ArchiveReader
from keyvault.domain.plaintext import Plaintext
reader = ArchiveReader(Path(sys.argv[1]), Plaintext(Path(sys.argv[2]).read_text().strip()))
for name in reader.members:
    Path(sys.argv[3], name).write_bytes(b"".join(reader.read(name)))
"""


class Drill:
    """One installation, its backup, and the hosts on which it is restored."""

    def __init__(self, folder: Path, database: Database) -> None:
        self.folder, self.database = folder, database
        self.passphrase = folder / "passphrase"
        self.passphrase.touch(mode=0o600)
        self.passphrase.write_text("correct horse battery staple\n")
        self.archive = folder / "archive"
        self.host = self.make_host("host")

    def make_host(self, name: str) -> DrillHost:
        """Return a host with a data folder of its own, for the same database."""
        host = DrillHost(self.folder / name, self.database)
        programs = getattr(self.database, "programs", None)
        if programs is not None:
            host.environ["PATH"] = f"{programs}{os.pathsep}{host.environ['PATH']}"
        return host

    def data(self, host: DrillHost) -> Path:
        return Path(host.environ["KEYVAULT_DATA_DIR"])

    def back_up(self) -> Any:
        to = ("--to", str(self.archive), "--passphrase-file", str(self.passphrase))
        return self.host.run_json("manage.py", "backup", *to, "--json")

    def restore(self, host: DrillHost, *more: str, archive: Path | None = None) -> subprocess.CompletedProcess[str]:
        return host.run("manage.py", *self.restoring(*more, archive=archive))

    def restoring(self, *more: str, archive: Path | None = None) -> list[str]:
        source = ("--from", str(archive or self.archive), "--passphrase-file", str(self.passphrase))
        return ["restore", *source, "--json", *more]

    def make_empty(self) -> None:
        """The database is lost, and there is a new one."""
        if isinstance(self.database, PostgresDump):
            self.database.drop()
            self.database.make()
        else:
            assert isinstance(self.database, SqliteCopy)
            for ending in ("", "-wal", "-shm"):
                self.database.path.with_name(self.database.path.name + ending).unlink(missing_ok=True)


@pytest.fixture
def sqlite_drill(tmp_path: Path) -> Drill:
    return Drill(tmp_path, SqliteCopy(tmp_path))


@pytest.fixture
def postgres_drill(tmp_path: Path) -> Iterator[Drill]:
    database = PostgresDump(tmp_path)
    yield Drill(tmp_path, database)
    database.drop()


def drill_on_the_same_host(drill: Drill) -> None:
    host = drill.host
    created = host.run_json("-c", CREATE)
    assert host.run("-c", ANCHOR).returncode == 0
    assert host.run("-c", USE).returncode == 0
    backup = drill.back_up()
    assert set(backup["members"]) == {"database", "keystore"}
    assert drill.restore(host, "--check").returncode == 0
    host.run_json("-c", REVOKE, json.dumps(created))
    before = host.run_json("-c", DUMP_STATE)

    # What is refused changes nothing.
    refused = drill.restore(host)
    assert (refused.returncode, "--replace" in refused.stderr) == (1, True)
    broken = drill.folder / "broken"
    content = bytearray(drill.archive.read_bytes())
    content[len(content) // 2] ^= 1
    broken.write_bytes(content)
    for more in ((), ("--check",), ("--replace",)):
        refused = drill.restore(host, *more, archive=broken)
        assert (refused.returncode, "altered" in refused.stderr) == (1, True)
    assert host.run_json("-c", DUMP_STATE) == before

    drill.make_empty()
    done = drill.restore(host)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["ready"], len(answer["replayed"]), answer["unknown"]) == (True, 5, [])
    assert answer["keystore"].startswith("kept")
    after = host.run_json("-c", DUMP_STATE)
    assert after["keys"] == before["keys"]
    assert (after["revoked_tokens"], after["offboarded"]) == ([created["token"]], ["globex"])
    assert after["counter"] >= before["counter"], "the change counter must not go back"
    assert after["audit"] == "None"
    assert host.run("-c", START).returncode == 0
    assert host.run_json("-c", EVENTS) == ["backup.started", "backup.restored"]
    sessions, processes = host.run_json("-c", COUNT_ENDED)
    assert sessions == 0, "a session that ended after the backup must not come back"
    assert processes == 0, "a process of the former installation must not be reported as lost"

    # Killed before the secret backend is used, and run again.
    target = "keyvault.management.commands.setup.ensure_peppers"
    killed = host.run("-c", KILL_AT, target, *drill.restoring("--replace"))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert host.run_json("-c", EVENTS) == ["backup.started", "backup.restored"]
    assert host.run_json("-c", COUNT_ENDED) == [0, 0], "a session must end before anything can be missing"
    assert "If a restore was interrupted, run it again with --replace" in drill.restore(host).stderr
    again = json.loads(drill.restore(host, "--replace").stdout)
    assert (again["ready"], len(again["replayed"])) == (True, 5), "the restore is repeatable"
    assert host.run_json("-c", DUMP_STATE)["keys"] == before["keys"]


def test_backup_drill_on_sqlite_leaves_nothing_revoked_active(sqlite_drill: Drill) -> None:
    """Guarantee: a restored backup accepts nothing that was revoked after it."""
    drill_on_the_same_host(sqlite_drill)


@pytest.mark.postgres
def test_backup_drill_on_postgresql_leaves_nothing_revoked_active(postgres_drill: Drill) -> None:
    """Guarantee: a restored backup accepts nothing that was revoked after it."""
    drill_on_the_same_host(postgres_drill)


def export_revocations(drill: Drill, name: str) -> str:
    path = str(drill.folder / name)
    drill.host.run_json("manage.py", "export_revocations", "--to", path, "--json")
    return path


def replay_log(drill: Drill, new: DrillHost) -> Any:
    """Copy the log of the former host, and replay it."""
    log = drill.data(new) / "revocation_log"
    log.write_bytes((drill.data(drill.host) / "revocation_log").read_bytes())
    assert "is behind the revocation log" in new.run("-c", START).stderr
    return new.run_json("manage.py", "replay_revocations", "--json")


def drill_on_a_new_host(drill: Drill, *, by_export: bool) -> None:
    host = drill.host
    created = host.run_json("-c", CREATE)
    older = export_revocations(drill, "older") if by_export else ""
    drill.back_up()
    host.run_json("-c", REVOKE, json.dumps(created))
    assert host.run("-c", ANCHOR).returncode == 0
    export = export_revocations(drill, "export") if by_export else ""
    before = host.run_json("-c", DUMP_STATE)
    drill.make_empty()

    new = drill.make_host("new")
    refused = drill.restore(new)
    assert (refused.returncode, "master.key is missing" in refused.stderr) == (1, True)
    master_key = drill.data(new) / "master.key"
    master_key.touch(mode=0o600)
    master_key.write_text("A" * 43 + "=")
    refused = drill.restore(new)
    assert f"{master_key}) is not the one of the archive" in refused.stderr
    assert "backup-work" not in refused.stderr
    assert not (drill.data(new) / "keystore.sqlite3").exists()
    master_key.write_text((drill.data(host) / "master.key").read_text())

    # Killed after the keystore and before the database, and run again.
    killed = new.run("-c", KILL_AT, "keyvault.services.backups.restore.write_database", *drill.restoring())
    assert killed.returncode == -signal.SIGKILL
    done = drill.restore(new)
    assert done.returncode == 1
    answer = json.loads(done.stdout)
    assert (answer["ready"], answer["keystore"].startswith("kept")) == (False, True)
    assert "--accept-loss" in answer["next"][0], "neither the log nor the anchor was restored with the database"
    assert not (drill.data(new) / "revocation_log").exists()
    assert "manage.py replay_revocations" in new.run("-c", START).stderr
    assert [path.name for path in (drill.data(new) / "backup-work").iterdir()] == []

    if by_export:
        assert "altered" in new.run("manage.py", "replay_revocations", "--from", str(drill.archive)).stderr
        assert "manage.py replay_revocations" in new.run("-c", START).stderr
        replayed = new.run_json("manage.py", "replay_revocations", "--from", export, "--json")
        # The log exists now, so that an older export may be added: it has nothing that the log lacks.
        again = new.run_json("manage.py", "replay_revocations", "--from", older, "--json")
        assert (again["replayed"], again["export"]["added"]) == ([], 0)
    else:
        replayed = replay_log(drill, new)
    assert len(replayed["replayed"]) == 5
    assert new.run("-c", START).returncode == 0, "every pepper is readable"
    assert new.run_json("-c", DUMP_STATE)["keys"] == before["keys"]

    members = drill.folder / "members"
    members.mkdir()
    done = new.run("-c", READ_MEMBERS, str(drill.archive), str(drill.passphrase), str(members))
    assert done.returncode == 0, done.stderr
    found = b"".join(path.read_bytes() for path in members.iterdir())
    assert len(found) > 100_000
    assert master_key.read_bytes().strip() not in found, "the archive must not contain the master key"
    assert master_key.read_bytes().strip() not in drill.archive.read_bytes()


def test_backup_drill_on_a_new_host_on_sqlite(sqlite_drill: Drill) -> None:
    """Guarantee: without a log, a restored database does not start before the replay of an export. The archive opens no
    keystore alone.
    """
    drill_on_a_new_host(sqlite_drill, by_export=True)


@pytest.mark.postgres
def test_backup_drill_on_a_new_host_on_postgresql(postgres_drill: Drill) -> None:
    """Guarantee: without a log, a restored database does not start unnoticed. The archive opens no keystore alone."""
    drill_on_a_new_host(postgres_drill, by_export=False)


def test_restore_refuses_what_belongs_to_another_installation(sqlite_drill: Drill) -> None:
    """A data folder that was set up anew has another installation's keystore and log."""
    drill = sqlite_drill
    drill.host.run_json("-c", CREATE)
    drill.back_up()
    other = drill.make_host("other")
    drill.make_empty()
    assert other.run("manage.py", "setup").returncode == 0
    state = other.run_json("-c", DUMP_STATE)
    refused = drill.restore(other, "--replace")
    assert (refused.returncode, "belongs to another installation" in refused.stderr) == (1, True)
    (drill.data(other) / "revocation_log").unlink()
    refused = drill.restore(other, "--replace")
    assert (refused.returncode, "keystore belongs to another installation" in refused.stderr) == (1, True)
    assert other.run_json("-c", DUMP_STATE) == state


HOLD = """
import sys, django
django.setup()
from django.db import connection
with connection.cursor() as cursor:
    cursor.execute("SELECT count(*) FROM keyvault_key")
    cursor.fetchall()
print("held", flush=True)
sys.stdin.read()
"""


def drill_with_a_running_process(drill: Drill) -> None:
    drill.host.run_json("-c", CREATE)
    drill.back_up()
    holding = subprocess.Popen(
        [sys.executable, "-c", HOLD], env=drill.host.environ, cwd=Path(__file__).resolve().parents[3],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert holding.stdout is not None
        assert holding.stdout.readline() == b"held\n"
        refused = drill.restore(drill.host, "--replace")
    finally:
        holding.communicate()
    assert (refused.returncode, "Stop every server" in refused.stderr) == (1, True)
    assert drill.restore(drill.host, "--replace").returncode == 0


def test_restore_while_a_process_uses_sqlite_is_refused(sqlite_drill: Drill) -> None:
    drill_with_a_running_process(sqlite_drill)


@pytest.mark.postgres
def test_restore_while_a_process_uses_postgresql_is_refused(postgres_drill: Drill) -> None:
    drill_with_a_running_process(postgres_drill)


def fake_program(folder: Path, name: str, script: str) -> Path:
    """Put a program before PostgreSQL's own one on PATH."""
    programs = folder / f"fake-{name}"
    programs.mkdir(exist_ok=True)
    (programs / name).write_text(f"#!/bin/sh\n{script}\n")
    (programs / name).chmod(0o755)
    return programs


@pytest.mark.postgres
def test_restore_replaces_a_database_of_a_newer_schema(postgres_drill: Drill) -> None:
    """Guarantee: an archive of before an upgrade replaces what the upgrade has added, in one transaction."""
    drill, host = postgres_drill, postgres_drill.host
    host.run_json("-c", CREATE)
    drill.back_up()
    before = host.run_json("-c", DUMP_STATE)
    with psycopg.connect(drill.database.url) as connection:
        # As a later release: a table, and a constraint between two tables that the archive has.
        connection.execute("CREATE TABLE keyvault_newer (account bigint REFERENCES keyvault_account)")
        connection.execute("ALTER TABLE keyvault_merchant ADD newer bigint REFERENCES keyvault_account")
        connection.execute("CREATE TABLE of_another_service (merchant text)")
        connection.execute("UPDATE keyvault_merchant SET status = 'offboarded' WHERE merchant_id = 'globex'")
    assert (newer := host.run_json("-c", DUMP_STATE)) != before

    real, database = host.environ["PATH"], drill.database
    # At the end of a statement: in the middle of one, `psql` fails, too.
    torn = r"/^CREATE TABLE public.keyvault_merchant /,\$d"
    assert isinstance(database, PostgresDump)
    for script, why in [
        (f'"{database.programs}/pg_restore" "$@" | sed "{torn}"; echo torn >&2; exit 1', "torn"),
        (f'"{database.programs}/pg_restore" "$@"; echo "SELECT 1/0;"', "division by zero"),
    ]:
        host.environ["PATH"] = f"{fake_program(drill.folder, 'pg_restore', script)}{os.pathsep}{real}"
        failed = drill.restore(host, "--replace")
        assert (failed.returncode, why in failed.stderr) == (1, True), failed.stderr
        assert host.run_json("-c", DUMP_STATE) == newer, "nothing was dropped"
    host.environ["PATH"] = real

    done = drill.restore(host, "--replace")
    assert done.returncode == 0, done.stderr
    assert host.run_json("-c", DUMP_STATE)["offboarded"] == before["offboarded"]
    with psycopg.connect(drill.database.url) as connection:
        tables = connection.execute("SELECT to_regclass('keyvault_newer'), to_regclass('of_another_service')")
        assert tables.fetchone() == (None, "of_another_service")


@pytest.mark.postgres
def test_backup_and_restore_killed_midway_on_postgresql_change_nothing(postgres_drill: Drill) -> None:
    """Guarantee: a backup has its name only when it is whole, and a restore is one transaction."""
    drill, host = postgres_drill, postgres_drill.host
    host.run_json("-c", CREATE)
    real, database = host.environ["PATH"], drill.database
    assert isinstance(database, PostgresDump)

    half = f'"{database.programs}/pg_dump" "$@" | head -c 50000; exit 1'
    host.environ["PATH"] = f"{fake_program(drill.folder, 'pg_dump', half)}{os.pathsep}{real}"
    to = ("--to", str(drill.archive), "--passphrase-file", str(drill.passphrase))
    failed = host.run("manage.py", "backup", *to)
    assert (failed.returncode, "pg_dump failed" in failed.stderr) == (1, True)
    assert [path.name for path in drill.folder.iterdir() if path.name.startswith("archive")] == []
    host.environ["PATH"] = real
    drill.back_up()
    before = host.run_json("-c", DUMP_STATE)

    drill.make_empty()
    # The restore dies while the program has read a part, and so does the program's input.
    half = f'(head -c 50000; kill -9 $PPID) | "{database.programs}/pg_restore" "$@"'
    host.environ["PATH"] = f"{fake_program(drill.folder, 'pg_restore', half)}{os.pathsep}{real}"
    assert drill.restore(host).returncode == -signal.SIGKILL
    host.environ["PATH"] = real
    done = drill.restore(host)
    assert done.returncode == 0, done.stderr
    assert host.run_json("-c", DUMP_STATE)["keys"] == before["keys"]
