"""Changes of operators that a second person approves: requested on an operator's page, decided here."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest
from django.urls import reverse

from keyvault.access.permissions import Permission as P
from keyvault.access.scopes import AccessScope
from keyvault.admin.framework.actions import RowAction, run_service
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
from keyvault.admin.framework.widgets import NOTHING, Detail, Difference, FactTable, Line, link, moment, mono
from keyvault.admin.operators.operators import fetch_others, format_others, format_roles
from keyvault.models import OperatorChange, OperatorChangeKind, OperatorChangeState
from keyvault.services.operator_changes import (
    approve_change,
    is_undecided,
    list_undecided,
    reject_change,
    withdraw_change,
)

K, S = OperatorChangeKind, OperatorChangeState

_WAITING = f"?state__exact={S.AWAITING_APPROVAL}"
"""Query of the list of changes that await approval."""

_WHAT = {
    K.ROLES: "change of roles",
    K.SCOPE: "change of scope",
    K.SECOND_FACTORS_RESET: "reset of second factors",
}


def _is_undecided(change: OperatorChange) -> bool:
    return is_undecided(change, datetime.now(UTC))


def _state(change: OperatorChange) -> str:
    return "expired" if change.state == S.AWAITING_APPROVAL and not _is_undecided(change) else change.state


def _explain(change: OperatorChange) -> str:
    if change.kind != K.SECOND_FACTORS_RESET:
        return (
            "You approve exactly the roles and the scope below. They apply immediately, and the operator signs in "
            "again. Ask the requester why they are needed. You also approve that the person has no other operators "
            "than those named below: one person with two could approve their own requests. If one is missing, reject "
            "the request."
        )
    return (
        "All second factors of the operator are removed immediately, and all its sessions end. Confirm the request "
        "with the operator in person: attackers use resets to take over accounts."
    )


class OperatorChangeAdmin(ConsoleModelAdmin):
    view_permissions = (P.OPERATORS_READ,)
    menu, singular, plural = "Operators", "Operator change", "Operator changes"
    id_pattern = r"opc_[0-9A-Za-z]{20}"
    has_environments = False
    row_actions = (
        approve_action(
            P.OPERATORS_APPROVE,
            approve_change,
            _explain,
            approved="Approved. The operator is changed.",
            is_undecided=_is_undecided,
            form=ApproveStoredForm,
        ),
        reject_action(
            P.OPERATORS_APPROVE,
            run_service(reject_change, "Request rejected."),
            "The operator stays as it is. The requester sees the reason.",
            is_available=_is_undecided,
        ),
        RowAction(
            "withdraw",
            "Withdraw",
            P.OPERATORS_WRITE,
            run_service(withdraw_change, "Request withdrawn."),
            "The operator stays as it is. Only the requester can withdraw a request.",
            is_available=_is_undecided,
            for_requester=True,
        ),
    )

    list_display = ("what", "state_badge", "operator_name", "requested_by", "change_id", "created")
    list_filter = ("state", "kind")
    search_fields = ("=change_id", "=operator__username")
    search_help_text = "By id or user name."
    sortable_by = ()
    ordering = ("-created_at",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).select_related("operator", "requester")

    def fetch_summaries(self, rows: list[Any]) -> None:
        fetch_others([row.operator for row in rows])

    state_badge = badge_column("state", _state)

    @admin.display(description="operator")
    def operator_name(self, change: OperatorChange) -> str:
        return change.operator.username

    @admin.display(description="change")
    def what(self, change: OperatorChange) -> str:
        return _WHAT[K(change.kind)]

    requested_by = requester_column
    created = moment_column("requested", "created_at")

    def name_of(self, row: OperatorChange) -> str:
        return f"{row.operator.username}: {self.what(row)}"

    def requester_person_of(self, row: OperatorChange) -> str:
        return row.requester_person

    def summary(self, row: OperatorChange) -> FactTable:
        """Return what the digest covers."""
        url = reverse("admin:keyvault_operator_change", args=[row.operator_id])
        access = [
            ("Roles before", format_roles(row.roles_before.split())),
            ("Roles after", format_roles(row.roles.split())),
            ("Scope before", str(AccessScope.from_json(row.scope_before))),
            ("Scope after", str(AccessScope.from_json(row.scope))),
        ]
        return FactTable(
            "Request",
            [
                ("Operator", link(url, row.operator.username)),
                ("Change", self.what(row)),
                *(access if row.kind != K.SECOND_FACTORS_RESET else []),
                ("Other operators of this person", format_others(row.operator)),
                ("Why", row.why),
                ("Digest of the request (SHA-256)", mono(row.plan_digest)),
                ("Requested by", requester_name(row)),
            ],
        )

    def detail(self, request: HttpRequest, row: OperatorChange) -> Detail:
        progress = FactTable(
            "Progress",
            [
                ("Requested", moment(row.created_at)),
                ("Decided", moment(row.closed_at, missing="not yet")),
                *([("Reason of the rejection", row.closed_why or NOTHING)] if row.state == S.REJECTED else []),
            ],
        )
        return Detail(
            title=self.name_of(row),
            state=_state(row),
            notes=list(_notes(request, row)),
            sections=[self.summary(row), progress, approvals_table(row)],
        )

    def _is_available(self, request: HttpRequest, action: RowAction, row: OperatorChange) -> bool:
        is_concerned = row.operator_person == operator_of(request).person
        return super()._is_available(request, action, row) and not (is_concerned and action.name == "approve")

    def changes(self, row: OperatorChange) -> Iterable[Difference]:
        if row.kind == K.SECOND_FACTORS_RESET:
            yield Difference("Second factors", "as they are", "none: the operator needs a new invitation")
            yield Difference("Sessions", "as they are", "all ended")
            return
        if row.roles != row.roles_before:
            yield Difference("Roles", format_roles(row.roles_before.split()), format_roles(row.roles.split()))
        before, after = AccessScope.from_json(row.scope_before), AccessScope.from_json(row.scope)
        if before != after:
            yield Difference("Scope", str(before), str(after))

    def approval_items(self, request: HttpRequest) -> Iterable[Attention]:
        if may(request, P.OPERATORS_APPROVE):
            me = operator_of(request).person
            others = self._waiting().exclude(operator_person=me).exclude(approvals__person=me)
            yield self.approval("Changes of operators to approve", others, _WAITING)

    def attention_items(self, request: HttpRequest) -> Iterable[Attention]:
        if may(request, P.OPERATORS_WRITE):
            mine = self._waiting().filter(requester_person=operator_of(request).person)
            yield self.attention("Your changes of operators awaiting approval", mine, _WAITING)

    @staticmethod
    def _waiting() -> QuerySet[OperatorChange]:
        return list_undecided(Now()).select_related("operator", "requester")

    def line_of(self, row: OperatorChange) -> Line:
        return Line(self.url_of(row), self.name_of(row), f"requested by {requester_name(row)}", row.created_at)


def _notes(request: HttpRequest, row: OperatorChange) -> Iterable[str]:
    if not _is_undecided(row):
        return
    yield from undecided_notes(request, row)
    if row.operator_person == operator_of(request).person:
        yield "This request changes your own operator. Another person must approve it."
