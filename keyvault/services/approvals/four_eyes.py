"""Four-eyes approval: the approver must be a second person. Triggers in both databases enforce the same rule."""

from typing import Protocol

from keyvault.access.decision import Grant
from keyvault.access.principals import Channel, OperatorPrincipal
from keyvault.access.rules import Target
from keyvault.domain.environments import Environment
from keyvault.domain.errors import StateConflictError
from keyvault.models.recording import RecordedModel
from keyvault.services.approvals.break_glass import note_break_glass

_SYSTEM_PREFIX = "system:"
"""Prefix of a token's creator when it is not a person; see `System.actor`."""


class _Approvals(Protocol):
    def filter(self, *, person: str) -> "_Approvals": ...
    def exists(self) -> bool: ...
    def count(self) -> int: ...


def approving_operator(
    grant: Grant, approvals: _Approvals, *, shown_digest: str, stored_digest: str, requester_person: str
) -> OperatorPrincipal:
    """Return the approving operator.

    Raises StateConflictError when the operator made the request, was shown another version of it, or has already
    approved it.
    """
    operator = grant.principal
    if not isinstance(operator, OperatorPrincipal):
        raise TypeError("only an operator can approve")
    if operator.person == requester_person:
        raise StateConflictError("This requires a second person: the requester cannot approve it.")
    if shown_digest != stored_digest:
        raise StateConflictError("This is not what you were shown. Review it again.")
    if approvals.filter(person=operator.person).exists():
        raise StateConflictError("You have already approved this. Another person must approve it too.")
    return operator


def note_command_line_approval(
    grant: Grant, environment: str, *, event: str, subject: str, requester_person: str
) -> None:
    """Record a break-glass action for a production approval that depends on an unproven command-line identity.

    Either the approval was given there, or a token created there without an operator made the request. The creator of
    such a token may be the approver, and no comparison of persons can detect it. Call this inside the `recorded` block
    of the approval.
    """
    operator = grant.principal
    if not isinstance(operator, OperatorPrincipal) or environment != Environment.PRODUCTION:
        return
    why = None
    if operator.channel is Channel.COMMAND_LINE:
        why = "approved on a command line, which does not prove an identity"
    elif isinstance(grant.target, Target) and (grant.target.requester_person or "").startswith(_SYSTEM_PREFIX):
        why = "requested with a token that was created on the host without an operator"
    if why is not None:
        note_break_glass(grant, event=event, subject=subject, requester_person=requester_person, why=why)


def lock_row(row: RecordedModel) -> None:
    """Lock the row for this transaction, unless it was written since it was read.

    The second of two concurrent approvers waits here, and then gets a StateConflictError.
    """
    row.compare_and_swap()
