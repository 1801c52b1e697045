"""The embedded default's broker: kombu's filesystem transport, in a private folder of the data folder.

Messages may be lost, because the database rows are authoritative. The stock transport creates a file before it writes
it, and a process that polls in between fails on the empty file. This transport makes a file visible once it is
complete.
"""

import os
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from queue import Empty
from typing import Any
from uuid import uuid4

from kombu.exceptions import ChannelError
from kombu.transport import filesystem
from kombu.utils.json import dumps

from keyvault.backends.private_files import ensure_private_directory

EXCHANGE = "keyvault"
"""The exchange of every queue, of type direct."""


def prepare_folder(folder: Path) -> dict[str, Any]:
    """Create the broker's folders where they are missing; return the transport's options."""
    ensure_private_directory(folder)
    messages, control = (str(ensure_private_directory(folder / name)) for name in ("messages", "control"))
    table = Path(control, f"{EXCHANGE}.exchange")
    if not table.exists():
        _write_complete(table, b"[]")
    return {
        "data_folder_in": messages,
        "data_folder_out": messages,
        "control_folder": control,
        "polling_interval": 0.1,
    }


def remove_parts(folder: Path) -> None:
    """Delete the incomplete files of killed processes once they are an hour old."""
    for part in folder.glob("*/*.part"):
        with suppress(FileNotFoundError):  # its writer has finished meanwhile
            if part.stat().st_mtime < time.time() - 3600:
                part.unlink()


def _write_complete(path: Path, data: bytes) -> None:
    """Write a new private file; keep an existing one."""
    part = path.with_name(f"{uuid4()}.part")
    descriptor = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.link(part, path)
    except FileExistsError:
        pass  # Another process created it first, and may have changed it since.
    finally:
        part.unlink()


class FileChannel(filesystem.Channel):
    """The stock channel, except that a message becomes visible once it is complete, and that polls are cheap."""

    _waiting: Collection[str] = ()
    """The ends of the file names that the last poll found, each with the name of a queue."""

    def _poll(self, cycle: Any, callback: Any, timeout: float | None = None) -> Any:
        """Take the next message. Raises Empty.

        The stock channel lists the folder once for each queue, which is most of an idle worker's processor time.
        """
        self._waiting = {name.partition(".")[2] for name in os.listdir(self.data_folder_in)}
        if not self._waiting:
            raise Empty
        return super()._poll(cycle, callback, timeout)

    def _get_and_deliver(self, queue: str, callback: Any) -> None:
        if f"{queue}.msg" not in self._waiting:
            raise Empty
        super()._get_and_deliver(queue, callback)

    def _put(self, queue: str, payload: Any, **kwargs: Any) -> None:  # type: ignore[override]  # as the stock one
        path = Path(self.data_folder_out, f"{time.time_ns():020d}_{uuid4()}.{queue}.msg")
        try:
            _write_complete(path, dumps(payload).encode())
        except OSError as error:
            raise ChannelError(f"cannot write {path}") from error


class FileTransport(filesystem.Transport):
    """The stock transport with `FileChannel`."""

    Channel = FileChannel
