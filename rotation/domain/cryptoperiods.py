"""The date of a scheduled rotation, from the key's age, the credential's jitter and the window. PURE."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from keyvault.domain.errors import Fault
from rotation.domain.windows import LOOK_AHEAD, Window

MAX_DAYS = 3_650
_DAY = timedelta(days=1)
_FIRST_DELAY = timedelta(minutes=1)
_DOUBLINGS = 11
"""Number of refusals after which the delay no longer doubles: it exceeds a day by then."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of a schedule, in days.

    `cryptoperiod_days`: maximum time a key is in use. `jitter_days`: the rotation begins up to that much earlier, so
    that keys activated on one day are not all replaced on one day. `lead_days`: how long before its beginning the
    rotation is requested. `window`: when it may begin.
    """

    cryptoperiod_days: int
    jitter_days: int = 0
    lead_days: int = 0
    window: Window | None = None


@dataclass(frozen=True, slots=True)
class NextDate:
    """The dates of a key's next rotation.

    `due_at`: end of the period less the jitter. `begins_at`: the opening chosen for it; None: there is none.
    `ask_at`: when to request it. `ends_at`: the end of the cryptoperiod.
    """

    due_at: datetime
    begins_at: datetime | None
    ask_at: datetime
    ends_at: datetime

    @property
    def is_late(self) -> bool:
        """Whether the window has no opening within the cryptoperiod."""
        return self.begins_at is None or self.begins_at > self.ends_at


def jitter_of(credential_id: str, jitter_days: int) -> timedelta:
    """Return the credential's jitter, 0 to `jitter_days`, in whole seconds; deterministic per credential."""
    drawn = int.from_bytes(hashlib.sha256(credential_id.encode()).digest()[:8])
    return timedelta(seconds=drawn % (jitter_days * 86_400 + 1))


def next_date(terms: Terms, credential_id: str, activated_at: datetime) -> NextDate:
    """Return the dates of a key that was activated at `activated_at`.

    If the window stays closed from the due date to the end of the cryptoperiod, the rotation begins earlier, in the
    second half of the period. Without an opening there, it begins late.
    """
    period = timedelta(days=terms.cryptoperiod_days)
    ends_at = activated_at + period
    due_at = ends_at - jitter_of(credential_id, terms.jitter_days)
    begins_at = _fit(terms.window, due_at, ends_at, activated_at + period / 2)
    ask_at = (begins_at or due_at) - timedelta(days=terms.lead_days)
    return NextDate(due_at, begins_at, ask_at, ends_at)


def _fit(window: Window | None, due_at: datetime, ends_at: datetime, earliest_at: datetime) -> datetime | None:
    if window is None:
        return due_at
    first = window.next_opening(due_at)
    if first is not None and first <= ends_at:
        return first
    at = due_at
    while at > earliest_at:
        at = max(at - _DAY, earliest_at)
        opening = window.next_opening(at)
        if opening is not None and opening <= ends_at:
            return opening
    return first


def delay_after(refusals: int) -> timedelta:
    """Return the delay before a worker retries a request after this many consecutive refusals: a minute up to a day."""
    doublings: int = min(refusals - 1, _DOUBLINGS)
    return min(_FIRST_DELAY * float(2**doublings), _DAY)


def find_term_faults(terms: Terms, now: datetime) -> Iterator[Fault]:
    """Yield each reason why a schedule cannot be met. `windows` checks the window's shape before."""
    if not 1 <= terms.cryptoperiod_days <= MAX_DAYS:
        yield Fault("/cryptoperiod_days", f"1 to {MAX_DAYS}")
        return
    if not 0 <= terms.jitter_days < terms.cryptoperiod_days:
        yield Fault("/jitter_days", "0 or more, and less than the cryptoperiod")
        return
    if not 0 <= terms.lead_days < terms.cryptoperiod_days - terms.jitter_days:
        yield Fault("/lead_days", "0 or more, and less than the cryptoperiod minus the jitter")
    if terms.window is None:
        return
    closed = _find_long_closure(terms.window, terms.cryptoperiod_days, now)
    if closed is not None:
        since, opens_at = closed
        until = "onwards" if opens_at is None else f"until {opens_at:%Y-%m-%d %H:%M} UTC"
        yield Fault("/window", f"closed from {since:%Y-%m-%d %H:%M} {until}, which is longer than the cryptoperiod")


def _find_long_closure(window: Window, days: int, now: datetime) -> tuple[datetime, datetime | None] | None:
    """Find a closure of the window longer than `days`, within `LOOK_AHEAD`: its start, and its end or None.

    The search samples at every fiftieth of `days`, so a closure must be longer by that much to be found.
    """
    longest = timedelta(days=days)
    at, last = now, now + LOOK_AHEAD
    while at <= last:
        opens_at = window.next_opening(at)
        if opens_at is None or opens_at - at > longest:
            return at, opens_at
        at = opens_at + longest / 50
    return None
