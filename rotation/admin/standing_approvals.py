"""Standing approvals of schedules in the console: requested on a schedule's page, decided by a second person here."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest
from django.urls import reverse

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.scopes import EVERYWHERE, AccessScope
from keyvault.admin.framework.actions import (
    ActionResult,
    Cleaned,
    ReasonForm,
    RowAction,
    Tone,
    VersionedForm,
    run_service,
)
from keyvault.admin.framework.attention import Attention
from keyvault.admin.framework.columns import badge_column, moment_column
from keyvault.admin.framework.enforcement import may, operator_of
from keyvault.admin.framework.four_eyes import (
    ApproveStoredForm,
    approvals_table,
    approve_action,
    reject_action,
    requester_column,
    requester_name,
    undecided_notes,
)
from keyvault.admin.framework.model_admin import ConsoleModelAdmin
from keyvault.admin.framework.widgets import (
    Detail,
    Difference,
    FactTable,
    Line,
    link,
    moment,
    mono,
)
from keyvault.domain.environments import Environment
from keyvault.models import Account
from rotation.admin.plan_fields import chosen_changes
from rotation.admin.schedule_widgets import format_scope, rotations_table, schedule_facts, schedules_in_scope
from rotation.models import RotationSchedule, StandingApproval, StandingApprovalState
from rotation.services.schedules.reports import state_of_approval
from rotation.services.schedules.schedules import find_draft, partial_draft, place_of, scope_of
from rotation.services.schedules.standing_approvals import (
    DEFAULT_DAYS,
    MAX_DAYS,
    approve_standing_approval,
    is_current,
    is_undecided,
    reject_standing_approval,
    request_standing_approval,
    withdraw_standing_approval,
)

A = StandingApprovalState


class StandingApprovalForm(VersionedForm):
    days = forms.IntegerField(
        min_value=1,
        max_value=MAX_DAYS,
        initial=DEFAULT_DAYS,
        label="Valid for days",
        help_text="After this time each rotation needs its own approval again.",
    )

    @classmethod
    def initial_for(cls, row: RotationSchedule) -> dict[str, Any]:
        return {"version": row.version, "days": DEFAULT_DAYS}


def _request(grant: Grant, row: RotationSchedule, cleaned: Cleaned) -> ActionResult:
    standing = request_standing_approval(grant, row, cleaned["days"])
    url = reverse("admin:rotation_standingapproval_change", args=[standing.pk])
    return ActionResult("Request submitted. A second person must approve it.", url=url)


request_action = RowAction(
    "request-standing-approval",
    "Request standing approval",
    P.SCHEDULES_WRITE,
    _request,
    "Once a second person approves, the rotations of this schedule need no approval of their own until the standing "
    "approval expires. Each change of the schedule or its blackout calendar voids it.",
    form=StandingApprovalForm,
    is_available=lambda row: row.is_enabled and row.environment == Environment.PRODUCTION,
    for_requester=True,
)
"""Action on a schedule's page. Only the schedule's author may request its standing approval."""


def _is_undecided(row: StandingApproval) -> bool:
    return is_undecided(row, datetime.now(UTC))


def approval_state(row: StandingApproval) -> str:
    return state_of_approval(row, datetime.now(UTC))


@admin.register(StandingApproval)
class StandingApprovalAdmin(ConsoleModelAdmin):
    view_permissions = (P.ROTATIONS_READ,)
    menu, singular, plural = "Schedules", "Standing approval", "Standing approvals"
    row_actions = (
        approve_action(
            P.ROTATIONS_APPROVE,
            approve_standing_approval,
            explain=lambda row: (
                f"You approve all rotations that this schedule requests until {row.expires_at:%Y-%m-%d %H:%M} UTC, "
                "with the plan below. They include those of credentials that are added later."
            ),
            approved="Approved. The schedule's rotations start without further approval.",
            is_undecided=_is_undecided,
            form=ApproveStoredForm,
        ),
        reject_action(
            P.ROTATIONS_APPROVE,
            run_service(reject_standing_approval, "Standing approval rejected."),
            "Each rotation of the schedule needs its own approval. The requester sees the reason.",
            is_available=_is_undecided,
        ),
        RowAction(
            "withdraw",
            "Withdraw",
            P.SCHEDULES_WRITE,
            run_service(withdraw_standing_approval, "Standing approval withdrawn."),
            "Rotations requested from now on need their own approval. Rotations in progress continue.",
            form=ReasonForm,
            is_available=lambda row: row.state in {A.AWAITING_APPROVAL, A.APPROVED},
            tone=Tone.DANGER,
        ),
    )

    list_display = ("scope", "state_badge", "expires", "requested_by", "created")
    list_filter = ("state", "schedule__environment")
    search_fields = (
        "=approval_id",
        "=schedule__account__merchant__merchant_id",
        "=schedule__credential__credential_id",
    )
    search_help_text = "By id, merchant or credential id."
    ordering = ("-created_at",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return (
            super()
            .get_queryset(request)
            .select_related(
                "requester",
                "schedule__account__merchant",
                "schedule__credential__account__merchant",
                "schedule__calendar",
                "schedule__author",
            )
        )

    state_badge = badge_column("state", approval_state, ordering="state")
    expires = moment_column("expires", "expires_at")
    requested_by = requester_column
    created = moment_column("requested", "created_at")

    @admin.display(description="for")
    def scope(self, row: StandingApproval) -> str:
        return format_scope(row.schedule)

    def name_of(self, row: StandingApproval) -> str:
        return f"Schedule for {format_scope(row.schedule)}"

    def rows_in_scope(self, rows: QuerySet[Any], scope: AccessScope) -> QuerySet[Any]:
        return rows if scope == EVERYWHERE else rows.filter(schedules_in_scope(scope, "schedule__"))

    def scope_of(self, row: StandingApproval) -> AccessScope:
        return scope_of(row.schedule).within

    def account_of(self, row: StandingApproval) -> Account | None:
        return place_of(row.schedule)

    def requester_person_of(self, row: StandingApproval) -> str:
        return row.requester_person

    def summary(self, row: StandingApproval) -> FactTable:
        """Return what the digest covers: the schedule's own facts, which are the approved ones while it is current."""
        schedule_url = reverse("admin:rotation_rotationschedule_change", args=[row.schedule_id])
        return FactTable(
            "Request",
            [
                ("Schedule", link(schedule_url, format_scope(row.schedule))),
                *schedule_facts(row.schedule),
                ("Expires", moment(row.expires_at)),
                ("Digest of the plan and the selection (SHA-256)", mono(row.plan_digest)),
                ("Requested by", requester_name(row)),
            ],
        )

    def detail(self, request: HttpRequest, row: StandingApproval) -> Detail:
        return Detail(
            title=self.name_of(row),
            state=approval_state(row),
            notes=list(_notes(request, row)),
            sections=[
                self.summary(row),
                approvals_table(row),
                rotations_table("Latest rotations under this approval", row.rotations, "this approval covers"),
            ],
        )

    def changes(self, row: StandingApproval) -> Iterable[Difference]:
        schedule = row.schedule
        yield Difference(
            f"Rotations of the schedule for {format_scope(schedule)}",
            "each needs an approval of its own",
            f"none needs one until {row.expires_at:%Y-%m-%d %H:%M} UTC",
        )
        overrides = (find_draft(schedule) or partial_draft(schedule)).overrides
        yield from chosen_changes(overrides, Environment(schedule.environment))

    def approval_items(self, request: HttpRequest) -> Iterable[Attention]:
        if not may(request, P.ROTATIONS_APPROVE):
            return
        now, me = Now(), operator_of(request).person
        asked = self.get_queryset(request).filter(
            state=A.AWAITING_APPROVAL, approval_expires_at__gt=now, expires_at__gt=now
        )
        others = asked.exclude(approvals__person=me).order_by("created_at")
        yield self.approval("Standing approvals to approve", others, f"?state__exact={A.AWAITING_APPROVAL}")

    def line_of(self, row: StandingApproval) -> Line:
        return Line(self.url_of(row), self.name_of(row), f"requested by {requester_name(row)}", row.created_at)


def _notes(request: HttpRequest, row: StandingApproval) -> Iterable[str]:
    if row.closed_at is not None:
        yield f"Ended: {row.why or row.get_state_display()}. Each rotation of the schedule needs its own approval."
    elif not is_current(row):
        yield "The schedule was changed after the request. This approval covers no rotation; request another one."
    elif _is_undecided(row):
        yield from undecided_notes(request, row)
