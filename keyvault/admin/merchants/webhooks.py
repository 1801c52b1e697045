"""Webhook endpoints in the console: addresses, deliveries and signing secrets."""

from datetime import UTC, datetime
from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import Case, Model, Q, QuerySet, When
from django.http import HttpRequest
from django.urls import reverse
from django.utils.safestring import SafeString

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.admin.framework.account_lists import AccountList, text
from keyvault.admin.framework.accounts import (
    AccountForm,
    AccountRowAdmin,
    account_from,
    account_link,
    account_query,
)
from keyvault.admin.framework.actions import (
    ActionForm,
    ActionResult,
    Cleaned,
    CreateAction,
    ReasonForm,
    RowAction,
    from_query,
    pause_action,
    resume_action,
    run_service,
)
from keyvault.admin.framework.columns import badge_column, moment_column
from keyvault.admin.framework.enforcement import may
from keyvault.admin.framework.filters import state_filter
from keyvault.admin.framework.widgets import (
    NOTHING,
    Detail,
    Extras,
    FactTable,
    Link,
    Table,
    badge,
    link,
    moment,
    mono,
)
from keyvault.models import Account, DeliveryState, WebhookDelivery, WebhookEndpoint
from keyvault.services.webhooks.endpoints import (
    DEFAULT_OVERLAP_HOURS,
    MAX_OVERLAP_HOURS,
    add_endpoint,
    breaker_of,
    disable_endpoint,
    enable_endpoint,
    host_of,
    rotate_secret,
    send_test,
)
from keyvault.wire.destinations import MAX_URL_LENGTH
from keyvault.wire.webhooks import MAX_ATTEMPTS

_MAX_DELIVERIES = 25


class EndpointForm(AccountForm):
    url = forms.CharField(
        label="URL",
        max_length=MAX_URL_LENGTH,
        help_text="An https URL such as https://acme.example/hooks/keys. Messages are sent when events occur; "
        "a test message can be sent from the page of the endpoint.",
    )


class RotateSecretForm(ActionForm):
    overlap_hours = forms.IntegerField(
        label="Overlap in hours",
        min_value=0,
        max_value=MAX_OVERLAP_HOURS,
        initial=DEFAULT_OVERLAP_HOURS,
        help_text="How long both secrets sign each message while the merchant switches.",
    )


def _add(grant: Grant, cleaned: Cleaned) -> ActionResult:
    endpoint, secret = add_endpoint(grant, account_from(cleaned), cleaned["url"])
    return ActionResult(f"The signing secret of {host_of(endpoint)}", secret=secret, row=endpoint)


def _rotate(grant: Grant, endpoint: WebhookEndpoint, cleaned: Cleaned) -> ActionResult:
    secret = rotate_secret(grant, endpoint, cleaned["overlap_hours"])
    return ActionResult(f"The new signing secret of {host_of(endpoint)}", secret=secret, row=endpoint)


def _enable(grant: Grant, endpoint: WebhookEndpoint, cleaned: Cleaned) -> ActionResult:
    resent = enable_endpoint(grant, endpoint)
    return ActionResult(f"Endpoint enabled. Abandoned messages sent again: {resent}.")


def _is_enabled(endpoint: WebhookEndpoint) -> bool:
    return endpoint.disabled_at is None


def _state(endpoint: WebhookEndpoint) -> str:
    if not _is_enabled(endpoint):
        return "disabled"
    return "paused" if _paused_until(endpoint) is not None else "enabled"


def _paused_until(endpoint: WebhookEndpoint) -> datetime | None:
    """Return the time until which the endpoint's breaker is open; None if it is closed."""
    breaker = breaker_of(endpoint)
    until = None if breaker is None else breaker.open_until
    return until if until is not None and until > datetime.now(UTC) else None


def _by_state() -> dict[str, Q]:
    is_enabled, is_paused = Q(disabled_at__isnull=True), Q(breaker__open_until__gt=datetime.now(UTC))
    return {"enabled": is_enabled & ~is_paused, "paused": is_enabled & is_paused, "disabled": ~is_enabled}


class WebhookEndpointAdmin(AccountRowAdmin):
    view_permissions = (P.MERCHANTS_READ,)
    menu, singular, plural = "Webhooks", "Webhook endpoint", "Webhook endpoints"
    create_actions = (
        CreateAction(
            "add",
            "Add webhook endpoint",
            P.WEBHOOKS_WRITE,
            EndpointForm,
            _add,
            "Notifies the account of changes to its keys, in the Standard Webhooks format. The next page shows the "
            "signing secret once; the merchant verifies each message with it.",
            "Add endpoint",
            account_of=account_from,
            preset=from_query("merchant", "environment"),
            step_up=True,
        ),
    )
    row_actions = (
        RowAction(
            "test",
            "Send test",
            P.WEBHOOKS_WRITE,
            run_service(send_test, "Test message queued. It appears first in the list of deliveries."),
            "Sends a signed message of type webhook.test. It is not retried.",
            is_available=_is_enabled,
        ),
        RowAction(
            "rotate",
            "Rotate secret",
            P.WEBHOOKS_WRITE,
            _rotate,
            "The next page shows a new signing secret once.",
            form=RotateSecretForm,
            warn=lambda endpoint: (
                "The overlap of the last rotation is not over: two secrets sign. Only an overlap of 0 is accepted now. "
                "Both secrets then end immediately."
                if _is_in_overlap(endpoint)
                else ""
            ),
            step_up=True,
        ),
        resume_action(
            "enable",
            "Enable",
            P.WEBHOOKS_WRITE,
            _enable,
            "Messages are sent again, starting with those abandoned in the last 7 days.",
            is_available=lambda endpoint: not _is_enabled(endpoint),
        ),
        pause_action(
            "disable",
            "Disable",
            P.WEBHOOKS_WRITE,
            run_service(disable_endpoint, "Endpoint disabled. No more messages are sent to it."),
            "No more messages are sent, and pending messages are abandoned.",
            is_available=_is_enabled,
            form=ReasonForm,
        ),
    )

    list_display = ("host", "merchant", "environment_badge", "state_badge", "created")
    list_filter = (
        state_filter(_by_state),
        "account__environment",
    )
    search_fields = ("=account__merchant__merchant_id",)
    search_help_text = "By merchant id."
    sortable_by = ()
    ordering = ("-id",)

    @admin.display(description="host")
    def host(self, endpoint: WebhookEndpoint) -> str:
        return host_of(endpoint)

    state_badge = badge_column("state", _state, ordering="disabled_at")
    created = moment_column("created", "created_at")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).select_related("breaker")

    def name_of(self, row: WebhookEndpoint) -> str:
        return host_of(row)

    def summary(self, row: WebhookEndpoint) -> FactTable:
        """Return the facts with the whole URL, for the pages behind WEBHOOKS_WRITE."""
        return self._facts(row, ("URL", mono(row.url)))

    def _facts(self, row: WebhookEndpoint, place: tuple[str, SafeString]) -> FactTable:
        return FactTable(
            "Webhook endpoint",
            [
                place,
                ("Account", account_link(row.account)),
                ("Environment", badge(row.account.environment)),
            ],
        )

    def detail(self, request: HttpRequest, row: WebhookEndpoint) -> Detail:
        life: list[tuple[str, Any]] = [("Created", moment(row.created_at))]
        if _is_in_overlap(row):
            life.append(("Previous secret signs until", moment(row.previous_until)))
        if (breaker := breaker_of(row)) is not None:
            life.append(("Attempts without a reply", f"{breaker.failures} since the last reply"))
        if (paused_until := _paused_until(row)) is not None:
            life.append(("Next attempt", moment(paused_until)))
        if row.disabled_at is not None:
            life += [("Disabled", moment(row.disabled_at)), ("Reason", row.disabled_why)]
        facts = (
            self.summary(row)
            if may(request, P.WEBHOOKS_WRITE, row.account)
            else self._facts(row, ("Host", mono(host_of(row))))
        )
        return Detail(
            title=host_of(row),
            state=_state(row),
            sections=[facts, FactTable("Lifecycle", life), _deliveries(request, row)],
        )

    def account_list(self, request: HttpRequest) -> AccountList | None:
        if not self.has_view_permission(request):
            return None
        return AccountList(
            "Webhook endpoints",
            ["host", "state", "created"],
            lambda account: account.webhook_endpoints.order_by("-created_at"),
            label="url",
            state=Case(*(When(condition, then=text(state)) for state, condition in _by_state().items())),
            detail=text(""),
            at="created_at",
            cells=lambda row: [
                self._link_to(WebhookEndpoint(pk=row.pk, url=row.label)),
                badge(row.state),
                moment(row.at),
            ],
            list_url=lambda account: self.list_url(
                f"?q={account.merchant_id}&account__environment__exact={account.environment}"
            ),
            empty="No webhook endpoint: the merchant is not notified of changes to its keys.",
        )

    def _link_to(self, endpoint: WebhookEndpoint) -> SafeString:
        return link(self.url_of(endpoint), host_of(endpoint))

    def extras_for(self, request: HttpRequest, row: Model) -> Extras | None:
        if not isinstance(row, Account):
            return None
        links = []
        if may(request, P.WEBHOOKS_WRITE, row):
            url = reverse("admin:keyvault_webhookendpoint_add") + account_query(row)
            links.append(Link("Add webhook endpoint", url))
        endpoints = row.webhook_endpoints.select_related("breaker").order_by("created_at")
        table = Table(
            "Webhook endpoints",
            ["host", "state", "created"],
            [[self._link_to(each), badge(_state(each)), moment(each.created_at)] for each in endpoints],
        )
        return Extras(links=links, sections=[table])


def _is_in_overlap(endpoint: WebhookEndpoint) -> bool:
    return endpoint.previous_until is not None and endpoint.previous_until > datetime.now(UTC)


def _deliveries(request: HttpRequest, endpoint: WebhookEndpoint) -> Table:
    rows = WebhookDelivery.objects.filter(endpoint=endpoint).select_related("notice").order_by("-pk")[:_MAX_DELIVERIES]
    is_linked = may(request, P.NOTICES_READ)
    return Table(
        "Last deliveries",
        ["event", "created", "state", "attempts", "last response", "delivered or next attempt"],
        [
            [
                link(reverse("admin:keyvault_notice_change", args=[row.notice_id]), row.notice.kind)
                if is_linked
                else row.notice.kind,
                moment(row.notice.created_at),
                badge(row.state),
                f"{row.attempts} of {MAX_ATTEMPTS}",
                row.last_error or row.last_status or NOTHING,
                _when(row),
            ]
            for row in rows
        ],
        empty="No deliveries yet. Messages sent to the endpoint appear here.",
    )


def _when(delivery: WebhookDelivery) -> SafeString:
    if delivery.state == DeliveryState.DUE:
        return moment(delivery.due_at)
    return moment(delivery.delivered_at, missing="never")
