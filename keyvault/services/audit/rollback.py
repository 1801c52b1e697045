"""Accept an audit log that was set back by restoring a backup, so that the worker signs it again."""

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import OperatorPrincipal
from keyvault.domain.canonical import JsonValue
from keyvault.domain.checkpoints import CheckpointMark, SignedCheckpoint
from keyvault.domain.errors import Fault, RequestInvalidError, StateConflictError
from keyvault.domain.free_text import clean_text, find_reason_fault
from keyvault.domain.notifications import NoticeKind
from keyvault.services.audit.checkpoint_marks import CheckpointMarks, read_marks, store_mark
from keyvault.services.audit.checkpoints import find_mark_fault, find_newest
from keyvault.services.peppers.ring import list_served_sets
from keyvault.services.recording.notifications import announce
from keyvault.services.recording.revocation_log import append_lines, host_name
from keyvault.services.recording.transaction import recorded


def accept_rollback(grant: Grant, operator: OperatorPrincipal, reason: str) -> list[str]:
    """Set the marks of each scope whose log was set back to its newest checkpoint. Return these scopes.

    Writes an audit entry and an alarm first. Safe to kill and run again. Run it on each host that signs, because each
    has a revocation log. The grant is for the platform.

    Raises RequestInvalidError without a reason, StateConflictError if no log was set back, OSError, and the errors of
    the secret backend.
    """
    if (fault := find_reason_fault(reason)) is not None:
        raise RequestInvalidError("Accepting a rollback requires a reason.", [Fault("/reason", fault)])
    behind = []
    for scope in list_served_sets():
        marks, newest = read_marks(scope), find_newest(scope)
        if (why := find_mark_fault(scope, newest, marks)) is not None:
            behind.append((scope.value, marks, newest, why))
    if not behind:
        raise StateConflictError("The audit log was not set back. Run manage.py audit_verify to check it.")
    scopes: dict[str, JsonValue] = {scope: why for scope, _, _, why in behind}
    why, host = clean_text(reason, 300), host_name()
    with recorded(
        grant, P.REVOCATIONS_REPLAY, "audit.rollback_accepted", by=operator.username, why=why, host=host, scopes=scopes
    ):
        announce(grant, NoticeKind.AUDIT_ROLLBACK_ACCEPTED, None, host, host=host, why=why)
    for name, marks, newest, _ in behind:
        _set_marks(name, marks, newest, grant)
    return list(scopes)


def _set_marks(scope: str, marks: CheckpointMarks, newest: SignedCheckpoint | None, grant: Grant) -> None:
    number, digest = (0, "") if newest is None else (newest.number, newest.digest.hex())
    mark = CheckpointMark(scope, number, digest, grant.at)
    if marks.stored is not None:
        store_mark(mark, marks.version)
    if marks.logged is not None:
        append_lines([mark])
