"""Operators in the console: their access, changed by another key administrator, and the access review."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from django import forms
from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, path, reverse
from django.utils.safestring import SafeString

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.roles import FOUR_EYES_ROLES, ROLE_PERMISSIONS, Role, permissions_of
from keyvault.access.scopes import EVERYWHERE, NOWHERE, AccessScope
from keyvault.admin.framework.accounts import MerchantsForm
from keyvault.admin.framework.actions import (
    ActionResult,
    Cleaned,
    ReasonForm,
    RowAction,
    Tone,
    VersionedForm,
    VersionedReasonForm,
    run_service,
)
from keyvault.admin.framework.columns import badge_column, moment_column
from keyvault.admin.framework.components import Banner, Columns, Fold
from keyvault.admin.framework.enforcement import grant_for, operator_of
from keyvault.admin.framework.filters import state_filter
from keyvault.admin.framework.four_eyes import requester_name
from keyvault.admin.framework.model_admin import BoundedPaginator, ConsoleModelAdmin
from keyvault.admin.framework.pages import live_page
from keyvault.admin.framework.widgets import Detail, FactTable, Link, Table, badge, link, moment, mono
from keyvault.domain.environments import Environment
from keyvault.models import Operator, OperatorChange
from keyvault.services.access_review import (
    OperatorAccess,
    RoleAccess,
    SecondFactor,
    begin_review_export,
    format_csv,
    list_reviewed,
    review_access,
)
from keyvault.services.operator_changes import change_roles, change_scope, request_factor_reset
from keyvault.services.operators.operators import disable_operator, link_person
from keyvault.services.operators.role_use import UNUSED_AFTER

_PAGE = 50
"""Operators on a page of the access review."""

_MAX_CHANGES = 20
"""Maximum changes that the page of an operator shows."""

_REVIEW_NOTE = (
    "A role is used when its operator opens a page, or takes an action, that it permits and not every operator may. "
    f"A use is recorded once a day. A role is reported as unused after {UNUSED_AFTER.days} days."
)


class ScopeForm(MerchantsForm, VersionedReasonForm):
    environments = forms.MultipleChoiceField(
        choices=[(env.value, env.value) for env in Environment], widget=forms.CheckboxSelectMultiple
    )
    field_order = ("merchants", "all_merchants", "environments", "why")

    @classmethod
    def initial_for(cls, row: Operator) -> dict[str, Any]:
        scope = row.access_scope
        return {
            "version": row.version,
            "merchants": "\n".join(sorted(scope.merchants or ())),
            "all_merchants": scope.merchants is None,
            "environments": sorted(scope.environments),
        }


class PersonForm(VersionedForm):
    other = forms.ModelChoiceField(
        Operator.objects.all(),
        to_field_name="username",
        widget=forms.TextInput,
        label="Other operator of this person",
        help_text="User name.",
        error_messages={"invalid_choice": "There is no such operator."},
    )


class RolesForm(VersionedReasonForm):
    roles = forms.MultipleChoiceField(
        required=False,
        choices=[(role.value, role.value.replace("_", " ")) for role in Role],
        widget=forms.CheckboxSelectMultiple,
        help_text=(
            f"A second person must approve the addition of {' or '.join(sorted(FOUR_EYES_ROLES)).replace('_', ' ')}. "
            "Without any role the operator cannot sign in."
        ),
    )
    field_order = ("roles", "why")

    @classmethod
    def initial_for(cls, row: Operator) -> dict[str, Any]:
        return {"version": row.version, "roles": sorted(row.roles)}


def _change_roles(grant: Grant, operator: Operator, cleaned: Cleaned) -> ActionResult:
    change = change_roles(grant, operator, map(Role, cleaned["roles"]), cleaned["why"])
    return ActionResult(f"The roles of {operator.username} are changed.") if change is None else _submitted(change)


def _change_scope(grant: Grant, operator: Operator, cleaned: Cleaned) -> ActionResult:
    merchants = None if cleaned["all_merchants"] else frozenset(cleaned["merchants"])
    scope = AccessScope(merchants, frozenset(map(Environment, cleaned["environments"])))
    change = change_scope(grant, operator, scope, cleaned["why"])
    return ActionResult(f"The scope of {operator.username} is changed.") if change is None else _submitted(change)


def _link_person(grant: Grant, operator: Operator, cleaned: Cleaned) -> ActionResult:
    other: Operator = cleaned["other"]
    link_person(grant, operator, other)
    return ActionResult(f"{operator.username} and {other.username} are operators of one person.")


def _reset_factors(grant: Grant, operator: Operator, cleaned: Cleaned) -> ActionResult:
    return _submitted(request_factor_reset(grant, operator, cleaned["why"]))


def _submitted(change: OperatorChange) -> ActionResult:
    url = reverse("admin:keyvault_operatorchange_change", args=[change.pk])
    return ActionResult("Request submitted. A second person must approve it.", url=url)


def operator_state(operator: Operator) -> str:
    return "active" if operator.is_active else "disabled"


def format_roles(roles: Iterable[str]) -> str:
    return ", ".join(sorted(role.replace("_", " ") for role in roles)) or "none"


def fetch_others(operators: Sequence[Any]) -> None:
    """Read the other operators of each operator's person, for `format_others`, by one query for all."""
    persons = {each.person for each in operators}
    found = list(Operator.objects.filter(person__in=persons).order_by("username").values_list("person", "username"))
    for each in operators:
        each.others = [name for person, name in found if person == each.person and name != each.username]


def format_others(operator: Any) -> str:
    """Name the other operators of an operator's person. `others`: if they were read."""
    if not hasattr(operator, "others"):
        fetch_others([operator])
    return ", ".join(operator.others) or "none"


class OperatorAdmin(ConsoleModelAdmin):
    view_permissions = (P.OPERATORS_READ,)
    menu, singular, plural = "Operators", "Operator", "Operators"
    has_environments = False
    row_actions = (
        RowAction(
            "roles",
            "Change roles",
            P.OPERATORS_WRITE,
            _change_roles,
            "All sessions of the operator end, so it signs in again.",
            form=RolesForm,
            is_available=lambda operator: operator.is_active,
            step_up=True,
        ),
        RowAction(
            "scope",
            "Change scope",
            P.OPERATORS_WRITE,
            _change_scope,
            "The operator acts on these merchants in these environments only. A second person must approve any "
            "addition. All sessions of the operator end.",
            form=ScopeForm,
            is_available=lambda operator: operator.is_active,
            step_up=True,
        ),
        RowAction(
            "same-person",
            "Link to a person",
            P.OPERATORS_WRITE,
            _link_person,
            "The operator counts as the same person as another operator, so that neither approves what the other "
            "requests. Do this before the operator gets a scope. Its linked operators move with it. This cannot be "
            "undone.",
            form=PersonForm,
            is_available=lambda operator: operator.is_active and operator.access_scope == NOWHERE,
            step_up=True,
        ),
        RowAction(
            "reset-factors",
            "Reset second factors",
            P.OPERATORS_WRITE,
            _reset_factors,
            "After a second person approves, all second factors of the operator are removed and all its sessions end. "
            "The operator then needs a new invitation (manage.py invite_operator). Confirm the request with the "
            "operator in person: attackers use resets to take over accounts.",
            form=ReasonForm,
            is_available=lambda operator: operator.is_active,
            step_up=True,
        ),
        RowAction(
            "disable",
            "Disable",
            P.OPERATORS_WRITE,
            run_service(disable_operator, lambda operator: f"{operator.username} is disabled."),
            "All sessions of the operator end, and the operator can never sign in again. This cannot be undone.",
            is_available=lambda operator: operator.is_active,
            step_up=True,
            tone=Tone.DANGER,
        ),
    )

    list_display = ("username", "state_badge", "roles_text", "scope_text", "last_sign_in", "created")
    list_filter = (
        state_filter({"active": Q(is_active=True), "disabled": Q(is_active=False)}),
        state_filter(
            {role.value: Q(groups__name=role) for role in Role},
            name="role",
            title="role",
            labels={role.value: format_roles([role]) for role in Role},
        ),
    )
    search_fields = ("username",)
    ordering = ("username",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).prefetch_related("groups")

    state_badge = badge_column("state", operator_state, ordering="is_active")

    @admin.display(description="roles")
    def roles_text(self, operator: Operator) -> str:
        return format_roles(group.name for group in operator.groups.all())

    @admin.display(description="scope")
    def scope_text(self, operator: Operator) -> str:
        return str(operator.access_scope)

    last_sign_in = moment_column("last sign-in", "last_login", missing="never")
    created = moment_column("created", "date_joined")

    def get_urls(self) -> list[URLPattern]:
        """Add the access review and its export, before the routes of a row."""
        return [
            path(
                "access-review/",
                self.guarded(self.view_permissions, ("GET", "HEAD"), self._review_view),
                name="keyvault_operator_review",
            ),
            path(
                "access-review/export/",
                self.guarded(self.view_permissions, ("GET", "HEAD"), self._export_view),
                name="keyvault_operator_export",
            ),
            *super().get_urls(),
        ]

    def list_context(self, request: HttpRequest) -> dict[str, Any]:
        context = super().list_context(request)
        if operator_of(request).scope == EVERYWHERE:
            context["create_links"].append(Link("Access review", reverse("admin:keyvault_operator_review")))
        return context

    def summary(self, row: Operator) -> FactTable:
        return FactTable(
            "Operator",
            [
                ("User name", row.username),
                ("Roles", format_roles(row.roles)),
                ("Scope", str(row.access_scope)),
                ("Other operators of this person", format_others(row)),
                ("Last sign-in", moment(row.last_login, missing="never")),
                ("Created", moment(row.date_joined)),
            ],
        )

    def detail(self, request: HttpRequest, row: Operator) -> Detail:
        (access,) = review_access([row], datetime.now(UTC))
        notes = list(self._notes(request, row))
        access_facts = FactTable(
            "Access", [("Scope", str(row.access_scope)), ("Other operators of this person", format_others(row))]
        )
        sign_in = FactTable(
            "Sign-in",
            [
                ("Second factor", _second_factor(access)),
                ("Open sessions", row.sessions.filter(expire_date__gt=datetime.now(UTC)).count()),
                ("Last sign-in", moment(row.last_login, missing="never")),
                ("Created", moment(row.date_joined)),
            ],
        )
        permissions = sorted(permissions_of(row.roles)) if row.is_active else []
        listed = FactTable("Permissions", [("Permissions", ", ".join(permissions) or "none")])
        return Detail(
            title=row.username,
            state=operator_state(row),
            lead=format_roles(row.roles),
            banner=Banner(notes[0], " ".join(notes[1:]), "wait") if notes else None,
            sections=[
                Columns([_roles_table(access), sign_in]),
                access_facts,
                _changes_table(row),
                Fold("Permissions of its roles", [listed], f"{len(permissions)} in total"),
            ],
        )

    def name_of(self, row: Operator) -> str:
        return row.username

    def _is_available(self, request: HttpRequest, action: RowAction, row: Operator) -> bool:
        return super()._is_available(request, action, row) and not self._is_own(request, row)

    def _notes(self, request: HttpRequest, row: Operator) -> Iterable[str]:
        if self._is_own(request, row):
            yield "This is you. Another key administrator changes your roles."
        if row.is_active and row.access_scope == NOWHERE:
            yield (
                "This operator has no scope, so it has no access. If its person has another operator, link the two "
                "first. Then request a scope."
            )

    def _is_own(self, request: HttpRequest, row: Operator) -> bool:
        return row.person == operator_of(request).person

    # --- the access review --------------------------------------------------------------------------------

    def _review_view(self, request: HttpRequest) -> HttpResponse:
        _require_everywhere(request)
        rows = BoundedPaginator(list_reviewed(), _PAGE).get_page(request.GET.get("page"))
        here = reverse("admin:keyvault_operator_review")
        links = [Link("Export as CSV", reverse("admin:keyvault_operator_export"))]
        if rows.has_previous():
            links.append(Link("Previous page", f"{here}?page={rows.previous_page_number()}"))
        if rows.has_next():
            links.append(Link("Next page", f"{here}?page={rows.next_page_number()}"))
        now = datetime.now(UTC)
        lines = [line for access in review_access(rows, now) for line in self._review_lines(access)]
        columns = ["operator", "state", "scope", "second factor", "last sign-in", *_ROLE_COLUMNS]
        of_roles = [[_name(role), ", ".join(sorted(ROLE_PERMISSIONS[role]))] for role in Role]
        detail = Detail(
            title="Access review",
            state="",
            sections=[
                Table("Operators", columns, lines, aside=f"page {rows.number} of {rows.paginator.num_pages}"),
                Fold("Permissions of each role", [Table("Roles", ["role", "permissions"], of_roles)]),
            ],
            lead=_REVIEW_NOTE,
        )
        context = {
            "title": detail.title,
            "detail": detail,
            "sections": detail.sections,
            "links": links,
            "crumbs": self._crumbs(),
        }
        return live_page(self.admin_site, request, "detail", context, seconds=detail.refresh_seconds)

    def _review_lines(self, access: OperatorAccess) -> Iterable[list[Any]]:
        row = access.operator
        shown: list[Any] = [
            link(self.url_of(row), row.username),
            badge(operator_state(row)),
            str(row.access_scope),
            _second_factor(access),
            moment(row.last_login, missing="never"),
        ]
        for number, role in enumerate(access.roles or [None]):
            yield [*(shown if number == 0 else [""] * len(shown)), *_role_cells(role)]

    def _export_view(self, request: HttpRequest) -> HttpResponse:
        """Return the review as a file. Each export is in the audit log."""
        _require_everywhere(request)
        allowed = grant_for(request, P.OPERATORS_READ, within=EVERYWHERE)
        return HttpResponse(
            format_csv(begin_review_export(allowed)),
            content_type="text/csv; charset=utf-8",
            headers={
                "Cache-Control": "no-store",
                "Content-Disposition": f'attachment; filename="access-review-{allowed.at:%Y-%m-%d}.csv"',
            },
        )


def _require_everywhere(request: HttpRequest) -> None:
    """Refuse an operator with a smaller scope, as the list of operators shows it no row. Raises PermissionDenied."""
    if operator_of(request).scope != EVERYWHERE:
        raise PermissionDenied


def _second_factor(access: OperatorAccess) -> SafeString:
    return badge("none", "wait") if access.second_factor == SecondFactor.NO else badge(access.second_factor, "good")


_ROLE_COLUMNS = ["role", "granted", "last used", "review"]


def _role_cells(role: RoleAccess | None) -> list[Any]:
    if role is None:
        return ["none", "", "", ""]
    return [
        _name(role.role),
        moment(role.granted_at, missing="unknown: not granted by Keyvault"),
        moment(role.last_used_at, missing="never"),
        _review(role),
    ]


def _review(role: RoleAccess) -> SafeString | str:
    return badge("unused") if role.is_unused else ""


def _name(role: Role) -> str:
    return role.value.replace("_", " ")


def _roles_table(access: OperatorAccess) -> Table:
    return Table(
        "Roles",
        _ROLE_COLUMNS,
        [_role_cells(role) for role in access.roles],
        empty="No roles. Roles added with Change roles appear here.",
    )


def _changes_table(operator: Operator) -> Table:
    changes = OperatorChange.objects.filter(operator=operator).select_related("requester").order_by("-created_at")
    return Table(
        "Latest changes that needed an approval",
        ["change", "state", "requested by", "requested"],
        [
            [
                link(reverse("admin:keyvault_operatorchange_change", args=[change.pk]), mono(change.pk)),
                badge(change.state),
                requester_name(change),
                moment(change.created_at),
            ]
            for change in changes[:_MAX_CHANGES]
        ],
    )
