"""One person's yes, wherever a second person is asked for. The triggers of both databases say the same."""

from typing import Protocol

from keyvault.access.decision import Grant
from keyvault.access.principals import Channel, Operator
from keyvault.access.rules import Target
from keyvault.domain.environments import Environment
from keyvault.domain.errors import StateConflictError
from keyvault.models.recording import RecordedModel
from keyvault.services.approvals.break_glass import note_break_glass

_NOBODY = "system:"
"""What the creator of a token is called in the place of a person who has none, see `System.actor`."""


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


def note_command_line_approval(
    grant: Grant, environment: str, *, event: str, subject: str, requester_person: str
) -> None:
    """A command line proves no identity: in production an approval that rests on one stays in sight until reviewed.

    It was given there, or what it approves was asked with a token that was made there in nobody's name: then
    the approver may be the very person who made the token, and no comparison of persons tells. Inside the
    `recorded` block of the approval.
    """
    operator = grant.principal
    if not isinstance(operator, Operator) or environment != Environment.PRODUCTION:
        return
    why = None
    if operator.channel is Channel.COMMAND_LINE:
        why = "approved on a command line, which proves no identity"
    elif isinstance(grant.target, Target) and (grant.target.requester_person or "").startswith(_NOBODY):
        why = "asked with a token that was made on the host in nobody's name"
    if why is not None:
        note_break_glass(grant, event=event, subject=subject, requester_person=requester_person, why=why)


def locked(row: RecordedModel) -> None:
    """Takes the row for this transaction, if nobody has written it since it was read.

    Of two deciders at once the second waits here, and is then told to look again.
    """
    row.compare_and_swap()
