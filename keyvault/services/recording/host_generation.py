"""One number that all processes of a host share: it grows with every change, and is read before each verdict.

`words[0]` costs some tens of nanoseconds, no call to the system and no lock. When it is not what the reader has
seen, `since` says what changed meanwhile, from a ring of the latest subjects, or that it has to forget everything.
Whoever announces does so after the commit and before it answers: from then on no process of the host can miss it.

The file is only a message: what an announcement lost (its writer was killed, somebody deleted the file) is found
in the change feed a moment later. So it is never waited for without end, and any doubt is "forget everything".

A file that was deleted or replaced while the service runs is noticed by whoever had mapped it, at his next
announcement, his next `since`, or the next report of his follower (`heal`). One limit follows: where it was deleted and
a process that never had it mapped makes the first announcement into a new file, the others go on reading theirs, and
"on the same host at once" holds again only when the feed's next look has brought them the change.
"""

import fcntl
import mmap
import os
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

Subject = tuple[str, str]

SLOTS = 1024
"""So many subjects are remembered; a reader that is further behind forgets everything."""

_MAGIC = int.from_bytes(b"KVGENER1", "little")
_HEADER_WORDS = 8
_SLOT_WORDS = 32
_SLOT_BYTES = _SLOT_WORDS * 8
_MOST_BYTES = _SLOT_BYTES - 16
_SIZE = 8 * (_HEADER_WORDS + SLOTS * _SLOT_WORDS)

_READER_SECONDS = 0.05
_WRITER_SECONDS = 2.0
"""A lock is held for microseconds, and ends with its process. One that was stopped in the middle holds it longer."""


class HostGeneration:
    """The file at `path`, made with mode 0600 when absent. Raises OSError when it cannot be opened or made.

    `words[0]` is the generation. Take `words` again after every `since`: somebody may have replaced the file. (It may
    be deleted while the service runs, never shortened: that ends whoever reads it.) Threads and forked children
    share an instance freely.
    """

    words: memoryview

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        with self._opened() as descriptor:
            self._map(descriptor)

    def announce(self, subjects: Collection[Subject]) -> None:
        """Tells every process of this host that the verdicts about these subjects may have changed.

        Raises OSError when the file cannot be written: then only the change feed tells them.
        """
        if not subjects:
            return
        with self._opened() as descriptor:
            self._map(descriptor)
            words = self.words
            if not _is_locked(descriptor, fcntl.LOCK_EX, _WRITER_SECONDS):
                # Whoever holds it was stopped in the middle. A number far from the next ones: forget everything.
                words[0] = time.time_ns()
                return
            before = words[0]
            for number, subject in enumerate(subjects, start=before + 1):
                _write_slot(words, number, subject)
            # Whoever was stopped in the middle goes on after others have given up waiting, and writes over their slots.
            words[0] = before + len(subjects) if words[0] == before else time.time_ns()

    def since(self, seen: int) -> tuple[int, list[Subject] | None]:
        """The word now, and the subjects announced since it was `seen`; None: too many, or unknown: forget everything.

        Raises OSError when the file cannot be opened or made.
        """
        with self._opened() as descriptor:
            is_another = self._map(descriptor)
            words = self.words
            word = words[0]
            if is_another or not _is_locked(descriptor, fcntl.LOCK_SH, _READER_SECONDS):
                return word, None
            word = words[0]
            if not 0 <= word - seen <= SLOTS:
                return word, None
            found = [_read_slot(words, number) for number in range(seen + 1, word + 1)]
        subjects = [subject for subject in found if subject is not None]
        return word, subjects if len(subjects) == len(found) else None

    def heal(self) -> None:
        """Looks whether `path` is still the file that is read here, and makes it so. Raises OSError."""
        with self._opened() as descriptor:
            self._map(descriptor)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """A descriptor for one call: a lock on it is shared neither with other threads nor with forked children."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            yield descriptor
        finally:
            # Closing it would not do: a mapping made from it, or a child forked meanwhile, has a copy of it.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _map(self, descriptor: int) -> bool:
        """Makes `words` those of this file, and tells the readers of another one; whether it was another.

        A file that is not ours is made anew in its place, so that nobody goes on reading another.
        """
        status = os.fstat(descriptor)
        file = status.st_dev, status.st_ino
        if file == self._file and status.st_size >= _SIZE and self.words[1] == _MAGIC:
            return False
        _is_locked(descriptor, fcntl.LOCK_EX, _WRITER_SECONDS)
        if os.fstat(descriptor).st_size < _SIZE:
            # Really allocated: a write to a hole of a mapped file on a full disk would end the process.
            os.posix_fallocate(descriptor, 0, _SIZE)
        words = memoryview(mmap.mmap(descriptor, _SIZE)).cast("Q")
        if words[1] != _MAGIC:
            words[0] = time.time_ns()  # greater than that of any file before it, and far from it
            words[1] = _MAGIC
        elif self._file is not None:
            # An older copy, maybe: its word may pass what somebody has seen, without what was announced there.
            words[0] = time.time_ns()
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        if self._file is not None:
            self.words[0] = time.time_ns()
        self.words, self._file = words, file
        return True


def _write_slot(words: memoryview, number: int, subject: Subject) -> None:
    """The number last: a slot whose writer was killed in the middle has none, and is not believed."""
    text = "\0".join(subject).encode()
    length = len(text) if len(text) <= _MOST_BYTES else 0
    start = _start_of(number)
    words[start] = 0
    words[start + 1] = length
    first = 8 * (start + 2)
    words.cast("B")[first : first + length] = text[:length]
    words[start] = number


def _read_slot(words: memoryview, number: int) -> Subject | None:
    start = _start_of(number)
    length = words[start + 1]
    if words[start] != number or not 0 < length <= _MOST_BYTES:
        return None
    first = 8 * (start + 2)
    try:
        kind, _, identity = bytes(words.cast("B")[first : first + length]).decode().partition("\0")
    except UnicodeDecodeError:
        return None
    return kind, identity


def _start_of(number: int) -> int:
    return _HEADER_WORDS + (number % SLOTS) * _SLOT_WORDS


def _is_locked(descriptor: int, how: int, seconds: float) -> bool:
    """Takes the lock; False when it cannot be had for so long."""
    ends_at = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= ends_at:
                return False
            time.sleep(0.0002)
        else:
            return True
