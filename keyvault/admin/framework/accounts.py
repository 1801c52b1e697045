"""The account on other pages: form fields, the link to its page, and columns for rows that it owns."""

from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.safestring import SafeString

from keyvault.access.scopes import EVERYWHERE, AccessScope
from keyvault.admin.framework.actions import ActionForm, Cleaned, ScopedField
from keyvault.admin.framework.choices import ComboboxInput
from keyvault.admin.framework.columns import badge_column
from keyvault.admin.framework.enforcement import operator_of
from keyvault.admin.framework.model_admin import ConsoleModelAdmin
from keyvault.admin.framework.scoping import in_scope
from keyvault.admin.framework.widgets import Link, link
from keyvault.domain.environments import Environment
from keyvault.models import Account, Merchant
from keyvault.services.merchants.merchants import find_account


def environment_field(help_text: str = "") -> forms.ChoiceField:
    return forms.ChoiceField(choices=[(env.value, env.value) for env in Environment], help_text=help_text)


def merchant_field(help_text: str, *, required: bool = True) -> forms.CharField:
    """Return the field for a merchant's id, which offers the merchants that begin with what is typed."""
    return forms.CharField(required=required, max_length=64, help_text=help_text, widget=ComboboxInput("merchants"))


class AccountForm(ActionForm):
    """Base form of an action that creates something in an account."""

    merchant = merchant_field("Type the beginning of a merchant's name or id.")
    environment = environment_field()


class MerchantsField(ScopedField, forms.CharField):
    """Field for merchant ids, one per line. The cleaned value is a list."""

    widget = forms.Textarea(attrs={"rows": 4})
    scope = EVERYWHERE

    def limit_to(self, scope: AccessScope) -> None:
        self.scope = scope

    def clean(self, value: Any) -> Any:
        names = sorted(set(super().clean(value).split()))
        known = set(Merchant.objects.filter(pk__in=names).values_list("pk", flat=True))
        if self.scope.merchants is not None:
            known &= self.scope.merchants
        if unknown := [name for name in names if name not in known]:
            raise forms.ValidationError(f"Unknown merchants: {', '.join(unknown)}. Enter one merchant id on each line.")
        return names


class MerchantsForm(ActionForm):
    """Base form of what concerns either named merchants or all of them."""

    merchants = MerchantsField(required=False, help_text="Merchant ids, one on each line.")
    all_merchants = forms.BooleanField(required=False, label="All merchants, including future ones")

    def clean(self) -> dict[str, Any]:
        cleaned: dict[str, Any] = super().clean() or self.cleaned_data
        if bool(cleaned.get("merchants")) == bool(cleaned.get("all_merchants")):
            self.add_error("merchants", "Choose either merchants or all merchants.")
        return cleaned


def account_from(cleaned: Cleaned) -> Account:
    """Return the account that an `AccountForm` names. Raises NotFoundError."""
    return find_account(cleaned["merchant"], cleaned["environment"])


def account_query(account: Account) -> str:
    """Return the query string that presets a form to the account."""
    return f"?merchant={account.merchant_id}&environment={account.environment}"


def account_link(account: Account) -> SafeString:
    return link(reverse("admin:keyvault_account_change", args=[account.pk]), account)


def account_crumbs(account: Account) -> list[Link]:
    """Return the breadcrumb of the account, for the pages of its rows."""
    return [Link(str(account), reverse("admin:keyvault_account_change", args=[account.pk]))]


def accounts_in_scope(request: HttpRequest, merchant: Any) -> list[Account]:
    """Return the merchant's accounts in the operator's scope, by environment. `seen_accounts`: if they were read."""
    if not hasattr(merchant, "seen_accounts"):
        merchant.seen_accounts = list_accounts(request, merchant.pk)
    accounts: list[Account] = merchant.seen_accounts
    return accounts


def list_accounts(request: HttpRequest, merchant_id: str) -> list[Account]:
    """Return the accounts of a merchant's id in the operator's scope, by environment, with the merchant."""
    rows = Account.objects.filter(in_scope(operator_of(request).scope, "pk"), merchant=merchant_id)
    return list(rows.select_related("merchant").order_by("environment"))


class AccountRowAdmin(ConsoleModelAdmin):
    """Model admin of rows with an account."""

    account_lookup = "account"

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).select_related("account__merchant")

    @admin.display(ordering="account__merchant_id")
    def merchant(self, row: Any) -> str:
        return str(row.account.merchant_id)

    environment_badge = badge_column("environment", "account__environment")

    def account_of(self, row: Any) -> Account | None:
        account: Account | None = row.account
        return account
