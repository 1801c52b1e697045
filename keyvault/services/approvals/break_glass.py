"""Break-glass actions: recorded in the transaction of the action, and listed until reviewed.

A second person reviews what a person did in the console. A command line proves no identity, so what was done there is
only claimed, and two persons review it: one alone could have done it in another's name. The claimed approver can be one
of them. `BreakGlass.excluded_persons` has everyone who must not review.
"""

import secrets
from collections.abc import Collection, Iterable

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.access.principals import SYSTEM_PREFIX, Channel, OperatorPrincipal, is_claimed
from keyvault.access.rules import Target
from keyvault.access.scopes import EVERYWHERE, AccessScope
from keyvault.domain.audit import APPROVAL_SUFFIX
from keyvault.domain.errors import StateConflictError
from keyvault.domain.free_text import clean_text
from keyvault.domain.ids import mint_id
from keyvault.domain.notifications import NoticeKind
from keyvault.models import Account, BreakGlass
from keyvault.models import Operator as OperatorRow
from keyvault.services.operators.approving_persons import list_unreviewed_changes
from keyvault.services.recording.authorization import target_of
from keyvault.services.recording.notifications import announce
from keyvault.services.recording.transaction import recorded


def note_break_glass(
    grant: Grant,
    *,
    event: str,
    subject: str,
    requester_person: str,
    why: str,
    concerned_person: str = "",
) -> None:
    """Record a break-glass action, inside the `recorded` block of that action.

    Args:
        event: the audit event; that of an approval ends in `approved`. The claimed approver may confirm an approval,
            unless a token without an operator requested the subject: the approver may have created that token.
        requester_person: the person who requested the subject.
        concerned_person: the person whom the subject is about, and who must not review it either; empty for none.
    """
    operator = grant.principal
    if not isinstance(operator, OperatorPrincipal):
        raise TypeError("only an operator can use break-glass")
    is_claim = is_claimed(operator)
    is_asked = is_claim and event.endswith(APPROVAL_SUFFIX) and not requester_person.startswith(SYSTEM_PREFIX)
    excluded = [requester_person, concerned_person]
    if not is_asked:
        excluded.append(operator.person)
    BreakGlass(
        act_id=mint_id("brk", secrets.token_bytes),
        event=event,
        subject=subject,
        account=_find_account(grant),
        operator=OperatorRow.objects.get(username=operator.username),
        person=operator.person,
        requester_person=requester_person,
        excluded_persons=" ".join(filter(None, excluded)),
        host_user=operator.host_user or "",
        is_claimed=is_claim,
        why=clean_text(why, 300),
        created_at=grant.at,
    ).save()


def find_authority_fault(username: str) -> str | None:
    """Return why the operator neither approves nor reviews yet, see `list_unreviewed_changes`; None: it may."""
    if list_unreviewed_changes().filter(operator__username=username).exists():
        return (
            "Your role, scope or second factor was changed by an approval on a command line that is not reviewed yet. "
            "Until it is, you neither approve nor review."
        )
    return None


def find_review_fault(action: BreakGlass, person: str) -> str | None:
    """Return why the person must not review the action, or None."""
    if action.reviewed_at is not None:
        return "This action is already reviewed."
    if action.is_claimed and person == action.person == action.requester_person:
        return "This was done in your name on a command line, so others must review it. Tell them if it was not you."
    if person == action.requester_person:
        return "You requested this, so another person must review it."
    if _is_excluded(action, person) and person == action.person:
        return "This was done under your name, so another person must review it."
    if _is_excluded(action, person):
        return "You collected the key, approved this too, or this is about you, so another person must review it."
    if person == action.first_reviewer_person:
        return "You have reviewed this, and another person must review it too."
    return None


def review_break_glass(grant: Grant, action: BreakGlass) -> None:
    """Record a review. It completes the action, unless it is the first of a claimed action's two reviews.

    Raises StateConflictError when `find_review_fault` or `find_authority_fault` finds a reason, and on a command line.
    """
    operator = _reviewer(grant)
    fault = find_review_fault(action, operator.person) or find_authority_fault(operator.username)
    if fault is not None:
        raise StateConflictError(fault)
    is_last = not action.is_claimed or action.first_reviewer_person is not None
    reviewer = OperatorRow.objects.get(username=operator.username)
    with recorded(
        grant,
        Permission.BREAK_GLASS_REVIEW,
        "break_glass.reviewed",
        account=scope_of(action),
        act_id=action.act_id,
        act=action.event,
        is_last=is_last,
    ):
        if is_last:
            action.compare_and_swap(reviewed_at=grant.at, reviewer=reviewer, reviewer_person=operator.person)
        else:
            action.compare_and_swap(first_reviewer=reviewer, first_reviewer_person=operator.person)


def disown_approval(grant: Grant, action: BreakGlass) -> None:
    """Record that the claimed approver did not approve, and raise an alarm; two other persons review it.

    Raises StateConflictError unless the operator could confirm the approval.
    """
    operator = _reviewer(grant)
    if not may_confirm(action, operator.person):
        raise StateConflictError("Only the claimed approver can disown an approval, before it is reviewed.")
    event, within = "break_glass.disowned", scope_of(action)
    with recorded(grant, Permission.BREAK_GLASS_REVIEW, event, account=within, act_id=action.act_id, act=action.event):
        action.compare_and_swap(excluded_persons=f"{action.excluded_persons} {operator.person}")
        announce(
            grant,
            NoticeKind.APPROVAL_DISOWNED,
            None,
            action.subject,
            act_id=action.act_id,
            event=action.event,
            by=operator.username,
            host_user=action.host_user,
        )


def may_confirm(action: BreakGlass, person: str) -> bool:
    """Whether the person is the claimed approver of an open action, and has neither confirmed nor disowned it."""
    return action.is_claimed and person == action.person and find_review_fault(action, person) is None


def exclude_collector(person: str, *subjects: str) -> None:
    """Exclude the collector of a key from the reviews of what approved it, inside the `recorded` block.

    `subjects`: the rotation, and the campaign or standing approval that covers it. Raises StateConflictError when the
    person reviewed one of their actions.
    """
    actions = list_actions(subjects)
    if any(is_reviewed_by(action, person) for action in actions):
        raise StateConflictError("You reviewed the approval of this key. Another person must collect it.")
    _exclude(person, actions)


def exclude_approvers(operator: OperatorPrincipal, earlier: Collection[str], subject: str, event: str) -> None:
    """Exclude the approvers of one request from the reviews of each other's approvals, inside the `recorded` block.

    `earlier`: the persons who approved it before the operator. Raises StateConflictError when the operator reviewed one
    of these approvals.
    """
    actions = [action for action in list_actions([subject]) if action.event == event]
    if any(is_reviewed_by(action, operator.person) for action in actions):
        raise StateConflictError("You reviewed another approval of this. Another person must approve it.")
    for person in (operator.person, *earlier):
        _exclude(person, actions)


def _exclude(person: str, actions: Iterable[BreakGlass]) -> None:
    for action in actions:
        if action.reviewed_at is None and not _is_excluded(action, person):
            action.compare_and_swap(excluded_persons=f"{action.excluded_persons} {person}")


def list_actions(subjects: Collection[str]) -> list[BreakGlass]:
    """Return the break-glass actions on these subjects with who acted, the oldest first."""
    actions = BreakGlass.objects.filter(subject__in=subjects)
    return list(actions.select_related("operator").order_by("created_at", "act_id"))


def is_reviewed_by(action: BreakGlass, person: str) -> bool:
    """Whether the person reviewed the action, as its first or its last reviewer."""
    return person in (action.first_reviewer_person, action.reviewer_person)


def scope_of(action: BreakGlass) -> AccessScope:
    """Return the accounts that the action concerns; the whole installation if its subject is of several accounts."""
    return EVERYWHERE if action.account is None else target_of(action.account).scope


def _find_account(grant: Grant) -> Account | None:
    """Find the account that the grant of the action is for."""
    target = grant.target
    if not isinstance(target, Target) or target.merchant_id is None:
        return None
    return Account.objects.get(merchant=target.merchant_id, environment=target.environment)


def _reviewer(grant: Grant) -> OperatorPrincipal:
    operator = grant.principal
    if not isinstance(operator, OperatorPrincipal):
        raise TypeError("only an operator can review")
    if operator.channel is not Channel.CONSOLE:
        raise StateConflictError("Review it in the console: a command line does not prove an identity.")
    return operator


def _is_excluded(action: BreakGlass, person: str) -> bool:
    return person in action.excluded_persons.split()
