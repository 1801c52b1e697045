"""Endpoint catalog in the console: shows every endpoint; upstream endpoints can be added, changed and withdrawn."""

from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, path, reverse
from django.utils.safestring import SafeString

from keyvault.access.catalog import BUILT_IN, Bearer, Endpoint, LimiterFailurePolicy
from keyvault.access.decision import Grant
from keyvault.access.endpoint_description import authorization_panel, format_limit
from keyvault.access.endpoints import (
    MAX_NAME_LENGTH,
    MAX_PATH_LENGTH,
    MAX_SUMMARY_LENGTH,
    METHODS,
    EndpointDraft,
)
from keyvault.access.limits import MAX_COUNT, MAX_SECONDS
from keyvault.access.permissions import Permission as P
from keyvault.access.scopes import AccessScope
from keyvault.admin.framework.actions import (
    ActionForm,
    ActionResult,
    Cleaned,
    CreateAction,
    RowAction,
    VersionedForm,
    pause_action,
    resume_action,
    run_service,
)
from keyvault.admin.framework.columns import badge_column
from keyvault.admin.framework.filters import state_filter
from keyvault.admin.framework.model_admin import ConsoleModelAdmin
from keyvault.admin.framework.pages import page
from keyvault.admin.framework.widgets import Detail, FactTable, Link, Table, link, moment, mono
from keyvault.domain.keys import KeyKind
from keyvault.models import CatalogEndpoint
from keyvault.services.catalog.catalog import current_catalog, endpoint_of
from keyvault.services.catalog.endpoints import (
    add_endpoint,
    change_endpoint,
    draft_of,
    restore_endpoint,
    withdraw_endpoint,
)

_CONTEXT_HELP = "path:<variable> or header:<name>, such as path:merchant or header:X-Store-Id. Empty: not required."
_BEARER = {
    Bearer.NONE: "not supported",
    Bearer.OPTIONAL: "optional, in addition to the private key",
    Bearer.REQUIRED: "required, in addition to the private key",
}
_LIMITER_FAILURE = {
    LimiterFailurePolicy.LOCAL_SHARE: "each process allows a share of the limit",
    LimiterFailurePolicy.REFUSE: "refuse every request",
}


class RuleForm(ActionForm):
    """Every field of an endpoint except its name."""

    method = forms.ChoiceField(choices=[(method, method) for method in METHODS])
    path = forms.CharField(
        max_length=MAX_PATH_LENGTH,
        help_text="Relative to the base URL of the environment. <variable> matches one segment: /refunds/<refund_id>",
    )
    credentials = forms.MultipleChoiceField(
        label="API keys",
        choices=[(kind.value, kind.value) for kind in KeyKind],
        widget=forms.CheckboxSelectMultiple,
    )
    bearer = forms.ChoiceField(
        label="Bearer",
        choices=[(bearer.value, label) for bearer, label in _BEARER.items()],
        help_text="A customer access token adds the context of a signed-in customer.",
    )
    merchant_from = forms.CharField(label="Merchant from", required=False, max_length=100, help_text=_CONTEXT_HELP)
    store_from = forms.CharField(label="Store from", required=False, max_length=100, help_text=_CONTEXT_HELP)
    idempotent_by_key = forms.BooleanField(label="Requires Idempotency-Key", required=False)
    limit_count = forms.IntegerField(
        label="Limit: requests",
        required=False,
        min_value=1,
        max_value=MAX_COUNT,
        help_text="Per account, in addition to the limit of the account. Empty: no limit.",
    )
    limit_seconds = forms.IntegerField(label="Limit: in seconds", required=False, min_value=1, max_value=MAX_SECONDS)
    on_limiter_loss = forms.ChoiceField(
        label="When the limiter is unavailable",
        choices=[(policy.value, label) for policy, label in _LIMITER_FAILURE.items()],
    )
    summary = forms.CharField(required=False, max_length=MAX_SUMMARY_LENGTH)


class AddForm(RuleForm):
    name = forms.CharField(
        max_length=MAX_NAME_LENGTH,
        help_text="Words joined by dots, such as refunds.create. The name cannot be changed later.",
    )
    field_order = ("name",)


class ChangeForm(VersionedForm, RuleForm):
    @classmethod
    def initial_for(cls, row: Any) -> dict[str, Any]:
        draft = draft_of(row)
        shown = {name: getattr(draft, name) for name in RuleForm.base_fields}
        return {**shown, "credentials": sorted(draft.credentials), "version": row.version}


def _draft(name: str, cleaned: Cleaned) -> EndpointDraft:
    chosen = {field: cleaned[field] for field in RuleForm.base_fields}
    return EndpointDraft(
        **{
            **chosen,
            "name": name,
            "credentials": frozenset(map(KeyKind, cleaned["credentials"])),
            "bearer": Bearer(cleaned["bearer"]),
            "on_limiter_loss": LimiterFailurePolicy(cleaned["on_limiter_loss"]),
        }
    )


def _add(grant: Grant, cleaned: Cleaned) -> ActionResult:
    row = add_endpoint(grant, _draft(cleaned["name"], cleaned))
    return ActionResult(f"Added endpoint {row}. Verify and the gateways accept it from now on.", row=row)


def _change(grant: Grant, row: CatalogEndpoint, cleaned: Cleaned) -> ActionResult:
    change_endpoint(grant, row, _draft(row.name, cleaned))
    return ActionResult(f"Changed endpoint {row}. The change applies from the next request.")


def _is_live(row: CatalogEndpoint) -> bool:
    return row.withdrawn_at is None


def _state(row: CatalogEndpoint) -> str:
    return "active" if _is_live(row) else "withdrawn"


class CatalogEndpointAdmin(ConsoleModelAdmin):
    view_permissions = (P.CATALOG_READ,)
    menu, singular, plural = "Endpoint catalog", "Endpoint", "Endpoints"
    no_rows = "No endpoints of your own yet"
    change_list_template = "console/change_list_more.html"
    create_actions = (
        CreateAction(
            "add",
            "Add endpoint",
            P.CATALOG_WRITE,
            AddForm,
            _add,
            "An endpoint of an upstream service. Keyvault does not serve it but authorizes its requests: the service "
            "calls verify, or a gateway calls forward-auth. The change takes effect immediately in every process.",
            "Add endpoint",
            is_of_installation=True,
        ),
    )
    row_actions = (
        RowAction(
            "edit",
            "Change",
            P.CATALOG_WRITE,
            _change,
            "The new rule applies from the next request.",
            form=ChangeForm,
            is_available=_is_live,
        ),
        pause_action(
            "withdraw",
            "Withdraw",
            P.CATALOG_WRITE,
            run_service(
                withdraw_endpoint, lambda row: f"Withdrew endpoint {row}. Requests are refused with endpoint_unknown."
            ),
            "Requests are refused with endpoint_unknown until the endpoint is restored.",
            is_available=_is_live,
        ),
        resume_action(
            "restore",
            "Restore",
            P.CATALOG_WRITE,
            run_service(restore_endpoint, lambda row: f"Restored endpoint {row}."),
            "The endpoint is active again with its previous rule.",
            is_available=lambda row: not _is_live(row),
        ),
    )

    list_display = ("name", "method", "path_text", "keys", "bearer", "limit", "state")
    list_filter = (
        state_filter({"active": Q(withdrawn_at__isnull=True), "withdrawn": Q(withdrawn_at__isnull=False)}),
        state_filter({method: Q(method=method) for method in METHODS}, name="method", title="method"),
        "bearer",
    )
    search_fields = ("name", "path")
    ordering = ("name",)

    # --- all endpoints, built-in and added ----------------------------------------------------------------

    def get_urls(self) -> list[URLPattern]:
        """Add the panels page. An endpoint name has a dot, so no endpoint is named `panels`."""
        panels = self.guarded(self.view_permissions, ("GET", "HEAD"), self._panels_view)
        return [path("panels/", panels, name="keyvault_catalogendpoint_panels"), *super().get_urls()]

    def list_context(self, request: HttpRequest) -> dict[str, Any]:
        return {
            **super().list_context(request),
            "page_links": [Link("Show all authorization panels", panels_url())],
            "more": [_built_in_table()],
        }

    def _panels_view(self, request: HttpRequest) -> HttpResponse:
        context = {
            "title": "Authorization panels",
            "crumbs": self._crumbs(),
            "panels": [(endpoint, panel_facts(endpoint)) for endpoint in current_catalog().endpoints],
        }
        return page(self.admin_site, request, "panels", context)

    # --- added endpoints ----------------------------------------------------------------------------------

    @admin.display(description="path", ordering="path")
    def path_text(self, row: CatalogEndpoint) -> SafeString:
        return mono(row.path)

    @admin.display(description="keys")
    def keys(self, row: CatalogEndpoint) -> str:
        return endpoint_of(row).kinds

    @admin.display(description="limit")
    def limit(self, row: CatalogEndpoint) -> str:
        return format_limit(endpoint_of(row).limit)

    state = badge_column("state", _state, ordering="withdrawn_at")

    def rows_in_scope(self, rows: QuerySet[Any], scope: AccessScope) -> QuerySet[Any]:
        """Return all rows: the catalog names no merchant."""
        return rows

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).order_by("name")

    def summary(self, row: CatalogEndpoint) -> FactTable:
        return panel_facts(endpoint_of(row))

    def detail(self, request: HttpRequest, row: CatalogEndpoint) -> Detail:
        life: list[tuple[str, Any]] = [("Added", moment(row.created_at))]
        if row.withdrawn_at is not None:
            life.append(("Withdrawn", moment(row.withdrawn_at)))
        return Detail(
            title=row.name,
            state=_state(row),
            notes=[row.summary] if row.summary else [],
            sections=[self.summary(row), FactTable("Lifecycle", life)],
        )


def panels_url() -> str:
    return reverse("admin:keyvault_catalogendpoint_panels")


def panel_facts(endpoint: Endpoint) -> FactTable:
    """Return the authorization panel, the same as in the API documentation."""
    rows = [
        (label, mono(text) if label in {"Method", "Path"} else text) for label, text in authorization_panel(endpoint)
    ]
    return FactTable("Authorization", rows)


def _built_in_table() -> Table:
    return Table(
        "Built in",
        ["name", "method", "path", "keys", "Bearer", "summary"],
        [
            [
                link(f"{panels_url()}#{endpoint.name}", endpoint.name),
                endpoint.method,
                mono(endpoint.path),
                endpoint.kinds,
                endpoint.bearer,
                endpoint.summary,
            ]
            for endpoint in BUILT_IN.endpoints
        ],
    )
