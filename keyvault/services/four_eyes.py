"""One person's yes, wherever a second person is asked for. The triggers of both databases say the same."""

from typing import Protocol

from keyvault.access.decision import Grant
from keyvault.access.principals import Channel, Operator
from keyvault.domain.environments import Environment
from keyvault.domain.errors import StateConflictError
from keyvault.models.recording import RecordedModel
from keyvault.services.break_glass import note_break_glass


class _Approvals(Protocol):
    def filter(self, *, person: str) -> "_Approvals": ...
    def exists(self) -> bool: ...
    def count(self) -> int: ...


def approving_operator(
    grant: Grant, approvals: _Approvals, *, shown_digest: str, stored_digest: str, requester_person: str
) -> Operator:
    """Who approves.

    Raises StateConflictError when they asked for it themselves, were shown something else, or have approved
    already.
    """
    operator = grant.principal
    if not isinstance(operator, Operator):
        raise TypeError("people approve")
    if operator.person == requester_person:
        raise StateConflictError("This takes a second person: whoever asked for it cannot approve it.")
    if shown_digest != stored_digest:
        raise StateConflictError("This is not what you were shown. Look at it again.")
    if approvals.filter(person=operator.person).exists():
        raise StateConflictError("You have approved this already; it takes another person.")
    return operator


def note_command_line_approval(grant: Grant, environment: str, event: str, subject: str) -> None:
    """A command line proves no identity: in production an approval given there stays in sight until reviewed.

    Inside the `recorded` block of the approval.
    """
    operator = grant.principal
    if (
        isinstance(operator, Operator)
        and operator.channel is Channel.COMMAND_LINE
        and environment == Environment.PRODUCTION
    ):
        note_break_glass(
            grant, event=event, subject=subject, why="approved on a command line, which proves no identity"
        )


def locked(row: RecordedModel) -> None:
    """Takes the row for this transaction, if nobody has written it since it was read.

    Of two deciders at once the second waits here, and is then told to look again.
    """
    row.compare_and_swap()
