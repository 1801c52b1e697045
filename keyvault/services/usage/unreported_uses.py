"""Uses that a process has not reported yet, in a mapped file that outlives the process.

A process that is killed loses what it counted since its last report, so every silence in its environments would have to
restart. Instead, another process of the host reports these uses from the file. The kernel keeps what a killed process
has written to a mapping. It may lose it when the host ends, so a file from before the last boot is not read.
"""

import fcntl
import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple, Self

import msgspec

SUFFIX: Final = ".uses"
_NEW: Final = ".new"
_NEW_SECONDS: Final = 60
"""Age at which a file that never got its name is deleted, in seconds: its process was killed."""

_MAGIC: Final = int.from_bytes(b"KVUSES01", "little")
_MAGIC_PLACE, _END, _CONFIRMED, _NUMBER, _TAKEN, _IS_INCOMPLETE = range(6)
"""Indexes of the words of the header.

Format; end of the entries; end of the reported ones; the report that is being sent; end of its entries; 1 if the file
was full.
"""

_HEADER_BYTES: Final = 128
_BOOT_BYTES: Final = slice(64, _HEADER_BYTES)
_SIZE: Final = 4 * 2**20
_MAX_ENTRIES: Final = 20_000
"""Maximum distinct entries per minute and report that name their source. Further entries name none."""


class Mark(NamedTuple):
    """The extent of a report: the end of its entries, their buckets, and the number of entries dropped before it."""

    end: int
    noted: set[tuple[object, ...]]
    dropped: int


Entry = tuple[str, str, str, str, str, str, float]
"""One key's use: key id, endpoint name, source, user agent, page origin, outcome value, and time in epoch seconds."""

_encode: Final = msgspec.json.Encoder().encode
_decoder: Final = msgspec.json.Decoder(list[Entry])


class UnreportedUses:
    """The file of one reporter, locked while its process lives. Raises OSError if it cannot be created.

    An entry covers all uses of one bucket in one minute and one report. A successor learns who used the key and when
    first, but not how often. Threads may share an instance.
    """

    def __init__(self, folder: Path, reporter_id: str) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = folder / f"{reporter_id}{SUFFIX}"
        # A successor that found the file before it is locked would consider its process dead.
        unlocked = folder / f"{reporter_id}{_NEW}"
        self._descriptor = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            # Allocate the blocks: a write to a hole of a mapped file kills the process when the disk is full.
            os.posix_fallocate(self._descriptor, 0, _SIZE)
            self._bytes = mmap.mmap(self._descriptor, _SIZE)
        except OSError:
            unlocked.unlink(missing_ok=True)
            os.close(self._descriptor)
            raise
        self._bytes[_BOOT_BYTES] = _boot_id()
        self._words = memoryview(self._bytes).cast("Q")
        self._words[_END] = self._words[_CONFIRMED] = self._words[_TAKEN] = _HEADER_BYTES
        self._words[_MAGIC_PLACE] = _MAGIC
        unlocked.rename(self.path)
        self._is_open = True
        self._lock = threading.Lock()
        self._noted: set[tuple[object, ...]] = set()
        """Buckets and minutes that were noted since the last `mark`."""
        self._dropped = 0
        """Number of entries for which the file had no room."""
        self._sent: Mark | None = None
        self._shift = 0
        """Number of places by which the entries have moved to the front. Marks count from the original place."""

    def note(
        self, key_id: str, endpoint: str, source: str, user_agent: str, origin: str, outcome: str, at: float
    ) -> None:
        """Write an entry, unless its bucket has one already. Call it after the use was counted. Never raises."""
        minute = at // 60
        bucket = (key_id, endpoint, source, user_agent, origin, outcome, minute)
        with self._lock:
            if bucket in self._noted or not self._is_open:
                return
            if len(self._noted) >= _MAX_ENTRIES:
                source = user_agent = origin = ""
                bucket = (key_id, endpoint, source, user_agent, origin, outcome, minute)
                if bucket in self._noted:
                    return
            entry = b",%b" % _encode((key_id, endpoint, source, user_agent, origin, outcome, at))
            start = self._words[_END]
            end = start + len(entry)
            if end > _SIZE:
                self._words[_IS_INCOMPLETE] = 1
                self._dropped += 1
                return
            self._bytes[start:end] = entry
            self._words[_END] = end
            self._noted.add(bucket)

    def mark(self) -> Mark:
        """Begin a report; return the mark that covers the entries so far. Call it before the counts are taken."""
        with self._lock:
            noted, self._noted = self._noted, set()
            return Mark(self._words[_END] + self._shift, noted, self._dropped)

    def send(self, number: int, mark: Mark) -> None:
        """Note that the entries up to the mark are in the report of this number, which is about to be sent."""
        with self._lock:
            self._words[_NUMBER] = 0  # no number applies while the two words differ
            self._words[_TAKEN] = mark.end - self._shift
            self._words[_NUMBER] = number
            self._sent = mark

    def keep(self, mark: Mark) -> None:
        """Note that the counts up to the mark were put back, so that their buckets need no other entries."""
        with self._lock:
            self._noted |= mark.noted

    def confirm(self) -> None:
        """Drop the entries of the report that was sent, and reuse their place.

        The file is complete again if all entries that did not fit are older than that report.
        """
        with self._lock:
            start = self._words[_CONFIRMED] = self._words[_TAKEN]
            if self._sent is not None and self._sent.dropped == self._dropped:
                self._words[_IS_INCOMPLETE] = 0
            rest = self._words[_END] - start
            if rest and (start < _SIZE // 2 or _HEADER_BYTES + rest > start):
                return
            # In this order, so that a process killed in between leaves each entry at least once, or a damaged file.
            self._bytes[_HEADER_BYTES : _HEADER_BYTES + rest] = self._bytes[start : start + rest]
            self._words[_NUMBER] = 0
            self._words[_CONFIRMED] = self._words[_TAKEN] = _HEADER_BYTES
            self._words[_END] = _HEADER_BYTES + rest
            self._shift += start - _HEADER_BYTES

    def close(self, *, is_reported: bool) -> None:
        """Release the file, and delete it if every use was reported. An unreported one is left to a successor."""
        if is_reported:
            self.path.unlink(missing_ok=True)
        with self._lock:
            self.forget()

    def forget(self) -> None:
        """Release a parent's file in a forked child. The parent's lock stays."""
        self._is_open = False
        self._words.release()
        self._bytes.close()
        os.close(self._descriptor)


class DeadFile:
    """The file of a reporter that has ended, locked by this process."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor
        self.reporter_id = path.name.removesuffix(SUFFIX)
        content = os.pread(descriptor, _SIZE, 0)
        self._content = content if len(content) == _SIZE else b"\0" * _SIZE
        self._words = memoryview(self._content).cast("Q")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    @property
    def last_number(self) -> int:
        """The number of the last report that the process may have sent."""
        return self._words[_NUMBER]

    def read(self, stored_number: int) -> list[Entry] | None:
        """Return the unreported uses; None if the file may lack some. `stored_number`: of the last stored report."""
        is_ours = self._words[_MAGIC_PLACE] == _MAGIC and self._content[_BOOT_BYTES] == _boot_id()
        if not is_ours or self._words[_IS_INCOMPLETE]:
            return None
        is_stored = 0 < self.last_number <= stored_number
        start = self._words[_TAKEN if is_stored else _CONFIRMED]
        try:
            return _decoder.decode(b"[%b]" % self._content[start : self._words[_END]].removeprefix(b","))
        except msgspec.MsgspecError:
            return None

    def delete(self) -> None:
        self.path.unlink(missing_ok=True)


def list_dead(folder: Path) -> Iterator[DeadFile]:
    """Yield the files of ended processes, each locked until the next one; those of living processes are skipped."""
    for path in folder.glob(f"*{_NEW}"):
        with suppress(OSError):
            if path.stat().st_mtime < time.time() - _NEW_SECONDS:
                path.unlink()
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                continue
            with DeadFile(path, descriptor) as file:
                yield file


@cache
def _boot_id() -> bytes:
    """Return the id of the host's current boot. On a host without one, return a random id, so that no file is read."""
    try:
        found = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        found = os.urandom(18).hex().encode()
    return found[:64].ljust(64, b"\0")
