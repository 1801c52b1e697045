"""Rate limits in the console. A change applies from the next request."""

from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import CharField, Model, Q, QuerySet
from django.db.models.functions import Cast, Concat
from django.http import HttpRequest
from django.urls import reverse

from keyvault.access.decision import Grant
from keyvault.access.endpoint_description import format_limit
from keyvault.access.limits import MAX_COUNT, MAX_SECONDS, Limit
from keyvault.access.permissions import Permission as P
from keyvault.access.scopes import EVERYWHERE, AccessScope
from keyvault.admin.framework.account_lists import AccountList, text
from keyvault.admin.framework.accounts import (
    AccountRowAdmin,
    account_link,
    account_query,
    environment_field,
    merchant_field,
)
from keyvault.admin.framework.actions import (
    ActionForm,
    ActionResult,
    Cleaned,
    CreateAction,
    RowAction,
    from_query,
)
from keyvault.admin.framework.columns import badge_column
from keyvault.admin.framework.enforcement import may, operator_of
from keyvault.admin.framework.filters import state_filter
from keyvault.admin.framework.scoping import in_scope
from keyvault.admin.framework.widgets import Detail, Extras, FactTable, Link, Table, badge, link, moment, mono
from keyvault.domain.environments import Environment
from keyvault.models import Account, LimitOverride
from keyvault.services.catalog.catalog import current_catalog, limit_of
from keyvault.services.limits.defaults import default_limit
from keyvault.services.limits.overrides import (
    LimitSource,
    account_limit_in_force,
    set_account_limit,
    set_endpoint_limit,
)
from keyvault.services.merchants.merchants import find_account

_MAX_ACCOUNTS = 50


def _endpoint_choices() -> list[tuple[str, str]]:
    """Return the endpoints of the current catalog that a limit applies to."""
    names = sorted(endpoint.name for endpoint in current_catalog().endpoints if endpoint.spends)
    return [("", "all endpoints: the limit of the account"), *((name, name) for name in names)]


_DEFAULT_LABEL = "Reset to the default"


class LimitForm(ActionForm):
    """Sets a limit by two numbers or removes it by a check box; an empty form changes nothing."""

    environment = environment_field()
    merchant = merchant_field(
        "Merchant id. Empty: every merchant without its own limit for the endpoint.", required=False
    )
    endpoint = forms.ChoiceField(required=False, choices=_endpoint_choices)
    requests = forms.IntegerField(required=False, min_value=1, max_value=MAX_COUNT)
    in_seconds = forms.IntegerField(
        required=False,
        min_value=1,
        max_value=MAX_SECONDS,
        help_text="Period of the limit, in seconds. The burst size equals the number of requests.",
    )
    default = forms.BooleanField(
        required=False,
        label=_DEFAULT_LABEL,
        help_text="Removes the limit. Leave both numbers empty.",
    )

    def clean(self) -> dict[str, Any]:
        cleaned: dict[str, Any] = super().clean() or self.cleaned_data
        names = {"requests", "in_seconds"}
        given = [name for name in names if cleaned.get(name) is not None]
        if cleaned.get("default") and given:
            self.add_error("default", "Enter two numbers or choose the default, not both.")
        elif not cleaned.get("default") and not names & set(self.errors) and len(given) < len(names):
            self.add_error(
                "requests", f'Nothing was changed. Enter both numbers, or select "{_DEFAULT_LABEL}" to remove a limit.'
            )
        if not cleaned.get("merchant") and not cleaned.get("endpoint"):
            self.add_error("merchant", "Enter a merchant, an endpoint, or both.")
        return cleaned


def _account(cleaned: Cleaned) -> Account | None:
    return find_account(cleaned["merchant"], cleaned["environment"]) if cleaned["merchant"] else None


def _set(grant: Grant, cleaned: Cleaned) -> ActionResult:
    account, limit = _account(cleaned), limit_of(cleaned["requests"], cleaned["in_seconds"])
    text = "the default again" if limit is None else format_limit(limit)
    if not cleaned["endpoint"] and account is not None:
        set_account_limit(grant, account, limit)
        return ActionResult(f"The limit of {account} is {text} from the next request.")
    environment = Environment(cleaned["environment"])
    row = set_endpoint_limit(grant, environment, cleaned["endpoint"], limit, account)
    target = f"{cleaned['endpoint']} for {account or environment}"
    return ActionResult(f"The limit of {target} is {text} from the next request.", row=row)


def _clear(grant: Grant, row: LimitOverride, cleaned: Cleaned) -> ActionResult:
    set_endpoint_limit(grant, Environment(row.environment), row.endpoint, None, row.account)
    return ActionResult("Limit cleared. The next broader limit applies from the next request.")


def _is_set(row: LimitOverride) -> bool:
    return row.limit_count is not None


def _state(row: LimitOverride) -> str:
    return "active" if _is_set(row) else "cleared"


class LimitOverrideAdmin(AccountRowAdmin):
    view_permissions = (P.CATALOG_READ,)
    menu, singular, plural = "Limits", "Limit", "Limits"
    no_rows = "No limits of endpoints yet"
    change_list_template = "console/change_list_more.html"
    create_actions = (
        CreateAction(
            "set",
            "Set limit",
            P.LIMITS_WRITE,
            LimitForm,
            _set,
            "A request must pass the limit of its account and the limit of its endpoint, if any. The most specific "
            "endpoint limit applies: merchant and endpoint, then endpoint, then the catalog.",
            "Set limit",
            account_of=_account,
            preset=from_query("merchant", "environment", "endpoint"),
        ),
    )
    row_actions = (
        RowAction(
            "clear",
            "Clear",
            P.LIMITS_WRITE,
            _clear,
            "The next broader limit of the endpoint applies, if there is one.",
            is_available=_is_set,
        ),
    )

    list_display = ("endpoint", "environment_badge", "whose", "limit", "state")
    list_filter = (
        state_filter({"active": Q(limit_count__isnull=False), "cleared": Q(limit_count__isnull=True)}),
        "environment",
    )
    search_fields = ("endpoint", "account__merchant__merchant_id")
    ordering = ("endpoint", "environment", "account__merchant_id")

    def rows_in_scope(self, rows: QuerySet[Any], scope: AccessScope) -> QuerySet[Any]:
        """Return the limits that apply to accounts of the scope."""
        of_environment = Q(account__isnull=True, environment__in=scope.environments)
        return rows if scope == EVERYWHERE else rows.filter(in_scope(scope, "account") | of_environment)

    def scope_of(self, row: LimitOverride) -> AccessScope:
        return AccessScope(environments=frozenset({Environment(row.environment)}))

    environment_badge = badge_column("environment", "environment")
    state = badge_column("state", _state)

    @admin.display(description="for")
    def whose(self, row: LimitOverride) -> str:
        return "accounts without their own" if row.account is None else row.account.merchant_id

    @admin.display(description="limit")
    def limit(self, row: LimitOverride) -> str:
        return format_limit(limit_of(row.limit_count, row.limit_seconds))

    def list_context(self, request: HttpRequest) -> dict[str, Any]:
        return {
            **super().list_context(request),
            "title": "Limits of endpoints",
            "more": [_defaults(), _account_table(operator_of(request).scope)],
        }

    def name_of(self, row: LimitOverride) -> str:
        return f"{row.endpoint} for {row.account or row.environment}"

    def summary(self, row: LimitOverride) -> FactTable:
        return FactTable(
            "Limit",
            [
                ("Endpoint", mono(row.endpoint)),
                ("Environment", badge(row.environment)),
                ("For", self.whose(row)),
                ("Limit", self.limit(row)),
            ],
        )

    def detail(self, request: HttpRequest, row: LimitOverride) -> Detail:
        notes = [] if _is_set(row) else ["This limit was cleared. The next broader limit applies."]
        return Detail(title=self.name_of(row), state=_state(row), sections=[self.summary(row)], notes=notes)

    def account_list(self, request: HttpRequest) -> AccountList | None:
        if not self.has_view_permission(request):
            return None
        return AccountList(
            "Limits of endpoints",
            ["endpoint", "limit", "set"],
            lambda account: account.limit_overrides.filter(limit_count__isnull=False).order_by("-created_at"),
            label="endpoint",
            state=text(""),
            detail=Concat(Cast("limit_count", CharField()), text(" "), Cast("limit_seconds", CharField())),
            at="created_at",
            cells=lambda row: [
                link(self.url_of(LimitOverride(pk=row.pk)), mono(row.label)),
                format_limit(Limit(*map(int, row.detail.split()))),
                moment(row.at),
            ],
            list_url=lambda account: self.list_url(
                f"?q={account.merchant_id}&environment__exact={account.environment}"
            ),
            empty="No limit of its own for an endpoint. Set a limit to see it here.",
        )

    def extras_for(self, request: HttpRequest, row: Model) -> Extras | None:
        """Add the limits of an account to its page, with a link to set them."""
        if not isinstance(row, Account) or not self.has_view_permission(request):
            return None
        found = account_limit_in_force(row)
        set_for = "this account" if found.source is LimitSource.ACCOUNT else "accounts without their own"
        rows: list[list[Any]] = [["all endpoints", format_limit(found.limit), set_for]]
        its = Q(account=row) | Q(account__isnull=True, environment=row.environment)
        narrow = self.get_queryset(request).filter(its, limit_count__isnull=False).order_by("endpoint", "account")
        rows += [
            [
                link(self.url_of(item), item.endpoint),
                self.limit(item),
                "this account" if item.account else self.whose(item),
            ]
            for item in narrow[:_MAX_ACCOUNTS]
        ]
        links = []
        if may(request, P.LIMITS_WRITE, row):
            links.append(Link("Set limit", reverse("admin:keyvault_limitoverride_set") + account_query(row)))
        return Extras(links=links, sections=[Table("Limits", ["endpoint", "limit", "set for"], rows)])


def _defaults() -> FactTable:
    rows = [(env.value, format_limit(default_limit(env))) for env in Environment]
    return FactTable("Accounts without a limit of their own", rows)


def _account_table(scope: AccessScope) -> Table:
    limited = Account.objects.filter(in_scope(scope, "pk"), limit_count__isnull=False)
    accounts = limited.select_related("merchant").order_by("merchant_id")
    return Table(
        "Accounts with a limit of their own",
        ["account", "limit"],
        [
            [
                account_link(account),
                format_limit(Limit(account.limit_count, account.limit_seconds)),
            ]
            for account in accounts[:_MAX_ACCOUNTS]
        ],
    )
