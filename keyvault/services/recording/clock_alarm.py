"""The alarm about a host whose clock differs from the database's."""

from datetime import datetime

from keyvault.access.permissions import Permission
from keyvault.access.principals import WORKER
from keyvault.domain.notifications import NoticeKind
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.notifications import alarm_due, announce
from keyvault.services.recording.revocation_log import host_name
from keyvault.services.recording.transaction import recorded
from keyvault.services.work.clock import ClockDiffersError


def report_clock(error: ClockDiffersError, now: datetime) -> None:
    """Raise an alarm about this host, unless one is unseen. Call it when an irreversible action was refused."""
    host, seconds = host_name(), round(error.difference.total_seconds())
    grant = authorize(WORKER, Permission.PROCESSES_WATCH, now=now)
    with alarm_due(NoticeKind.CLOCK_DIFFERS, host, now) as is_due:
        if is_due:
            with recorded(grant, Permission.PROCESSES_WATCH, "clock.differed", host=host, seconds_ahead=seconds):
                announce(grant, NoticeKind.CLOCK_DIFFERS, None, host, host=host, seconds_ahead=seconds)
