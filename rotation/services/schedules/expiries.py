"""Notices to operators about standing approvals that expire: one in advance, and an alarm afterwards."""

import logging
from collections.abc import Sequence
from datetime import datetime

from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.timestamps import format_timestamp
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.notifications import announce
from keyvault.services.recording.transaction import recorded
from rotation.models import StandingApproval, StandingApprovalState
from rotation.services.schedules.schedules import find_alarm_account
from rotation.services.schedules.standing_approvals import about

_log = logging.getLogger(__name__)

_MAX_ANNOUNCED = 100
"""Maximum number of standing approvals announced per tick."""


def announce_expiries(now: datetime, environments: Sequence[str]) -> None:
    """Announce the approvals that expire soon and those that have expired, once each.

    An approval that is no longer relied on was withdrawn, replaced or voided. Safe to run concurrently.
    """
    due = StandingApproval.objects.filter(state=StandingApprovalState.APPROVED, notice_at__lte=now)
    served = due.filter(schedule__environment__in=environments).select_related(
        "schedule__account__merchant", "schedule__credential__account__merchant"
    )
    for row in served.order_by("notice_at")[:_MAX_ANNOUNCED]:
        try:
            _announce(row, now)
        except Exception:  # noqa: BLE001  errors are isolated per standing approval; the next tick tries again
            _log.exception("the expiry of a standing approval is not announced yet", extra={"approval": row.pk})


def _announce(row: StandingApproval, now: datetime) -> None:
    is_over, account = now >= row.expires_at, find_alarm_account(row.schedule)
    kind = NoticeKind.STANDING_APPROVAL_EXPIRED if is_over else NoticeKind.STANDING_APPROVAL_EXPIRING
    payload = {**about(row), "expires_at": format_timestamp(row.expires_at)}
    grant = authorize(WORKER, P.ROTATIONS_BEGIN, account, now=now)
    with recorded(grant, P.ROTATIONS_BEGIN, kind.value, account=account, **payload):
        row.compare_and_swap(notice_at=None if is_over else row.expires_at)
        if account is not None:
            announce(grant, kind, account, row.pk, **payload)
