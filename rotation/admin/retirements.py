"""Retirement dates of old public keys in the console: shown with their users, approved by a second person."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from django.contrib import admin
from django.db.models import Exists, OuterRef, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html_join
from django.utils.safestring import SafeString

from keyvault.access.permissions import Permission as P
from keyvault.admin.framework.actions import RowAction, Tone, VersionedForm, run_service
from keyvault.admin.framework.attention import Attention
from keyvault.admin.framework.columns import badge_column, moment_column
from keyvault.admin.framework.enforcement import may
from keyvault.admin.framework.four_eyes import OWN_REQUEST_NOTE, is_requester, requester_column, requester_name
from keyvault.admin.framework.model_admin import ConsoleModelAdmin
from keyvault.admin.framework.widgets import (
    NOTHING,
    Detail,
    Difference,
    FactTable,
    Line,
    link,
    moment,
    mono,
)
from keyvault.admin.keys.keys import format_usage, key_link
from keyvault.admin.keys.traffic import day_uses
from keyvault.admin.keys.usage import use_tables
from keyvault.models import Account
from keyvault.models.usage import SIGNS_OF_LIFE
from keyvault.services.usage.reports import has_more_users, read_users, versions_of
from rotation.models import Retirement, Rotation
from rotation.services.rotations.interventions import approve_retirement, may_be_retired

_MAX_VERSIONS = 10


def _is_awaiting_approval(retirement: Any) -> bool:
    """Whether the date can still be approved; a later date supersedes an unapproved one.

    `retirement`: a row of the model admin, with `has_newer`.
    """
    is_open = retirement.approved_at is None and may_be_retired(retirement.rotation)
    return is_open and retirement.retire_at > datetime.now(UTC) and not retirement.has_newer


def _state(retirement: Retirement) -> str:
    if retirement.approved_at is not None:
        return "approved"
    return "awaiting_approval" if _is_awaiting_approval(retirement) else "expired"


@admin.register(Retirement)
class RetirementAdmin(ConsoleModelAdmin):
    view_permissions = (P.ROTATIONS_READ,)
    menu, singular, plural = "Rotations", "Retirement", "Retirements"
    account_lookup = "rotation__account"
    row_actions = (
        RowAction(
            "approve",
            "Approve date",
            P.ROTATIONS_APPROVE,
            run_service(
                approve_retirement,
                lambda retirement: f"Approved. The old key is retired on {retirement.retire_at:%Y-%m-%d %H:%M} UTC.",
            ),
            (
                "The old public key is refused from this date, first in quarantine and then permanently. Shops and "
                "apps that still use it fail. Traffic does not reinstate it."
            ),
            form=VersionedForm,
            is_available=_is_awaiting_approval,
            tone=Tone.GOOD,
            step_up=True,
        ),
    )

    list_display = ("retired_at", "state_badge", "account", "rotation", "requested_by", "created")
    list_filter = ("rotation__credential__account__environment",)
    search_fields = ("=rotation__rotation_id", "=rotation__predecessor__key_id", "=rotation__credential__credential_id")
    search_help_text = "By rotation id, credential id or the old key's id."
    ordering = ("-created_at",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        newer = Retirement.objects.filter(rotation=OuterRef("rotation"), pk__gt=OuterRef("pk"))
        rows: QuerySet[Any] = super().get_queryset(request).annotate(has_newer=Exists(newer))
        return rows.select_related(
            "rotation__credential__account__merchant",
            "rotation__predecessor__credential__account",
            "rotation__predecessor__use",
            "requester",
            "approver",
        )

    retired_at = moment_column("date", "retire_at")
    state_badge = badge_column("state", _state)
    requested_by = requester_column
    created = moment_column("requested", "created_at")

    @admin.display(ordering="rotation__credential__account__merchant_id")
    def account(self, row: Retirement) -> str:
        return str(row.rotation.credential.account)

    def name_of(self, row: Retirement) -> str:
        return f"{row.rotation.credential.account} · {row.rotation.credential.label}"

    def account_of(self, row: Retirement) -> Account:
        account: Account = row.rotation.credential.account
        return account

    def requester_person_of(self, row: Retirement) -> str:
        return row.requester_person

    def summary(self, row: Retirement) -> FactTable:
        """Return the date, and the key that is refused from then on."""
        rotation = row.rotation
        url = reverse("admin:rotation_rotation_change", args=[rotation.pk])
        return FactTable(
            "Request",
            [
                ("Old key", key_link(rotation.predecessor)),
                ("Retired at", moment(row.retire_at)),
                ("Rotation", link(url, mono(rotation))),
                ("Replacement confirmed", moment(rotation.confirmed_at, missing="not yet")),
                ("Requested by", requester_name(row)),
            ],
        )

    def detail(self, request: HttpRequest, row: Retirement) -> Detail:
        approver = NOTHING if row.approver is None else row.approver.username
        approval = FactTable("Approval", [("Approved", moment(row.approved_at, missing="not yet")), ("By", approver)])
        predecessor, notes = row.rotation.predecessor, []
        if _state(row) == "awaiting_approval" and is_requester(request, row):
            notes.append(OWN_REQUEST_NOTE)
        elif _state(row) == "expired":
            notes.append(
                "This date was not approved in time, a later date was requested, or the rotation no longer needs one. "
                "It can no longer be approved."
            )
        return Detail(
            title=self.name_of(row),
            state=_state(row),
            notes=notes,
            sections=[
                self.summary(row),
                approval,
                *use_tables(predecessor, read_users(predecessor.key_id), has_more=has_more_users(predecessor.key_id)),
            ],
        )

    def changes(self, row: Retirement) -> Iterable[Difference]:
        refused = f"refused from {row.retire_at:%Y-%m-%d %H:%M} UTC, then revoked"
        yield Difference("Old public key", format_usage(row.rotation.predecessor), refused)

    def decision_facts(self, row: Retirement) -> Iterable[tuple[str, Any]]:
        yield "Old key in the last 24 hours", day_uses(row.rotation.predecessor)
        yield "Still used by", _versions(row.rotation)

    def approval_items(self, request: HttpRequest) -> Iterable[Attention]:
        if not may(request, P.ROTATIONS_APPROVE):
            return
        asked = self.get_queryset(request).filter(approved_at__isnull=True, retire_at__gt=Now())
        yield self.approval(
            "Retirement dates to approve",
            asked.order_by("retire_at"),
            "",
            select=lambda rows: list(filter(_is_awaiting_approval, rows)),
        )

    def line_of(self, row: Retirement) -> Line:
        return Line(
            self.url_of(row), self.name_of(row), f"requested by {requester_name(row)}; retired at", row.retire_at
        )


def _versions(rotation: Rotation) -> SafeString | str:
    """Return the latest versions, with a note when there are more."""
    versions = versions_of(read_users(rotation.predecessor_id, SIGNS_OF_LIFE), limit=_MAX_VERSIONS + 1)
    lines = [
        f"{use.origin or 'no origin'} · {use.user_agent or 'no user agent'}: last on {use.last_at:%Y-%m-%d}, "
        f"uses seen: {use.count}"
        for use in versions[:_MAX_VERSIONS]
    ]
    if len(versions) > _MAX_VERSIONS or has_more_users(rotation.predecessor_id, outcomes=SIGNS_OF_LIFE):
        lines.append("There are more.")
    return format_html_join("", "<div>{}</div>", ((line,) for line in lines)) or "no use recorded"
