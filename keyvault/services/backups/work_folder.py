"""A private folder for the temporary files of one backup or restore at a time."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from django.conf import settings

from keyvault.backends.private_files import ensure_private_directory
from keyvault.domain.errors import StateConflictError

_NAME = "backup-work"


@contextmanager
def work_folder() -> Iterator[Path]:
    """Yield an empty folder in the data folder, and empty it afterwards. Deletes what a killed run left.

    Raises StateConflictError while another backup or restore runs on this data folder.
    """
    folder = ensure_private_directory(settings.DATA_DIR / _NAME)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StateConflictError("Another backup or restore runs on this data folder. Wait for its end.") from None
        _empty(folder)
        try:
            yield folder
        finally:
            _empty(folder)
    finally:
        os.close(descriptor)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
