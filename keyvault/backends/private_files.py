"""Private folders and first-run secrets of the data folder: only their owner reads them."""

import base64
import os
import secrets
import tempfile
from pathlib import Path

from django.core.exceptions import ImproperlyConfigured


def ensure_private_directory(path: Path) -> Path:
    """The folder, made with mode 0700 when absent. An existing one keeps its mode."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path.resolve()


def ensure_private_file(path: Path) -> None:
    """Makes an empty file with mode 0600 when there is none, whatever the process's umask."""
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))


def read_or_make_secret(path: Path) -> str:
    """86 random characters, made at the first run; of two first runs at once both get the same.

    Raises ImproperlyConfigured when others than the owner may read the file.
    """
    if not path.exists():
        _make_once(path, secrets.token_urlsafe(64))
    return _read_private(path)


def read_or_make_master_key(path: Path, *, may_make: bool) -> str:
    """32 random bytes in base64, made at the first run only: never for data that another key sealed.

    Raises ImproperlyConfigured when others than the owner may read the file, or it is missing.
    """
    if may_make and not path.exists():
        _make_once(path, base64.b64encode(secrets.token_bytes(32)).decode())
    return _read_private(path)


def write_private_file(path: Path, text: str) -> None:
    """A whole file in the place of whatever was there, or nothing; readable by its owner only, and kept through a
    power cut."""
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
    _sync_folder(path.parent)


def remove_private_file(path: Path) -> None:
    """Gone, after a power cut too."""
    path.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _read_private(path: Path) -> str:
    try:
        if path.stat().st_mode & 0o077:
            raise ImproperlyConfigured(f"{path} can be read by others; run: chmod 600 {path}")
        text = path.read_text().strip()
    except FileNotFoundError:
        raise ImproperlyConfigured(f"{path} is missing; restore it from the backup") from None
    if not text:
        raise ImproperlyConfigured(f"{path} is empty")
    return text


def _make_once(path: Path, text: str) -> None:
    """Writes a whole file or none: linked into place when complete, never over an existing one."""
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
        _sync_folder(path.parent)
    finally:
        os.unlink(temporary)


def _sync_folder(folder: Path) -> None:
    """Makes a new name in the folder last through a power cut: data sealed by a lost key would be lost too."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
