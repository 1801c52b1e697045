"""Blackout calendars in the console: periods in which no scheduled rotation begins."""

from datetime import UTC, datetime
from typing import Any

from django.contrib import admin
from django.db.models import OuterRef, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.safestring import SafeString

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.scopes import AccessScope
from keyvault.admin.framework.actions import ActionResult, Cleaned, CreateAction, RowAction
from keyvault.admin.framework.choices import Choice, choices_page
from keyvault.admin.framework.enforcement import operator_of
from keyvault.admin.framework.model_admin import ConsoleModelAdmin
from keyvault.admin.framework.widgets import NOTHING, Detail, FactTable, Table, badge, link, moment, mono
from keyvault.models.row_count import RowCount
from rotation.admin.schedule_forms import CalendarForm, EditCalendarForm, periods_from
from rotation.admin.schedule_widgets import format_scope, schedules_in_scope
from rotation.models import BlackoutCalendar, RotationSchedule
from rotation.services.schedules.reports import state_of_schedule
from rotation.services.schedules.schedules import save_calendar

_MAX_SCHEDULES = 200
"""Maximum number of a calendar's schedules that a page reads."""


def _save_calendar(grant: Grant, cleaned: Cleaned) -> ActionResult:
    return ActionResult(
        "Blackout calendar saved.", row=save_calendar(grant, cleaned["name"], periods_from(cleaned["periods"]))
    )


def _edit_calendar(grant: Grant, row: BlackoutCalendar, cleaned: Cleaned) -> ActionResult:
    save_calendar(grant, row.name, periods_from(cleaned["periods"]), known=row)
    return ActionResult("Blackout calendar saved. It applies to rotations requested from now on.")


@admin.register(BlackoutCalendar)
class BlackoutCalendarAdmin(ConsoleModelAdmin):
    view_permissions = (P.ROTATIONS_READ,)
    menu, singular, plural = "Schedules", "Blackout calendar", "Blackout calendars"
    create_actions = (
        CreateAction(
            "save",
            "Create blackout calendar",
            P.SCHEDULES_WRITE,
            CalendarForm,
            _save_calendar,
            "Periods in which no scheduled rotation begins. Rotations in progress continue.",
            "Create blackout calendar",
            is_of_installation=True,
        ),
    )
    row_actions = (
        RowAction(
            "edit",
            "Edit",
            P.SCHEDULES_WRITE,
            _edit_calendar,
            "Rotations already requested keep the dates of their plan.",
            form=EditCalendarForm,
        ),
    )

    list_display = ("name", "count", "next_begin", "used_by")
    search_fields = ("name",)
    ordering = ("name",)

    def rows_in_scope(self, rows: QuerySet[Any], scope: AccessScope) -> QuerySet[Any]:
        """Return all rows: schedules of every merchant use them."""
        return rows

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Annotate `used`: how many enabled schedules in the operator's scope use the calendar."""
        seen = RotationSchedule.objects.filter(schedules_in_scope(operator_of(request).scope))
        using = seen.filter(calendar=OuterRef("pk"), is_enabled=True).order_by()
        used = RowCount(using.values("pk")[: _MAX_SCHEDULES + 1])
        rows: QuerySet[Any] = super().get_queryset(request).annotate(used=used)
        return rows

    @admin.display(description="periods")
    def count(self, row: BlackoutCalendar) -> int:
        return len(row.periods)

    @admin.display(description="next start")
    def next_begin(self, row: BlackoutCalendar) -> SafeString:
        now = datetime.now(UTC)
        ahead = (at for at, _ in _read(row) if at > now)
        return moment(next(ahead, None))

    @admin.display(description="enabled schedules")
    def used_by(self, row: Any) -> str:
        return f"more than {_MAX_SCHEDULES}" if row.used > _MAX_SCHEDULES else str(row.used)

    def summary(self, row: BlackoutCalendar) -> FactTable:
        return FactTable("Calendar", [("Name", mono(row)), ("Periods", len(row.periods))])

    def detail(self, request: HttpRequest, row: BlackoutCalendar) -> Detail:
        now = datetime.now(UTC)
        periods = [
            [
                f"{begins_at:%Y-%m-%d %H:%M}",
                f"{ends_at:%Y-%m-%d %H:%M}",
                each["why"] or NOTHING,
                "over" if ends_at <= now else "ahead" if begins_at > now else "now",
            ]
            for each, (begins_at, ends_at) in zip(row.periods, _read(row), strict=True)
        ]
        seen = row.schedules.filter(schedules_in_scope(operator_of(request).scope))
        schedules = seen.select_related("account__merchant", "credential__account__merchant").order_by("pk")
        found = list(schedules[: _MAX_SCHEDULES + 1])
        more = f", first {_MAX_SCHEDULES}" if len(found) > _MAX_SCHEDULES else ""
        using = [
            [
                link(reverse("admin:rotation_rotationschedule_change", args=[item.pk]), format_scope(item)),
                badge(state_of_schedule(item)),
            ]
            for item in found[:_MAX_SCHEDULES]
        ]
        return Detail(
            title=row.name,
            state="",
            sections=[
                Table("Periods", ["begins (UTC)", "ends (UTC)", "reason", "state"], periods),
                Table(f"Schedules that use this calendar{more}", ["for", "state"], using),
            ],
        )


def _read(row: BlackoutCalendar) -> list[tuple[datetime, datetime]]:
    return [
        (datetime.fromisoformat(each["begins_at"]), datetime.fromisoformat(each["ends_at"])) for each in row.periods
    ]


def _find_calendars(scope: AccessScope, words: str, limit: int) -> list[Choice]:
    """Find calendars by the beginning of their names. Every operator may read all of them."""
    names = BlackoutCalendar.objects.filter(name__startswith=words).order_by("name").values_list("name", flat=True)
    return [Choice(name, name) for name in names[:limit]]


CALENDAR_CHOICES = choices_page("calendars", (P.ROTATIONS_READ,), _find_calendars)
