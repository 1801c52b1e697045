"""Accept an audit log that was set back by restoring a backup, so that the worker signs it again."""

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import OperatorPrincipal
from keyvault.domain.canonical import JsonValue
from keyvault.domain.checkpoints import CheckpointMark, SignedCheckpoint
from keyvault.domain.environments import Environment
from keyvault.domain.errors import Fault, RequestInvalidError, StateConflictError
from keyvault.domain.free_text import clean_text, find_reason_fault
from keyvault.domain.notifications import NoticeKind
from keyvault.services.approvals.four_eyes import note_command_line_approval
from keyvault.services.audit.checkpoint_marks import CheckpointMarks, read_marks, store_mark
from keyvault.services.audit.checkpoints import (
    find_mark_fault,
    find_newest,
    find_newest_own,
    forget_missing_checkpoints,
)
from keyvault.services.peppers.ring import list_served_sets
from keyvault.services.recording.authorization import authorize
from keyvault.services.recording.notifications import announce
from keyvault.services.recording.revocation_log import append_lines, host_name
from keyvault.services.recording.transaction import recorded


def accept_rollback(grant: Grant, operator: OperatorPrincipal, approver: OperatorPrincipal, reason: str) -> list[str]:
    """Set the marks of each scope whose log was set back to its newest checkpoint. Return these scopes.

    Writes an audit entry, an alarm and the claimed approval first. Safe to kill and run again. Run it on each host that
    signs, because each has a revocation log. The grant is for the platform. A newest checkpoint of another signer is
    not recorded: the scope then has no mark until the worker signs the next one.

    Raises:
        RequestInvalidError: no reason was given.
        StateConflictError: no log was set back, or the approver is not a second person.
        PermissionMissingError: the approver has no role that approves.
        IntegrityError: a newest checkpoint is forged, or its entries are not in the log.
        OSError, and the errors of the secret backend.
    """
    if (fault := find_reason_fault(reason)) is not None:
        raise RequestInvalidError("Accepting a rollback requires a reason.", [Fault("/reason", fault)])
    approval = authorize(approver, P.BREAK_GLASS_REVIEW, now=grant.at, requester_person=operator.person)
    behind = []
    for scope in list_served_sets():
        marks, newest = read_marks(scope), find_newest(scope)
        if (why := find_mark_fault(scope, newest, marks)) is not None:
            behind.append((scope.value, marks, find_newest_own(scope), why))
    if not behind:
        raise StateConflictError("The audit log was not set back. Run manage.py audit_verify to check it.")
    scopes: dict[str, JsonValue] = {scope: why for scope, _, _, why in behind}
    why, host = clean_text(reason, 300), host_name()
    with recorded(
        grant,
        P.REVOCATIONS_REPLAY,
        "audit.rollback_accepted",
        by=operator.username,
        approved_by=approver.username,
        why=why,
        host=host,
        scopes=scopes,
    ):
        # An installation has production keys.
        note_command_line_approval(
            approval,
            Environment.PRODUCTION,
            event="audit.rollback_approved",
            subject=host,
            requester_person=operator.person,
            is_requester_claimed=True,
        )
        announce(grant, NoticeKind.AUDIT_ROLLBACK_ACCEPTED, None, host, host=host, why=why)
    for name, marks, newest, _ in behind:
        forget_missing_checkpoints(name)
        _set_marks(name, marks, newest, grant)
    return list(scopes)


def _set_marks(scope: str, marks: CheckpointMarks, newest: SignedCheckpoint | None, grant: Grant) -> None:
    number, digest = (0, "") if newest is None else (newest.number, newest.digest.hex())
    mark = CheckpointMark(scope, number, digest, grant.at)
    if marks.stored is not None:
        store_mark(mark, marks.version)
    if marks.logged is not None:
        append_lines([mark])
