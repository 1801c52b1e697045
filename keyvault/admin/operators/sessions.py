"""The operator's own sessions, which the operator may end one by one, or all but the current one."""

from datetime import UTC, datetime
from typing import Any

from django.contrib import admin
from django.db.models import BooleanField, Q, QuerySet
from django.db.models.expressions import ExpressionWrapper
from django.http import HttpRequest
from django.urls import reverse

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.admin.framework.actions import ActionResult, Cleaned, RowAction, Tone
from keyvault.admin.framework.columns import badge_column, moment_column
from keyvault.admin.framework.enforcement import operator_of
from keyvault.admin.framework.model_admin import ConsoleModelAdmin
from keyvault.admin.framework.widgets import Detail, FactTable, Link, moment
from keyvault.models import ConsoleSession
from keyvault.services.sessions.sessions import end_other_sessions, end_session, list_sessions
from keyvault.services.sessions.store import session_id


def _end(grant: Grant, session: ConsoleSession, cleaned: Cleaned) -> ActionResult:
    end_session(grant, session)
    return ActionResult("The session has ended.", url=reverse("admin:keyvault_consolesession_changelist"))


def _end_others(grant: Grant, session: ConsoleSession, cleaned: Cleaned) -> ActionResult:
    ended = end_other_sessions(grant, session)
    url = reverse("admin:keyvault_consolesession_changelist")
    return ActionResult(f"Other sessions that have ended: {ended}.", url=url)


def _state(session: Any) -> str:
    return "current" if session.is_current else "active"


class ConsoleSessionAdmin(ConsoleModelAdmin):
    view_permissions = (P.SESSIONS_WRITE,)
    menu, singular, plural = "Operators", "Session", "Own sessions"
    has_environments = False
    row_actions = (
        RowAction(
            "end",
            "End session",
            P.SESSIONS_WRITE,
            _end,
            "The browser is signed out with its next request. If you do not know this session, ask the host "
            "administrator to reset your password, too.",
            is_available=lambda session: not session.is_current,
            tone=Tone.DANGER,
        ),
        RowAction(
            "end-others",
            "End all other sessions",
            P.SESSIONS_WRITE,
            _end_others,
            "Every other browser in which you are signed in is signed out with its next request.",
            is_available=lambda session: session.is_current,
            tone=Tone.DANGER,
        ),
    )

    change_list_template = "console/change_list_more.html"
    list_display = ("browser_name", "state_badge", "address_text", "started", "last_used", "ends")
    ordering = ("-last_used_at",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the signed-in operator's own sessions, and mark the one of this request."""
        is_current = Q(pk=session_id(request.session.session_key or ""))
        return list_sessions(operator_of(request), datetime.now(UTC)).annotate(
            is_current=ExpressionWrapper(is_current, output_field=BooleanField())
        )

    @admin.display(description="browser", ordering="browser")
    def browser_name(self, session: ConsoleSession) -> str:
        return session.browser or "Unknown browser"

    state_badge = badge_column("state", _state)

    @admin.display(description="address", ordering="address")
    def address_text(self, session: ConsoleSession) -> str:
        return session.address or "unknown"

    started = moment_column("started", "started_at")
    last_used = moment_column("last used", "last_used_at")
    ends = moment_column("ends if unused", "expire_date")

    def list_context(self, request: HttpRequest) -> dict[str, Any]:
        here = reverse("admin:keyvault_consolesession_end-others", args=[session_id(request.session.session_key or "")])
        return {**super().list_context(request), "page_links": [Link("End all other sessions", here)]}

    def name_of(self, row: ConsoleSession) -> str:
        return f"{self.browser_name(row)}, {self.address_text(row)}"

    def summary(self, row: ConsoleSession) -> FactTable:
        return FactTable(
            "Session",
            [
                ("Browser", self.browser_name(row)),
                ("Address", self.address_text(row)),
                ("Started", moment(row.started_at)),
                ("Last used", moment(row.last_used_at)),
                ("Ends if unused", moment(row.expire_date)),
            ],
        )

    def detail(self, request: HttpRequest, row: Any) -> Detail:
        notes = ["This is the session that you use now. Sign out to end it."] if row.is_current else []
        return Detail(title=self.name_of(row), state=_state(row), sections=[self.summary(row)], notes=notes)
