"""When each operator last used each of its roles: a page opened, or an action taken, that the role permits.

Pages that every operator may open, and the operator's own sessions, count for no role. A permission that two of the
operator's roles have counts for both.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta

from django.db.models import Q

from keyvault.access.permissions import Permission
from keyvault.access.principals import OperatorPrincipal
from keyvault.access.roles import Role, roles_with
from keyvault.models import Operator, RoleUse
from keyvault.models.recording import require_recording

USE_INTERVAL = timedelta(days=1)
"""Minimum interval between two writes that record the use of a role."""

UNUSED_AFTER = timedelta(days=90)
"""Time without use after which the access review reports a role."""


def find_used_roles(operator: OperatorPrincipal, permissions: Iterable[Permission]) -> set[Role]:
    """Return the roles by which the operator has the permissions."""
    return {role for permission in permissions for role in roles_with(permission, operator.roles)}


def write_uses(username: str, roles: Iterable[Role], at: datetime) -> None:
    """Record that an operator used these of its roles. Writes a row at most once a day."""
    uses = RoleUse.objects.filter(operator__username=username, role__in=sorted(roles))
    stale = list(uses.filter(_is_older(at - USE_INTERVAL)).values_list("pk", flat=True))
    if stale:
        RoleUse.objects.filter(_is_older(at), pk__in=stale).update(last_used_at=at)


def is_unused(use: RoleUse, now: datetime) -> bool:
    """Whether the role was neither used nor granted within UNUSED_AFTER."""
    return now - (use.last_used_at or use.granted_at) >= UNUSED_AFTER


def replace_role_uses(operator: Operator, roles: frozenset[Role], now: datetime) -> None:
    """Add rows for new roles and delete those of removed ones, inside the `recorded` block of the change."""
    require_recording(RoleUse)
    uses = RoleUse.objects.filter(operator=operator)
    uses.exclude(role__in=roles).delete()
    known = set(uses.values_list("role", flat=True))
    RoleUse.objects.bulk_create(
        [RoleUse(operator=operator, role=role, granted_at=now) for role in sorted(roles) if role.value not in known]
    )


def _is_older(at: datetime) -> Q:
    return Q(last_used_at__isnull=True) | Q(last_used_at__lt=at)
