"""A reserve of disk space, so that a full disk does not stop revocations.

A file of real blocks lies on each disk that a revocation writes to: that of the data folder, of the revocation log, and
of SQLite's database. A revocation on a full disk shortens the file before its first write, by as much as it needs. The
file takes back what is left right after the commit.

On SQLite both happen under the database's write lock, so that no other transaction takes the space before the commit.
Other writers can: another program on the same disk, a file that is no part of the database, and a transaction between
the commit and the taking back. They take at most NEEDED_BYTES for each revocation.
"""

import errno
import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from django.conf import settings
from django.db import DatabaseError, InterfaceError, connection, transaction

from keyvault.backends.private_files import ensure_private_file

RESERVE_BYTES = 16 * 1024 * 1024
"""Length of a whole reserve."""

NEEDED_BYTES = 4 * 1024 * 1024
"""Free space that one revocation may need: its lines of the revocation log, and its pages of SQLite's log.

SQLite keeps at most 2 MB of changed pages in memory until the commit. It writes the others during the transaction.
"""

_LEFT_BYTES = 64 * 1024
"""Free space that a reserve leaves to the file system's own records."""

MIN_FREE_BYTES = 16 * 1024 * 1024
"""Free space that a new reserve leaves to all other writers. A disk with less gets no reserve."""

RESERVE_NAME = "disk_reserve"

_POSTGRES_DISK_FULL = "53100"

_log = logging.getLogger(__name__)

_too_small: set[Path] = set()
"""Reserves whose disk is too small for them, each logged once."""


def is_disk_full() -> bool:
    """Whether a disk lacks the space for a revocation or for a whole reserve."""
    return any(
        _free_bytes(path) - _missing_bytes(path) < (NEEDED_BYTES if path.exists() else MIN_FREE_BYTES)
        for path in _list_reserves()
    )


def measure_free_bytes() -> int:
    """Return the free space of the fullest disk that has a reserve. Raises OSError."""
    return min(_free_bytes(path) for path in _list_reserves())


def keep_reserve() -> None:
    """Give each reserve its length back, as far as its disk has space. Never raises.

    Make a reserve only if MIN_FREE_BYTES stay free beside the whole of it; otherwise log that there is none.

    Waits until no revocation is being written to SQLite: its space may just have been released. Call it outside of a
    transaction.
    """
    with _logged():
        for path in _list_reserves():
            if _has_no_room(path):
                continue
            if _growth_bytes(path) > 0:
                with _no_revocation():
                    _grow(path)


def make_room() -> None:
    """Shorten the reserves of full disks, so that a revocation can be written. Never raises.

    Call it inside the revocation's transaction, before each row that ends, and before the database is opened.
    """
    with _logged():
        for path in _list_reserves():
            _release(path, NEEDED_BYTES - _free_bytes(path))


def release_reserve() -> bool:
    """Shorten each reserve by what a revocation needs, after a write has failed; return whether there was one.

    A quota can end before the disk is full, so the free space is not checked here.
    """
    with _logged():
        released = [_release(path, NEEDED_BYTES) for path in _list_reserves()]
        return any(released)
    return False


def is_out_of_space(error: BaseException) -> bool:
    """Whether an error of the operating system or of the database means that a disk is full."""
    if isinstance(error, OSError):
        return error.errno in {errno.ENOSPC, errno.EDQUOT}
    cause = error.__cause__
    return (
        getattr(cause, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        or getattr(cause, "sqlstate", None) == _POSTGRES_DISK_FULL
    )


def _list_reserves() -> list[Path]:
    """Return the path of each disk's reserve. Raises OSError."""
    folders = [settings.DATA_DIR, settings.REVOCATION_LOG.parent]
    database = settings.DATABASES["default"]
    if database["ENGINE"] == "django.db.backends.sqlite3":
        folders.append(Path(database["NAME"]).parent)
    disks = {folder.stat().st_dev: folder for folder in reversed(folders) if folder.exists()}
    return [folder / RESERVE_NAME for folder in disks.values()]


def _free_bytes(path: Path) -> int:
    found = os.statvfs(path.parent)
    return found.f_bavail * found.f_frsize


def _missing_bytes(path: Path) -> int:
    try:
        return max(0, RESERVE_BYTES - path.stat().st_size)
    except FileNotFoundError:
        return RESERVE_BYTES


def _has_no_room(path: Path) -> bool:
    """Whether there is no reserve yet, and its disk is too small for one."""
    free = _free_bytes(path)
    if path.exists() or free >= RESERVE_BYTES + MIN_FREE_BYTES:
        _too_small.discard(path)
        return False
    if path not in _too_small:
        _too_small.add(path)
        _log.warning(
            "there is no disk reserve: the disk has too little free space, so a full disk may refuse revocations",
            extra={"path": str(path), "free_bytes": free, "required_bytes": RESERVE_BYTES + MIN_FREE_BYTES},
        )
    return True


def _growth_bytes(path: Path) -> int:
    """Return how much longer a reserve can get, in bytes."""
    return min(_missing_bytes(path), _free_bytes(path) - _LEFT_BYTES)


def _grow(path: Path) -> None:
    count = _growth_bytes(path)
    if count > 0:
        ensure_private_file(path)
        with path.open("r+b") as file:
            # From the beginning: another process may have shortened the file meanwhile, and a hole reserves nothing.
            os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES - _missing_bytes(path) + count)


def _no_revocation() -> AbstractContextManager[object]:
    """Hold SQLite's write lock. PostgreSQL needs none: the revocation log releases space again when it must."""
    return transaction.atomic() if connection.vendor == "sqlite" else nullcontext()


def _release(path: Path, count: int) -> bool:
    """Shorten a reserve by this many bytes; return whether it got shorter."""
    left = RESERVE_BYTES - _missing_bytes(path)
    if count <= 0 or not left:
        return False
    os.truncate(path, max(0, left - count))
    _log.error("the disk is full: a part of the reserve was released", extra={"path": str(path)})
    return True


@contextmanager
def _logged() -> Iterator[None]:
    try:
        yield
    except (OSError, DatabaseError, InterfaceError) as error:
        _log.warning("the disk reserve could not be used", extra={"why": error})
