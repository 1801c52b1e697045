"""Merchants and their accounts in the console."""

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.scopes import AccessScope
from keyvault.admin.framework.account_lists import read_account_lists
from keyvault.admin.framework.accounts import accounts_in_scope, list_accounts
from keyvault.admin.framework.actions import (
    ActionForm,
    ActionResult,
    Cleaned,
    CreateAction,
    ReasonForm,
    RowAction,
    Tone,
    pause_action,
    resume_action,
    run_service,
)
from keyvault.admin.framework.activity import account_activity
from keyvault.admin.framework.columns import badge_column, moment_column
from keyvault.admin.framework.components import Columns, Stack
from keyvault.admin.framework.enforcement import operator_of
from keyvault.admin.framework.model_admin import ConsoleModelAdmin
from keyvault.admin.framework.shown_environment import environment_of
from keyvault.admin.framework.widgets import (
    NOTHING,
    Detail,
    FactTable,
    Line,
    badge,
    identifier,
    link,
    moment,
    mono,
    seconds,
)
from keyvault.admin.merchants.client_configuration import BROWSER_ACTIONS
from keyvault.domain.environments import Environment
from keyvault.domain.errors import Fault, RequestInvalidError
from keyvault.models import Account, Merchant, MerchantStatus
from keyvault.services.catalog.base_urls import BASE_URLS
from keyvault.services.catalog.catalog import limit_of
from keyvault.services.limits.defaults import default_limit
from keyvault.services.merchants.merchants import (
    create_merchant,
    resume_account,
    resume_merchant,
    scope_of_merchant,
    suspend_account,
    suspend_merchant,
)
from keyvault.services.offboarding import MerchantAssets, count_assets, offboard_merchant


class MerchantForm(ActionForm):
    merchant_id = forms.CharField(
        label="Merchant id", max_length=64, help_text="a-z, 0-9 and inner hyphens. The id cannot be changed later."
    )
    name = forms.CharField(label="Name", max_length=200)


class OffboardForm(ReasonForm):
    merchant_id = forms.CharField(
        label="Merchant id, typed again",
        max_length=64,
        widget=forms.TextInput(attrs={"autocomplete": "off", "class": "mono"}),
        help_text="Offboarding cannot be undone. Type the id to confirm the merchant.",
    )


def _create(grant: Grant, cleaned: Cleaned) -> ActionResult:
    merchant = create_merchant(grant, **cleaned)
    return ActionResult(f"Created {merchant} with accounts in sandbox and production.", row=merchant)


def _offboard(grant: Grant, merchant: Merchant, cleaned: Cleaned) -> ActionResult:
    if cleaned["merchant_id"].strip() != merchant.merchant_id:
        raise RequestInvalidError(
            "Nothing was revoked.", [Fault("/merchant_id", f"This is not the id of {merchant.name}.")]
        )
    result = offboard_merchant(grant, merchant, cleaned["why"])
    left = f"Not finished, offboard again: {result.left.format_counts()}." if result.left else "Nothing remains."
    return ActionResult(f"Offboarded {merchant}. Revoked in {result.ended.format_counts()}. {left}")


def _count_assets(merchant: Merchant) -> MerchantAssets:
    return count_assets(merchant, datetime.now(UTC))


def _limit(account: Account) -> str:
    """Return the account's own limit, or the default of its environment."""
    own = limit_of(account.limit_count, account.limit_seconds)
    limit = own or default_limit(Environment(account.environment))
    return f"{limit.count} per {seconds(limit.seconds)}" + ("" if own else " (default of the environment)")


def _is_active(row: Merchant | Account) -> bool:
    return MerchantStatus(row.status) is MerchantStatus.ACTIVE


def _is_suspended(row: Merchant | Account) -> bool:
    return MerchantStatus(row.status) is MerchantStatus.SUSPENDED


def _is_offboarded(merchant: Merchant) -> bool:
    return MerchantStatus(merchant.status) is MerchantStatus.OFFBOARDED


class MerchantAdmin(ConsoleModelAdmin):
    view_permissions = (P.MERCHANTS_READ,)
    menu, singular, plural = "Merchants", "Merchant", "Merchants"
    row_actions = (
        pause_action(
            "suspend",
            "Suspend merchant",
            P.MERCHANTS_WRITE,
            run_service(suspend_merchant, lambda merchant: f"{merchant} is suspended in both environments."),
            "Every key of the merchant is refused in sandbox and production until the merchant is resumed.",
            is_available=_is_active,
        ),
        resume_action(
            "resume",
            "Resume merchant",
            P.MERCHANTS_WRITE,
            run_service(resume_merchant, lambda merchant: f"{merchant} is active again."),
            "The merchant's active keys work again, except in accounts that are suspended themselves.",
            is_available=_is_suspended,
        ),
        RowAction(
            "offboard",
            "Offboard",
            P.MERCHANTS_OFFBOARD,
            _offboard,
            lambda merchant: (
                "Everything counted below is revoked immediately and permanently in sandbox and production, even "
                "while the secret backend and the broker are down. The workers then end open rotations and destroy "
                "the copies in the secret backend. The merchant stays listed with its history and cannot become "
                "active again. If this is interrupted, repeat it."
            ),
            form=OffboardForm,
            is_available=lambda merchant: not _is_offboarded(merchant) or bool(_count_assets(merchant)),
            tone=Tone.DANGER,
            step_up=True,
        ),
    )
    create_actions = (
        CreateAction(
            "create",
            "Create merchant",
            P.MERCHANTS_WRITE,
            MerchantForm,
            _create,
            "Creates the merchant with an account in each environment; each account has its own audit chain.",
            "Create merchant",
            is_of_installation=True,
        ),
    )

    list_display = ("name", "merchant_id", "status_badge", "created")
    list_filter = ("status",)
    search_fields = ("^merchant_id", "^name")
    search_help_text = "By the beginning of an id or name."
    sortable_by = ()
    ordering = ("merchant_id",)

    status_badge = badge_column("status", "status")
    created = moment_column("created", "created_at")

    def find_by_word(self, request: HttpRequest, word: str) -> Iterable[QuerySet[Any]]:
        """Find a merchant by the beginning of its id or of its name."""
        rows = self.get_queryset(request).order_by()
        yield rows.filter(pk__startswith=word.lower())
        yield rows.filter(Q(name__startswith=word) | Q(name__startswith=word.capitalize()))

    def hit_of(self, row: Merchant) -> Line:
        return Line(self.url_of(row), row.name, row.merchant_id)

    def rows_in_scope(self, rows: QuerySet[Any], scope: AccessScope) -> QuerySet[Any]:
        return rows if scope.merchants is None else rows.filter(pk__in=scope.merchants)

    def find_row(self, request: HttpRequest, object_id: str) -> Any:
        """Load the merchant and its accounts by one query. Raises NotFoundError."""
        accounts = [] if "\0" in object_id else list_accounts(request, object_id)
        if not accounts:
            return super().find_row(request, object_id)
        row: Any = accounts[0].merchant
        row.seen_accounts = accounts
        return row

    def scope_of(self, row: Merchant) -> AccessScope:
        return scope_of_merchant(row)

    def summary(self, row: Merchant) -> FactTable:
        has = _count_assets(row)
        return FactTable(
            "Merchant",
            [
                ("Merchant id", mono(row)),
                ("Name", row.name),
                ("Status", badge(row.status)),
                *((f"Assets in {environment}", held.format_counts()) for environment, held in has.accounts.items()),
                ("Service tokens of this merchant only", has.service_tokens),
            ],
        )

    def detail(self, request: HttpRequest, row: Merchant) -> Detail:
        scope, chosen = operator_of(request).scope, environment_of(request)
        accounts = [each for each in accounts_in_scope(request, row) if chosen in {None, each.environment}]
        columns = self._columns(request, accounts)
        return Detail(
            title=row.name,
            state=row.status,
            lead=format_html("{} · created {}", identifier(row), moment(row.created_at)),
            notes=list(_notes(row, is_counted=scope.covers(scope_of_merchant(row)))),
            sections=[Columns(columns, are_even=True)] if len(columns) > 1 else columns,
        )

    def _columns(self, request: HttpRequest, accounts: Sequence[Account]) -> list[Stack]:
        """Return what is shown of each account: facts, cards and lists of other model admins, and its activity."""
        others = self.other_admins()
        cards = [other.account_cards(request, accounts) for other in others]
        found = [listed for other in others if (listed := other.account_list(request)) is not None]
        tables, activity = read_account_lists(found, accounts), account_activity(request, accounts)
        return [
            Stack(
                [
                    _account_facts(account),
                    *(card[account.pk] for card in cards if account.pk in card),
                    *tables[account.pk],
                    *([activity[account.pk]] if account.pk in activity else []),
                ],
                account.environment,
            )
            for account in accounts
        ]


def _account_facts(account: Account) -> FactTable:
    page = reverse("admin:keyvault_account_change", args=[account.pk])
    status = account.merchant.status if _is_offboarded(account.merchant) else account.status
    return FactTable(
        account.environment.capitalize(),
        [
            ("Status", badge(status)),
            ("Base URL", mono(BASE_URLS[Environment(account.environment)])),
            ("Limit", _limit(account)),
        ],
        aside=link(page, f"Open {account.environment} account"),
    )


def _merchant_note(merchant: Merchant) -> str:
    if _is_offboarded(merchant):
        return "The merchant was offboarded. All keys of this account are refused permanently."
    return "The merchant is suspended, so all keys of this account are refused."


def _notes(merchant: Merchant, *, is_counted: bool) -> Iterable[str]:
    if _is_offboarded(merchant):
        yield "The merchant was offboarded. All its keys are refused permanently."
        if is_counted and (left := _count_assets(merchant)):
            yield f"Offboarding is not finished; offboard the merchant again. Remaining in {left.format_counts()}."


class AccountAdmin(ConsoleModelAdmin):
    view_permissions = (P.MERCHANTS_READ,)
    menu, singular, plural = "Merchants", "Account", "Accounts"
    account_lookup = "pk"
    row_actions = (
        pause_action(
            "suspend",
            "Suspend account",
            P.MERCHANTS_WRITE,
            run_service(suspend_account, lambda account: f"{account} is suspended."),
            lambda account: (
                f"Every key of the merchant is refused in {account.environment} until the account is resumed."
            ),
            is_available=lambda account: _is_active(account) and not _is_offboarded(account.merchant),
        ),
        resume_action(
            "resume",
            "Resume account",
            P.MERCHANTS_WRITE,
            run_service(resume_account, lambda account: f"{account} is active again."),
            lambda account: f"The merchant's active keys work again in {account.environment}.",
            is_available=lambda account: _is_suspended(account) and not _is_offboarded(account.merchant),
        ),
        *BROWSER_ACTIONS,
    )

    list_display = ("account", "name", "environment_badge", "status_badge", "merchant_badge")
    list_filter = ("environment", "status")
    list_select_related = ("merchant",)
    search_fields = ("^merchant__merchant_id", "^merchant__name")
    search_help_text = "By the beginning of a merchant's id or name."
    sortable_by = ()
    ordering = ("merchant_id", "environment")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).select_related("merchant")

    @admin.display(ordering="merchant_id")
    def account(self, account: Account) -> str:
        return str(account)

    @admin.display(description="merchant", ordering="merchant__name")
    def name(self, account: Account) -> str:
        return account.merchant.name

    environment_badge = badge_column("environment", "environment")
    status_badge = badge_column("status", "status")
    merchant_badge = badge_column("merchant status", "merchant__status")

    def account_of(self, row: Account) -> Account:
        return row

    def summary(self, row: Account) -> FactTable:
        return FactTable(
            "Account",
            [
                ("Merchant", f"{row.merchant.name} ({row.merchant_id})"),
                ("Environment", badge(row.environment)),
                ("Status", badge(row.status)),
            ],
        )

    def detail(self, request: HttpRequest, row: Account) -> Detail:
        merchant = link(reverse("admin:keyvault_merchant_change", args=[row.merchant_id]), row.merchant.name)
        return Detail(
            title=str(row),
            state=row.status,
            notes=[] if _is_active(row.merchant) else [_merchant_note(row.merchant)],
            sections=[
                FactTable(
                    "Account",
                    [
                        ("Merchant", merchant),
                        ("Environment", badge(row.environment)),
                        ("Base URL", mono(BASE_URLS[Environment(row.environment)])),
                        ("Limit", _limit(row)),
                        ("Created", moment(row.created_at)),
                    ],
                ),
                FactTable(
                    "For browsers and apps",
                    [
                        ("Client configuration", mono(json.dumps(row.client_configuration, sort_keys=True))),
                        ("Allowed origins", mono(" ".join(row.allowed_origins)) if row.allowed_origins else NOTHING),
                        ("Maximum customer token lifetime", seconds(row.customer_token_seconds)),
                    ],
                ),
            ],
        )
