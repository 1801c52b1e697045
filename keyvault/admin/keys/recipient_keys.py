"""Recipient keys in the console. Two operators may approve that one applies earlier; one operator may withdraw it."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from django.db.models import QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html

from keyvault.access.permissions import Permission as P
from keyvault.admin.framework.accounts import account_link
from keyvault.admin.framework.actions import ReasonForm, RowAction, Tone, run_service
from keyvault.admin.framework.attention import Attention
from keyvault.admin.framework.columns import badge_column, moment_column
from keyvault.admin.framework.enforcement import may, operator_of
from keyvault.admin.framework.four_eyes import ApproveStoredForm, approvals_table, approve_action
from keyvault.admin.framework.model_admin import ConsoleModelAdmin
from keyvault.admin.framework.widgets import Detail, Difference, FactTable, Line, link, moment, mono
from keyvault.admin.keys.keys import key_link
from keyvault.models import Account, RecipientKey
from keyvault.services.keys.recipient_keys import (
    approve_recipient_key,
    is_pending,
    list_pending,
    withdraw_recipient_key,
)


def _is_pending(row: RecipientKey) -> bool:
    return is_pending(row, datetime.now(UTC))


def _state(row: RecipientKey) -> str:
    if row.withdrawn_at is not None:
        return "withdrawn"
    return "pending" if _is_pending(row) else "active"


class RecipientKeyAdmin(ConsoleModelAdmin):
    view_permissions = (P.KEYS_READ,)
    menu, singular, plural = "Credentials", "Recipient key", "Recipient keys"
    account_lookup = "account"
    environment_lookup = "account_environment"
    row_actions = (
        approve_action(
            P.RECIPIENTS_APPROVE,
            approve_recipient_key,
            (
                "The key applies now, not only 24 hours after it was set. Rotations requested from now on use it. "
                "Ask the merchant first: everyone who holds the credential's API key can set a recipient key. Two "
                "persons approve."
            ),
            approved="Approved. Rotations requested from now on are sealed to this key.",
            is_undecided=_is_pending,
            form=ApproveStoredForm,
        ),
        RowAction(
            "withdraw",
            "Withdraw",
            P.RECIPIENTS_WITHDRAW,
            run_service(withdraw_recipient_key, "Withdrawn. Nothing is sealed to this key any more."),
            (
                "Replacements are no longer sealed to this key, not even in open rotations. If the merchant did not "
                "set it, the credential's API key has leaked: report the key as compromised, too."
            ),
            form=ReasonForm,
            is_available=lambda row: row.withdrawn_at is None,
            tone=Tone.DANGER,
        ),
    )

    list_display = ("recipient_key_id", "state_badge", "account", "credential", "applies", "created")
    list_filter = ("account_environment",)
    search_fields = ("=recipient_key_id", "=credential__credential_id", "=account__merchant__merchant_id")
    search_help_text = "By recipient key id, credential id or merchant id."
    sortable_by = ()
    ordering = ("-created_at", "-recipient_key_id")

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return super().get_queryset(request).select_related("account", "credential")

    def rows_to_open(self, request: HttpRequest) -> QuerySet[Any]:
        return super().rows_to_open(request).select_related("account__merchant", "credential__account", "key")

    state_badge = badge_column("state", _state)
    applies = moment_column("applies", "applies_at")
    created = moment_column("set", "created_at")

    def account_of(self, row: RecipientKey) -> Account:
        return row.account

    def name_of(self, row: RecipientKey) -> str:
        return f"{row.account} · {row.credential.label}"

    def summary(self, row: RecipientKey) -> FactTable:
        credential_url = reverse("admin:keyvault_credential_change", args=[row.credential_id])
        return FactTable(
            "Recipient key",
            [
                ("Recipient key id", mono(row)),
                ("Public key (X25519)", mono(row.public_key)),
                ("Account", account_link(row.account)),
                ("Credential", link(credential_url, mono(row.credential_id))),
                ("Set with", key_link(row.key)),
                ("Set", moment(row.created_at)),
                ("Applies", moment(row.applies_at)),
                ("Withdrawn", moment(row.withdrawn_at, missing="no")),
            ],
        )

    def detail(self, request: HttpRequest, row: RecipientKey) -> Detail:
        return Detail(title=self.name_of(row), state=_state(row), sections=[self.summary(row), approvals_table(row)])

    def changes(self, row: RecipientKey) -> Iterable[Difference]:
        yield Difference(
            "Replacements are sealed to this key", format_html("from {}", moment(row.applies_at)), "from now"
        )

    def approval_items(self, request: HttpRequest) -> Iterable[Attention]:
        if may(request, P.RECIPIENTS_APPROVE):
            rows = list_pending(self.get_queryset(request), Now())
            rows = rows.exclude(approvals__person=operator_of(request).person)
            yield self.approval("Recipient keys that apply later", rows, "", "plain")

    def line_of(self, row: RecipientKey) -> Line:
        return Line(self.url_of(row), self.name_of(row), "applies", row.applies_at)
