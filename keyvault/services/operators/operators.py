"""Operators: created on the host or by single sign-on, and changed or disabled there or by a key administrator.

A person does not change their own operators. `services.operator_changes` decides which changes a second person
approves, and calls this module after the approval.
"""

from collections.abc import Iterable
from typing import Any

from allauth.socialaccount.models import SocialAccount
from django.contrib.auth.models import Group
from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.db.models import QuerySet

from keyvault.access.decision import Grant
from keyvault.access.permissions import Permission
from keyvault.access.principals import SINGLE_SIGN_ON, Channel, OperatorPrincipal
from keyvault.access.roles import Role
from keyvault.access.scopes import NOWHERE, AccessScope
from keyvault.domain.canonical import JsonValue
from keyvault.domain.errors import Fault, NotFoundError, RequestInvalidError, StateConflictError
from keyvault.domain.free_text import clean_text
from keyvault.domain.keystring import string_scope
from keyvault.domain.plaintext import Plaintext
from keyvault.models import ConsoleSession, Merchant, Operator
from keyvault.services.operators.approving_persons import require_approvers_remain
from keyvault.services.operators.role_use import replace_role_uses
from keyvault.services.recording.authorization import operator_principal
from keyvault.services.recording.transaction import Record, recorded, recorded_together

MAX_SCOPE_MERCHANTS = 100
"""Maximum merchants that an operator's scope names; each list of the console is filtered by their accounts."""


def create_operator(
    grant: Grant,
    *,
    username: str,
    roles: Iterable[Role],
    scope: AccessScope,
    password: Plaintext | None,
    person: str | None = None,
) -> Operator:
    """Create an operator for the console.

    `person`: id of the existing person whose further operator this is; None: a new person.

    `password` None: the operator signs in by single sign-on, or cannot sign in until it accepts an invitation.

    Raises StateConflictError when the name is taken, RequestInvalidError when the password is too weak or the scope
    names an unknown merchant.
    """
    if Operator.objects.filter(username=username).exists():
        raise StateConflictError(f"Operator {username} already exists. Choose another name.")
    if scope != NOWHERE:
        require_known(scope)
    chosen, held = frozenset(roles), scope.as_json()
    names = sorted(role.value for role in chosen)
    operator = Operator(username=username, is_staff=True, **_scope_columns(scope))
    if person is not None:
        operator.person = person
    if password is None:
        operator.set_unusable_password()
    else:
        choose_password(operator, password)
    with recorded(grant, Permission.OPERATORS_ENROLL, "operator.created", username=username, roles=names, scope=held):
        operator.save()
        operator.groups.set(Group.objects.filter(name__in=names))
        replace_role_uses(operator, chosen, grant.at)
    return operator


def reset_password(grant: Grant, operator: Operator, password: Plaintext) -> None:
    """Replace a password, end all sessions and known devices of the operator, and lift a sign-in lock of the name.

    Raises RequestInvalidError when the password is too weak, StateConflictError for a disabled operator and for one of
    single sign-on.
    """
    require_active(operator)
    choose_password(operator, password)
    with recorded(grant, Permission.OPERATORS_ENROLL, "operator.password_reset", username=operator.username) as record:
        swap_operator(record, operator, password=operator.password)


def set_roles(grant: Grant, operator: Operator, roles: Iterable[Role], why: str = "") -> None:
    """Replace an operator's roles and end all its sessions.

    Raises StateConflictError for a disabled operator, the operator's own person, and if too few approving persons would
    remain, unless single sign-on does it. Only single sign-on changes the roles of its operators.
    """
    require_active(operator)
    require_another_person(grant, operator)
    if grant.principal != SINGLE_SIGN_ON:
        require_local(operator)
    before, after = operator.roles, frozenset(roles)
    if before == after:
        return
    details: dict[str, JsonValue] = {"username": operator.username, "old": [*sorted(before)], "new": [*sorted(after)]}
    if why:
        details["why"] = clean_text(why.strip(), 300)
    with recorded(grant, CHANGING, "operator.roles_changed", account=None, **details) as record:
        if grant.principal != SINGLE_SIGN_ON:
            require_approvers_remain(operator, roles=after, scope=operator.access_scope)
        operator.groups.set(Group.objects.filter(name__in=sorted(after)))
        replace_role_uses(operator, after, grant.at)
        swap_operator(record, operator)


def set_scope(grant: Grant, operator: Operator, scope: AccessScope, why: str = "") -> None:
    """Replace the merchants and environments of an operator, and end all its sessions.

    Raises RequestInvalidError with faults, StateConflictError for a disabled operator, the operator's own person, and
    if too few approving persons would remain.
    """
    require_active(operator)
    require_another_person(grant, operator)
    require_known(scope)
    before = operator.access_scope
    if before == scope:
        return
    details: dict[str, JsonValue] = {"username": operator.username, "old": before.as_json(), "new": scope.as_json()}
    if why:
        details["why"] = clean_text(why.strip(), 300)
    with recorded(grant, CHANGING, "operator.scope_changed", account=None, **details) as record:
        require_approvers_remain(operator, roles=operator.roles, scope=scope)
        swap_operator(record, operator, **_scope_columns(scope))


def link_person(grant: Grant, operator: Operator, other: Operator) -> None:
    """State that an operator, and each operator of its person, belongs to the person of another operator.

    The sessions of all of them end. Nothing happens if both have the same person already.

    Raises StateConflictError for a disabled operator, the operator's own person, and if an operator of its person
    already had a scope: what that one requested or approved stays under its own person.
    """
    require_active(operator)
    require_another_person(grant, operator)
    if operator.person == other.person:
        return
    with recorded_together():
        person = lock_person(other)
        moved = [operator, *Operator.objects.filter(person=operator.person).exclude(pk=operator.pk).order_by("pk")]
        for row in moved:
            if row.access_scope != NOWHERE:
                raise StateConflictError(
                    f"Operator {row.username} has had access as a person of its own. If {other.username} has had no "
                    f"access, link {other.username} to {row.username} instead. Otherwise disable all operators of one "
                    "of the two persons."
                )
            details: dict[str, JsonValue] = {"username": row.username, "same_person_as": other.username}
            with recorded(
                grant, Permission.OPERATORS_WRITE, "operator.person_linked", account=None, **details
            ) as record:
                swap_operator(record, row, person=person)


def lock_person(operator: Operator) -> str:
    """Return the person of an operator, which no concurrent `link_person` changes before the transaction ends.

    Locks all operators in one order. Otherwise two links of one chain could miss the operator that the other one moves.
    """
    list(Operator.objects.select_for_update(no_key=True).order_by("pk").values_list("pk"))
    person: str = Operator.objects.values_list("person", flat=True).get(pk=operator.pk)
    return person


def end_operator_sessions(grant: Grant, operator: Operator) -> None:
    """End all sessions of an operator, which can sign in again.

    Raises StateConflictError for the grant's own person.
    """
    require_another_person(grant, operator)
    with recorded(grant, Permission.OPERATORS_WRITE, "operator.sessions_ended", username=operator.username) as record:
        swap_operator(record, operator)


def disable_operator(grant: Grant, operator: Operator) -> None:
    """Disable an operator permanently: it can no longer sign in, use a session or run a command.

    Raises StateConflictError for a disabled operator, the operator's own person, and if too few approving persons would
    remain.
    """
    require_active(operator)
    require_another_person(grant, operator)
    with recorded(grant, Permission.OPERATORS_WRITE, "operator.disabled", username=operator.username) as record:
        require_approvers_remain(operator, roles=frozenset(), scope=operator.access_scope)
        swap_operator(record, operator, is_active=False)


def list_operators() -> QuerySet[Operator]:
    """Return all operators by name, including disabled ones, with their groups."""
    rows: QuerySet[Operator] = Operator.objects.order_by("username").prefetch_related("groups")
    return rows


def find_operator(username: str, host_user: str) -> OperatorPrincipal:
    """Return the principal that a command line names. The name is unproven, so `host_user` is recorded too.

    Raises NotFoundError when there is no such operator, or it is disabled.
    """
    row = Operator.objects.filter(username=username, is_active=True).first()
    if row is None:
        raise NotFoundError(f"There is no operator {username}.")
    return operator_principal(row, Channel.COMMAND_LINE, host_user)


def get_operator(username: str) -> Operator:
    """Return an operator's row, including a disabled one's. Raises NotFoundError."""
    row: Operator | None = Operator.objects.filter(username=username).first()
    if row is None:
        raise NotFoundError(f"There is no operator {username}. `manage.py list_operators` lists them.")
    return row


def operator_row(principal: OperatorPrincipal) -> Operator:
    return Operator.objects.get(username=principal.username)


def require_active(operator: Operator) -> None:
    """Raise StateConflictError for a disabled operator."""
    if not operator.is_active:
        raise StateConflictError(
            f"Operator {operator.username} is disabled. Create a new one: "
            f"manage.py invite_operator NAME --role ROLE --same-person-as {operator.username}"
        )


def is_single_sign_on(operator: Operator) -> bool:
    """Whether the identity provider authenticates the operator and decides its roles."""
    return bool(SocialAccount.objects.filter(user_id=operator.pk).exists())


def require_local(operator: Operator) -> None:
    """Raise StateConflictError when the identity provider decides the operator's roles."""
    if is_single_sign_on(operator):
        raise StateConflictError(
            f"Operator {operator.username} signs in by single sign-on. Its groups at the identity provider decide its "
            "roles, and it has no password here. Change the groups there, or disable the operator."
        )


def require_another_person(grant: Grant, operator: Operator) -> None:
    """Raise StateConflictError when the operator's own person would change it."""
    if isinstance(grant.principal, OperatorPrincipal) and grant.principal.person == operator.person:
        raise StateConflictError("You cannot change your own operator, nor approve a change of it. Another person can.")


def swap_operator(record: Record, operator: Operator, **changes: Any) -> None:
    """Change the operator and end its sessions, inside the `recorded` block whose entry names their number.

    Sessions are bound to the operator's version. Raises StateConflictError when the row has changed.
    """
    operator.compare_and_swap(**changes)
    ended, _ = ConsoleSession.objects.filter(operator=operator, expire_date__gt=record.grant.at).delete()
    if ended:
        record.details["sessions_ended"] = ended


CHANGING = frozenset({Permission.OPERATORS_WRITE, Permission.OPERATORS_APPROVE})
"""Permissions of a change: the one that makes it, or the one that approves it."""


def _scope_columns(scope: AccessScope) -> dict[str, Any]:
    return {
        "scope_merchants": scope.as_json()["merchants"],
        "scope_environments": string_scope(scope.environments),
    }


def require_known(scope: AccessScope) -> None:
    """Raise RequestInvalidError for a scope without merchants or environments, or with unknown merchants."""
    faults = [] if scope.environments else [Fault("/environment", "at least one environment")]
    if scope.merchants is not None:
        if not 1 <= len(scope.merchants) <= MAX_SCOPE_MERCHANTS:
            faults.append(Fault("/merchant", f"1 to {MAX_SCOPE_MERCHANTS} merchants, or all of them"))
        known = Merchant.objects.filter(pk__in=scope.merchants).values_list("pk", flat=True)
        faults += [Fault("/merchant", f"there is no merchant {name}") for name in sorted(scope.merchants - {*known})]
    if faults:
        raise RequestInvalidError("The scope is invalid.", faults)


def choose_password(operator: Operator, password: Plaintext) -> None:
    """Set the password on the row, for the caller to write.

    Raises RequestInvalidError when it is too weak, StateConflictError for an operator of single sign-on.
    """
    require_local(operator)
    try:
        validate_password(password.reveal(), operator)
    except ValidationError as error:
        faults = [Fault("/password", message) for message in error.messages]
        raise RequestInvalidError("The password is too weak.", faults) from None
    operator.set_password(password.reveal())
