"""The calendar of scheduled rotations: a month with the load of each day and its blackouts, and the dates below it."""

from calendar import Calendar
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from itertools import groupby
from typing import Any
from urllib.parse import urlencode

from django.contrib.admin import AdminSite
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.safestring import SafeString

from keyvault.admin.framework.components import Day, MonthGrid
from keyvault.admin.framework.enforcement import operator_of
from keyvault.admin.framework.pages import page
from keyvault.admin.framework.shown_environment import environment_of
from keyvault.admin.framework.widgets import NOTHING, Link, Table, badge, counted, link, moment
from keyvault.domain.environments import Environment
from rotation.admin.schedule_widgets import credential_link
from rotation.services.schedules.calendar import (
    MAX_COUNTED,
    CalendarBlackout,
    CalendarPage,
    ScheduledDate,
    count_days,
    list_blackouts,
    list_next,
    start_of_day,
)
from rotation.services.schedules.candidates import DatePosition

_LOOKAHEAD = timedelta(days=90)
"""Period of the list, if neither a day nor a month is chosen."""

MAX_DATES = 100
"""Maximum number of dates, and of credentials without a date, that a page lists."""

_YEARS_AHEAD = 20
"""Number of years that the calendar shows. A cryptoperiod has at most ten."""

_TICK = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class _Query:
    """What the query string chooses. Unknown values are ignored.

    `month`: its first day. `day`: only dates that are requested on it. `after`: where the page of the list begins.
    `is_shown_alone`: the environment is the one that the operator has chosen for all pages.
    """

    environment: Environment | None
    is_shown_alone: bool
    merchant: str | None
    month: date
    day: date | None
    has_month: bool
    after: DatePosition | None
    base: str

    def url_with(self, **changes: object) -> str:
        """Return the address with these values, without a day and a position unless they are among them."""
        kept = {"environment": self.environment, "merchant": self.merchant}
        chosen = {**kept, **changes}
        return f"{self.base}?{urlencode({name: value for name, value in chosen.items() if value})}"

    def url_of_month(self, month: date) -> str:
        return self.url_with(month=f"{month:%Y-%m}")


def calendar_view(site: AdminSite, request: HttpRequest, base: str, crumbs: Sequence[Link]) -> HttpResponse:
    """Show the calendar, filtered by `environment`, `merchant`, `month` and `day` of the query string.

    The environment that the operator has chosen for all pages goes before the one of the query string.

    `base`: address of the page.
    """
    now = datetime.now(UTC)
    query = _read_query(request, base, now.date())
    scope = operator_of(request).scope.narrowed_to(query.merchant, query.environment)
    days = _days_of(query.month)
    counts = count_days(query.month, days, scope)
    blackouts = list_blackouts(start_of_day(query.month), start_of_day(query.month + timedelta(days=days)))
    since, until = _period(query, now)
    is_limited = query.day is not None or query.has_month
    shown = list_next(now, until, scope, query.after or since, is_by_request=is_limited, most=MAX_DATES)
    context = {
        "title": "Calendar of rotations",
        "environment_badge": query.environment,
        "lead": _describe(query),
        "notes": list(_notes(shown)),
        "grid": _month_grid(query, counts, blackouts, now.date()),
        "sections": [*_blackouts_table(blackouts), *date_tables(shown.dates, query.day)],
        "links": list(_links(query, shown.after)),
        "crumbs": crumbs,
        "page_environment": query.environment,
    }
    return page(site, request, "calendar", context)


def _read_query(request: HttpRequest, base: str, today: date) -> _Query:
    shown, value = environment_of(request), request.GET.get("environment", "")
    day = _read_date(request.GET.get("day", ""), today)
    month = _read_date(f"{request.GET.get('month', '')}-01", today)
    return _Query(
        shown or (Environment(value) if value in {env.value for env in Environment} else None),
        shown is not None,
        request.GET.get("merchant") or None,
        (day or month or today).replace(day=1),
        day,
        month is not None,
        read_position(request.GET.get("after", "")),
        base,
    )


def _read_date(text: str, today: date) -> date | None:
    """Return the day of `YYYY-MM-DD`; None for any other text, and for a day that is too far away."""
    try:
        found = date.fromisoformat(text)
    except ValueError:
        return None
    return found if abs(found.year - today.year) <= _YEARS_AHEAD else None


def _days_of(month: date) -> int:
    return (_next_month(month) - month).days


def _next_month(month: date) -> date:
    return (month + timedelta(days=31)).replace(day=1)


def _period(query: _Query, now: datetime) -> tuple[DatePosition | None, datetime]:
    """Return the position before the first date of the list, None for all until its end, and its end."""
    if query.day is not None:
        begins_at = start_of_day(query.day)
        return (begins_at, ""), begins_at + timedelta(days=1) - _TICK
    if not query.has_month:
        return None, now + _LOOKAHEAD
    begins_at = start_of_day(query.month)
    return (begins_at, ""), start_of_day(_next_month(query.month)) - _TICK


def _describe(query: _Query) -> str:
    whose = "" if query.merchant is None else f" of {query.merchant}"
    if query.day is not None:
        period = f"requested on {query.day:%-d %B %Y}"
    elif query.has_month:
        period = f"requested in {query.month:%B %Y}"
    else:
        period = f"that start within {_LOOKAHEAD.days} days"
    return f"Scheduled rotations{whose} {period}. All times are UTC."


def _notes(shown: CalendarPage) -> Iterable[str]:
    if shown.after is not None:
        yield f"This page lists {MAX_DATES} dates. Show later dates, or choose a day, an environment or a merchant."
    if shown.has_more_undated:
        yield f"{MAX_DATES} credentials without a date are shown. Choose an environment or a merchant to see others."


def _month_grid(query: _Query, counts: Sequence[int], blackouts: Sequence[CalendarBlackout], today: date) -> MonthGrid:
    most = max(counts)
    weeks = Calendar().monthdatescalendar(query.month.year, query.month.month)
    earlier, later = (query.month - timedelta(days=1)).replace(day=1), _next_month(query.month)
    return MonthGrid(
        f"{query.month:%B %Y}",
        [
            [
                _day(query, day, counts[day.day - 1], most, blackouts, today)
                if day.month == query.month.month
                else None
                for day in week
            ]
            for week in weeks
        ],
        Link(f"{earlier:%B}", query.url_of_month(earlier)),
        Link(f"{later:%B}", query.url_of_month(later)),
        "rotations requested per day",
    )


def _day(query: _Query, day: date, count: int, most: int, blackouts: Sequence[CalendarBlackout], today: date) -> Day:
    begins_at = start_of_day(day)
    names = sorted(
        {
            each.calendar
            for each in blackouts
            if each.begins_at < begins_at + timedelta(days=1) and each.ends_at > begins_at
        }
    )
    shown = f"{MAX_COUNTED:,}+" if count > MAX_COUNTED else f"{count:,}"
    blackout = f"; blackout {', '.join(names)}" if names else ""
    return Day(
        day.day,
        query.url_with(day=day.isoformat()),
        f"{day:%B}: {shown} {'rotation' if count == 1 else 'rotations'}{blackout}",
        shown if count else "",
        0 if not count else 1 + min(3, 4 * count // (most + 1)),
        day == today,
        day == query.day,
        names,
    )


def _blackouts_table(blackouts: Sequence[CalendarBlackout]) -> Iterable[Table]:
    if blackouts:
        rows = [
            [
                link(reverse("admin:rotation_blackoutcalendar_change", args=[each.calendar]), each.calendar),
                f"{each.begins_at:%a %-d %b %H:%M}",
                f"{each.ends_at:%a %-d %b %H:%M}",
                each.why or NOTHING,
            ]
            for each in sorted(blackouts, key=lambda each: each.begins_at)
        ]
        yield Table("Blackouts", ["calendar", "from (UTC)", "until (UTC)", "reason"], rows)


def _links(query: _Query, after: DatePosition | None) -> Iterable[Link]:
    """Yield links to later dates, and to the calendar with other filters."""
    when: dict[str, object] = {"day": query.day} if query.day else {}
    if not query.day and query.has_month:
        when = {"month": f"{query.month:%Y-%m}"}
    if after is not None:
        yield Link("Later dates", query.url_with(after=write_position(after), **when))
    if when:
        yield Link("Show the next dates", query.url_with())
    for env in (None, *(each.value for each in Environment)):
        if env != query.environment and not query.is_shown_alone:
            yield Link(f"Show {env or 'both environments'}", query.url_with(environment=env, **when))
    if query.merchant is not None:
        yield Link("Show all merchants", query.url_with(merchant=None, **when))


def date_tables(dates: list[ScheduledDate], day: date | None) -> Iterable[Table]:
    """Yield a table of the day, or one per month; blocked rotations without a date come first."""
    columns = ["starts (UTC)", "account", "credential", "state", "requested", "reason"]

    def title_of(each: ScheduledDate) -> str:
        if day is not None:
            return f"{day:%A, %-d %B %Y}"
        return f"{each.begins_at:%B %Y}" if each.begins_at else "Blocked, without a date"

    for title, found in groupby(dates, title_of):
        listed = list(found)
        yield Table(title, columns, [_cells(each) for each in listed], aside=counted(len(listed), "rotation"))
    if not dates:
        yield Table(
            "No rotations",
            columns,
            [],
            empty="No scheduled rotations in this period. Put keys on a schedule to see them here.",
        )


def _cells(each: ScheduledDate) -> list[Any]:
    return [
        f"{each.begins_at:%a %-d %b %H:%M}" if each.begins_at else NOTHING,
        f"{each.merchant_id}/{each.environment}",
        credential_link(each.credential_id, each.label),
        _state_link(each),
        moment(each.ask_at, missing="already requested" if each.rotation_id else NOTHING),
        each.why,
    ]


def _state_link(each: ScheduledDate) -> SafeString:
    if each.rotation_id is None:
        return badge(each.state)
    return link(reverse("admin:rotation_rotation_change", args=[each.rotation_id]), badge(each.state))


def write_position(position: DatePosition) -> str:
    """Return the position as the query string has it."""
    ask_at, credential_id = position
    return f"{ask_at.isoformat()} {credential_id}"


def read_position(text: str) -> DatePosition | None:
    """Return the position that `write_position` wrote; None for any other text."""
    ask_at, _, credential_id = text.partition(" ")
    try:
        return datetime.fromisoformat(ask_at).astimezone(UTC), credential_id
    except (ValueError, OverflowError):
        return None
