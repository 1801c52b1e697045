"""Break-glass actions in the console. An approval on a command line asks the approver who was named: was this you?"""

from collections.abc import Iterable
from functools import partial
from typing import Any

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.safestring import SafeString

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import OperatorPrincipal
from keyvault.access.scopes import AccessScope
from keyvault.admin.framework.actions import ActionResult, Cleaned, RowAction, Tone, VersionedForm, run_service
from keyvault.admin.framework.activity import name_event
from keyvault.admin.framework.attention import Attention
from keyvault.admin.framework.columns import badge_column, moment_column
from keyvault.admin.framework.enforcement import may, operator_of
from keyvault.admin.framework.filters import state_filter
from keyvault.admin.framework.model_admin import ConsoleModelAdmin
from keyvault.admin.framework.subject_pages import find_page
from keyvault.admin.framework.widgets import (
    NOTHING,
    Detail,
    FactTable,
    Line,
    link,
    moment,
    mono,
)
from keyvault.models import BreakGlass, Operator
from keyvault.services.approvals.break_glass import (
    disown_approval,
    find_authority_fault,
    find_review_fault,
    may_confirm,
    review_break_glass,
    scope_of,
)

REVIEW_FILTER = state_filter(
    {"open": Q(reviewed_at__isnull=True), "done": Q(reviewed_at__isnull=False)},
    name="review",
    title="review",
    labels={"open": "not reviewed", "done": "reviewed"},
)


def _run_review(done: str, grant: Grant, action: BreakGlass, cleaned: Cleaned) -> ActionResult:
    review_break_glass(grant, action)
    is_open = action.reviewed_at is None
    return ActionResult(f"{done} under your name.{' Another person must review it too.' if is_open else ''}")


def _explain_review(action: BreakGlass) -> str:
    checked = "You confirm that you have checked who did this and why."
    if not action.is_claimed:
        return f"{checked} The reviewer must be neither the person who did it nor the requester."
    return f"{checked} Ask {action.operator.username} in person. {_who_reviews(action)}"


def _who_reviews(claim: BreakGlass) -> str:
    """State who reviews an action that was done on a command line."""
    if claim.first_reviewer_person is not None:
        return "One person has reviewed it, and another one must review it too."
    if may_confirm(claim, claim.person):
        return f"Two persons must review it. {claim.operator.username} can be one of them."
    return f"Two persons other than {claim.operator.username} must review it."


def _state(action: BreakGlass) -> str:
    return "not_reviewed" if action.reviewed_at is None else "reviewed"


class BreakGlassAdmin(ConsoleModelAdmin):
    view_permissions = (P.BREAK_GLASS_REVIEW, P.AUDIT_READ)
    menu, singular, plural = "Audit log", "Break-glass action", "Break-glass actions"
    account_lookup = "account"
    row_actions = (
        RowAction(
            "review",
            "Mark as reviewed",
            P.BREAK_GLASS_REVIEW,
            partial(_run_review, "Marked as reviewed"),
            _explain_review,
            form=VersionedForm,
            tone=Tone.GOOD,
            step_up=True,
        ),
        RowAction(
            "confirm",
            "This was me",
            P.BREAK_GLASS_REVIEW,
            partial(_run_review, "Confirmed"),
            (
                "You confirm that you gave this approval yourself on the command line, and that you had checked it. "
                "Another person must review it too, because a person with a shell can name the requester as well."
            ),
            form=VersionedForm,
            tone=Tone.GOOD,
            step_up=True,
        ),
        RowAction(
            "disown",
            "This was not me",
            P.BREAK_GLASS_REVIEW,
            run_service(disown_approval, "Recorded. All operators get an alarm, and two other persons must review it."),
            (
                "You state that another person gave this approval in your name. This raises an alarm and is final. It "
                "revokes no key: review the subject and revoke its key if necessary."
            ),
            tone=Tone.DANGER,
        ),
    )

    list_display = ("event", "subject", "operator_name", "why", "when", "review_badge")
    list_filter = (REVIEW_FILTER,)
    search_fields = ("=act_id", "subject", "operator__username")
    ordering = ("-created_at",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).select_related("account", "operator", "first_reviewer", "reviewer")

    @admin.display(description="by", ordering="operator__username")
    def operator_name(self, action: BreakGlass) -> str:
        return action.operator.username

    when = moment_column("when", "created_at")
    review_badge = badge_column("review", _state, ordering="reviewed_at")

    def name_of(self, row: BreakGlass) -> str:
        return f"{name_event(row.event)}: {row.subject}"

    def scope_of(self, row: BreakGlass) -> AccessScope:
        return scope_of(row)

    def requester_person_of(self, row: BreakGlass) -> str:
        # The claimed approver is asked, too. The service checks everyone who must not review.
        return row.requester_person if row.is_claimed else row.person

    def summary(self, row: BreakGlass) -> FactTable:
        return FactTable(
            "Action",
            [
                ("Event", mono(row.event)),
                ("Subject", _subject(row)),
                (_by(row).capitalize(), row.operator.username),
                ("Requested by", _names(row.requester_person)),
                ("Host user", row.host_user or NOTHING),
                ("Reason for break-glass", row.why),
                ("When", moment(row.created_at)),
            ],
        )

    def detail(self, request: HttpRequest, row: BreakGlass) -> Detail:
        review = FactTable(
            "Review",
            [
                *([("First review by", _username(row.first_reviewer))] if row.is_claimed else []),
                ("Reviewed", moment(row.reviewed_at, missing="not yet")),
                ("By", _username(row.reviewer)),
            ],
        )
        return Detail(
            title=f"{name_event(row.event)} {_by(row)} {row.operator}",
            state=_state(row),
            sections=[self.summary(row), review],
            notes=list(_notes(operator_of(request), row)),
        )

    def _is_available(self, request: HttpRequest, action: RowAction, row: BreakGlass) -> bool:
        operator, is_own = operator_of(request), action.name in {"confirm", "disown"}
        return _find_fault(row, operator) is None and is_own == may_confirm(row, operator.person)

    def attention_items(self, request: HttpRequest) -> Iterable[Attention]:
        """Return the unreviewed actions that wait for the reviewer, and all of them for auditors."""
        rows = self.get_queryset(request).filter(reviewed_at__isnull=True).order_by("created_at")
        if may(request, P.BREAK_GLASS_REVIEW):
            person = operator_of(request).person
            rows = rows.exclude(excluded_persons__contains=person).exclude(first_reviewer_person=person)
            claims = rows.filter(is_claimed=True, person=person)
            yield self.attention("Was this you? Approvals in your name", claims, "?review=open", "action")
            others = rows.exclude(person=person)
            yield self.attention(
                "Break-glass actions to review", others, "?review=open", "action", decide=P.BREAK_GLASS_REVIEW
            )
        else:
            yield self.attention("Break-glass actions not reviewed yet", rows, "?review=open")

    def line_of(self, row: BreakGlass) -> Line:
        what = name_event(row.event) if row.account is None else f"{row.account} · {name_event(row.event)}"
        return Line(self.url_of(row), what, f"{_by(row)} {row.operator.username}: {row.why}", row.created_at)


def _find_fault(action: BreakGlass, operator: OperatorPrincipal) -> str | None:
    return find_review_fault(action, operator.person) or find_authority_fault(operator.username)


def _notes(operator: OperatorPrincipal, action: BreakGlass) -> Iterable[str]:
    """State what the review of a claimed action requires, and why the review button is missing."""
    if action.reviewed_at is not None:
        return
    if may_confirm(action, operator.person):
        yield "Was this you? This approval was given in your name on a command line, which does not prove an identity."
    elif action.is_claimed:
        yield (
            f"This was done in the name of {action.operator.username} on a command line, which does not prove an "
            f"identity. {_who_reviews(action)}"
        )
    if (fault := _find_fault(action, operator)) is not None:
        yield fault


def _by(action: BreakGlass) -> str:
    return "in the name of" if action.is_claimed else "by"


def _username(operator: Operator | None) -> str:
    return NOTHING if operator is None else operator.username


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
