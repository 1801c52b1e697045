"""Service tokens in the console: created, shown once, rotated and revoked."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest

from keyvault.access.decision import Grant
from keyvault.access.permissions import SERVICE_PERMISSIONS, Permission
from keyvault.access.permissions import Permission as P
from keyvault.access.scopes import EVERYWHERE, AccessScope
from keyvault.admin.framework.accounts import MerchantsForm
from keyvault.admin.framework.actions import (
    ActionForm,
    ActionResult,
    Cleaned,
    CreateAction,
    RowAction,
    Tone,
    run_service,
)
from keyvault.admin.framework.columns import badge_column, moment_column
from keyvault.admin.framework.filters import state_filter
from keyvault.admin.framework.model_admin import ConsoleModelAdmin
from keyvault.admin.framework.scoping import names_in_scope
from keyvault.admin.framework.widgets import Detail, FactTable, moment, mono
from keyvault.domain.keystring import SCOPE_ENVIRONMENTS, StringScope
from keyvault.models import ServiceToken
from keyvault.services.tokens.service_tokens import (
    DEFAULT_DAYS,
    MAX_DAYS,
    MAX_OVERLAP_HOURS,
    create_service_token,
    revoke_service_token,
    rotate_service_token,
)

SCOPES = {
    StringScope.SANDBOX: "sandbox",
    StringScope.PRODUCTION: "production",
    StringScope.ALL: "sandbox and production",
}


class TokenForm(MerchantsForm):
    name = forms.CharField(max_length=100, help_text="Service that will use the token.")
    scope = forms.ChoiceField(label="Environments", choices=[(scope.value, label) for scope, label in SCOPES.items()])
    permissions = forms.MultipleChoiceField(
        choices=[(permission.value, permission.value) for permission in sorted(SERVICE_PERMISSIONS)],
        widget=forms.CheckboxSelectMultiple,
        help_text="A service cannot approve anything; only people can.",
    )
    lifetime_days = forms.IntegerField(label="Lifetime in days", min_value=1, max_value=MAX_DAYS, initial=DEFAULT_DAYS)
    is_probe = forms.BooleanField(
        required=False,
        label="For probes",
        help_text="Verifications with this token are recorded as probes and do not count as key use or as proof.",
    )
    field_order = ("name", "scope", "permissions", "merchants", "all_merchants")


class RotateTokenForm(ActionForm):
    overlap_hours = forms.IntegerField(
        label="Overlap in hours",
        min_value=0,
        max_value=MAX_OVERLAP_HOURS,
        initial=24,
        help_text="How long the old token stays valid beside the new one, but not beyond its expiry.",
    )


def _create(grant: Grant, cleaned: Cleaned) -> ActionResult:
    token, secret = create_service_token(
        grant,
        name=cleaned["name"],
        scope=StringScope(cleaned["scope"]),
        permissions=[Permission(name) for name in cleaned["permissions"]],
        merchants=None if cleaned["all_merchants"] else cleaned["merchants"],
        lifetime_days=cleaned["lifetime_days"],
        is_probe=cleaned["is_probe"],
    )
    return ActionResult(f"The new token of {token.name}", secret=secret, row=token)


def _rotate(grant: Grant, token: ServiceToken, cleaned: Cleaned) -> ActionResult:
    successor, secret = rotate_service_token(grant, token, cleaned["overlap_hours"])
    return ActionResult(f"The new token of {successor.name}", secret=secret, row=successor)


def _state_conditions() -> dict[str, Q]:
    now = datetime.now(UTC)
    return {
        "active": Q(revoked_at__isnull=True, expires_at__gt=now),
        "expired": Q(revoked_at__isnull=True, expires_at__lte=now),
        "revoked": Q(revoked_at__isnull=False),
    }


def token_state(token: ServiceToken) -> str:
    if token.revoked_at is not None:
        return "revoked"
    return "expired" if token.expires_at <= datetime.now(UTC) else "active"


class ServiceTokenAdmin(ConsoleModelAdmin):
    view_permissions = (P.TOKENS_READ,)
    menu, singular, plural = "Service tokens", "Service token", "Service tokens"
    create_actions = (
        CreateAction(
            "create",
            "Create service token",
            P.TOKENS_WRITE,
            TokenForm,
            _create,
            "A backend service authenticates to /v1 with the token. You are accountable for its requests and cannot "
            "approve them. The next page shows the token once.",
            "Create service token",
            step_up=True,
        ),
    )
    row_actions = (
        RowAction(
            "rotate",
            "Rotate token",
            P.TOKENS_WRITE,
            _rotate,
            lambda token: (
                "The next page shows a new token with the same permissions once. The old token ends after the overlap. "
                "You are accountable for the requests of the new token."
            ),
            form=RotateTokenForm,
            is_available=lambda token: token_state(token) == "active",
            step_up=True,
        ),
        RowAction(
            "revoke",
            "Revoke token",
            P.TOKENS_WRITE,
            run_service(revoke_service_token, lambda token: f"{token} is revoked."),
            "The service that uses the token is refused immediately and permanently.",
            is_available=lambda token: token.revoked_at is None,
            tone=Tone.DANGER,
            step_up=True,
        ),
    )

    list_display = ("name", "state_badge", "environments_text", "merchants_text", "token_id", "expires", "creator_name")
    list_filter = (state_filter(_state_conditions),)
    search_fields = ("=token_id", "name")
    ordering = ("-created_at",)

    def rows_in_scope(self, rows: QuerySet[Any], scope: AccessScope) -> QuerySet[Any]:
        if scope == EVERYWHERE:
            return rows
        scopes = [each for each, environments in SCOPE_ENVIRONMENTS.items() if environments <= scope.environments]
        return rows.filter(names_in_scope(scope, "merchants"), scope__in=scopes)

    def scope_of(self, row: ServiceToken) -> AccessScope:
        return row.access_scope

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).select_related("creator")

    state_badge = badge_column("state", token_state)
    expires = moment_column("expires", "expires_at")

    @admin.display(description="environments", ordering="scope")
    def environments_text(self, token: ServiceToken) -> str:
        return SCOPES[StringScope(token.scope)]

    @admin.display(description="merchants")
    def merchants_text(self, token: ServiceToken) -> str:
        return "all" if token.merchants is None else ", ".join(token.merchants)

    @admin.display(description="created by", ordering="creator__username")
    def creator_name(self, token: ServiceToken) -> str:
        return "command line on the host" if token.creator is None else token.creator.username

    def summary(self, row: ServiceToken) -> FactTable:
        return FactTable("Service token", list(self._facts(row)))

    def detail(self, request: HttpRequest, row: ServiceToken) -> Detail:
        life: list[tuple[str, Any]] = [("Created", moment(row.created_at)), ("Expires", moment(row.expires_at))]
        if row.revoked_at is not None:
            life.append(("Revoked", moment(row.revoked_at)))
        return Detail(
            title=row.name, state=token_state(row), sections=[self.summary(row), FactTable("Lifecycle", life)]
        )

    def _facts(self, token: ServiceToken) -> Iterable[tuple[str, Any]]:
        yield "Token id", mono(token.token_id)
        yield "Name", token.name
        yield "Environments", self.environments_text(token)
        yield "Permissions", ", ".join(token.permissions)
        yield "Merchants", self.merchants_text(token)
        if token.is_probe:
            yield "Use", "probes, which do not count as key use"
        yield "Created by", self.creator_name(token)
