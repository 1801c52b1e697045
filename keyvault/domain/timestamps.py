"""The one text form of a time: RFC 3339 in UTC with `Z`."""

from datetime import UTC, datetime
from typing import overload


@overload
def format_timestamp(at: datetime, timespec: str = ...) -> str: ...


@overload
def format_timestamp(at: None, timespec: str = ...) -> None: ...


def format_timestamp(at: datetime | None, timespec: str = "auto") -> str | None:
    """Format an aware time, such as `2026-11-23T09:30:00Z`.

    `timespec`: as in `datetime.isoformat`; by default, fractions of a second appear only if they are not zero.
    """
    return None if at is None else at.astimezone(UTC).isoformat(timespec=timespec).replace("+00:00", "Z")
