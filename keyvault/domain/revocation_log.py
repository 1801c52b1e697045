"""The lines of the revocation journal: what ended, written before its transaction commits, and whether it did commit.

A line is canonical JSON, a space and a checksum, so that a line which a crash tore is told from a damaged one: a torn
one is the last and has no line feed. A line with a line feed that does not read as it was written is damaged.

    {"accepted_by":"","at":…,"installation":"5e…","reason":"","what":"opened"} 1b…
    {"at":…,"boot":…,"id":…,"kind":"key","reason":…,"sequence":7,"state":…,"unit":"9f…","what":"ended"} 3c…
    {"unit":"9f…","what":"committed"} a0…
    {"unit":"c4…","what":"dropped"} 77…
    {"sequence":7,"what":"looked"} 51…
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime

from keyvault.domain.canonical import JsonValue, canonical_bytes


class DamagedLineError(ValueError):
    """A line that is not as it was written."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The installation that the journal belongs to, written when the file is made.

    `accepted_by` and `reason`: the operator who accepted that an earlier journal is lost, and why; empty: none was.
    """

    installation: str
    at: datetime
    accepted_by: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """Something that is revoked for ever. `state` and `reason` are a key's.

    `unit` names the transaction that a `Committed` tells of; empty: read from the database after its commit.
    `boot`: which run of the machine it was written in. `expires_at`: when a customer token would have ended by itself.
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
        """Whether it is good for nothing any more, revoked or not."""
        return self.expires_at is not None and self.expires_at <= now


@dataclass(frozen=True, slots=True)
class Committed:
    unit: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """The transaction had not committed long after it was written down. A `Committed`, even before it, outdoes it."""

    unit: str


@dataclass(frozen=True, slots=True)
class Looked:
    """Whatever ended up to this change of the database is in this journal."""

    sequence: int


Line = Opened | Ended | Committed | Dropped | Looked

_KINDS: dict[str, type[Line]] = {
    "opened": Opened,
    "ended": Ended,
    "committed": Committed,
    "dropped": Dropped,
    "looked": Looked,
}
_WORDS = {made: word for word, made in _KINDS.items()}


def line_bytes(line: Line) -> bytes:
    """With its line feed."""
    fields: dict[str, JsonValue] = {**asdict(line), "what": _WORDS[type(line)]}
    if isinstance(line, Ended | Opened):
        fields["at"] = _written(line.at)
    if isinstance(line, Ended):
        del fields["expires_at"]
        if line.expires_at is not None:
            fields["expires_at"] = _written(line.expires_at)
    body = canonical_bytes(fields)
    return body + b" " + _checksum(body) + b"\n"


def parse_line(text: bytes) -> Line:
    """Of a line without its line feed. Raises DamagedLineError."""
    body, _, checksum = text.rpartition(b" ")
    if checksum != _checksum(body):
        raise DamagedLineError("the checksum does not fit")
    try:
        fields = json.loads(body)
        made = _KINDS[fields.pop("what")]
        times = fields.keys() & {"at", "expires_at"}
        fields |= {name: datetime.fromisoformat(fields[name]) for name in times}
        return made(**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedLineError("it is none of ours") from error


@dataclass(slots=True)
class StandingLines:
    """Which lines may have been answered with a yes, as they are read one by one."""

    _waiting: dict[str, list[Ended]] = field(default_factory=dict)
    _dropped: dict[str, list[Ended]] = field(default_factory=dict)

    def add(self, line: Line) -> Sequence[Ended | Looked]:
        """What stands now that this line was read too."""
        if isinstance(line, Committed):
            return self._waiting.pop(line.unit, []) or self._dropped.pop(line.unit, [])
        if isinstance(line, Dropped):
            if unit := self._waiting.pop(line.unit, []):
                self._dropped[line.unit] = unit
            return []
        if isinstance(line, Ended) and line.unit:
            self._waiting.setdefault(line.unit, []).append(line)
            return []
        return [] if isinstance(line, Opened) else [line]

    def list_waiting(self, boot: str) -> list[list[Ended]]:
        """By transaction: what the running machine wrote and nobody settled. `boot`: as below; unknown: none."""
        return [unit for unit in self._waiting.values() if boot and unit[0].boot == boot]

    def list_unfinished(self, boot: str) -> list[Ended]:
        """What stands at the end of the journal though nobody noted the commit.

        Not what the running machine wrote: nobody was answered then, since the note comes before the answer. A
        machine that went down may have lost the note, and not the commit. `boot`: the one that runs; empty: unknown.
        """
        return [line for unit in self._waiting.values() for line in unit if not boot or line.boot != boot]


def _written(moment: datetime) -> str:
    return moment.isoformat(timespec="microseconds")


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=8).hexdigest().encode()
