"""Grants for the frontends, from the one decision function (`access.decision.decide`), and operators' principals."""

import getpass
import os
from datetime import datetime

from keyvault.access.decision import Denial, Grant, decide
from keyvault.access.permissions import Permission
from keyvault.access.principals import Channel, OperatorPrincipal, Principal
from keyvault.access.rules import Target, operation
from keyvault.access.scopes import EVERYWHERE, AccessScope
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode, NotFoundError, PermissionMissingError, StateConflictError
from keyvault.models import Account
from keyvault.models import Operator as OperatorRow


def target_of(account: Account | None, requester_person: str | None = None, within: AccessScope = EVERYWHERE) -> Target:
    if account is None:
        return Target(requester_person=requester_person, within=within)
    return Target(Environment(account.environment), account.merchant_id, requester_person)


def authorize(
    principal: Principal,
    permission: Permission,
    account: Account | None = None,
    *,
    now: datetime,
    requester_person: str | None = None,
    within: AccessScope = EVERYWHERE,
) -> Grant:
    """Return the grant to pass to a service, or raise the denial as an error.

    `within`: the accounts that a target of no particular account concerns; by default the whole installation.

    Raises PermissionMissingError (the principal lacks the permission, or the target concerns more than its scope),
    NotFoundError (the target belongs to another merchant), StateConflictError (a second person is required).
    """
    verdict = decide(operation(permission), principal, target_of(account, requester_person, within), now)
    if isinstance(verdict, Grant):
        return verdict
    raise _error(verdict)


def is_allowed(
    principal: Principal,
    permission: Permission,
    account: Account | None = None,
    *,
    now: datetime,
    requester_person: str | None = None,
    within: AccessScope = EVERYWHERE,
) -> bool:
    """Whether `authorize` would return a grant. For display only; never a substitute for `authorize`."""
    verdict = decide(operation(permission), principal, target_of(account, requester_person, within), now)
    return isinstance(verdict, Grant)


def operator_principal(
    row: OperatorRow, channel: Channel = Channel.CONSOLE, host_user: str | None = None
) -> OperatorPrincipal:
    """Return the principal of an operator; a disabled operator has no roles."""
    roles = row.roles if row.is_active else frozenset()
    return OperatorPrincipal(row.username, row.person, roles, row.access_scope, channel, host_user)


def find_host_user() -> str:
    """Return the name of the user who runs this process, or its number: a container's user need not have a name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def _error(denial: Denial) -> NotFoundError | PermissionMissingError | StateConflictError:
    if denial.code is ErrorCode.NOT_FOUND:
        return NotFoundError(denial.detail, internal=denial.internal)
    if denial.code is ErrorCode.STATE_CONFLICT:
        return StateConflictError(denial.detail, internal=denial.internal)
    return PermissionMissingError(denial.detail, internal=denial.internal)
