"""A reserve of disk space, so that a full disk does not stop revocations.

A file of real blocks lies on each disk that a revocation writes to: that of the data folder, of the revocation log, and
of SQLite's database. A revocation on a full disk shortens the file first, by as much as it needs. The file gets its
length back once there is space.
"""

import errno
import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from django.conf import settings

from keyvault.backends.private_files import ensure_private_file

RESERVE_BYTES = 16 * 1024 * 1024
"""Length of a whole reserve."""

NEEDED_BYTES = 1024 * 1024
"""Free space that one revocation may need: its lines of the revocation log, and its pages of SQLite's log."""

RESERVE_NAME = "disk_reserve"

_POSTGRES_DISK_FULL = "53100"

_log = logging.getLogger(__name__)


def is_disk_full() -> bool:
    """Whether a disk lacks the space for a revocation or for a whole reserve."""
    return any(_free_bytes(path) - _missing_bytes(path) < NEEDED_BYTES for path in _list_reserves())


def keep_reserve() -> None:
    """Give each reserve its length back if there is space for it. Never raises."""
    with _logged():
        for path in _list_reserves():
            missing = _missing_bytes(path)
            if missing and _free_bytes(path) - missing >= NEEDED_BYTES:
                ensure_private_file(path)
                with path.open("r+b") as file:
                    os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)


def make_room() -> None:
    """Shorten the reserves of full disks, so that a revocation can be written. Never raises."""
    with _logged():
        for path in _list_reserves():
            _release(path, NEEDED_BYTES - _free_bytes(path))


def release_reserve() -> bool:
    """Shorten each reserve by what a revocation needs, after a write has failed; return whether there was one.

    A quota can end before the disk is full, so the free space says nothing here.
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
    except OSError as error:
        _log.warning("the disk reserve could not be used", extra={"why": error.strerror or error})
