"""Retries of a call: backoff with full jitter, Retry-After, and a budget that all calls of a client share."""

import random
import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from threading import Lock

BACKOFF_SECONDS = 0.5
MAX_BACKOFF_SECONDS = 8.0
_EARNED = 0.1
"""Retries that a call earns when its first attempt succeeds."""

WHOLE_SECONDS = re.compile(r"[0-9]{1,9}")
"""Matches the form of Retry-After in seconds."""

_random = random.SystemRandom()


def backoff(retry: int) -> float:
    """Return a random wait before the retry with this number, from 1, in seconds."""
    return _random.uniform(0, min(MAX_BACKOFF_SECONDS, BACKOFF_SECONDS * 2 ** min(retry - 1, 10)))


def parse_http_date(text: str | None) -> datetime | None:
    """Parse an HTTP date (RFC 9110, 5.6.7), such as a header `Date`. Returns None for other text."""
    if text is None:
        return None
    try:
        at = parsedate_to_datetime(text)
        return at.replace(tzinfo=at.tzinfo or UTC)
    except (ValueError, OverflowError, IndexError, TypeError):
        return None


def parse_retry_after(text: str | None, now: datetime) -> float | None:
    """Parse seconds or an HTTP date (RFC 9110, 10.2.3). Returns None for other text, and 0 for past dates.

    now: the time of the service, which may differ from that of this host.
    """
    if text is not None and WHOLE_SECONDS.fullmatch(text):
        return float(text)
    at = parse_http_date(text)
    return None if at is None else max((at - now).total_seconds(), 0.0)


def is_temporary(status: int | None, code: str | None) -> bool:
    """Whether the same request may succeed later. `status`: None without an answer."""
    return status in {None, 408, 429, 502, 503, 504} or (status == 409 and code == "idempotency_in_progress")


class RetryBudget:
    """Keeps many failing calls from multiplying the load of a service in trouble."""

    def __init__(self, retries: float) -> None:
        self._most = self._left = retries
        self._lock = Lock()

    def spend(self) -> bool:
        """Take one retry. Returns False if none is left."""
        with self._lock:
            # In floating point, ten times a tenth is a little less than one.
            if self._left < 1 - _EARNED / 2:
                return False
            self._left -= 1
            return True

    def earn(self) -> None:
        with self._lock:
            self._left = min(self._most, self._left + _EARNED)
