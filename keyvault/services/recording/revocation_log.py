"""The journal of revocations, outside the database: what no restored backup and no failed-over replica brings back.

What ends for ever is written down here and synced to the disk as the last act before its transaction commits, and
marked as committed before the caller is answered. So every end that was answered with a yes is in the journal; where
it or its mark could not be written the log says so, and the worker appends it within a minute. One whose commit failed
has no mark, and counts for nothing while this machine runs; a minute later the worker marks it as dropped. Where the
machine went down before that it may be the mark of a commit that is lost, and the end counts: too much is revoked then,
never too little.

Each host has its own journal, on a disk of its own. What other hosts revoked, and what could not be written, the
worker appends from the change feed (`journal_healing`). All processes of a host append to the file at once. Only
`journal_opening` makes the file: a journal that is missing or empty is lost, not new.
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

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.access.principals import WORKER
from keyvault.backends.private_files import ensure_private_directory
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.revocation_log import Committed, DamagedLineError, Ended, Line, Opened, line_bytes, parse_line
from keyvault.models import Account, CustomerToken, Key, Merchant, Notice, ServiceToken
from keyvault.models.recording import RecordedModel, Subject, collect_subjects
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.notifications import announce

_log = logging.getLogger(__name__)

ENDING: Mapping[str, type[RecordedModel]] = {
    "key": Key,
    "service_token": ServiceToken,
    "customer_token": CustomerToken,
    "merchant": Merchant,
}
"""The rows that end for ever (`has_ended`), by the kind of their subject."""

_BLOCK_BYTES = 4096
_LOOKED = b'"what":"looked"'


def append_ended(subjects: Mapping[Subject, bool], sequence: int | None, now: datetime) -> None:
    """Writes down what has ended in this transaction: its last act before the commit. Costs nothing where nothing has.

    A journal that cannot be written stops no revocation: it is an alarm, and the worker appends what is missing.
    """
    ended = [subject for subject, has_ended in subjects.items() if has_ended]
    if not ended or sequence is None:
        return
    unit = secrets.token_hex(8)
    try:
        append_lines(describe_ended(ended, sequence, now, unit=unit))
    except OSError as error:
        _log.exception("the revocation journal cannot be written", extra={"path": str(settings.JOURNAL)})
        _try_alarm(error, now)
    else:
        transaction.on_commit(partial(_note_committed, unit), robust=True)


def describe_ended(ended: Iterable[Subject], sequence: int, now: datetime, *, unit: str = "") -> list[Ended]:
    """Lines of what has ended, with the state and reason that a key has by now, and when a customer token expires.

    `unit`: see `domain.journal.Ended`.
    """
    ends = list(ended)
    names = [identity for kind, identity in ends if kind == "key"]
    rows = Key.objects.filter(pk__in=names).values_list("key_id", "state", "reason") if names else ()
    keys = {key_id: (state, reason or "") for key_id, state, reason in rows}
    names = [identity for kind, identity in ends if kind == "customer_token"]
    expiries = CustomerToken.objects.filter(pk__in=names).values_list("token_id", "expires_at") if names else ()
    tokens = dict(expiries)
    lines = []
    for kind, identity in ends:
        state, reason = keys.get(identity, ("", "")) if kind == "key" else ("", "")
        expires_at = tokens.get(identity) if kind == "customer_token" else None
        lines.append(Ended(sequence, now, kind, identity, state, reason, unit, boot_id(), expires_at))
    return lines


def append_lines(lines: Sequence[Line], *, is_synced: bool = True) -> None:
    """All of them or none, synced to the disk unless a process's life is all they have to outlast.

    Raises OSError, also where the journal is missing or empty: a file that began here would pass for the lost one.
    """
    with _opened(settings.JOURNAL) as descriptor:
        with _locked(descriptor):
            _mend_torn(descriptor)
            if os.fstat(descriptor).st_size == 0:
                raise empty_error()
            _write(descriptor, b"".join(map(line_bytes, lines)))
        if is_synced:
            os.fsync(descriptor)


def make_journal(opened: Opened) -> bool:
    """Make the file with its first line; False where it has lines already. Raises OSError."""
    path = settings.JOURNAL
    ensure_private_directory(path.parent)
    with _opened(path, os.O_CREAT) as descriptor:
        with _locked(descriptor):
            _mend_torn(descriptor)
            if os.fstat(descriptor).st_size > 0:
                return False
            _write(descriptor, line_bytes(opened))
        os.fsync(descriptor)
    _sync_folder(path.parent)
    return True


def empty_error() -> OSError:
    return OSError(errno.ENODATA, os.strerror(errno.ENODATA), str(settings.JOURNAL))


def read_journal(offset: int = 0) -> Iterator[tuple[int, Line | None]]:
    """Every line behind that offset, with the one behind it, as the file is now; None: it is damaged.

    No file: none. A torn last line is left out: nobody was answered before it was whole. Raises OSError.
    """
    try:
        file = settings.JOURNAL.open("rb")
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


def find_last_look() -> int:
    """The offset of the last `CaughtUp`, found without reading what comes before; 0: there is none. Raises OSError."""
    with settings.JOURNAL.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return 0
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            found = text.rfind(_LOOKED)
            return 0 if found < 0 else text.rfind(b"\n", 0, found) + 1


@cache
def boot_id() -> str:
    """Which run of the machine this is; empty where it does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    except OSError:
        return ""


def announce_failure(grant: Grant, account: Account, error: OSError) -> None:
    """Inside the transaction of what found it out. The account is any: a host has none."""
    why = os.strerror(error.errno) if error.errno else "it was not written"
    announce(grant, NoticeKind.JOURNAL_FAILED, account, host_name(), why=why)


def find_account_to_alarm() -> Account | None:
    """None while an alarm about this host's journal waits to be seen: one is enough."""
    unseen = Notice.objects.filter(kind=NoticeKind.JOURNAL_FAILED, subject=host_name(), seen_at__isnull=True)
    return None if unseen.exists() else any_account()


def any_account() -> Account | None:
    """An account to file an alarm of this host under; None: there is no account yet."""
    return Account.objects.select_related("merchant").order_by("pk").first()


def host_name() -> str:
    return socket.gethostname()[:64]


def _try_alarm(error: OSError, now: datetime) -> None:
    """In the transaction of the revocation, which goes on whatever becomes of this; its audit entry is the cause's."""
    try:
        with transaction.atomic(), collect_subjects():
            if (account := find_account_to_alarm()) is not None:
                announce_failure(authorize(WORKER, Permission.JOURNAL_KEEP, account, now=now), account, error)
    except DatabaseError:
        _log.exception("nor can the alarm be raised")


def _note_committed(unit: str) -> None:
    """Not synced: a killed process loses nothing of it, and a power cut is known by its `boot`."""
    try:
        append_lines([Committed(unit)], is_synced=False)
    except OSError:
        _log.exception("the revocation journal cannot be written", extra={"path": str(settings.JOURNAL)})


# --- the file ---------------------------------------------------------------------------------------------


@contextmanager
def _opened(path: Path, more: int = 0) -> Iterator[int]:
    """Opened anew each time, so that a file which was moved away is not written to. `more`: flags of `os.open`."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | more, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    """For the microseconds of the write, not for the sync. Who is killed meanwhile lets go."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _mend_torn(descriptor: int) -> None:
    """Takes away what a writer left that died in the middle, so that it does not spoil the next line too."""
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
    _log.warning("a torn line of the revocation journal is taken away", extra={"bytes": len(torn)})
    os.ftruncate(descriptor, size - len(torn))


def _write(descriptor: int, text: bytes) -> None:
    """Raises OSError on a disk that took a part only, which is taken back."""
    before = os.fstat(descriptor).st_size
    if os.write(descriptor, text) != len(text):
        os.ftruncate(descriptor, before)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _sync_folder(folder: Path) -> None:
    """The new name outlasts a power cut too."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _parsed(text: bytes) -> Line | None:
    try:
        return parse_line(text.removesuffix(b"\n"))
    except DamagedLineError:
        return None
