"""The one text form of a time: RFC 3339 in UTC with `Z`."""

from datetime import UTC, datetime
from typing import overload


@overload
def format_timestamp(at: datetime) -> str: ...


@overload
def format_timestamp(at: None) -> None: ...


def format_timestamp(at: datetime | None) -> str | None:
    """Format an aware time, such as `2026-11-23T09:30:00Z`. Fractions of a second appear only if they are not zero."""
    return None if at is None else at.astimezone(UTC).isoformat().replace("+00:00", "Z")
