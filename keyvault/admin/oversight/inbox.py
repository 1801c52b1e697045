"""Inbox in the console: notices, unseen alarms first, each linked to its subject."""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from django import forms
from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.urls import NoReverseMatch, reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.admin.framework.accounts import account_link
from keyvault.admin.framework.actions import (
    ActionForm,
    ActionResult,
    Cleaned,
    CreateAction,
    RowAction,
    UtcField,
    run_service,
)
from keyvault.admin.framework.activity import name_event
from keyvault.admin.framework.attention import Attention
from keyvault.admin.framework.columns import badge_column, moment_column
from keyvault.admin.framework.enforcement import operator_of
from keyvault.admin.framework.filters import state_filter
from keyvault.admin.framework.model_admin import ConsoleModelAdmin
from keyvault.admin.framework.subject_pages import find_noun, find_page
from keyvault.admin.framework.widgets import (
    NOTHING,
    Detail,
    FactTable,
    Line,
    Link,
    Table,
    badge,
    link,
    moment,
    mono,
)
from keyvault.domain.ids import is_key_id
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import Account, Notice
from keyvault.services.approvals.inbox import (
    INBOX_ORDER,
    find_name,
    list_unseen,
    mark_all_seen,
    mark_seen,
    with_label,
)
from keyvault.services.webhooks.endpoints import host_of


class AllSeenForm(ActionForm):
    until = UtcField(widget=forms.HiddenInput)


def _all_seen(grant: Grant, cleaned: Cleaned) -> ActionResult:
    return ActionResult(f"Alarms marked as seen: {mark_all_seen(grant, cleaned['until'])}.")


def _is_unseen(notice: Notice) -> bool:
    return notice.is_alarm and notice.seen_at is None


ALARM_FILTER = state_filter(
    {"unseen": Q(is_alarm=True, seen_at__isnull=True), "alarms": Q(is_alarm=True)},
    name="what",
    title="alarms",
    labels={"unseen": "unseen alarms", "alarms": "all alarms"},
)

KIND_FILTER = state_filter(
    {kind.value: Q(kind=kind) for kind in sorted(NoticeKind, key=name_event)},
    name="kind",
    title="what happened",
    labels={kind.value: name_event(kind) for kind in NoticeKind},
)


def _state(notice: Notice) -> str:
    if not notice.is_alarm:
        return "notice"
    return "unseen" if notice.seen_at is None else "seen"


class NoticeAdmin(ConsoleModelAdmin):
    view_permissions = (P.NOTICES_READ,)
    menu, singular, plural = "Incidents", "Notice", "Inbox"
    account_lookup = "account"
    environment_lookup = "account_environment"
    create_actions = (
        CreateAction(
            "all_seen",
            "Mark all as seen",
            P.NOTICES_MARK,
            AllSeenForm,
            _all_seen,
            "Marks every alarm that existed when this page was opened, under your name.",
            "Mark all as seen",
            preset=lambda query: {"until": format_timestamp(datetime.now(UTC))},
            is_of_installation=True,
        ),
    )
    row_actions = (
        RowAction(
            "seen",
            "Mark as seen",
            P.NOTICES_MARK,
            run_service(mark_seen, "Marked as seen."),
            "The alarm leaves the overview and stays in the inbox with your name.",
            is_available=_is_unseen,
        ),
    )

    list_display = ("what", "state_badge", "merchant", "environment_badge", "about", "created")
    list_filter = (ALARM_FILTER, "account_environment", KIND_FILTER)
    search_fields = ("=subject", "=notice_id", "=account__merchant__merchant_id")
    sortable_by = ()
    ordering = INBOX_ORDER

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        return with_label(super().get_queryset(request)).select_related("account__merchant", "seen_by")

    @admin.display(description="what happened")
    def what(self, notice: Notice) -> str:
        return name_event(notice.kind)

    state_badge = badge_column("state", _state)
    created = moment_column("when", "created_at")

    def merchant(self, notice: Notice) -> str:
        return NOTHING if notice.account is None else str(notice.account.merchant_id)

    @admin.display(description="environment")
    def environment_badge(self, notice: Notice) -> SafeString | str:
        return NOTHING if notice.account is None else badge(notice.account.environment)

    @admin.display(description="about")
    def about(self, notice: Notice) -> SafeString:
        return _subject(notice)

    def name_of(self, row: Notice) -> str:
        return name_event(row.kind)

    @property
    def rows_name(self) -> str:
        return "notices"

    def account_of(self, row: Notice) -> Account | None:
        account: Account | None = row.account
        return account

    def create_links(self, request: HttpRequest) -> list[Link]:
        """Return nothing: an operator must open the inbox before marking alarms as seen."""
        return []

    def attention_items(self, request: HttpRequest) -> Iterable[Attention]:
        in_scope = with_label(self.rows_in_scope(list_unseen(), operator_of(request).scope))
        unseen = in_scope.select_related("account__merchant").order_by("-created_at")
        yield self.attention("Unseen alarms", unseen, "?what=unseen", "alarm", one="Alarm", button="Open alarm")

    def line_of(self, row: Notice) -> Line:
        # Once, if the whole account is what the alarm is about.
        detail = " · ".join(dict.fromkeys(map(str, filter(None, (row.account, _about(row))))))
        return Line(
            self.url_of(row),
            name_event(row.kind),
            detail,
            row.created_at,
            about=_subject_url(row),
        )

    def summary(self, row: Notice) -> FactTable:
        return FactTable(
            "Notice",
            [
                ("Event", mono(row.kind)),
                ("Subject", _subject(row)),
                ("Account", _account(row)),
                ("When", moment(row.created_at)),
            ],
        )

    def detail(self, request: HttpRequest, row: Notice) -> Detail:
        payload = [(name.replace("_", " "), _plain(value)) for name, value in sorted(row.payload.items())]
        sections: list[FactTable | Table] = [self.summary(row), FactTable("Details", payload)]
        if row.seen_at is not None:
            seen_by = "" if row.seen_by is None else row.seen_by.get_username()
            sections.append(FactTable("Seen", [("By", seen_by), ("When", moment(row.seen_at))]))
        sections.append(_deliveries(row))
        return Detail(title=name_event(row.kind), state=_state(row), sections=sections)


def _account(notice: Notice) -> SafeString | str:
    if notice.account is None:
        return "none; concerns the installation"
    return account_link(notice.account)


def _subject(notice: Notice) -> SafeString:
    """Render the id of the subject, linked to its page if there is one."""
    url, label = _subject_url(notice), _about(notice)
    return link(url, label) if url else mono(label)


def _subject_url(notice: Notice) -> str:
    """Return the page of the subject; empty without one."""
    text = notice.subject
    if notice.account is None:
        return ""  # a name, which may look like an id
    page = "keyvault_key" if is_key_id(text) else find_page(text, notice.kind)
    try:
        return reverse(f"admin:{page}_change", args=[text])
    except NoReverseMatch:
        return ""


def _about(notice: Notice) -> str:
    """Return what a person knows the subject by; its id or number if there is nothing else."""
    if known := find_name(notice):
        return known
    noun_text = find_noun(notice.kind)
    return str(notice.subject) if noun_text is None else f"{noun_text} {notice.subject}"


_MAX_LISTED = 50
"""Maximum parts of a list that the page of a notice shows."""

_MAX_PART_LENGTH = 120
"""Maximum length of a text inside of a list or an object, in characters."""


def _plain(value: object) -> SafeString | str:
    """Render a value of the payload: objects as names with values, and a list of them with a line for each."""
    if isinstance(value, dict):
        named = ((name.replace("_", " "), _part(part)) for name, part in sorted(value.items()))
        return format_html_join(", ", "{}: {}", named)
    if isinstance(value, list):
        parts, more = value[:_MAX_LISTED], len(value) - _MAX_LISTED
        rest = [f"and {more} more"] if more > 0 else []
        if not any(isinstance(part, dict | list) for part in parts):
            return ", ".join([*(_shorten(_plain(part)) for part in parts), *rest])
        lines = format_html_join("", "<li>{}</li>", ((part,) for part in [*map(_part, parts), *rest]))
        return format_html("<ul>{}</ul>", lines)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def _part(value: object) -> SafeString | str:
    """Render a part of a list or an object. A text is set apart, because it may look like the names around it."""
    return mono(_shorten(value)) if isinstance(value, str) else _plain(value)


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_PART_LENGTH else f"{text[:_MAX_PART_LENGTH]}…"


def _deliveries(notice: Notice) -> Table:
    rows = notice.deliveries.select_related("endpoint").order_by("pk")
    return Table(
        "Webhook deliveries",
        ["endpoint", "state", "attempts", "last response", "delivered"],
        [
            [
                link(reverse("admin:keyvault_webhookendpoint_change", args=[row.endpoint_id]), host_of(row.endpoint)),
                badge(row.state),
                row.attempts,
                row.last_error or row.last_status or "none",
                moment(row.delivered_at, missing="not yet"),
            ]
            for row in rows
        ],
        empty="No deliveries: the account had no enabled endpoint, or the notice is for operators only.",
    )
