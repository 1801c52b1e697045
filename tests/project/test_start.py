"""A misconfigured process refuses to start and states the reason."""

import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from keyvault.domain.releases import OLDEST_COMPATIBLE_RELEASE, RELEASE
from tests.template_database import make_migrated_data_folder

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parent.parent.parent
SERVER = ["-c", "import keyvault.project.wsgi"]
WORKER = ["-m", "celery", "-A", "keyvault.project", "worker", "--pool", "solo"]


def run(arguments: list[str], folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KEYVAULT_")}
    environment |= {"KEYVAULT_DATA_DIR": str(folder), "C_FORCE_ROOT": "1", **settings}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture(scope="module")
def set_up_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Set up one data folder; each test gets a copy."""
    data = tmp_path_factory.mktemp("installation") / "data"
    make_migrated_data_folder(data)
    done = run(["manage.py", "setup"], data)
    assert done.returncode == 0, done.stderr
    return data


@pytest.fixture
def folder(set_up_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(set_up_folder, tmp_path / "data"))


@pytest.mark.parametrize("arguments", [SERVER, WORKER], ids=["server", "worker"])
def test_start_with_another_master_key_is_refused(folder: Path, arguments: list[str]) -> None:
    done = run(arguments, folder, KEYVAULT_MASTER_KEY="A" * 43 + "=")
    assert done.returncode != 0
    assert "master key is not the one" in done.stderr


@pytest.mark.parametrize("arguments", [SERVER, WORKER], ids=["server", "worker"])
def test_start_without_the_master_key_is_refused_and_creates_none(folder: Path, arguments: list[str]) -> None:
    (folder / "master.key").unlink()
    done = run(arguments, folder)
    assert done.returncode != 0
    assert "master.key is missing" in done.stderr
    assert not (folder / "master.key").exists()


@pytest.mark.parametrize("arguments", [SERVER, WORKER, ["manage.py", "setup"]], ids=["server", "worker", "setup"])
def test_start_with_a_lost_keystore_is_refused(folder: Path, arguments: list[str]) -> None:
    """Digests cannot be verified without their peppers: a fresh keystore must not silently replace the lost one."""
    for name in ("keystore.sqlite3", "keystore.sqlite3-wal", "keystore.sqlite3-shm", "master.key"):
        (folder / name).unlink(missing_ok=True)
    done = run(arguments, folder)
    assert done.returncode != 0
    assert "restore the keystore" in done.stderr


VERIFIER = ["-m", "keyvault.project.verifier", "--port", "1", "--ready", "1"]


@pytest.mark.parametrize("arguments", [SERVER, WORKER, VERIFIER], ids=["server", "worker", "verifier"])
@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "the database is not set up"),
        ({"KEYVAULT_DATABASE_URL": "postgresql://a:hunter2@127.0.0.1:1/x"}, "connection failed"),
    ],
    ids=["before setup", "without its database"],
)
def test_start_without_tables_is_refused_and_names_the_setup_command(
    tmp_path: Path, arguments: list[str], settings: dict[str, str], why: str
) -> None:
    done = run(arguments, tmp_path / "data", **settings)
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if "does not start" in line]
    assert why in line
    assert ("manage.py setup" in line) == (not settings)
    assert "Traceback" not in done.stderr
    assert "hunter2" not in done.stderr


BEAT = ["-m", "celery", "-A", "keyvault.project", "beat", "--pidfile", ""]
PROGRAMS = {"server": SERVER, "worker": WORKER, "verifier": VERIFIER, "beat": BEAT}


def execute(folder: Path, statement: str, *values: str) -> None:
    with closing(sqlite3.connect(folder / "keyvault.sqlite3")) as database, database:
        database.execute(statement, values)


def last_migration(app: str) -> str:
    return max(path.stem for path in (ROOT / app / "migrations").glob("0*.py"))


@pytest.mark.parametrize("who", PROGRAMS)
def test_start_on_an_older_schema_is_refused_and_names_the_setup_command(folder: Path, who: str) -> None:
    """Guarantee: no process of a half-finished deployment runs on a schema that lacks columns and rules."""
    name = last_migration("rotation")
    execute(folder, "DELETE FROM django_migrations WHERE app = 'rotation' AND name = ?", name)
    assert (
        f"the {who} does not start: the database is behind this release: it lacks 1 migration, such as "
        f"rotation.{name}; run: manage.py setup"
    ) in refusal(PROGRAMS[who], folder)


@pytest.mark.parametrize("who", PROGRAMS)
def test_start_on_a_newer_schema_is_refused_in_one_line(folder: Path, who: str) -> None:
    """Guarantee: an older release does not run on a schema that a newer one has made incompatible."""
    migrate_to_a_newer_release(folder, "9.0.0")
    assert (
        f"the {who} does not start: the database is ahead of this release ({RELEASE}): it has keyvault.9999_x; "
        "start release 9.0.0 or a later one"
    ) in refusal(PROGRAMS[who], folder)


@pytest.mark.parametrize("arguments", [SERVER, ["manage.py", "setup"]], ids=["server", "setup"])
def test_start_on_a_schema_with_another_app_of_a_newer_release_is_refused(folder: Path, arguments: list[str]) -> None:
    """Guarantee: an older release does not run beside an app whose rules it does not know."""
    migrate_to_a_newer_release(folder, "9.0.0", app="ledger")
    done = run(arguments, folder)
    assert done.returncode != 0
    assert (
        f"the database is ahead of this release ({RELEASE}): it has ledger.9999_x; start release 9.0.0" in done.stderr
    )


def migrate_to_a_newer_release(folder: Path, oldest_compatible: str, *, app: str = "keyvault") -> None:
    execute(folder, "INSERT INTO django_migrations (app, name, applied) VALUES (?, '9999_x', '2026-11-21')", app)
    execute(folder, "UPDATE keyvault_installation SET oldest_compatible_release = ?", oldest_compatible)


def test_setup_of_an_older_release_changes_nothing_on_a_newer_schema(folder: Path) -> None:
    migrate_to_a_newer_release(folder, "9.0.0")
    done = run(["manage.py", "setup"], folder)
    assert done.returncode != 0
    assert "nothing was set up: the database is ahead of this release" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("oldest", "app"), [(RELEASE, "keyvault"), ("0.0.9", "keyvault"), (RELEASE, "ledger")])
def test_start_on_a_newer_schema_that_is_compatible_works(folder: Path, oldest: str, app: str) -> None:
    """Guarantee: during an upgrade the processes of the older release restart beside those of the newer one."""
    migrate_to_a_newer_release(folder, oldest, app=app)
    for arguments in (SERVER, ["manage.py", "setup"], SERVER):
        done = run(arguments, folder)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("oldest", ["", "next"])
def test_start_on_a_newer_schema_of_an_unreadable_release_is_refused(folder: Path, oldest: str) -> None:
    migrate_to_a_newer_release(folder, oldest)
    assert "the database is ahead of this release" in refusal(SERVER, folder)


def test_setup_records_the_oldest_compatible_release_and_never_lowers_it(folder: Path) -> None:
    def recorded() -> tuple[str, int]:
        with closing(sqlite3.connect(folder / "keyvault.sqlite3")) as database:
            ((release,),) = database.execute("SELECT oldest_compatible_release FROM keyvault_installation")
            upgrades = "SELECT count(*) FROM keyvault_auditentry WHERE event = 'installation.upgraded'"
            ((count,),) = database.execute(upgrades)
        return release, count

    assert recorded() == (OLDEST_COMPATIBLE_RELEASE, 0)
    for before, after in (("0.0.1", (OLDEST_COMPATIBLE_RELEASE, 1)), ("9.0.0", ("9.0.0", 1))):
        execute(folder, "UPDATE keyvault_installation SET oldest_compatible_release = ?", before)
        done = run(["manage.py", "setup"], folder)
        assert done.returncode == 0, done.stderr
        assert recorded() == after


def refusal(arguments: list[str], folder: Path, **settings: str) -> str:
    done = run(arguments, folder, **settings)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "does not start" in line]
    return line


def test_start_of_beat_without_database_is_refused_in_one_line(tmp_path: Path) -> None:
    line = refusal(BEAT, tmp_path / "data", KEYVAULT_DATABASE_URL="postgresql://a:hunter2@127.0.0.1:1/x")
    assert "the beat does not start: the database cannot be used: connection failed" in line
    assert "hunter2" not in line


def test_start_after_a_squash_accepts_old_migration_names(folder: Path) -> None:
    """Names of migrations that a squash replaced count as older, not as newer."""
    row = "('keyvault', '0001_first', '2026-11-21')"
    execute(folder, f"INSERT INTO django_migrations (app, name, applied) VALUES {row}")  # noqa: S608  a constant
    done = run(SERVER, folder)
    assert done.returncode == 0, done.stderr


def test_start_after_setup_works(folder: Path) -> None:
    done = run(SERVER, folder)
    assert done.returncode == 0, done.stderr


def test_collections_of_garbage_leave_out_what_the_server_has_loaded(folder: Path) -> None:
    """Guarantee: no full collection delays the requests of merchants for as long as the visit of all modules takes."""
    count = "import gc, keyvault.project.asgi; print(len(gc.get_objects()) < gc.get_freeze_count() / 10)"
    assert run(["-c", count], folder).stdout.strip() == "True"


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"KEYVAULT_ORIGIN": "http://keys.example.com"}, "https"),
        ({"KEYVAULT_PRODUCTION_APPROVALS": "0"}, "1 or more"),
        ({"KEYVAULT_DATABSE_URL": "x"}, "unknown setting"),
        ({"KEYVAULT_KEY_PREFIX": "Bad_Prefix"}, "a-z"),
        ({"KEYVAULT_MASTER_KEY": "short"}, "32 bytes"),
        ({"KEYVAULT_BACKEND": "both"}, "one of local, vault"),
        ({"KEYVAULT_BACKEND": "vault"}, "VAULT_ADDR"),
        ({"KEYVAULT_BACKEND": "vault", "VAULT_ADDR": "http://vault.example"}, "https"),
        ({"KEYVAULT_SECRET_KEY": "abc"}, "50 characters"),
        (
            {"KEYVAULT_DATABASE_URL": "mysql://a:short@b/c"},
            "KEYVAULT_DATABASE_URL: invalid value, expected a URL that begins with",
        ),
        ({"KEYVAULT_DATABASE_URL": "postgres:a:short@b/c"}, "KEYVAULT_DATABASE_URL: invalid value, expected a URL"),
        ({"KEYVAULT_DATABASE_URL": "postgres://u:short\u2100x@h/x"}, "KEYVAULT_DATABASE_URL: cannot be read"),
        ({"KEYVAULT_DATABASE_URL": "postgres://u:short#@h/x"}, "KEYVAULT_DATABASE_URL: cannot be read"),
        (
            {"KEYVAULT_REDIS_URL": "short"},
            "KEYVAULT_REDIS_URL: invalid value, expected a URL that begins with redis:// or",
        ),
        ({"KEYVAULT_DATA_DIR": "/dev/null/x"}, "KEYVAULT_DATA_DIR: /dev/null/x cannot be created: Not a directory"),
    ],
)
def test_start_with_an_invalid_setting_is_refused(tmp_path: Path, settings: dict[str, str], complaint: str) -> None:
    """No switch turns safety off, and a misspelled value is not silently ignored."""
    done = run(["manage.py", "setup"], tmp_path / "data", **settings)
    assert done.returncode != 0
    assert complaint in done.stderr
    assert "short" not in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("who", ["server", "verifier"])
@pytest.mark.parametrize(
    ("settings", "accepted"),
    [
        ({"KEYVAULT_PLANES": "console,admin"}, "one or more of integration, service, console, separated by commas"),
        ({"KEYVAULT_METRICS": "9100"}, "on, off, or an address such as 127.0.0.1:9100"),
        ({"KEYVAULT_DOCS": "no"}, "one of on, off"),
    ],
)
def test_start_with_an_invalid_choice_of_paths_is_refused_in_one_line(
    tmp_path: Path, who: str, settings: dict[str, str], accepted: str
) -> None:
    line = refusal(PROGRAMS[who], tmp_path / "data", **settings)
    assert line == f"the {who} does not start: {next(iter(settings))}: invalid value, expected {accepted}"


@pytest.mark.parametrize(("planes", "expected"), [("integration,console", "True"), ("integration,service", "False")])
def test_only_a_server_with_the_console_sends_alarms(folder: Path, planes: str, expected: str) -> None:
    """Guarantee: alarms about lost workers are sent, and only by a server that may call addresses outside."""
    threads = "print('alarms' in [each.name for each in threading.enumerate()])"
    channel = {
        "KEYVAULT_ALARM_WEBHOOK": "https://alerts.example.com/",
        "KEYVAULT_ALARM_WEBHOOK_SECRET": "whsec_" + "A" * 43 + "=",
    }
    done = run(["-c", f"import threading, keyvault.project.wsgi; {threads}"], folder, KEYVAULT_PLANES=planes, **channel)
    assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr


def test_start_of_a_verifier_without_its_plane_is_refused_in_one_line(folder: Path) -> None:
    line = refusal(VERIFIER, folder, KEYVAULT_PLANES="integration,console")
    assert line == (
        "the verifier does not start: it serves the service plane only, and KEYVAULT_PLANES is integration,console; "
        "add service, or do not start it here"
    )


def test_start_leaves_no_file_in_the_data_folder_readable_by_others(tmp_path: Path) -> None:
    """Holds for any umask, and in a folder that others may enter."""
    folder = tmp_path / "data"
    folder.mkdir(mode=0o755)
    command = f"umask 000; exec {sys.executable} manage.py setup"
    done = subprocess.run(
        ["/bin/sh", "-c", command],
        cwd=ROOT,
        env={**os.environ, "KEYVAULT_DATA_DIR": str(folder), "KEYVAULT_DATABASE_URL": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    made = {path.name: path.stat().st_mode & 0o077 for path in folder.iterdir()}
    assert {"keyvault.sqlite3", "keystore.sqlite3", "master.key", "django.key"} <= set(made)
    assert not any(made.values()), made
