"""The persons who decide on changes of operators: a key administrator requests one, and another person approves it.

Both are active, with the whole installation as scope. Until there are two such persons, the host's owner decides alone,
see `services.operator_changes`. That does not begin again: no change of an operator may leave fewer than two.
"""

from keyvault.access.roles import FOUR_EYES_ROLES, Role
from keyvault.access.scopes import EVERYWHERE, AccessScope
from keyvault.domain.errors import StateConflictError
from keyvault.domain.keystring import StringScope
from keyvault.models import Operator

_ADMINISTRATOR = Role.KEY_ADMINISTRATOR

_Held = frozenset[tuple[str, str]]
"""Pairs of a person and an approving role."""


def has_two_approving_persons() -> bool:
    """Whether one person can request a change of an operator and another one approve it."""
    return _has_two(_list_held())


def require_approvers_remain(operator: Operator, *, roles: frozenset[Role], scope: AccessScope) -> None:
    """Require that operators can still be changed with these roles and this scope of an operator.

    Call it inside the `recorded` block, before the change. Locks all active operators, so that concurrent removals are
    serialized.

    Raises StateConflictError when the last key administrator, or the last second person, of the whole installation
    would be removed.
    """
    if not operator.roles & FOUR_EYES_ROLES:
        return
    list(Operator.objects.filter(is_active=True).select_for_update(no_key=True).order_by("pk").values_list("pk"))
    # After a lock wait PostgreSQL re-reads only the locked rows, not their groups: that takes a second query.
    others = _list_held(without=operator)
    before = others | _held_by(operator.person, operator.roles, operator.access_scope)
    after = others | _held_by(operator.person, roles, scope)
    if _has_administrator(before) and not _has_administrator(after):
        raise StateConflictError(
            f"Operator {operator.username} is the last active one with the role {_ADMINISTRATOR} for the whole "
            f"installation. Make another operator {_ADMINISTRATOR} first."
        )
    if _has_two(before) and not _has_two(after):
        raise StateConflictError(
            f"Operator {operator.username} is one of the last two persons who can change operators under four eyes. "
            "Make another operator approver for the whole installation first. To lock the operator out immediately, "
            "reset its password (manage.py reset_operator_password), or remove it from its groups at the identity "
            "provider and end its sessions (manage.py end_operator_sessions)."
        )


def _list_held(without: Operator | None = None) -> _Held:
    rows = Operator.objects.filter(is_active=True, scope_merchants__isnull=True, scope_environments=StringScope.ALL)
    if without is not None:
        rows = rows.exclude(pk=without.pk)
    return frozenset(rows.filter(groups__name__in=FOUR_EYES_ROLES).values_list("person", "groups__name"))


def _held_by(person: str, roles: frozenset[Role], scope: AccessScope) -> _Held:
    return frozenset((person, role.value) for role in roles & FOUR_EYES_ROLES if scope == EVERYWHERE)


def _has_administrator(held: _Held) -> bool:
    return any(role == _ADMINISTRATOR for _, role in held)


def _has_two(held: _Held) -> bool:
    return _has_administrator(held) and len({person for person, _ in held}) > 1
