"""The lines of the revocation log, a write-ahead log of each revocation and then of its commit.

A line is canonical JSON, a space and a checksum. A crash leaves an incomplete line: the last one, without a line
feed. Any other line that fails its checksum is damaged.

    {"accepted_by":"","at":…,"installation":"5e…","reason":"","what":"opened"} 1b…
    {"at":…,"boot":…,"id":…,"kind":"key","reason":…,"sequence":7,"state":…,"unit":"9f…","what":"ended"} 3c…
    {"unit":"9f…","what":"committed"} a0…
    {"unit":"c4…","what":"dropped"} 77…
    {"sequence":7,"what":"looked"} 51…
    {"sequence":7,"what":"anchored"} 0b…
    {"at":…,"digest":"d0…","number":7,"scope":"sandbox","what":"checkpoint"} 6e…
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime

from keyvault.domain.canonical import JsonValue, canonical_bytes
from keyvault.domain.checkpoints import CheckpointMark


class DamagedLineError(ValueError):
    """A line fails its checksum or cannot be parsed."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The installation that the log belongs to; the first line of the file.

    `accepted_by` and `reason`: the operator who accepted the loss of an earlier log, and why. Empty: no log was lost.
    """

    installation: str
    at: datetime
    accepted_by: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """A permanent revocation. `state` and `reason` are set for keys only.

    `unit` identifies the transaction, which a `Committed` line confirms; empty: read from the database after its
    commit. `boot` identifies the boot of the machine. `expires_at` is the expiry of a revoked customer token.
    """

    sequence: int
    at: datetime
    kind: str
    id: str
    state: str = ""
    reason: str = ""
    unit: str = ""
    boot: str = ""
    expires_at: datetime | None = None

    def has_expired(self, now: datetime) -> bool:
        """Return whether the token has expired, so that its revocation no longer matters."""
        return self.expires_at is not None and self.expires_at <= now


@dataclass(frozen=True, slots=True)
class Committed:
    unit: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """The transaction was not committed long after its line. A `Committed` line overrides this, even a later one."""

    unit: str


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """The log contains every revocation up to this change sequence of the database."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Anchored:
    """The log contains every revocation that the revocation anchor had up to this change sequence."""

    sequence: int


LogLine = Opened | Ended | Committed | Dropped | CaughtUp | Anchored | CheckpointMark

_KINDS: dict[str, type[LogLine]] = {
    "opened": Opened,
    "ended": Ended,
    "committed": Committed,
    "dropped": Dropped,
    "looked": CaughtUp,
    "anchored": Anchored,
    "checkpoint": CheckpointMark,
}
_KIND_NAMES = {kind: name for name, kind in _KINDS.items()}


def line_bytes(line: LogLine) -> bytes:
    """Serialize a line, including its line feed."""
    fields: dict[str, JsonValue] = {**asdict(line), "what": _KIND_NAMES[type(line)]}
    if isinstance(line, Ended | Opened | CheckpointMark):
        fields["at"] = _format_time(line.at)
    if isinstance(line, Ended):
        del fields["expires_at"]
        if line.expires_at is not None:
            fields["expires_at"] = _format_time(line.expires_at)
    body = canonical_bytes(fields)
    return body + b" " + _checksum(body) + b"\n"


def parse_line(text: bytes) -> LogLine:
    """Parse a line without its line feed. Raises DamagedLineError."""
    body, _, checksum = text.rpartition(b" ")
    if checksum != _checksum(body):
        raise DamagedLineError("the checksum does not match")
    try:
        fields = json.loads(body)
        kind = _KINDS[fields.pop("what")]
        times = fields.keys() & {"at", "expires_at"}
        fields |= {name: datetime.fromisoformat(fields[name]) for name in times}
        return kind(**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedLineError("not a line of the revocation log") from error


@dataclass(slots=True)
class ConfirmedLines:
    """Finds the revocations whose commit is confirmed, while the lines are read one by one."""

    _unconfirmed: dict[str, list[Ended]] = field(default_factory=dict)
    _dropped: dict[str, list[Ended]] = field(default_factory=dict)

    def add(self, line: LogLine) -> Sequence[Ended | CaughtUp]:
        """Read one line. Returns the lines that it confirms."""
        if isinstance(line, Committed):
            return self._unconfirmed.pop(line.unit, []) or self._dropped.pop(line.unit, [])
        if isinstance(line, Dropped):
            if unit := self._unconfirmed.pop(line.unit, []):
                self._dropped[line.unit] = unit
            return []
        if isinstance(line, Ended) and line.unit:
            self._unconfirmed.setdefault(line.unit, []).append(line)
            return []
        return [] if isinstance(line, Opened | Anchored | CheckpointMark) else [line]

    def list_unconfirmed(self, boot: str) -> list[list[Ended]]:
        """Return the unconfirmed revocations of the current boot, by transaction; none when `boot` is empty."""
        return [unit for unit in self._unconfirmed.values() if boot and unit[0].boot == boot]

    def list_unfinished(self, boot: str) -> list[Ended]:
        """Return the revocations of earlier boots without a `Committed` line, which count as committed.

        A crash may have lost the `Committed` line but not the commit. Within the current boot, its absence means that
        no response was sent: the line is written before the response. `boot`: the current boot; empty: unknown.
        """
        return [line for unit in self._unconfirmed.values() for line in unit if not boot or line.boot != boot]


def _format_time(moment: datetime) -> str:
    return moment.isoformat(timespec="microseconds")


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=8).hexdigest().encode()
