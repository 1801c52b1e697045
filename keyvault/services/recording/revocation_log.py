"""The revocation log: a file outside the database, so that a restored backup or a failover revives no revoked key.

A revocation is appended and synced to the disk as the last step before its transaction commits. It is marked as
committed before the caller gets its response. So every acknowledged revocation is in the file. If a line or its mark
cannot be written, the service logs an error and the worker appends it within a minute.

A revocation whose commit failed has no mark and is ignored while this machine runs; the worker marks it as dropped a
minute later. If the machine goes down before that, the mark of a successful commit may be lost, too. So such a
revocation counts: the service revokes too much rather than too little.

Each host has its own file, on its own disk. The worker appends the revocations of other hosts, and those that could
not be written, from the change feed (`log_backfill`). All processes of a host append to the file concurrently. Only
`log_opening` creates the file: a missing or empty file is lost, not new.
"""

import errno
import fcntl
import logging
import mmap
import os
import secrets
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cache, partial
from pathlib import Path

from django.conf import settings
from django.db import DatabaseError, transaction
from django.dispatch import receiver

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.access.principals import WORKER
from keyvault.backends import meters
from keyvault.backends.private_files import ensure_private_directory, sync_folder
from keyvault.domain.checkpoints import CheckpointMark
from keyvault.domain.ids import Subject
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.revocation_log import (
    Anchored,
    Committed,
    DamagedLineError,
    Ended,
    LogLine,
    Opened,
    line_bytes,
    parse_line,
)
from keyvault.models import Account, CustomerToken, Key, Merchant, Notice, ServiceToken
from keyvault.models.recording import RecordedModel, collect_subjects, row_ends
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.notifications import announce
from keyvault.services.work.disk_space import is_out_of_space, keep_reserve, make_room, release_reserve

_log = logging.getLogger(__name__)

ENDING: Mapping[str, type[RecordedModel]] = {
    "key": Key,
    "service_token": ServiceToken,
    "customer_token": CustomerToken,
    "merchant": Merchant,
}
"""Models whose rows can be revoked permanently (`has_ended`), by the kind of their subject."""

_MAX_RELEASES = 4
"""Maximum number of times that one call releases space for its lines: another writer may take the space first."""

_BLOCK_BYTES = 4096
_CAUGHT_UP_MARKER = b'"what":"looked"'
_ANCHORED_MARKER = b'"what":"anchored"'


@receiver(row_ends)
def _make_room(**_: object) -> None:
    make_room()


def append_ended(subjects: Mapping[Subject, bool], sequence: int | None, now: datetime) -> None:
    """Append this transaction's revocations, as its last step before the commit. No I/O if there are none.

    A write error does not stop a revocation: it raises an alarm, and the worker appends the missing lines.
    """
    ended = [subject for subject, has_ended in subjects.items() if has_ended]
    if not ended or sequence is None:
        return
    unit = secrets.token_hex(8)
    try:
        append_lines(describe_ended(ended, sequence, now, unit=unit))
    except OSError as error:
        _log.exception("the revocation log cannot be written", extra={"path": str(settings.REVOCATION_LOG)})
        meters.note_log_failure()
        _try_alarm(error, now)
    else:
        transaction.on_commit(partial(_note_committed, unit), robust=True)
    transaction.on_commit(keep_reserve, robust=True)


def describe_ended(ended: Iterable[Subject], sequence: int, now: datetime, *, unit: str = "") -> list[Ended]:
    """Return the log lines of revoked subjects, with a key's current state and reason and a customer token's expiry.

    `unit`: see `domain.revocation_log.Ended`.
    """
    subjects = list(ended)
    key_ids = [identity for kind, identity in subjects if kind == "key"]
    rows = Key.objects.filter(pk__in=key_ids).values_list("key_id", "state", "reason") if key_ids else ()
    keys = {key_id: (state, reason or "") for key_id, state, reason in rows}
    token_ids = [identity for kind, identity in subjects if kind == "customer_token"]
    expiries = CustomerToken.objects.filter(pk__in=token_ids).values_list("token_id", "expires_at") if token_ids else ()
    tokens = dict(expiries)
    lines = []
    for kind, identity in subjects:
        state, reason = keys.get(identity, ("", "")) if kind == "key" else ("", "")
        expires_at = tokens.get(identity) if kind == "customer_token" else None
        lines.append(Ended(sequence, now, kind, identity, state, reason, unit, boot_id(), expires_at))
    return lines


def append_lines(lines: Sequence[LogLine], *, is_synced: bool = True) -> None:
    """Append all lines or none. `is_synced` False: they need not survive a power failure.

    On a full disk it releases a part of the reserve and tries again. Raises OSError, also when the file is missing or
    empty: a new file here would hide the loss of the old one.
    """
    for _ in range(_MAX_RELEASES):
        try:
            _append(lines, is_synced=is_synced)
        except OSError as error:
            if not is_out_of_space(error) or not release_reserve():
                raise
        else:
            return
    _append(lines, is_synced=is_synced)


def _append(lines: Sequence[LogLine], *, is_synced: bool) -> None:
    with _open_file(settings.REVOCATION_LOG) as descriptor:
        with _lock(descriptor):
            _remove_torn_line(descriptor)
            if os.fstat(descriptor).st_size == 0:
                raise empty_error()
            _write(descriptor, b"".join(map(line_bytes, lines)))
        if is_synced:
            os.fsync(descriptor)


def create_revocation_log(lines: Iterable[LogLine]) -> bool:
    """Create the file with these lines, or not at all; return False when it already has lines. Raises OSError."""
    path = settings.REVOCATION_LOG
    folder = ensure_private_directory(path.parent)
    with _open_file(folder, os.O_RDONLY) as descriptor, _lock(descriptor):
        if next(read_lines(), None) is not None:
            return False
        new = path.with_name(f"{path.name}.new")
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.writelines(map(line_bytes, lines))
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
        sync_folder(folder)
    return True


def empty_error() -> OSError:
    return OSError(errno.ENODATA, os.strerror(errno.ENODATA), str(settings.REVOCATION_LOG))


def read_lines(offset: int = 0) -> Iterator[tuple[int, LogLine | None]]:
    """Iterate over (offset after the line, line) from an offset, in bytes, up to the current end; None: damaged line.

    Yields nothing without a file. Omits a torn last line: its revocation was never acknowledged. Raises OSError.
    """
    try:
        file = settings.REVOCATION_LOG.open("rb")
    except FileNotFoundError:
        return
    with file:
        size = os.fstat(file.fileno()).st_size
        file.seek(offset)
        for text in file:
            offset += len(text)
            if offset > size or not text.endswith(b"\n"):
                return
            yield offset, _parsed(text)


def find_log_owner() -> str | None:
    """Return the installation that this host's log belongs to, by its first line; None without one. Raises OSError."""
    _, line = next(read_lines(), (0, None))
    return line.installation if isinstance(line, Opened) else None


def find_progress_line() -> int:
    """Return the byte offset of the last `CaughtUp` line, 0 without one. Raises OSError."""
    return next(_find_backwards(_CAUGHT_UP_MARKER), 0)


def find_anchored() -> int:
    """Return the change sequence up to which the log contains the revocations of the anchor. Raises OSError.

    Lines of progress through the change feed do not count: a database that was set back reuses sequences.
    """
    for offset in _find_backwards(_ANCHORED_MARKER):
        line = next((line for _, line in read_lines(offset)), None)
        if isinstance(line, Anchored):
            return line.sequence
    return 0


def find_checkpoint_mark(scope: str) -> CheckpointMark | None:
    """Return the newest checkpoint of a scope that this host's log records. Raises OSError."""
    for offset in _find_backwards(f'"scope":"{scope}","what":"checkpoint"'.encode()):
        line = next((line for _, line in read_lines(offset)), None)
        if isinstance(line, CheckpointMark):
            return line
    return None


def _find_backwards(marker: bytes) -> Iterator[int]:
    """Yield the byte offset of each line that contains the marker, the last one first. Raises OSError."""
    with settings.REVOCATION_LOG.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            found = len(text)
            while (found := text.rfind(marker, 0, found)) >= 0:
                yield text.rfind(b"\n", 0, found) + 1


@cache
def boot_id() -> str:
    """Return the first 8 characters of the kernel's boot id; empty when it has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    except OSError:
        return ""


def announce_failure(grant: Grant, account: Account, error: OSError) -> None:
    """Raise the alarm inside the caller's transaction. `account`: any one, because the host itself has none."""
    why = os.strerror(error.errno) if error.errno else "the write failed"
    announce(grant, NoticeKind.REVOCATION_LOG_FAILED, account, host_name(), why=why)


def find_account_to_alarm() -> Account | None:
    """Return an account for the alarm, or None while an earlier alarm about this host is unacknowledged."""
    unseen = Notice.objects.filter(kind=NoticeKind.REVOCATION_LOG_FAILED, subject=host_name(), seen_at__isnull=True)
    return None if unseen.exists() else any_account()


def any_account() -> Account | None:
    """Return the account that holds alarms of this host; None: there is no account yet."""
    return Account.objects.select_related("merchant").order_by("pk").first()


def host_name() -> str:
    return socket.gethostname()[:64]


def _try_alarm(error: OSError, now: datetime) -> None:
    """Raise the alarm in a savepoint of the revocation's transaction, which continues even if the alarm fails."""
    try:
        with transaction.atomic(), collect_subjects():
            if (account := find_account_to_alarm()) is not None:
                announce_failure(authorize(WORKER, Permission.REVOCATION_LOG_APPEND, account, now=now), account, error)
    except DatabaseError:
        _log.exception("the alarm about the revocation log cannot be raised")


def _note_committed(unit: str) -> None:
    """Append the mark without a sync: it survives a killed process, and `boot` reveals a power failure."""
    try:
        append_lines([Committed(unit)], is_synced=False)
    except OSError:
        _log.exception("the revocation log cannot be written", extra={"path": str(settings.REVOCATION_LOG)})


# --- the file ---------------------------------------------------------------------------------------------


@contextmanager
def _open_file(path: Path, flags: int = os.O_RDWR | os.O_APPEND) -> Iterator[int]:
    """Open the file for one call, so that a file moved away is not written to."""
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _lock(descriptor: int) -> Iterator[None]:
    """Hold the lock for the microseconds of the write, not for the sync. A killed process releases it."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _remove_torn_line(descriptor: int) -> None:
    """Remove a partial last line left by a killed writer, so that it does not corrupt the next line too."""
    size = os.fstat(descriptor).st_size
    tail = b""
    while len(tail) < size and b"\n" not in tail:
        begin = max(0, size - len(tail) - _BLOCK_BYTES)
        tail = os.pread(descriptor, size - len(tail) - begin, begin) + tail
    torn = tail.rpartition(b"\n")[2]
    if not torn:
        return
    if _parsed(torn) is not None:
        os.write(descriptor, b"\n")
        return
    _log.warning("a torn line of the revocation log was removed", extra={"bytes": len(torn)})
    os.ftruncate(descriptor, size - len(torn))


def _write(descriptor: int, text: bytes) -> None:
    """Write the whole text. Raises OSError after a short write, which it truncates again."""
    before = os.fstat(descriptor).st_size
    if os.write(descriptor, text) != len(text):
        os.ftruncate(descriptor, before)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _parsed(text: bytes) -> LogLine | None:
    try:
        return parse_line(text.removesuffix(b"\n"))
    except DamagedLineError:
        return None
