"""Create this host's revocation log: at the first start, from the anchor, or after operators accept its loss."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import chain

from django.conf import settings

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import WORKER, OperatorPrincipal
from keyvault.backends import meters
from keyvault.backends.base import BackendError, BackendUnavailableError
from keyvault.domain.environments import Environment
from keyvault.domain.errors import Fault, RequestInvalidError, StateConflictError
from keyvault.domain.free_text import clean_text, find_reason_fault
from keyvault.domain.notifications import NoticeKind
from keyvault.domain.revocation_log import Ended, Opened
from keyvault.models import Key, ServiceToken
from keyvault.services.approvals.four_eyes import note_command_line_approval
from keyvault.services.peppers.installation import installation_id
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.notifications import announce
from keyvault.services.recording.revocation_log import (
    any_account,
    create_revocation_log,
    find_log_owner,
    host_name,
    read_lines,
)
from keyvault.services.recording.transaction import recorded
from keyvault.services.revocations.anchor import (
    find_anchor,
    list_missing,
    raise_anchor_alarm,
    raise_anchor_alarm_once,
    update_log,
)
from keyvault.services.revocations.replay import Comparison, compare_revocation_log, replay_revocations

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
    """`is_changed`: the log has lines that it lacked. `has_anchor`: there is an anchor, which was read.

    `unread`: why the anchor could not be read; None: it was.
    """

    is_changed: bool = False
    has_anchor: bool = False
    unread: str | None = None


def recover_revocation_log(now: datetime) -> Recovery:
    """Add to this host's log what only the anchor has, or rebuild a lost log from it.

    If the anchor cannot be read now, the worker compares later, see `LateComparison`. Raises OSError,
    StateConflictError if the log belongs to another installation, and IntegrityError before setup.
    """
    _require_own_log()
    try:
        anchor = find_anchor()
        return Recovery() if anchor is None else Recovery(update_log(anchor, now) > 0, has_anchor=True)
    except BackendError as error:
        why = error.internal or error.detail
        _log.error("the revocation log was not compared with the revocation anchor", extra={"why": why})
        late_comparison.is_due = True
        return Recovery(unread=why)


@dataclass(slots=True)
class LateComparison:
    """The comparison with the anchor that the start of this process missed, because the backend was unavailable.

    Until a worker has made it, a database and a log that were restored together may accept revoked keys.
    """

    is_due: bool = False

    def run(self, now: datetime) -> None:
        """Complete the log from the anchor, and revoke again what the database has lost, if the anchor can be read now.

        Raises an alarm if it cannot be read, and another one if something was revoked again. Safe to kill and run
        again. Raises OSError.
        """
        if self.is_due:
            self._compare(now)
        meters.note_compared(not self.is_due)

    def _compare(self, now: datetime) -> None:
        why = recover_revocation_log(now).unread
        if why is not None:
            raise_anchor_alarm_once(host_name(), now, not_compared=why)
            return
        replay = replay_revocations(authorize(WORKER, P.REVOCATIONS_REPLAY, now=now))
        if replay.replayed:
            _log.error("revoked items were valid again", extra={"count": len(replay.replayed)})
            raise_anchor_alarm(host_name(), now, revoked_again=len(replay.replayed))
        self.is_due = bool(replay.left)


late_comparison = LateComparison()


@dataclass(frozen=True, slots=True)
class ReplayPreview:
    """The expected findings of a replay. `has_anchor` and `unread` as in `Recovery`.

    `is_lost`: the log is lost, and there is no readable anchor to rebuild it from.
    """

    found: Comparison
    has_anchor: bool
    unread: str | None
    is_lost: bool


def preview_replay(more: Iterable[Ended] = ()) -> ReplayPreview:
    """Compare the database with the log, with what only the anchor has, and with `more`. Writes nothing.

    Raises OSError, StateConflictError if the log belongs to another installation, IntegrityError before setup, and
    BackendError if a part of the anchor cannot be read.
    """
    _require_own_log()
    anchor, unread = None, None
    try:
        anchor = find_anchor()
    except BackendError as error:
        unread = error.internal or error.detail
    found = compare_revocation_log(chain(() if anchor is None else list_missing(anchor), more))
    return ReplayPreview(found, anchor is not None, unread, anchor is None and is_lost())


def _require_own_log() -> None:
    """Raise StateConflictError if the log's first line names another installation."""
    owner = find_log_owner()
    if owner is not None and owner != installation_id():
        raise StateConflictError(format_foreign_log(owner))


def format_foreign_log(theirs: str) -> str:
    """Explain that the revocation log belongs to another installation, and what to do."""
    return (
        f"the revocation log {settings.REVOCATION_LOG} belongs to installation {theirs}, this database to "
        f"{installation_id()}: set KEYVAULT_REVOCATION_LOG (or KEYVAULT_DATA_DIR) to this installation's own"
    )


def accept_loss(grant: Grant, operator: OperatorPrincipal, approver: OperatorPrincipal, reason: str) -> None:
    """Create a new revocation log in place of a lost one, with an audit entry, an alarm and the claimed approval.

    The grant is for the platform.

    Raises:
        RequestInvalidError: no reason was given.
        StateConflictError: no log is lost, the anchor can replace it, or the approver is not a second person.
        PermissionMissingError: the approver has no role that approves.
        BackendUnavailableError: the anchor cannot be read now.
        OSError: the log cannot be read or written.
    """
    if (fault := find_reason_fault(reason)) is not None:
        raise RequestInvalidError(
            "Accepting the loss of the revocation log requires a reason.", [Fault("/reason", fault)]
        )
    approval = authorize(approver, P.BREAK_GLASS_REVIEW, now=grant.at, requester_person=operator.person)
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
        # An installation has production keys.
        note_command_line_approval(
            approval,
            Environment.PRODUCTION,
            event="journal.loss_approved",
            subject=host_name(),
            requester_person=operator.person,
            is_requester_claimed=True,
        )
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
