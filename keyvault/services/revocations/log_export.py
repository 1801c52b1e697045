"""Export every revocation to a file that is kept elsewhere, and add such a file to a host's revocation log.

An export is signed with the key that signs the audit log's checkpoints, so that a file that was cut or altered is
refused. Like another host's log, it proves nothing about what was revoked after it.
"""

import hashlib
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

from django.conf import settings

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.backends.private_files import new_private_file
from keyvault.domain.checkpoints import find_signature_fault
from keyvault.domain.digests import PepperSet
from keyvault.domain.errors import DependencyUnavailableError, RequestInvalidError, StateConflictError
from keyvault.domain.ids import Subject
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.revocation import RevocationReason
from keyvault.domain.revocation_export import RevocationExport, SignedExport, end_line, export_bytes, parse_end_line
from keyvault.domain.revocation_log import ConfirmedLines, DamagedLineError, Ended, Opened, line_bytes, parse_line
from keyvault.domain.timestamps import format_timestamp
from keyvault.services.audit.checkpoints import read_public_keys
from keyvault.services.audit.signers import audit_signer
from keyvault.services.peppers.installation import installation_id
from keyvault.services.recording.notifications import announce
from keyvault.services.recording.revocation_log import (
    ENDING,
    any_account,
    append_lines,
    create_revocation_log,
    describe_ended,
    host_name,
    read_lines,
)
from keyvault.services.recording.transaction import recorded
from keyvault.services.revocations.log_opening import preview_replay
from keyvault.services.revocations.replay import read_counter

_BATCH = 900
"""Rows in one query, and lines in one write. SQLite accepts 999 parameters everywhere."""


# --- writing ------------------------------------------------------------------------------------------------


def write_export(path: Path, now: datetime) -> RevocationExport:
    """Write every revocation that was acknowledged before `now` to a new file. The service may run meanwhile.

    Raises:
        StateConflictError: the file exists, or this database may lack revocations.
        IntegrityError: the service was not set up.
        OSError, and the errors of the secret backend.
    """
    _require_complete()
    sequence, digest, count = read_counter(), hashlib.sha256(), 0
    try:
        with new_private_file(path) as file:
            for lines in _list_ended(sequence, now):
                text = b"".join(map(line_bytes, lines))
                digest.update(text)
                count += len(lines)
                file.write(text)
            export = RevocationExport(installation_id(), now, sequence, count, digest.hexdigest())
            file.write(end_line(_sign(export)))
    except FileExistsError:
        raise StateConflictError(
            f"The file {path} exists. Name another one: an export replaces no file, so that the former one stays whole."
        ) from None
    return export


def _require_complete() -> None:
    """Raise StateConflictError if the database lacks logged or anchored revocations, or may lack some."""
    preview = preview_replay()
    found, path = preview.found, settings.REVOCATION_LOG
    why = ""
    if preview.is_lost:
        why = f"the revocation log {path} is missing or empty"
    elif preview.unread is not None:
        why = f"the revocation anchor cannot be read ({preview.unread})"
    elif found.damaged:
        why = f"the revocation log {path} is damaged"
    elif found.lost or found.counter < found.highest:
        why = f"the database is behind the revocation log {path} or the revocation anchor"
    if why:
        raise StateConflictError(
            f"Nothing was exported, because this database may lack revocations: {why}. Run manage.py "
            "replay_revocations first."
        )


def _list_ended(sequence: int, now: datetime) -> Iterator[list[Ended]]:
    """Yield all revocations in the database in batches, without the customer tokens that have expired."""
    for kind, model in ENDING.items():
        after = ""
        while rows := list(model._default_manager.filter(pk__gt=after).order_by("pk")[:_BATCH]):
            after = str(rows[-1].pk)
            ended = [(kind, str(row.pk)) for row in rows if row.has_ended()]
            yield [line for line in describe_ended(ended, sequence, now) if not line.has_expired(now)]


def _sign(export: RevocationExport) -> SignedExport:
    signer = audit_signer()
    result = signer.sign(PepperSet.SERVICE, export_bytes(export))
    return SignedExport(export, result.signature, signer.name(PepperSet.SERVICE), result.key_version)


# --- reading ------------------------------------------------------------------------------------------------


def read_export(file: BinaryIO) -> RevocationExport:
    """Read the whole file, and return the description of its revocations.

    Raises RequestInvalidError unless it is an intact export of this installation, IntegrityError before setup,
    DependencyUnavailableError if its signature cannot be verified now, and OSError.
    """
    digest, count, last = hashlib.sha256(), 0, b""
    file.seek(0)
    for line in file:
        if last:
            digest.update(last)
            count += 1
        last = line
    try:
        signed = parse_end_line(last)
    except ValueError as error:
        raise _invalid_error(f"{error}: it was cut or altered, or it is another kind of file") from None
    export, ours = signed.export, installation_id()
    if export.installation != ours:
        raise _invalid_error(f"it belongs to installation {export.installation}, this database to {ours}")
    keys, unavailable = read_public_keys()
    if (why := unavailable.get(PepperSet.SERVICE)) is not None:
        raise DependencyUnavailableError(
            "The export cannot be verified now. Repeat the command when the secret backend answers.", internal=why
        )
    if (fault := find_signature_fault(signed, keys)) is not None:
        raise _invalid_error(fault)
    if (count, digest.hexdigest()) != (export.count, export.digest):
        raise _invalid_error(
            f"its {count} revocations are not the {export.count} that were signed: it was cut or altered"
        )
    return export


def list_exported(file: BinaryIO, export: RevocationExport) -> Iterator[Ended]:
    """Iterate over the revocations of a file that `read_export` has verified.

    Raises OSError and RequestInvalidError, also at the end if the file has changed since: another host may store it.
    """
    digest = hashlib.sha256()
    file.seek(0)
    for text in islice(file, export.count):
        digest.update(text)
        try:
            line = parse_line(text.removesuffix(b"\n"))
        except DamagedLineError:
            line = None
        if not isinstance(line, Ended):
            raise _invalid_error("a line is no revocation that this release reads; use the release that wrote it")
        yield line
    if digest.hexdigest() != export.digest:
        raise _invalid_error("it was changed while it was read")


def add_export(grant: Grant, file: BinaryIO) -> tuple[RevocationExport, int]:
    """Add to this host's revocation log what only the export has; return the export and the number of added lines.

    A missing log is created from the export, with an audit entry and an alarm. Safe to kill and run again. The grant is
    for the platform. Raises the errors of `read_export` and `require_recent`.
    """
    export = read_export(file)
    if next(read_lines(), None) is None:
        require_recent(export)
        _note_rebuilt(grant, export)
        # After the commit: a log that exists lets the service start, so the audit entry comes first.
        create_revocation_log(chain([Opened(installation_id(), grant.at)], list_exported(file, export)))
        return export, export.count
    added, missing = 0, _list_missing(list_exported(file, export))
    while lines := list(islice(missing, _BATCH)):
        append_lines(lines)
        added += len(lines)
    return export, added


def count_missing(file: BinaryIO, export: RevocationExport) -> int:
    """Count what `add_export` would add. Raises the errors of `list_exported`."""
    return sum(1 for _ in _list_missing(list_exported(file, export)))


def require_recent(export: RevocationExport) -> None:
    """Raise StateConflictError if the database is newer than the export, which then cannot replace a lost log."""
    counter = read_counter()
    if export.sequence < counter:
        raise StateConflictError(
            f"The export of {format_timestamp(export.at)} is older than this database: its newest change is "
            f"{export.sequence}, the database's is {counter}. So it cannot show what the database lacks, and does not "
            "replace the lost revocation log. Use a newer export, the log's own backup, or another host's log."
        )


def _note_rebuilt(grant: Grant, export: RevocationExport) -> None:
    until = format_timestamp(export.at)
    with recorded(
        grant,
        P.REVOCATIONS_REPLAY,
        "journal.rebuilt",
        host=host_name(),
        journal=str(settings.REVOCATION_LOG),
        exported_at=until,
        sequence=export.sequence,
        digest=export.digest,
    ):
        if (account := any_account()) is not None:
            why = f"rebuilt from the export of {until}: later revocations may be missing"
            announce(grant, NoticeKind.REVOCATION_LOG_LOSS_ACCEPTED, account, host_name(), why=why)


def _list_missing(lines: Iterable[Ended]) -> Iterator[Ended]:
    """Iterate over the lines that this host's log lacks. A logged compromise is not followed by a weaker reason."""
    confirmed, logged = ConfirmedLines(), dict[Subject, str]()
    for _, read in read_lines():
        for line in () if read is None else confirmed.add(read):
            if isinstance(line, Ended) and logged.get((line.kind, line.id)) != RevocationReason.KEY_COMPROMISE:
                logged[line.kind, line.id] = line.reason
    for line in lines:
        known = logged.get((line.kind, line.id))
        is_stronger = RevocationReason.KEY_COMPROMISE == line.reason != known
        if known is None or is_stronger:
            yield line


def _invalid_error(why: str) -> RequestInvalidError:
    return RequestInvalidError(
        f"The file is no intact export of this installation: {why}. Use a file that manage.py export_revocations of "
        "this installation has written."
    )
