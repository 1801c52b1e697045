"""Rotation schedules in the console, and the calendar of scheduled rotations."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from django.contrib import admin
from django.db.models import Model, Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, path, reverse

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.scopes import EVERYWHERE, AccessScope
from keyvault.admin.framework.actions import (
    ActionResult,
    Cleaned,
    CreateAction,
    RowAction,
    from_query,
    pause_action,
    resume_action,
    run_service,
)
from keyvault.admin.framework.columns import badge_column
from keyvault.admin.framework.enforcement import may
from keyvault.admin.framework.filters import state_filter
from keyvault.admin.framework.four_eyes import requester_name
from keyvault.admin.framework.model_admin import ConsoleModelAdmin
from keyvault.admin.framework.widgets import (
    NOTHING,
    Detail,
    Extras,
    FactTable,
    KeyDates,
    Link,
    Table,
    badge,
    link,
    moment,
    mono,
)
from keyvault.domain.environments import Environment
from keyvault.domain.keys import KeyKind
from keyvault.models import Account, Credential, Merchant
from rotation.admin.schedule_calendar import calendar_view
from rotation.admin.schedule_forms import EditForm, ScheduleForm, scope_from, terms_from
from rotation.admin.schedule_widgets import (
    format_schedule_window,
    format_scope,
    next_facts,
    next_rotation_cell,
    rotations_table,
    schedule_facts,
    schedules_in_scope,
)
from rotation.admin.standing_approvals import approval_state, request_action
from rotation.models import RotationSchedule
from rotation.services.schedules.calendar import find_next, list_next_of
from rotation.services.schedules.reports import state_of_schedule
from rotation.services.schedules.schedules import (
    disable_schedule,
    enable_schedule,
    find_draft,
    find_unreadable,
    partial_draft,
    place_of,
    save_schedule,
    scope_of,
)

_MAX_APPROVALS = 10
"""Maximum number of standing approvals on a schedule's page, the latest first."""


def _save(grant: Grant, cleaned: Cleaned) -> ActionResult:
    row = save_schedule(grant, scope_from(cleaned), terms_from(cleaned))
    return ActionResult("Schedule saved. The calendar shows its rotations.", row=row)


def _edit(grant: Grant, row: RotationSchedule, cleaned: Cleaned) -> ActionResult:
    saved = find_draft(row) or partial_draft(row)
    save_schedule(grant, scope_of(row), terms_from(cleaned, saved.overrides), known=row)
    return ActionResult("Schedule saved. Its rotations are requested in your name from now on.")


@admin.register(RotationSchedule)
class RotationScheduleAdmin(ConsoleModelAdmin):
    view_permissions = (P.ROTATIONS_READ,)
    menu, singular, plural = "Schedules", "Schedule", "Schedules"
    change_list_template = "console/change_list_more.html"
    create_actions = (
        CreateAction(
            "save",
            "Put keys on a schedule",
            P.SCHEDULES_WRITE,
            ScheduleForm,
            _save,
            "Replaces private keys before they exceed the cryptoperiod. The most specific enabled schedule applies: "
            "credential, then merchant, then environment. Its rotations are requested in your name, so they need the "
            "same approval as your own.",
            "Save schedule",
            account_of=lambda cleaned: scope_from(cleaned).place,
            preset=lambda query: (
                from_query("environment", "merchant", "credential")(query)
                | {"jitter_days": 0, "lead_days": 0, "time_zone": "UTC"}
            ),
        ),
    )
    row_actions = (
        RowAction(
            "edit",
            "Edit",
            P.SCHEDULES_WRITE,
            _edit,
            "Rotations already requested stay unchanged.",
            form=EditForm,
        ),
        pause_action(
            "disable",
            "Disable",
            P.SCHEDULES_WRITE,
            run_service(disable_schedule, "Schedule disabled. The next broader schedule applies, if there is one."),
            "The schedule requests no more rotations. Rotations already requested continue.",
            is_available=lambda row: row.is_enabled,
        ),
        resume_action(
            "enable",
            "Enable",
            P.SCHEDULES_WRITE,
            run_service(enable_schedule, "Schedule enabled. Its rotations are requested in your name from now on."),
            "The schedule requests due rotations again, in your name.",
            is_available=lambda row: not row.is_enabled,
        ),
        request_action,
    )

    list_display = ("scope", "environment_badge", "every", "window_text", "calendar", "state", "author_name")
    list_filter = (state_filter({"enabled": Q(is_enabled=True), "disabled": Q(is_enabled=False)}), "environment")
    search_fields = ("=account__merchant__merchant_id", "=credential__credential_id", "^credential__label")
    sortable_by = ()
    search_help_text = "By merchant or credential."
    ordering = ("environment", "account__merchant_id", "credential_id")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        rows = super().get_queryset(request)
        return rows.select_related("account__merchant", "credential__account__merchant", "calendar", "author")

    def get_urls(self) -> list[URLPattern]:
        shown = self.guarded(self.view_permissions, ("GET", "HEAD"), self._calendar_view)
        return [path("calendar/", shown, name="rotation_rotationschedule_calendar"), *super().get_urls()]

    @admin.display(description="for")
    def scope(self, row: RotationSchedule) -> str:
        return format_scope(row)

    environment_badge = badge_column("environment", "environment")
    state = badge_column("state", state_of_schedule, ordering="is_enabled")

    @admin.display(description="every", ordering="cryptoperiod_days")
    def every(self, row: RotationSchedule) -> str:
        return f"{row.cryptoperiod_days} days"

    @admin.display(description="window")
    def window_text(self, row: RotationSchedule) -> str:
        return format_schedule_window(row)

    @admin.display(description="in the name of", ordering="author__username")
    def author_name(self, row: RotationSchedule) -> str:
        return row.author.get_username()

    def name_of(self, row: RotationSchedule) -> str:
        return format_scope(row)

    def rows_in_scope(self, rows: QuerySet[Any], scope: AccessScope) -> QuerySet[Any]:
        return rows if scope == EVERYWHERE else rows.filter(schedules_in_scope(scope))

    def account_of(self, row: RotationSchedule) -> Account | None:
        return place_of(row)

    def scope_of(self, row: RotationSchedule) -> AccessScope:
        return scope_of(row).within

    def requester_person_of(self, row: RotationSchedule) -> str:
        return row.author_person

    def summary(self, row: RotationSchedule) -> FactTable:
        fault = find_unreadable(row)
        rows = [("For", format_scope(row)), *schedule_facts(row), *([("Stalled", fault)] if fault else [])]
        return FactTable("Schedule", rows)

    def detail(self, request: HttpRequest, row: RotationSchedule) -> Detail:
        notes = (
            [] if row.is_enabled else ["This schedule is disabled. The next broader schedule applies, if there is one."]
        )
        requested = rotations_table("Latest rotations", row.rotations, "this schedule requests")
        sections: list[FactTable | Table] = [self.summary(row), *self._standing_approvals(row), requested]
        return Detail(title=self.name_of(row), state=state_of_schedule(row), sections=sections, notes=notes)

    def _standing_approvals(self, row: RotationSchedule) -> Iterable[Table]:
        if row.environment != Environment.PRODUCTION:
            return
        found = row.standing_approvals.select_related("requester").order_by("-created_at")[:_MAX_APPROVALS]
        yield Table(
            "Standing approvals",
            ["id", "state", "expires", "requested by", "reason"],
            [
                [
                    link(reverse("admin:rotation_standingapproval_change", args=[item.pk]), mono(item)),
                    badge(approval_state(item)),
                    moment(item.expires_at),
                    requester_name(item),
                    item.why or NOTHING,
                ]
                for item in found
            ],
            empty="No standing approval: a second person approves each rotation. The author of this schedule can "
            "request one.",
        )

    def extras_for(self, request: HttpRequest, row: Model) -> Extras | None:
        """Add the next scheduled rotation of a credential to its page, and links to the calendar and the schedules."""
        if isinstance(row, Merchant) and self.has_view_permission(request):
            return Extras(links=[Link("Calendar of rotations", f"{self._calendar_url()}?merchant={row.pk}")])
        if not isinstance(row, Account | Credential) or not self.has_view_permission(request):
            return None
        account = row if isinstance(row, Account) else row.account
        query = f"?environment={account.environment}&merchant={account.merchant_id}"
        links = [Link("Calendar of rotations", self._calendar_url() + query)]
        if may(request, P.SCHEDULES_WRITE, account):
            only = f"&credential={row.pk}" if isinstance(row, Credential) else ""
            links.append(Link("Put on a schedule", reverse("admin:rotation_rotationschedule_save") + query + only))
        if isinstance(row, Account) or row.kind != KeyKind.PRIVATE:
            return Extras(links=links) if isinstance(row, Account) else None
        now = datetime.now(UTC)
        return Extras(links=links, sections=[next_facts(find_next(row, now))])

    def find_key_dates(self, request: HttpRequest, credentials: Sequence[Credential]) -> Mapping[str, KeyDates]:
        if not self.has_view_permission(request):
            return {}
        found = list_next_of(credentials, datetime.now(UTC))
        return {pk: KeyDates(each.cryptoperiod, next_rotation_cell(each)) for pk, each in found.items()}

    # --- the calendar -------------------------------------------------------------------------------------------

    def list_context(self, request: HttpRequest) -> dict[str, Any]:
        page_links = [Link("Show calendar of rotations", self._calendar_url())]
        return {**super().list_context(request), "page_links": page_links}

    def _calendar_url(self) -> str:
        return reverse("admin:rotation_rotationschedule_calendar")

    def _calendar_view(self, request: HttpRequest) -> HttpResponse:
        return calendar_view(self.admin_site, request, self._calendar_url(), self._crumbs())
