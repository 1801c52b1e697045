"""Break-glass actions in the console, shown until a second person has reviewed them."""

from collections.abc import Iterable
from typing import Any

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.safestring import SafeString

from keyvault.access.permissions import Permission as P
from keyvault.admin.framework.actions import RowAction, Tone, VersionedForm, run_service
from keyvault.admin.framework.columns import badge_column, moment_column
from keyvault.admin.framework.enforcement import may, operator_of
from keyvault.admin.framework.filters import state_filter
from keyvault.admin.framework.model_admin import ConsoleModelAdmin
from keyvault.admin.framework.subject_pages import find_page
from keyvault.admin.framework.widgets import (
    NOTHING,
    AttentionItem,
    Detail,
    FactTable,
    Line,
    link,
    moment,
    mono,
)
from keyvault.models import BreakGlass, Operator
from keyvault.services.approvals.break_glass import review_break_glass


REVIEW_FILTER = state_filter(
    {"open": Q(reviewed_at__isnull=True), "done": Q(reviewed_at__isnull=False)},
    name="review",
    title="review",
    labels={"open": "not reviewed", "done": "reviewed"},
)


def _state(action: BreakGlass) -> str:
    return "not_reviewed" if action.reviewed_at is None else "reviewed"


class BreakGlassAdmin(ConsoleModelAdmin):
    view_permissions = (P.BREAK_GLASS_REVIEW, P.AUDIT_READ)
    section, singular, plural = "Oversight", "Break-glass action", "Break-glass actions"
    row_actions = (
        RowAction(
            "review",
            "Mark as reviewed",
            P.BREAK_GLASS_REVIEW,
            run_service(review_break_glass, "Marked as reviewed under your name."),
            (
                "You confirm that you have checked who did this and why. "
                "The reviewer must be neither the person who did it nor the requester."
            ),
            form=VersionedForm,
            is_available=lambda action: action.reviewed_at is None,
            tone=Tone.GOOD,
        ),
    )

    list_display = ("event", "subject", "operator_name", "why", "when", "review_badge")
    list_filter = (REVIEW_FILTER,)
    search_fields = ("=act_id", "subject", "operator__username")
    ordering = ("-created_at",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).select_related("operator", "reviewer")

    @admin.display(description="by", ordering="operator__username")
    def operator_name(self, action: BreakGlass) -> str:
        return action.operator.username

    when = moment_column("when (UTC)", "created_at")
    review_badge = badge_column("review", _state, ordering="reviewed_at")

    def requester_person_of(self, row: BreakGlass) -> str:
        return row.person

    def summary(self, row: BreakGlass) -> FactTable:
        return FactTable(
            "Action",
            [
                ("Event", mono(row.event)),
                ("Subject", _subject(row)),
                ("By", row.operator.username),
                ("Requested by", _names(row.requester_person)),
                ("Host user", row.host_user or NOTHING),
                ("Reason for break-glass", row.why),
                ("When", moment(row.created_at)),
            ],
        )

    def detail(self, request: HttpRequest, row: BreakGlass) -> Detail:
        reviewer = NOTHING if row.reviewer is None else row.reviewer.username
        review = FactTable("Review", [("Reviewed", moment(row.reviewed_at, missing="not yet")), ("By", reviewer)])
        return Detail(
            title=f"{row.event} by {row.operator}",
            state=_state(row),
            sections=[self.summary(row), review],
            notes=list(_notes(operator_of(request).person, row)),
        )

    def _is_available(self, request: HttpRequest, action: RowAction, row: BreakGlass) -> bool:
        return super()._is_available(request, action, row) and operator_of(request).person != row.requester_person

    def attention_items(self, request: HttpRequest) -> Iterable[AttentionItem]:
        """Return the unreviewed actions of others for reviewers, and all of them for auditors."""
        rows = self.get_queryset(request).filter(reviewed_at__isnull=True).order_by("created_at")
        if may(request, P.BREAK_GLASS_REVIEW):
            of_others = rows.exclude(requester_person=operator_of(request).person)
            others = self.decidable_rows(request, P.BREAK_GLASS_REVIEW, of_others)
            yield self.attention_item("Break-glass actions to review", others, "?review=open", "action")
        else:
            yield self.attention_item("Break-glass actions not reviewed yet", rows, "?review=open")

    def line_of(self, row: BreakGlass) -> Line:
        return Line(self.url_of(row), str(row), f"by {row.operator.username}", row.created_at)


def _notes(person: str, action: BreakGlass) -> Iterable[str]:
    """Explain why the review button is missing."""
    if action.reviewed_at is None and person == action.person:
        yield "This was done under your name, so another person must review it."
    elif action.reviewed_at is None and person == action.requester_person:
        yield "You requested this, so another person must review it."


def _names(person: str) -> str:
    """Return the user names of a person; the person id for a token created on the host without an operator."""
    return ", ".join(Operator.objects.filter(person=person).values_list("username", flat=True)) or person


def _subject(action: BreakGlass) -> SafeString:
    page = find_page(action.subject)
    return (
        mono(action.subject)
        if page is None
        else link(reverse(f"admin:{page}_change", args=[action.subject]), action.subject)
    )
