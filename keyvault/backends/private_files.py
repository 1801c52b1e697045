"""Private folders and first-run secrets of the data folder, readable by their owner only."""

import base64
import errno
import fcntl
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from django.core.exceptions import ImproperlyConfigured


def ensure_private_directory(path: Path) -> Path:
    """Return the folder, created with mode 0700 when absent. An existing folder keeps its mode."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path.resolve()


def ensure_private_file(path: Path) -> None:
    """Create an empty file with mode 0600 when absent, independent of the process's umask."""
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))


def read_or_make_secret(path: Path) -> str:
    """Return 86 random characters, created on the first run; concurrent first runs get the same text.

    Raises ImproperlyConfigured when users other than the owner can read the file.
    """
    if not path.exists():
        _make_once(path, new_secret())
    return read_private_file(path)


def new_secret() -> str:
    """Return 86 random characters."""
    return secrets.token_urlsafe(64)


def find_recent_secret(path: Path, max_age_seconds: float) -> str | None:
    """Return a secret that was written not longer ago than this; None: there is none.

    Raises ImproperlyConfigured when others than the owner may read the file.
    """
    if not path.exists() or time.time() - path.stat().st_mtime > max_age_seconds:
        return None
    return read_private_file(path)


def new_master_key() -> str:
    """Return 32 random bytes in base64."""
    return base64.b64encode(secrets.token_bytes(32)).decode()


def read_or_make_master_key(path: Path, *, may_make: bool, make: Callable[[], str] = new_master_key) -> str:
    """Return the key of a file, created only if `may_make`: never for data that another key sealed.

    Raises ImproperlyConfigured when users other than the owner can read the file, or when it is missing.
    """
    if may_make and not path.exists():
        _make_once(path, make())
    return read_master_key_file(path)


def write_private_file(path: Path, text: str) -> None:
    """Replace a file atomically and durably; only its owner can read it."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    sync_folder(path.parent)


@contextmanager
def new_private_file(path: Path) -> Iterator[BinaryIO]:
    """Write a new file that only its owner can read; it has its name once it is whole and on the disk.

    Raises FileExistsError if there is such a file, and OSError, also while another process writes it.
    """
    if path.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    partial = path.with_name(f"{path.name}.partial")
    with os.fdopen(_open_partial(partial), "wb") as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            _require_own(file.fileno(), partial)
            # A link, unlike a rename, replaces no file that was made meanwhile.
            os.link(partial, path)
        finally:
            with suppress(OSError):
                _require_own(file.fileno(), partial)
                partial.unlink()
    sync_folder(path.parent)


def _open_partial(partial: Path) -> int:
    """Return a descriptor of a new file, which is locked until it is closed. Replaces that of a killed process.

    Raises OSError while another process writes it.
    """
    with suppress(FileNotFoundError):
        former = os.open(partial, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _lock(former, partial)
            # It is not written again: a killed process may have linked it to its final name.
            partial.unlink()
        finally:
            os.close(former)
    try:
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise _busy_error(partial) from None
    try:
        _lock(descriptor, partial)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _busy_error(path) from None
    _require_own(descriptor, path)


def _require_own(descriptor: int, path: Path) -> None:
    """Raise OSError if the path no longer names the open file, because another process has replaced it."""
    try:
        is_own = os.path.samestat(os.fstat(descriptor), path.stat(follow_symlinks=False))
    except FileNotFoundError:
        is_own = False
    if not is_own:
        raise _busy_error(path)


def _busy_error(path: Path) -> OSError:
    return OSError(errno.EBUSY, "another process writes this file; wait for its end", str(path))


def remove_private_file(path: Path) -> None:
    """Delete a file durably."""
    path.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush the folder's entries to disk, so that a created, replaced or deleted file survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_private_file(path: Path, *, if_missing: str = "put the file there") -> str:
    """Return a file's text. Raises ImproperlyConfigured if it is missing, empty, unreadable, or others may read it.

    `if_missing`: what to do then.
    """
    try:
        content = path.read_bytes()
        is_private = not path.stat().st_mode & 0o077
    except FileNotFoundError:
        raise ImproperlyConfigured(f"{path} is missing; {if_missing}") from None
    except PermissionError:
        raise ImproperlyConfigured(
            f"{path} cannot be read by the user of this process; make that user its owner"
        ) from None
    except OSError as error:
        raise ImproperlyConfigured(f"{path} cannot be read as text: {error.strerror}") from None
    if not is_private:
        raise ImproperlyConfigured(f"{path} can be read by others; run: chmod 600 {path}")
    text = None
    # An exception of the decoder has the content, so that no later one may have it as its context.
    with suppress(UnicodeDecodeError):
        text = content.decode().strip()
    if text is None:
        raise ImproperlyConfigured(f"{path} cannot be read as text")
    if not text:
        raise ImproperlyConfigured(f"{path} is empty")
    return text


def read_master_key_file(path: Path) -> str:
    """Return the text of a master key. Raises as `read_private_file`."""
    return read_private_file(path, if_missing="put the file there; no backup of the service contains it")


def _make_once(path: Path, text: str) -> None:
    """Create a file atomically and durably; an existing one stays."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return
        sync_folder(path.parent)
    finally:
        os.unlink(temporary)
