"""The revocation anchor: what was revoked, in the secret backend, outside this host and the database.

A host that lost its revocation log rebuilds it from the anchor, and a host with an older log catches up. The worker
writes the anchor from the change feed after the commit, so that no revocation waits for the backend. The anchor
therefore lags, and protects only revocations that are older than the lag that `/metrics` shows.

The newest revocations are one value of the backend, which a compare-and-swap replaces. Each SEGMENT_LINES of them move
to a segment, which is written once under its digest and names the digest of the segment before it. A worker that is
killed midway leaves an unused segment at most.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from threading import Lock

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER
from keyvault.backends import meters
from keyvault.backends.base import BackendConflictError, BackendError, BackendInvalidError, BackendMissingError, Mount
from keyvault.backends.vault.layout import REVOCATIONS_PATH
from keyvault.domain.canonical import JsonValue
from keyvault.domain.digests import PepperSet
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.plaintext import Plaintext
from keyvault.domain.revocation_log import Anchored, DamagedLineError, Ended, Opened, line_bytes, parse_line
from keyvault.models import Change
from keyvault.services.peppers.installation import LABEL, installation_id
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.notifications import alarm_due, announce
from keyvault.services.recording.revocation_log import (
    ENDING,
    append_lines,
    create_revocation_log,
    describe_ended,
    find_anchored,
    read_lines,
)
from keyvault.services.recording.transaction import recorded
from keyvault.services.revocations.feed_revocations import find_last_settled, list_ended
from keyvault.services.revocations.replay import read_counter
from keyvault.services.secrets.backend import secret_backend

SEGMENT_LINES = 500
"""Revocations of one segment, about 100 kB. A million revocations have 2,000 segments."""

LATE_AFTER = timedelta(minutes=10)
"""Lag of the anchor above which an alarm is raised."""

_BATCH = 1000
"""Changes read in one round."""

_NEWEST = f"{PepperSet.SERVICE}/{REVOCATIONS_PATH}"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Anchor:
    """The newest part of the anchor.

    `sequence`: change sequence of the newest revocation. `lines`: the revocations that are in no segment yet, oldest
    first. `previous`: digest of the newest segment; empty: there is none. `version`: version in the secret backend.
    """

    sequence: int = 0
    previous: str = ""
    lines: tuple[Ended, ...] = ()
    version: int = 0


def find_anchor() -> Anchor | None:
    """Return the newest part of the anchor, or None if nothing was anchored yet.

    Raises the errors of the secret backend, and IntegrityError before setup.
    """
    try:
        found = secret_backend().read(Mount.EVIDENCE, _NEWEST)
    except BackendMissingError:
        return None
    if found.labels.get(LABEL) != installation_id():
        raise BackendInvalidError(
            "The revocation anchor belongs to another installation.",
            internal=f"the revocation anchor belongs to installation {found.labels.get(LABEL)}: set a "
            "KEYVAULT_VAULT_PREFIX (or KEYVAULT_DATA_DIR) of this installation's own",
        )
    previous, lines = _parse(_NEWEST, found.labels)
    try:
        return Anchor(int(found.labels["sequence"]), previous, lines, found.version)
    except (KeyError, ValueError):
        raise _invalid_error(_NEWEST) from None


def list_anchored(anchor: Anchor, after: int) -> Iterator[Sequence[Ended]]:
    """Yield the anchored revocations after a change sequence in batches, oldest first.

    Reads the needed segments twice: only the newest one is known, and each names the one before it. Raises the errors
    of the secret backend.
    """
    digests: list[str] = []
    previous, oldest = anchor.previous, anchor.lines[0].sequence if anchor.lines else anchor.sequence + 1
    while previous and oldest > after:
        digests.append(previous)
        previous, lines = _read_segment(previous)
        oldest = lines[0].sequence
    for digest in reversed(digests):
        yield [line for line in _read_segment(digest)[1] if line.sequence > after]
    yield [line for line in anchor.lines if line.sequence > after]


def list_missing(anchor: Anchor) -> Iterator[Ended]:
    """Iterate over the anchored revocations that this host's revocation log lacks, oldest first.

    Raises OSError and the errors of the secret backend.
    """
    covered = 0 if next(read_lines(), None) is None else find_anchored()
    return (line for batch in list_anchored(anchor, covered) for line in batch)


def update_log(anchor: Anchor, now: datetime) -> int:
    """Add to this host's revocation log what only the anchor has; create the log if it is lost. Return the lines added.

    Safe to kill and run again. Raises OSError and the errors of the secret backend.
    """
    lines = (line for batch in list_anchored(anchor, 0) for line in batch)
    if create_revocation_log(_whole_log(Opened(installation_id(), now), lines, anchor.sequence)):
        return 1
    covered = find_anchored()
    if anchor.sequence <= covered:
        return 0
    added = 0
    for batch in list_anchored(anchor, covered):
        append_lines(batch)
        added += len(batch)
    append_lines([Anchored(anchor.sequence)])
    return added


def _whole_log(opened: Opened, lines: Iterator[Ended], sequence: int) -> Iterator[Opened | Ended | Anchored]:
    yield opened
    yield from lines
    yield Anchored(sequence)


# --- writing ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class AnchorWriter:
    """This process's progress through the change feed.

    `position`: None: the anchor was not read yet. `anchored`: the anchor's sequence when it was last read or written.
    `began_at`: time of the first round.
    """

    position: int | None = None
    anchored: int = 0
    began_at: datetime | None = None
    _running: Lock = field(default_factory=Lock)

    def run(self, now: datetime) -> int:
        """Anchor the next revocations, a bounded number. Return how many. An unavailable backend delays them.

        Another thread that runs meanwhile anchors nothing.
        """
        if not self._running.acquire(blocking=False):
            return 0
        try:
            return self._run_alone(now)
        finally:
            self._running.release()

    def _run_alone(self, now: datetime) -> int:
        self.began_at = self.began_at or now
        try:
            count = self._run(now)
        except BackendError as error:
            why = error.internal or error.detail
            _log.warning("the revocation anchor is not up to date", extra={"why": why})
            count = 0
        self._note_time(now)
        return count

    def _run(self, now: datetime) -> int:
        if self.position is None:
            self.anchored = self._read().sequence
            self.position = min(self.anchored, read_counter())
        last = find_last_settled()
        if last < self.position:
            self.position = min(self.position, read_counter())
        if last <= self.position:
            return 0
        rows, end = list_ended(self.position, last, _BATCH)
        subjects = [subject for subject, _ in rows]
        if not subjects:
            self.position = end
            return 0
        anchor = self._read()
        if anchor.sequence < self.anchored:
            # The secret backend was set back, so that the anchor lacks what this process has passed.
            self.position, self.anchored = min(self.position, anchor.sequence), anchor.sequence
            return 0
        counter = read_counter()  # before `anchored` changes, so that an error of the database loses nothing
        is_newer, self.anchored = anchor.sequence > self.anchored, anchor.sequence
        if is_newer and self.position < anchor.sequence <= counter:
            # Another worker was faster.
            self.position = anchor.sequence
            return 0
        # If the database was set back, keep the anchor's sequence ahead of it, so that the service refuses to start.
        # Hosts copy only sequences that they lack.
        sequence = max(end, anchor.sequence + 1)
        lines = describe_ended(subjects, sequence, now)
        try:
            _write(anchor, lines, sequence)
        except BackendConflictError:
            return 0  # Another worker was faster; the next round reads its version.
        self.position, self.anchored = end, sequence
        return len(lines)

    def _read(self) -> Anchor:
        """Return the anchor. An anchor ahead of the database shows that the database was set back."""
        anchor = find_anchor() or Anchor()
        if anchor.sequence > read_counter():
            _log.error("the database was set back; stop all processes, and run: manage.py replay_revocations")
        return anchor

    def _note_time(self, now: datetime) -> None:
        """Record the time up to which every revocation is anchored."""
        until = self._find_anchored_time(now)
        meters.note_anchor(until)
        if now - until > LATE_AFTER:
            raise_anchor_alarm_once(LAG, now, seconds=round((now - until).total_seconds()))

    def _find_anchored_time(self, now: datetime) -> datetime:
        if self.position is None:
            return self.began_at or now  # This process has not been able to read the anchor yet.
        waiting = Change.objects.filter(sequence__gt=self.position, subject_kind__in=ENDING).order_by("sequence")
        return min(now, waiting.values_list("at", flat=True).first() or now)


def _write(anchor: Anchor, new: Sequence[Ended], sequence: int) -> None:
    """Write the full segments, and then the newest part. Raises BackendConflictError."""
    lines, previous = [*anchor.lines, *new], anchor.previous
    while len(lines) >= SEGMENT_LINES:
        previous = _write_segment(previous, lines[:SEGMENT_LINES])
        lines = lines[SEGMENT_LINES:]
    labels = {**_format(previous, lines), "sequence": str(sequence), LABEL: installation_id()}
    secret_backend().put(Mount.EVIDENCE, _NEWEST, Plaintext(""), labels, expected_version=anchor.version)


def _write_segment(previous: str, lines: Sequence[Ended]) -> str:
    """Write a segment and return its digest. A segment that exists has the same content."""
    labels = _format(previous, lines)
    try:
        secret_backend().put(Mount.EVIDENCE, _path(labels["digest"]), Plaintext(""), labels, expected_version=0)
    except BackendConflictError:
        _read_segment(labels["digest"])
    return labels["digest"]


LAG = "revocations"
"""Subject of the alarm about an anchor that lacks revocations. For the alarm about a log it is the host's name."""


def raise_anchor_alarm_once(subject: str, now: datetime, **details: JsonValue) -> None:
    """Raise the alarm, unless an earlier one about the same subject is still unseen."""
    with alarm_due(NoticeKind.ANCHOR_LATE, subject, now) as is_due:
        if is_due:
            raise_anchor_alarm(subject, now, **details)


def raise_anchor_alarm(subject: str, now: datetime, **details: JsonValue) -> None:
    """Raise the alarm about the anchor's lag, or about a host whose log was compared with it late or not at all."""
    grant = authorize(WORKER, P.REVOCATION_LOG_APPEND, now=now)
    with recorded(grant, P.REVOCATION_LOG_APPEND, "anchor.late", account=None, subject=subject, **details):
        announce(grant, NoticeKind.ANCHOR_LATE, None, subject, **details)


_writer = AnchorWriter()


def anchor_revocations(now: datetime) -> int:
    """Run one round of this process's writer. Return how many revocations it anchored."""
    return _writer.run(now)


# --- the stored form ------------------------------------------------------------------------------------------


def _format(previous: str, lines: Sequence[Ended]) -> dict[str, str]:
    text = b"".join(map(line_bytes, lines)).decode()
    return {"previous": previous, "lines": text, "digest": _digest(previous, text)}


def _parse(path: str, labels: Mapping[str, str]) -> tuple[str, tuple[Ended, ...]]:
    """Return the digest of the segment before, and the lines. Raises BackendInvalidError."""
    try:
        previous, text, digest = (labels[name] for name in ("previous", "lines", "digest"))
        lines = tuple(parse_line(line) for line in text.encode().splitlines())
    except (KeyError, DamagedLineError):
        raise _invalid_error(path) from None
    if digest != _digest(previous, text):
        raise _invalid_error(path)
    return previous, tuple(line for line in lines if isinstance(line, Ended))


def _read_segment(digest: str) -> tuple[str, tuple[Ended, ...]]:
    """Return the digest of the segment before, and the lines. Raises the errors of the secret backend."""
    found = secret_backend().read(Mount.EVIDENCE, _path(digest))
    previous, lines = _parse(_path(digest), found.labels)
    if found.labels["digest"] != digest or not lines:
        raise _invalid_error(_path(digest))
    return previous, lines


def _digest(previous: str, text: str) -> str:
    return hashlib.sha256(f"{previous}\n{text}".encode()).hexdigest()


def _path(digest: str) -> str:
    return f"{_NEWEST}/{digest}"


def _invalid_error(path: str) -> BackendInvalidError:
    return BackendInvalidError("The revocation anchor is malformed.", internal=f"{path} of the evidence is malformed")
