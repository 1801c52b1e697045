"""HTML for the values on console pages: states, times, ids and links. This module escapes every value."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.timezone import now as django_now

from keyvault.domain.timestamps import format_timestamp

NOTHING = "none"


@dataclass(frozen=True, slots=True)
class FactTable:
    """Labels with values. A value is text, which the template escapes, or HTML from this module.

    `aside`: text or HTML in the head of the card.
    """

    title: str
    rows: Sequence[tuple[str, Any]]
    aside: Any = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under column headings; `empty` is shown when there are no rows.

    `aside`: text or HTML in the head of the card.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    empty: str = "None."
    aside: Any = ""


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference that an approval makes. `before`, `after`: text or HTML of this module.

    `is_unusual`: the requester chose something else than the default.
    """

    label: str
    before: Any
    after: Any
    is_unusual: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    label: str
    url: str


@dataclass(frozen=True, slots=True)
class Step:
    """A state in a timeline; `place` is `done`, `current`, `stopped` or `ahead`. `note`: a line below it."""

    label: str
    place: str
    at: datetime | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Detail:
    """Contents of the page of a row, except its actions. `alarms` and `notes` are plain text at the top.

    Args:
        sections: `FactTable`, `Table` or the components `Card`, `Columns` and `Fold`.
        lead: text or HTML below the title.
        banner: a `Banner`: what the page waits for. Its buttons are not repeated among the actions.
        crumbs: links between the list and the row.
        offered: the row actions that the operator may run, if the page has found them; None: they are found now.
    """

    title: str
    state: str
    sections: Sequence[Any]
    notes: Sequence[str] = ()
    alarms: Sequence[str] = ()
    steps: Sequence[Step] = ()
    refresh_seconds: int | None = None
    lead: Any = ""
    banner: Any = None
    crumbs: Sequence[Link] = ()
    offered: Sequence[Any] | None = None


@dataclass(frozen=True, slots=True)
class Extras:
    """Links, sections, and badges beside the title that another model admin adds to the page of a row."""

    links: Sequence[Link] = ()
    sections: Sequence[Any] = ()
    badges: Sequence[SafeString] = ()


@dataclass(frozen=True, slots=True)
class KeyDates:
    """When the key of a credential is replaced.

    `cryptoperiod`: for how long its key may be used; None: it has no limit. `next_rotation`: text or HTML.
    """

    cryptoperiod: timedelta | None
    next_rotation: Any


@dataclass(frozen=True, slots=True)
class Line:
    """A row in a list of several kinds. `about`: the page that a notice reports on, if any."""

    url: str
    label: str
    detail: str
    at: datetime | None = None
    about: str = ""


_TONES = {
    "good": "active current applied issued completed complete confirmed done allowed reviewed used accepted delivered "
    "silent passed untried enabled seen holds",
    "wait": "pending awaiting_approval suspended quarantine rolling_back pre_activation not_reviewed withdrawn cleared "
    "paused skipped started due waiting unused not_checked retiring",
    "bad": "compromised emergency bypass_not_reviewed rejected stalled overdue not_schedulable halted refused "
    "exposed_in_url exposed_in_browser failed disabled given_up unseen broken unsigned lost stale",
    "info": "approved running scheduled staged publishing overlap awaiting_proof revoking rotating",
}
_TONE_OF = {state: tone for tone, states in _TONES.items() for state in states.split()}


def badge(state: str, tone: str = "") -> SafeString:
    """Render a state as a badge; the meaning does not depend on the color.

    Args:
        tone: `good`, `wait`, `bad`, `info` or `dim`; empty: that of the state.
    """
    tone = tone or _TONE_OF.get(state, "dim")
    return format_html('<span class="badge badge-{} badge-{}">{}</span>', state, tone, state.replace("_", " "))


def moment(at: datetime | None, *, missing: str = NOTHING) -> SafeString:
    """Render a time relative to now, with the exact time in UTC in the title; a script adds the local time."""
    if at is None:
        return format_html('<span class="quiet">{}</span>', missing)
    exact = f"{at:%Y-%m-%d %H:%M:%S} UTC"
    return format_html('<time datetime="{}" title="{}">{}</time>', format_timestamp(at), exact, _distance(at))


def identifier(text: object) -> SafeString:
    """Render an id or digest in monospace with a button that copies it."""
    return format_html(
        '<span class="id"><code>{0}</code><button type="button" class="copy" data-copy="{0}" aria-label="Copy {0}" '
        "hidden>copy</button></span>",
        text,
    )


def copy_button(text: str, label: str) -> SafeString:
    """Render a button that copies the text; a script shows it."""
    return format_html('<button type="button" class="button" data-copy="{}" hidden>{}</button>', text, label)


def noted(value: object, note: object) -> SafeString:
    """Render a value of a table with a line below it."""
    return format_html('{}<span class="cell-note">{}</span>', value, note)


def link(url: str, label: object) -> SafeString:
    return format_html('<a href="{}">{}</a>', url, label)


def mono(text: object) -> SafeString:
    """Render an id or digest in monospace."""
    return format_html("<code>{}</code>", text)


def seconds(count: int | None) -> str:
    """Format a period in seconds exactly, in the largest units."""
    if count is None:
        return NOTHING
    parts = []
    for name, size in (("day", 86_400), ("hour", 3_600), ("minute", 60), ("second", 1)):
        whole, count = divmod(count, size)
        if whole:
            parts.append(f"{whole} {name}" if whole == 1 else f"{whole} {name}s")
    return " ".join(parts) or "none"


_MAX_RELATIVE = timedelta(days=30)
"""Maximum distance of a time that is shown relative to now. Others are dates."""


def _distance(at: datetime) -> str:
    distance = at - django_now()
    if abs(distance) > _MAX_RELATIVE:
        return f"{at:%-d %b %Y}"
    if abs(distance) < timedelta(minutes=1):
        # Without seconds, so that a live page changes once a minute.
        return "just now" if distance.total_seconds() <= 0 else "in a moment"
    text = duration(abs(distance))
    return f"{text} ago" if distance.total_seconds() <= 0 else f"in {text}"


def counted(number: int, noun: str) -> str:
    """Format a number with its noun, such as `1 key` and `1,200 keys`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def duration(length: timedelta) -> str:
    """Format a period in its largest unit, such as `38 min`."""
    total = int(length.total_seconds())
    for name, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if total >= size:
            return f"{total // size} {name}"
    return f"{total} s"
