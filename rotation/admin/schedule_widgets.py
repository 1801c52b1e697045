"""Formatting of schedules, and the calendar of scheduled rotations with a table per month."""

from collections.abc import Iterable
from typing import Any

from django.db.models import Q
from django.urls import reverse
from django.utils.safestring import SafeString

from keyvault.access.scopes import AccessScope
from keyvault.admin.framework.scoping import in_scope
from keyvault.admin.framework.widgets import NOTHING, FactTable, Table, badge, link, moment, mono
from keyvault.domain.environments import Environment
from rotation.admin.plan_fields import WEEKDAYS, show_override
from rotation.domain.plan_fields import SHARED_FIELDS
from rotation.domain.windows import clock_text
from rotation.models import BlackoutCalendar, RotationSchedule
from rotation.services.schedules.calendar import DateState, NextRotation, ScheduledDate
from rotation.services.schedules.schedules import find_draft, partial_draft

_MAX_ROTATIONS = 20
"""Maximum number of rotations on the page of a schedule or standing approval, the latest first."""


def next_facts(date: ScheduledDate | None) -> FactTable:
    if date is None:
        return FactTable("Next scheduled rotation", [("State", "not on a schedule")])
    rows: list[tuple[str, Any]] = [
        ("State", badge(date.state)),
        ("Starts", moment(date.begins_at, missing="no date")),
        ("Requested", moment(date.ask_at)),
        ("Schedule", date.schedule),
    ]
    return FactTable("Next scheduled rotation", [*rows, *([("Reason", date.why)] if date.why else [])])


def next_rotation_cell(found: NextRotation) -> SafeString | str:
    """Render when the next rotation of a credential begins, or the state of the open one."""
    if found.open_rotation is not None:
        url = reverse("admin:rotation_rotation_change", args=[found.open_rotation.rotation_id])
        return link(url, badge(found.open_rotation.state))
    if found.date is None:
        return NOTHING
    is_dated = found.date.state is DateState.PLANNED and found.date.begins_at is not None
    return moment(found.date.begins_at) if is_dated else badge(found.date.state)


def credential_link(credential_id: str, label: str) -> SafeString:
    return link(reverse("admin:keyvault_credential_change", args=[credential_id]), label)


def rotations_table(title: str, rotations: Any, which: str) -> Table:
    """List the latest of these rotations. `which`: the ones that appear here, such as "this schedule requests"."""
    latest = rotations.select_related("credential__account").order_by("-created_at")[:_MAX_ROTATIONS]
    return Table(
        title,
        ["rotation", "state", "credential", "requested"],
        [
            [
                link(reverse("admin:rotation_rotation_change", args=[item.pk]), mono(item)),
                badge(item.state),
                credential_link(item.credential_id, f"{item.credential.account} · {item.credential.label}"),
                moment(item.created_at),
            ]
            for item in latest
        ],
        empty=f"No rotations yet. The rotations that {which} appear here.",
    )


def schedules_in_scope(scope: AccessScope, schedule: str = "") -> Q:
    """Return the condition for schedules of the scope's accounts, or of an environment whose accounts all are in it.

    `schedule`: prefix of the lookups of a schedule's columns.
    """
    if scope.merchants is None:
        return Q(**{f"{schedule}environment__in": scope.environments})
    return in_scope(scope, f"{schedule}account") | in_scope(scope, f"{schedule}credential__account")


def format_scope(row: RotationSchedule) -> str:
    if row.credential is not None:
        return f"{row.credential.account} · {row.credential.label}"
    return f"all of {row.account or row.environment}"


def format_schedule_window(row: RotationSchedule) -> str:
    terms = find_draft(row)
    if terms is None:
        return "unreadable"
    window = terms.window
    if window is None or not window.weekdays:
        return "at any time"
    days = ", ".join(WEEKDAYS[day][:3] for day in window.weekdays)
    return f"{days} {clock_text(window.opens)} to {clock_text(window.closes)} {window.time_zone}"


def schedule_facts(row: RotationSchedule) -> Iterable[tuple[str, Any]]:
    """Yield the terms of the schedule, without its scope."""
    overrides = (find_draft(row) or partial_draft(row)).overrides
    yield "Environment", badge(row.environment)
    yield "Cryptoperiod", f"{row.cryptoperiod_days} days"
    yield "Jitter", f"up to {row.jitter_days} days earlier" if row.jitter_days else NOTHING
    yield "Lead time", f"{row.lead_days} days" if row.lead_days else NOTHING
    yield "Window", format_schedule_window(row)
    yield "Blackout calendar", _calendar_link(row.calendar)
    for field in SHARED_FIELDS:
        yield field.label, show_override(field, getattr(overrides, field.name), Environment(row.environment))
    yield "In the name of", row.author.get_username()


def _calendar_link(row: BlackoutCalendar | None) -> SafeString | str:
    return NOTHING if row is None else link(reverse("admin:rotation_blackoutcalendar_change", args=[row.pk]), row)
