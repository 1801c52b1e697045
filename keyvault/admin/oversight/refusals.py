"""Recently denied requests in the console, by request id and with each rule applied."""

from django.contrib import admin
from django.contrib.admin import AdminSite
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from keyvault.access.permissions import Permission as P
from keyvault.access.scopes import EVERYWHERE, AccessScope
from keyvault.admin.framework.account_lists import AccountList, text
from keyvault.admin.framework.columns import moment_column
from keyvault.admin.framework.filters import state_filter
from keyvault.admin.framework.menu import ConsolePage
from keyvault.admin.framework.model_admin import ConsoleModelAdmin
from keyvault.admin.framework.widgets import (
    NOTHING,
    Detail,
    FactTable,
    badge,
    identifier,
    link,
    moment,
    mono,
)
from keyvault.admin.oversight.explain import explain_view, verdict_sections
from keyvault.domain.errors import ErrorCode
from keyvault.models import Refusal
from keyvault.wire.entry_points import VerificationEntryPoint

_BY_CODE = {code.value: Q(code=code.value) for code in ErrorCode}


ENTRY_POINT_FILTER = state_filter(
    {point.value: Q(entry_point=point.value) for point in VerificationEntryPoint},
    name="entry_point",
    title="entry point",
)


class RefusalAdmin(ConsoleModelAdmin):
    view_permissions = (P.VERDICTS_EXPLAIN,)
    menu, singular, plural = "Explain a denial", "Denied request", "Denied requests"
    id_pattern = r"[0-9A-Za-z._~-]{16,32}"

    list_display = ("request_id", "when", "code", "endpoint", "key")
    list_filter = ("environment", state_filter(_BY_CODE, name="code", title="code"), ENTRY_POINT_FILTER)
    search_fields = ("=request_id", "=key_id", "=merchant_id")
    search_help_text = "By request id, key id or merchant id. Denied requests are stored for 30 days."
    sortable_by = ()
    ordering = ("-at",)

    def rows_in_scope(self, rows: QuerySet[Refusal], scope: AccessScope) -> QuerySet[Refusal]:
        if scope.merchants is not None:
            rows = rows.filter(merchant_id__in=scope.merchants)
        return rows if scope == EVERYWHERE else rows.filter(environment__in=scope.environments)

    when = moment_column("when", "at")

    @admin.display(description="key")
    def key(self, row: Refusal) -> SafeString | str:
        return _key(row)

    def account_list(self, request: HttpRequest) -> AccountList | None:
        if not self.has_view_permission(request):
            return None
        return AccountList(
            "Denied requests",
            ["code", "endpoint", "when"],
            lambda account: Refusal.objects.filter(
                merchant_id=account.merchant_id, environment=account.environment
            ).order_by("-at", "-request_id"),
            label="code",
            state=text(""),
            detail="endpoint",
            at="at",
            cells=lambda row: [
                link(self.url_of(Refusal(pk=row.pk)), mono(row.label)),
                row.detail or "not in the catalog",
                moment(row.at),
            ],
            list_url=lambda account: self.list_url(
                f"?q={account.merchant_id}&environment__exact={account.environment}"
            ),
            empty="No requests with the merchant's keys were denied in the last 30 days.",
        )

    def summary(self, row: Refusal) -> FactTable:
        return FactTable(
            "Request",
            [
                ("Request id", mono(row.request_id)),
                ("When", moment(row.at)),
                ("Entry point", row.entry_point),
                ("Environment", badge(row.environment)),
                ("Endpoint", row.endpoint or "not in the catalog"),
                ("Key", _key(row)),
                ("Merchant", row.merchant_id or "not proved"),
                ("Client", mono(row.source) if row.source else NOTHING),
            ],
        )

    def detail(self, request: HttpRequest, row: Refusal) -> Detail:
        code = ErrorCode(row.code)
        trace = [(ErrorCode(code), bool(passed)) for code, passed in row.trace]
        return Detail(
            title="Denied request",
            state="",
            lead=format_html("{} · {}", identifier(row.request_id), moment(row.at)),
            sections=[
                *verdict_sections(code, row.detail, row.internal, trace, subject=_describe(row)),
                self.summary(row),
            ],
        )


def _key(row: Refusal) -> SafeString | str:
    """Link the key only if possession was proved."""
    return (
        link(reverse("admin:keyvault_key_change", args=[row.key_id]), mono(row.key_id)) if row.key_id else "not proved"
    )


def _describe(row: Refusal) -> str:
    """Return the request as the beginning of a sentence, for the merchant."""
    endpoint = f" for {row.endpoint}" if row.endpoint else ""
    return f"Request {row.request_id}{endpoint} in {row.environment} at {row.at:%Y-%m-%d %H:%M:%S} UTC was"


def _explain(site: AdminSite, request: HttpRequest) -> HttpResponse:
    refusals = site._registry[Refusal]
    if not isinstance(refusals, RefusalAdmin):
        raise TypeError(f"{refusals} is not a RefusalAdmin")
    return explain_view(site, request, refusals.get_queryset(request), refusals.url_of)


PAGES = (
    ConsolePage(
        "explain",
        "explain/",
        "Explain",
        "Explain a denial",
        (P.VERDICTS_EXPLAIN,),
        _explain,
        ("GET", "HEAD", "POST"),
    ),
)
