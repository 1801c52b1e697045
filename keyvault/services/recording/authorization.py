"""Asking the one decision function from the doors, and who a log-in is to it."""

from datetime import datetime

from keyvault.access.decision import Denial, Grant, decide
from keyvault.access.permissions import Permission
from keyvault.access.principals import Channel, Operator, Principal
from keyvault.access.rules import PLATFORM, Target, operation
from keyvault.domain.environments import Environment
from keyvault.domain.errors import ErrorCode, NotFoundError, PermissionMissingError, StateConflictError
from keyvault.models import Account
from keyvault.models import Operator as OperatorRow


def target_of(account: Account | None, requester_person: str | None = None) -> Target:
    if account is None:
        return PLATFORM if requester_person is None else Target(requester_person=requester_person)
    return Target(Environment(account.environment), account.merchant_id, requester_person)


def authorize(
    principal: Principal,
    permission: Permission,
    account: Account | None = None,
    *,
    now: datetime,
    requester_person: str | None = None,
) -> Grant:
    """The grant to hand to a service. Raises what the denial means to whoever asked.

    PermissionMissingError: may not do that at all. NotFoundError: somebody else's. StateConflictError: it
    takes a second person.
    """
    verdict = decide(operation(permission), principal, target_of(account, requester_person), now)
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
) -> bool:
    """Whether `authorize` would return: for showing or hiding, never instead of asking."""
    verdict = decide(operation(permission), principal, target_of(account, requester_person), now)
    return isinstance(verdict, Grant)


def operator_principal(row: OperatorRow, channel: Channel = Channel.CONSOLE, host_user: str | None = None) -> Operator:
    """A disabled log-in holds no roles."""
    roles = row.roles if row.is_active else frozenset()
    return Operator(row.username, row.person, roles, channel, host_user)


def _error(denial: Denial) -> NotFoundError | PermissionMissingError | StateConflictError:
    if denial.code is ErrorCode.NOT_FOUND:
        return NotFoundError(denial.detail, internal=denial.internal)
    if denial.code is ErrorCode.STATE_CONFLICT:
        return StateConflictError(denial.detail, internal=denial.internal)
    return PermissionMissingError(denial.detail, internal=denial.internal)
