"""HTML for the values on console pages: states, times, ids and links. This module escapes every value."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.timesince import timesince, timeuntil
from django.utils.timezone import now as django_now

NOTHING = "none"


@dataclass(frozen=True, slots=True)
class FactTable:
    """Labels with values. A value is text, which the template escapes, or HTML from this module."""

    title: str
    rows: Sequence[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under column headings; `empty` is shown when there are no rows."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    empty: str = "None."


@dataclass(frozen=True, slots=True)
class Link:
    label: str
    url: str


@dataclass(frozen=True, slots=True)
class Step:
    """A state in a timeline; `place` is `done`, `current`, `stopped` or `ahead`."""

    label: str
    place: str
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Detail:
    """Contents of the page of a row, except its actions. `alarms` and `notes` are plain text at the top."""

    title: str
    state: str
    sections: Sequence[FactTable | Table]
    notes: Sequence[str] = ()
    alarms: Sequence[str] = ()
    steps: Sequence[Step] = ()
    refresh_seconds: int | None = None

    @property
    def state_text(self) -> str:
        return self.state.replace("_", " ")


@dataclass(frozen=True, slots=True)
class Extras:
    """Links and sections that another model admin adds to the page of a row."""

    links: Sequence[Link] = ()
    sections: Sequence[FactTable | Table] = ()


@dataclass(frozen=True, slots=True)
class AttentionItem:
    """Rows that need the operator's attention.

    `lines` shows the first few. `count`: all of them, or the maximum that is counted, and then `has_more`.
    """

    title: str
    url: str
    count: int
    lines: Sequence["Line"] = field(default_factory=tuple)
    tone: str = "plain"
    has_more: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    url: str
    label: str
    detail: str
    at: datetime | None = None


def badge(state: str) -> SafeString:
    """Render a state as a badge; the meaning does not depend on the color."""
    return format_html('<span class="badge badge-{}">{}</span>', state, state.replace("_", " "))


def moment(at: datetime | None, *, missing: str = NOTHING) -> SafeString:
    """Render a time in UTC to the second, with the time relative to now."""
    if at is None:
        return format_html('<span class="quiet">{}</span>', missing)
    return format_html(
        '<time datetime="{}">{} UTC</time> <span class="quiet">{}</span>',
        at.isoformat(),
        f"{at:%Y-%m-%d %H:%M:%S}",
        _distance(at),
    )


def short_moment(at: datetime | None, *, missing: str = NOTHING) -> SafeString:
    """Render a time in UTC to the minute for a column, with the relative time in the title."""
    if at is None:
        return format_html('<span class="quiet">{}</span>', missing)
    text = f"{at:%Y-%m-%d %H:%M}"
    return format_html('<time datetime="{}" title="{}">{}</time>', at.isoformat(), _distance(at), text)


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


def _distance(at: datetime) -> str:
    now = django_now()
    if abs((at - now).total_seconds()) < 60:
        return "just now" if at <= now else "in a moment"
    return f"{timesince(at, now, depth=1)} ago" if at <= now else f"in {timeuntil(at, now, depth=1)}"
