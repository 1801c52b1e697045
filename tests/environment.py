"""The environment that the suite runs in, laid before Django reads its settings.

One pytest run knows one database. A run under pytest-xdist is one controller, which makes the run's folder,
and workers, each with a folder and a database of its own in it. `KEYVAULT_DATABASE_URL` names the test
database itself, so that a process which a test starts (`manage.py`, a Celery worker) acts on the same rows.
"""

import atexit
import os
import shutil
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import pytest

from .servers.postgres import postgres_server
from .servers.throwaway import MissingServerError

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = "keyvault.project.settings"
DATABASES = ("sqlite", "postgres")
SERVERS = frozenset({"postgres", "redis", "rabbitmq", "nginx", "openbao", "prometheus", "chromium", "envoy", "traefik"})

REQUIRE = "KEYVAULT_REQUIRE"
DATABASE = "KEYVAULT_TEST_DATABASE"
POSTGRES_URL = "KEYVAULT_TEST_POSTGRES_URL"
TALLY = "KEYVAULT_TEST_TALLY"
FOLDER = "KEYVAULT_TEST_FOLDER"

IN_MEMORY = Path("/dev/shm")  # noqa: S108  mkdtemp follows
"""Folder of Linux whose files are in memory. A keystore and a revocation log on a disk wait for it at each write."""

LEAST_ROOM_BYTES = 1 << 30
"""Free space from which the run's folder, of some 10 MB, is in memory. Containers often allow 64 MB in all."""

PYTEST_FOLDER = "PYTEST_DEBUG_TEMPROOT"
"""Where pytest makes the folders of tests. It deletes that of a test that passed."""


@dataclass(frozen=True)
class SuitePlace:
    """Where this process tests: its data directory, its database, and whether it is the run's controller."""

    database: str
    database_name: str
    database_url: str
    data_dir: Path
    is_controller: bool


def required_servers() -> set[str]:
    """The servers whose absence is a failure rather than a reason to skip."""
    names = {name.strip() for name in os.environ.get(REQUIRE, "").split(",")} - {""}
    if unknown := names - SERVERS:
        raise pytest.UsageError(f"{REQUIRE} knows {sorted(SERVERS)}, not {sorted(unknown)}")
    return names


def chosen_database() -> str:
    """The database of this run: SQLite unless `KEYVAULT_TEST_DATABASE` says otherwise."""
    database = os.environ.get(DATABASE, "sqlite")
    if database not in DATABASES:
        raise pytest.UsageError(f"{DATABASE} is one of {DATABASES}, not {database!r}")
    return database


def lay() -> SuitePlace:
    """Set this process's environment and say what it is; a developer's own settings do not survive it."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    folder = Path(os.environ[FOLDER]) if worker else _new_run()
    required_servers()
    _forget_own_settings()
    data_dir = folder / (worker or "main")
    data_dir.mkdir(mode=0o700)
    database = chosen_database()
    if database == "sqlite":
        path = data_dir / "keyvault.sqlite3"
        name, url = str(path), f"sqlite:///{path}"
    else:
        name = f"keyvault_{worker or 'main'}"
        url = urlunsplit(urlsplit(os.environ[POSTGRES_URL])._replace(path=f"/{name}"))
    os.environ["KEYVAULT_DATA_DIR"] = str(data_dir)
    os.environ["KEYVAULT_DATABASE_URL"] = url
    os.environ["DJANGO_SETTINGS_MODULE"] = SETTINGS
    return SuitePlace(database, name, url, data_dir, is_controller=worker is None)


def _new_run() -> Path:
    """Create the run's folder, and its PostgreSQL unless one is given; both end with this process."""
    if chosen_database() == "postgres" and not os.environ.get(POSTGRES_URL):
        lent = ExitStack()
        try:
            os.environ[POSTGRES_URL] = lent.enter_context(postgres_server())
        except MissingServerError as missing:
            raise pytest.UsageError(f"{DATABASE}=postgres, but there is {missing.reason}") from None
        atexit.register(lent.close)
    in_memory = IN_MEMORY if _has_room_in_memory() else None
    if in_memory is not None:
        os.environ.setdefault(PYTEST_FOLDER, str(in_memory))
    folder = Path(tempfile.mkdtemp(prefix="kv-tests-", dir=in_memory))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ[FOLDER] = str(folder)
    return folder


def _has_room_in_memory() -> bool:
    return os.access(IN_MEMORY, os.W_OK | os.X_OK) and shutil.disk_usage(IN_MEMORY).free >= LEAST_ROOM_BYTES


def _forget_own_settings() -> None:
    """Drop what configures a developer's own service; keep what configures the tests."""
    for name in list(os.environ):
        ours = name == REQUIRE or name.startswith("KEYVAULT_TEST_")
        if name.startswith(("KEYVAULT_", "VAULT_")) and not ours:
            del os.environ[name]
