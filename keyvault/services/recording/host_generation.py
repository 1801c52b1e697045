"""A generation counter that all processes of a host share: it grows with every change and is read before each verdict.

Reading `memory[0]` costs some tens of nanoseconds, without a system call or a lock. When it differs from the value last
seen, `since` returns the changed subjects from a ring buffer. If it cannot, the reader must drop its whole cache. A
writer announces after the commit and before it responds: from then on no process of the host can miss the change.

The file is only a notification. If an announcement is lost (its writer was killed, the file was deleted), the change
feed delivers it a moment later. So no process waits for the file without a limit, and any doubt drops the whole cache.

When the mapped file is deleted or replaced, a process notices it at its next announcement, its next `since`, or the
next `remap` of its follower. Limitation: if a process that never mapped the deleted file announces first, it
writes to a new file. The others still read the old one, and learn of that change only from the next poll of the feed.
"""

import fcntl
import mmap
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from keyvault.domain.ids import Subject

SLOTS = 1024
"""Number of subjects in the ring. A reader that is further behind drops its whole cache."""

_MAGIC = int.from_bytes(b"KVGENER1", "little")
_HEADER_WORDS = 8
_SLOT_WORDS = 32
_SLOT_BYTES = _SLOT_WORDS * 8
_MAX_SUBJECT_BYTES = _SLOT_BYTES - 16
_SIZE = 8 * (_HEADER_WORDS + SLOTS * _SLOT_WORDS)

_READER_SECONDS = 0.05
"""Maximum wait of a reader for the lock, in seconds."""

_WRITER_SECONDS = 2.0
"""Maximum wait of a writer for the lock, in seconds.

The lock is held for microseconds and ends with its process. Only a process stopped meanwhile (SIGSTOP) holds it longer.
"""


class HostGeneration:
    """The counter in the file at `path`, created with mode 0600 if absent. Raises OSError when that fails.

    `memory[0]` is the generation. Read `memory` again after every `since`, which may have mapped another file. The file
    may be deleted while the service runs, but never truncated: that kills its readers (SIGBUS). Threads and forked
    children may share an instance.
    """

    memory: memoryview

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        with self._opened() as descriptor:
            self._map(descriptor)

    def announce(self, subjects: Collection[Subject]) -> None:
        """Notify every process of this host that the verdicts about these subjects may have changed.

        Raises OSError when the file cannot be written: then only the change feed notifies them.
        """
        if not subjects:
            return
        with self._opened() as descriptor:
            self._map(descriptor)
            memory = self.memory
            if not _try_lock(descriptor, fcntl.LOCK_EX, _WRITER_SECONDS):
                # The holder was stopped while it held the lock. A distant number makes readers drop their caches.
                memory[0] = time.time_ns()
                return
            before = memory[0]
            for number, subject in enumerate(subjects, start=before + 1):
                _write_slot(memory, number, subject)
            # A stopped holder that resumes after others stopped waiting overwrites their slots.
            memory[0] = before + len(subjects) if memory[0] == before else time.time_ns()

    def since(self, seen: int) -> tuple[int, list[Subject] | None]:
        """Return the current generation and the subjects announced after `seen`.

        None instead of subjects: they are too many or unknown; drop the whole cache. Raises OSError when the file
        cannot be opened or created.
        """
        with self._opened() as descriptor:
            is_remapped = self._map(descriptor)
            memory = self.memory
            current = memory[0]
            if is_remapped or not _try_lock(descriptor, fcntl.LOCK_SH, _READER_SECONDS):
                return current, None
            current = memory[0]
            if not 0 <= current - seen <= SLOTS:
                return current, None
            found = [_read_slot(memory, number) for number in range(seen + 1, current + 1)]
        subjects = [subject for subject in found if subject is not None]
        return current, subjects if len(subjects) == len(found) else None

    def remap(self) -> None:
        """Map the file at `path` again if it was replaced. Raises OSError."""
        with self._opened() as descriptor:
            self._map(descriptor)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Open a descriptor for one call, so that neither other threads nor forked children share a lock on it."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield descriptor
        finally:
            # Unlock explicitly: a mapping of the file, or a child forked meanwhile, holds a copy of the descriptor.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _map(self, descriptor: int) -> bool:
        """Map this file as `memory`. Return False if it is already mapped, True if it replaces another or none.

        Notifies the readers of the file that it replaces. Initializes a file without our header in place, so that all
        processes read the same file.
        """
        status = os.fstat(descriptor)
        file = status.st_dev, status.st_ino
        if file == self._file and status.st_size >= _SIZE and self.memory[1] == _MAGIC:
            return False
        _try_lock(descriptor, fcntl.LOCK_EX, _WRITER_SECONDS)
        if os.fstat(descriptor).st_size < _SIZE:
            # Allocate the blocks: a write to a hole of a mapped file kills the process when the disk is full.
            os.posix_fallocate(descriptor, 0, _SIZE)
        memory = memoryview(mmap.mmap(descriptor, _SIZE)).cast("Q")
        if memory[1] != _MAGIC:
            memory[0] = time.time_ns()  # greater than any earlier file's counter, and far from it
            memory[1] = _MAGIC
        elif self._file is not None:
            # It may be an older copy: its counter could pass a value that a reader has seen, without those subjects.
            memory[0] = time.time_ns()
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        if self._file is not None:
            self.memory[0] = time.time_ns()
        self.memory, self._file = memory, file
        return True


def _write_slot(memory: memoryview, number: int, subject: Subject) -> None:
    """Write one slot, its number last: without a number, the slot of a writer killed meanwhile is ignored."""
    text = "\0".join(subject).encode()
    length = len(text) if len(text) <= _MAX_SUBJECT_BYTES else 0
    start = _start_of(number)
    memory[start] = 0
    memory[start + 1] = length
    first = 8 * (start + 2)
    memory.cast("B")[first : first + length] = text[:length]
    memory[start] = number


def _read_slot(memory: memoryview, number: int) -> Subject | None:
    start = _start_of(number)
    length = memory[start + 1]
    if memory[start] != number or not 0 < length <= _MAX_SUBJECT_BYTES:
        return None
    first = 8 * (start + 2)
    try:
        kind, _, identity = bytes(memory.cast("B")[first : first + length]).decode().partition("\0")
    except UnicodeDecodeError:
        return None
    return kind, identity


def _start_of(number: int) -> int:
    return _HEADER_WORDS + (number % SLOTS) * _SLOT_WORDS


def _try_lock(descriptor: int, operation: int, seconds: float) -> bool:
    """Take the lock, waiting at most this many seconds; return whether it was taken."""
    ends_at = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= ends_at:
                return False
            time.sleep(0.0002)
        else:
            return True
