"""Descriptions of schedules and standing approvals. Read-only."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any

from django.db.models import Prefetch, prefetch_related_objects

from keyvault.domain.canonical import JsonValue
from keyvault.domain.timestamps import format_timestamp
from rotation.models import RotationSchedule, StandingApproval, StandingApprovalState
from rotation.models.standing_approvals import LIVE
from rotation.services.schedules.schedules import find_unreadable, list_all, scope_of
from rotation.services.schedules.standing_approvals import is_undecided, terms_now

A = StandingApprovalState


def list_schedules(environments: Iterable[str], now: datetime) -> list[JsonValue]:
    """Describe the schedules of these environments, with the same number of queries however many there are."""
    schedules = list_all(environments)
    prefetch_related_objects(schedules, _live())
    return [describe_schedule(schedule, now) for schedule in schedules]


def describe_schedule(schedule: Any, now: datetime) -> dict[str, JsonValue]:
    """Describe a schedule: its terms, its state, and its standing approvals that have not ended."""
    prefetch_related_objects([schedule], _live())  # no query if `list_schedules` has read them
    return {
        "scope": str(scope_of(schedule)),
        "state": state_of_schedule(schedule),
        **terms_now(schedule),
        "author": schedule.author.get_username(),
        "standing_approvals": [describe_standing_approval(row, now) for row in schedule.live],
    }


def _live() -> "Prefetch[Any]":
    """Return what reads the standing approvals of schedules that have not ended, into the attribute `live`."""
    rows = StandingApproval.objects.filter(state__in=LIVE).select_related("requester").prefetch_related("approvals")
    return Prefetch("standing_approvals", rows.order_by("created_at"), to_attr="live")


def state_of_schedule(schedule: RotationSchedule) -> str:
    if not schedule.is_enabled:
        return "disabled"
    return "stalled" if find_unreadable(schedule) else "enabled"


def describe_standing_approval(row: StandingApproval, now: datetime) -> dict[str, JsonValue]:
    """Describe a standing approval, with the digest that an approver confirms."""
    return {
        "standing_approval_id": row.approval_id,
        "scope": str(scope_of(row.schedule)),
        "state": state_of_approval(row, now),
        "plan_digest": row.plan_digest,
        "requester": row.requester.get_username(),
        "approvals": row.approvals.count(),
        "approvals_needed": row.approvals_needed,
        "expires_at": format_timestamp(row.expires_at),
    }


def state_of_approval(row: StandingApproval, now: datetime) -> str:
    """Return the state to show; an approval or a request that is too old is shown as expired."""
    is_over = row.state == A.APPROVED and now >= row.expires_at
    is_over = is_over or (row.state == A.AWAITING_APPROVAL and not is_undecided(row, now))
    return "expired" if is_over else str(row.state)
