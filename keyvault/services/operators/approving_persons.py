"""The persons who decide on changes of operators: a key administrator requests one, and another person approves it.

Both are active, with the whole installation as scope. Until there are two such persons, the host's owner decides alone,
see `services.operator_changes`. Invited persons count: after two invitations the owner no longer decides alone.

An invited person cannot approve before setting a second factor. An approver made on a command line cannot approve
before that action is reviewed. So no change of an operator may leave fewer than two other persons.
"""

from functools import reduce
from operator import or_

from allauth.mfa.models import Authenticator
from django.conf import settings
from django.db.models import Exists, OuterRef, Q, QuerySet

from keyvault.access.roles import FOUR_EYES_ROLES, Role
from keyvault.access.scopes import EVERYWHERE, AccessScope
from keyvault.domain.errors import StateConflictError
from keyvault.domain.keystring import StringScope
from keyvault.models import BreakGlass, Operator, OperatorChange, OperatorChangeKind

_ADMINISTRATOR = Role.KEY_ADMINISTRATOR

_Held = frozenset[tuple[str, str]]
"""Pairs of a person and an approving role."""


def has_two_approving_persons() -> bool:
    """Whether one person could request a change of an operator and another one approve it, once both can sign in."""
    return _has_two(_list_held(_holders()))


def list_second_factor_rows() -> QuerySet[Authenticator]:
    """Return the second factors of all operators, without recovery codes, which replace a lost factor only."""
    rows: QuerySet[Authenticator] = Authenticator.objects.exclude(type=Authenticator.Type.RECOVERY_CODES)
    return rows


def has_factor_at_provider() -> Q:
    """Return the condition that an operator of the identity provider has signed in, with a second factor.

    Without its own second factor here, only one at the provider completes a sign-in. No operator meets the condition
    unless the provider may prove second factors.
    """
    provider = settings.IDENTITY_PROVIDER
    if provider is None or not provider.second_factors:
        return Q(pk__in=[])
    return Q(last_login__isnull=False, socialaccount__isnull=False)


def list_unreviewed_changes() -> QuerySet[OperatorChange]:
    """Return the changes after which their operators neither approve nor review yet.

    A person with a shell can claim the approval of an operator's first approving role, its scope, or a reset of its
    second factors. Several such operators could review each other's claims. A further role of a person who
    may already approve does not count, so that one claim cannot stop every approver.
    """
    unreviewed = BreakGlass.objects.filter(reviewed_at__isnull=True).values("subject")
    had_role = reduce(or_, (Q(roles_before__contains=role) for role in sorted(FOUR_EYES_ROLES)))
    rows: QuerySet[OperatorChange] = OperatorChange.objects.filter(change_id__in=unreviewed)
    return rows.exclude(had_role, kind=OperatorChangeKind.ROLES)


def require_approvers_remain(
    operator: Operator, *, roles: frozenset[Role], scope: AccessScope, keeps_factors: bool = True
) -> None:
    """Require that operators can still be changed with these roles, this scope and the factors of an operator.

    Call it inside the `recorded` block, before the change. Locks all active operators, so that concurrent removals are
    serialized. Persons who cannot sign in or approve yet do not replace one who can.

    Raises StateConflictError when the last key administrator, or the last second person, of the whole installation
    would be removed.
    """
    if not operator.roles & FOUR_EYES_ROLES:
        return
    list(Operator.objects.filter(is_active=True).select_for_update(no_key=True).order_by("pk").values_list("pk"))
    # After a lock wait PostgreSQL re-reads only the locked rows, not their groups: that takes a second query.
    can_sign_in = Operator.objects.filter(_has_factor(), pk=operator.pk).exists()
    holders = _holders()
    if can_sign_in:
        holders = holders.filter(_has_factor()).exclude(pk__in=list_unreviewed_changes().values("operator"))
    others = _list_held(holders.exclude(pk=operator.pk))
    before = others | _held_by(operator.person, operator.roles, operator.access_scope)
    after = others | (_held_by(operator.person, roles, scope) if keeps_factors else frozenset())
    if _has_administrator(before) and not _has_administrator(after):
        raise StateConflictError(
            f"Operator {operator.username} is the last active one with the role {_ADMINISTRATOR} for the whole "
            f"installation. Make another operator {_ADMINISTRATOR} first, who then accepts the invitation."
        )
    if can_sign_in and _has_two(before) and not _has_two(after):
        raise StateConflictError(
            f"Operator {operator.username} is one of the last two persons who can change operators under four eyes. "
            "Make another operator approver for the whole installation first, who then accepts the invitation. To lock "
            "the operator out immediately, reset its password (manage.py reset_operator_password), or remove it from "
            "its groups at the identity provider and end its sessions (manage.py end_operator_sessions)."
        )


def _holders() -> QuerySet[Operator]:
    rows: QuerySet[Operator] = Operator.objects.filter(
        is_active=True, scope_merchants__isnull=True, scope_environments=StringScope.ALL
    )
    return rows


def _has_factor() -> Q:
    """Return the condition that an operator has a second factor here, or has proved one at the identity provider."""
    return Q(Exists(list_second_factor_rows().filter(user=OuterRef("pk")))) | has_factor_at_provider()


def _list_held(holders: QuerySet[Operator]) -> _Held:
    rows = holders.filter(groups__name__in=FOUR_EYES_ROLES)
    return frozenset(rows.values_list("person", "groups__name"))


def _held_by(person: str, roles: frozenset[Role], scope: AccessScope) -> _Held:
    return frozenset((person, role.value) for role in roles & FOUR_EYES_ROLES if scope == EVERYWHERE)


def _has_administrator(held: _Held) -> bool:
    return any(role == _ADMINISTRATOR for _, role in held)


def _has_two(held: _Held) -> bool:
    return _has_administrator(held) and len({person for person, _ in held}) > 1
