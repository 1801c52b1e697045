"""The time of the second factor in a session.

Without it a session reaches nothing but the page of the second factor. Sensitive actions require a recent one.
"""

from datetime import UTC, datetime, timedelta
from typing import Any, Final

STEP_UP: Final = timedelta(minutes=5)
"""Maximum age of a second factor for a sensitive action."""

_SECOND_FACTOR_AT: Final = "second_factor_at"


def note_second_factor(session: Any, now: datetime) -> None:
    """Record in the session that a second factor was checked, and give the session a new key.

    Raises SessionInterrupted if the session was ended meanwhile.
    """
    session[_SECOND_FACTOR_AT] = int(now.timestamp())
    session.replace_key()


def forget_second_factor(session: Any) -> None:
    session.pop(_SECOND_FACTOR_AT, None)


def has_passed_second_factor(session: Any) -> bool:
    return _checked_at(session) is not None


def is_fresh(session: Any, now: datetime) -> bool:
    """Whether a second factor was checked within STEP_UP."""
    checked_at = _checked_at(session)
    return checked_at is not None and now - checked_at < STEP_UP


def _checked_at(session: Any) -> datetime | None:
    seconds = session.get(_SECOND_FACTOR_AT)
    return datetime.fromtimestamp(seconds, UTC) if isinstance(seconds, int) else None
