"""Request, approve, reject and withdraw the standing approval of a production schedule.

It is bound to a digest over the schedule's plan and selection, and expires. A second person approves it; from then on
the rotations that the schedule requests need no approval of their own.
"""

import secrets
from datetime import datetime, timedelta

from django.db.models import QuerySet

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import OperatorPrincipal, is_claimed
from keyvault.domain.canonical import JsonValue, canonical_digest
from keyvault.domain.errors import Fault, NotFoundError, RequestInvalidError, StateConflictError
from keyvault.domain.free_text import clean_text
from keyvault.domain.ids import mint_id
from keyvault.domain.timestamps import format_timestamp
from keyvault.services.approvals.four_eyes import approving_operator, lock_row, record_approval
from keyvault.services.issuance.requests import approvals_needed
from keyvault.services.operators.operators import operator_row
from keyvault.services.recording.transaction import recorded
from rotation.domain.policy import APPROVAL_LIFETIME
from rotation.models import RotationSchedule, ScheduleApproval, StandingApproval, StandingApprovalState
from rotation.services.schedules.schedules import find_unreadable, place_of, scope_of

A = StandingApprovalState

DEFAULT_DAYS = 90
MAX_DAYS = 366
"""Maximum lifetime of a standing approval, in days."""

_NOTICE_PERIOD = timedelta(days=14)
"""Time before the expiry at which operators are notified; for a short approval, the last tenth of its lifetime."""


def request_standing_approval(grant: Grant, schedule: RotationSchedule, days: int) -> StandingApproval:
    """Request that the schedule's rotations need no approval of their own for `days`.

    It replaces a request that is still undecided. Raises RequestInvalidError for another number of days;
    StateConflictError when the operator is not the schedule's author, or the schedule needs no approval or is disabled.
    """
    operator = grant.principal
    if not isinstance(operator, OperatorPrincipal):
        raise TypeError("only operators request standing approvals")
    if not 1 <= days <= MAX_DAYS:
        raise RequestInvalidError("The standing approval is invalid.", [Fault("/days", f"1 to {MAX_DAYS}")])
    needed = approvals_needed(scope_of(schedule).environment)
    if not needed:
        raise StateConflictError(f"Scheduled rotations in {schedule.environment} need no approval.")
    if not schedule.is_enabled or find_unreadable(schedule):
        raise StateConflictError("The schedule is disabled or cannot be read. Change and save it first.")
    if operator.person != schedule.author_person:
        raise StateConflictError(
            "Only the author of the schedule can request its standing approval. Save the schedule in your name first."
        )
    row = StandingApproval(
        approval_id=mint_id("sta", secrets.token_bytes),
        schedule=schedule,
        state=A.AWAITING_APPROVAL,
        terms=terms_now(schedule),
        approvals_needed=needed,
        requester=operator_row(operator),
        requester_person=operator.person,
        is_requester_claimed=is_claimed(operator),
        created_at=grant.at,
        approval_expires_at=grant.at + APPROVAL_LIFETIME,
        expires_at=grant.at + timedelta(days=days),
    )
    row.plan_digest = _digest(row)
    with recorded(
        grant,
        P.SCHEDULES_WRITE,
        "standing_approval.requested",
        account=place_of(schedule) or scope_of(schedule).within,
        **about(row),
        plan_digest=row.plan_digest,
        terms=row.terms,
        expires_at=format_timestamp(row.expires_at),
        approvals_needed=needed,
    ):
        # The schedule and its calendar stay as requested: a concurrent change either fails, or finds this request.
        lock_row(schedule)
        if schedule.calendar is not None:
            lock_row(schedule.calendar)
        _replace(grant, schedule, A.AWAITING_APPROVAL)
        row.save()
    return row


def approve_standing_approval(grant: Grant, row: StandingApproval, plan_digest: str) -> StandingApproval:
    """Approve exactly these terms. Raises StateConflictError, see `approve_issuance`."""
    _require_undecided(grant, row)
    if not is_current(row):
        raise StateConflictError("The schedule was changed. Request another standing approval.")
    operator = approving_operator(grant, row, plan_digest)
    with recorded(
        grant,
        P.ROTATIONS_APPROVE,
        "standing_approval.approved",
        account=place_of(row.schedule) or scope_of(row.schedule).within,
        **about(row),
        plan_digest=plan_digest,
    ):
        approval, environment = ScheduleApproval(standing=row), row.schedule.environment
        event = "standing_approval.approved"
        if record_approval(grant, row, operator, approval, environment=environment, event=event):
            _replace(grant, row.schedule, A.APPROVED)
            row.compare_and_swap(state=A.APPROVED, notice_at=_notice_time(row))
    return row


def reject_standing_approval(grant: Grant, row: StandingApproval, why: str) -> StandingApproval:
    """Reject the request. Raises StateConflictError once it is decided."""
    _require_undecided(grant, row)
    return _close(grant, row, P.ROTATIONS_APPROVE, A.REJECTED, why)


def withdraw_standing_approval(grant: Grant, row: StandingApproval, why: str) -> StandingApproval:
    """End the approval, or its request: later rotations need their own. Raises StateConflictError when it has ended."""
    if row.state not in {A.AWAITING_APPROVAL, A.APPROVED}:
        raise StateConflictError(f"The standing approval has ended: it is {row.state}.")
    return _close(grant, row, P.SCHEDULES_WRITE, A.WITHDRAWN, why)


def find_standing_approval(schedule: RotationSchedule, now: datetime) -> StandingApproval | None:
    """Find the approval that covers what the schedule, as the caller has read it, requests now."""
    rows = StandingApproval.objects.filter(schedule=schedule, state=A.APPROVED, expires_at__gt=now)
    row: StandingApproval | None = rows.first()
    if row is None:
        return None
    row.schedule = schedule
    is_enough = row.approvals.count() >= approvals_needed(scope_of(schedule).environment)
    return row if is_enough and is_current(row) else None


def get_standing_approval(approval_id: str) -> StandingApproval:
    """Get the standing approval. Raises NotFoundError."""
    row: StandingApproval | None = _rows().filter(pk=approval_id).first()
    if row is None:
        raise NotFoundError
    return row


def is_current(row: StandingApproval) -> bool:
    """Whether the row is unaltered, and its schedule and calendar are as they were requested."""
    is_unaltered = row.plan_digest == _digest(row)
    return is_unaltered and row.schedule.is_enabled and row.terms == terms_now(row.schedule)


def is_undecided(row: StandingApproval, now: datetime) -> bool:
    """Whether the row waits for an approval."""
    return bool(row.state == A.AWAITING_APPROVAL and now < min(row.approval_expires_at, row.expires_at))


def terms_now(schedule: RotationSchedule) -> dict[str, JsonValue]:
    """Return the plan and the selection of the schedule as they are stored."""
    calendar = schedule.calendar
    return {
        "environment": schedule.environment,
        "account": None if schedule.account is None else str(schedule.account),
        "credential": schedule.credential_id,
        "cryptoperiod_days": schedule.cryptoperiod_days,
        "jitter_days": schedule.jitter_days,
        "lead_days": schedule.lead_days,
        "window": schedule.window,
        "calendar": None if calendar is None else {"name": calendar.name, "periods": calendar.periods},
        "overrides": schedule.overrides,
        "author_person": schedule.author_person,
    }


def about(row: StandingApproval) -> dict[str, JsonValue]:
    return {
        "standing_approval_id": row.approval_id,
        "schedule_id": row.schedule_id,
        "scope": str(scope_of(row.schedule)),
    }


def _rows() -> QuerySet[StandingApproval]:
    rows: QuerySet[StandingApproval] = StandingApproval.objects.select_related(
        "requester", "schedule__account__merchant", "schedule__credential__account__merchant", "schedule__calendar"
    )
    return rows


def _digest(row: StandingApproval) -> str:
    return canonical_digest(
        {
            "what": "standing approval",
            "schedule_id": row.schedule_id,
            "terms": row.terms,
            "expires_at": format_timestamp(row.expires_at),
        }
    )


def _notice_time(row: StandingApproval) -> datetime:
    at: datetime = row.expires_at - min(_NOTICE_PERIOD, (row.expires_at - row.created_at) / 10)
    return at


def _replace(grant: Grant, schedule: RotationSchedule, state: StandingApprovalState) -> None:
    """Void the schedule's row in this state, because another one replaces it."""
    for row in StandingApproval.objects.filter(schedule=schedule, state=state):
        row.compare_and_swap(state=A.VOID, why="replaced by another one", closed_at=grant.at)


def _close(
    grant: Grant, row: StandingApproval, permission: P, state: StandingApprovalState, why: str
) -> StandingApproval:
    why, event = clean_text(why.strip(), 300), f"standing_approval.{state.value}"
    scope = scope_of(row.schedule)
    with recorded(grant, permission, event, account=scope.place or scope.within, **about(row), why=why):
        row.compare_and_swap(state=state, why=why, closed_at=grant.at)
    return row


def _require_undecided(grant: Grant, row: StandingApproval) -> None:
    if not is_undecided(row, grant.at):
        raise StateConflictError(f"The standing approval does not wait for approval: it is {row.state}, or too old.")
