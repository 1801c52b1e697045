"""The migrated database that tests copy: the migrations take seconds, a copy does not.

The file for SQLite is kept from run to run, under a digest of the source and of the installed packages.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg

from .environment import POSTGRES_URL, ROOT, SuitePlace

NAME = "keyvault_template"
KEPT = ROOT / ".pytest_cache" / "migrated"
MOST_KEPT = 4


def copy_sqlite_template(to: Path) -> None:
    """Make `to` a SQLite file that `migrate` has migrated, readable by its owner only."""
    KEPT.mkdir(parents=True, exist_ok=True)
    template = KEPT / f"{_digest()}.sqlite3"
    with open(KEPT / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not template.exists():
            new = KEPT / "new.sqlite3"
            for ending in ("", "-wal", "-shm"):
                new.with_name(new.name + ending).unlink(missing_ok=True)
            _migrate(f"sqlite:///{new}")
            new.replace(template)
        os.utime(template)
        for old in sorted(KEPT.glob("*.sqlite3"), key=lambda path: path.stat().st_mtime)[:-MOST_KEPT]:
            old.unlink()
        shutil.copy(template, to)


def make_migrated_data_folder(folder: Path) -> None:
    """Make a data folder with a migrated SQLite file, in which `manage.py setup` needs a second."""
    folder.mkdir(mode=0o700, parents=True)
    copy_sqlite_template(folder / "keyvault.sqlite3")


def name_of_postgres_template(place: SuitePlace) -> str:
    """Return the name of the run's database for CREATE DATABASE ... TEMPLATE."""
    folder = place.data_dir.parent
    done = Path(folder, "template-migrated")
    with open(folder / "template.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            with psycopg.connect(os.environ[POSTGRES_URL], autocommit=True) as connection:
                connection.execute(f"DROP DATABASE IF EXISTS {NAME}")
                connection.execute(f"CREATE DATABASE {NAME}")
            _migrate(urlunsplit(urlsplit(os.environ[POSTGRES_URL])._replace(path=f"/{NAME}")))
            done.touch()
    return NAME


def _digest() -> str:
    """Return the digest of all that decides what `migrate` makes: the source, the packages and the interpreter."""
    digest = hashlib.sha256(sys.version.encode())
    for path in (ROOT / "requirements.txt", *sorted((*ROOT.glob("keyvault/**/*.py"), *ROOT.glob("rotation/**/*.py")))):
        digest.update(f"{path.relative_to(ROOT)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def _migrate(url: str) -> None:
    subprocess.run(
        [sys.executable, "manage.py", "migrate", "--verbosity", "0"],
        cwd=ROOT,
        env={**os.environ, "KEYVAULT_DATABASE_URL": url},
        check=True,
    )
