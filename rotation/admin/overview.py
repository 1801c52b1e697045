"""Rotations on the console's overview: those in progress, how many ended, and keys that should be. Two queries."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from keyvault.access.permissions import Permission as P
from keyvault.admin.framework.components import Segments, Tile
from keyvault.admin.framework.enforcement import may, operator_of
from keyvault.admin.framework.model_admin import ConsoleModelAdmin
from keyvault.admin.framework.overview import OverviewPart, PartFinder, format_bounded
from keyvault.admin.framework.shown_environment import shown_scope
from keyvault.admin.framework.widgets import Table, badge, duration, link
from keyvault.admin.keys.overview import ACTIVE_KEYS
from keyvault.domain.environments import Environment
from keyvault.models import Operator
from keyvault.models.row_count import RowCount
from rotation.admin.rotation_progress import format_reason
from rotation.admin.rotation_sections import steps_of
from rotation.domain.events import RotationState as S
from rotation.domain.plan_fields import Proof
from rotation.models import Rotation
from rotation.services.schedules.overdue import MAX_OVERDUE, overdue_counts, select_period

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


def _select(request: HttpRequest) -> Sequence[tuple[QuerySet[Any], str]]:
    """Select the first rotations of each state, by the index of states: sorting all open ones would read each.

    Then the cryptoperiod of each shown environment, if the operator may see the numbers of all keys.
    """
    rotations = _rotations()
    if not rotations.has_view_permission(request):
        return []
    rows = _rows_shown(request, rotations)
    first = [(rows.filter(state=state).order_by("created_at")[:MAX_SHOWN], "pk") for state in _SHOWN_STATES]
    return [*first, *((select_period(environment), "cryptoperiod_days") for environment in _counted_in(request))]


def _counted_in(request: HttpRequest) -> list[Environment]:
    """Return the environments of which the operator sees the numbers of all keys."""
    if operator_of(request).scope.merchants is not None or not may(request, P.KEYS_READ):
        return []
    return sorted(shown_scope(request).environments)


def _find_part(request: HttpRequest, found_values: Sequence[Sequence[str]]) -> OverviewPart | None:
    rotations = _rotations()
    if not rotations.has_view_permission(request):
        return None
    now = datetime.now(UTC)
    rows = _rows_shown(request, rotations)
    ids, periods = found_values[: len(_SHOWN_STATES)], found_values[len(_SHOWN_STATES) :]
    selected = [pk for each in ids for pk in each]
    shown = selected[:MAX_SHOWN]
    # Without those that have ended since their ids were read.
    in_progress = rows.filter(pk__in=shown, state__in=_SHOWN_STATES)
    found: Sequence[Rotation] = list(in_progress.select_related("credential__account", "predecessor", "replacement"))
    listed = sorted(found, key=lambda row: shown.index(row.pk))
    recent = rows.filter(state=S.COMPLETED, created_at__gte=now - _WEEK).values("pk")
    counted_in = zip(_counted_in(request), periods, strict=True)
    days = {environment: int(found[0]) for environment, found in counted_in if found}
    counts = {"completed": RowCount(recent.order_by("created_at")[: MAX_ENDED + 1])} | overdue_counts(days, now)
    # One query for all numbers, of which each is a column of the operator's row.
    operator = Operator.objects.filter(username=operator_of(request).username)
    numbers = dict(zip(counts, operator.values_list(*counts.values()).get(), strict=True))
    completed = numbers["completed"]
    stalled = len(ids[_SHOWN_STATES.index(S.STALLED)])
    more = "+" if stalled >= MAX_SHOWN else ""
    return OverviewPart(
        tiles=[
            Tile("Rotations this week", format_bounded(completed, MAX_ENDED), f"completed · {stalled}{more} stalled"),
        ],
        notes=_overdue_notes(days, numbers),
        section=Table(
            "Rotations in progress",
            ["Credential", "Environment", "State", "Progress", "Waiting for"],
            [_cells(rotations, row, now) for row in listed],
            "No rotation is in progress. Rotations that replace a key appear here with the step that they wait for.",
            link(rotations.list_url(), "Show all" if len(selected) > MAX_SHOWN else "All rotations"),
        ),
    )


def _overdue_notes(days: Mapping[Environment, int], numbers: Mapping[str, int]) -> dict[str, SafeString]:
    """Return the number of active keys that are older than the cryptoperiod of their environment's schedule."""
    if not days:
        return {}
    overdue = sum(numbers[f"overdue_{environment}"] for environment in days)
    more = "+" if any(numbers[f"old_{environment}"] > MAX_OVERDUE for environment in days) else ""
    page = reverse("admin:rotation_rotationschedule_calendar")
    return {ACTIVE_KEYS: link(page, f"{overdue:,}{more} past their cryptoperiod")}


PART = PartFinder(_select, _find_part)


def _cells(rotations: ConsoleModelAdmin, row: Rotation, now: datetime) -> tuple[SafeString | Segments | str, ...]:
    account = row.credential.account
    return (
        link(rotations.url_of(row), f"{account.merchant_id} · {row.credential.label}"),
        badge(account.environment),
        badge(row.state),
        Segments(steps_of(row)),
        _waiting_for(row, now),
    )


_WAITS = {
    S.EMERGENCY: "the emergency replacement",
    S.STAGED: "every verifier to accept the replacement",
    S.OVERLAP: "silence of the old key",
    S.QUARANTINE: "the end of the quarantine",
    S.REVOKING: "the worker to revoke the old key",
    S.ROLLING_BACK: "silence of the replacement",
}
_PROOFS = {
    Proof.ACK: "the merchant's acknowledgement",
    Proof.CONFIRMATION: "an operator's confirmation",
}


def _waiting_for(row: Rotation, now: datetime) -> SafeString | str:
    """Return what the rotation waits for by its own columns, and how long until its deadline."""
    what = _in_short(row, now)
    if row.deadline_at is None or row.state in {S.REVOKING, S.STALLED}:
        return what
    left = row.deadline_at - now
    note = f"deadline passed {duration(-left)} ago" if left < timedelta() else f"deadline in {duration(left)}"
    return format_html('{}<div class="quiet small">{}</div>', what, note)


def _in_short(row: Rotation, now: datetime) -> str:
    state, plan = S(row.state), row.readable_plan
    if state is S.STALLED:
        is_late = row.deadline_at is not None and row.deadline_at < now
        return f"deadline passed {duration(now - row.deadline_at)} ago" if is_late else format_reason(row.why)
    if row.is_held:
        return "an operator to release the key"
    if state is S.PUBLISHING:
        return "delivery" if row.delivered_at is None else "the merchant's webhook endpoint"
    if state is S.AWAITING_PROOF:
        return "use of the replacement" if plan is None else _PROOFS.get(plan.proof, "use of the replacement")
    if state is S.OVERLAP and row.retire_at is not None:
        return f"the retirement date, {row.retire_at:%Y-%m-%d}"
    if row.quarantined_at is not None and state in {S.QUARANTINE, S.ROLLING_BACK} and plan is not None:
        left = row.quarantined_at + timedelta(seconds=plan.quarantine_seconds) - now
        return f"the quarantine, {duration(left)} left" if left > timedelta() else "the end of the quarantine"
    return _WAITS[state]
