"""Rotations on the console's overview: those in progress, and how many ended in the last week. Two queries."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString

from keyvault.admin.framework.components import Segments, Tile
from keyvault.admin.framework.enforcement import operator_of
from keyvault.admin.framework.model_admin import ConsoleModelAdmin
from keyvault.admin.framework.overview import OverviewPart, PartFinder, format_bounded
from keyvault.admin.framework.widgets import Table, badge, duration, link
from rotation.admin.rotation_sections import steps_of
from rotation.domain.events import RotationState as S
from rotation.models import Rotation

MAX_SHOWN = 6
"""Maximum rotations that are shown."""

MAX_ENDED = 10_000
"""Maximum ended rotations that are counted."""

_WEEK = timedelta(days=7)
_SHOWN_STATES = (
    S.STALLED,
    S.EMERGENCY,
    S.ROLLING_BACK,
    S.REVOKING,
    S.QUARANTINE,
    S.OVERLAP,
    S.AWAITING_PROOF,
    S.PUBLISHING,
    S.STAGED,
)
"""States in which a rotation is in progress, in the order of the table."""


def _rotations() -> ConsoleModelAdmin:
    rotations = admin.site._registry[Rotation]
    if not isinstance(rotations, ConsoleModelAdmin):
        raise TypeError(f"{rotations} is not a ConsoleModelAdmin")
    return rotations


def _rows_shown(request: HttpRequest, rotations: ConsoleModelAdmin) -> QuerySet[Any]:
    """Return the rotations that the operator may see, without what the list joins."""
    return rotations.rows_shown(
        request, rotations.rows_in_scope(Rotation.objects.order_by(), operator_of(request).scope)
    )


def _select(request: HttpRequest) -> Sequence[QuerySet[Any]]:
    """Select the first rotations of each state, by the index of states: sorting all open ones would read each."""
    rotations = _rotations()
    if not rotations.has_view_permission(request):
        return []
    rows = _rows_shown(request, rotations)
    return [rows.filter(state=state).order_by("created_at")[:MAX_SHOWN] for state in _SHOWN_STATES]


def _find_part(request: HttpRequest, ids: Sequence[Sequence[str]]) -> OverviewPart | None:
    rotations = _rotations()
    if not rotations.has_view_permission(request):
        return None
    now = datetime.now(UTC)
    rows = _rows_shown(request, rotations)
    selected = [pk for each in ids for pk in each]
    shown = selected[:MAX_SHOWN]
    found: Sequence[Rotation] = list(
        rows.filter(pk__in=shown).select_related("credential__account", "predecessor", "replacement")
    )
    listed = sorted(found, key=lambda row: shown.index(row.pk))
    recent = rows.filter(state=S.COMPLETED, created_at__gte=now - _WEEK).values("pk")
    completed = recent.order_by("created_at")[: MAX_ENDED + 1].count()
    stalled = len(ids[_SHOWN_STATES.index(S.STALLED)])
    more = "+" if stalled >= MAX_SHOWN else ""
    return OverviewPart(
        tiles=[
            Tile("Rotations this week", format_bounded(completed, MAX_ENDED), f"completed · {stalled}{more} stalled")
        ],
        section=Table(
            "Rotations in progress",
            ["Credential", "Environment", "State", "Progress", "Time left"],
            [_cells(rotations, row, now) for row in listed],
            "No rotation is in progress. Rotations that replace a key appear here with the step that they wait for.",
            link(rotations.list_url(), "Show all" if len(selected) > MAX_SHOWN else "All rotations"),
        ),
    )


PART = PartFinder(_select, _find_part)


def _cells(rotations: ConsoleModelAdmin, row: Rotation, now: datetime) -> tuple[SafeString | Segments | str, ...]:
    account = row.credential.account
    return (
        link(rotations.url_of(row), f"{account.merchant_id} · {row.credential.label}"),
        badge(account.environment),
        badge(row.state),
        Segments(steps_of(row)),
        _time_left(row, now),
    )


def _time_left(row: Rotation, now: datetime) -> str:
    """Return how long until the rotation's deadline."""
    if row.deadline_at is None or row.state == S.REVOKING:
        return "no deadline"
    left = row.deadline_at - now
    return f"{duration(-left)} late" if left < timedelta() else duration(left)
