"""Uses of keys that were decided from memory, until the service has stored them."""

import json
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

MAX_ROWS = 20_000
"""Maximum rows that wait for a report. Beyond it, requests are decided by the service, which counts them itself."""

MAX_REPORTED = 100
"""Maximum rows of one report."""

_MAX_BYTES = 60_000
"""Maximum size of the rows of one report as JSON, in bytes. The service reads bodies of 64 KiB."""

_MAX_TEXT = 120
_MAX_AGE_SECONDS = 23 * 3600
"""Age from which the service refuses a use, with a margin, in seconds."""

UseKey = tuple[str, str, str, str, str]
"""Key id, endpoint, client address, user agent and origin."""


@dataclass(slots=True)
class _CountedUse:
    """How often and when a key was used. Times are Unix times, in seconds."""

    count: int
    first_at: float
    last_at: float


@dataclass(slots=True)
class LocalReport:
    """A numbered report. The service ignores a number that it has stored, so a report is sent until it is answered."""

    number: int
    flushed_through: float
    rows: list[dict[str, Any]]


class LocalUses:
    """Counts uses, and makes reports of them. The caller holds a lock around each method.

    Times are Unix times by one clock, in seconds. `at` of the constructor: there is no use before it.
    """

    def __init__(self, at: float) -> None:
        self._rows: dict[UseKey, _CountedUse] = {}
        self._waiting: deque[list[dict[str, Any]]] = deque()
        self._waiting_rows = 0
        self._number = 0
        self._unanswered: LocalReport | None = None
        self._flushed_through = self._through = at

    @property
    def has_room(self) -> bool:
        return len(self._rows) + self._waiting_rows < MAX_ROWS

    def shift(self, seconds: float) -> None:
        """Move the times of what is not in a report yet, after a correction of the clock that they came from."""
        self._flushed_through += seconds
        self._through += seconds
        for row in self._rows.values():
            row.first_at += seconds
            row.last_at += seconds

    def count(self, key: UseKey, at: float) -> None:
        row = self._rows.get(key)
        if row is None:
            self._rows[key] = _CountedUse(1, at, at)
        else:
            row.count += 1
            row.last_at = at

    def begin_report(self, at: float) -> None:
        """Take what was counted. Every use until `at` is in the reports that follow."""
        rows, self._rows, self._through = self._rows, {}, at
        described = [_describe(key, row) for key, row in rows.items() if at - row.first_at < _MAX_AGE_SECONDS]
        self._waiting_rows += len(described)
        size = 0
        for number, row in enumerate(described):
            length = len(json.dumps(row)) + len(", ")
            if number == 0 or size + length > _MAX_BYTES or len(self._waiting[-1]) == MAX_REPORTED:
                self._waiting.append([])
                size = 0
            self._waiting[-1].append(row)
            size += length

    def next_report(self) -> LocalReport:
        """Return the report to send: the previous one until it is answered, because the service may have stored it.

        It has no rows when everything was stored.
        """
        if self._unanswered is None:
            rows = self._waiting.popleft() if self._waiting else []
            self._waiting_rows -= len(rows)
            # Only the last report may say that everything is flushed.
            through = self._flushed_through if self._waiting else self._through
            self._unanswered = LocalReport(self._number + 1, through, rows)
        return self._unanswered

    def note_stored(self, report: LocalReport) -> bool:
        """Note that the service has stored a report. Returns whether there is another one to send."""
        self._number, self._flushed_through, self._unanswered = report.number, report.flushed_through, None
        return bool(self._waiting)

    def drop(self, numbers: set[int]) -> None:
        """Drop rows of the report that the service has refused, and not stored. The others are in the next report."""
        if self._unanswered is not None:
            kept = [row for number, row in enumerate(self._unanswered.rows) if number not in numbers]
            if kept:
                self._waiting.appendleft(kept)
                self._waiting_rows += len(kept)
            self._unanswered = None


def format_time(at: float) -> str:
    """Return `2026-11-23T09:30:00Z` of a time in seconds since 1970."""
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")


def _describe(key: UseKey, row: _CountedUse) -> dict[str, Any]:
    key_id, endpoint, source, user_agent, origin = key
    return {
        "key_id": key_id,
        "endpoint": endpoint,
        "source": source,
        "user_agent": user_agent[:_MAX_TEXT],
        "origin": origin[:_MAX_TEXT],
        "outcome": "allowed",
        "count": row.count,
        "first_at": format_time(row.first_at),
        "last_at": format_time(row.last_at),
    }
