"""Break-glass actions: recorded in the transaction of the action, and listed until reviewed."""

import secrets

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.access.principals import OperatorPrincipal
from keyvault.domain.errors import StateConflictError
from keyvault.domain.free_text import clean_text
from keyvault.domain.ids import mint_id
from keyvault.models import BreakGlass
from keyvault.models import Operator as OperatorRow
from keyvault.services.recording.transaction import recorded


def note_break_glass(grant: Grant, *, event: str, subject: str, requester_person: str, why: str) -> None:
    """Record a break-glass action, inside the `recorded` block of that action.

    `requester_person`: the person who requested the subject.
    """
    operator = grant.principal
    if not isinstance(operator, OperatorPrincipal):
        raise TypeError("only an operator can use break-glass")
    BreakGlass(
        act_id=mint_id("brk", secrets.token_bytes),
        event=event,
        subject=subject,
        operator=OperatorRow.objects.get(username=operator.username),
        person=operator.person,
        requester_person=requester_person,
        host_user=operator.host_user or "",
        why=clean_text(why, 300),
        created_at=grant.at,
    ).save()


def review_break_glass(grant: Grant, act: BreakGlass) -> None:
    """Record the review of a second person.

    Raises StateConflictError when it is already reviewed, or the reviewer performed or requested the action.
    """
    if act.reviewed_at is not None:
        raise StateConflictError("This action is already reviewed.")
    operator = grant.principal
    if not isinstance(operator, OperatorPrincipal):
        raise TypeError("only an operator can review")
    if operator.person == act.person:
        raise StateConflictError("This requires a second person: the operator who acted cannot review it.")
    if operator.person == act.requester_person:
        raise StateConflictError("This requires a second person: the requester cannot review it.")
    with recorded(grant, Permission.BREAK_GLASS_REVIEW, "break_glass.reviewed", act_id=act.act_id, act=act.event):
        act.compare_and_swap(
            reviewed_at=grant.at,
            reviewer=OperatorRow.objects.get(username=operator.username),
            reviewer_person=operator.person,
        )
