"""The sessions of an operator: listed, ended by the operator, and deleted when they have expired."""

from datetime import datetime

from django.db.models import QuerySet

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.access.principals import OperatorPrincipal
from keyvault.domain.errors import NotFoundError
from keyvault.domain.timestamps import format_timestamp
from keyvault.models import ConsoleSession
from keyvault.services.recording.transaction import recorded
from keyvault.services.work.deletion import delete_batch


def list_sessions(operator: OperatorPrincipal, now: datetime) -> QuerySet[ConsoleSession]:
    """Return the operator's sessions that have not ended."""
    return ConsoleSession.objects.filter(operator__username=operator.username, expire_date__gt=now)


def end_session(grant: Grant, session: ConsoleSession) -> None:
    """End one of the operator's own sessions: its next request leads to the sign-in page.

    Raises NotFoundError when the session has ended, or is another operator's.
    """
    operator = _operator(grant)
    with recorded(
        grant,
        Permission.SESSIONS_WRITE,
        "session.ended",
        started_at=format_timestamp(session.started_at),
        address=session.address or "unknown",
        browser=session.browser or "unknown",
    ):
        ended, _ = list_sessions(operator, grant.at).filter(pk=session.pk).delete()
        if not ended:
            raise NotFoundError("This session has ended already.")


def end_other_sessions(grant: Grant, kept: ConsoleSession) -> int:
    """End the operator's own sessions except one. Return how many."""
    with recorded(grant, Permission.SESSIONS_WRITE, "session.others_ended") as record:
        ended, _ = list_sessions(_operator(grant), grant.at).exclude(pk=kept.pk).delete()
        record.details["sessions_ended"] = ended
    return ended


def forget_expired_sessions(now: datetime) -> int:
    """Delete a batch of expired sessions. Return how many."""
    return delete_batch(ConsoleSession.objects.filter(expire_date__lt=now).order_by("expire_date"))


def _operator(grant: Grant) -> OperatorPrincipal:
    if not isinstance(grant.principal, OperatorPrincipal):
        raise TypeError("only an operator has sessions")
    return grant.principal
