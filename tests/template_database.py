"""The migrated database that the workers of one run copy: the migrations take seconds, a copy does not."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg

from .environment import POSTGRES_URL, ROOT, Place

NAME = "keyvault_template"


def copy_sqlite_template(place: Place) -> None:
    """Make the worker's database file a copy of the run's template."""
    path = place.data_dir.parent / f"{NAME}.sqlite3"
    _migrate_once(place, f"sqlite:///{path}")
    shutil.copyfile(path, place.database_name)


def name_of_postgres_template(place: Place) -> str:
    """The database for CREATE DATABASE ... TEMPLATE."""
    _migrate_once(place, urlunsplit(urlsplit(os.environ[POSTGRES_URL])._replace(path=f"/{NAME}")))
    return NAME


def _migrate_once(place: Place, url: str) -> None:
    """Migrate an empty database at `url`, unless another worker of the run already did."""
    folder = place.data_dir.parent
    done = Path(folder, "template-migrated")
    with open(folder / "template.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if done.exists():
            return
        if place.database == "postgres":
            with psycopg.connect(os.environ[POSTGRES_URL], autocommit=True) as connection:
                connection.execute(f"DROP DATABASE IF EXISTS {NAME}")
                connection.execute(f"CREATE DATABASE {NAME}")
        subprocess.run(
            [sys.executable, "manage.py", "migrate", "--verbosity", "0"],
            cwd=ROOT,
            env={**os.environ, "KEYVAULT_DATABASE_URL": url},
            check=True,
        )
        done.touch()
