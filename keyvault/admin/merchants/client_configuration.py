"""Actions on an account for browsers and apps: client configuration, allowed origins, customer token lifetime."""

import json
from typing import Any

from django import forms

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.admin.framework.actions import ActionResult, Cleaned, RowAction, VersionedForm
from keyvault.admin.framework.widgets import seconds
from keyvault.models import Account
from keyvault.services.merchants.client_configuration import (
    LONGEST_SECONDS,
    SHORTEST_SECONDS,
    set_allowed_origins,
    set_client_configuration,
    set_customer_token_bound,
)


class ConfigurationForm(VersionedForm):
    configuration = forms.CharField(
        label="Client configuration",
        widget=forms.Textarea(attrs={"rows": 16, "class": "mono"}),
        help_text="A JSON object of at most 16 KiB. It replaces the current one. Anyone with a public key can read it.",
    )

    @classmethod
    def initial_for(cls, row: Account) -> Cleaned:
        text = json.dumps(row.client_configuration, sort_keys=True, indent=2, ensure_ascii=False)
        return {**super().initial_for(row), "configuration": text}

    def clean_configuration(self) -> Any:
        try:
            return json.loads(self.cleaned_data["configuration"], object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            where = f" Line {error.lineno}, column {error.colno}." if isinstance(error, json.JSONDecodeError) else ""
            raise forms.ValidationError(f"Invalid JSON, or a duplicate member name.{where}") from None


class OriginsForm(VersionedForm):
    origins = forms.CharField(
        label="Allowed origins",
        required=False,
        widget=forms.Textarea(attrs={"rows": 8, "class": "mono"}),
        help_text="One per line, such as https://shop.example. Empty: no browser can read responses for this account.",
    )

    @classmethod
    def initial_for(cls, row: Account) -> Cleaned:
        return {**super().initial_for(row), "origins": "\n".join(row.allowed_origins)}


class TokenBoundForm(VersionedForm):
    seconds = forms.IntegerField(
        label="Maximum lifetime in seconds", help_text=f"{SHORTEST_SECONDS} to {LONGEST_SECONDS}."
    )

    @classmethod
    def initial_for(cls, row: Account) -> Cleaned:
        return {**super().initial_for(row), "seconds": row.customer_token_seconds}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("duplicate member name")
    return value


def _configure(grant: Grant, account: Account, cleaned: Cleaned) -> ActionResult:
    set_client_configuration(grant, account, cleaned["configuration"])
    return ActionResult(f"Changed the client configuration of {account}.")


def _list_origins(grant: Grant, account: Account, cleaned: Cleaned) -> ActionResult:
    set_allowed_origins(grant, account, cleaned["origins"].split())
    return ActionResult(f"Saved {len(account.allowed_origins)} allowed origins of {account}.")


def _bound_tokens(grant: Grant, account: Account, cleaned: Cleaned) -> ActionResult:
    set_customer_token_bound(grant, account, cleaned["seconds"])
    return ActionResult(f"Customer access tokens of {account} live at most {seconds(account.customer_token_seconds)}.")


BROWSER_ACTIONS = (
    RowAction(
        "configure",
        "Change client configuration",
        P.MERCHANTS_WRITE,
        _configure,
        "The endpoint client.configuration returns it from now on. It must not contain secrets.",
        form=ConfigurationForm,
    ),
    RowAction(
        "origins",
        "Change allowed origins",
        P.MERCHANTS_WRITE,
        _list_origins,
        lambda account: (
            "Browsers at these origins may read responses to this account's public keys (CORS). This is not "
            "authorization: anyone with a public key can use it outside a browser."
        ),
        form=OriginsForm,
    ),
    RowAction(
        "token-bound",
        "Change customer token lifetime",
        P.MERCHANTS_WRITE,
        _bound_tokens,
        "Maximum lifetime that the merchant can request. Issued tokens keep their lifetime.",
        form=TokenBoundForm,
    ),
)
