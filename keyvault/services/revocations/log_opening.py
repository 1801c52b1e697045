"""Create this host's revocation log: at the first start, from the anchor, or after operators accept its loss."""

import logging
from dataclasses import dataclass
from datetime import datetime

from django.conf import settings

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import OperatorPrincipal
from keyvault.backends.base import BackendError, BackendUnavailableError
from keyvault.domain.errors import Fault, RequestInvalidError, StateConflictError
from keyvault.domain.free_text import clean_text, find_reason_fault
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.revocation_log import Opened
from keyvault.models import Key, ServiceToken
from keyvault.services.peppers.installation import installation_id
from keyvault.services.recording.notifications import announce
from keyvault.services.recording.revocation_log import (
    any_account,
    create_revocation_log,
    host_name,
    read_lines,
)
from keyvault.services.recording.transaction import recorded
from keyvault.services.revocations.anchor import find_anchor, update_log

_log = logging.getLogger(__name__)

_ISSUED = (Key, ServiceToken)
"""Models whose rows prove that something was issued, because they are never deleted.

Rows of customer tokens are deleted after their expiry; each was issued with a key, whose row stays.
"""


def has_issued() -> bool:
    """Whether this database has ever issued a key or a token."""
    return any(model._default_manager.exists() for model in _ISSUED)


def is_lost() -> bool:
    """Return whether this host has no revocation log although the database has issued keys or tokens.

    Raises OSError.
    """
    return next(read_lines(), None) is None and has_issued()


def open_revocation_log(now: datetime) -> bool:
    """Create the revocation log if there is none. Return False if it is lost.

    Raises OSError if it cannot be read or written, IntegrityError before setup.
    """
    if is_lost():
        return False
    create_revocation_log([Opened(installation_id(), now)])
    return True


@dataclass(frozen=True, slots=True)
class Recovery:
    """`is_changed`: the log has lines that it lacked. `unread`: why the anchor could not be read; None: it was."""

    is_changed: bool
    unread: str | None = None


def recover_revocation_log(now: datetime) -> Recovery:
    """Add to this host's log what only the anchor has, or rebuild a lost log from it.

    Raises OSError, and IntegrityError before setup.
    """
    try:
        anchor = find_anchor()
        return Recovery(anchor is not None and update_log(anchor, now) > 0)
    except BackendError as error:
        why = error.internal or error.detail
        _log.error("the revocation log was not compared with the revocation anchor", extra={"why": why})
        return Recovery(is_changed=False, unread=why)


def accept_loss(grant: Grant, operator: OperatorPrincipal, approver: OperatorPrincipal, reason: str) -> None:
    """Create a new revocation log in place of a lost one, with an audit entry and an alarm.

    The grant is for the platform.

    Raises RequestInvalidError without a reason, StateConflictError if no log is lost, the anchor can replace it, or the
    approver is not a second person, BackendUnavailableError if the anchor cannot be read now, OSError if the log cannot
    be read or written.
    """
    if (fault := find_reason_fault(reason)) is not None:
        raise RequestInvalidError(
            "Accepting the loss of the revocation log requires a reason.", [Fault("/reason", fault)]
        )
    if approver.person == operator.person:
        raise StateConflictError("This requires a second person: the operator cannot approve it.")
    path = str(settings.REVOCATION_LOG)
    if not is_lost():
        raise StateConflictError(
            f"The revocation log {path} is not lost: it has lines, or nothing was issued and the next start "
            "creates it. Run manage.py replay_revocations without --accept-loss. Move a log that is damaged or belongs "
            "to another installation away first."
        )
    anchor = _require_no_anchor()
    why = clean_text(reason, 300)
    with recorded(
        grant,
        P.REVOCATIONS_REPLAY,
        "journal.loss_accepted",
        by=operator.username,
        approved_by=approver.username,
        why=why,
        host=host_name(),
        journal=path,
        anchor=anchor,
    ):
        if (account := any_account()) is not None:
            announce(grant, NoticeKind.REVOCATION_LOG_LOSS_ACCEPTED, account, host_name(), why=why)
    # After the commit: a log that exists lets the service start, so the audit entry comes first.
    create_revocation_log([Opened(installation_id(), grant.at, operator.username, why)])


def _require_no_anchor() -> str:
    """Return "none", or why the anchor can never be read.

    Raises StateConflictError if there is an anchor, and BackendUnavailableError if it cannot be read now.
    """
    try:
        anchor = find_anchor()
    except BackendUnavailableError:
        raise
    except BackendError as error:
        return error.internal or error.detail
    if anchor is not None:
        raise StateConflictError(
            "The revocation anchor replaces the lost log. Run manage.py replay_revocations without --accept-loss."
        )
    return "none"
