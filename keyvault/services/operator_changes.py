"""Changes of operators: made immediately, or requested, and then approved by a second person.

Adding a role of `access.roles.FOUR_EYES_ROLES`, widening a scope and resetting second factors need the approval. A
person neither requests nor approves a change of their own operators. An approval covers one digest, over the
operator's person, and its roles and scope before and after. If they changed meanwhile, it is refused.

Until the installation has two approving persons (`operators.approving_persons`), the host's owner gives such roles and
scopes alone. It gives an approving role only for the whole installation, because only such a person counts.

On the embedded secret backend the host's owner holds the master key, the signing key and the database, so no rule of
this service binds that person: there `enroll_operator` gives every role.
"""

import secrets
from collections.abc import Iterable
from datetime import datetime, timedelta

from django.conf import settings
from django.db.models import QuerySet
from django.db.models.functions import Now

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission as P
from keyvault.access.principals import HOST, OperatorPrincipal, is_claimed
from keyvault.access.roles import FOUR_EYES_ROLES, Role
from keyvault.access.scopes import EVERYWHERE, AccessScope
from keyvault.domain.canonical import JsonValue, canonical_digest
from keyvault.domain.environments import Environment
from keyvault.domain.errors import Fault, RequestInvalidError, StateConflictError
from keyvault.domain.free_text import clean_text, find_reason_fault
from keyvault.domain.ids import mint_id
from keyvault.models import Operator, OperatorChange, OperatorChangeApproval, OperatorChangeKind, OperatorChangeState
from keyvault.services.approvals.four_eyes import approving_operator, record_approval
from keyvault.services.operators.approving_persons import has_two_approving_persons
from keyvault.services.operators.operators import (
    create_operator,
    lock_person,
    operator_row,
    require_active,
    require_another_person,
    require_known,
    require_local,
    set_roles,
    set_scope,
)
from keyvault.services.recording.authorization import is_allowed, operator_principal
from keyvault.services.recording.transaction import recorded, recorded_together
from keyvault.services.sessions.second_factors import reset_second_factors

APPROVAL_LIFETIME = timedelta(days=7)
"""Time within which a requested change can be approved."""

_APPROVALS_NEEDED = 1

K, S = OperatorChangeKind, OperatorChangeState


def enroll_operator(
    grant: Grant, *, username: str, roles: Iterable[Role], scope: AccessScope, same_person_as: Operator | None = None
) -> Operator:
    """Create an operator that then accepts an invitation. `same_person_as`: an existing operator of the same human.

    Raises the errors of `create_operator`. With a Vault also StateConflictError for a role of FOUR_EYES_ROLES, which a
    second person approves once the operator exists.
    """
    chosen = frozenset(roles)
    if settings.IS_VAULT and (needing := chosen & FOUR_EYES_ROLES) and not _decides_alone(grant, chosen, scope):
        names = " and ".join(sorted(needing))
        raise StateConflictError(
            f"A second person must approve {names}. Invite {username} with another role, such as auditor. Then request "
            f"it in the console (Operators, Change roles), or run: manage.py set_operator_roles {username} --role ROLE "
            "--requested-by NAME --approved-by NAME --reason WHY"
        )
    with recorded_together():
        person = None if same_person_as is None else lock_person(same_person_as)
        return create_operator(grant, username=username, roles=chosen, scope=scope, password=None, person=person)


def change_roles(grant: Grant, operator: Operator, roles: Iterable[Role], why: str) -> OperatorChange | None:
    """Replace an operator's roles, or request that if it adds a role of FOUR_EYES_ROLES. Return the request.

    Raises StateConflictError if the operator is disabled or belongs to the person of the grant. A request also
    raises StateConflictError if one is open already or the grant is not an operator's, and RequestInvalidError without
    a reason.
    """
    chosen = frozenset(roles)
    if chosen - operator.roles & FOUR_EYES_ROLES and not _decides_alone(grant, chosen, operator.access_scope):
        return _request(grant, operator, K.ROLES, why, roles=chosen)
    set_roles(grant, operator, chosen, why)
    return None


def change_scope(grant: Grant, operator: Operator, scope: AccessScope, why: str) -> OperatorChange | None:
    """Replace an operator's scope, or request that unless the present scope covers it. Return the request.

    Raises the errors of `change_roles`, and RequestInvalidError for a scope that names nothing known.
    """
    require_known(scope)
    if not operator.access_scope.covers(scope) and not _decides_alone(grant, operator.roles, scope):
        return _request(grant, operator, K.SCOPE, why, scope=scope)
    set_scope(grant, operator, scope, why)
    return None


def request_factor_reset(grant: Grant, operator: Operator, why: str) -> OperatorChange:
    """Request that all second factors of an operator are removed. Raises the errors of `change_roles`."""
    return _request(grant, operator, K.SECOND_FACTORS_RESET, why)


def approve_change(grant: Grant, change: OperatorChange, plan_digest: str) -> OperatorChange:
    """Approve exactly this change, and make it.

    Raises StateConflictError when the change does not await approval or has another digest, the operator was changed
    after the request, or the requester may no longer request it. Raises it also when the approver is the requester or
    the person concerned.
    """
    _require_undecided(grant, change)
    _require_requester(grant, change)
    operator = get_operator_of(change)
    require_another_person(grant, operator)
    if change.plan_digest != _digest(change, operator):
        raise StateConflictError("The operator was changed after the request. Reject it and make a new one.")
    approver = approving_operator(grant, change, plan_digest)
    event = "operator_change.approved"
    with recorded(grant, P.OPERATORS_APPROVE, event, account=None, **_about(change), plan_digest=plan_digest):
        approval = OperatorChangeApproval(change=change)
        record_approval(
            grant,
            change,
            approver,
            approval,
            environment=Environment.PRODUCTION,
            event=event,
            concerned_person=change.operator_person,
        )
        change.compare_and_swap(state=S.APPLIED, closed_at=grant.at)
        if change.kind == K.ROLES:
            set_roles(grant, operator, map(Role, change.roles.split()), change.why)
        elif change.kind == K.SCOPE:
            set_scope(grant, operator, AccessScope.from_json(change.scope), change.why)
        else:
            reset_second_factors(grant, operator)
    return change


def reject_change(grant: Grant, change: OperatorChange, why: str) -> OperatorChange:
    """Reject a requested change. Raises StateConflictError once it is decided."""
    _require_undecided(grant, change)
    return _close(grant, P.OPERATORS_APPROVE, change, S.REJECTED, why)


def withdraw_change(grant: Grant, change: OperatorChange) -> OperatorChange:
    """Withdraw a requested change. Only the person who requested it may do this."""
    operator = grant.principal
    if not isinstance(operator, OperatorPrincipal) or operator.person != change.requester_person:
        raise StateConflictError("Only the person who made the request can withdraw it. You can reject it instead.")
    _require_undecided(grant, change)
    return _close(grant, P.OPERATORS_WRITE, change, S.WITHDRAWN, "")


def is_undecided(change: OperatorChange, now: datetime) -> bool:
    """Whether the change awaits an approval; False after APPROVAL_LIFETIME."""
    return bool(change.state == S.AWAITING_APPROVAL and now < change.approval_expires_at)


def list_undecided(now: datetime | Now) -> QuerySet[OperatorChange]:
    """Return the changes that await an approval, oldest first."""
    rows: QuerySet[OperatorChange] = OperatorChange.objects.filter(state=S.AWAITING_APPROVAL)
    return rows.filter(approval_expires_at__gt=now).order_by("created_at")


def get_operator_of(change: OperatorChange) -> Operator:
    """Return the operator as it is now."""
    operator: Operator = Operator.objects.get(pk=change.operator_id)
    return operator


def _decides_alone(grant: Grant, roles: frozenset[Role], scope: AccessScope) -> bool:
    """Whether the host's owner gives these roles and this scope without an approval, for lack of approving persons."""
    is_whole = scope == EVERYWHERE or not roles & FOUR_EYES_ROLES
    return grant.principal == HOST and is_whole and not has_two_approving_persons()


def _request(
    grant: Grant,
    operator: Operator,
    kind: OperatorChangeKind,
    why: str,
    *,
    roles: frozenset[Role] | None = None,
    scope: AccessScope | None = None,
) -> OperatorChange:
    """Request a change of an operator. `roles` and `scope`: after the change; None: they stay."""
    requester = grant.principal
    if not isinstance(requester, OperatorPrincipal):
        raise StateConflictError(
            "This requires two operators: one who requests it and one who approves it. Name them with --requested-by "
            "and --approved-by."
        )
    require_active(operator)
    require_another_person(grant, operator)
    if kind == K.ROLES:
        require_local(operator)
    if (fault := find_reason_fault(why)) is not None:
        raise RequestInvalidError("The operator cannot be changed.", [Fault("/why", fault)])
    change = OperatorChange(
        change_id=mint_id("opc", secrets.token_bytes),
        operator=operator,
        operator_person=operator.person,
        kind=kind,
        roles_before=_format_roles(operator.roles),
        roles=_format_roles(operator.roles if roles is None else roles),
        scope_before=operator.access_scope.as_json(),
        scope=(scope or operator.access_scope).as_json(),
        why=clean_text(why.strip(), 300),
        state=S.AWAITING_APPROVAL,
        approvals_needed=_APPROVALS_NEEDED,
        requester=operator_row(requester),
        requester_person=requester.person,
        is_requester_claimed=is_claimed(requester),
        created_at=grant.at,
        approval_expires_at=grant.at + APPROVAL_LIFETIME,
    )
    change.plan_digest = _digest(change, operator)
    details: dict[str, JsonValue] = {**_about(change), "plan_digest": change.plan_digest, "why": change.why}
    with recorded(grant, P.OPERATORS_WRITE, "operator_change.requested", account=None, **details):
        if list_undecided(grant.at).filter(operator=operator, kind=kind).exists():
            raise StateConflictError(
                f"A change of {operator.username} awaits approval already. Withdraw or reject it first."
            )
        change.save()
    return change


def _close(grant: Grant, permission: P, change: OperatorChange, state: OperatorChangeState, why: str) -> OperatorChange:
    reason = clean_text(why.strip(), 300)
    details = _about(change) | ({"why": reason} if reason else {})
    with recorded(grant, permission, f"operator_change.{state.value}", account=None, **details):
        change.compare_and_swap(state=state, closed_at=grant.at, closed_why=reason)
    return change


def _about(change: OperatorChange) -> dict[str, JsonValue]:
    details: dict[str, JsonValue] = {
        "change_id": change.change_id,
        "username": change.operator.username,
        "kind": change.kind,
    }
    if change.kind == K.ROLES:
        details |= {"old": [*change.roles_before.split()], "new": [*change.roles.split()]}
    elif change.kind == K.SCOPE:
        details |= {"old": change.scope_before, "new": change.scope}
    return details


def _digest(change: OperatorChange, operator: Operator) -> str:
    """Return the digest of the change of an operator as it is now."""
    return canonical_digest(
        {
            "what": "change of an operator",
            "username": operator.username,
            "person": operator.person,
            "kind": change.kind,
            "old": _format_roles(operator.roles),
            "new": change.roles,
            "old_scope": operator.access_scope.as_json(),
            "new_scope": change.scope,
            "why": change.why,
        }
    )


def _format_roles(roles: frozenset[Role]) -> str:
    return " ".join(sorted(roles))


def _require_requester(grant: Grant, change: OperatorChange) -> None:
    """Require that the requester is active and could make the request now."""
    requester: Operator = Operator.objects.get(pk=change.requester_id)
    if not is_allowed(operator_principal(requester), P.OPERATORS_WRITE, now=grant.at):
        raise StateConflictError(
            f"The requester, {requester.username}, may no longer change operators. Reject it and make a new request."
        )


def _require_undecided(grant: Grant, change: OperatorChange) -> None:
    if not is_undecided(change, grant.at):
        raise StateConflictError(f"The change does not await approval: it is {change.state}, or too old.")
