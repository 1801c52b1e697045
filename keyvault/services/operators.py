"""Operators: made on the host, by whoever owns it, and never in the console."""

from collections.abc import Iterable

from django.contrib.auth.models import Group
from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.access.principals import Channel
from keyvault.access.principals import Operator as OperatorPrincipal
from keyvault.access.roles import Role
from keyvault.domain.errors import Fault, NotFoundError, RequestInvalidError, StateConflictError
from keyvault.domain.plaintext import Plaintext
from keyvault.models import Operator
from keyvault.services.authorization import operator_principal
from keyvault.services.recording import recorded


def create_operator(
    grant: Grant, *, username: str, roles: Iterable[Role], password: Plaintext, person: str | None = None
) -> Operator:
    """A log-in for the console. `person` names an existing human being when this is their second log-in.

    Raises StateConflictError on a name that is taken, RequestInvalidError on a password that is too weak.
    """
    if Operator.objects.filter(username=username).exists():
        raise StateConflictError(f"There is an operator {username} already.")
    names = sorted(role.value for role in roles)
    operator = Operator(username=username, is_staff=True)
    if person is not None:
        operator.person = person
    _set_password(operator, password)
    with recorded(grant, Permission.OPERATORS_WRITE, "operator.created", username=username, roles=names):
        operator.save()
        operator.groups.set(Group.objects.filter(name__in=names))
    return operator


def reset_password(grant: Grant, operator: Operator, password: Plaintext) -> None:
    """Raises RequestInvalidError on a password that is too weak. Ends every session of the operator."""
    _set_password(operator, password)
    with recorded(grant, Permission.OPERATORS_WRITE, "operator.password_reset", username=operator.username):
        operator.save(update_fields=["password"])


def find_operator(username: str, host_user: str) -> OperatorPrincipal:
    """The operator whom a command line names; that line proves nothing, so the host's user is kept beside it.

    Raises NotFoundError when there is none, or the log-in is disabled.
    """
    row = Operator.objects.filter(username=username, is_active=True).first()
    if row is None:
        raise NotFoundError(f"There is no operator {username}.")
    return operator_principal(row, Channel.COMMAND_LINE, host_user)


def operator_row(principal: OperatorPrincipal) -> Operator:
    return Operator.objects.get(username=principal.username)


def _set_password(operator: Operator, password: Plaintext) -> None:
    try:
        validate_password(password.reveal(), operator)
    except ValidationError as error:
        faults = [Fault("/password", message) for message in error.messages]
        raise RequestInvalidError("The password is too weak.", faults) from None
    operator.set_password(password.reveal())
