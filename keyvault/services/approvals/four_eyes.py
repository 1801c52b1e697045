"""Four-eyes approval: the approver must be a second person. Triggers in both databases enforce the same rule."""

from typing import Any, Protocol

from keyvault.access.decision import Grant
from keyvault.access.principals import OperatorPrincipal, is_claimed
from keyvault.domain.environments import Environment
from keyvault.domain.errors import StateConflictError
from keyvault.models.recording import RecordedModel
from keyvault.services.approvals.break_glass import exclude_approvers, find_authority_fault, note_break_glass
from keyvault.services.operators.operators import operator_row


class _Approvable(Protocol):
    """A row with a plan that people other than its requester approve."""

    pk: Any
    approvals: Any

    @property
    def approvals_needed(self) -> Any: ...

    @property
    def plan_digest(self) -> Any: ...

    @property
    def requester_person(self) -> Any: ...

    @property
    def is_requester_claimed(self) -> Any: ...

    def compare_and_swap(self, **changes: Any) -> Any: ...


def approving_operator(grant: Grant, row: _Approvable, shown_digest: str) -> OperatorPrincipal:
    """Return the approving operator.

    Raises StateConflictError when the operator made the request, was shown another version of it, has already
    approved it, or may not approve yet. Raises it also on a command line if the request needs several approvals: one
    person could give them all in the names of others.
    """
    operator = grant.principal
    if not isinstance(operator, OperatorPrincipal):
        raise TypeError("only an operator can approve")
    if operator.person == row.requester_person:
        raise StateConflictError("This requires a second person: the requester cannot approve it.")
    if shown_digest != row.plan_digest:
        raise StateConflictError("The plan is not what you were shown. Review it again.")
    if row.approvals.filter(person=operator.person).exists():
        raise StateConflictError("You have already approved this. Another person must approve it too.")
    require_authority(operator)
    if is_claimed(operator) and row.approvals_needed > 1:
        raise StateConflictError(
            f"{row.pk} requires {row.approvals_needed} approvals, and a command line does not prove an identity. "
            "Each approver uses the console."
        )
    return operator


def require_authority(operator: OperatorPrincipal) -> None:
    """Raise StateConflictError while the operator may not approve yet, see `find_authority_fault`."""
    if (fault := find_authority_fault(operator.username)) is not None:
        raise StateConflictError(fault)


def record_approval(
    grant: Grant,
    row: _Approvable,
    operator: OperatorPrincipal,
    approval: Any,
    *,
    environment: str,
    event: str,
    concerned_person: str = "",
) -> bool:
    """Save the operator's approval of the row's digest, and return whether the row has enough approvals now.

    Call this inside the `recorded` block of the approval. The second of two concurrent approvers waits here, and then
    gets a StateConflictError, as does an operator who reviewed an earlier approval of the row.

    Args:
        operator: from `approving_operator`.
        approval: new approval of the row, not filled in yet.
        concerned_person: the person whom the row is about, see `note_break_glass`.
    """
    lock_row(row)
    approver = operator_row(operator)
    if not approver.is_active:
        raise StateConflictError("Your operator was disabled meanwhile.")
    earlier = list(row.approvals.values_list("person", flat=True))
    approval.approver = approver
    approval.person = operator.person
    approval.plan_digest = row.plan_digest
    approval.created_at = grant.at
    approval.save()
    note_command_line_approval(
        grant,
        environment,
        event=event,
        subject=row.pk,
        requester_person=row.requester_person,
        is_requester_claimed=row.is_requester_claimed,
        concerned_person=concerned_person,
    )
    if earlier:
        exclude_approvers(operator, earlier, row.pk, event)
    return bool(len(earlier) + 1 >= row.approvals_needed)


def note_command_line_approval(
    grant: Grant,
    environment: str,
    *,
    event: str,
    subject: str,
    requester_person: str,
    is_requester_claimed: bool,
    concerned_person: str = "",
) -> None:
    """Record a break-glass action for a production approval that depends on an unproven command-line identity.

    Either the approval was given on a command line, or the request was made on one, or with a token that was created on
    one. The approver may have made such a request in another's name, and no comparison of persons can detect it. Call
    this inside the `recorded` block of the approval.
    """
    operator = grant.principal
    if not isinstance(operator, OperatorPrincipal) or environment != Environment.PRODUCTION:
        return
    if is_claimed(operator):
        why = "approved on a command line, which does not prove an identity"
    elif is_requester_claimed:
        why = "requested on a command line, or with a token created on one, which does not prove an identity"
    else:
        return
    note_break_glass(
        grant,
        event=event,
        subject=subject,
        requester_person=requester_person,
        why=why,
        concerned_person=concerned_person,
    )


def lock_row(row: RecordedModel | _Approvable) -> None:
    """Lock the row for this transaction. Raises StateConflictError if it was written since it was read.

    The second of two concurrent approvers waits here, and then gets that error.
    """
    row.compare_and_swap()
