"""Migrate the schema while processes use the database.

A statement of a migration waits for a lock at most LOCK_SECONDS, because every query that arrives meanwhile waits
behind it. Then it gives way, and the migration is repeated after a pause. One process migrates at a time.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from django.core.management import call_command
from django.db import DatabaseError, OperationalError, connection
from django.db.backends.utils import CursorWrapper
from django.db.migrations.executor import MigrationExecutor
from psycopg.errors import DeadlockDetected, LockNotAvailable

from keyvault.domain.errors import DependencyUnavailableError
from keyvault.models.triggers import missing_triggers
from keyvault.services.startup.startup_checks import require_compatible_release

_log = logging.getLogger(__name__)

LOCK_SECONDS: Final = 2
"""Maximum wait of one statement for a lock, in seconds."""

ATTEMPTS = 30
PAUSE_SECONDS = 2.0
"""Pause between two attempts, and between two checks for another migrating process, in seconds."""

_MIGRATOR: Final = (0x4B_56, 0x6D_69_67_72)
"""Advisory lock of the process that migrates."""


def ensure_migrated() -> None:
    """Migrate if migrations or triggers are missing.

    Raises ImproperlyConfigured if the database needs a later release, and what `migrate` raises.
    """
    executor = MigrationExecutor(connection)
    require_compatible_release(executor.loader)
    if executor.migration_plan(executor.loader.graph.leaf_nodes()) or missing_triggers(connection):
        migrate()


def migrate() -> None:
    """Apply what is missing. Raises DependencyUnavailableError if other transactions do not release their locks."""
    if connection.vendor != "postgresql":
        _migrate()
        return
    with _only_migrator(), _short_waits_for_locks():
        for attempt in range(1, ATTEMPTS + 1):
            try:
                _migrate()
            except OperationalError as error:
                if not isinstance(error.__cause__, LockNotAvailable | DeadlockDetected):
                    raise
                _log.warning("a migration gave way to other transactions", extra={"attempt": attempt})
            else:
                return
            time.sleep(PAUSE_SECONDS)
    raise DependencyUnavailableError(
        f"The migration did not get its locks within {LOCK_SECONDS} s in any of {ATTEMPTS} attempts. The migrations "
        "before it are applied, and the service runs. Find the long transaction in pg_stat_activity, end it, and run "
        "setup again."
    )


def _migrate() -> None:
    call_command("migrate", interactive=False, verbosity=0)


@contextmanager
def _only_migrator() -> Iterator[None]:
    """Wait until no other process migrates.

    By polling: a session that waits for an advisory lock holds a snapshot, for which CREATE INDEX CONCURRENTLY waits.
    """
    with connection.cursor() as cursor:
        while not _try_lock(cursor):
            _log.warning("another process migrates the database; waiting for it")
            time.sleep(PAUSE_SECONDS)
    try:
        yield
    finally:
        with suppress(DatabaseError), connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_unlock(%s, %s)", _MIGRATOR)


def _try_lock(cursor: CursorWrapper) -> bool:
    cursor.execute("SELECT pg_try_advisory_lock(%s, %s)", _MIGRATOR)
    return bool(cursor.fetchone()[0])


@contextmanager
def _short_waits_for_locks() -> Iterator[None]:
    with connection.cursor() as cursor:
        cursor.execute(f"SET lock_timeout = '{LOCK_SECONDS}s'")
    try:
        yield
    finally:
        with suppress(DatabaseError), connection.cursor() as cursor:
            cursor.execute("SET lock_timeout = DEFAULT")
